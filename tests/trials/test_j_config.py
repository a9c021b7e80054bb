"""Kind J: config and command line. Faults that people met in other toolkits."""

import time

import pytest

from swiftlite.cli.main import run
from tests.cli.stand_in import stand_in_api


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """`swiftlite check` up to the model: exit code, what it printed, and its messages."""
    monkeypatch.chdir(tmp_path)
    stand_in_api(monkeypatch)

    def check(text, *overrides):
        (tmp_path / "r.yaml").write_text("model: org/name\ndata: rows.jsonl\n" + text)
        code = run(["check", "r.yaml", *overrides])
        return code, *capsys.readouterr()

    return check


@pytest.mark.parametrize("spelling", ["1e-5", "1E-5", "1.0e-5", '"1e-5"'])
def test_J01_numbers_in_any_usual_spelling(check, spelling):
    code, out, _ = check(f"train: {{learning_rate: {spelling}}}\n")
    assert code == 0
    assert "train.learning_rate: 1e-05 " in out


@pytest.mark.parametrize("spelling", ["1e", '"fast"'])
def test_J01_other_text_is_refused_at_once(check, spelling):
    begin = time.process_time()
    code, out, err = check(f"train:\n  learning_rate: {spelling}\n")
    assert time.process_time() - begin < 5
    assert (code, out) == (2, "")
    assert "r.yaml:4: train.learning_rate" in err
    assert spelling in err


def test_J02_words_stay_words(check):
    code, out, _ = check("checkpoint: {save_strategy: no}\neval: {eval_strategy: off}\ntrain: {mixed_precision: no}\n")
    assert code == 0
    for line in ('checkpoint.save_strategy: "no" ', 'eval.eval_strategy: "no" ', "train.precision: fp32 "):
        assert line in out
    assert "train.mixed_precision: no is train.precision: fp32 here." in out
    code, _, err = check("train: {optimizer: on}\n")
    assert code == 2
    assert "train.optimizer" in err
    assert "one of adamw, adamw_8bit, sgd" in err


def test_J04_the_command_line_beats_the_file(check):
    text = "train: {full_determinism: true, warmup_steps: 10}\nlora: {dropout: 0.1, modules_to_save: [lm_head]}\n"
    given = ["train.full_determinism=false", "train.warmup=0", "lora.dropout=0", "lora.modules_to_save=[]"]
    code, out, _ = check(text, *given)
    assert code == 0
    lines = dict(line.split(": ", 1) for line in out.splitlines() if ": " in line)
    for key, value in {
        "train.full_determinism": "false",
        "train.warmup_steps": "0.0",
        "lora.dropout": "0.0",
        "lora.modules_to_save": "[]",
    }.items():
        assert lines[key].split() == [value, "(command", "line)"]


def test_J08_old_names_work_with_a_note_or_lead_to_the_new_one(check):
    code, out, _ = check("eval: {evaluation_strategy: no}\n", "data.max_seq_length=512")
    assert code == 0
    assert "note: r.yaml:3: eval.evaluation_strategy is eval.eval_strategy here." in out
    assert "note: command line: data.max_seq_length is data.max_length here." in out
    assert "data.max_length: 512 " in out
    code, _, err = check("evaluation_strategy: no\nmax_seq_length: 512\ntokenizer: org/name\n")
    assert code == 2
    for new in ("eval.eval_strategy", "data.max_length", "model.name"):
        assert new in err
