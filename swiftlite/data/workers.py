"""Rows to samples in several processes: one reads, the others parse, render and encode. What comes out, and in which order, is
what one process alone makes.

Rows go out in chunks and come back in order. A chunk in which something ends the reading, as one bad row too many or a wrong
template, is made once more by the reading process, which so stops at that very row and raises what it would have raised alone.
"""

import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait

from swiftlite.data.formats import Format
from swiftlite.data.overlong import TOO_LONG
from swiftlite.data.read import Opened, Raw, parse, raw_rows
from swiftlite.data.render import Lessons, Renderer
from swiftlite.data.report import BAD_ROWS_SHOWN, Report
from swiftlite.data.row import prefix
from swiftlite.data.rows import Maker
from swiftlite.data.store import Columns
from swiftlite.recipe import tables
from swiftlite.recipe.errors import SwiftliteError
from swiftlite.recipe.schema import DataSection

CHUNK_ROWS, CHUNK_BYTES = 256, 2**20
# A process more costs what these rows do, or rows of so many bytes.
PAYS_FROM, PAYS_BYTES = 512, 2**20
AHEAD = 3  # chunks a process that are under way at once, so that none waits for the reading process


@dataclass(frozen=True)
class Job:
    """What rows are made with."""

    sources: Sequence[Opened]
    data: DataSection
    renderer: Renderer
    max_length: int
    seed: int
    eats: str = "rows"

    def maker(self, source: int, format: Format | None = None) -> Maker:
        return Maker(self.sources[source].source, self.data, self.renderer, self.max_length, format, self.eats)

    def report(self) -> Report:
        return Report(self.max_length, self.renderer.train_on)

    @property
    def patience(self) -> int:
        """Bad rows at which reading stops."""
        return BAD_ROWS_SHOWN if self.data.on_bad_rows == "error" else sys.maxsize


@dataclass
class Made:
    """A chunk of consecutive rows of one source. `ended`: its last row ends the reading, and there may be rows behind it."""

    columns: Columns
    report: Report
    ended: bool = False
    lessons: Lessons | None = None


def make(maker: Maker, raws: Iterable[Raw], report: Report, patience: int) -> Made:
    """Rows of one source, up to the `patience`-th bad one.

    Args:
        report: a new one, which counts these rows.
    """
    made, tally = Made(Columns(), report), report.source("")
    for raw in raws:
        row = parse(raw)
        if row is None:
            continue
        outcome = maker(row)
        report.add(outcome, tally)
        made.columns.add(outcome.samples, prefix(row.file, row.unit), row.line)
        if outcome.bad is not None and (report.bad >= patience or outcome.bad.kind == TOO_LONG):
            made.ended = True
            break
    tally.format = maker.format.name if maker.format else ""
    return made


def make_all(job: Job, num_proc: int, report: Report) -> Iterator[Columns]:
    """All rows of all sources, in order, counted in `report`.

    Args:
        num_proc: processes that make rows; 1: this one.

    Raises:
        DataError, RecipeError: a source that cannot be read, or whose format is not clear.
        SwiftliteError: a process died.
    """
    with _Pool(job, num_proc) as pool:
        for number, opened in enumerate(job.sources):
            tally = report.source(opened.source.name or opened.source.path)
            for made in _of_source(job, number, pool, report):
                report.absorb(made.report, tally)
                yield made.columns
                if made.ended:
                    return


