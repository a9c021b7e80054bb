"""Pairs: one prompt with a better and a worse answer, in the forms that rows of preferences have."""

from collections.abc import Mapping
from typing import Any

from swiftlite.data.formats import CHAT, Format, with_history
from swiftlite.data.messages import Message, RowError, read_messages, text, type_name
from swiftlite.recipe.errors import RecipeError
from swiftlite.recipe.schema import DataSection

# Columns that may hold the prompt, of which a row has one.
PROMPTS = ("prompt", "conversations", "messages", "instruction")

Side = str | list[Message]


def check_keys(data: DataSection) -> None:
    """Refuses what cannot be done with pairs.

    Raises:
        RecipeError: naming the key.
    """
    refused = [
        ("packing", data.packing, "packs hold single rows, and the two sides of a pair stay together", "Remove it."),
        ("padding_free", data.padding_free, "it joins single rows, and the two sides of a pair stay apart", "Remove it."),
        ("overlong", data.overlong == "split", "a pair has no place to be split at", "Use drop, truncate or error."),
        ("train_on", data.train_on == "all", "of a pair the answers are compared, not the prompt", "Use assistant or last."),
    ]
    for key, wrong, what, fix in refused:
        if wrong:
            raise RecipeError(f"{what}.", where=f"data.{key}", fix=fix)


def _parse(row: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt of its own column, or what whole conversations have in common; then the answers. Conversations that are whole
    need no column beside them: a `prompt` must be in what they share, others are not looked at."""
    chosen, rejected = _side(row["chosen"], "chosen"), _side(row["rejected"], "rejected")
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise RowError("mixed answers", f"chosen is {type_name(row['chosen'])}, rejected is {type_name(row['rejected'])}")
    if isinstance(chosen, str) or isinstance(rejected, str):
        return _pair(_prompt(row, texts=True), chosen, rejected, row)
    starts = [side[0]["role"] == "assistant" for side in (chosen, rejected)]
    if starts[0] != starts[1]:
        raise RowError("mixed answers", "one of chosen and rejected starts with an answer, the other does not")
    if starts[0]:
        return _pair(_prompt(row, texts=False), chosen, rejected, row)
    _refuse_equal(chosen, rejected)
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        if shared < len(side) and side[shared]["role"] != "assistant":
            what = f"message {shared + 1} of {name} is of role {side[shared]['role']}, and the first that the two do not share"
            raise RowError("prompts differ", f"{what}; the answers must follow one prompt")
    if given := row.get("prompt"):
        asked = _messages(_side(given, "prompt"), "user")
        if not any(chosen[i : i + len(asked)] == asked for i in range(shared - len(asked) + 1)):
            raise RowError("prompts differ", "column 'prompt' is not in what the conversations chosen and rejected share")
    return _pair(chosen[:shared], chosen[shared:], rejected[shared:], row)


def _parse_rejected_response(row: Mapping[str, Any]) -> dict[str, Any]:
    """ms-swift's: the last assistant turn is the better answer."""
    messages = read_messages(row["messages"])
    rejected = _messages(_side(row["rejected_response"], "rejected_response"), "assistant")
    return _pair(messages[:-1], messages[-1:], rejected, row)


def _side(value: Any, column: str) -> Side:
    """A text, or messages: a list of them, or one alone."""
    if isinstance(value, list | dict):
        return read_messages([value] if isinstance(value, dict) else value, column)
    return text(value, column)


def _messages(side: Side, role: str) -> list[Message]:
    return [{"role": role, "content": side}] if isinstance(side, str) else side


def _prompt(row: Mapping[str, Any], texts: bool) -> Side:
    """The prompt, from the one column that holds it. Two texts alone are whole: what they share counts for both alike."""
    given = [name for name in PROMPTS if row.get(name)]
    if len(given) > 1:
        raise RowError("two prompts", f"columns {' and '.join(given)} both hold one; leave one of them out")
    if given == ["instruction"]:
        asked = [text(row["instruction"], "instruction"), text(row.get("input"), "input")]
        messages: list[Message] = with_history(row, "\n".join(part for part in asked if part), "")["messages"][:-1]
        return messages
    if given:
        return _side(row[given[0]], given[0])
    if texts and ("prompt" in row or row.keys() <= {"chosen", "rejected"}):
        return ""
    fix = "map its column with data.columns, as {prompt: question}; an empty column 'prompt' says that there is none"
    raise RowError("no prompt", f"the row has no {', '.join(PROMPTS)}; {fix if texts else fix.partition(';')[0]}")


def _pair(prompt: Side, chosen: Side, rejected: Side, row: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a Conversation. Texts alone go without a chat template; where one part is messages, all become such."""
    _refuse_equal(chosen, rejected)
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        if not isinstance(side, str) and (not side or side[-1]["role"] != "assistant"):
            raise RowError("no answer", f"{name} does not end with an answer")
        words = [side] if isinstance(side, str) else [m["content"] for m in side if m["role"] == "assistant"]
        if not "".join(words).strip() and not any(m.get("tool_calls") for m in side if isinstance(m, dict)):
            raise RowError("empty answer", f"{name} says nothing")
    if isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str):
        if alone := [name for name in CHAT if row.get(name)]:
            raise RowError("mixed prompt", f"column '{alone[0]}' needs a prompt of messages, this one is text")
        return {"kind": "completion", "prompt": prompt, "completion": chosen, "rejected": rejected}
    asked = _messages(prompt, "user")
    answers = [_messages(side, "assistant") for side in (chosen, rejected)]
    return {"kind": "chat", "messages": asked + answers[0], "completion_from": len(asked), "rejected": answers[1]}


def _refuse_equal(chosen: Side, rejected: Side) -> None:
    if chosen == rejected:
        raise RowError("equal answers", "chosen and rejected are the same: nothing is preferred")


PREFERENCE = Format("preference", ("chosen", "rejected"), (*PROMPTS, "input", "history", *CHAT), _parse, "pairs")
REJECTED_RESPONSE = Format("rejected_response", ("messages", "rejected_response"), CHAT, _parse_rejected_response, "pairs")
