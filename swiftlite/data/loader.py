"""Which rows make up which optimizer step: one order from (seed, epoch) for any world size, read by random access."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from torch import Tensor

from swiftlite.data.collate import collate, collate_packs
from swiftlite.data.order import shuffled
from swiftlite.data.packing import pack
from swiftlite.data.render import IGNORE, Sample

# Rows of this many steps are sorted by length together: enough to make batches of like lengths, few enough to mix an epoch.
STEPS_GROUPED = 50


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass takes: tensors [B, T] as `collate` gives them, and where each row came from."""

    tensors: dict[str, Tensor]
    sources: list[str]


class Loader:
    """The rows of every optimizer step. Holds no position: a resumed run asks for its step and gets it.

    Every row comes once an epoch; the last step of an epoch is short where rows do not divide. What a step is dealt in are units:
    single rows, or packs of rows. A step's units are dealt to the data ranks in turn, and every rank gets the same number of
    micro-batches, because sharded forward passes are collective: a rank without units left gets empty ones (padding, nothing
    trained). With another seed or epoch the same number of packs holds other rows.

    Args:
        order: random; sequential; or group_by_length, random but for batches of like lengths.
        rows_per_step: units of one optimizer step over all ranks.
        micro_batch: units of one forward pass on one rank.
        pad_id: any id that the model has.
        capacity: tokens of a pack; None: rows are not packed.
        padding_free: the units of a micro-batch are joined into one row instead of being padded to a common length.
        multiple: joined rows are padded to a multiple of this length; compiled attention wants few shapes.
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
    ) -> None:
        if not samples:
            raise ValueError("a loader needs at least one sample")
        self.samples, self.seed, self.order = samples, seed, order
        self.rows_per_step, self.micro_batch, self.pad_id = rows_per_step, micro_batch, pad_id
        self.capacity, self.padding_free, self.multiple = capacity, padding_free, multiple
        self.data_rank, self.data_size = data_rank, data_size
        self._epoch, self._units = 0, self.units(0)
        self.units_per_epoch = len(self._units)
        self.steps_per_epoch = ceil(self.units_per_epoch / rows_per_step)

    @property
    def fill(self) -> float:
        """Share of positions that are no padding: of packs of full length, or 1 where rows are not packed."""
        tokens = sum(len(s.input_ids) for s in self.samples)
        return tokens / (self.units_per_epoch * self.capacity) if self.capacity else 1.0

    @property
    def longest(self) -> int:
        """Tokens of the longest unit: a row, or a pack."""
        return max(sum(len(self.samples[i].input_ids) for i in unit) for unit in self._units)

    def units_of(self, step: int) -> list[list[int]]:
        """Indices into `samples` for each unit of step `step`, over all ranks; steps count from 0 through all epochs."""
        epoch, step = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._units = epoch, self.units(epoch)
        return list(self._units[step * self.rows_per_step : (step + 1) * self.rows_per_step])

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
        # Attended to, so that no softmax runs over nothing; two tokens, so that shifted labels are not empty.
        empty = Sample([self.pad_id] * 2, [IGNORE] * 2, "padding")
        packs = [[self.samples[i] for i in unit] for unit in units]
        # Compiled attention wants one shape: a short last batch is filled up with empty packs.
        least = self.micro_batch if self.capacity is not None and self.multiple > 1 else 1
        packs += [[empty]] * (least - len(packs))
        if self.padding_free:
            packs = [[s for p in packs for s in p]]
        joined = self.capacity is not None or self.padding_free
        tensors = collate_packs(packs, self.pad_id, self.multiple) if joined else collate([p[0] for p in packs], self.pad_id)
        return MicroBatch(tensors, [self.samples[i].source for unit in units for i in unit])

    def units(self, epoch: int) -> list[list[int]]:
        """All units of an epoch in their order."""
        count = len(self.samples)
        rows = list(range(count)) if self.order == "sequential" else shuffled(count, self.seed, epoch)
        lengths = [len(self.samples[i].input_ids) for i in rows]
        if self.capacity is not None:
            packs = pack(lengths, self.capacity)
            turn = range(len(packs)) if self.order == "sequential" else shuffled(len(packs), self.seed, epoch, 1)
            return [[rows[i] for i in packs[n]] for n in turn]
        if self.order == "group_by_length":
            rows = _grouped([rows[i] for i in range(count)], self.samples, self.rows_per_step, self.seed, epoch)
        return [[i] for i in rows]


def _grouped(rows: list[int], samples: Sequence[Sample], step: int, seed: int, epoch: int) -> list[int]:
    """Sorts windows of many steps by length, and deals the steps of all windows out in random order; a short step stays last."""
    window = step * STEPS_GROUPED
    ordered = [
        i
        for start in range(0, len(rows), window)
        for i in sorted(rows[start : start + window], key=lambda i: -len(samples[i].input_ids))
    ]
    steps = [ordered[start : start + step] for start in range(0, len(ordered), step)]
    last = [steps.pop()] if len(steps[-1]) < step else []
    return [i for n in [*shuffled(len(steps), seed, epoch, 1)] for i in steps[n]] + [i for s in last for i in s]
