"""What looks wrong with rows that can be trained all the same: counted and shown, never refused."""

import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from swiftlite.data.formats import Conversation
from swiftlite.data.render import IGNORE, Renderer, Sample
from swiftlite.data.row import EXCERPT, Row

LISTED = 20
SHOWN = 3
NO_END = "no end of turn trained"
EMPTY = "empty answer"
ECHO = "answer equal to prompt"
MOJIBAKE = "mojibake"
TWO_BOS = "more than one BOS"
DUPLICATE = "duplicate"

# UTF-8 read as Latin-1 or Windows-1252: a lead byte's letter and a continuation byte's sign behind it. Left out are signs that
# may well follow the letter in good text, as dashes and closing quotes do.
_SIGNS = "ÃÂâÐÑðï\ufffd"
_MOJIBAKE = re.compile(
    r"\ufffd|[ÃÐÑ][\x80-\x9f¡-©«-¶¸-º¼-¿Œœž\u0178ƒ†‡‰ˆ€]"
    r"|Â[\x80-\xa9\xab-\xba\xbc-\xbf]|â(?:\x80[\x80-\xbf]|€[™œ\x9d˜“”¦¢\x93\x94])|ðŸ|ð\x9f|ï»¿"
)


class Findings:
    """Grows with every kept row, by LISTED places a finding and 16 bytes a row."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.listed: dict[str, list[dict[str, str]]] = {}
        self.hashes = array("q")
        self.firsts = array("q")
        self.samples = 0

    def note(self, source: str, found: Iterable[tuple[str, str]]) -> None:
        """Counts what `suspicious` found in one row."""
        for kind, text in found:
            self.counts[kind] += 1
            rows = self.listed.setdefault(kind, [])
            if len(rows) < LISTED:
                rows.append({"source": source, "text": text})

    def absorb(self, other: "Findings") -> None:
        """Adds what was found in the rows that follow."""
        self.counts.update(other.counts)
        for kind, rows in other.listed.items():
            here = self.listed.setdefault(kind, [])
            here += rows[: LISTED - len(here)]
        self.hashes.extend(other.hashes)
        self.firsts.extend(array("q", (first + self.samples for first in other.firsts)))
        self.samples += other.samples

    def keep(self, samples: Sequence[Sample]) -> None:
        """Remembers what is trained of a row, so that its repetition is found."""
        self.hashes.append(hash(tuple((tuple(s.input_ids), tuple(s.labels)) for s in samples)))
        self.firsts.append(self.samples)
        self.samples += len(samples)

    def as_dict(self, source_of: Callable[[int], str]) -> dict[str, Any]:
        """Each finding with its count and first places.

        Args:
            source_of: the place of the n-th sample that was kept.
        """
        found: dict[str, Any] = {kind: {"count": n, "rows": self.listed[kind]} for kind, n in self.counts.items()}
        again, first = _repeated(self.hashes)
        if len(again):
            pairs = zip(again[:LISTED].tolist(), first[:LISTED].tolist(), strict=True)
            rows = [{"source": source_of(self.firsts[i]), "same_as": source_of(self.firsts[k])} for i, k in pairs]
            found[DUPLICATE] = {"count": len(again), "rows": rows}
        return found


def suspicious(row: Row, conv: Conversation, samples: Sequence[Sample], renderer: Renderer) -> list[tuple[str, str]]:
    """What looks wrong with a row, as (kind, text).

    Args:
        samples: of the whole row, before any cut.
    """
    found, texts = [], [text for text in _texts(conv) if text]
    # Rows made of ids end as their maker wanted.
    if conv.kind != "tokens" and not all(_closed(s, conv, renderer) for s in samples):
        found.append((NO_END, row.excerpt))
    if any(not answer.strip() for _, answer in _exchanges(conv)):
        found.append((EMPTY, row.excerpt))
    if any(asked.strip() == answer.strip() != "" for asked, answer in _exchanges(conv)):
        found.append((ECHO, row.excerpt))
    broken = next(filter(None, map(_broken, texts)), None)
    if broken:
        found.append((MOJIBAKE, broken))
    if any(_two_bos(texts, s, renderer) for s in samples):
        found.append((TWO_BOS, row.excerpt))
    return found


def _closed(sample: Sample, conv: Conversation, renderer: Renderer) -> bool:
    """Whether the last trained token, but for white space, tells the model to stop.

    Where no turn is proven, in plain text or when everything is trained, any control token will do: what other rows prove must
    not decide over this one.
    """
    proven = conv.kind == "chat" and renderer.train_on != "all"
    ends = renderer.stop_ids if proven else renderer.control_ids
    for label in reversed(sample.labels):
        if label in ends:
            return True
        if label != IGNORE and str(renderer.tokenizer.decode([label])).strip():
            return False
    return True


def lines(report: dict[str, Any]) -> list[str]:
    """The findings of a data report, one short line each."""
    shown = []
    for kind, found in report["findings"].items():
        places = [r["source"] + (f" = {r['same_as']}" if "same_as" in r else "") for r in found["rows"][:SHOWN]]
        shown.append(f"suspicious: {found['count']:,} x {kind}: {', '.join(places)}" + ", ..." * (found["count"] > SHOWN))
    return shown


def one_line(reports: dict[str, dict[str, Any]]) -> list[str]:
    """The findings of all sets of a run in one line, or none."""
    sets = [
        f"{name}: " + ", ".join(f"{found['count']:,} x {kind}" for kind, found in report["findings"].items())
        for name, report in reports.items()
        if report["findings"]
    ]
    return [f"suspicious rows in {'; '.join(sets)} (data_report.json says which)"] if sets else []


def _repeated(hashes: "array[int]") -> tuple[Any, Any]:
    """Rows [n] that repeat an earlier one, ascending, and the first row [n] that each repeats."""
    _, first, group = np.unique(np.frombuffer(hashes, dtype=np.int64), return_index=True, return_inverse=True)
    earliest = first[group]
    again = np.flatnonzero(earliest != np.arange(len(earliest)))
    return again, earliest[again]


def _texts(conv: Conversation) -> Iterator[str]:
    yield from (conv.prompt, conv.completion, conv.text)
    for message in conv.messages:
        yield message["content"]


def _exchanges(conv: Conversation) -> Iterator[tuple[str, str]]:
    """What was asked and what was answered, in words; a turn that calls tools or only reasons has another kind of answer."""
    if conv.kind == "completion":
        yield conv.prompt, conv.completion
    for before, message in zip([None, *conv.messages], conv.messages, strict=False):
        if message["role"] == "assistant" and message.keys() <= {"role", "content"}:
            yield before["content"] if before and before["role"] == "user" else "", message["content"]


def _broken(text: str) -> str | None:
    """The place where a text's encoding went wrong."""
    if text.isascii() or not any(sign in text for sign in _SIGNS):
        return None
    found = _MOJIBAKE.search(text)
    return text[max(0, found.start() - EXCERPT // 2) : found.start() + EXCERPT // 2] if found else None


def _two_bos(texts: Sequence[str], sample: Sample, renderer: Renderer) -> bool:
    """Two at the start, or one that the row itself spells; templates may well write one before every turn."""
    bos, token = renderer.tokenizer.bos_token_id, renderer.tokenizer.bos_token
    if bos is None or sample.input_ids[:2] == [bos, bos]:
        return bos is not None
    return sample.input_ids.count(bos) > 1 and any(token in text for text in texts)
