"""Prompts from a file, and answers into one. A column means here what it means in training data."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from swiftlite.data.formats import ALPACA, MESSAGES, SHAREGPT, TEXT, Format, RowError, conversation
from swiftlite.data.read import BadRow, Row, read_rows
from swiftlite.recipe.errors import DataError
from swiftlite.recipe.schema import DataSource

Messages = Sequence[dict[str, Any]]


class RawText(str):
    """A prompt that the model is given as it stands, without its chat template."""


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        prompt: messages, or a text.
        source: `file:line`.
        row: the row it came from.
        expected: the answer that the row holds.
    """

    prompt: list[dict[str, Any]] | str
    tools: list[dict[str, Any]] | None = None
    source: str | None = None
    row: Mapping[str, Any] = field(default_factory=dict)
    expected: str | None = None


class Said(Protocol):
    """The fields of an answer that are written."""

    @property
    def text(self) -> str: ...

    @property
    def finish(self) -> str: ...


def read_prompts(path: str | Path) -> list[Prompt]:
    """Prompts of a JSONL file (also json, csv, parquet).

    `messages`, `conversations`, `instruction` and a `prompt` of messages are rendered by the chat template; an assistant's
    answer at their end is left out and kept as `expected`. `prompt` and `text` of plain text are given as they stand.

    Raises:
        DataError: no such file, no rows, or a row that is no prompt; names file and line.
    """
    if not Path(path).expanduser().is_file():
        raise DataError("no such file", where=path, fix="Name a JSONL file with prompt, text or messages in each row.")
    prompts = [_prompt(row) for row in read_rows(DataSource(path=str(path)))]
    if not prompts:
        raise DataError("there are no rows", where=path)
    return prompts


def as_rows(prompts: Sequence[str | Messages]) -> list[Prompt]:
    """Prompts of a list, each with the row that a file would have held."""
    return [Prompt(p, row={"prompt": p}) if isinstance(p, str) else Prompt(list(p), row={"messages": list(p)}) for p in prompts]


def _prompt(row: Row | BadRow) -> Prompt:
    if isinstance(row, BadRow):
        raise DataError(f"{row.kind}: {row.reason}. Text: {row.excerpt}", where=row.source)
    try:
        fmt, value, expected = _reading(row.value)
        conv = conversation(replace(row, value=value), fmt, {})
        if conv.kind != "chat":
            if value.get("system"):
                raise RowError("a raw text", "takes no system prompt; use messages")
            return Prompt(RawText(conv.text), None, row.source, row.value, expected)
        messages = conv.messages
        if messages[-1]["role"] == "assistant":
            expected = messages[-1]["content"] if fmt is not ALPACA or "output" in row.value else None
            messages = messages[:-1]
        if not messages:
            raise RowError("no prompt", "there is nothing in front of the assistant's message")
        return Prompt(messages, conv.tools, row.source, row.value, expected)
    except RowError as error:
        raise DataError(f"{error}. Text: {row.excerpt}", where=row.source) from error


def _reading(row: Mapping[str, Any]) -> tuple[Format, dict[str, Any], str | None]:
    """How a row is read: the format, the columns it gets, and an answer that stands in a column of its own."""
    completion = row.get("completion")
    expected = completion if isinstance(completion, str) else None
    if isinstance(completion, list) and completion and isinstance(completion[-1], dict):
        expected = completion[-1].get("content")
    for column, fmt in (("messages", MESSAGES), ("conversations", SHAREGPT), ("instruction", ALPACA)):
        if column in row:
            return fmt, {"output": "", **row}, None
    if isinstance(row.get("prompt"), list):
        return MESSAGES, {**row, "messages": row["prompt"]}, expected
    for column in ("prompt", "text"):
        if column in row:
            return TEXT, {**row, "text": row[column]}, expected
    raise RowError(
        "no prompt", f"none of messages, conversations, instruction, prompt, text is among the columns {', '.join(row)}"
    )


def write_answers(path: str | Path | None, rows: Sequence[Prompt], answers: Sequence[Said]) -> None:
    """One JSON line a prompt: its row with `answer` and `finish` (stop or length). The file appears whole or not at all.

    Args:
        path: the file, replaced where it exists; None: standard output.
    """
    lines = (
        json.dumps({**row.row, "answer": answer.text, "finish": answer.finish}, ensure_ascii=False, default=str) + "\n"
        for row, answer in zip(rows, answers, strict=True)
    )
    if path is None:
        sys.stdout.writelines(lines)
        return
    final = Path(path).expanduser()
    final.parent.mkdir(parents=True, exist_ok=True)
    part = final.with_name(f".{final.name}.part-{os.getpid()}")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.writelines(lines)
        part.replace(final)
    finally:
        part.unlink(missing_ok=True)
