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
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from swiftlite.data.address import spelled_out
from swiftlite.data.order import chosen
from swiftlite.recipe.errors import DataError, nearest
from swiftlite.recipe.schema import DataSource

EXCERPT = 100
# Bytes of one line: more text than any model's context holds. A file without line ends must not be read into memory whole.
MAX_LINE = 32 * 2**20
HUB_TIMEOUT_S = 10
BOM = b"\xef\xbb\xbf"
CONVERT = "Convert it to UTF-8, as with `iconv -f OLD_ENCODING -t UTF-8`."


@dataclass(frozen=True)
class Row:
    """One row and its place: a line of a text file, else the number of the row, both counted from 1."""

    file: str
    line: int
    value: dict[str, Any]
    unit: str = "line"

    @property
    def source(self) -> str:
        return place(self)

    @property
    def excerpt(self) -> str:
        return shorten(json.dumps(self.value, ensure_ascii=False, default=str))


@dataclass(frozen=True)
class BadRow:
    """A row that could not be read; reading goes on behind it."""

    file: str
    line: int
    kind: str
    reason: str
    excerpt: str = ""
    unit: str = "line"

    @property
    def source(self) -> str:
        return place(self)


Rows = Iterator[Row | BadRow]


def place(row: Row | BadRow) -> str:
    """`file:7`, or `file:row 7` where the file has no lines."""
    return f"{row.file}:{row.line}" if row.unit == "line" else f"{row.file}:{row.unit} {row.line}"


def shorten(text: str) -> str:
    return text if len(text) <= EXCERPT else text[: EXCERPT - 3] + "..."


def read_rows(source: DataSource, seed: int = 0) -> Rows:
    """The rows of one source in file order, `source.sample` of them when that is given.

    Raises:
        DataError: no such path or hub dataset, an unreadable file, or fewer rows than `sample` asks for.
    """
    source = spelled_out(source)
    rows = _all_rows(source)
    if source.sample is None:
        yield from rows
        return
    picked = chosen(rows, source.sample, seed)
    if len(picked) < source.sample:
        what = f"sample asks for {source.sample} rows, there are {len(picked)}."
        raise DataError(what, where=source.path, fix="Lower or remove `sample`.")
    yield from picked


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


def _all_rows(source: DataSource) -> Rows:
    files = find_files(source.path)
    if not files:
        yield from _hub(source)
    for file in files:
        reader = _reader(file)
        assert reader is not None
        try:
            yield from reader(file)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"cannot be read: {error}.", where=file) from error


def _reader(file: Path) -> Callable[[Path], Rows] | None:
    suffixes = [s.lower() for s in file.suffixes]
    if suffixes[-1:] in ([".gz"], [".zst"]) and ".parquet" not in suffixes:
        suffixes.pop()
    return READERS.get(suffixes[-1]) if suffixes else None


def _open(file: Path) -> IO[bytes]:
    if file.suffix.lower() == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))
    return cast(IO[bytes], gzip.open(file, "rb")) if file.suffix.lower() == ".gz" else open(file, "rb")


def _decode(raw: bytes, file: Path, line: int) -> str | BadRow:
    try:
        return (raw.removeprefix(BOM) if line == 1 else raw).decode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"byte 0x{raw[error.start]:02x} at column {error.start + 1} is not utf-8. {CONVERT}"
        return BadRow(str(file), line, "not utf-8", reason, shorten(raw.decode("utf-8", "replace").strip()))


def _lines(stream: IO[bytes]) -> Iterator[tuple[int, bytes, bool]]:
    """Numbered lines, and whether each was read whole: one of more than MAX_LINE bytes is cut there and the rest passed over."""
    number = 0
    while raw := stream.readline(MAX_LINE + 1):
        number += 1
        whole = len(raw) <= MAX_LINE
        rest = raw
        while not whole and rest and not rest.endswith(b"\n"):
            rest = stream.readline(2**20)
        yield number, raw, whole


def _too_long(raw: bytes, file: Path, line: int) -> BadRow:
    reason = f"over {MAX_LINE // 2**20} MiB without a line end, the most that a row may have; are the rows one a line?"
    return BadRow(str(file), line, "line too long", reason, shorten(raw[: 2 * EXCERPT].decode("utf-8", "replace")))


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


class DuplicateKey(ValueError):
    """An object names a key more than once."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object as a dict; JSON leaves open which of two equal keys counts, so neither is taken."""
    value = dict(pairs)
    if len(value) < len(pairs):
        (name, count) = Counter(name for name, _ in pairs).most_common(1)[0]
        raise DuplicateKey(f"the key '{shorten(name)}' comes {count} times in one object; keep one")
    return value


def _parse(text: str, hook: Callable[[list[tuple[str, Any]]], Any] = _unique) -> Any:
    return json.loads(text, parse_constant=_no_constant, object_pairs_hook=hook)


