"""Which rows make up which optimizer step: one order from (seed, epoch) for any world size, read by random access."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from torch import Tensor

from swiftlite.data.collate import collate
from swiftlite.data.order import shuffled
from swiftlite.data.render import IGNORE, Sample


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward pass: tensors [B, T] as `collate` gives them, and where each row came from."""

    tensors: dict[str, Tensor]
    sources: list[str]


class Loader:
    """The rows of every optimizer step. Holds no position: a resumed run asks for its step and gets it.

    Every row comes once an epoch; the last step of an epoch is short where rows do not divide. A step's rows are dealt to the
    data ranks in turn, and every rank gets the same number of micro-batches, because sharded forward passes are collective: a
    rank without rows left gets empty ones (padding, nothing trained).

    Args:
        rows_per_step: rows of one optimizer step over all ranks.
        micro_batch: rows of one forward pass on one rank.
        pad_id: any id that the model has.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        seed: int,
        shuffle: bool,
        rows_per_step: int,
        micro_batch: int,
        pad_id: int,
        data_rank: int = 0,
        data_size: int = 1,
    ) -> None:
        if not samples:
            raise ValueError("a loader needs at least one sample")
        self.samples, self.seed, self.shuffle = samples, seed, shuffle
        self.rows_per_step, self.micro_batch, self.pad_id = rows_per_step, micro_batch, pad_id
        self.data_rank, self.data_size = data_rank, data_size
        self.steps_per_epoch = ceil(len(samples) / rows_per_step)
        self._order: tuple[int, Sequence[int]] = (-1, ())

    def rows_of(self, step: int) -> list[int]:
        """Indices into `samples` of the rows of step `step`, over all ranks; steps count from 0 through all epochs."""
        epoch, step = divmod(step, self.steps_per_epoch)
        return list(self._order_of(epoch)[step * self.rows_per_step : (step + 1) * self.rows_per_step])

    def group(self, step: int) -> list[MicroBatch]:
        """This rank's micro-batches of step `step`."""
        rows = self.rows_of(step)
        mine = rows[self.data_rank :: self.data_size]
        count = ceil(ceil(len(rows) / self.data_size) / self.micro_batch)
        return [self._micro_batch(mine[i * self.micro_batch : (i + 1) * self.micro_batch]) for i in range(count)]

    def _micro_batch(self, rows: Sequence[int]) -> MicroBatch:
        samples = [self.samples[i] for i in rows]
        # Attended to, so that no softmax runs over nothing; two tokens, so that shifted labels are not empty.
        empty = Sample([self.pad_id] * 2, [IGNORE] * 2, "padding")
        return MicroBatch(collate(samples or [empty], self.pad_id), [s.source for s in samples])

    def _order_of(self, epoch: int) -> Sequence[int]:
        if not self.shuffle:
            return range(len(self.samples))
        if self._order[0] != epoch:
            self._order = epoch, shuffled(len(self.samples), self.seed, epoch)
        return self._order[1]
