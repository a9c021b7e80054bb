"""Columns to conversations."""

import json

import pytest

from swiftlite.data.formats import Conversation, RowError, conversation, pick_format
from swiftlite.data.read import Row
from swiftlite.data.render import Renderer
from swiftlite.recipe import tables
from swiftlite.recipe.errors import DataError, RecipeError
from tests.data.preparing import C1, trained
from tests.fixtures import tok

ROWS = {
    "messages": {"messages": C1},
    "sharegpt": {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
    "alpaca": {"instruction": "hi", "input": "", "output": "yo"},
    "prompt_completion": {"prompt": "hi", "completion": "yo"},
    "query_response": {"query": "hi", "response": "yo"},
    "segments": {"segments": [{"text": "hi", "label": False}, {"text": "yo", "label": True}]},
    "text": {"text": "hi"},
    "tokens": {"input_ids": [5, 6]},
    "preference": {"prompt": "hi", "chosen": "yo", "rejected": "no"},
    "rejected_response": {"messages": C1, "rejected_response": "no"},
}


def read(row: dict, name: str = "auto", columns: dict | None = None, system: str | None = None) -> Conversation:
    return conversation(Row("d.jsonl", 7, row), pick_format(name, row, columns or {}, "d.jsonl"), columns or {}, system)


@pytest.mark.parametrize("name", tables.FORMATS)
def test_every_format_is_found_by_its_columns(name: str):
    row = ROWS[name]
    gives = tables.load(tables.FORMATS, name).gives
    fmt = pick_format("auto", [*row, "id", "source"], {}, "d.jsonl", gives)
    assert fmt.name == name
    assert fmt is pick_format(name, [], {}, "d.jsonl", gives)
    conv = conversation(Row("d.jsonl", 7, row), fmt, {})
    assert conv.source == "d.jsonl:7"
    for column in fmt.needs:
        with pytest.raises(RowError, match=f"no column '{column}'"):
            conversation(Row("d.jsonl", 7, {k: v for k, v in row.items() if k != column}), fmt, {})


@pytest.mark.parametrize(
    "row",
    [ROWS["messages"] | ROWS["prompt_completion"], ROWS["messages"] | ROWS["text"], ROWS["alpaca"] | ROWS["text"]],
)
def test_ambiguity_is_refused_with_both_readings_and_the_key_that_settles_it(row: dict):
    names = [name for name, one in ROWS.items() if set(one) <= set(row)]
    with pytest.raises(DataError) as refused:
        read(row)
    for name in names:
        assert f"{name} (" in str(refused.value)
        assert read(row, name)
    assert "data.format: " in str(refused.value)


def test_columns_settle_and_rename():
    row = {"question": "hi", "answer": "yo", "text": "both"}
    conv = read(row, columns={"prompt": "question", "completion": "answer"})
    assert (conv.kind, conv.prompt, conv.completion) == ("completion", "hi", "yo")
    assert read(row).kind == "text"
    swapped = read({"prompt": "yo", "completion": "hi"}, columns={"prompt": "completion", "completion": "prompt"})
    assert (swapped.prompt, swapped.completion) == ("hi", "yo")
    with pytest.raises(RowError, match=r"no column 'qestion'.*Did you mean 'question'"):
        read(row, columns={"prompt": "qestion", "completion": "answer"})
    with pytest.raises(RecipeError, match=r"no column 'promt' in format auto\. Did you mean 'prompt'"):
        read(row, columns={"promt": "question"})


def test_no_format_fits():
    with pytest.raises(DataError, match=r"no format fits the columns better, worse\..*messages \(messages\)"):
        read({"better": "a", "worse": "b"})
    with pytest.raises(RecipeError, match="Did you mean 'alpaca'"):
        read(ROWS["alpaca"], "alpca")


def test_sharegpt_roles_and_system():
    turns = [("system", "s"), ("human", "a"), ("gpt", "b"), ("observation", "c"), ("model", "d"), ("function", "e")]
    conv = read({"conversations": [{"from": role, "value": text} for role, text in turns]})
    assert [m["role"] for m in conv.messages] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert read(ROWS["sharegpt"] | {"system": "be brief"}).messages[0] == {"role": "system", "content": "be brief"}
    assert read({"conversations": [{"role": "user", "content": "a"}]}).messages == [{"role": "user", "content": "a"}]
    with pytest.raises(RowError, match="two system prompts"):
        read({"conversations": [{"from": "system", "value": "s"}], "system": "t"})


def test_a_sources_system_prompt_goes_to_rows_that_have_none():
    assert read(ROWS["messages"], system="S").messages[0]["content"] == "S"
    assert read(ROWS["messages"] | {"system": "own"}, system="S").messages[0]["content"] == "own"
    own = [{"role": "system", "content": "own"}, *C1]
    assert read({"messages": own}, system="S").messages == own
    pair = read({"prompt": C1[:3], "completion": C1[3:]}, system="S")
    assert (pair.completion_from, pair.messages[4]) == (4, C1[3])
    with pytest.raises(DataError, match="a system prompt needs chat rows"):
        read(ROWS["text"], system="S")


def test_alpaca():
    row = {"instruction": "do", "input": "this", "output": "done", "history": [["q", "a"]], "system": "s"}
    contents = [(m["role"], m["content"]) for m in read(row).messages]
    assert contents == [("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "do\nthis"), ("assistant", "done")]
    assert read({"instruction": "do", "output": None}).messages[0]["content"] == "do"
    with pytest.raises(RowError, match="history"):
        read({"instruction": "do", "output": "x", "history": ["q"]})


def test_query_and_response():
    row = {"query": "more?", "response": "done", "history": [["q", "a"], ["r", "b"]], "system": "s"}
    contents = [m["content"] for m in read(row).messages]
    assert contents == ["s", "q", "a", "r", "b", "more?", "done"]
    with pytest.raises(RowError, match="history"):
        read({"query": "q", "response": "r", "history": [["only"]]})


def test_segments_train_what_is_labelled_and_add_no_end():
    t = tok(add_bos=True)
    segments = [("Q: hi\n", False), ("A: yo</s>", True), ("\nQ: a?\n", False), ("A: b!", True)]
    row = {"segments": [{"text": text, "label": label} for text, label in segments]}
    sample = Renderer(t).sample(read(row))
    assert sample.input_ids == t("".join(text for text, _ in segments))["input_ids"]
    assert trained(sample, t) == "A: yo</s>A: b!"
    spelled = Renderer(t).sample(read({"segments": [{"text": "<s>", "label": False}, *row["segments"]]}))
    assert spelled.input_ids == sample.input_ids
    assert Renderer(t).sample(read({"segments": [{"text": "x", "label": False}]})).trained == 0


@pytest.mark.parametrize(
    "segments", ["x", [], ["x"], [{"text": "x"}], [{"label": True}], [{"text": "x", "label": 1}], [{"text": {}, "label": True}]]
)
def test_wrong_segments_are_named(segments: object):
    with pytest.raises(RowError, match="segment"):
        read({"segments": segments})


def test_prompt_and_completion_are_both_text_or_both_messages():
    conv = read({"prompt": C1[:3], "completion": C1[3:]})
    assert (conv.kind, conv.completion_from, conv.messages) == ("chat", 3, C1)
    with pytest.raises(RowError, match="prompt is text, completion is a list"):
        read({"prompt": "hi", "completion": C1[3:]})


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ("[]", "is text, not a list"),
        ([], "empty list"),
        (["hi"], "message 1 is text"),
        ([{"role": "bot", "content": "x"}], "unknown role: 'bot' in message 1"),
        ([{"content": "x"}], "unknown role: None in message 1"),
        ([{"role": "user", "content": 1.5}], "content of message 1 is a number"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "part of type 'image_url'"),
        ([{"role": "assistant", "content": "x", "weight": 0.5}], "'weight': 0.5 in message 1: fractional weights"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}], "arguments of a tool call in message 1"),
        ([{"role": "assistant", "tool_calls": {}}, {"role": "assistant", "tool_calls": "x"}], "tool_calls of message 2"),
    ],
)
def test_wrong_messages_are_named(messages: object, what: str):
    with pytest.raises(RowError) as refused:
        read({"messages": messages}, "messages")
    assert what in str(refused.value)


