"""Answers: batches that equal single answers, streaming, and nothing of prompt or padding in the output."""

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from swiftlite.data.formats import RowError
from swiftlite.infer.load import Target
from swiftlite.infer.prompts import Messages, Prompt, RawText, read_prompts, write_answers
from swiftlite.models.tokenizer import pad_id
from swiftlite.recipe.errors import DataError, RecipeError

__all__ = ["Answer", "Decoding", "complete", "encode", "generate", "read_prompts", "stream", "stream_ids", "write_answers"]


@dataclass(frozen=True)
class Answer:
    """`token_ids` are the new tokens, with the stop token where there is one; `text` is without special tokens."""

    text: str
    token_ids: list[int]
    prompt_ids: list[int]
    finish: Literal["stop", "length"]


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen: temperature 0 takes the likeliest, else they are drawn, from the likeliest that make up `top_p`."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, fits, what in (
            ("max_new_tokens", self.max_new_tokens >= 1, "1 or more"),
            ("temperature", self.temperature >= 0, "0 or above"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
        ):
            if not fits:
                raise RecipeError(f"{getattr(self, name)} is not {what}.", where=name)

    def config(self, target: Target, new_tokens: int) -> GenerationConfig:
        pad, stops = pad_id(target.tokenizer), sorted(target.stop_ids) or None
        chosen: dict[str, Any] = {"do_sample": False}
        if self.temperature > 0:
            chosen = {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}
        return GenerationConfig(max_new_tokens=new_tokens, eos_token_id=stops, pad_token_id=pad, **chosen)


def generate(
    target: Target,
    prompts: Sequence[Messages | str | Prompt],
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    batch_size: int = 8,
    seed: int | None = None,
    raw: bool = False,
    system: str | None = None,
) -> list[Answer]:
    """Answers prompts, in their order.

    Args:
        prompts: messages, texts, or rows of `read_prompts`. A text is a user's message; RawText, and with `raw` every text, is given
            as it stands.
        batch_size: rows of one forward pass. It does not change greedy answers but for rounding; it does change drawn ones.
        seed: of drawn tokens; None: torch's state.
        system: system prompt for messages that have none.

    Raises:
        DataError: a prompt that the template refuses, is empty, or leaves no room for an answer.
        RecipeError: a setting out of range.
    """
    decoding = Decoding(max_new_tokens, temperature, top_p, seed)
    ids = [encode(target, prompt, raw=raw, system=system) for prompt in prompts]
    return complete(target, ids, decoding, batch_size)


def encode(target: Target, prompt: Messages | str | Prompt, *, raw: bool = False, system: str | None = None) -> list[int]:
    """The ids that the model is given, see `generate`: with its template, those in front of the answer in a training row.

    Raises:
        DataError: as `generate`.
    """
    row = prompt if isinstance(prompt, Prompt) else Prompt(prompt if isinstance(prompt, str) else list(prompt))
    given: Any = row.prompt
    if isinstance(given, str) and not raw and not isinstance(given, RawText):
        given = [{"role": "user", "content": given}]
    if isinstance(given, str):
        if system:
            fix = "Give messages, or leave the system prompt out."
            raise DataError("a raw text takes no system prompt", where=row.source, fix=fix)
    elif raw:
        raise DataError("raw mode takes texts, this prompt has messages", where=row.source, fix="Leave raw mode.")
    elif system and (not given or given[0].get("role") != "system"):
        given = [{"role": "system", "content": system}, *given]
    try:
        ids = target.renderer.prompt(str(given) if isinstance(given, str) else given, row.tools)
    except RowError as error:
        raise DataError(str(error), where=row.source) from error
    if not ids:
        raise DataError("an empty prompt", where=row.source, fix="Give at least one token.")
    if target.positions is not None and len(ids) >= target.positions:
        what = f"the prompt has {len(ids)} tokens, the model takes {target.positions} with the answer"
        raise DataError(what, where=row.source, fix="Shorten it.")
    return ids


def complete(target: Target, prompts: Sequence[list[int]], decoding: Decoding, batch_size: int = 8) -> list[Answer]:
    """Answers to prompts of ids, in their order. Prompts of like lengths share a batch."""
    answers: dict[int, Answer] = {}
    with _seeded(decoding.seed):
        for rows, room in _batches(target, prompts, decoding.max_new_tokens, batch_size):
            outs = _run(target, [prompts[i] for i in rows], decoding.config(target, room))
            answers |= {i: _answer(target, prompts[i], out) for i, out in zip(rows, outs, strict=True)}
    return [answers[i] for i in range(len(prompts))]


