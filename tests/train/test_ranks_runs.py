"""Whole runs over ranks: saved, resumed in another layout, and exported, as one process does it."""

import errno
import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from swiftlite.dist import checkpoint
from swiftlite.dist.checkpoint import Saved
from swiftlite.dist.launch import ranks
from swiftlite.dist.tensors import whole
from swiftlite.recipe.resolve import resolve
from swiftlite.train import session
from swiftlite.train.console import Console
from swiftlite.train.loop import NonFiniteError, train_step
from swiftlite.train.plan import make_plan
from swiftlite.train.run import Run
from tests.ranks import run_ranks
from tests.training import LORA, losses, metrics, recipe, token_rows, train, write_rows

LENGTHS = [4, 6, 12, 20, 9, 31, 2, 17, 25, 8, 11, 14, 3]


def made(path, output, *, lora=True, steps=4, strategy="fsdp", **keys):
    """Two epochs of four steps (the last of each is one row), saved after every second step."""
    exports = ["adapter", "merged"] if lora else ["merged"]
    sections = {
        "train": {"global_batch_size": 4, "num_train_epochs": 2, "max_steps": steps, "learning_rate": 1e-3, "optim": "adamw"},
        "data": {"train_sampling_strategy": "random", **keys.pop("data", {})},
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


@pytest.mark.parametrize("lora", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["lora", "full"])
def test_a_later_export_reads_the_parts_of_all_ranks(tmp_path, lora):
    run_ranks(2, train, made(tmp_path, "run", lora=lora))
    loaded = made(tmp_path, "run", lora=lora)
    session.export(loaded, tmp_path / "run" / "checkpoints" / "step-000004", tmp_path / "later", Console(quiet=True))
    for name in ["adapter", "merged"] if lora else ["merged"]:
        same(tensors(tmp_path / "later" / name), tensors(tmp_path / "run" / name), 0)


def test_evaluation_counts_every_row_once_on_any_number_of_ranks(tmp_path):
    """Five rows on two ranks and batches of two: the last step of one rank is empty."""
    found = []
    for size, name in ((1, "alone"), (2, "two")):
        rows = write_rows(tmp_path / "eval.jsonl", token_rows([5, 9, 30, 2, 17], seed=3))
        more = {"data": {"eval": str(rows)}, "eval": {"per_device_eval_batch_size": 2}}
        loaded = made(tmp_path, name, export=[], strategy="none" if size == 1 else "fsdp", **more)
        train(loaded) if size == 1 else run_ranks(size, train, loaded)
        found.append([row["eval_loss"] for row in metrics(tmp_path / name) if "eval_loss" in row])
    assert len(found[0]) == 1 and found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.parametrize("size", [1, 2])
def test_saving_in_the_background_writes_the_same(tmp_path, size):
    for name, background in (("sync", False), ("async", True)):
        loaded = made(tmp_path, name, export=[], checkpoint={"async_save": background}, strategy="none" if size == 1 else "fsdp")
        train(loaded) if size == 1 else run_ranks(size, train, loaded)
    for step in ("step-000002", "step-000004"):
        one, other = (Saved(tmp_path / name / "checkpoints" / step) for name in ("sync", "async"))
        for group in ("trainable", "optimizer", "rng"):
            assert one.names(group) == other.names(group) != []
            assert all(torch.equal(one.rows(group, n), other.rows(group, n)) for n in one.names(group))


def test_a_full_disk_in_the_background_ends_the_run(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(checkpoint.DiskFullError, match="no space"):
        train(made(tmp_path, "full", export=[], checkpoint={"async_save": True}, strategy="none"))
    assert not list((tmp_path / "full" / "checkpoints").iterdir())


def overflowing(loaded):
    """Four fp16 steps, in the second of which rank 1 alone meets an infinite gradient. Returns scales, skips and weights."""
    run = Run(make_plan(resolve(loaded, ranks().size)), Console(quiet=True))
    loss_sum, scales, skips = run.objective.loss_sum, [], []

    class Objective:
        name, eats = "sft", run.objective.eats
        weight = staticmethod(run.objective.weight)

        @staticmethod
        def loss_sum(root, batch):
            loss = loss_sum(root, batch)
            return loss * 1e8 if run.step == 1 and ranks().rank == 1 else loss

    run.objective = Objective()
    for step in range(4):
        skips.append(train_step(run, run.plan.loader.group(step), 1e-3).skipped)
        run.step += 1
        scales.append(run.scaler.get_scale())
    return scales, skips, {n: whole(p.detach()).clone() for n, p in run.masters.items()}


@pytest.mark.parametrize("offload", ["none", "optimizer", "params"])
def test_an_overflow_on_one_rank_is_skipped_by_all(tmp_path, offload):
    how = {"name": "fsdp", "offload": offload}
    loaded = made(tmp_path, "half", lora=False, export=[], strategy=how, steps=8)
    loaded = replace(
        loaded, recipe=loaded.recipe.model_copy(update={"train": loaded.recipe.train.model_copy(update={"precision": "fp16"})})
    )
    one, other = run_ranks(2, overflowing, loaded)
    assert one[1] == other[1] == [False, True, False, False]
    assert one[0] == other[0] and one[0][1] == one[0][0] / 2
    assert all(torch.equal(one[2][n], other[2][n]) and one[2][n].isfinite().all() for n in one[2])


def failing_on_rank_1(loaded):
    """The error that each rank ends with, when rank 1 cannot write."""

    def fail(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    if ranks().rank == 1:
        checkpoint.save_file = fail
    try:
        train(loaded)
    except Exception as error:  # the point of this function
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("background", [False, True])
def test_a_rank_that_cannot_write_is_named(tmp_path, background):
    loaded = made(tmp_path, "broken", export=[], steps=2, checkpoint={"async_save": background})
    first, second = run_ranks(2, failing_on_rank_1, loaded)
    assert "rank 1 could not write its share: [Errno 5] Input/output error" in first and "OSError" in second
    assert not list((tmp_path / "broken" / "checkpoints").iterdir())


def blamed(loaded):
    """What each rank says when the loss of one row, on rank 1, is not a number."""
    run = Run(make_plan(resolve(loaded, ranks().size)), Console(quiet=True))
    loss_sum = run.objective.loss_sum

    class Objective:
        name, eats = "sft", "rows"
        weight = staticmethod(run.objective.weight)

        @staticmethod
        def loss_sum(root, batch):
            return loss_sum(root, batch) * (float("nan") if ranks().rank == 1 and batch["input_ids"].shape[1] == 6 else 1)

    run.objective = Objective()
    with pytest.raises(NonFiniteError) as error:
        train_step(run, run.plan.loader.group(0), 1e-3)
    return str(error.value)


def test_every_rank_names_the_row_that_was_not_finite(tmp_path):
    loaded = made(tmp_path, "nan", export=[], data={"train_sampling_strategy": "sequential"})
    one, other = run_ranks(2, blamed, loaded)
    assert one == other and "loss nan at step 1, in the rows " in one
    assert one.count("rows.jsonl:") == 1 and "rows.jsonl:2." in one  # of the rows 1 to 4 rank 1 has 2 and 4
