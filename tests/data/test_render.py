"""Ids equal the template's own, labels cover exactly the assistant turns: templates by conversation shapes."""

import random
from collections.abc import Callable

import pytest

from swiftlite.data.formats import Conversation, RowError
from swiftlite.data.render import IGNORE, Renderer, Sample, label_spans
from swiftlite.data.template import CHATML_LITE, template_text
from swiftlite.recipe.errors import DataError, ModelError, RecipeError
from tests.data.preparing import C1, chat, trained
from tests.fixtures import CHATML, CHATML_GEN, EOS, IM_END, IM_START, LLAMA3, PROMPT, STRICT, THINK, THINK_GP, TOOLS, TURN, tok

# In the manner of public families, written for these tests. Beside each: what the turn with content `c` trains.
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
PHI = (  # an eos behind the last turn only, where no generation prompt is
    "{% for m in messages %}" + TURN + "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
)
VICUNA = (  # one end-of-turn token, on the last turn
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if loop.last and m.role == 'assistant' %}{{ eos_token }}"
    "{% else %}{{ '\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
GLM = (  # no end-of-turn token at all: the next role's ends a turn
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WIDE = CHATML_GEN.replace("<|im_start|>assistant\n{% generation %}", "{% generation %}<|im_start|>assistant\n")
NARROW = CHATML_GEN.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")

TEMPLATES: dict[str, tuple[str, Callable[[str], str]]] = {
    "chatml": (CHATML, lambda c: f"{c}<|im_end|>"),
    "chatml, markers": (CHATML_GEN, lambda c: f"{c}<|im_end|>"),
    "markers around the header too": (WIDE, lambda c: f"{c}<|im_end|>"),
    "markers around the content only": (NARROW, lambda c: f"{c}<|im_end|>"),
    "llama3": (LLAMA3, lambda c: f"{c}<|im_end|>"),
    "gemma": (GEMMA, lambda c: f"{c.strip()}<|im_end|>"),
    "mistral": (MISTRAL, lambda c: f" {c}</s>"),
    "phi": (PHI, lambda c: f"{c}<|im_end|>"),
    "tools": (TOOLS, lambda c: f"{c}<|im_end|>"),
}
SHAPES = {
    "one turn": chat("hi", "yo"),
    "two turns": C1,
    "system": [{"role": "system", "content": "be brief"}, *C1],
    "two users in a row": [{"role": "user", "content": "x"}, *C1],
    "two assistants in a row": [*chat("hi", "yo"), {"role": "assistant", "content": "more"}, *chat("q", "z")],
    "ends with the user": [*C1, {"role": "user", "content": "last"}],
    "starts with the assistant": chat("welcome", "hi", "yo", start="assistant"),
    "tool": [*chat("hi", "call"), {"role": "tool", "content": "42"}, {"role": "assistant", "content": "it is 42"}],
    "empty answer": chat("hi", "", "a?", "b!"),
    "unicode": chat("grüß 你好", "naïve 🙂 é", "?", "ß"),
    "spaces at the borders": chat(" hi ", "\n yo \n", "?", " z"),
    "long": chat(*(f"{'word ' * (i % 7)}{i}" for i in range(40))),
    "equal contents": chat("a", "a", "a", "a"),
    "role names as contents": chat("assistant", "user", "assistant\n", "assistant"),
}


def render(tokenizer, messages, **keys) -> Sample:
    return Renderer(tokenizer, **keys).sample(Conversation("d.jsonl:1", "chat", messages))


@pytest.mark.parametrize("trim_offsets", [False, True], ids=["", "trimmed offsets"])
@pytest.mark.parametrize("merge_newlines", [False, True], ids=["", "merges"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_masks(name: str, merge_newlines: bool, trim_offsets: bool):
    template, answer = TEMPLATES[name]
    t = tok(template, merge_newlines=merge_newlines, trim_offsets=trim_offsets)
    renderer = Renderer(t)
    for shape, messages in SHAPES.items():
        sample = renderer.sample(Conversation("d.jsonl:1", "chat", messages))
        assert sample.input_ids == t.apply_chat_template(messages)["input_ids"], shape
        expected = "".join(answer(m["content"]) for m in messages if m["role"] == "assistant")
        got = trained(sample, t)
        # A newline that merged with the header's stands outside.
        assert got == expected or (merge_newlines and got == expected.replace("\n yo", " yo")), shape


@pytest.mark.parametrize("name", TEMPLATES)
def test_random_conversations(name: str):
    template, answer = TEMPLATES[name]
    t, chance = tok(template), random.Random(name)
    renderer = Renderer(t)
    pieces = ["a", "assistant", "\n", " ", "user", "model", ":", "é", "🙂", "[INST]", "word", "###"]
    for _ in range(60):
        roles = [chance.choice(["user", "assistant"]) for _ in range(chance.randint(1, 7))]
        messages = [
            {"role": role, "content": "".join(chance.choices(pieces, k=chance.randint(0, 5)))} for role in ["user", *roles]
        ]
        sample = renderer.sample(Conversation("d.jsonl:1", "chat", messages))
        assert sample.input_ids == t.apply_chat_template(messages)["input_ids"]
        assert trained(sample, t) == "".join(answer(m["content"]) for m in messages if m["role"] == "assistant")


@pytest.mark.parametrize("trim_offsets", [False, True])  # trimmed: the header's last space has no width
def test_a_template_whose_only_end_token_is_behind_the_last_turn(trim_offsets: bool):
    t = tok(VICUNA, trim_offsets=trim_offsets)
    assert trained(render(t, C1), t) == "yob!</s>"


def test_a_strict_template_keeps_its_own_rules():
    t = tok(STRICT)
    assert trained(render(t, C1), t) == "yo<|im_end|>b!<|im_end|>"
    with pytest.raises(RowError, match="roles must alternate"):
        render(t, SHAPES["two users in a row"])


def test_a_template_that_raises_for_prefixes_is_proven_by_substitution():
    refuse = "{% if messages[-1].role == 'user' and messages | length > 1 and not done %}{{ raise_exception('no') }}{% endif %}"
    t = tok(refuse + CHATML)
    messages = chat("hi", "yo", "a?", "a?", "bye", "z")  # contents repeat: only a real proof finds the right ones
    with pytest.raises(Exception, match="no"):
        t.apply_chat_template(messages[:3], add_generation_prompt=True)
    assert trained(render(t, messages), t) == "yo<|im_end|>a?<|im_end|>z<|im_end|>"


def test_a_first_turn_of_which_the_template_drops_a_part_is_not_provable():
    t = tok(CHATML.replace("m.content", "m.content.split('|')[-1]"))
    messages = chat("kept", "q", "b", start="assistant")
    assert trained(render(t, messages), t) == "kept<|im_end|>b<|im_end|>"
    with pytest.raises(RowError, match="does not show where assistant message 1"):
        render(t, chat("dropped|kept", "q", "b", start="assistant"))


@pytest.mark.parametrize("template", [THINK, THINK_GP])
def test_altered_history_is_refused_and_the_last_turn_proven(template: str):
    t = tok(template)
    with pytest.raises(RowError, match=r"of message 2 reads .*history_mismatch: split"):
        render(t, C1)
    last = render(t, C1, train_on="last")
    assert trained(last, t).endswith("b!<|im_end|>")
    assert "yo" not in trained(last, t)
    reasoned = chat("q", "<think>\nwhy\n</think>\n\nA")
    if template == THINK:
        assert trained(render(t, reasoned), t) == "<think>\nwhy\n</think>\n\nA<|im_end|>"
    else:  # inference would have written an empty block here
        with pytest.raises(RowError, match="generation prompt of message 2"):
            render(t, reasoned)


def test_train_on():
    t = tok()
    assert trained(render(t, C1, train_on="all"), t) == t.decode(t.apply_chat_template(C1)["input_ids"][1:])
    assert trained(render(t, C1, train_on="last"), t) == "b!<|im_end|>"
    split = Conversation("d.jsonl:1", "chat", C1, completion_from=3)
    for train_on in ("assistant", "last", "completion"):
        assert trained(Renderer(t, train_on=train_on).sample(split), t) == "b!<|im_end|>"
    with pytest.raises(DataError, match="no completion"):
        render(t, C1, train_on="completion")


def test_train_on_last_with_more_markers_than_turns():
    parts = CHATML_GEN.replace("{{ m.content }}", "{{ m.content[:1] }}{% endgeneration %}{% generation %}{{ m.content[1:] }}", 1)
    t = tok(parts)
    assert trained(render(t, C1), t) == "yo<|im_end|>b!<|im_end|>"
    assert trained(render(t, C1, train_on="last"), t) == "b!<|im_end|>"


def test_markers_that_leave_turns_out_are_not_trusted():
    t = tok("{% if false %}{% generation %}{% endgeneration %}{% endif %}" + CHATML)
    assert trained(render(t, C1), t) == "yo<|im_end|>b!<|im_end|>"


def test_text_rows_have_bos_once_and_a_trained_eos():
    t = tok(add_bos=True)
    renderer = Renderer(t)
    text = renderer.sample(Conversation("d:1", "text", text="ab"))
    assert text.input_ids == [*t("ab")["input_ids"], EOS]
    assert text.labels == [IGNORE, *text.input_ids[1:]]
    pair = renderer.sample(Conversation("d:1", "completion", prompt="ab", completion="cd"))
    assert pair.input_ids == [*t("abcd")["input_ids"], EOS]
    assert trained(pair, t) == "cd</s>"
    assert renderer.sample(Conversation("d:1", "text", text="ab</s>")).input_ids == text.input_ids
    assert renderer.sample(Conversation("d:1", "text", text="")).trained == 0
    plain = Renderer(tok()).sample(Conversation("d:1", "text", text="ab"))
    assert (len(plain.input_ids), plain.labels[0]) == (3, IGNORE)


def test_rows_of_ids():
    renderer = Renderer(tok(), vocab_size=300)
    assert renderer.sample(Conversation("d:1", "tokens", input_ids=[7, 8, 299])).labels == [IGNORE, 8, 299]
    assert renderer.sample(Conversation("d:1", "tokens", input_ids=[7, 8, 9], labels=[7, IGNORE, 9])).labels == [
        IGNORE,
        IGNORE,
        9,
    ]
    with pytest.raises(RowError, match="input_ids holds 300; the model has ids 0 to 299"):
        renderer.sample(Conversation("d:1", "tokens", input_ids=[300]))
    with pytest.raises(RowError, match="labels holds -1"):
        renderer.sample(Conversation("d:1", "tokens", input_ids=[7], labels=[-1]))


def test_label_spans_by_the_visible_character():
    text, span = "ab \ncd e", [(4, 6)]
    tokens = [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert label_spans(text, [1, 2, 3, 4], tokens, span) == [IGNORE, IGNORE, 3, IGNORE]
    merged = [(0, 2), (2, 6), (6, 8)]  # " \ncd": its visible part is inside
    assert label_spans(text, [1, 2, 3], merged, span) == [IGNORE, 2, IGNORE]
    header = [(0, 6), (6, 8)]  # "ab \ncd": starts with header text
    assert label_spans(text, [1, 2], header, span) == [IGNORE, IGNORE]


def test_a_base_model_gets_the_named_default_said_aloud():
    t = tok(None, add_bos=True)
    renderer = Renderer(t)
    sample = renderer.sample(Conversation("d:1", "chat", C1))
    assert any("chatml-lite" in note for note in renderer.notes)
    assert renderer.template.endswith(CHATML_LITE)
    assert trained(sample, t) == "yo</s>b!</s>"
    assert sample.input_ids == t.apply_chat_template(C1, chat_template=renderer.template)["input_ids"]
    assert sample.input_ids.count(t.bos_token_id) == 1
    with pytest.raises(DataError, match="neither a chat template nor an eos"):
        render(tok(None, eos=None), C1)


def test_data_chat_template_replaces_the_models(tmp_path):
    (tmp_path / "t.jinja").write_text(VICUNA)
    text = template_text(str(tmp_path / "t.jinja"))
    assert template_text(VICUNA) == text == VICUNA
    renderer = Renderer(tok(CHATML), chat_template=text)
    assert renderer.template == VICUNA
    assert renderer.tokenizer.decode(renderer.prompt(chat("hi"))) == "user: hi\nassistant: "
    with pytest.raises(RecipeError, match="no-such"):
        template_text("no-such.jinja")
    with pytest.raises(RecipeError, match="line 1 of the chat template"):
        Renderer(tok("{% for %}")).prompt(chat("hi"))


def test_template_kwargs_are_live_or_refused():
    t = tok("{% if brief %}short {% endif %}" + CHATML)
    renderer = Renderer(t, template_kwargs={"brief": True})
    assert t.decode(renderer.prompt(chat("hi"))).startswith("short <|im_start|>user")
    with pytest.raises(RecipeError, match=r"reads no 'breif'\. Did you mean 'brief'"):
        Renderer(t, template_kwargs={"breif": True}).prompt(chat("hi"))


def test_prompt_is_the_training_prefix():
    for template, _ in TEMPLATES.values():
        renderer = Renderer(tok(template))
        sample = renderer.sample(Conversation("d:1", "chat", C1))
        prompt = renderer.prompt([{"role": "human", "content": "hi"}])
        assert sample.input_ids[: len(prompt)] == prompt
        assert set(sample.labels[: len(prompt)]) == {IGNORE}


@pytest.mark.parametrize(
    ("message", "tools", "what"),
    [
        ({"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, None, "tool_calls"),
        ({"reasoning_content": "why"}, None, "reasoning_content"),
        ({}, [{"name": "f"}], "tools"),
    ],
)
def test_what_the_template_would_leave_out_is_refused(message: dict, tools: list | None, what: str):
    messages = [*chat("q"), {"role": "assistant", "content": "a", **message}]
    with pytest.raises(RowError, match=f"the row has {what}, which the chat template does not write"):
        Renderer(tok(CHATML)).sample(Conversation("d:1", "chat", messages, tools=tools))


def test_tools_reach_the_template():
    t = tok("{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    sample = Renderer(t).sample(Conversation("d:1", "chat", C1, tools=tools))
    assert sample.input_ids == t.apply_chat_template(C1, tools=tools)["input_ids"]
    assert '"name": "f"' in t.decode(sample.input_ids)


def test_a_tokenizer_with_a_template_for_tools():
    tools = [{"name": "f"}]
    t = tok({"default": CHATML, "tool_use": "{{ tools | tojson }}" + CHATML})
    renderer = Renderer(t)
    for given in (None, tools):
        sample = renderer.sample(Conversation("d:1", "chat", C1, tools=given))
        assert sample.input_ids == t.apply_chat_template(C1, tools=given)["input_ids"]
        assert trained(sample, t) == "yo<|im_end|>b!<|im_end|>"
    assert renderer.template == t.chat_template


def test_stop_ids_and_notes_tell_of_missing_end_tokens():
    t = tok(GLM)
    renderer = Renderer(t)
    assert trained(renderer.sample(Conversation("d:1", "chat", C1[:2])), t) == "yo"
    assert renderer.stop_ids == {EOS}
    assert "not by a last answer" in renderer.notes[0]
    assert trained(renderer.sample(Conversation("d:1", "chat", C1)), t) == "yo<|im_start|>b!"
    assert renderer.stop_ids == {EOS, IM_START}
    renderer = Renderer(tok(THINK), train_on="last")
    renderer.sample(Conversation("d:1", "chat", C1))
    assert renderer.stop_ids == {EOS, IM_END}
    assert "<think>" in renderer.notes[0]
    renderer = Renderer(tok("{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT, add_bos=True))
    renderer.sample(Conversation("d:1", "chat", C1))
    assert "puts <s> in front of plain text" in renderer.notes[0]


def test_half_characters_and_slow_tokenizers_are_refused():
    with pytest.raises(RowError, match="lone surrogate"):
        render(tok(), chat("a\ud800", "b"))

    class Slow:
        is_fast, name_or_path = False, "slow/model"

    with pytest.raises(ModelError, match="slow tokenizer"):
        Renderer(Slow())