def _batches(target: Target, prompts: Sequence[list[int]], wanted: int, size: int) -> Iterator[tuple[list[int], int]]:
    """Groups of prompt numbers with the new tokens that each row has room for."""
    # A recurrent state takes in padding too, so there only prompts of one length go together.
    same_length = getattr(target.model, "_is_stateful", False)
    batch: list[int] = []
    for i in sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i)):
        room = wanted if target.positions is None else min(wanted, target.positions - len(prompts[i]))
        if batch and (len(batch) == size or room < wanted or (same_length and len(prompts[i]) != len(prompts[batch[0]]))):
            yield batch, wanted
            batch = []
        if room < wanted:  # near the model's end a batch would cut the answers of its shorter rows
            yield [i], room
        else:
            batch.append(i)
    if batch:
        yield batch, wanted


def _run(target: Target, rows: Sequence[list[int]], config: GenerationConfig, **hooks: Any) -> list[list[int]]:
    """New ids of one batch, padded behind their stop tokens."""
    width = max(map(len, rows))
    # Padding stands on the left, so that answers follow their prompts; positions are counted from the mask.
    ids = torch.full((len(rows), width), pad_id(target.tokenizer), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows):
        ids[row, width - len(tokens) :] = torch.tensor(tokens)
        mask[row, width - len(tokens) :] = 1
    device = target.model.device
    out: Tensor = target.model.generate(input_ids=ids.to(device), attention_mask=mask.to(device), generation_config=config, **hooks)
    return [[int(t) for t in row[width:].tolist()] for row in out]


def _answer(target: Target, prompt: list[int], new: list[int]) -> Answer:
    end = next((i for i, token in enumerate(new) if token in target.stop_ids), None)
    text = decode(target.tokenizer, new[:end])
    return Answer(text, new if end is None else new[: end + 1], prompt, "length" if end is None else "stop")


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Text of an answer, without special tokens."""
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class _seeded:
    """Draws from `seed` inside, and leaves torch's generators as they were; does nothing for None."""

    def __init__(self, seed: int | None) -> None:
        self.seed, self.fork = seed, torch.random.fork_rng(enabled=seed is not None)

    def __enter__(self) -> None:
        self.fork.__enter__()
        if self.seed is not None:
            torch.manual_seed(self.seed)

    def __exit__(self, *exc: Any) -> None:
        self.fork.__exit__(*exc)


def stream(
    target: Target,
    prompt: Messages | str | Prompt,
    *,
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    raw: bool = False,
    system: str | None = None,
) -> Iterator[str]:
    """The answer to one prompt piece by piece, as it is made; joined, the pieces are the text of `generate`.

    Raises:
        as `generate`, at once.
    """
    decoding = Decoding(max_new_tokens, temperature, top_p, seed)
    return stream_ids(target, encode(target, prompt, raw=raw, system=system), decoding)


def stream_ids(target: Target, ids: list[int], decoding: Decoding) -> Iterator[str]:
    """As `stream`, for a prompt of ids. Closing the iterator stops the model after the running step."""
    tokens: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()
    left = threading.Event()
    room = decoding.max_new_tokens if target.positions is None else min(decoding.max_new_tokens, target.positions - len(ids))

    def work() -> None:
        try:
            hooks = {"streamer": _Feed(tokens), "stopping_criteria": StoppingCriteriaList([_Left(left)])}
            with _seeded(decoding.seed):
                _run(target, [ids], decoding.config(target, room), **hooks)
        except BaseException as error:  # raised again where it is awaited
            tokens.put(error)
        tokens.put(None)

    thread, text = threading.Thread(target=work, daemon=True), _Text(target.tokenizer)
    thread.start()
    try:
        while (token := tokens.get()) is not None:
            if isinstance(token, BaseException):
                raise token
            if token not in target.stop_ids and (piece := text.add(token)):
                yield piece
        if piece := text.rest():
            yield piece
    finally:
        left.set()
        thread.join()


class _Feed(BaseStreamer):
    """Hands new tokens on; the first thing that transformers puts is the prompt."""

    def __init__(self, tokens: "queue.SimpleQueue[Any]") -> None:
        self.tokens, self.prompt_seen = tokens, False

    def put(self, value: Tensor) -> None:
        for token in value.flatten().tolist() if self.prompt_seen else []:
            self.tokens.put(int(token))
        self.prompt_seen = True

    def end(self) -> None:
        pass


class _Left(StoppingCriteria):
    """Nobody listens any more."""

    def __init__(self, left: threading.Event) -> None:
        self.left = left

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), self.left.is_set(), device=input_ids.device, dtype=torch.bool)


class _Text:
    """Text of a growing row of tokens. A piece is given once its characters are whole; earlier tokens give it its spaces."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.ids, self.start, self.done = tokenizer, list[int](), 0, 0

    def add(self, token: int) -> str:
        self.ids.append(token)
        return self._new(whole=True)

    def rest(self) -> str:
        return self._new(whole=False)

    def _new(self, whole: bool) -> str:
        before, now = (decode(self.tokenizer, self.ids[self.start : end]) for end in (self.done, len(self.ids)))
        if len(now) <= len(before) or (whole and now.endswith("\ufffd")):
            return ""
        self.start, self.done = self.done, len(self.ids)
        return now[len(before) :]
