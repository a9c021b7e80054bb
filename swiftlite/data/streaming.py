"""Training rows that are read as they are needed: the same order for any number of ranks, and a position of a few numbers."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from itertools import islice
from math import ceil, sqrt
from typing import Any

from swiftlite.data.address import spelled_out
from swiftlite.data.findings import Findings
from swiftlite.data.lanes import Block, Lanes, Place, fingerprint, parts_of
from swiftlite.data.loader import SAMPLES, MicroBatch
from swiftlite.data.loader import micro_batch as make_batch
from swiftlite.data.order import draw, shuffled
from swiftlite.data.packing import pack
from swiftlite.data.prepare import nothing_left, refuse_bad
from swiftlite.data.render import Renderer, Sample
from swiftlite.data.report import Report
from swiftlite.data.row import Raw, Row, parse
from swiftlite.data.rows import Maker, Outcome
from swiftlite.recipe.errors import RecipeError
from swiftlite.recipe.schema import DataSection, DataSource

# Of how many past steps the position is kept: more than are ever prepared ahead of the one that trains.
STEPS_KEPT = 64
# Packs are made of the rows of one block: with few rows to choose from they stay half empty.
LEAST_PACKED = 32
# The share of bad rows means something from here on.
ENOUGH_ROWS = 1000
STREAMED = "rows are streamed: these are the ones that the first process read since it started, each in its first epoch"

Unit = list[Sample]


@dataclass(frozen=True)
class Mark:
    """How far a stream is: `given` units of the block at `place`."""

    place: Place
    given: int = 0


@dataclass(frozen=True)
class Layout:
    """What the first start settles and a resumed run takes over: streams, rows of a block, the format of each source."""

    streams: int
    rows: int
    formats: list[str | None]


class _Counted(Findings):
    """Findings without those that remember every row."""

    def keep(self, samples: Sequence[Sample]) -> None:
        pass


def check_keys(data: DataSection, max_steps: int | None) -> None:
    """Refuses what a stream cannot do.

    Raises:
        RecipeError: naming the key.
    """
    if max_steps is None:
        what = "data.streaming needs the number of steps: how many rows there are is not known before they are read"
        raise RecipeError(what, where="train.max_steps", fix="Set train.max_steps.")
    if data.eval_split:
        fix = "Name evaluation rows in data.eval."
        raise RecipeError("no rows can be held back from a stream", where="data.eval_split", fix=fix)
    if data.train_sampling_strategy == "group_by_length":
        fix = "Use random, or data.packing."
        raise RecipeError("a stream does not know lengths ahead", where="data.train_sampling_strategy", fix=fix)
    for source in map(spelled_out, data.train):
        if source.sample is not None:
            what = f"{source.sample} rows cannot be drawn from a stream"
            raise RecipeError(what, where=source.path, fix="Remove `sample` (#n), or data.streaming.")


class Stream:
    """The micro-batches of each step, in order, from rows that are read on the way. Stands where a Loader stands.

    Rows are cut into blocks of consecutive rows, which `Lanes` deals to S logical streams. A stream shuffles its block, renders
    it row by row, packs it where asked, and goes on with its next block, epoch after epoch. Unit k of the run, a row, a pack or
    a pair, is the next one of stream k mod S. Ranks share the streams out and have no other part in the order: rank r of W
    renders those s with s mod W = r, and gets empty micro-batches where that gives it less than others in a step. So W had
    better divide S.

    A stream that meets nothing to train on in a whole epoch gives an empty unit, so that the others go on.

    Rows are rendered in the thread that asks for a step: where that is not the main one, the main one must neither pad nor cut
    with the same tokenizer, which keeps those settings. Saving and decoding go well together with it.

    Args:
        data: as for `prepare`, and stream_shards, shuffle_buffer_size.
        order: random or sequential. Sequential rows come as they lie in the files, where none is left out, split or packed.
        max_length: tokens a row may have.
        check: called with each sample before it is trained; raises for one that the model cannot take.
        rows_per_step and others: as for Loader.

    Raises:
        DataError: a source is not found or cannot be read; from `settle` and `group` also bad rows, or nothing to train on.
    """

    in_order = True
    steps_per_epoch = None  # not known

    def __init__(
        self,
        sources: Sequence[DataSource],
        data: DataSection,
        renderer: Renderer,
        *,
        seed: int,
        order: str,
        max_length: int,
        rows_per_step: int,
        micro_batch: int,
        pad_id: int,
        capacity: int | None = None,
        padding_free: bool = False,
        multiple: int = 1,
        data_rank: int = 0,
        data_size: int = 1,
        eats: str = "rows",
        check: Callable[[Sample], None] | None = None,
    ) -> None:
        self.sources, self.data, self.renderer = [spelled_out(source) for source in sources], data, renderer
        self.seed, self.shuffle, self.max_length, self.check = seed, order != "sequential", max_length, check
        self.rows_per_step, self.micro_batch, self.capacity, self.eats = rows_per_step, micro_batch, capacity, eats
        self._batch = partial(
            make_batch,
            size=micro_batch,
            pad_id=pad_id,
            capacity=capacity,
            padding_free=padding_free,
            multiple=multiple,
            eats=eats,
        )
        self.data_rank, self.data_size = data_rank, data_size
        self.parts = parts_of(self.sources)
        self.fingerprint = fingerprint(self.parts)
        self.own = self.shuffle and len(self.parts) >= data.stream_shards
        self.layout: Layout | None = None
        self._state: dict[str, Any] = {"step": 0, "places": {}}
        self._past: dict[int, dict[int, Mark]] = {}
        self._lock = threading.Lock()

    @property
    def longest(self) -> int:
        """Tokens that a unit, a row, a pack or a pair, may have."""
        return self.capacity or self.max_length * SAMPLES[self.eats]

    @property
    def about(self) -> str:
        """One line for a person."""
        count = len(self.parts)
        assert self.layout is not None
        mixed = f"in each of {self.layout.streams:,} streams {self.layout.rows:,} rows are mixed at a time"
        return f"streamed from {count:,} file{'s' * (count > 1)}: {mixed}; how many there are is not known before they are read"

    def settle(self, count: int = 1) -> list[Sample]:
        """Looks at the first shuffle_buffer_size rows for the formats and the layout, which a resumed run has in its state.

        Returns:
            The first `count` samples, fewer where these rows give fewer.

        Raises:
            DataError: these rows give none, or a bad row comes before they do.
        """
        makers = self._makers_of([None] * len(self.sources))
        for number, maker in enumerate(makers):
            rows = (parse(raw) for part in self.parts if part.source == number for raw in part.read(0, 0))
            first = next((row for row in islice(rows, self.data.shuffle_buffer_size) if isinstance(row, Row)), None)
            if first is not None:
                maker.pick_format(first)
        account = _Account(self.sources, self.data, self.max_length, self.renderer.train_on)
        seen, samples = 0, list[Sample]()
        turns = shuffled(len(self.parts), self.seed, 0) if self.shuffle else range(len(self.parts))
        raws = ((self.parts[t].source, raw) for t in turns for raw in self.parts[t].read(0, 0))
        for number, raw in islice(raws, self.data.shuffle_buffer_size):
            seen += 1
            if len(samples) < count and (row := parse(raw)):
                outcome = makers[number](row)
                account.add(outcome, number, makers[number])
                samples += outcome.samples
            elif self.own and samples:
                break
        if not samples:
            raise nothing_left(self.sources, account.as_dict([]))
        self.layout = self._layout(seen, [maker.format.name if maker.format else None for maker in makers])
        return samples[:count]

    def _layout(self, seen: int, formats: list[str | None]) -> Layout:
        """Streams and rows of a block, which together hold the shuffle buffer, or a small source once."""
        shards, size = self.data.stream_shards, self.data.shuffle_buffer_size
        rows = ceil((size if self.own else min(size, seen)) / shards)
        if self.capacity is not None:
            rows = max(rows, min(LEAST_PACKED, size))
        elif not self.shuffle:
            rows = 1
        return Layout(shards if self.own else min(shards, ceil(seen / rows)), rows, formats)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on behind the steps of a state, made by any number of ranks. To be called before the first `group`.

        Args:
            state: of one rank, with the `places` of all ranks.
        """
        if len(state["places"]) != state["streams"]:
            raise ValueError(f"this state holds {len(state['places'])} of {state['streams']} streams")
        self.layout = Layout(state["streams"], state["rows"], list(state["formats"]))
        self._state, self._past = dict(state), {}

    def state(self, step: int) -> dict[str, Any]:
        """Where this rank's streams are after `step` steps, as JSON; the coming ones may be prepared already."""
        with self._lock:
            marks = self._opened()[step]
            assert self.layout is not None
            places = {str(stream): [*astuple(mark.place), mark.given] for stream, mark in marks.items()}
            layout = {"streams": self.layout.streams, "rows": self.layout.rows, "formats": self.layout.formats}
            return {"step": step, **layout, "places": places}

    def group(self, step: int) -> list[MicroBatch]:
        """This rank's micro-batches of step `step`, which must be the one behind the last."""
        with self._lock:
            past = self._opened()
            if step != max(past):
                raise ValueError(f"a stream gives its steps in order: step {max(past)} is next, not {step}")
            assert self.layout is not None
            marks, mine = dict(past[step]), list[Unit]()
            counts = [0] * self.data_size
            for k in range(step * self.rows_per_step, (step + 1) * self.rows_per_step):
                stream = k % self.layout.streams
                counts[stream % self.data_size] += 1
                if stream in marks:
                    marks[stream], unit = next(self._units[stream])
                    mine.append(unit)
            past[step + 1] = marks
            past.pop(step - STEPS_KEPT, None)
            size = self.micro_batch
            return [self._batch(mine[start : start + size]) for start in range(0, max(counts), size)]

    def report(self) -> dict[str, Any]:
        """The data report so far: of the rows that this rank read since its start, each counted in its first epoch only."""
        with self._lock:
            self._opened()
            return self._account.as_dict(self.renderer.notes)

    def _opened(self) -> dict[int, dict[int, Mark]]:
        """The marks of this rank's streams by the number of steps done; the first call opens the files at the marks."""
        if self._past:
            return self._past
        if self.layout is None:
            self.settle()
        assert self.layout is not None
        layout, places = self.layout, self._state["places"]
        owned = range(self.data_rank, layout.streams, self.data_size)
        start = {stream: Place(turn=stream if self.own else 0) for stream in owned}
        saved = {stream: places.get(str(stream), [*astuple(place), 0]) for stream, place in start.items()}
        marks = {stream: Mark(Place(*place), given) for stream, (*place, given) in saved.items()}
        self._makers = self._makers_of(layout.formats)
        self._account = _Account(self.sources, self.data, self.max_length, self.renderer.train_on)
        self._lanes = Lanes(
            self.parts, {stream: mark.place for stream, mark in marks.items()},
            seed=self.seed, shuffle=self.shuffle, own=self.own, streams=layout.streams, rows=layout.rows,
        )  # fmt: skip
        self._units = {stream: self._endless(stream, mark) for stream, mark in marks.items()}
        self._fresh = set(marks)  # streams in their first epoch
        self._past = {self._state["step"]: marks}
        return self._past

    def _makers_of(self, formats: Sequence[str | None]) -> list[Maker]:
        named = [s.model_copy(update={"format": f or s.format}) for s, f in zip(self.sources, formats, strict=True)]
        return [Maker(source, self.data, self.renderer, self.max_length, eats=self.eats) for source in named]

    def _endless(self, stream: int, start: Mark) -> Iterator[tuple[Mark, Unit]]:
        """The units of a stream behind `start`, each with the mark behind it."""
        fed = start.place.turn // len(self.parts) if start.given else -1  # the epoch of the last unit
        while True:
            block = self._lanes.next(stream)
            if block.epoch and stream in self._fresh:
                self._fresh.remove(stream)
                if not self._fresh:
                    self._account.check(exact=self.data_size == 1 and self._state["step"] == 0)
            units, given = self._units_of(block), 0
            if block.place == start.place:
                given = start.given
                for _ in islice(units, given):
                    pass
            for unit in units:
                given, fed = given + 1, block.epoch
                yield Mark(block.place, given), unit
            if not given and block.epoch > fed + 1:
                fed = block.epoch
                yield Mark(block.place, 1), []

    def _units_of(self, block: Block) -> Iterator[Unit]:
        """What a block holds, row by row or packed."""
        at = (self.seed, block.place.turn, block.place.line)
        rows = [(raw, copy == 0) for raw in block.rows for copy in range(self._copies(block, raw.line))]
        order = shuffled(len(rows), *at) if self.shuffle else range(len(rows))
        samples = (sample for i in order for sample in self._samples(block, *rows[i]))
        if self.capacity is None:
            yield from map(list, zip(*[samples] * SAMPLES[self.eats], strict=True))
            return
        held = list(samples)
        packs = pack([len(sample.input_ids) for sample in held], self.capacity)
        turns = shuffled(len(packs), *at, 1) if self.shuffle else range(len(packs))
        yield from ([held[i] for i in packs[n]] for n in turns)

    def _copies(self, block: Block, line: int) -> int:
        """How often a row comes in an epoch, by the weight of its source."""
        whole, fraction = divmod(self.sources[block.part.source].weight, 1)
        return int(whole) + (draw(self.seed, block.part.number, line) < fraction * 2**64)

    def _samples(self, block: Block, raw: Raw, first: bool) -> list[Sample]:
        row, number = parse(raw), block.part.source
        if row is None:
            return []
        outcome = self._makers[number](row)
        if first and block.epoch == 0:
            self._account.add(outcome, number, self._makers[number])
        for sample in outcome.samples if self.check else []:
            self.check(sample)
        return outcome.samples


