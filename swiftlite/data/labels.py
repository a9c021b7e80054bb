"""From trained characters to trained tokens."""

from bisect import bisect_left
from collections.abc import Sequence
from operator import eq

from tokenizers import Encoding

IGNORE = -100

Span = tuple[int, int]  # characters [start, end)
# The characters of each token, or an encoding that knows them, whose tokens are in the order of their text.
Offsets = Sequence[Span] | Encoding


def label_spans(text: str, ids: list[int], offsets: Offsets, spans: Sequence[Span]) -> list[int]:
    """Labels that train the tokens of `spans` (ascending) and no other.

    A token counts by its first character that is not white space: a merge over a border (a header's newline with an
    answer's) belongs to the side that its visible text is on.
    """
    if isinstance(offsets, Encoding):
        # Two tokens a span are looked at where they lie; all offsets as Python objects would cost more than all else here.
        found = [_token_at(text, offsets, len(ids), border) for span in spans for border in span]
        borders = [t for t in found if t is not None]
        if len(borders) == len(found):
            return _labelled(ids, borders)
        offsets = offsets.offsets
    starts, ends = map(list, zip(*offsets, strict=True)) if offsets else ([], [])
    if any(map(eq, starts, ends)):
        # Byte-level tokenizers with trim_offsets give a token of white space no width, at its end.
        edge = 0
        for t, (start, end) in enumerate(offsets):
            starts[t], edge = (edge if start == end else start), max(edge, end)
    if starts == sorted(starts) and ends == sorted(ends):
        return _labelled(ids, [_first_token(text, starts, ends, border) for span in spans for border in span])
    labels, span = [IGNORE] * len(ids), 0
    for t, (start, end) in enumerate(zip(starts, ends, strict=True)):
        at = _visible(text, start, end)
        while span < len(spans) and at >= spans[span][1]:
            span += 1
        if span == len(spans):
            break
        if at >= spans[span][0]:
            labels[t] = ids[t]
    return labels


def _labelled(ids: list[int], borders: Sequence[int]) -> list[int]:
    """Labels from borders in tokens: the first of a span, the first behind it, and so on."""
    labels = [IGNORE] * len(ids)
    for first, behind in zip(borders[::2], borders[1::2], strict=True):
        labels[first:behind] = ids[first:behind]
    return labels


def _visible(text: str, start: int, end: int) -> int:
    """The first character of text[start:end] that is not white space, or `start`."""
    word = text[start:end]
    white = len(word) - len(word.lstrip())
    return start + white if white < len(word) else start


def _first_token(text: str, starts: Sequence[int], ends: Sequence[int], border: int) -> int:
    """The first token that counts as behind character `border` or at it, of tokens in the order of their text."""
    t = bisect_left(ends, border)
    while t < len(ends) and _visible(text, starts[t], ends[t]) < border:
        t += 1
    return t


def _token_at(text: str, encoding: Encoding, count: int, border: int) -> int | None:
    """As `_first_token`, or None where only all offsets together tell it: `border` is in no token, or at one without width."""
    if border == 0 or not count:
        return 0
    if border == len(text):
        last = encoding.token_to_chars(count - 1)
        return count if last and last[0] < last[1] == border else None
    t = encoding.char_to_token(border)
    while t is not None and t < count:
        place = encoding.token_to_chars(t)
        if place is None or place[0] == place[1]:
            return None
        if _visible(text, *place) >= border:
            return t
        t += 1
    return t