def _of_source(job: Job, number: int, pool: "_Pool", report: Report) -> Iterator[Made]:
    """The chunks of one source in order. Each must be counted in `report` before the next is asked for."""
    maker, failure = job.maker(number), None
    waiting: deque[tuple[list[Raw], Future[Made | None]]] = deque()
    for chunk in _chunks(raw_rows(job.sources[number], job.seed)):
        if isinstance(chunk, SwiftliteError):
            failure = chunk
        elif maker.format is None or pool.num_proc == 1 or (not pool.started and report.total("read") < PAYS_FROM):
            # Nothing is waiting: the first rows settle the format, and chunks behind them are never made here again.
            yield make(maker, chunk, job.report(), job.patience - report.bad)
        else:
            waiting.append((chunk, pool.submit(number, maker.format, chunk)))
            if len(waiting) >= AHEAD * pool.num_proc:
                yield _result(job, maker, report, *waiting.popleft())
    while waiting:
        yield _result(job, maker, report, *waiting.popleft())
    if failure:
        raise failure


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processes(job: Job) -> int:
    """Processes that make rows: data.num_proc or one a core, no more than pay; where processes cannot be forked, 1."""
    most = (job.data.num_proc or cores()) if sys.platform == "linux" else 1
    if any(opened.table is not None for opened in job.sources):
        return most
    return min(most, 1 + sum(file.stat().st_size for opened in job.sources for file in opened.files) // PAYS_BYTES)


def _chunks(raws: Iterator[Raw]) -> Iterator[list[Raw] | SwiftliteError]:
    """Rows in chunks. What goes wrong in reading comes behind the rows before it, as those may have something to say first."""
    chunk: list[Raw] = []
    size, failure = 0, None
    while failure is None:
        try:
            raw = next(raws, None)
        except SwiftliteError as error:
            raw, failure = None, error
        if raw is not None:
            chunk.append(raw)
            size += len(raw.content) if isinstance(raw.content, bytes) else 0
        if chunk and (raw is None or len(chunk) == CHUNK_ROWS or size >= CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        if raw is None:
            break
    if failure is not None:
        yield failure


def _result(job: Job, maker: Maker, report: Report, chunk: list[Raw], future: "Future[Made | None]") -> Made:
    """A chunk that came back, made here once more where reading ends in it."""
    try:
        made = future.result()
    except BrokenProcessPool as error:
        raise _died() from error
    patience = job.patience - report.bad
    if made is None or made.ended or made.report.bad >= patience:
        return make(maker, chunk, job.report(), patience)
    assert made.lessons is not None
    job.renderer.learn(made.lessons)
    return made


def _died() -> SwiftliteError:
    what = "a process that prepares data died; the system may have ended it for want of memory."
    return SwiftliteError(what, where="data.num_proc", fix="Lower data.num_proc, or see the system's log.")


class _Pool:
    """Processes that start with the first chunk, and have everything by being forked: sources, renderer, rows of plugins."""

    def __init__(self, job: Job, num_proc: int) -> None:
        self.job, self.num_proc = job, num_proc
        self._pool: ProcessPoolExecutor | None = None

    @property
    def started(self) -> bool:
        return self._pool is not None

    def submit(self, source: int, format: Format, chunk: list[Raw]) -> "Future[Made | None]":
        if self._pool is None:
            self._pool = self._start()
        try:
            return self._pool.submit(_make_chunk, source, format.name, chunk)
        except BrokenProcessPool as error:
            raise _died() from error

    def __enter__(self) -> "_Pool":
        return self

    def __exit__(self, *exc: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _start(self) -> ProcessPoolExecutor:
        pool = ProcessPoolExecutor(self.num_proc, multiprocessing.get_context("fork"), _start, (self.job,))
        # Read by tokenizers when a process is forked: its thread pool does not live on in the child.
        before = os.environ.get("TOKENIZERS_PARALLELISM")
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of forking beside threads, as torch's: the children use none of them.
                warnings.filterwarnings("ignore", ".*multi-threaded.*", DeprecationWarning)
                pool.submit(os.getpid)  # starts all of them
        except OSError as error:
            what = f"{self.num_proc} processes cannot be started: {error.strerror}."
            raise SwiftliteError(what, where="data.num_proc", fix="Lower it.") from error
        finally:
            os.environ.pop("TOKENIZERS_PARALLELISM")
            os.environ |= {} if before is None else {"TOKENIZERS_PARALLELISM": before}
        return pool


_job: Job


def _start(job: Job) -> None:
    global _job
    _job = job
    # The reading process is interrupted too and ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _make_chunk(source: int, format: str, chunk: list[Raw]) -> Made | None:
    """A chunk, or None where something is wrong that is not one row's fault: the reading process will find it too, and say it."""
    maker = _job.maker(source, tables.load(tables.FORMATS, format, "data.format"))
    try:
        made = make(maker, chunk, _job.report(), _job.patience)
    except SwiftliteError:
        return None
    made.lessons = _job.renderer.lessons
    return made
