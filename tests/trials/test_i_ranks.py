"""Trials of kind I on two gloo processes: a run that was stopped goes on in new ones."""

import pytest
import torch

from swiftlite.dist.checkpoint import Saved
from tests.ranks import run_ranks
from tests.recording import fed, together
from tests.training import LORA, losses, recipe, token_rows

ROWS = token_rows([7, 9, 5, 11, 6, 8, 10, 4, 12, 5])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["I04", "I05"])
def test_I04_I05_two_processes_go_on_with_the_same_rows_and_chance(tmp_path, name, strategy):
    """I04: rows of this epoch and the next come in the same order. I05: dropout draws the same numbers on each rank."""
    if name == "I04":
        stop, keys = 7, {"rows": ROWS, "data": {"train_sampling_strategy": "random"}, "seed": 3}
        keys |= {"train": {"global_batch_size": 2, "num_train_epochs": 3}}
    else:
        stop, keys = 4, {"rows": ROWS[:8], "lora": {**LORA, "dropout": 0.3}, "train": {"global_batch_size": 2, "max_steps": 8}}
    keys |= {"strategy": strategy, "checkpoint": {"save_strategy": "epoch", "save_total_limit": None, "resume": "auto"}}
    expected = together(run_ranks(2, fed, recipe(tmp_path, **keys, output=str(tmp_path / "whole"))))
    loaded = recipe(tmp_path, **keys)
    first = together(run_ranks(2, fed, loaded, stop))
    assert max(first) == stop
    second = together(run_ranks(2, fed, loaded))
    assert min(second) == stop + 1
    assert first | second == expected
    last = max(expected)
    assert last == (15 if name == "I04" else 8)
    if name == "I04":
        epochs = [[expected[5 * e + step] for step in range(1, 6)] for e in range(3)]
        assert epochs[0] != epochs[1] != epochs[2]
        assert all(len({row for rows in epoch for row in rows}) == 10 for epoch in epochs)
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")
    ours, theirs = (Saved(tmp_path / run / "checkpoints" / f"step-{last:06d}") for run in ("out", "whole"))
    assert ours.names("trainable") == theirs.names("trainable") != []
    assert all(torch.equal(ours.rows("trainable", n), theirs.rows("trainable", n)) for n in ours.names("trainable"))


def test_I05_each_rank_draws_its_own_numbers(tmp_path):
    """Two ranks with the same row would else drop the same features."""
    keys = {"rows": [ROWS[0]] * 2, "lora": {**LORA, "dropout": 0.3}, "train": {"global_batch_size": 2, "max_steps": 1}}
    saving = {"save_strategy": "steps", "save_steps": 1}
    run_ranks(2, fed, recipe(tmp_path, **keys, strategy="ddp", checkpoint=saving))
    saved = Saved(tmp_path / "out" / "checkpoints" / "step-000001")
    states = [saved.rows("rng", name) for name in saved.names("rng")]
    assert len(states) == 2
    assert not torch.equal(*states)
