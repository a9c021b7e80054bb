"""Row formats: what the columns of a row mean. One `Format` a line of the FORMATS table; found by columns, never guessed."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from swiftlite.data.read import Row
from swiftlite.recipe import tables
from swiftlite.recipe.errors import DataError, RecipeError, nearest

ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
TYPES: dict[type, str] = {
    str: "text",
    int: "a number",
    float: "a number",
    bool: "true/false",
    list: "a list",
    dict: "an object",
    type(None): "null",
}
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
# Flags that say which messages to train. Read as plain rows they would be ignored without a word.
TRAIN_FLAGS = ("loss", "loss_weight", "train", "weight")


class RowError(Exception):
    """One row cannot be used.

    Args:
        kind: what is wrong with rows of this kind, in a few words; rows are counted under it.
        detail: what is wrong with this row.
    """

    def __init__(self, kind: str, detail: str) -> None:
        self.kind, self.detail = kind, detail
        super().__init__(f"{kind}: {detail}")


@dataclass(frozen=True)
class Conversation:
    """A row in one shape for all formats; `kind` says which fields hold it.

    `completion_from` is the index of the first message that is not prompt, in prompt/completion rows made of messages.
    """

    source: str
    kind: Literal["chat", "completion", "text", "tokens"]
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    completion_from: int | None = None
    prompt: str = ""
    completion: str = ""
    text: str = ""
    input_ids: list[int] = field(default_factory=list)
    labels: list[int] | None = None


@dataclass(frozen=True)
class Format:
    """A way to read rows: the columns it needs and may use, and `parse` from a row to the fields of a Conversation."""

    name: str
    needs: tuple[str, ...]
    takes: tuple[str, ...]
    parse: Callable[[Mapping[str, Any]], dict[str, Any]]


def pick_format(name: str, columns: Iterable[str], mapped: Mapping[str, str], where: str) -> Format:
    """The format called `name`, or for auto the one whose needed columns are all there.

    Args:
        columns: the columns of the file.
        mapped: data.columns, our column name -> the file's; settles a choice by naming a format's columns.
        where: the source, for messages.

    Raises:
        DataError: no format fits, or more than one does.
        RecipeError: unknown format, or data.columns names a column that the format does not have.
    """
    names = tables.FORMATS if name == "auto" else [name]
    formats: list[Format] = [tables.load(tables.FORMATS, n, "data.format") for n in names]
    known = {column for f in formats for column in f.needs + f.takes}
    for ours in mapped:
        if ours not in known:
            what = f"no column '{ours}' in format {name}.{nearest(ours, known)}"
            raise RecipeError(what, where="data.columns", fix=f"Known: {', '.join(sorted(known))}.")
    if name != "auto":
        return formats[0]
    columns = sorted({*columns, *mapped} - (set(mapped.values()) - set(mapped)))
    fits = [f for f in formats if set(f.needs) <= set(columns) and set(mapped) <= set(f.needs + f.takes)]
    if len(fits) == 1:
        return fits[0]
    if not fits:
        needed = "; ".join(f"{f.name} ({', '.join(f.needs)})" for f in formats)
        fix = "Map your column names with data.columns, as {prompt: question, completion: answer}."
        what = f"no format fits the columns {', '.join(columns)}. Formats and the columns they need: {needed}."
        raise DataError(what, where=where, fix=fix)
    readings = " or as ".join(f"{f.name} ({', '.join(f.needs)})" for f in fits)
    fix = f"Say which: data.format: {' | '.join(f.name for f in fits)}."
    raise DataError(f"the columns {', '.join(columns)} can be read as {readings}.", where=where, fix=fix)


def conversation(row: Row, fmt: Format, columns: Mapping[str, str], system: str | None = None) -> Conversation:
    """Reads one row.

    Args:
        columns: our column name -> the file's.
        system: system prompt for chat rows that have none.

    Raises:
        RowError: the row does not fit the format.
        DataError: `system` is given for rows that are not chat.
    """
    value = {name: item for name, item in row.value.items() if name not in columns.values() or name in columns}
    value |= {ours: row.value[theirs] for ours, theirs in columns.items() if theirs in row.value}
    for column in fmt.needs:
        if column not in value:
            theirs = columns.get(column, column)
            raise RowError("missing column", f"no column '{theirs}' ({fmt.name} rows need it).{nearest(theirs, row.value)}")
    for column in MEDIA:
        if value.get(column):
            raise RowError("not text", f"column '{column}' is not empty; rows with images, video or audio cannot be used")
    fields = fmt.parse(value)
    if fields["kind"] != "chat":
        if system:
            what = f"a system prompt needs chat rows, these are {fmt.name}."
            raise DataError(what, where=row.source, fix="Remove `system` from the source.")
        return Conversation(row.source, **fields)
    own = _text(value.get("system"), "system")
    messages = fields["messages"]
    has_system = bool(messages) and messages[0]["role"] == "system"
    if own and has_system:
        raise RowError("two system prompts", "one in column 'system', one in the first message")
    if (own or system) and not has_system:
        fields["messages"] = [{"role": "system", "content": own or system}, *messages]
        if fields.get("completion_from") is not None:
            fields["completion_from"] += 1
    return Conversation(row.source, tools=_tools(value.get("tools")), **fields)


def read_messages(value: Any, column: str = "messages") -> list[dict[str, Any]]:
    """Messages with our role names, text contents and parsed tool arguments; every other key as it stands in the row.

    Raises:
        RowError: not a list of messages, an unknown role, a part that is not text.
    """
    if not isinstance(value, list):
        raise RowError("not messages", f"column '{column}' is {_type(value)}, not a list of messages")
    if not value:
        raise RowError("no messages", f"column '{column}' is an empty list")
    return [_message(item, number) for number, item in enumerate(value, 1)]


def _message(item: Any, number: int) -> dict[str, Any]:
    where = f"message {number}"
    if not isinstance(item, dict):
        raise RowError("not messages", f"{where} is {_type(item)}, not an object")
    role = item.get("role") or item.get("from")
    if not isinstance(role, str) or role not in ROLES:
        raise RowError("unknown role", f"{role!r} in {where}; known are {', '.join(ROLES)}")
    for flag in TRAIN_FLAGS:
        if item.get(flag) not in (None, 1, True):
            raise RowError("message flag", f"'{flag}': {item[flag]!r} in {where} cannot be honoured; use data.train_on")
    content = _text(item.get("content", item.get("value")), f"content of {where}")
    rest = {key: value for key, value in item.items() if key not in ("role", "from", "content", "value") and value is not None}
    calls = rest.pop("tool_calls", None)
    if calls:
        rest["tool_calls"] = _tool_calls(calls, where)
    return {"role": ROLES[role], "content": content, **rest}


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Templates write arguments as JSON; an argument string would be encoded twice, so it becomes the object it spells."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RowError("tool calls", f"tool_calls of {where} is not a list of objects")

    def parsed(holder: dict[str, Any]) -> dict[str, Any]:
        arguments = holder.get("arguments")
        if not isinstance(arguments, str):
            return holder
        try:
            value = json.loads(arguments)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise RowError("tool calls", f"arguments of a tool call in {where} are not a JSON object: {arguments[:60]!r}")
        return {**holder, "arguments": value}

    return [parsed(c) if not isinstance(c.get("function"), dict) else {**c, "function": parsed(c["function"])} for c in calls]


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RowError("tools", f"column 'tools' is text that is not JSON: {error}") from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowError("tools", "column 'tools' is not a list of JSON schemas")
    return value


def _text(value: Any, what: str) -> str:
    """Text as it stands; null is empty, a whole number its digits, text parts are joined. Other types have no one spelling."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, list):
        return "".join(_part(part, what) for part in value)
    raise RowError("not text", f"{what} is {_type(value)} ({str(value)[:40]}), not text; put it in quotes")


