"""`swiftlite export` from any checkpoint: without the data, without the optimizer, equal to the export at the end."""

import shutil

import pytest
from safetensors.torch import load_file

from swiftlite import api
from swiftlite.models import isolation
from tests.training import CHAT, LORA, recipe, train


@pytest.mark.parametrize("strategy", ["none", "fsdp"])
@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_a_checkpoint_exports_what_the_run_did_though_its_data_is_gone(tmp_path, lora, strategy):
    keys = {
        "lora": lora,
        "strategy": strategy,
        "train": {"max_steps": 3},
        "checkpoint": {"save_strategy": "steps", "save_steps": 2},
    }
    output = train(recipe(tmp_path, rows=CHAT, export=["merged"], **keys))
    at_the_end = load_file(output / "merged" / "model.safetensors")
    shutil.rmtree(output / "merged")
    (tmp_path / "rows.jsonl").unlink()
    for source, same in ((output, True), (output / "checkpoints" / "step-000002", False)):
        folder = api.export(source, format="merged", output=tmp_path / source.name)
        again = load_file(folder / "model.safetensors")
        assert again.keys() == at_the_end.keys()
        assert all((again[k] == at_the_end[k]).all() for k in again) is same


def test_an_export_does_nothing_that_only_training_needs(tmp_path, monkeypatch):
    keys = {"lora": LORA, "train": {"max_steps": 1}, "checkpoint": {"save_strategy": "epoch"}}
    output = train(recipe(tmp_path, rows=CHAT, data={"packing": True}, **keys))
    monkeypatch.setattr(isolation, "require", lambda *a: pytest.fail("the isolation of packs was tried again"))
    assert (api.export(output, format="merged") / "model.safetensors").exists()