class _Twice(str):
    """Why an object was not taken, in its place, until it is known which row that is."""


def _mark(found: list[_Twice], pairs: list[tuple[str, Any]]) -> Any:
    try:
        return _unique(pairs)
    except DuplicateKey as error:
        found.append(_Twice(error))
        return found[-1]


def _twice(value: Any) -> _Twice | None:
    """The first mark in `value`."""
    if isinstance(value, _Twice):
        return value
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next(filter(None, map(_twice, inside)), None)


def _row(value: Any, file: Path, number: int, unit: str, excerpt: str) -> Row | BadRow:
    if isinstance(value, dict):
        return Row(str(file), number, value, unit)
    reason = f"a row is a JSON object {{...}}, this is a {type(value).__name__}"
    return BadRow(str(file), number, "not an object", reason, excerpt, unit)


def _jsonl(file: Path) -> Rows:
    with _open(file) as lines:
        for number, raw, whole in _lines(lines):
            text = _decode(raw, file, number) if whole else _too_long(raw, file, number)
            if isinstance(text, BadRow):
                yield text
            elif text.strip():
                try:
                    yield _row(_parse(text), file, number, "line", shorten(text.strip()))
                except json.JSONDecodeError as error:  # which counts lines within this one
                    yield BadRow(
                        str(file), number, "not JSON", f"{error.msg} at character {error.pos + 1}", shorten(text.strip())
                    )
                except (ValueError, RecursionError) as error:
                    kind = "duplicate key" if isinstance(error, DuplicateKey) else "not JSON"
                    yield BadRow(str(file), number, kind, str(error), shorten(text.strip()))


def _json(file: Path) -> Rows:
    """A list of rows, {"data": [rows]}, or one row; JSON lines under the wrong name are read as such."""
    marks: list[_Twice] = []
    with _open(file) as stream:
        raw = stream.read()
    try:
        value = _parse(raw.removeprefix(BOM).decode("utf-8"), partial(_mark, marks))
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
            yield BadRow(str(file), number, "duplicate key", reason, shorten(str(item)), "row")
        else:
            yield _row(item, file, number, "row", shorten(str(item)))


def _csv(file: Path) -> Rows:
    """Every value is text, an empty one too; a row stands at its first line."""

    def lines(stream: IO[bytes]) -> Iterator[str]:
        for number, raw, whole in _lines(stream):
            text = _decode(raw, file, number) if whole else _too_long(raw, file, number)
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
                    yield BadRow(str(file), start, "wrong number of fields", reason, shorten(str(fields)))
                elif fields:
                    yield Row(str(file), start, dict(zip(header, fields, strict=True)))
                start = table.line_num + 1
        except csv.Error as error:
            raise DataError(f"line {table.line_num}: {error}.", where=f"{file}:{table.line_num}") from None


def _without_nulls(value: Any) -> Any:
    """Columnar files cannot tell an absent key from a null one; rows of chat mean the former."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _parquet(file: Path) -> Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        number = 0
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(1024):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(str(file), number, _without_nulls(value), "row")
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"is not a parquet file: {error}.", where=file) from None


def _hub(source: DataSource) -> Rows:
    """A dataset of the Hugging Face hub, or of its cache when the hub cannot be reached."""
    import datasets
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    # `datasets` retries an unreachable hub for half a minute; this one question is answered in seconds.
    try:
        huggingface_hub.HfApi().dataset_info(source.path, revision=source.revision, timeout=HUB_TIMEOUT_S)
    except GatedRepoError as error:
        fix = "Ask for access on its page, then `hf auth login`."
        raise DataError("is a gated dataset and you have no access.", where=source.path, fix=fix) from error
    except RepositoryNotFoundError as error:
        what = "is neither a path here nor a dataset on the hub (or it is private: `hf auth login`)."
        raise DataError(what, where=source.path) from error
    except Exception as error:
        cached = Path(datasets.config.HF_DATASETS_CACHE) / source.path.replace("/", "___")
        if not cached.is_dir():
            what = f"is not a path here, and the hub cannot be reached ({type(error).__name__})."
            raise DataError(what, where=source.path, fix="Give a local file, or go online once so that it is cached.") from error
    try:
        table = datasets.load_dataset(source.path, name=source.subset, split=source.split, revision=source.revision)
    except (ValueError, OSError, RuntimeError, HfHubHTTPError, datasets.exceptions.DatasetsError) as error:
        what = f"cannot be loaded: {shorten(str(error))}"
        raise DataError(what, where=source.path, fix="See `subset` and `split` of the source.") from error
    name = f"{source.path}[{source.split}]"
    for number, value in enumerate(table, 1):
        yield Row(name, number, _without_nulls(value), "row")


READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
}
