"""Messages of other toolkits: per-message flags, reasoning, content blocks and roles of tool calls."""

import pytest

from swiftlite.data.formats import Conversation, RowError
from swiftlite.data.messages import read_messages, read_tools
from swiftlite.data.render import Renderer
from tests.data.preparing import C1, chat, trained
from tests.fixtures import CHATML, CHATML_GEN, PROMPT, THINK, TOOLS, tok

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
REASONS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT
)


def turn(text: str, **keys) -> dict:
    return {"role": "assistant", "content": text, **keys}


def render(messages: list[dict], template: str = CHATML, **keys) -> str:
    t = tok(template)
    samples = Renderer(t, **keys).samples(Conversation("d.jsonl:1", "chat", read_messages(messages)))
    return "|".join(trained(s, t) for s in samples)


@pytest.mark.parametrize("flag", [{"loss": False}, {"weight": 0}, {"train": False}, {"training": False}, {"loss_weight": 0.0}])
@pytest.mark.parametrize("template", [CHATML, CHATML_GEN, THINK])
def test_a_flag_leaves_a_turn_out(template: str, flag: dict):
    first = [C1[0], C1[1] | flag, *C1[2:]]
    assert render(first, template).replace("<think>\n\n</think>\n\n", "") == "b!<|im_end|>"
    second = [*C1[:3], C1[3] | flag]
    assert render(second, template).replace("<think>\n\n</think>\n\n", "") == "yo<|im_end|>"
    assert render(second, template, train_on="last") == ""
    with pytest.raises(RowError, match=r"not to be trained, but data\.train_on is all"):
        render(second, template, train_on="all")


def test_flags_that_say_yes_change_nothing():
    flagged = [C1[0] | {"weight": 1, "loss": False}, C1[1] | {"loss": True, "weight": 1.0}, *C1[2:]]
    assert read_messages([flagged[1]]) == [C1[1]]
    assert render([C1[0], *flagged[1:]]) == render(C1)


def test_flags_between_more_markers_than_turns():
    parts = CHATML_GEN.replace("{{ m.content }}", "{{ m.content[:1] }}{% endgeneration %}{% generation %}{{ m.content[1:] }}", 1)
    assert render([C1[0], C1[1] | {"loss": False}, *C1[2:]], parts) == "b!<|im_end|>"
    assert render([*C1[:3], C1[3] | {"loss": False}], parts) == "yo<|im_end|>"


def test_templates_do_not_see_our_marks():
    dumps = "{{ messages[1] | tojson }}" + CHATML
    t = tok(dumps)
    messages = read_messages([C1[0], C1[1] | {"loss": False, "name": "n"}, *C1[2:]])
    sample = Renderer(t).sample(Conversation("d:1", "chat", messages))
    assert '{"role": "assistant", "content": "yo", "name": "n"}' in t.decode(sample.input_ids)


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (turn("a", weight=0.5), "'weight': 0.5 in message 1: fractional weights cannot be honoured"),
        (turn("a", loss="no"), "'loss': 'no' in message 1 is neither true nor false"),
        (turn("a", loss=True, weight=0), "contradict each other"),
        ({"role": "user", "content": "a", "loss": True}, "only assistant turns can be trained"),
    ],
)
def test_flags_that_cannot_be_honoured(message: dict, what: str):
    with pytest.raises(RowError, match="message flag") as refused:
        read_messages([message])
    assert what in str(refused.value)


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_gets_the_name_that_the_template_reads(key: str):
    assert render([*chat("q"), turn("a", **{key: "why"})], REASONS) == "[why]a<|im_end|>"
    with pytest.raises(RowError, match=f"the row has {key}, which the chat template does not write"):
        render([*chat("q"), turn("a", **{key: "why"})], "{% if enable_thinking %}{% endif %}" + CHATML)


def test_reasoning_that_is_read_but_not_written_is_refused():
    silent = REASONS.replace("[{{ m.reasoning_content }}]", "")
    with pytest.raises(RowError, match="does not write the reasoning of message 2"):
        render([*chat("q"), turn("a", reasoning_content="why")], silent)


def test_content_blocks_become_openai_messages():
    user = {"role": "user", "content": [{"type": "text", "text": "q"}]}
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}
    blocks = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "let me"}, use]
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "42"}]},
        {"type": "tool_result", "tool_use_id": "t2", "content": "43"},
        {"type": "text", "text": "and?"},
    ]
    got = read_messages([user, turn(blocks, loss=False), {"role": "user", "content": results}, turn("ok")])
    assert got == [
        {"role": "user", "content": "q"},
        turn("let me", train=False, tool_calls=[{"id": "t1", **CALL}], reasoning_content="hm"),
        {"role": "tool", "content": "42", "tool_call_id": "t1"},
        {"role": "tool", "content": "43", "tool_call_id": "t2"},
        {"role": "user", "content": "and?"},
        turn("ok"),
    ]
    assert read_messages(got) == got


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ({"role": "user", "content": [{"type": "tool_use", "name": "f", "input": {}}]}, "of type 'tool_use', which"),
        (turn([{"type": "tool_result", "content": "x"}]), "of type 'tool_result', which"),
        ({"role": "user", "content": ["a", {"type": "tool_result", "content": "x"}]}, "text in front of a tool_result"),
        (turn([{"type": "tool_use", "name": "f", "input": {}}, {"type": "image"}]), "part of type 'image'"),
        (turn([{"type": "tool_use", "name": "f", "input": "{"}]), "not a JSON object"),
        ({"role": "tool_call", "content": "f(1)"}, "content of message 1 is not JSON"),
        ({"role": "tool_call", "content": "[]"}, "is not a call with a name"),
        ({"role": "tool_call", "content": '{"arguments": {}}'}, "is not a call with a name"),
    ],
)  # fmt: skip
def test_wrong_blocks_and_calls_are_named(message: dict, what: str):
    with pytest.raises(RowError) as refused:
        read_messages([message])
    assert what in str(refused.value)


def test_roles_of_tool_calls_join_to_one_turn():
    one = {"role": "tool_call", "content": '{"name": "f", "arguments": {"x": 1}}'}
    other = {"from": "function_call", "value": '{"name": "f", "arguments": "{\\"x\\": 1}"}'}
    answer = {"role": "tool_response", "content": "42"}
    got = read_messages([*chat("q"), one, other, answer, {"role": "tool_response", "content": "43"}, turn("ok")])
    tools = [{"role": "tool", "content": "42"}, {"role": "tool", "content": "43"}]
    assert got == [*chat("q"), turn("", tool_calls=[CALL, CALL]), *tools, turn("ok")]
    assert read_messages([*chat("q", "wait"), one])[1:] == [turn("wait", tool_calls=[CALL])]
    apart = read_messages([*chat("q"), turn("wait", loss=False), one])
    assert apart[1:] == [turn("wait", train=False), turn("", tool_calls=[CALL])]
    shown = '{"name": "f", "arguments": {"x": 1}}<|im_end|>'
    assert render([*chat("q"), one, answer, turn("ok")], TOOLS) == shown + "ok<|im_end|>"


def test_tools_of_anthropics_form():
    schema = {"type": "object", "properties": {}}
    tool = {"name": "f", "description": "d", "input_schema": schema}
    function = {"name": "f", "description": "d", "parameters": schema}
    assert read_tools([tool]) == [{"type": "function", "function": function}]
    assert read_tools([{"name": "f", "parameters": schema}]) == [{"name": "f", "parameters": schema}]
