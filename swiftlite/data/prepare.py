"""Sources to samples, with an account of every row."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftlite.data import cache
from swiftlite.data.order import draws
from swiftlite.data.overlong import NO_TOKENS
from swiftlite.data.read import Opened, open_source
from swiftlite.data.render import Lessons, Renderer, Sample
from swiftlite.data.report import Report
from swiftlite.data.store import Store, StoreWriter, Subset
from swiftlite.data.workers import Job, make_all, processes
from swiftlite.recipe.errors import DataError, RecipeError
from swiftlite.recipe.schema import DataSection, DataSource


@dataclass(frozen=True)
class Prepared:
    """What training gets.

    Args:
        held_back: the rows of eval_split, which are not among `samples`.
        cached: the folder of the cache that the rows were taken from; None where they were made now.
        notes: what a user should know about the cache.
    """

    samples: Store | Subset
    report: dict[str, Any]
    held_back: Sequence[Sample] = ()
    cached: Path | None = None
    notes: list[str] = field(default_factory=list)


class DataRefused(DataError):
    """The rows as a whole cannot be trained on; `report` says what became of each."""

    def __init__(self, what: str, report: dict[str, Any], *, where: object = None, fix: str | None = None) -> None:
        super().__init__(what, where=where, fix=fix)
        self.report = report


def prepare(
    sources: Sequence[DataSource],
    data: DataSection,
    renderer: Renderer,
    *,
    max_length: int,
    seed: int,
    eval_split: float = 0,
    eats: str = "rows",
) -> Prepared:
    """Reads, renders and fits all rows, or takes them from the cache if the same was done before.

    Args:
        data: the keys for all sources: format, columns, overlong, on_bad_rows, max_bad_fraction, num_proc, cache_dir.
        renderer: learns from the rows: what to note, end-of-turn tokens, the template where there is none.
        max_length: tokens a row may have.
        eval_split: rows (whole number) or share (< 1) to hold back, drawn by seed and row number.
        eats: rows, or pairs, of which each becomes two neighbouring samples, the better answer first.

    Raises:
        DataRefused: a bad row (on_bad_rows: error), too many of them (skip), or nothing left to train on.
        DataError: a source that cannot be read, or whose format is not clear; no room for the prepared rows.
    """
    opened = [open_source(source) for source in sources]
    stamps = _stamps(opened)
    job = Job(opened, data, renderer.fresh(), max_length, seed, eats)

    def build(folder: Path) -> tuple[dict[str, Any], Lessons]:
        made = _build(job, folder)
        if _stamps(opened) != stamps:
            raise DataError("changed while it was read.", where=", ".join(s.path for s in sources), fix="Start again.")
        return made

    entry = cache.entry(cache.key(job), data.cache_dir, build)
    renderer.learn(entry.lessons)
    account = {**entry.report, "notes": renderer.notes}
    back = _held_back(entry.store.rows, eval_split, seed)
    account["held_back"] = len(np.unique(entry.store.rows[back]))
    indices = _weighted(entry.store, back, [source.weight for source in sources], account, seed)
    if not len(indices):
        raise DataError("weight leaves no row.", where=", ".join(s.path for s in sources), fix="Raise `weight`.")
    whole = len(indices) == len(entry.store) and bool((indices == np.arange(len(indices))).all())
    samples = entry.store if whole else Subset(entry.store, indices)
    return Prepared(samples, account, Subset(entry.store, back) if len(back) else [], entry.found, entry.notes)


def _stamps(opened: Sequence[Opened]) -> list[tuple[int, int]]:
    """Size and time of every file."""
    return [(stat.st_size, stat.st_mtime_ns) for source in opened for stat in map(Path.stat, source.files)]


def _build(job: Job, folder: Path) -> tuple[dict[str, Any], Lessons]:
    """Writes the store of all rows into `folder`; returns their report and what they taught the renderer."""
    report, writer = job.report(), StoreWriter(folder)
    for columns in make_all(job, processes(job), report):
        writer.add(columns)
    store = writer.close()
    account = report.as_dict(job.renderer.notes, lambda n: store.source(n) if store else "")
    refuse_bad(report, job.data, account)
    if store is None:
        raise nothing_left([opened.source for opened in job.sources], account)
    return account, job.renderer.lessons


def refuse_bad(report: Report, data: DataSection, account: dict[str, Any]) -> None:
    """Raises DataRefused where bad rows are not allowed, or are too many of the rows that `report` counted."""
    if not report.bad:
        return
    first, count = report.first_bad, report.bad
    if data.on_bad_rows == "skip" and not report.too_long:
        if count <= data.max_bad_fraction * account["read"]:
            return
        what = f"{count} of {account['read']} rows are bad, more than data.max_bad_fraction {data.max_bad_fraction}; the first, "
        fix = "Mend the rows, or raise data.max_bad_fraction."
    else:
        what = f"{count} bad among the first {account['read']} rows; the first, " if count > 1 else ""
        fix = "Raise data.max_length." if report.too_long else "Mend the rows, or set data.on_bad_rows: skip."
        first = [*first, report.too_long] if report.too_long and report.too_long not in first else first
    bad = first[0]
    what += f"{bad.at}: {bad.kind}: {bad.detail}. Text: {bad.excerpt}" + "\n" * (len(first) > 1)
    what += "".join(f"  {other.source}  {other.kind}: {other.detail}\n" for other in first[1:])
    raise DataRefused(what, account, where=bad.source, fix=fix)


def nothing_left(sources: Sequence[DataSource], account: dict[str, Any]) -> DataRefused:
    """What to raise where no row is left, with what became of them."""
    where = ", ".join(source.path for source in sources)
    if not account["read"]:
        return DataRefused("there are no rows.", account, where=where)
    reasons = ", ".join(f"{count} {kind}" for kind, count in account["dropped"].items())
    fix = "Raise data.max_length." if "max length" in reasons else "See data.train_on, and whether rows have an answer."
    first = account["rows"][0]
    what = f"{NO_TOKENS}: all {account['read']} rows were dropped ({reasons}); the first, "
    what += f"{first['source']}: {first['reason']}. Text: {first['text']}"
    return DataRefused(what, account, where=where, fix=fix)


def _held_back(rows: NDArray[np.int64], eval_split: float, seed: int) -> NDArray[np.int64]:
    """The samples to hold back: whole rows, drawn by number, so that a shorter max_length moves none.

    Args:
        rows: the row of each sample, ascending.
    """
    if not eval_split:
        return np.zeros(0, np.int64)
    numbers = np.unique(rows)
    if eval_split >= 1 and eval_split != int(eval_split):
        raise RecipeError(f"{eval_split} is neither a whole number of rows nor a share below 1.", where="data.eval_split")
    count = int(eval_split) if eval_split >= 1 else max(1, round(eval_split * len(numbers)))
    if count >= len(numbers):
        what = f"{eval_split} would hold back {count} of {len(numbers)} rows."
        raise RecipeError(what, where="data.eval_split", fix="Lower it.")
    drawn = numbers[np.argsort(draws(numbers.tolist(), seed), kind="stable")[:count]]
    return np.flatnonzero(np.isin(rows, drawn))


def _weighted(
    store: Store, back: NDArray[np.int64], weights: Sequence[float], account: dict[str, Any], seed: int
) -> NDArray[np.int64]:
    """The samples of an epoch: those of a source as often as its weight says, a whole number of times and once more for a
    fraction of its rows, which are drawn by number. What is held back is left out. Says in `account` what came of it."""
    tallies = list(account["sources"].values())
    borders = np.cumsum([0] + [tally["read"] for tally in tallies]) + 1  # the first row of each source
    kept = np.ones(len(store), bool)
    kept[back] = False
    parts: list[NDArray[np.int64]] = []
    for tally, weight, first, end in zip(tallies, weights, borders[:-1], borders[1:], strict=True):
        start, stop = np.searchsorted(store.rows, [first, end])
        here = np.flatnonzero(kept[start:stop]) + start
        whole, fraction = divmod(weight, 1)
        epoch = [here] * int(whole)
        if fraction:
            epoch.append(here[draws(store.rows[here].tolist(), seed, 1) < fraction * 2**64])
        parts += epoch
        if weight != 1:
            tally |= {"weight": weight, "samples_an_epoch": sum(map(len, epoch))}
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