def _part(part: Any, what: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else _type(part)
    raise RowError("not text", f"{what} has a part of type {kind!r}; only text parts can be used, no images, video or audio")


def _type(value: Any) -> str:
    return TYPES.get(type(value), type(value).__name__)


def _parse_messages(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": "chat", "messages": read_messages(row["messages"])}


def _parse_sharegpt(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": "chat", "messages": read_messages(row["conversations"], "conversations")}


def _parse_alpaca(row: Mapping[str, Any]) -> dict[str, Any]:
    """The user turn is the instruction and, on the next line, the input; `history` holds earlier [question, answer] pairs."""
    turns: list[tuple[str, str]] = []
    for pair in row.get("history") or []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowError("history", f"an entry of column 'history' is not a [question, answer] pair: {str(pair)[:60]}")
        turns.append((_text(pair[0], "history"), _text(pair[1], "history")))
    asked = [_text(row["instruction"], "instruction"), _text(row.get("input"), "input")]
    turns.append(("\n".join(part for part in asked if part), _text(row["output"], "output")))
    roles = ("user", "assistant")
    return {"kind": "chat", "messages": [{"role": r, "content": c} for turn in turns for r, c in zip(roles, turn, strict=True)]}


def _parse_prompt_completion(row: Mapping[str, Any]) -> dict[str, Any]:
    prompt, completion = row["prompt"], row["completion"]
    lists = isinstance(prompt, list), isinstance(completion, list)
    if all(lists):
        messages = read_messages(prompt, "prompt")
        return {"kind": "chat", "messages": messages + read_messages(completion, "completion"), "completion_from": len(messages)}
    if any(lists):
        detail = f"prompt is {_type(prompt)}, completion is {_type(completion)}; both must be text or both messages"
        raise RowError("mixed prompt", detail)
    return {"kind": "completion", "prompt": _text(prompt, "prompt"), "completion": _text(completion, "completion")}


def _parse_text(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": "text", "text": _text(row["text"], "text")}


def _parse_tokens(row: Mapping[str, Any]) -> dict[str, Any]:
    ids, labels = row["input_ids"], row.get("labels")
    for name, value in (("input_ids", ids), ("labels", labels)):
        if not isinstance(value, list) or not all(type(i) is int for i in value):
            if name == "input_ids" or value is not None:
                raise RowError("not tokens", f"column '{name}' is not a list of whole numbers")
    if labels is not None and len(labels) != len(ids):
        raise RowError("not tokens", f"{len(ids)} input_ids but {len(labels)} labels")
    return {"kind": "tokens", "input_ids": ids, "labels": labels}


CHAT = ("system", "tools")
MESSAGES = Format("messages", ("messages",), CHAT, _parse_messages)
SHAREGPT = Format("sharegpt", ("conversations",), CHAT, _parse_sharegpt)
ALPACA = Format("alpaca", ("instruction", "output"), ("input", "history", *CHAT), _parse_alpaca)
PROMPT_COMPLETION = Format("prompt_completion", ("prompt", "completion"), CHAT, _parse_prompt_completion)
TEXT = Format("text", ("text",), (), _parse_text)
TOKENS = Format("tokens", ("input_ids",), ("labels",), _parse_tokens)
