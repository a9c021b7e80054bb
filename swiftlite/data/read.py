"""Rows in: files, folders, globs and hub datasets, row by row, every value with the type and spelling it has there.

JSON lines are read by plain Python and not through Arrow, which unifies types and keys over rows: "007" would become 7,
and every tool call would gain the other calls' keys.
"""

import csv
import glob
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from swiftlite.data.address import spelled_out
from swiftlite.data.hub import hub_table, without_nulls
from swiftlite.data.order import chosen
from swiftlite.data.row import BOM, CONVERT, EXCERPT, DuplicateKey, blank, decode, object_row, parse_json, shorten, unique
from swiftlite.data.row import BadRow as BadRow
from swiftlite.data.row import Raw as Raw
from swiftlite.data.row import Row as Row
from swiftlite.data.row import parse as parse
from swiftlite.data.row import place as place
from swiftlite.recipe.errors import DataError, nearest
from swiftlite.recipe.schema import DataSource

# Bytes of one line: more text than any model's context holds. A file without line ends must not be read into memory whole.
MAX_LINE = 32 * 2**20

Rows = Iterator[Row | BadRow]
Raws = Iterator[Raw]


@dataclass(frozen=True)
class Opened:
    """A source that was found: its files, or the table of a hub dataset."""

    source: DataSource
    files: list[Path]
    table: Any = None


def open_source(source: DataSource) -> Opened:
    """Finds the files of a source, or loads it from the hub.

    Raises:
        DataError: no such path or hub dataset.
    """
    source = spelled_out(source)
    files = find_files(source.path)
    return Opened(source, files, None if files else hub_table(source))


def read_rows(source: DataSource, seed: int = 0) -> Rows:
    """The rows of one source in file order, `source.sample` of them when that is given.

    Raises:
        DataError: no such path or hub dataset, an unreadable file, or fewer rows than `sample` asks for.
    """
    yield from filter(None, map(parse, raw_rows(open_source(source), seed)))


def raw_rows(opened: Opened, seed: int = 0) -> Raws:
    """`read_rows` before `parse`; blank lines come too, but not where rows are drawn."""
    source = opened.source
    rows = _hub(opened) if opened.table is not None else (raw for file in opened.files for raw in raw_file(file))
    if source.sample is None:
        yield from rows
        return
    picked = chosen((raw for raw in rows if not blank(raw)), source.sample, seed)
    if len(picked) < source.sample:
        what = f"sample asks for {source.sample} rows, there are {len(picked)}."
        raise DataError(what, where=source.path, fix="Lower or remove `sample`.")
    yield from picked


def raw_file(file: Path, offset: int = 0, line: int = 0) -> Raws:
    """The rows of one file behind line (or row) `line`.

    Args:
        offset: where that line ends, as `Raw.offset` says, so that what is before it need not be read. 0: the file is read from
            its start, or, of parquet, from the group of rows that holds the next one.

    Raises:
        DataError: the file cannot be read.
    """
    reader = _reader(file)
    assert reader is not None
    rows = _jsonl(file, offset, line) if offset else _parquet(file, line) if reader is _parquet else reader(file)
    try:
        yield from (raw for raw in rows if raw.line > line)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot be read: {error}.", where=file) from error


def find_files(path: str) -> list[Path]:
    """The readable files of a file, folder or glob path, sorted by name; an empty list for what must be a hub id.

    Raises:
        DataError: the path looks local and nothing readable is there.
    """
    here, readable = Path(path).expanduser(), f"Readable: {', '.join(READERS)}; text also as .gz or .zst."
    if here.is_file():
        if _reader(here) is None:
            raise DataError(f"cannot read files of type '{here.suffix}'.", where=path, fix=readable)
        return [here]
    if here.is_dir() or glob.has_magic(path):
        found = here.rglob("*") if here.is_dir() else map(Path, glob.glob(str(here), recursive=True))
        files = sorted(f for f in found if f.is_file() and _reader(f) and not f.name.startswith("."))
        if not files:
            raise DataError("holds no readable file.", where=path, fix=readable)
        return files
    hub_id = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path)
    # A hub id may look like `folder/name`: where the folder exists, the user meant the folder.
    if hub_id and _reader(here) is None and not ("/" in path and Path(here.parts[0]).is_dir()):
        return []
    missing = here
    while not missing.parent.exists():
        missing = missing.parent
    names = os.listdir(missing.parent) if missing.parent.is_dir() else []
    same_stem = [name for name in names if name.split(".")[0] == missing.name]
    hint = f" Did you mean '{same_stem[0]}'?" if same_stem else nearest(missing.name, names)
    raise DataError(f"no such file or folder ('{missing.name}' is not in '{missing.parent.resolve()}').{hint}", where=path)


def _reader(file: Path) -> Callable[[Path], Raws] | None:
    suffixes = [s.lower() for s in file.suffixes]
    if suffixes[-1:] in ([".gz"], [".zst"]) and ".parquet" not in suffixes:
        suffixes.pop()
    return READERS.get(suffixes[-1]) if suffixes else None


def _open(file: Path) -> IO[bytes]:
    if file.suffix.lower() == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))
    return cast(IO[bytes], gzip.open(file, "rb")) if file.suffix.lower() == ".gz" else open(file, "rb")


