"""Sources to samples, with an account of every row."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from swiftlite.data.formats import Format, RowError, conversation, pick_format
from swiftlite.data.order import draw
from swiftlite.data.overlong import NO_TOKENS, TOO_LONG, fit
from swiftlite.data.read import BadRow, Row, read_rows
from swiftlite.data.render import Renderer, Sample
from swiftlite.data.report import Report
from swiftlite.recipe.errors import DataError, RecipeError
from swiftlite.recipe.schema import DataSection, DataSource

# Reading goes on to here after the first bad row, so that the user learns of all mistakes of a file at once, and soon.
BAD_ROWS_SHOWN = 20

BadOne = tuple[Row | BadRow, RowError]


@dataclass(frozen=True)
class Prepared:
    """What training gets. `held_back` are the rows of eval_split, which are not among `samples`."""

    samples: list[Sample]
    report: dict[str, Any]
    held_back: list[Sample] = field(default_factory=list)


class DataRefused(DataError):
    """The rows as a whole cannot be trained on; `report` says what became of each."""

    def __init__(self, what: str, report: dict[str, Any], *, where: object = None, fix: str | None = None) -> None:
        super().__init__(what, where=where, fix=fix)
        self.report = report


def prepare(
    sources: Sequence[DataSource], data: DataSection, renderer: Renderer, *, max_length: int, seed: int, eval_split: float = 0
) -> Prepared:
    """Reads, renders and fits all rows.

    Args:
        data: the keys for all sources: format, columns, overlong, on_bad_rows, max_bad_fraction.
        max_length: tokens a row may have.
        eval_split: rows (whole number) or share (< 1) to hold back, drawn by seed and row number.

    Raises:
        DataRefused: a bad row (on_bad_rows: error), too many of them (skip), or nothing left to train on.
        DataError: a source that cannot be read, or whose format is not clear.
    """
    report = Report(max_length, renderer.train_on)
    samples: list[Sample] = []
    numbers: list[int] = []
    first_bad: list[BadOne] = []
    for outcome in (o for source in sources for o in _rows(source, data, renderer, report, seed)):
        if isinstance(outcome, list):
            samples += outcome
            numbers += [report.total("read")] * len(outcome)
            continue
        report.bad += 1
        first_bad += [outcome] if len(first_bad) < BAD_ROWS_SHOWN else []
        if (data.on_bad_rows == "error" and report.bad == BAD_ROWS_SHOWN) or outcome[1].kind == TOO_LONG:
            break
    account = report.as_dict(renderer.notes, lambda n: samples[n].source)
    _refuse_bad(first_bad, report.bad, data, account)
    if not samples:
        raise _nothing_left(sources, account)
    back = _held_back(numbers, eval_split, seed)
    account["held_back"] = len(back)
    kept = [s for s, number in zip(samples, numbers, strict=True) if number not in back]
    return Prepared(kept, account, [s for s, number in zip(samples, numbers, strict=True) if number in back])


def _rows(
    source: DataSource, data: DataSection, renderer: Renderer, report: Report, seed: int
) -> Iterator[list[Sample] | BadOne]:
    """Samples of each kept row and bad rows of one source; rows that are dropped by rule are counted on the way."""
    tally = report.source(source.name or source.path)
    columns = data.columns if source.columns is None else source.columns
    fmt: Format | None = None
    for row in read_rows(source, seed):
        tally.read += 1
        try:
            if isinstance(row, BadRow):
                raise RowError(row.kind, row.reason)
            if fmt is None:
                fmt = pick_format(source.format or data.format, row.value, columns, source.path)
                tally.format = fmt.name
            conv = conversation(row, fmt, columns, source.system)
            whole = renderer.samples(conv)
            fitted = fit(conv, whole, renderer, data.overlong, report.max_length)
        except RowError as error:
            report.drop(row.source, error.kind, error.detail, row.excerpt)
            yield row, error
            continue
        if not fitted.samples:
            report.drop(row.source, fitted.kind, fitted.detail, row.excerpt)
            continue
        if fitted.cut:
            tally.cut += 1
            report.note_row(row.source, "cut", fitted.cut, row.excerpt)
        report.keep(tally, fitted.samples)
        report.findings.look(row, conv, whole, renderer)
        yield fitted.samples


def _refuse_bad(first: list[BadOne], count: int, data: DataSection, account: dict[str, Any]) -> None:
    if not count:
        return
    row, error = first[0]
    too_long = first[-1][1].kind == TOO_LONG
    if data.on_bad_rows == "skip" and not too_long:
        if count <= data.max_bad_fraction * account["read"]:
            return
        what = f"{count} of {account['read']} rows are bad, more than data.max_bad_fraction {data.max_bad_fraction}; the first, "
        fix = "Mend the rows, or raise data.max_bad_fraction."
    else:
        what = f"{count} bad among the first {account['read']} rows; the first, " if count > 1 else ""
        fix = "Raise data.max_length." if too_long else "Mend the rows, or set data.on_bad_rows: skip."
    what += f"{row.unit} {row.line}: {error}. Text: {row.excerpt}" + "\n" * (len(first) > 1)
    what += "".join(f"  {other.source}  {err}\n" for other, err in first[1:])
    raise DataRefused(what, account, where=row.source, fix=fix)


def _nothing_left(sources: Sequence[DataSource], account: dict[str, Any]) -> DataRefused:
    where = ", ".join(source.path for source in sources)
    if not account["read"]:
        return DataRefused("there are no rows.", account, where=where)
    reasons = ", ".join(f"{count} {kind}" for kind, count in account["dropped"].items())
    fix = "Raise data.max_length." if "max length" in reasons else "See data.train_on, and whether rows have an answer."
    first = account["rows"][0]
    what = f"{NO_TOKENS}: all {account['read']} rows were dropped ({reasons}); the first, "
    what += f"{first['source']}: {first['reason']}. Text: {first['text']}"
    return DataRefused(what, account, where=where, fix=fix)


def _held_back(numbers: list[int], eval_split: float, seed: int) -> set[int]:
    """The row numbers to hold back, whole rows and drawn by number, so that a shorter max_length moves none."""
    rows = sorted(set(numbers))
    if not eval_split:
        return set()
    if eval_split >= 1 and eval_split != int(eval_split):
        raise RecipeError(f"{eval_split} is neither a whole number of rows nor a share below 1.", where="data.eval_split")
    count = int(eval_split) if eval_split >= 1 else max(1, round(eval_split * len(rows)))
    if count >= len(rows):
        what = f"{eval_split} would hold back {count} of {len(rows)} rows."
        raise RecipeError(what, where="data.eval_split", fix="Lower it.")
    return set(sorted(rows, key=lambda number: draw(seed, number))[:count])
