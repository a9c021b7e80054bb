"""Trials of kind D, the part about lengths that are no round number; the others are tried with packing itself."""

import pytest

from swiftlite.train.console import Console
from swiftlite.train.loop import train_step
from swiftlite.train.plan import make_plan
from swiftlite.train.run import Run
from tests.training import recipe, token_rows

ROWS = token_rows([7, 13, 9, 12, 8, 10])


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("kind", ["GEMMA3", "LLAMA"])
def test_D04_all_tensors_of_a_batch_have_one_length(tmp_path, kind, multiple):
    """Packs of at most 29 tokens, as they are and padded to a multiple of 8; each step has all rows, so that losses compare."""
    found = []
    for data in ({}, {"packing": True, "max_length": 29}):
        size = {"global_batch_size": 6, "per_device_train_batch_size": 2}
        run = Run(make_plan(recipe(tmp_path, rows=ROWS, kind=kind, data=data, train=size)), Console(quiet=True))
        run.plan.loader.multiple = multiple
        reports = []
        for step in range(2):
            group = run.plan.loader.group(step)
            for micro in group:
                lengths = {name: tensor.shape[-1] for name, tensor in micro.tensors.items()}
                assert len(set(lengths.values())) == 1, lengths
                assert not data or max(lengths.values()) % multiple == 0
            reports.append(train_step(run, group, 0.01))
        assert [report.trained_tokens for report in reports] == [53, 53]
        found.append([report.loss for report in reports])
    assert found[1] == pytest.approx(found[0], abs=1e-4)
    assert found[0][1] < found[0][0]