def _lines(stream: IO[bytes], number: int = 0) -> Iterator[tuple[int, bytes, int]]:
    """Lines behind line `number`: their number, their bytes, cut at MAX_LINE, and how many there are without that cut."""
    while raw := stream.readline(MAX_LINE + 1):
        number += 1
        size, rest = len(raw), raw
        while size > MAX_LINE and rest and not rest.endswith(b"\n"):
            rest = stream.readline(2**20)
            size += len(rest)
        yield number, raw, size


def _too_long(raw: bytes, file: Path, line: int) -> BadRow:
    reason = f"over {MAX_LINE // 2**20} MiB without a line end, the most that a row may have; are the rows one a line?"
    return BadRow(str(file), line, "line too long", reason, shorten(raw[: 2 * EXCERPT].decode("utf-8", "replace")))


class _Twice(str):
    """Why an object was not taken, in its place, until it is known which row that is."""


def _mark(found: list[_Twice], pairs: list[tuple[str, Any]]) -> Any:
    try:
        return unique(pairs)
    except DuplicateKey as error:
        found.append(_Twice(error))
        return found[-1]


def _twice(value: Any) -> _Twice | None:
    """The first mark in `value`."""
    if isinstance(value, _Twice):
        return value
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next(filter(None, map(_twice, inside)), None)


def _jsonl(file: Path, offset: int = 0, line: int = 0) -> Raws:
    plain = file.suffix.lower() in (".jsonl", ".ndjson")
    with _open(file) as stream:
        if offset:
            stream.seek(offset)
        for number, raw, size in _lines(stream, line):
            offset += size
            content = raw if size <= MAX_LINE else _too_long(raw, file, number)
            yield Raw(str(file), number, content, offset=offset if plain else None)


def _json(file: Path) -> Raws:
    """A list of rows, {"data": [rows]}, or one row; JSON lines under the wrong name are read as such."""
    marks: list[_Twice] = []
    with _open(file) as stream:
        raw = stream.read()
    try:
        value = parse_json(raw.removeprefix(BOM).decode("utf-8"), partial(_mark, marks))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        what = f"line {line} holds byte 0x{raw[error.start]:02x}, which is not utf-8."
        raise DataError(what, where=f"{file}:{line}", fix=CONVERT) from None
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and error.lineno > 1:
            yield from _jsonl(file)
            return
        excerpt = shorten(error.doc.splitlines()[error.lineno - 1].strip()) if error.doc.strip() else ""
        raise DataError(f"line {error.lineno} is not JSON: {error}. Text: {excerpt}", where=f"{file}:{error.lineno}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON: {error}.", where=file) from None
    if isinstance(value, dict):
        value = value["data"] if isinstance(value.get("data"), list) else [value]
    for number, item in enumerate(value if isinstance(value, list) else [value], 1):
        if marks and (reason := _twice(item)):
            content: Any = BadRow(str(file), number, "duplicate key", reason, shorten(str(item)), "row")
        else:
            content = item if isinstance(item, dict) else object_row(item, str(file), number, "row", str(item))
        yield Raw(str(file), number, content, "row")


def _csv(file: Path) -> Raws:
    """Every value is text, an empty one too; a row stands at its first line."""

    def lines(stream: IO[bytes]) -> Iterator[str]:
        for number, raw, size in _lines(stream):
            text = decode(raw, str(file), number) if size <= MAX_LINE else _too_long(raw, file, number)
            if isinstance(text, BadRow):
                raise DataError(f"line {number}: {text.reason}", where=text.source)
            yield text

    csv.field_size_limit(MAX_LINE)
    with _open(file) as stream:
        table = csv.reader(lines(stream), delimiter="\t" if ".tsv" in file.suffixes else ",", strict=True)
        try:
            header = next(table, [])
            if len(set(header)) < len(header) or "" in header:
                raise DataError(f"line 1 must name every column once, it reads {header}.", where=f"{file}:1")
            start = table.line_num + 1
            for fields in table:
                if fields and len(fields) != len(header):
                    reason = f"{len(fields)} fields where the header names {len(header)}"
                    bad = BadRow(str(file), start, "wrong number of fields", reason, shorten(str(fields)))
                    yield Raw(str(file), start, bad)
                elif fields:
                    yield Raw(str(file), start, dict(zip(header, fields, strict=True)))
                start = table.line_num + 1
        except csv.Error as error:
            raise DataError(f"line {table.line_num}: {error}.", where=f"{file}:{table.line_num}") from None


def _parquet(file: Path, line: int = 0) -> Raws:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            number, first, groups = 0, 0, table.metadata.num_row_groups
            while first < groups and number + table.metadata.row_group(first).num_rows <= line:
                number += table.metadata.row_group(first).num_rows
                first += 1
            for batch in table.iter_batches(1024, row_groups=range(first, groups)):
                for value in batch.to_pylist():
                    number += 1
                    yield Raw(str(file), number, without_nulls(value), "row")
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"is not a parquet file: {error}.", where=file) from None


def _hub(opened: Opened) -> Raws:
    name = f"{opened.source.path}[{opened.source.split}]"
    for number, value in enumerate(opened.table, 1):
        yield Raw(name, number, without_nulls(value), "row")


READERS: dict[str, Callable[[Path], Raws]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
}
