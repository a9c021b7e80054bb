"""Messages of every dialect in one: our roles, text contents, OpenAI's tool calls, reasoning apart, and which turns to train.

A message is a dict with role and content, perhaps tool_calls, tool_call_id and other keys of the row, which the template gets
as they are. `train: False` marks a turn that is not to be trained; templates do not see it.
"""

import json
from collections.abc import Iterator
from typing import Any

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
    "tool_response": "tool",
    "tool_call": "assistant",
    "function_call": "assistant",
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
# Roles whose content is tool calls as JSON (ms-swift, LLaMA-Factory).
CALLING = ("tool_call", "function_call")
# Flags that say whether a turn is trained. Read as plain keys they would be ignored without a word.
TRAIN_FLAGS = ("loss", "loss_weight", "train", "training", "weight")

Message = dict[str, Any]


class RowError(Exception):
    """One row cannot be used.

    Args:
        kind: what is wrong with rows of this kind, in a few words; rows are counted under it.
        detail: what is wrong with this row.
    """

    def __init__(self, kind: str, detail: str) -> None:
        self.kind, self.detail = kind, detail
        super().__init__(f"{kind}: {detail}")


def read_messages(value: Any, column: str = "messages") -> list[Message]:
    """Messages as this module says, from a list in any dialect.

    Raises:
        RowError: not a list of messages, an unknown role, a part that is not text.
    """
    if not isinstance(value, list):
        raise RowError("not messages", f"column '{column}' is {type_name(value)}, not a list of messages")
    if not value:
        raise RowError("no messages", f"column '{column}' is an empty list")
    messages: list[Message] = []
    for number, item in enumerate(value, 1):
        if simple := _simple(item):  # as most are; what follows would find the same
            messages.append(simple)
            continue
        calling = isinstance(item, dict) and (item.get("role") or item.get("from")) in CALLING
        for message in _messages(item, f"message {number}"):
            before = messages[-1] if messages else {}
            if calling and before.get("role") == "assistant" and before.get("train") == message.get("train"):
                before["tool_calls"] = [*before.get("tool_calls", []), *message["tool_calls"]]  # calls of one turn, row by row
            else:
                messages.append(message)
    return messages


def _simple(item: Any) -> Message | None:
    """The message that a row has in so many words: a role, and a text for its content."""
    if type(item) is not dict or len(item) != 2:
        return None
    role, content = item.get("role"), item.get("content")
    if type(role) is not str or type(content) is not str or role in CALLING or role not in ROLES:
        return None
    return {"role": ROLES[role], "content": content}


def _messages(item: Any, where: str) -> Iterator[Message]:
    """One message of a row; more where a message holds results of several tools."""
    if not isinstance(item, dict):
        raise RowError("not messages", f"{where} is {type_name(item)}, not an object")
    role = item.get("role") or item.get("from")
    if not isinstance(role, str) or role not in ROLES:
        raise RowError("unknown role", f"{role!r} in {where}; known are {', '.join(ROLES)}")
    train = _train_flag(item, ROLES[role], where)
    given = ("role", "from", "content", "value", *TRAIN_FLAGS)
    rest = {key: value for key, value in item.items() if key not in given and value is not None}
    calls = rest.pop("tool_calls", None)
    if calls:
        rest["tool_calls"] = _tool_calls(calls, where)
    rest |= {} if train else {"train": False}
    content = item.get("content", item.get("value"))
    if role in CALLING:
        yield {"role": "assistant", "content": "", **rest, "tool_calls": _spelled_calls(content, where)}
    elif isinstance(content, list) and any(isinstance(part, dict) and part.get("type") in BLOCKS for part in content):
        yield from _from_blocks(ROLES[role], content, rest, where)
    else:
        yield {"role": ROLES[role], "content": text(content, f"content of {where}"), **rest}


