"""Row formats: what the columns of a row mean. One `Format` a line of the FORMATS table; found by columns, never guessed."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from swiftlite.data.messages import RowError as RowError
from swiftlite.data.messages import read_messages, read_tools, text, type_name
from swiftlite.data.read import Row
from swiftlite.recipe import tables
from swiftlite.recipe.errors import DataError, RecipeError, nearest

MEDIA = ("image", "images", "video", "videos", "audio", "audios")


@dataclass(frozen=True)
class Conversation:
    """A row in one shape for all formats; `kind` says which fields hold it.

    `spans` are the trained characters [start, end) of a text whose row names them; None: all of it.
    `completion_from` is the index of the first message that is not prompt, in prompt/completion rows made of messages.
    `rejected` is what a pair's worse answer has in place of the completion: text, or messages.
    """

    source: str
    kind: Literal["chat", "completion", "text", "tokens"]
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    completion_from: int | None = None
    prompt: str = ""
    completion: str = ""
    text: str = ""
    spans: list[tuple[int, int]] | None = None
    input_ids: list[int] = field(default_factory=list)
    labels: list[int] | None = None
    rejected: str | list[dict[str, Any]] | None = None

    @property
    def sides(self) -> list["Conversation"]:
        """Of a pair the conversation with the better answer and that with the worse one; of any other row itself."""
        if self.rejected is None:
            return [self]
        if isinstance(self.rejected, str):
            return [replace(self, rejected=None), replace(self, completion=self.rejected, rejected=None)]
        worse = self.messages[: self.completion_from] + self.rejected
        return [replace(self, rejected=None), replace(self, messages=worse, rejected=None)]


# What helps where the rows are of the other kind than what is eaten.
_INSTEAD = {
    "rows": "For pairs set train.objective: dpo.",
    "pairs": "For rows set train.objective: sft; pairs need chosen and rejected, or messages and rejected_response.",
}


@dataclass(frozen=True)
class Format:
    """A way to read rows: the columns it needs and may use, and `parse` from a row to the fields of a Conversation.

    `gives` is what objectives eat of them: rows, or pairs.
    """

    name: str
    needs: tuple[str, ...]
    takes: tuple[str, ...]
    parse: Callable[[Mapping[str, Any]], dict[str, Any]]
    gives: str = "rows"


def pick_format(name: str, columns: Iterable[str], mapped: Mapping[str, str], where: str, eats: str = "rows") -> Format:
    """The format called `name`, or for auto the one that gives what is eaten and whose needed columns are all there.

    Args:
        columns: the columns of the file.
        mapped: data.columns, our column name -> the file's; settles a choice by naming a format's columns.
        where: the source, for messages.
        eats: what the objective learns from, rows or pairs.

    Raises:
        DataError: no format fits, or more than one does.
        RecipeError: unknown format, one that gives what is not eaten, or data.columns names a column that the format does not
            have.
    """
    names = tables.FORMATS if name == "auto" else [name]
    every: list[Format] = [tables.load(tables.FORMATS, n, "data.format") for n in names]
    formats = [f for f in every if f.gives == eats]
    if not formats:
        what = f"format {name} gives {every[0].gives}, and {eats} are wanted here."
        raise RecipeError(what, where=where, fix=_INSTEAD[eats])
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
        others = [f.name for f in every if f.gives != eats and set(f.needs) <= set(columns)]
        if others:
            what = f"the columns {', '.join(columns)} are those of format {others[0]}, and {eats} are wanted here."
            raise DataError(what, where=where, fix=_INSTEAD[eats])
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
    own = text(value.get("system"), "system")
    messages = fields["messages"]
    has_system = bool(messages) and messages[0]["role"] == "system"
    if own and has_system:
        raise RowError("two system prompts", "one in column 'system', one in the first message")
    if (own or system) and not has_system:
        fields["messages"] = [{"role": "system", "content": own or system}, *messages]
        if fields.get("completion_from") is not None:
            fields["completion_from"] += 1
    return Conversation(row.source, tools=read_tools(value.get("tools")), **fields)


def _parse_messages(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": "chat", "messages": read_messages(row["messages"])}


def _parse_sharegpt(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": "chat", "messages": read_messages(row["conversations"], "conversations")}


def _parse_alpaca(row: Mapping[str, Any]) -> dict[str, Any]:
    """The user turn is the instruction and, on the next line, the input; `history` holds earlier [question, answer] pairs."""
    asked = [text(row["instruction"], "instruction"), text(row.get("input"), "input")]
    return with_history(row, "\n".join(part for part in asked if part), text(row["output"], "output"))


def _parse_query_response(row: Mapping[str, Any]) -> dict[str, Any]:
    return with_history(row, text(row["query"], "query"), text(row["response"], "response"))


def with_history(row: Mapping[str, Any], question: str, answer: str) -> dict[str, Any]:
    """A chat that goes on from the [question, answer] pairs of column `history`."""
    turns: list[tuple[str, str]] = []
    for pair in row.get("history") or []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowError("history", f"an entry of column 'history' is not a [question, answer] pair: {str(pair)[:60]}")
        turns.append((text(pair[0], "history"), text(pair[1], "history")))
    turns.append((question, answer))
    roles = ("user", "assistant")
    return {"kind": "chat", "messages": [{"role": r, "content": c} for turn in turns for r, c in zip(roles, turn, strict=True)]}


def _parse_prompt_completion(row: Mapping[str, Any]) -> dict[str, Any]:
    prompt, completion = row["prompt"], row["completion"]
    lists = isinstance(prompt, list), isinstance(completion, list)
    if all(lists):
        messages = read_messages(prompt, "prompt")
        return {"kind": "chat", "messages": messages + read_messages(completion, "completion"), "completion_from": len(messages)}
    if any(lists):
        detail = f"prompt is {type_name(prompt)}, completion is {type_name(completion)}; both must be text or both messages"
        raise RowError("mixed prompt", detail)
    return {"kind": "completion", "prompt": text(prompt, "prompt"), "completion": text(completion, "completion")}


def _parse_text(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": "text", "text": text(row["text"], "text")}


def _parse_segments(row: Mapping[str, Any]) -> dict[str, Any]:
    """Text in pieces, of which those with label true are trained; the row itself writes what separates and ends them."""
    segments = row["segments"]
    if not isinstance(segments, list) or not segments:
        raise RowError("segments", f"column 'segments' is {type_name(segments)}, not a list of {{text, label}} objects")
    whole, spans = "", []
    for number, segment in enumerate(segments, 1):
        if not isinstance(segment, dict) or type(segment.get("label")) is not bool or "text" not in segment:
            raise RowError("segments", f"segment {number} is not {{text, label: true or false}}: {str(segment)[:60]}")
        piece = text(segment["text"], f"text of segment {number}")
        if segment["label"]:
            spans.append((len(whole), len(whole) + len(piece)))
        whole += piece
    return {"kind": "text", "text": whole, "spans": spans}


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
QUERY_RESPONSE = Format("query_response", ("query", "response"), ("history", *CHAT), _parse_query_response)
SEGMENTS = Format("segments", ("segments",), (), _parse_segments)
TEXT = Format("text", ("text",), (), _parse_text)
TOKENS = Format("tokens", ("input_ids",), ("labels",), _parse_tokens)
