"""Every template of tests/templates.py by every conversation shape: ids are the template's own, labels are the answers.

Without swiftlite a label is known to be right where the answer stands behind the very ids that inference would be given.
"""

import json
from functools import cache
from pathlib import Path

import pytest

from swiftlite.cli.main import run
from swiftlite.data.formats import MESSAGES, Conversation, RowError, conversation
from swiftlite.data.read import Row
from swiftlite.data.render import Renderer
from tests.data.preparing import trained, write
from tests.templates import FAMILIES, SHAPES, TOOLS_LIST, Messages, say
from tests.training import model_folder, recipe

SPLIT = "split"
ALTERNATE = "refused by the chat template: .*roles must alternate"
NO_TOOLS = "left out by the chat template: the row has tools, which the chat template does not write"
# What becomes of a row where it is not trained as a whole: one row for each answer, or refused for the reason that matches.
OUTCOMES: dict[str, dict[str, str]] = {
    "gemma2": {
        "system": "refused by the chat template: System role not supported",
        "tools": NO_TOOLS,
        "two users": ALTERNATE,
        "assistant first": ALTERNATE,
    },
    "gemma3": {"tools": NO_TOOLS, "two users": ALTERNATE, "assistant first": ALTERNATE},
    "mistral3": {
        "system": "left out by the chat template: it does not write the system text of message 1",
        "two users": ALTERNATE,
        "assistant first": ALTERNATE,
    },
    "mistral7": {"two users": ALTERNATE, "assistant first": ALTERNATE},
    "qwen3": {"multi-turn": SPLIT, "tools": SPLIT, "long": SPLIT},
    "qwen3 without thinking": {
        "multi-turn": SPLIT,
        "tools": SPLIT,
        "long": SPLIT,
        # The generation prompt has an empty block where the answer has a full one.
        "think": "altered by the chat template: the generation prompt of message 2 reads .*here it reads 'Because",
    },
    # The generation prompt opens a block that no rendering has, so there is no row that inference would write.
    "deepseek r1": dict.fromkeys(SHAPES, r"altered by the chat template: the generation prompt of message \d+ reads '<think>"),
    "phi3": {"tools": NO_TOOLS},
}
# Without markers the place of a first answer shows by what stands in front of it, which here is no generation prompt.
UNMARKED: dict[str, dict[str, str]] = {
    name: {"assistant first": "not provable: assistant message 1 does not follow the template's generation prompt"}
    for name in ("qwen3 without thinking", "deepseek r1")
}
EVERY = [(name, shape) for name in FAMILIES for shape in SHAPES]


@cache
def renderer(name: str, markers: bool) -> Renderer:
    family = FAMILIES[name]
    return Renderer(family.tokenizer(markers), template_kwargs=family.variables)


def outcome(name: str, shape: str, markers: bool) -> str | None:
    found = OUTCOMES.get(name, {}).get(shape)
    return found if markers else UNMARKED.get(name, {}).get(shape, found)


def row(shape: str, messages: Messages | None = None) -> dict[str, object]:
    return {"messages": messages or SHAPES[shape], **({"tools": TOOLS_LIST} if shape == "tools" else {})}


def read(value: dict[str, object]) -> Conversation:
    return conversation(Row("d.jsonl", 1, value), MESSAGES, {})


def expected_rows(name: str, shape: str, split: bool) -> list[tuple[list[int], list[int] | None]]:
    """Ids and labels of each training row that the shape must become."""
    family, messages, tools = FAMILIES[name], SHAPES[shape], TOOLS_LIST if shape == "tools" else None
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not split:
        return [(family.ids(messages, tools), family.labels(messages, tools, turns))]
    return [(family.ids(messages[: i + 1], tools), family.labels(messages[: i + 1], tools, [i])) for i in turns]


