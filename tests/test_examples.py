"""The stories of examples/ run as they stand, on a tiny model in seconds; what they teach is tried on the real one."""

import json
import re
import runpy
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.training import losses, model_folder

FOLDER = Path(__file__).resolve().parents[1] / "examples"
NAMES = ["continue_adapter.py", "own_data.py"]  # the quickstart has tests of its own


def main(name: str, *arguments: object) -> None:
    runpy.run_path(str(FOLDER / name))["main"](*map(str, arguments))


@pytest.fixture
def tiny(tmp_path) -> Path:
    return model_folder(tmp_path)


def test_all_examples_are_tried():
    assert sorted(path.name for path in FOLDER.glob("*.py")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_form(name):
    text = (FOLDER / name).read_text("utf-8")
    assert len(text.splitlines()) < 60
    assert re.match(r'"""[A-Z].{20,}\.', text) and f"python examples/{name} [MODEL] [FOLDER]" in text
    assert 'model=SMOLLM2, folder="runs/' in text, "runs/ is what .gitignore leaves out"


def test_own_data(tiny, tmp_path, capsys):
    for _ in range(2):  # a second call starts over
        main("own_data.py", tiny, tmp_path / "own")
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("6 rows, ") and lines[0].endswith("24 steps")
        assert [line.split("  ")[1] for line in lines[-6:]][:2] == ["When does the pool open?", "Do I need a cap?"]
    found = losses(tmp_path / "own/run")
    assert found[-1] < found[0]
    assert (tmp_path / "own/run/adapter/adapter_model.safetensors").is_file()


def test_continue_adapter(tiny, tmp_path, capsys):
    main("continue_adapter.py", tiny, tmp_path / "go on")
    lines = capsys.readouterr().out.splitlines()
    assert [line[:16].strip() for line in lines[-4:]] == ["answers right", "the model", "first adapter", "second adapter"]
    first, second = (tmp_path / "go on" / name for name in ("first", "second"))
    assert losses(second)[0] < losses(first)[0], "the second run begins where the first ended"
    a, b = (load_file(run / "adapter/adapter_model.safetensors") for run in (first, second))
    assert a.keys() == b.keys() and any((a[name] != b[name]).any() for name in a)
    report = json.loads((second / "data_report.json").read_text())
    assert report["train"]["kept"] == 6


@pytest.mark.slow
def test_own_data_is_learned(tmp_path, capsys):
    main("own_data.py", runpy.run_path(str(FOLDER / "own_data.py"))["SMOLLM2"], tmp_path)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-6:]] == ["right"] * 6


@pytest.mark.slow
def test_both_sets_are_known_after_going_on(tmp_path, capsys):
    main("continue_adapter.py", runpy.run_path(str(FOLDER / "continue_adapter.py"))["SMOLLM2"], tmp_path)
    scores = [line.split()[-2:] for line in capsys.readouterr().out.splitlines()[-3:]]
    assert scores == [["0%", "0%"], ["100%", "0%"], ["100%", "100%"]]
