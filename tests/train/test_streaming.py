"""Runs on streamed rows."""

import json

import pytest

from swiftlite.recipe.errors import RecipeError
from swiftlite.recipe.load import load_recipe
from swiftlite.train.check import check
from swiftlite.train.console import Console
from tests.training import LORA, losses, recipe, train

ROWS = [
    {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"{n} " * (n + 1)}]} for n in range(10)
]
STREAM = {"streaming": True, "train_sampling_strategy": "random"}
EVERY_5 = {"save_strategy": "steps", "save_steps": 5, "save_total_limit": None}


@pytest.mark.parametrize("packing", [False, True])
def test_I08_a_stream_goes_on_behind_its_end_also_after_a_resume(tmp_path, packing):
    """Ten rows and twenty steps: fresh and resumed runs see the same second pass."""
    keys = {"rows": ROWS, "lora": LORA, "data": {**STREAM, "packing": packing, "max_length": 64}, "train": {"max_steps": 20}}
    whole = train(recipe(tmp_path, **keys, checkpoint=EVERY_5))
    assert len(losses(whole)) == 20
    for stop in (10, 15):
        saving = {**EVERY_5, "resume": str(whole / "checkpoints" / f"step-{stop:06d}")}
        part = train(recipe(tmp_path, **keys, checkpoint=saving, output=str(tmp_path / f"from-{stop}")))
        assert losses(part) == pytest.approx(losses(whole)[stop:], abs=1e-6)
    report = json.loads((whole / "data_report.json").read_text())["train"]
    assert report["read"] == 10 and report["kept"] == 10 and "streamed" in report["notes"][-1]


def test_I08_steps_must_be_given_for_a_stream(tmp_path):
    loaded = recipe(tmp_path, rows=ROWS, data=STREAM)
    for start in (train, lambda loaded: check(loaded, Console(quiet=True))):
        with pytest.raises(RecipeError, match=r"^train.max_steps: .*Set train.max_steps") as refused:
            start(loaded)
        assert refused.value.exit_code == 2


def test_other_files_are_refused_on_resume(tmp_path):
    keys = {"rows": ROWS, "lora": LORA, "data": STREAM, "checkpoint": EVERY_5, "train": {"max_steps": 5}}
    train(recipe(tmp_path, **keys))
    loaded = recipe(tmp_path, **{**keys, "rows": ROWS[:9], "train": {"max_steps": 10}})
    with pytest.raises(RecipeError, match="not those of the checkpoint"):
        train(load_recipe(str(loaded.path), ["checkpoint.resume=auto"]))


def test_check_shows_the_first_rows_and_says_what_is_not_known(tmp_path, capsys):
    loaded = recipe(tmp_path, rows=ROWS, data=STREAM, train={"max_steps": 5})
    found = check(loaded, Console())
    shown = capsys.readouterr().out
    assert found["rows"] is None and found["steps"] == 5 and "train" not in found["reports"]
    assert "not known before they are read" in shown and "{+" in shown and "rows.jsonl:" in shown


def test_threads_change_no_loss(tmp_path):
    keys = {"rows": ROWS, "lora": LORA, "train": {"max_steps": 12}}
    runs = [
        losses(train(recipe(tmp_path, **keys, data={**data, "num_workers": n}, output=str(tmp_path / f"{i}{n}"))))
        for i, data in enumerate((STREAM, {"train_sampling_strategy": "random"}))
        for n in (0, 2)
    ]
    assert runs[0] == runs[1] and runs[2] == runs[3] and len(runs[0]) == 12