@pytest.mark.parametrize("markers", [False, True], ids=["", "markers"])
@pytest.mark.parametrize(("name", "shape"), EVERY)
def test_ids_and_labels(name: str, shape: str, markers: bool):
    wanted = outcome(name, shape, markers)
    if wanted not in (None, SPLIT):
        with pytest.raises(RowError, match=wanted):
            renderer(name, markers).samples(read(row(shape)))
        return
    samples = renderer(name, markers).samples(read(row(shape)))
    assert [(s.input_ids, s.labels) for s in samples] == expected_rows(name, shape, wanted == SPLIT)
    if wanted == SPLIT:
        assert expected_rows(name, shape, split=False)[0][1] is None  # as a whole it would train what inference never sees


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "deepseek r1"])
def test_trained_text_is_the_answers_with_their_end(name: str):
    """The same in words, for one plain row, so that a fault of the tokenizers cannot hide."""
    family = FAMILIES[name]
    (sample,) = renderer(name, False).samples(read(row("single")))
    text = trained(sample, family.tokenizer())
    assert text.removeprefix("<think>\n\n</think>\n\n").strip() == "yo" + family.end
    assert text.endswith(family.end)


@pytest.mark.parametrize("name", FAMILIES)
def test_markers_change_no_ids(name: str):
    for shape, messages in SHAPES.items():
        if outcome(name, shape, True) in (None, SPLIT):
            tools = TOOLS_LIST if shape == "tools" else None
            assert FAMILIES[name].ids(messages, tools, markers=True) == FAMILIES[name].ids(messages, tools), shape


@pytest.mark.parametrize("name", FAMILIES)
def test_the_end_of_turn_token_is_known_for_generation(name: str):
    family = FAMILIES[name]
    for markers in (False, True):
        r = Renderer(family.tokenizer(markers), template_kwargs=family.variables)
        if name != "deepseek r1":
            r.samples(read(row("single")))
        stops = {family.end, family.eos} - {""}
        assert {r.tokenizer.decode([i]) for i in r.stop_ids} == stops


@pytest.mark.parametrize("markers", [False, True], ids=["", "markers"])
def test_without_an_end_token_the_next_role_ends_a_turn(markers: bool):
    r = Renderer(FAMILIES["glm4"].tokenizer(markers))
    (sample,) = r.samples(read(row("multi-turn")))
    assert trained(sample, r.tokenizer) == "\nyo<|user|>\nb!<|user|>\nyo"
    (sample,) = r.samples(read(row("tools")))
    assert trained(sample, r.tokenizer) == 'weather\n{"place": "Łódź", "days": 2}<|observation|>\nIt is grey.'
    assert {r.tokenizer.decode([i]) for i in r.stop_ids} == {"<|endoftext|>", "<|user|>", "<|observation|>"}


@pytest.mark.parametrize("name", [name for name in FAMILIES if "tools" not in OUTCOMES.get(name, {})])
def test_arguments_of_tool_calls_as_text_render_alike(name: str):
    messages = [
        {**m, "tool_calls": [{**c, "function": {**c["function"], "arguments": text(c)}} for c in m["tool_calls"]]}
        if "tool_calls" in m
        else m
        for m in SHAPES["tools"]
    ]
    (sample,) = renderer(name, False).samples(read(row("tools", messages)))
    assert [(sample.input_ids, sample.labels)] == expected_rows(name, "tools", split=False)


def text(call: dict[str, dict[str, object]]) -> str:
    return json.dumps(call["function"]["arguments"])


def test_a_template_that_writes_an_object_as_python_gets_text():
    family = FAMILIES["deepseek3"]
    source = family.template().replace("call.function.arguments + '", "call.function.arguments ~ '")
    sample = Renderer(family.tokenizer(), chat_template=source).sample(read(row("tools")))
    assert [(sample.input_ids, sample.labels)] == expected_rows("deepseek3", "tools", split=False)


@pytest.mark.parametrize("markers", [False, True])
@pytest.mark.parametrize(
    ("name", "messages", "what"),
    [
        ("phi3", [*say("u: q"), {"role": "tool", "content": "42"}, *say("a: so")], "the tool text of message 2"),
        ("mistral3", say("s: brief", "u: q", "a: b"), "the system text of message 1"),
        (
            "llama3",
            [*say("u: q"), {**SHAPES["tools"][1], "content": "Let me look."}],
            "the assistant text of message 2",
        ),
    ],
)
def test_text_that_the_template_passes_over_is_refused(name: str, messages: Messages, what: str, markers: bool):
    with pytest.raises(RowError, match=f"left out by the chat template: it does not write {what}"):
        renderer(name, markers).samples(read(row("", messages)))


