"""An answer while it is made."""

import queue
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from swiftlite.infer.generate import Decoding, decode, encode, run_batch, seeded
from swiftlite.infer.load import Target
from swiftlite.infer.prompts import Messages, Prompt


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
            with seeded(target, decoding.seed):
                run_batch(target, [ids], decoding.config(target, room), **hooks)
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
