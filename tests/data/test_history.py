"""Rows whose earlier turns the template alters: trained as inference sees each turn, or refused."""

from pathlib import Path

import pytest

from swiftlite.data.formats import Conversation, RowError
from swiftlite.data.prepare import DataRefused
from swiftlite.data.render import Renderer
from swiftlite.data.report import table
from tests.data.preparing import C1, chat, prep, trained, write
from tests.fixtures import CHATML, CHATML_GEN, PROMPT, THINK, tok

REASONED = chat("q", "<think>\nwhy\n</think>\n\nA", "r", "<think>\nso\n</think>\n\nB")
# With markers, and an earlier answer is shortened once a later one follows.
SHORTENED = CHATML_GEN.replace("{{ m.content }}<|im_end|>", "{{ m.content if loop.last else m.content[:1] }}<|im_end|>", 1)


def conv(messages: list[dict], **fields) -> Conversation:
    return Conversation("d.jsonl:1", "chat", messages, **fields)


@pytest.mark.parametrize(("template", "answers"), [(THINK, ["<think>\nwhy\n</think>\n\nA", "<think>\nso\n</think>\n\nB"])])
def test_every_answer_is_trained_as_inference_sees_it(template: str, answers: list[str]):
    t = tok(template)
    renderer = Renderer(t)
    samples = renderer.samples(conv(REASONED))
    assert [trained(s, t) for s in samples] == [f"{answer}<|im_end|>" for answer in answers]
    for sample, end in zip(samples, (2, 4), strict=True):
        assert sample.input_ids == t.apply_chat_template(REASONED[:end])["input_ids"]
        prompt = renderer.prompt(REASONED[: end - 1])
        assert sample.input_ids[: len(prompt)] == prompt
        assert set(sample.labels[: len(prompt)]) == {-100}
    assert "why" not in t.decode(samples[1].input_ids)
    renderer.samples(conv(REASONED))
    assert [note for note in renderer.notes if "history_mismatch: split" in note] == [renderer.notes[-1]]


def test_turns_between_tools_stay_together_where_inference_saw_them_so():
    t = tok(THINK)
    step = [{"role": "assistant", "content": "look"}, {"role": "tool", "content": "42"}, {"role": "assistant", "content": "A"}]
    row = [*chat("q"), *step, *chat("r"), *step]
    samples = Renderer(t).samples(conv(row))
    assert [s.input_ids for s in samples] == [t.apply_chat_template(row[:end])["input_ids"] for end in (4, 8)]
    look, answer = (f"<think>\n\n</think>\n\n{text}<|im_end|>" for text in ("look", "A"))
    assert [trained(s, t) for s in samples] == [look + answer] * 2
    alone = [trained(s, t) for s in Renderer(tok(SHORTENED)).samples(conv(row))]
    assert alone == ["look<|im_end|>", "A<|im_end|>"] * 2


def test_markers_do_not_hide_altered_turns():
    t = tok(SHORTENED)
    assert [trained(s, t) for s in Renderer(t).samples(conv(C1))] == ["yo<|im_end|>", "b!<|im_end|>"]
    with pytest.raises(RowError, match="turn of message 2 reads 'o"):
        Renderer(t, history_mismatch="error").samples(conv(C1))
    assert [trained(s, t) for s in Renderer(t, train_on="last").samples(conv(C1))] == ["b!<|im_end|>"]


def test_last_and_error():
    t = tok(THINK)
    (last,) = Renderer(t, history_mismatch="last").samples(conv(REASONED))
    assert trained(last, t) == "<think>\nso\n</think>\n\nB<|im_end|>"
    with pytest.raises(RowError, match="altered by the chat template"):
        Renderer(t, history_mismatch="error").samples(conv(REASONED))


def test_a_user_at_the_end_alters_the_last_answer_too():
    t = tok(THINK)
    ends = [*REASONED, {"role": "user", "content": "more"}]
    for keys in ({"train_on": "last"}, {"history_mismatch": "last"}):
        (sample,) = Renderer(t, **keys).samples(conv(ends))
        assert sample.input_ids == t.apply_chat_template(REASONED)["input_ids"]
        assert trained(sample, t) == "<think>\nso\n</think>\n\nB<|im_end|>"


def test_only_what_train_on_wants_is_split():
    t = tok(THINK)
    (whole,) = Renderer(t, train_on="all").samples(conv(REASONED))
    assert whole.input_ids == t.apply_chat_template(REASONED)["input_ids"]
    third = chat("q", "A", "r", "B", "s", "C")
    samples = Renderer(t, train_on="completion").samples(conv(third, completion_from=2))
    assert [trained(s, t)[-11:] for s in samples] == ["B<|im_end|>", "C<|im_end|>"]


def test_rows_that_are_not_altered_stay_whole():
    for template in (CHATML, CHATML_GEN, THINK):
        assert len(Renderer(tok(template)).samples(conv(chat("q", "A")))) == 1
    assert len(Renderer(tok(CHATML)).samples(conv(C1))) == 1


def test_a_turn_that_inference_could_not_write_refuses_the_row():
    # The generation prompt closes the reasoning block, the answer has one.
    prompted = (
        THINK.removesuffix(PROMPT) + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
    )
    with pytest.raises(RowError, match="generation prompt of message 2"):
        Renderer(tok(prompted)).samples(conv(REASONED))


def test_the_report_counts_rows_and_what_they_gave(tmp_path: Path):
    file = write(tmp_path / "d.jsonl", [{"messages": REASONED}, {"messages": chat("q", "A")}])
    got = prep(file, tok(THINK))
    assert [s.source for s in got.samples] == [f"{file}:1", f"{file}:1", f"{file}:2"]
    counts = {name: got.report[name] for name in ("read", "kept", "split", "samples", "cut", "dropped")}
    assert counts == {"read": 2, "kept": 2, "split": 1, "samples": 3, "cut": 0, "dropped": {}}
    assert "split 1: 2 rows give 3 rows to train on" in table(got.report)
    assert sum("history_mismatch: split" in note for note in got.report["notes"]) == 1
    assert prep(file, tok(THINK), history_mismatch="last").report["split"] == 0
    with pytest.raises(DataRefused, match=r"line 1: altered by the chat template.*history_mismatch: split"):
        prep(file, tok(THINK), history_mismatch="error")


def test_turns_that_do_not_fit_are_cut_from_a_split_row(tmp_path: Path):
    long = chat("q", "A", "r" * 80, "B")
    got = prep(write(tmp_path / "d.jsonl", [{"messages": long}, {"messages": chat("x" * 90, "A")}]), tok(THINK), max_length=64)
    assert len(got.samples) == 1
    assert (got.report["kept"], got.report["cut"], got.report["dropped"]) == (1, 1, {"longer than max length 64": 1})
    assert "1 of 2 turns fit 64 tokens" in got.report["rows"][0]["reason"]


def test_a_split_row_is_held_back_whole(tmp_path: Path):
    rows = [{"messages": chat(f"q{i}", "A", "r", "B")} for i in range(10)]
    got = prep(write(tmp_path / "d.jsonl", rows), tok(THINK), eval_split=3)
    back, kept = {s.source for s in got.held_back}, {s.source for s in got.samples}
    assert (len(got.held_back), len(back), len(kept), got.report["held_back"]) == (6, 3, 7, 3)
    assert back.isdisjoint(kept)
