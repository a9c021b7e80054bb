"""Which rows make up which optimizer step: one order from (seed, epoch) for any world size, read by random access."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftlite.data.collate import collate, collate_packs
from swiftlite.data.order import permutation
from swiftlite.data.packing import Units, pack
from swiftlite.data.render import IGNORE, Sample
from swiftlite.data.store import lengths_of

# Samples of what an objective eats.
SAMPLES = {"rows": 1, "pairs": 2}
# Rows of this many steps are sorted by length together: enough to make batches of like lengths, few enough to mix an epoch.
STEPS_GROUPED = 50


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass takes: tensors [B, T] as `collate` gives them, and where each row came from."""

    tensors: dict[str, Tensor]
    sources: list[str]


def micro_batch(
    units: Sequence[Sequence[Sample]],
    size: int,
    *,
    pad_id: int,
    capacity: int | None,
    padding_free: bool,
    multiple: int,
    eats: str = "rows",
) -> MicroBatch:
    """Units, single rows, packs or pairs, as one forward pass takes them; a unit without rows becomes padding.

    Args:
        size: units of a full batch.
        others: as for Loader.
    """
    # Attended to, so that no softmax runs over nothing; two tokens, so that shifted labels are not empty.
    empty = [Sample([pad_id] * 2, [IGNORE] * 2, "padding")] * SAMPLES[eats]
    # Compiled attention wants one shape: a short last batch is filled up with empty packs.
    least = size if capacity is not None and multiple > 1 else 1
    packs = [unit or empty for unit in units] + [empty] * (least - len(units))
    if padding_free:
        packs = [[sample for unit in packs for sample in unit]]
    joined = capacity is not None or padding_free
    tensors = collate_packs(packs, pad_id, multiple) if joined else collate([s for unit in packs for s in unit], pad_id)
    return MicroBatch(tensors, [sample.source for unit in units for sample in unit])


class Loader:
    """The rows of every optimizer step. Holds no position: a resumed run asks for its step and gets it, from any thread.

    Every row comes once an epoch; the last step of an epoch is short where rows do not divide. What a step is dealt in are units:
    single rows, packs of rows, or pairs, whose sides are two neighbouring samples. A step's units are dealt to the data ranks in
    turn, and every rank gets the same number of micro-batches, because sharded forward passes are collective: a rank without
    units left gets empty ones (padding, nothing trained). With another seed or epoch the same number of packs holds other rows.

    Args:
        order: random; sequential; or group_by_length, random but for batches of like lengths.
        rows_per_step: units of one optimizer step over all ranks.
        micro_batch: units of one forward pass on one rank.
        pad_id: any id that the model has.
        capacity: tokens of a pack; None: rows are not packed.
        padding_free: the units of a micro-batch are joined into one row instead of being padded to a common length.
        multiple: joined rows are padded to a multiple of this length; compiled attention wants few shapes.
        eats: rows, or pairs, which are not joined.

    Attributes:
        beside: more tensors of the batches by name, [samples] fp32, a number for each sample; padding gets 0.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        seed: int,
        order: str,
        rows_per_step: int,
        micro_batch: int,
        pad_id: int,
        capacity: int | None = None,
        padding_free: bool = False,
        multiple: int = 1,
        data_rank: int = 0,
        data_size: int = 1,
        eats: str = "rows",
    ) -> None:
        if not samples:
            raise ValueError("a loader needs at least one sample")
        self.eats, self.beside = eats, dict[str, Tensor]()
        self.samples, self.seed, self.order = samples, seed, order
        self.rows_per_step, self.micro_batch, self.pad_id = rows_per_step, micro_batch, pad_id
        self.capacity, self.padding_free, self.multiple = capacity, padding_free, multiple
        self.data_rank, self.data_size = data_rank, data_size
        self._lengths = lengths_of(samples)
        self._held = 0, self.units(0)
        self.units_per_epoch = len(self._held[1])
        self.steps_per_epoch = ceil(self.units_per_epoch / rows_per_step)

    @property
    def fill(self) -> float:
        """Share of positions that are no padding: of packs of full length, or 1 where rows are not packed."""
        return int(self._lengths.sum()) / (self.units_per_epoch * self.capacity) if self.capacity else 1.0

    @property
    def longest(self) -> int:
        """Tokens of the longest unit: a row, a pack, or a pair with its padding."""
        if self.eats == "pairs":
            return 2 * int(self._lengths.max())
        return int(self._held[1].sums(self._lengths).max())

    def units_of(self, step: int) -> list[list[int]]:
        """Indices into `samples` for each unit of step `step`, over all ranks; steps count from 0 through all epochs."""
        epoch, step = divmod(step, self.steps_per_epoch)
        held = self._held  # of one epoch, and exchanged as a whole: another thread may ask for another one
        if held[0] != epoch:
            held = self._held = epoch, self.units(epoch)
        return held[1][step * self.rows_per_step : (step + 1) * self.rows_per_step]

    def rows_of(self, step: int) -> list[int]:
        """Indices into `samples` of all rows of a step."""
        return [i for unit in self.units_of(step) for i in unit]

    def group(self, step: int) -> list[MicroBatch]:
        """This rank's micro-batches of step `step`."""
        units = self.units_of(step)
        mine = units[self.data_rank :: self.data_size]
        count = ceil(ceil(len(units) / self.data_size) / self.micro_batch)
        return [self._micro_batch(mine[i * self.micro_batch : (i + 1) * self.micro_batch]) for i in range(count)]

    def _micro_batch(self, units: Sequence[Sequence[int]]) -> MicroBatch:
        samples = [[self.samples[i] for i in unit] for unit in units]
        batch = micro_batch(
            samples, self.micro_batch, eats=self.eats,
            pad_id=self.pad_id, capacity=self.capacity, padding_free=self.padding_free, multiple=self.multiple,
        )  # fmt: skip
        indices = [i for unit in units for i in unit]
        for name, values in self.beside.items():
            batch.tensors[name] = torch.zeros(len(batch.tensors["input_ids"]))
            batch.tensors[name][: len(indices)] = values[indices]
        return batch

    def units(self, epoch: int) -> Units:
        """All units of an epoch in their order."""
        count = len(self.samples) // SAMPLES[self.eats]
        rows = np.arange(count) if self.order == "sequential" else permutation(count, self.seed, epoch)
        if self.capacity is not None:
            packs = pack(self._lengths[rows], self.capacity)
            if self.order != "sequential":
                packs = packs.taken(permutation(len(packs), self.seed, epoch, 1))
            return Units(rows[packs.rows], packs.ends)
        if self.order == "group_by_length":
            lengths = self._lengths.reshape(count, -1).max(1)
            rows = _grouped(rows, lengths, self.rows_per_step, self.seed, epoch)
        if self.eats == "pairs":
            return Units(np.stack([2 * rows, 2 * rows + 1], 1).reshape(-1), np.arange(2, 2 * count + 1, 2))
        return Units(rows, np.arange(1, count + 1))


def _grouped(rows: NDArray[np.int64], lengths: NDArray[np.int64], step: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Sorts windows of many steps by length, and deals the steps of all windows out in random order; a short step stays last."""
    window = step * STEPS_GROUPED
    parts = [rows[start : start + window] for start in range(0, len(rows), window)]
    ordered = np.concatenate([part[np.argsort(-lengths[part], kind="stable")] for part in parts])
    whole = len(rows) // step * step
    steps = ordered[:whole].reshape(-1, step)
    return np.concatenate([steps[permutation(len(steps), seed, epoch, 1)].reshape(-1), ordered[whole:]])
