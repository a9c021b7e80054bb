"""Trials of kind H: DDP, FSDP and ZeRO on two gloo processes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from swiftlite.dist.checkpoint import Saved
from swiftlite.recipe.load import Loaded
from tests.ranks import run_ranks
from tests.recording import fed, together
from tests.training import LORA, losses, metrics, model_folder, recipe, token_rows, train

TWO_ROWS = [{"input_ids": list(range(10, 15))}, {"input_ids": list(range(20, 27))}]
NORM = 2.978128
METHODS = pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
SLOW = pytest.mark.slow


def rank_kinds(*fast: str) -> pytest.MarkDecorator:
    """Every strategy for two ranks; those not named are tried by the slow tests."""
    names = ("ddp", "fsdp", "zero1", "zero2", "zero3", "hsdp")
    return pytest.mark.parametrize("strategy", [name if name in fast else pytest.param(name, marks=SLOW) for name in names])


def named(strategy: str) -> dict:
    return {"name": strategy, **({"shard": 1} if strategy == "hsdp" else {})}


def steps(loaded: Loaded, size: int) -> list[float]:
    """Losses of a run on `size` ranks."""
    train(loaded) if size == 1 else run_ranks(size, train, loaded)
    return losses(Path(loaded.recipe.output))


def saved(output: Path, step: int) -> dict[str, torch.Tensor]:
    """Trained weights of a checkpoint, put together."""
    folder = Saved(output / "checkpoints" / f"step-{step:06d}")
    return {name: folder.rows("trainable", name) for name in folder.names("trainable")}


@METHODS
@rank_kinds("fsdp", "zero3")
def test_H02_files_hold_whole_weights(tmp_path, strategy, lora):
    """Exports equal those of one process, and no file of a checkpoint holds a placeholder."""
    exports = ["adapter", "merged"] if lora else ["merged"]
    keys = {"rows": token_rows([9, 5, 14, 7]), "lora": lora, "export": exports}
    keys |= {"train": {"global_batch_size": 2, "max_steps": 2}, "checkpoint": {"save_strategy": "steps", "save_steps": 1}}
    alone = train(recipe(tmp_path, **keys, output=str(tmp_path / "alone")))
    run_ranks(2, train, recipe(tmp_path, **keys, strategy=named(strategy), output=str(tmp_path / "two")))
    two = tmp_path / "two"
    files = {p.relative_to(two): load_file(p) for p in two.rglob("*.safetensors")}
    assert all(tensor.numel() for tensors in files.values() for tensor in tensors.values())
    exported = sorted(name for name in files if name.parts[0] in exports)
    assert len(exported) == len(exports)
    if lora:  # an adapter lies in the checkpoint too, whole
        last = Path("checkpoints", "step-000002", "adapter", "adapter_model.safetensors")
        assert files[last].keys() == files[exported[0]].keys()
        exported.append(last)
    for name in exported:
        theirs = load_file(alone / name)
        assert files[name].keys() == theirs.keys()
        for tensor, value in theirs.items():
            assert files[name][tensor].shape == value.shape
            torch.testing.assert_close(files[name][tensor], value, rtol=0, atol=1e-5, msg=f"{name}: {tensor}")
    start = load_file(model_folder(tmp_path) / "model.safetensors")
    assert any(not torch.equal(start[n], w) for n, w in files[Path("merged", "model.safetensors")].items()), "nothing was trained"


@pytest.mark.parametrize("limit", [1e9, 0.1])
@rank_kinds("ddp", "fsdp")
def test_H03_norm_and_clipping_are_those_of_the_whole(tmp_path, strategy, limit):
    start = load_file(model_folder(tmp_path) / "model.safetensors")
    for name, size in (("none", 1), (strategy, 2)):
        sgd = {"optim": "sgd", "learning_rate": 0.1, "global_batch_size": 2, "max_grad_norm": limit, "max_steps": 1}
        keys = {"rows": TWO_ROWS, "train": sgd, "checkpoint": {"save_strategy": "steps", "save_steps": 1}}
        steps(recipe(tmp_path, **keys, strategy=named(name), output=str(tmp_path / f"{size}")), size)
        assert metrics(tmp_path / f"{size}")[0]["grad_norm"] == pytest.approx(NORM, abs=1e-3)
        weights = saved(tmp_path / f"{size}", 1)
        assert weights.keys() == start.keys()
        moved = sum(float((weights[n].double() - w.double()).square().sum()) for n, w in start.items()) ** 0.5
        assert moved == pytest.approx(0.1 * min(limit, NORM), rel=1e-3)


@pytest.mark.parametrize("data", [{}, {"packing": True, "max_length": 10}, {"streaming": True}], ids=["rows", "packs", "stream"])
@rank_kinds("ddp", "fsdp")
def test_H04_five_rows_for_two_ranks(tmp_path, strategy, data):
    """Each pack is one row. A rank without rows in the last step takes part in it with padding, and nothing is dropped."""
    rows = token_rows([9, 7, 8, 10, 6])
    more = {"max_steps": 3} if "streaming" in data else {}
    keys = {"rows": rows, "data": data, "train": {"global_batch_size": 2, "per_device_train_batch_size": 1, **more}}
    alone = fed(recipe(tmp_path, **keys, output=str(tmp_path / "alone")))
    ranks = run_ranks(2, fed, recipe(tmp_path, **keys, strategy=named(strategy), output=str(tmp_path / "two")), timeout=120)
    assert [len(rank) for rank in ranks] == [3, 3]
    both = together(ranks)  # as many micro-batches on each
    seen = sorted(row for group in both.values() for row in group)
    lines = [f"{tmp_path}/rows.jsonl:{n}" for n in range(1, 6)]
    assert sorted(set(seen)) == lines
    assert len(seen) == (6 if "streaming" in data else 5)
    assert both == together([alone])
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "alone"), abs=1e-5)


def test_H04_more_ranks_than_rows(tmp_path):
    keys = {"rows": TWO_ROWS, "train": {"global_batch_size": 3, "per_device_train_batch_size": 1, "max_steps": 2}}
    alone = steps(recipe(tmp_path, **keys, output=str(tmp_path / "alone")), 1)
    loaded = recipe(tmp_path, **keys, output=str(tmp_path / "three"))
    ranks = run_ranks(3, fed, loaded, timeout=120)
    assert [[micro for group in rank.values() for micro in group] for rank in ranks] == [
        [[f"{tmp_path}/rows.jsonl:1"]] * 2, [[f"{tmp_path}/rows.jsonl:2"]] * 2, [[]] * 2
    ]  # fmt: skip
    assert losses(tmp_path / "three") == pytest.approx(alone, abs=1e-5)


@METHODS
@rank_kinds("ddp", "fsdp")
def test_H06_recomputing_activations_goes_with_ranks(tmp_path, strategy, lora):
    """With two forward passes a step, whose gradients add up."""
    found = []
    for kind in ("none", "full"):
        batch = {"global_batch_size": 4, "per_device_train_batch_size": 1, "max_steps": 2, "gradient_checkpointing": kind}
        keys = {"rows": token_rows([9, 5, 14, 7]), "lora": lora, "train": batch, "strategy": named(strategy)}
        found.append(steps(recipe(tmp_path, **keys, output=str(tmp_path / kind)), 2))
    assert found[1] == pytest.approx(found[0], abs=1e-5)
    assert len(found[0]) == 2
    assert found[0][1] < found[0][0]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_pure"])
@rank_kinds("fsdp")
def test_H07_a_bf16_base_under_sharded_fp32_adapters(tmp_path, strategy, precision):
    model_folder(tmp_path, dtype=torch.bfloat16)
    keys = {"rows": token_rows([9, 5, 14, 7]), "lora": LORA, "export": ["adapter", "merged"]}
    keys["train"] = {"precision": precision, "global_batch_size": 2, "max_steps": 2}
    alone = steps(recipe(tmp_path, **keys, output=str(tmp_path / "alone")), 1)
    two = steps(recipe(tmp_path, **keys, strategy=named(strategy), output=str(tmp_path / "two")), 2)
    assert torch.tensor(two).isfinite().all()
    assert two == pytest.approx(alone, abs=1e-5 if precision == "fp32" else 2e-2)
    merged = load_file(tmp_path / "two" / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=SLOW)])
def test_H09_a_sharded_run_goes_on_in_any_layout(tmp_path, method):
    """Stopped after step 2 on fsdp x2."""
    keys = {"rows": token_rows([9, 5, 14, 7]), "lora": LORA if method == "lora" else None}
    keys |= {"train": {"global_batch_size": 2, "max_steps": 4}}
    saving = {"save_strategy": "steps", "save_steps": 100, "save_total_limit": None}
    whole = steps(recipe(tmp_path, **keys, strategy="fsdp", checkpoint=saving, output=str(tmp_path / "whole")), 2)
    run_ranks(2, fed, recipe(tmp_path, **keys, strategy="fsdp", checkpoint=saving, output=str(tmp_path / "part")), 2)
    stopped = tmp_path / "part" / "checkpoints" / "step-000002"
    for name, size in (("fsdp", 2), ("ddp", 2), ("zero2", 2), ("hsdp", 2), ("none", 1), ("fsdp", 1), ("fsdp", 3)):
        output = tmp_path / f"{name}-{size}"
        saving["resume"] = str(stopped)
        again = steps(recipe(tmp_path, **keys, strategy=named(name), checkpoint=saving, output=str(output)), size)
        same = (name, size) == ("fsdp", 2)
        assert again == (whole[2:] if same else pytest.approx(whole[2:], abs=1e-5)), output.name
        theirs, ours = saved(tmp_path / "whole", 4), saved(output, 4)
        assert ours.keys() == theirs.keys()
        for tensor, value in theirs.items():
            torch.testing.assert_close(ours[tensor], value, rtol=0, atol=0 if same else 1e-4, msg=f"{output.name}: {tensor}")