def _train_flag(item: Message, role: str, where: str) -> bool:
    """Whether the message's own flags let it be trained; data.train_on may still leave it out."""
    flags = {flag: item[flag] for flag in TRAIN_FLAGS if item.get(flag) is not None}
    for flag, value in flags.items():
        if isinstance(value, float) and value not in (0, 1):
            what = f"'{flag}': {value!r} in {where}: fractional weights cannot be honoured, only 0 and 1"
            raise RowError("message flag", what)
        if value not in (0, 1):
            raise RowError("message flag", f"'{flag}': {value!r} in {where} is neither true nor false, 1 nor 0")
        if value and role != "assistant" and "weight" not in flag:
            what = f"'{flag}': {value!r} in {where}: only assistant turns can be trained; data.train_on: all trains everything"
            raise RowError("message flag", what)
    if len({bool(value) for value in flags.values()}) > 1:
        raise RowError("message flag", f"{where} has flags that contradict each other: {flags}")
    return all(flags.values()) or role != "assistant"


# Content blocks of Anthropic's dialect that stand for more than text.
BLOCKS = ("tool_use", "tool_result", "thinking")


def _from_blocks(role: str, parts: list[Any], rest: Message, where: str) -> Iterator[Message]:
    """Blocks as the messages they stand for: results of tools are messages of their own, in front of what the user says."""
    plain: list[Any] = []
    calls: list[Message] = []
    thoughts: list[str] = []
    results: list[Message] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in BLOCKS and (kind == "tool_result") == (role == "assistant"):
            raise RowError("not messages", f"{where} has a part of type {kind!r}, which messages of role {role} do not have")
        if kind == "tool_use":
            function = {"name": part.get("name"), "arguments": part.get("input") or {}}
            calls.append({"id": part.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(text(part.get("thinking"), f"thinking of {where}"))
        elif kind == "tool_result":
            if plain:
                raise RowError("not messages", f"{where} has text in front of a tool_result")
            result = {"role": "tool", "content": text(part.get("content"), f"tool_result of {where}")}
            results.append(result | ({"tool_call_id": part["tool_use_id"]} if part.get("tool_use_id") else {}))
        else:
            plain.append(part)
    yield from results
    if calls:
        rest = {**rest, "tool_calls": [*rest.get("tool_calls", []), *_tool_calls(calls, where)]}
    if thoughts:
        rest = {**rest, "reasoning_content": "\n\n".join(thoughts)}
    if plain or not results:
        yield {"role": role, "content": text(plain, f"content of {where}"), **rest}


def _spelled_calls(content: Any, where: str) -> list[Message]:
    """The calls that a message of role tool_call spells: {"name", "arguments"} as JSON or object, or a list of such."""
    if isinstance(content, str):
        try:
            content = json.loads(content)
        except ValueError as error:
            raise RowError("tool calls", f"content of {where} is not JSON ({error}): {content[:60]!r}") from None
    calls = content if isinstance(content, list) else [content]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise RowError("tool calls", f"content of {where} is not a call with a name, or a list of calls")
    functions = [{"name": call["name"], "arguments": call.get("arguments") or {}} for call in calls]
    return _tool_calls([{"type": "function", "function": function} for function in functions], where)


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


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RowError("tools", f"column 'tools' is text that is not JSON: {error}") from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowError("tools", "column 'tools' is not a list of JSON schemas")
    return [_openai_tool(tool) for tool in value]


def _openai_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Anthropic's form of a tool is told by its input_schema; every other schema stays as it is."""
    if "input_schema" not in tool:
        return tool
    function = {"name": tool.get("name"), "description": tool.get("description", ""), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def text(value: Any, what: str) -> str:
    """Text as it stands; null is empty, a whole number its digits, text parts are joined. Other types have no one spelling."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, list):
        return "".join(_part(part, what) for part in value)
    raise RowError("not text", f"{what} is {type_name(value)} ({str(value)[:40]}), not text; put it in quotes")


def _part(part: Any, what: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type_name(part)
    raise RowError("not text", f"{what} has a part of type {kind!r}; only text parts can be used, no images, video or audio")


def type_name(value: Any) -> str:
    return TYPES.get(type(value), type(value).__name__)
