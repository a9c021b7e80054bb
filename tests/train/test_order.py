"""The order of rows is the recipe's: one for any number of processes and workers, packed, padded or streamed, also resumed."""

import shutil
from pathlib import Path

import pytest
import torch

from swiftlite.dist.checkpoint import Saved
from tests.ranks import run_ranks
from tests.recording import fed, together
from tests.training import losses, recipe, token_rows, write_rows

LENGTHS = [4, 6, 12, 20, 9, 31, 2, 17, 25, 8, 11, 14, 3, 5, 22, 7, 10, 13, 28, 6, 16, 19, 4, 9, 15]
FILES = 5  # of five rows each
STREAM = {"streaming": True, "stream_shards": FILES}
# The last step of an epoch leaves the second of two ranks without rows. Of five streams, one rank has three and the other two.
KINDS = {
    "padded": {"data": {}, "train": {"global_batch_size": 4, "num_train_epochs": 2}},
    "packed": {"data": {"packing": True, "max_length": 48}, "train": {"global_batch_size": 2, "num_train_epochs": 2}},
    "streamed": {"data": STREAM, "train": {"global_batch_size": 4, "max_steps": 13}},
    "padding free": {"data": {"padding_free": True}, "train": {"global_batch_size": 6, "num_train_epochs": 2}},
    "grouped": {"data": {"train_sampling_strategy": "group_by_length"}, "train": {"global_batch_size": 4, "num_train_epochs": 2}},
    "sequential": {"data": {"train_sampling_strategy": "sequential"}, "train": {"global_batch_size": 4, "num_train_epochs": 2}},
    "streamed and packed": {
        "data": {**STREAM, "packing": True, "max_length": 48}, "train": {"global_batch_size": 2, "max_steps": 13}
    },
    "streamed in order": {
        "data": {**STREAM, "train_sampling_strategy": "sequential"}, "train": {"global_batch_size": 4, "max_steps": 13}
    },
}  # fmt: skip
FAST = ("padded", "packed", "streamed")
SLOW = pytest.mark.slow


def made(path: Path, output: str, kind: str, workers: int, size: int = 1, **more):
    """A recipe over 25 rows: in five files where packs are made of streams, because a small file is one stream; else in one."""
    rows, given = token_rows(LENGTHS), KINDS[kind]
    data = {"train_sampling_strategy": "random", "num_workers": workers, **given["data"]}
    if kind == "streamed and packed":
        data["train"] = [str(write_rows(path / f"part-{n}.jsonl", rows[n * FILES : (n + 1) * FILES])) for n in range(FILES)]
    keys = {"learning_rate": 1e-3, "per_device_train_batch_size": 1, **given["train"], **more.pop("train", {})}
    return recipe(
        path, rows=rows, data=data, train=keys, output=str(path / output), strategy="fsdp" if size > 1 else "none", **more
    )


def go(loaded, size: int, stop: int | None = None) -> dict[int, list[str]]:
    """The rows of each step over all ranks."""
    return together([fed(loaded, stop)] if size == 1 else run_ranks(size, fed, loaded, stop))


def assert_every_row_once_an_epoch(steps: dict[int, list[list[str]]]) -> None:
    """Of one process, in the order of its micro-batches. Several files are streams, whose epochs end one by one."""
    order = [row for group in steps.values() for micro in group for row in micro]
    files = {row.rpartition(":")[0] for row in order}
    assert len(set(order)) == len(LENGTHS)
    for file in files:
        rows, own = len(LENGTHS) // len(files), [row for row in order if row.rpartition(":")[0] == file]
        epochs = [own[start : start + rows] for start in range(0, len(own) - rows + 1, rows)]
        assert len(epochs) >= 2 or len(files) > 1
        assert epochs
        assert all(len(set(epoch)) == rows for epoch in epochs)


@pytest.mark.parametrize("kind", [kind if kind in FAST else pytest.param(kind, marks=SLOW) for kind in KINDS])
def test_processes_and_workers_change_no_step(tmp_path, kind):
    alone = fed(made(tmp_path, "alone", kind, 0))
    assert_every_row_once_an_epoch(alone)
    expected, plain = together([alone]), losses(tmp_path / "alone")
    others = [(1, 2), (2, 0), (2, 2)] if kind in FAST else [(1, 2), (2, 0), (2, 2), (3, 1), (4, 2)]
    for size, workers in others:
        name = f"{size}-{workers}"
        assert go(made(tmp_path, name, kind, workers, size), size) == expected, name
        assert losses(tmp_path / name) == pytest.approx(plain, abs=1e-5), name


@pytest.mark.parametrize("kind", [kind if kind in FAST else pytest.param(kind, marks=SLOW) for kind in KINDS])
def test_stopped_in_the_middle_of_epoch_2_it_goes_on_exactly(tmp_path, kind):
    """On two processes; then on two with the very same weights, and on one (the larger part also on three)."""
    saving = {"save_strategy": "steps", "save_steps": 1000, "save_total_limit": None}
    expected = go(made(tmp_path, "whole", kind, 2, 2, checkpoint=saving), 2)
    last = max(expected)
    stop = last * 3 // 4
    first = go(made(tmp_path, "2", kind, 2, 2, checkpoint=saving), 2, stop)
    assert first == {step: expected[step] for step in range(1, stop + 1)}
    sizes = [1, 2] if kind in FAST else [1, 3, 2]
    for size in sizes:
        if size != 2:
            shutil.copytree(tmp_path / "2", tmp_path / f"{size}")
    for size in sizes:
        again = go(made(tmp_path, f"{size}", kind, 2 - size % 2, size, checkpoint={**saving, "resume": "auto"}), size)
        assert again == {step: expected[step] for step in range(stop + 1, last + 1)}, size
        assert losses(tmp_path / f"{size}") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5), size
    assert losses(tmp_path / "2") == losses(tmp_path / "whole")
    whole, parts = (Saved(tmp_path / name / "checkpoints" / f"step-{last:06d}") for name in ("whole", "2"))
    for group in ("trainable", "optimizer"):
        assert whole.names(group) == parts.names(group) != []
        assert all(torch.equal(whole.rows(group, name), parts.rows(group, name)) for name in whole.names(group))
