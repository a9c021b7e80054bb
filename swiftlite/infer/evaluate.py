"""Scores on rows of data: the loss that training would report, and whether answers are right word for word."""

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftlite.data.collate import collate
from swiftlite.data.prepare import prepare
from swiftlite.data.read import read_rows
from swiftlite.data.render import IGNORE, Sample
from swiftlite.infer.generate import Decoding, complete, decode, require_positive
from swiftlite.infer.load import Target
from swiftlite.models import head
from swiftlite.models.families.lookup import family_for
from swiftlite.models.tokenizer import pad_id
from swiftlite.recipe import tables
from swiftlite.recipe.errors import RecipeError, nearest
from swiftlite.recipe.schema import DataSection, DataSource

TRAIN_ON: tuple[str, ...] = get_args(DataSection.model_fields["train_on"].annotation)


def evaluate(
    target: Target,
    path: str | Path,
    *,
    format: str | None = None,
    columns: Mapping[str, str] | None = None,
    train_on: str | None = None,
    max_length: int | None = None,
    batch_size: int = 8,
    generate: bool = True,
    max_new_tokens: int = 256,
    examples: int = 5,
) -> dict[str, Any]:
    """Scores a target on rows, rendered and masked as in training. What is not given is taken from the target's run.

    The loss is the mean over all trained tokens, and exact match the share of rows whose last trained turn is what the model
    answers greedily to the ids in front of it, but for white space around both. Neither depends on `batch_size` but for rounding.

    Args:
        generate: False: loss only.
        max_new_tokens: tokens of an answer at most.
        examples: rows to show with prompt, expected text and answer.

    Returns:
        target, data, loss, perplexity, rows, tokens, trained_tokens, dropped {reason: rows}, exact_match (None where no row has a
        prompt and an answer), matched, answered, examples [{source, prompt, expected, answer, match}]. JSON-able.

    Raises:
        RecipeError: an unknown format or train_on, or a number below 1.
        DataError: rows that cannot be used; names file and line.
    """
    check_settings(
        path, format=format, train_on=train_on, max_length=max_length, batch_size=batch_size, max_new_tokens=max_new_tokens
    )
    given = {"format": format, "columns": dict(columns) if columns is not None else None, "train_on": train_on}
    section = (target.data or DataSection()).model_copy(update={key: value for key, value in given.items() if value is not None})
    longest = max_length or (target.data.max_length if target.data else target.positions) or section.max_length
    renderer = copy.copy(target.renderer)
    renderer.train_on = section.train_on
    prepared = prepare(
        [DataSource(path=str(path))], section, renderer, max_length=min(longest, target.positions or longest), seed=0
    )
    total, trained = nll(target, prepared.samples, batch_size)
    scores: dict[str, Any] = {
        "target": target.description,
        "data": str(path),
        "loss": total / trained,
        "perplexity": math.exp(min(total / trained, 700.0)),
        "rows": len(prepared.samples),
        "tokens": sum(len(sample.input_ids) for sample in prepared.samples),
        "trained_tokens": trained,
        "dropped": prepared.report["dropped"],
    }
    return scores | (_matches(target, prepared.samples, batch_size, max_new_tokens, examples) if generate else {})


def check_settings(path: str | Path, *, format: str | None, train_on: str | None, **numbers: int | None) -> None:
    """Refuses what can be refused without a model: settings, and data that is not there.

    Raises:
        RecipeError, DataError: as `evaluate`.
    """
    require_positive(**numbers)
    for key, name, known in (("format", format, ("auto", *tables.FORMATS)), ("train_on", train_on, TRAIN_ON)):
        if name is not None and name not in known:
            raise RecipeError(f"'{name}' is unknown.{nearest(name, known)}", where=key, fix=f"Known: {', '.join(known)}.")
    next(iter(read_rows(DataSource(path=str(path)))), None)


@torch.no_grad()
def nll(target: Target, samples: Sequence[Sample], batch_size: int) -> tuple[float, int]:
    """Sum of -log p over the trained tokens of all rows, and their number."""
    model, family = target.model, family_for(target.model.config)
    spread = len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1
    rows = sorted(samples, key=lambda sample: len(sample.input_ids))
    total, checked = 0.0, False
    for start in range(0, len(rows), batch_size):
        batch = {k: v.to(model.device) for k, v in collate(rows[start : start + batch_size], pad_id(target.tokenizer)).items()}
        labels = batch.pop("labels")
        batch = family.inputs(batch)
        if spread:
            total += float(_plain_sum(model, batch, labels))
            continue
        if not checked:  # our head against the model's own, on the first rows
            head.attach(model)
            head.verify(model, batch)
            checked = True
        total += float(model.nll_sum(batch, labels))
    return total, sum(sample.trained for sample in rows)


def _plain_sum(model: Any, batch: dict[str, Tensor], labels: Tensor) -> Tensor:
    """By the model's own call: of one spread over devices, only that brings the logits back to the labels."""
    keep = labels[:, 1:] != IGNORE
    logits = model(**batch, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits[keep.to(logits.device)].float(), labels[:, 1:][keep].to(logits.device), reduction="sum")


def _matches(target: Target, samples: Sequence[Sample], batch_size: int, max_new_tokens: int, examples: int) -> dict[str, Any]:
    spans = [(sample, *span) for sample in samples if (span := last_answer(sample)) is not None]
    if not spans:
        return {"exact_match": None, "matched": 0, "answered": 0, "examples": []}
    texts = [_text(target, sample.input_ids[start:end]) for sample, start, end in spans]
    # A wrong answer need not be heard to its end: twice the tokens leave room for another spelling of the right one.
    enough = 2 * max(end - start for _, start, end in spans) + 16
    prompts = [sample.input_ids[:start] for sample, start, _ in spans]
    answers = complete(target, prompts, Decoding(min(max_new_tokens, enough)), batch_size)
    hits = [answer.text.strip() == text for answer, text in zip(answers, texts, strict=True)]
    shown = [
        {
            "source": spans[i][0].source,
            "prompt": target.tokenizer.decode(prompts[i]),
            "expected": texts[i],
            "answer": answers[i].text.strip(),
            "match": hits[i],
        }
        for i in range(min(examples, len(spans)))
    ]
    return {"exact_match": sum(hits) / len(hits), "matched": sum(hits), "answered": len(hits), "examples": shown}


def last_answer(sample: Sample) -> tuple[int, int] | None:
    """Where the last trained turn starts and ends, stop token included; None for rows that are trained from their start."""
    end = max((t + 1 for t, label in enumerate(sample.labels) if label != IGNORE), default=0)
    start = max((t + 1 for t, label in enumerate(sample.labels[:end]) if label == IGNORE), default=0)
    return (start, end) if 1 < start < end else None  # the first token is never trained, so 1 is the start


def _text(target: Target, ids: list[int]) -> str:
    while ids and ids[-1] in target.stop_ids:
        ids = ids[:-1]
    return decode(target.tokenizer, ids).strip()
