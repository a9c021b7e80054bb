"""Trials of kind E on several gloo processes."""

import pytest
from safetensors.torch import load_file

from swiftlite.dist.checkpoint import Saved
from tests.ranks import run_ranks
from tests.training import metrics, model_folder, recipe, train
from tests.trials.test_e_loss import R4, R4_LOSS, assert_close, sgd


@pytest.mark.parametrize("data", [{}, {"packing": True, "max_length": 24}], ids=["padded", "packed"])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_E04_the_evaluation_loss_is_that_of_one_process(tmp_path, strategy, size, data):
    """With rows that do not divide by the ranks too: a rank without one adds nothing."""
    for rows, batch in ((R4, 1), ([*R4, R4[0]], 1), ([*R4, R4[0]], 2)):
        evaluation = {"eval_on_start": True, "per_device_eval_batch_size": batch}
        keys = {"rows": rows, "eval": evaluation, "train": {"max_steps": 1, "global_batch_size": 3}}
        keys["data"] = {**data, "eval": str(tmp_path / "rows.jsonl")}
        found = []
        for count, name in ((1, "none"), (size, strategy)):
            loaded = recipe(tmp_path, **keys, strategy=name, output=str(tmp_path / f"{len(rows)}-{batch}-{count}"))
            output = train(loaded) if count == 1 else run_ranks(count, train, loaded)[0]
            found.append([row["eval_loss"] for row in metrics(output) if "eval_loss" in row])
        assert found[1] == pytest.approx(found[0], abs=1e-5)
        assert len(found[0]) == 2
        if len(rows) == 4:
            assert found[1][0] == pytest.approx(R4_LOSS, abs=1e-5)


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_E06_a_rank_whose_only_row_trains_nothing_adds_nothing(tmp_path, strategy):
    """The row is left out and counted, and its rank takes part with padding."""
    row = {"input_ids": R4[3]["input_ids"], "labels": R4[3]["input_ids"]}
    masked = {"input_ids": list(range(40, 49)), "labels": [-100] * 9}
    saving = {"save_strategy": "steps", "save_steps": 1}
    alone = train(recipe(tmp_path, rows=[row], train=sgd(1, 1, max_steps=1), checkpoint=saving, output=str(tmp_path / "alone")))
    batch = {"optim": "sgd", "global_batch_size": 2, "per_device_train_batch_size": 1, "max_steps": 1}
    keys = {"rows": [row, masked], "train": batch, "checkpoint": saving, "strategy": strategy, "output": str(tmp_path / "two")}
    two = run_ranks(2, train, recipe(tmp_path, **keys))[0]
    assert metrics(two)[0]["loss"] == pytest.approx(metrics(alone)[0]["loss"], abs=1e-5)
    assert metrics(two)[0]["trained_tokens"] == 19
    start = load_file(model_folder(tmp_path) / "model.safetensors")
    folders = [Saved(output / "checkpoints" / "step-000001") for output in (two, alone)]
    updates = [{n: folder.rows("trainable", n) - start[n] for n in folder.names("trainable")} for folder in folders]
    assert all(change.isfinite().all() for change in updates[0].values())
    assert_close(*updates, 1e-4)
    assert "dropped 1: 1 no trainable tokens" in (two / "train.log").read_text()