@pytest.mark.parametrize("markers", [False, True])
def test_a_call_that_the_template_passes_over_is_refused(markers: bool):
    """As templates do that write calls only where the content is null."""
    family = FAMILIES["deepseek3"]
    source = family.template(markers).replace("in m.tool_calls or []", "in (m.tool_calls if m.content is none else [])")
    with pytest.raises(RowError, match="it does not write the tool calls of message 2"):
        Renderer(family.tokenizer(), chat_template=source).sample(read(row("tools")))


@pytest.mark.parametrize("markers", [False, True])
def test_reasoning_in_its_own_key(markers: bool):
    reasoned = {"role": "assistant", "content": "So.", "reasoning_content": "Because."}
    (sample,) = renderer("qwen3", markers).samples(read(row("", [*say("u: why?"), reasoned])))
    family = FAMILIES["qwen3"]
    assert trained(sample, family.tokenizer()) == "<think>\nBecause.\n</think>\n\nSo.<|im_end|>"
    with pytest.raises(RowError, match="the row has reasoning_content"):
        renderer("llama3", markers).samples(read(row("", [*say("u: why?"), reasoned])))


def test_the_date_is_frozen_by_a_variable():
    family = FAMILIES["llama3"]
    prompts = [Renderer(family.tokenizer(), template_kwargs={"date_string": day}).prompt(say("u: hi")) for day in "ab"]
    assert [p != family.ids(say("u: hi"), prompt=True) for p in prompts] == [True, True]
    assert prompts[0] != prompts[1]


@pytest.mark.parametrize("markers", [False, True], ids=["", "markers"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "deepseek r1"])
def test_check_dumps_these_rows(name: str, markers: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    family = FAMILIES[name]
    folder = model_folder(tmp_path, "QWEN3", family.tokenizer(markers), max_position_embeddings=4096)
    rows = write(tmp_path / "d.jsonl", [row(shape) for shape in SHAPES])
    data = {"train": str(rows), "max_length": 4096, "template_kwargs": family.variables}
    bad = {"on_bad_rows": "skip", "max_bad_fraction": 0.5}
    recipe(tmp_path, model={"name": str(folder)}, data=data | bad)
    assert run(["check", str(tmp_path / "recipe.yaml"), "--dump", str(tmp_path / "dump.jsonl")]) == 0, capsys.readouterr().err
    dumped = [json.loads(line) for line in (tmp_path / "dump.jsonl").read_text("utf-8").splitlines()]
    wanted, printed = [], capsys.readouterr().out
    for n, shape in enumerate(SHAPES, 1):
        becomes = outcome(name, shape, markers)
        if becomes in (None, SPLIT):
            found = expected_rows(name, shape, becomes == SPLIT)
            wanted += [(ids, labels, [f"{rows}:{n}"]) for ids, labels in found]
        else:
            assert f"{rows}:{n}  " in printed  # with its reason
    assert [(d["input_ids"], d["labels"], d["source"]) for d in dumped] == wanted


@pytest.mark.parametrize("markers", [False, True], ids=["", "markers"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "deepseek r1"])
def test_spelled_control_tokens_stay_text(name: str, markers: bool):
    """The row has the control tokens and the trained text that it has with harmless words in their place."""
    family, r = FAMILIES[name], renderer(name, markers)
    spelled = "x" + " ".join(family.control) + "y"
    rows = [r.samples(read(row("", say(f"u: {word}", f"a: so {word}")))) for word in (spelled, "harmless")]
    ((sample,), (harmless,)) = rows
    control = set(r.tokenizer.convert_tokens_to_ids(list(family.control)))
    assert [i for i in sample.input_ids if i in control] == [i for i in harmless.input_ids if i in control]
    assert trained(sample, r.tokenizer) == trained(harmless, r.tokenizer).replace("harmless", spelled)
    text = r.tokenizer.decode(family.ids(say(f"u: {spelled}", f"a: so {spelled}"), markers=markers))
    assert r.tokenizer.decode(sample.input_ids) == text
