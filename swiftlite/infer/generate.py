"""Answers: batches that equal single answers, and nothing of prompt or padding in the output."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from swiftlite.data.formats import RowError
from swiftlite.infer.load import Target
from swiftlite.infer.prompts import Messages, Prompt, RawText, read_prompts, write_answers
from swiftlite.models.tokenizer import pad_id
from swiftlite.recipe.errors import DataError, RecipeError

__all__ = [
    "Answer",
    "Decoding",
    "check_settings",
    "complete",
    "decode",
    "encode",
    "generate",
    "read_prompts",
    "require_positive",
    "run_batch",
    "seeded",
    "write_answers",
]


@dataclass(frozen=True)
class Answer:
    """`token_ids` are the new tokens, with the stop token where there is one; `text` is without special tokens."""

    text: str
    token_ids: list[int]
    prompt_ids: list[int]
    finish: Literal["stop", "length"]


def require_positive(**settings: int | None) -> None:
    """Raises RecipeError for a setting below 1."""
    for name, value in settings.items():
        if value is not None and value < 1:
            raise RecipeError(f"{value} is not 1 or more.", where=name)


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
        prompts: messages, texts, or rows of `read_prompts`. A text is a user's message; RawText, and with `raw` every text,
            is given as it stands.
        batch_size: rows of one forward pass. It does not change greedy answers but for rounding; it does change drawn ones.
        seed: of drawn tokens; None: torch's state.
        system: system prompt for messages that have none.

    Raises:
        DataError: a prompt that the template refuses, is empty, or leaves no room for an answer.
        RecipeError: a setting out of range.
    """
    decoding = check_settings(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, batch_size=batch_size
    )
    ids = [encode(target, prompt, raw=raw, system=system) for prompt in prompts]
    return complete(target, ids, decoding, batch_size)


def check_settings(*, max_new_tokens: int, temperature: float, top_p: float, seed: int | None, batch_size: int) -> Decoding:
    """How tokens are chosen, by settings that need no model.

    Raises:
        RecipeError: one is out of range.
    """
    require_positive(batch_size=batch_size)
    return Decoding(max_new_tokens, temperature, top_p, seed)


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
    with seeded(target, decoding.seed):
        for rows, room in _batches(target, prompts, decoding.max_new_tokens, batch_size):
            outs = run_batch(target, [prompts[i] for i in rows], decoding.config(target, room))
            answers |= {i: _answer(target, prompts[i], out) for i, out in zip(rows, outs, strict=True)}
    return [answers[i] for i in range(len(prompts))]


def _batches(target: Target, prompts: Sequence[list[int]], wanted: int, size: int) -> Iterator[tuple[list[int], int]]:
    """Groups of prompt numbers with the new tokens that each row has room for."""
    # A state kept outside transformers' caches, as RWKV's, takes in padding and mixes rows: there every prompt goes alone.
    size = 1 if "state" in inspect.signature(target.model.forward).parameters else size
    batch: list[int] = []
    for i in sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i)):
        room = wanted if target.positions is None else min(wanted, target.positions - len(prompts[i]))
        if batch and (len(batch) == size or room < wanted):
            yield batch, wanted
            batch = []
        if room < wanted:  # near the model's end a batch would cut the answers of its shorter rows
            yield [i], room
        else:
            batch.append(i)
    if batch:
        yield batch, wanted


def run_batch(target: Target, rows: Sequence[list[int]], config: GenerationConfig, **hooks: Any) -> list[list[int]]:
    """New ids of one batch, padded behind their stop tokens."""
    width = max(map(len, rows))
    # Padding stands on the left, so that answers follow their prompts; positions are counted from the mask.
    ids = torch.full((len(rows), width), pad_id(target.tokenizer), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows):
        ids[row, width - len(tokens) :] = torch.tensor(tokens)
        mask[row, width - len(tokens) :] = 1
    device = target.model.device
    out: Tensor = target.model.generate(
        input_ids=ids.to(device), attention_mask=mask.to(device), generation_config=config, **hooks
    )
    return [[int(t) for t in row[width:].tolist()] for row in out]


def _answer(target: Target, prompt: list[int], new: list[int]) -> Answer:
    end = next((i for i, token in enumerate(new) if token in target.stop_ids), None)
    text = decode(target.tokenizer, new[:end])
    return Answer(text, new if end is None else new[: end + 1], prompt, "length" if end is None else "stop")


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Text of an answer, without special tokens."""
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@contextmanager
def seeded(target: Target, seed: int | None) -> Iterator[None]:
    """Draws from `seed` inside, and leaves torch's generators as they were; does nothing for None."""
    if seed is None:
        yield
        return
    device = target.model.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
