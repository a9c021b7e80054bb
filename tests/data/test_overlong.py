"""Rows over max_length: what is kept of them, and what is said of the rest."""

from pathlib import Path

import pytest

from swiftlite.data.prepare import DataRefused
from swiftlite.data.render import IGNORE
from tests.data.preparing import chat, prep, trained, write
from tests.fixtures import CHATML, EOS, THINK, tok

SYSTEM = {"role": "system", "content": "S"}


def counts(report: dict) -> tuple:
    return report["kept"], report["split"], report["samples"], report["cut"], report["dropped"]


def test_text_is_split_into_pieces_that_lose_nothing(tmp_path: Path):
    text = "".join(chr(97 + i % 26) for i in range(100))
    t = tok(add_bos=True)
    got = prep(write(tmp_path / "d.jsonl", [{"text": text}, {"text": "ab"}]), t, overlong="split", max_length=40)
    assert [len(s.input_ids) for s in got.samples] == [40, 40, 22, 4]
    assert [i for s in got.samples[:3] for i in s.input_ids] == [*t(text)["input_ids"], EOS]
    assert all(s.labels == [IGNORE, *s.input_ids[1:]] for s in got.samples)
    assert counts(got.report) == (2, 1, 4, 0, {})


def test_rows_of_ids_keep_their_labels_and_lose_untrained_pieces(tmp_path: Path):
    ids = list(range(5, 15))
    row = {"input_ids": ids, "labels": [IGNORE] * 5 + ids[5:]}
    got = prep(write(tmp_path / "d.jsonl", [row]), overlong="split", max_length=4)
    assert [(s.input_ids, s.labels) for s in got.samples] == [
        ([9, 10, 11, 12], [IGNORE, 10, 11, 12]),
        ([13, 14], [IGNORE, 14]),
    ]


@pytest.mark.parametrize("template", [CHATML, THINK])
def test_chats_are_split_between_exchanges_behind_the_system_prompt(tmp_path: Path, template: str):
    messages = [SYSTEM, *chat("q1", "a1", "q2", "a2", "q3" * 20, "a3", "q4", "a4")]
    t = tok(template)
    got = prep(write(tmp_path / "d.jsonl", [{"messages": messages}]), t, overlong="split", max_length=100)
    answers = [trained(s, t).replace("<think>\n\n</think>\n\n", "") for s in got.samples]
    assert "".join(answers) == "".join(f"a{i}<|im_end|>" for i in range(1, 5))
    assert len(answers) > 1
    texts = [t.decode(s.input_ids) for s in got.samples]
    assert all(text.startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nq") for text in texts)
    assert max(len(s.input_ids) for s in got.samples) <= 100
    if template == CHATML:
        whole = [messages[:5], [SYSTEM, *messages[5:]]]
        assert [s.input_ids for s in got.samples] == [t.apply_chat_template(m)["input_ids"] for m in whole]
        assert counts(got.report) == (1, 1, 2, 0, {})


def test_an_exchange_that_does_not_fit_alone_is_left_out_and_said(tmp_path: Path):
    messages = chat("q1", "a1", "x" * 200, "a2", "q3", "a3")
    t = tok()
    got = prep(write(tmp_path / "d.jsonl", [{"messages": messages}]), t, overlong="split", max_length=60)
    assert [trained(s, t) for s in got.samples] == ["a1<|im_end|>", "a3<|im_end|>"]
    assert counts(got.report) == (1, 1, 2, 1, {})
    assert got.report["rows"][0]["reason"] == "cut: 1 of 3 exchanges do not fit 60 tokens"


def test_train_on_last_keeps_the_piece_with_the_last_answer(tmp_path: Path):
    t = tok()
    file = write(tmp_path / "d.jsonl", [{"messages": chat("q1", "a1", "q2" * 20, "a2")}])
    (sample,) = prep(file, t, overlong="split", max_length=80, train_on="last").samples
    assert t.decode(sample.input_ids).startswith("<|im_start|>user\nq2")
    with pytest.raises(DataRefused, match="longer than max length 60"):
        prep(file, t, overlong="split", max_length=60, train_on="last")


def test_what_has_no_place_to_split_at_is_dropped(tmp_path: Path):
    rows = [{"prompt": "p", "completion": "c" * 99}, {"prompt": "p", "completion": "c"}]
    assert counts(prep(write(tmp_path / "d.jsonl", rows), overlong="split", max_length=40).report) == (
        1, 0, 1, 0, {"longer than max length 40": 1},
    )  # fmt: skip
    rows = [{"prompt": chat("q"), "completion": [{"role": "assistant", "content": text}]} for text in ("c" * 99, "c")]
    assert prep(write(tmp_path / "d.jsonl", rows), overlong="split", max_length=40).report["kept"] == 1


def test_truncation_keeps_the_head(tmp_path: Path):
    t = tok()
    messages = chat("q1", "a1", "q2", "a" * 50)
    (sample,) = prep(write(tmp_path / "d.jsonl", [{"messages": messages}]), t, overlong="truncate", max_length=60).samples
    assert sample.input_ids == t.apply_chat_template(messages)["input_ids"][:60]
    assert trained(sample, t).startswith("a1<|im_end|>aaa")


def test_error_names_the_ways_on(tmp_path: Path):
    with pytest.raises(DataRefused, match="drop, truncate or split goes on"):
        prep(write(tmp_path / "d.jsonl", [{"text": "x" * 99}]), overlong="error", max_length=40)
