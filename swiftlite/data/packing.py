"""Packs: rows joined up to a length, so that no position is padding. The attention keeps them apart by their positions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Units(Sequence[list[int]]):
    """What a step is dealt in: single rows, or packs of rows; eight bytes a row.

    Args:
        rows: [rows] int64, unit by unit.
        ends: [units] int64, where each unit ends in `rows`.
    """

    rows: NDArray[np.int64]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        start = self.ends[index - 1] if index else 0
        return [int(row) for row in self.rows[start : self.ends[index]]]

    def taken(self, order: NDArray[np.int64]) -> "Units":
        """These units in another order, or some of them.

        Args:
            order: indices of units.
        """
        starts = np.concatenate([[0], self.ends[:-1]])[order]
        sizes = self.ends[order] - starts
        ends = np.cumsum(sizes)
        within = np.arange(sizes.sum()) - np.repeat(ends - sizes, sizes)
        return Units(self.rows[np.repeat(starts, sizes) + within], ends)

    def sums(self, values: NDArray[Any]) -> NDArray[Any]:
        """The sum of each unit [units].

        Args:
            values: of all rows there are, by their number.
        """
        return np.add.reduceat(values[self.rows], np.concatenate([[0], self.ends[:-1]]))


def pack(lengths: Sequence[int] | NDArray[np.int64], capacity: int) -> Units:
    """Best-fit decreasing: puts each row, longest first, into the fullest pack that still has room for it.

    The number of packs and how full they are depend on the lengths alone; among rows of one length those that come first are
    packed first. Room is looked up in a bit mask, so a row costs O(capacity / 64) word operations: a million rows take seconds.
    Source: Johnson 1973, "Near-optimal bin packing algorithms".

    Args:
        lengths: tokens of each row, none above `capacity`.

    Returns:
        Packs of indices into `lengths`; inside a pack and among packs (by their first row) in ascending order.
    """
    lengths = np.asarray(lengths, np.int64)
    if len(lengths) and not 0 < lengths.min() <= lengths.max() <= capacity:
        odd = int(lengths[(lengths < 1) | (lengths > capacity)][0])
        raise ValueError(f"a row of {odd} tokens does not fit into packs of {capacity}")
    order = np.argsort(-lengths, kind="stable")
    number_of = np.empty(len(lengths), np.int64)  # the pack of each row
    made = 0
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # packs by the room they have left
    mask = 0  # bit r is set where some pack has room r
    for place, size in enumerate(lengths[order].tolist()):
        fitting = mask >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            number = with_room[room].pop()
            if not with_room[room]:
                mask ^= 1 << room
        else:
            room, number, made = capacity, made, made + 1
        number_of[place] = number
        with_room[room - size].append(number)
        mask |= 1 << (room - size)
    first = np.full(made, len(lengths), np.int64)
    np.minimum.at(first, number_of, order)
    rank = np.empty(made, np.int64)
    rank[np.argsort(first)] = np.arange(made)
    in_rank = rank[number_of]
    return Units(order[np.lexsort((order, in_rank))], np.cumsum(np.bincount(in_rank, minlength=made)))
