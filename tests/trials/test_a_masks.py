"""Trials of kind A: chat templates and loss masks."""

from pathlib import Path

import pytest

from swiftlite.data.formats import Conversation
from swiftlite.data.prepare import DataRefused
from swiftlite.data.render import IGNORE, Renderer
from tests.data.preparing import C1, chat, prep, trained, write
from tests.fixtures import BOS, CHATML, CHATML_GEN, EOS, IM_END, IM_START, LLAMA3, THINK_GP, TOOLS, tok


def test_A01_spans_are_found_without_markers(tmp_path: Path):
    t = tok(CHATML)
    (sample,) = prep(write(tmp_path / "d.jsonl", [{"messages": C1}]), t).samples
    assert len(sample.input_ids) == 50
    positions = [i for i, label in enumerate(sample.labels) if label != IGNORE]
    assert positions == [21, 22, 23, 46, 47, 48]
    assert [t.decode([sample.labels[i]]) for i in positions] == ["y", "o", "<|im_end|>", "b", "!", "<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, CHATML_GEN])
def test_A02_every_turn_by_default_the_last_one_by_name(tmp_path: Path, template: str):
    t = tok(template)
    file = write(tmp_path / "d.jsonl", [{"messages": C1}, {"messages": chat("1", "one", "2", "two", "3", "three")}])
    two, three = prep(file, t).samples
    assert trained(two, t) == "yo<|im_end|>b!<|im_end|>"
    assert trained(three, t) == "one<|im_end|>two<|im_end|>three<|im_end|>"
    assert trained(prep(file, t, train_on="last").samples[1], t) == "three<|im_end|>"


# The sibling: markers that leave the end-of-turn token outside.
OUTSIDE = CHATML_GEN.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")


@pytest.mark.parametrize("template", [CHATML, CHATML_GEN, OUTSIDE])
def test_A04_the_token_that_closes_the_turn_is_trained(tmp_path: Path, template: str):
    t = tok(template, eos="</s>")
    (sample,) = prep(write(tmp_path / "d.jsonl", [{"messages": C1}]), t).samples
    closing = [(i, sample.labels[i]) for i, id in enumerate(sample.input_ids) if id == IM_END]
    assert [label for _, label in closing] == [IGNORE, IM_END, IGNORE, IM_END]
    assert EOS not in sample.input_ids


def test_A04_the_closing_token_is_a_stop_token():
    renderer = Renderer(tok(CHATML, eos="</s>"))
    assert renderer.stop_ids == {EOS}
    prompt = renderer.prompt([{"role": "user", "content": "hi"}])
    assert prompt[-11:] == renderer.tokenizer("<|im_start|>assistant\n")["input_ids"]
    renderer.sample(Conversation("x:1", "chat", C1))
    assert renderer.stop_ids == {EOS, IM_END}


def test_A06_ids_are_the_template_tokenised_once(tmp_path: Path):
    t = tok(CHATML, eos="</s>")
    (sample,) = prep(write(tmp_path / "d.jsonl", [{"messages": C1}]), t).samples
    assert sample.input_ids == t.apply_chat_template(C1, tokenize=True)["input_ids"]
    assert sample.input_ids.count(IM_END) == 4
    assert (IM_END, IM_END) not in set(zip(sample.input_ids, sample.input_ids[1:], strict=False))


@pytest.mark.parametrize("template", [CHATML, CHATML_GEN])
def test_A07_a_merge_over_the_border_shifts_no_label(tmp_path: Path, template: str):
    t = tok(template, merge_newlines=True)
    messages = chat("q", "\nans")
    (*rows,) = prep(write(tmp_path / "m.jsonl", [{"messages": messages}]), t).samples
    rows += prep(write(tmp_path / "p.jsonl", [{"prompt": messages[:1], "completion": messages[1:]}]), t).samples
    assert (rows[0].input_ids, rows[0].labels) == (rows[1].input_ids, rows[1].labels)
    assert t.convert_tokens_to_ids("ĊĊ") in rows[0].input_ids
    assert trained(rows[0], t) == "ans<|im_end|>"


def test_A07_sibling_a_merge_over_the_border_of_a_text_pair(tmp_path: Path):
    t = tok(merge_newlines=True)
    (sample,) = prep(write(tmp_path / "d.jsonl", [{"prompt": "q\n", "completion": "\nans"}]), t).samples
    assert trained(sample, t) == "ans</s>"


def test_A09_exactly_one_bos(tmp_path: Path):
    t = tok(LLAMA3, add_bos=True)
    (sample,) = prep(write(tmp_path / "d.jsonl", [{"messages": C1}]), t).samples
    assert sample.input_ids[:2] == [BOS, IM_START]
    assert sample.input_ids.count(BOS) == 1
    renderer = Renderer(t)
    assert renderer.prompt([{"role": "user", "content": "hi"}]).count(BOS) == 1
    assert renderer.prompt("hi").count(BOS) == 1
    (text,) = prep(write(tmp_path / "t.jsonl", [{"text": "<s>hi"}]), t).samples
    assert text.input_ids.count(BOS) == 1


def test_A11_what_the_generation_prompt_supplies_is_not_trained(tmp_path: Path):
    t = tok(THINK_GP)
    (sample,) = prep(write(tmp_path / "d.jsonl", [{"messages": chat("q", "A")}]), t).samples
    assert "<think>" in t.decode(sample.input_ids)
    assert trained(sample, t) == "A<|im_end|>"


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_A12_nothing_to_train_stops_before_step_1(tmp_path: Path, overlong: str):
    long = {"messages": chat("a long question here", "ok")}
    with pytest.raises(DataRefused) as stopped:
        prep(write(tmp_path / "d.jsonl", [long] * 4), tok(CHATML_GEN), max_length=8, overlong=overlong)
    message = str(stopped.value)
    assert stopped.value.exit_code == 3
    assert "no trainable tokens" in message
    assert "all 4 rows" in message
    assert "max length 8" in message


def test_A12_rows_without_trained_tokens_are_counted(tmp_path: Path):
    long, short = chat("a long question here", "ok"), chat("a", "b")
    rows = [{"messages": long + long}] * 3 + [{"messages": short}]
    for overlong, count in (("drop", "dropped"), ("truncate", "cut")):
        got = prep(write(tmp_path / "d.jsonl", rows), tok(CHATML_GEN), max_length=64, overlong=overlong)
        numbers = {"dropped": sum(got.report["dropped"].values()), "cut": got.report["cut"]}
        assert numbers[count] == 3
        assert got.report["kept"] == len(got.samples) == (1 if overlong == "drop" else 4)
        assert len([row for row in got.report["rows"] if "max length" in row["reason"]]) == 3


def call(arguments: object) -> dict:
    asked = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    return {"messages": [{"role": "user", "content": "q"}, asked]}


def test_A14_arguments_as_string_or_object_render_alike(tmp_path: Path):
    t = tok(TOOLS)
    x, y = prep(write(tmp_path / "d.jsonl", [call({"city": "Oslo"}), call('{"city":"Oslo"}')]), t).samples
    assert x.input_ids == y.input_ids
    assert '{"city": "Oslo"}' in t.decode(x.input_ids)
    assert "\\" not in t.decode(x.input_ids)
    assert trained(x, t) == '{"name": "f", "arguments": {"city": "Oslo"}}<|im_end|>'


def test_A15_null_content_is_empty(tmp_path: Path):
    t = tok(CHATML)
    rows = [{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": None}]}]
    (sample,) = prep(write(tmp_path / "s.jsonl", rows), t).samples
    asked = {"role": "user", "content": "hi"}
    rows = [
        {"messages": [asked, {"role": "assistant", "content": None, "tool_calls": []}]},
        {"messages": [asked, {"role": "assistant"}]},
    ]
    for s in (sample, *prep(write(tmp_path / "m.jsonl", rows), t).samples):
        assert trained(s, t) == "<|im_end|>"
        assert "None" not in t.decode(s.input_ids)
        assert "null" not in t.decode(s.input_ids)