class _Account:
    """The report of a stream, and what it does about bad rows."""

    def __init__(self, sources: Sequence[DataSource], data: DataSection, max_length: int, train_on: str) -> None:
        self._data, self._report = data, Report(max_length, train_on, findings=_Counted())
        self._tallies = [self._report.source(source.name or source.path) for source in sources]

    def add(self, outcome: Outcome, number: int, maker: Maker) -> None:
        """Counts a row of source `number`.

        Raises:
            DataRefused: a bad row (on_bad_rows: error), or too large a share of them (skip) among enough rows.
        """
        self._report.add(outcome, self._tallies[number])
        self._tallies[number].format = maker.format.name if maker.format else ""
        if outcome.bad and (self._data.on_bad_rows == "error" or self._report.too_long):
            refuse_bad(self._report, self._data, self.as_dict([]))
        elif outcome.bad and self._report.total("read") >= ENOUGH_ROWS:
            self.check(exact=False)

    def check(self, *, exact: bool) -> None:
        """Refuses too large a share of bad rows.

        Args:
            exact: these are all rows; else they are some of them, whose share must be above the limit by more than chance.

        Raises:
            DataRefused: naming the first ones.
        """
        allowed = self._data.max_bad_fraction * self._report.total("read")
        if self._report.bad > allowed + (0 if exact else 3 * sqrt(allowed)):
            refuse_bad(self._report, self._data, self.as_dict([]))

    def as_dict(self, notes: Sequence[str]) -> dict[str, Any]:
        """The report so far."""
        return self._report.as_dict([*notes, STREAMED], lambda n: "")
