"""Runs that keep what they were fed: where the rows of each micro-batch come from."""

from unittest.mock import patch

import pytest

from swiftlite.recipe.load import Loaded
from swiftlite.train.run import Run
from tests.training import train

Fed = dict[int, list[list[str]]]


def fed(loaded: Loaded, stop: int | None = None) -> Fed:
    """Trains, and gives the sources of this rank's micro-batches by step, counted from 1.

    Args:
        stop: the run is asked to stop after this step, as by a signal.
    """
    steps: Fed = {}
    next_group, record = Run.next_group, Run.record

    def watched(self):
        group = next_group(self)
        steps[self.step + 1] = [micro.sources for micro in group]
        return group

    def asked(self, report):
        record(self, report)
        self.stop.asked = self.step == stop

    with patch.object(Run, "next_group", watched), patch.object(Run, "record", asked):
        if stop is None:
            train(loaded)
        else:
            with pytest.raises(KeyboardInterrupt):
                train(loaded)
    return steps


def together(ranks: list[Fed]) -> dict[int, list[str]]:
    """The rows of each step over all ranks, sorted; the ranks must have made as many steps, of as many micro-batches."""
    shapes = [{step: len(group) for step, group in rank.items()} for rank in ranks]
    assert all(shape == shapes[0] for shape in shapes)
    return {step: sorted(row for rank in ranks for micro in rank[step] for row in micro) for step in ranks[0]}
