"""Rows over max_length: data.overlong drop, truncate, split or error."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from swiftlite.data.formats import Conversation, RowError
from swiftlite.data.render import IGNORE, Renderer, Sample

NO_TOKENS = "no trainable tokens"
TOO_LONG = "too long"


@dataclass(frozen=True)
class Fitted:
    """What is trained of a row: `samples`, none where it is dropped for `kind`; `cut` says what was left out of a kept row."""

    samples: list[Sample]
    cut: str = ""
    kind: str = ""
    detail: str = ""


def fit(conv: Conversation, samples: list[Sample], renderer: Renderer, overlong: str, limit: int) -> Fitted:
    """The samples of one row within `limit` tokens.

    Args:
        samples: the row as rendered.

    Raises:
        RowError: the row is too long and overlong is error, or a piece of it cannot be rendered.
    """
    longest = max(len(s.input_ids) for s in samples)
    if not any(s.trained for s in samples):
        return Fitted([], kind=NO_TOKENS, detail="no answer to train on")
    if longest <= limit:
        return Fitted([s for s in samples if s.trained])
    if overlong == "error":
        raise RowError(TOO_LONG, f"{longest} tokens, data.max_length is {limit}; data.overlong: drop, truncate or split goes on")
    if overlong == "truncate":
        kept, cut = [Sample(s.input_ids[:limit], s.labels[:limit], s.source) for s in samples], ""
    elif overlong == "split":
        kept, cut = _split(conv, samples, renderer, limit)
    else:
        kept, cut = [s for s in samples if len(s.input_ids) <= limit], ""
    trained = [s for s in kept if s.trained]
    if not trained:
        kind = f"{NO_TOKENS} left within max length {limit}" if kept else f"longer than max length {limit}"
        return Fitted([], kind=kind, detail=f"{longest} tokens")
    if overlong != "split":
        fitting = sum(len(s.input_ids) <= limit for s in samples)
        cut = f"{longest} tokens to max length {limit}"
        cut = cut if len(samples) == 1 else f"{fitting} of {len(samples)} turns fit {limit} tokens"
    return Fitted(trained, cut)


def fit_pair(samples: list[Sample], overlong: str, limit: int) -> Fitted:
    """Both samples of a pair within `limit` tokens, or neither; what is cut off is the end of an answer.

    Raises:
        RowError: the answers are the same tokens, or the pair is too long and overlong is error.
    """
    longest = max(len(s.input_ids) for s in samples)
    if not all(s.trained for s in samples):
        return Fitted([], kind=NO_TOKENS, detail="an answer has nothing to train on")
    if samples[0].input_ids == samples[1].input_ids:
        raise RowError("equal answers", "chosen and rejected are the same tokens")
    if longest <= limit:
        return Fitted(samples)
    if overlong == "error":
        raise RowError(TOO_LONG, f"{longest} tokens, data.max_length is {limit}; data.overlong: drop or truncate goes on")
    if overlong != "truncate":
        return Fitted([], kind=f"longer than max length {limit}", detail=f"{longest} tokens")
    kept = [Sample(s.input_ids[:limit], s.labels[:limit], s.source) for s in samples]
    if not all(s.trained for s in kept) or kept[0].input_ids == kept[1].input_ids:
        return Fitted([], kind=f"no difference left within max length {limit}", detail=f"{longest} tokens")
    return Fitted(kept, f"{longest} tokens to max length {limit}")


def _split(conv: Conversation, samples: list[Sample], renderer: Renderer, limit: int) -> tuple[list[Sample], str]:
    """Pieces of a row, and what was left out. Prompt/completion rows have no place to be split at."""
    if conv.kind in ("text", "tokens"):
        return [piece for s in samples for piece in _chunks(s, limit)], ""
    if conv.kind == "chat" and conv.completion_from is None:
        return _by_exchange(conv, renderer, limit)
    return [], ""


def _chunks(sample: Sample, limit: int) -> Iterator[Sample]:
    for start in range(0, len(sample.input_ids), limit):
        labels = sample.labels[start : start + limit]
        yield Sample(sample.input_ids[start : start + limit], [IGNORE, *labels[1:]], sample.source)


def _by_exchange(conv: Conversation, renderer: Renderer, limit: int) -> tuple[list[Sample], str]:
    """Pieces of as many whole exchanges as fit, from the start, each behind the system prompt but without what came before it.

    An exchange that does not fit alone is left out.
    """
    exchanges = _exchanges(conv.messages)
    system = [m for m in conv.messages[:1] if m["role"] == "system"]
    pieces: list[list[Sample]] = []
    messages: list[dict[str, Any]] = []
    left_out = 0
    for exchange in exchanges:
        rendered = _within(conv, [*system, *messages, *exchange], renderer, limit)
        if rendered and messages:
            pieces[-1], messages = rendered, messages + exchange
            continue
        rendered = rendered or (_within(conv, [*system, *exchange], renderer, limit) if messages else None)
        messages = exchange if rendered else []
        if rendered:
            pieces.append(rendered)
        left_out += not rendered
    if renderer.train_on == "last" and not messages:
        pieces = []
    kept = pieces[-1:] if renderer.train_on == "last" else pieces
    cut = f"{left_out} of {len(exchanges)} exchanges do not fit {limit} tokens" if left_out else ""
    return [s for piece in kept for s in piece], cut


def _within(conv: Conversation, messages: list[dict[str, Any]], renderer: Renderer, limit: int) -> list[Sample] | None:
    samples = renderer.samples(replace(conv, messages=messages))
    return samples if all(len(s.input_ids) <= limit for s in samples) else None


def _exchanges(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Messages behind the system prompt, parted before each question that follows an answer."""
    parted: list[list[dict[str, Any]]] = [[]]
    for message in messages[1:] if messages[0]["role"] == "system" else messages:
        if message["role"] == "user" and any(m["role"] == "assistant" for m in parted[-1]):
            parted.append([])
        parted[-1].append(message)
    return parted