def test_contents_keep_what_they_are():
    parts = [{"type": "text", "text": "a"}, "b", {"text": "c"}]
    extra = {"name": "x", "nothing": None, "weight": 1}
    (message,) = read({"messages": [{"role": "user", "content": parts, **extra}]}).messages
    assert message == {"role": "user", "content": "abc", "name": "x"}
    assert read({"text": 7}).text == "7"


def test_tool_schemas_stay_and_may_be_json_text():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"required": []}}}]
    assert read({"messages": C1, "tools": tools}).tools == tools
    assert read({"messages": C1, "tools": json.dumps(tools)}).tools == tools
    assert read({"messages": C1, "tools": []}).tools is None
    for wrong in ("{", {"name": "f"}, ["f"]):
        with pytest.raises(RowError, match="tools"):
            read({"messages": C1, "tools": wrong})


def test_images_are_refused_by_name():
    with pytest.raises(RowError, match="column 'images' is not empty"):
        read({"messages": C1, "images": ["a.png"]})
    assert read({"messages": C1, "images": []}).messages == C1


@pytest.mark.parametrize(
    "row", [{"input_ids": "1"}, {"input_ids": [1, 2.0]}, {"input_ids": [1, True]}, {"input_ids": [1], "labels": []}]
)
def test_wrong_tokens(row: dict):
    with pytest.raises(RowError, match="not tokens"):
        read(row)
