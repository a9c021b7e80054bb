"""Whole runs over ranks: saved, resumed in another layout, and exported, as one process does it."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from swiftlite.dist.checkpoint import Saved
from tests.ranks import run_ranks
from tests.training import LORA, losses, recipe, token_rows, train

LENGTHS = [4, 6, 12, 20, 9, 31, 2, 17, 25, 8, 11, 14, 3]


def made(path, output, *, lora=True, steps=4, strategy="fsdp", **keys):
    """Two epochs of four steps (the last of each is one row), saved after every second step."""
    exports = ["adapter", "merged"] if lora else ["merged"]
    sections = {
        "train": {"global_batch_size": 4, "num_train_epochs": 2, "max_steps": steps, "learning_rate": 1e-3, "optim": "adamw"},
        "data": {"train_sampling_strategy": "random"},
        "checkpoint": {"save_strategy": "steps", "save_steps": 2, "save_total_limit": None, **keys.pop("checkpoint", {})},
        "strategy": strategy,
        "export": keys.pop("export", exports),
        "output": str(path / output),
    }
    return recipe(path, rows=token_rows(LENGTHS), **sections, **({"lora": LORA} if lora else {}), **keys)


def tensors(folder):
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def same(a, b, atol):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("strategy", ["fsdp", *(pytest.param(s, marks=pytest.mark.slow) for s in ("ddp", "zero2", "zero3"))])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_run_on_two_ranks_leaves_what_one_leaves(tmp_path, lora, strategy):
    alone = train(made(tmp_path, "alone", lora=lora, strategy="none"))
    run_ranks(2, train, made(tmp_path, "two", lora=lora, strategy=strategy))
    both = tmp_path / "two"
    assert losses(both) == pytest.approx(losses(alone), rel=1e-5)
    for name in ["adapter", "merged"] if lora else ["merged"]:
        same(tensors(both / name), tensors(alone / name), 1e-5)
    verdicts = json.loads((both / "export_report.json").read_text())
    assert "verified" in json.dumps(verdicts) and not [p for p in both.rglob("*") if ".part" in p.name or ".tmp" in p.name]
    for name in ("recipe.yaml", "environment.json", "data_report.json", "train.log"):
        assert (both / name).exists()
    assert (both / "train.log").read_text().count("step      4/4") == 1


@pytest.mark.parametrize(
    ("size", "strategy"),
    [
        (1, "none"),
        (2, "fsdp"),
        *(pytest.param(*c, marks=pytest.mark.slow) for c in ((4, "fsdp"), (2, "ddp"), (1, "fsdp"), (4, "hsdp"))),
    ],
)
def test_a_checkpoint_of_two_ranks_goes_on_in_any_layout(tmp_path, size, strategy):
    """Stopped after step 6 of 8, in the middle of epoch 2."""
    run_ranks(2, train, made(tmp_path, "whole", lora=False, steps=8, export=[]))
    run_ranks(2, train, made(tmp_path, "parts", lora=False, steps=6, export=[]))
    files = {p.name for p in (tmp_path / "parts" / "checkpoints" / "step-000006").iterdir()}
    assert {"trainable-00001-of-00002.safetensors", "trainable-00002-of-00002.safetensors"} <= files
    hsdp = {"name": "hsdp", "shard": 2}
    again = made(
        tmp_path,
        "parts",
        lora=False,
        steps=8,
        export=[],
        strategy=hsdp if strategy == "hsdp" else strategy,
        checkpoint={"resume": "auto"},
    )
    train(again) if size == 1 else run_ranks(size, train, again)
    whole, parts = (Saved(tmp_path / name / "checkpoints" / "step-000008") for name in ("whole", "parts"))
    exact = (size, strategy) == (2, "fsdp")
    for group in ("trainable", "optimizer"):
        assert set(whole.names(group)) == set(parts.names(group))
        for name in whole.names(group):
            torch.testing.assert_close(parts.rows(group, name), whole.rows(group, name), rtol=0, atol=0 if exact else 2e-5)
    assert losses(tmp_path / "parts") == (
        losses(tmp_path / "whole") if exact else pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    )


def test_a_checkpoint_of_one_process_goes_on_on_two(tmp_path):
    train(made(tmp_path, "whole", lora=False, steps=8, export=[], strategy="none"))
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    for late in ("step-000006", "step-000008"):
        shutil.rmtree(tmp_path / "parts" / "checkpoints" / late)
    run_ranks(2, train, made(tmp_path, "parts", lora=False, steps=8, export=[], checkpoint={"resume": "auto"}))
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
