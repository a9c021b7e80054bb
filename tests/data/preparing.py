"""Rows to samples as a recipe does it, for tests."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from swiftlite.data.prepare import Prepared, prepare
from swiftlite.data.render import IGNORE, Renderer, Sample
from swiftlite.recipe.schema import DataSection, DataSource
from tests.fixtures import tok

C1 = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "a?"},
    {"role": "assistant", "content": "b!"},
]


def chat(*contents: str, start: str = "user") -> list[dict[str, str]]:
    """Messages of the user and the assistant in turn."""
    roles = ("user", "assistant") if start == "user" else ("assistant", "user")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


def write(path: Path, rows: Sequence[Any]) -> Path:
    """JSON lines; a text is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), "utf-8")
    return path


def prep(
    path: Path, tokenizer: PreTrainedTokenizerBase | None = None, *, seed: int = 0, eval_split: float = 0, **keys: Any
) -> Prepared:
    """Prepares one file; `keys` are those of the data section."""
    data = DataSection(train=[DataSource(path=str(path))], **{"max_length": 256, **keys})
    renderer = Renderer(
        tokenizer or tok(),
        train_on=data.train_on,
        template_kwargs=data.template_kwargs,
        chat_template=data.chat_template,
        history_mismatch=data.history_mismatch,
        allow_control_tokens=data.allow_control_tokens,
    )
    return prepare(data.train, data, renderer, max_length=data.max_length, seed=seed, eval_split=eval_split)


def trained(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text whose tokens are trained; every label must be the id at its place."""
    assert all(label in (IGNORE, i) for i, label in zip(sample.input_ids, sample.labels, strict=True))
    return str(tokenizer.decode([label for label in sample.labels if label != IGNORE]))
