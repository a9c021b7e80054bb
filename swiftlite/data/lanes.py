"""Blocks of rows for logical streams: the same for any number of ranks, and found again without reading what lies before."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import Any

from swiftlite.data.hub import hub_table, without_nulls
from swiftlite.data.order import shuffled
from swiftlite.data.read import find_files, raw_file
from swiftlite.data.row import Raw, shorten
from swiftlite.recipe.errors import DataError
from swiftlite.recipe.schema import DataSource


@dataclass(frozen=True)
class Part:
    """A file, or a shard of a hub dataset.

    Args:
        number: among all parts.
        source: index of the source that it belongs to.
        name, size: tell it from others when a run goes on; size in bytes, 0 where it is not known.
        read: its rows behind the first `line` ones, which take `offset` bytes where the file can be read from there (else 0).
    """

    number: int
    source: int
    name: str
    size: int
    read: Callable[[int, int], Iterator[Raw]]


@dataclass(frozen=True)
class Place:
    """Where a block starts.

    Args:
        turn: which part, counted in the order of reading through all epochs.
        offset, line: bytes (0 where the part cannot be read from there) and rows of the part in front of the block.
        block: number of the block among those of its reader, through all epochs.
    """

    turn: int = 0
    offset: int = 0
    line: int = 0
    block: int = 0


@dataclass(frozen=True)
class Block:
    """Consecutive rows of one part; `epoch` counts how often all parts had their turn before."""

    place: Place
    epoch: int
    part: Part
    rows: list[Raw]


class Lanes:
    """Reads the parts over and over, and deals them to logical streams in blocks; blocks of other ranks' streams are passed over.

    Where there are at least as many parts as streams, each stream has a reader of its own, and the part of turn t goes to stream
    t mod `streams`. Else one reader deals all blocks in rounds, one block a stream. Turns and blocks are counted on through the
    epochs, so that all streams get as many.

    Args:
        starts: the streams to serve, and the place of the block that each needs first.
        shuffle: parts in another order each epoch, streams in another order each round.
        own: each stream reads for itself.
        rows: rows of a block; the last one of a part is shorter.
    """

    def __init__(
        self, parts: Sequence[Part], starts: Mapping[int, Place], *, seed: int, shuffle: bool, own: bool, streams: int, rows: int
    ) -> None:
        self._parts, self._shuffle = parts, shuffle
        self._streams, self._rows, self._starts = streams, rows, starts
        self._turns = lru_cache(4)(partial(shuffled, len(parts), seed))  # of an epoch
        self._owners = lru_cache(4)(partial(shuffled, streams, seed, -1))  # of a round; -1: apart from the draws for any turn
        self._dealt: dict[int, deque[Block]] = {stream: deque() for stream in starts}
        first = min(starts.values(), key=lambda place: place.block, default=Place())
        self._shared = None if own else self._read(first, 1)
        self._own = {stream: self._read(place, streams) for stream, place in starts.items()} if own else {}

    def next(self, stream: int) -> Block:
        """The next block of a stream."""
        if self._shared is None:
            return next(self._own[stream])
        while not self._dealt[stream]:
            block = next(self._shared)
            owner = self._owner(block.place.block)
            if owner in self._starts and block.place.block >= self._starts[owner].block:
                self._dealt[owner].append(block)
        return self._dealt[stream].popleft()

    def _owner(self, block: int) -> int:
        """The stream that a block of the shared reader goes to."""
        number, within = divmod(block, self._streams)
        return self._owners(number)[within] if self._shuffle else within

    def _read(self, place: Place, stride: int) -> Iterator[Block]:
        """Blocks from `place` on, without end, of every `stride`-th part."""
        count = len(self._parts)
        while True:
            epoch, n = divmod(place.turn, count)
            part = self._parts[self._turns(epoch)[n] if self._shuffle else n]
            rows = part.read(place.offset, place.line)
            while held := list(islice(rows, self._rows)):
                yield Block(place, epoch, part, held)
                place = Place(place.turn, held[-1].offset or 0, held[-1].line, place.block + 1)
            place = Place(place.turn + stride, block=place.block)


def parts_of(sources: Sequence[DataSource]) -> list[Part]:
    """The files of all sources, those of one source by name; hub datasets by their shards.

    Raises:
        DataError: a source is not found.
    """
    parts: list[Part] = []
    for number, source in enumerate(sources):
        files = find_files(source.path)
        for file in files:
            parts.append(Part(len(parts), number, file.name, file.stat().st_size, partial(raw_file, file)))
        table = None if files else hub_table(source, streaming=True)
        for shard in range(table.num_shards if table is not None else 0):
            name = f"{source.path}[{source.split}]" + f" shard {shard}" * (table.num_shards > 1)
            parts.append(Part(len(parts), number, name, 0, partial(_hub_shard, table, shard, name)))
    return parts


def fingerprint(parts: Sequence[Part]) -> str:
    """A hash of the names and sizes of all parts in their order: whether a resumed run has the same files."""
    return hashlib.sha256(repr([(part.source, part.name, part.size) for part in parts]).encode()).hexdigest()


def _hub_shard(table: Any, shard: int, name: str, offset: int, line: int) -> Iterator[Raw]:
    """The rows of one shard of a `datasets.IterableDataset` behind the first `line` ones."""
    try:
        for number, value in enumerate(table.shard(table.num_shards, shard).skip(line), line + 1):
            yield Raw(name, number, without_nulls(value), "row")
    except Exception as error:  # whatever its file system and its decoder raise
        raise DataError(f"cannot be read: {shorten(str(error))}", where=name) from error
