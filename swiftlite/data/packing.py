"""Packs: rows joined up to a length, so that no position is padding. The attention keeps them apart by their positions."""

from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing: puts each row, longest first, into the fullest pack that still has room for it.

    The number of packs and how full they are depend on the lengths alone; among rows of one length those that come first are
    packed first. Room is looked up in a bit mask, so a row costs O(capacity / 64) word operations: a million rows take seconds.
    Source: Johnson 1973, "Near-optimal bin packing algorithms".

    Args:
        lengths: tokens of each row, none above `capacity`.

    Returns:
        Packs of indices into `lengths`; inside a pack and among packs (by their first row) in ascending order.
    """
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # packs by the room they have left
    mask = 0  # bit r is set where some pack has room r
    packs: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        size = lengths[row]
        if not 0 < size <= capacity:
            raise ValueError(f"a row of {size} tokens does not fit into packs of {capacity}")
        fitting = mask >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            number = with_room[room].pop()
            if not with_room[room]:
                mask ^= 1 << room
        else:
            room, number = capacity, len(packs)
            packs.append([])
        packs[number].append(row)
        with_room[room - size].append(number)
        mask |= 1 << (room - size)
    return sorted(sorted(p) for p in packs)
