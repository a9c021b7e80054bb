"""A row on its way in: as it lies in its file (`Raw`), read (`Row`), or not to be read (`BadRow`). JSON lines are parsed here."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

EXCERPT = 100
BOM = b"\xef\xbb\xbf"
CONVERT = "Convert it to UTF-8, as with `iconv -f OLD_ENCODING -t UTF-8`."


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Raw:
    """A row before it is parsed, which `parse` does: reading is for one process, parsing for many.

    Args:
        content: the bytes of a line of JSON; the row itself where its file gives no less; or why it cannot be read.
        offset: byte of an uncompressed file of JSON lines at which the next line starts; None for all other files.
    """

    file: str
    line: int
    content: bytes | dict[str, Any] | BadRow
    unit: str = "line"
    offset: int | None = None


class DuplicateKey(ValueError):
    """An object names a key more than once."""


def prefix(file: str, unit: str) -> str:
    """What stands in front of a row's number: `file:`, or `file:row ` where the file has no lines."""
    return f"{file}:" if unit == "line" else f"{file}:{unit} "


def place(row: Row | BadRow) -> str:
    """`file:7`, or `file:row 7` where the file has no lines."""
    return f"{prefix(row.file, row.unit)}{row.line}"


def shorten(text: str) -> str:
    return text if len(text) <= EXCERPT else text[: EXCERPT - 3] + "..."


def parse(raw: Raw) -> Row | BadRow | None:
    """The row that `raw` holds; None for a blank line."""
    content = raw.content
    if isinstance(content, dict):
        return Row(raw.file, raw.line, content, raw.unit)
    if isinstance(content, BadRow):
        return content
    text = decode(content, raw.file, raw.line)
    if isinstance(text, BadRow):
        return text
    if not text or text.isspace():
        return None
    try:
        return object_row(parse_json(text), raw.file, raw.line, raw.unit, text)
    except json.JSONDecodeError as error:  # which counts lines within this one
        kind, reason = "not JSON", f"{error.msg} at character {error.pos + 1}"
    except (ValueError, RecursionError) as error:
        kind, reason = "duplicate key" if isinstance(error, DuplicateKey) else "not JSON", str(error)
    return BadRow(raw.file, raw.line, kind, reason, shorten(text.strip()), raw.unit)


def blank(raw: Raw) -> bool:
    """Whether `parse` would find nothing."""
    return isinstance(raw.content, bytes) and not _without_bom(raw.content, raw.line).decode("utf-8", "replace").strip()


def decode(raw: bytes, file: str, line: int) -> str | BadRow:
    try:
        return _without_bom(raw, line).decode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"byte 0x{raw[error.start]:02x} at column {error.start + 1} is not utf-8. {CONVERT}"
        return BadRow(file, line, "not utf-8", reason, shorten(raw.decode("utf-8", "replace").strip()))


def _without_bom(raw: bytes, line: int) -> bytes:
    return raw.removeprefix(BOM) if line == 1 else raw


def object_row(value: Any, file: str, line: int, unit: str, text: str) -> Row | BadRow:
    if isinstance(value, dict):
        return Row(file, line, value, unit)
    reason = f"a row is a JSON object {{...}}, this is a {type(value).__name__}"
    return BadRow(file, line, "not an object", reason, shorten(text.strip()), unit)


def parse_json(text: str, hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """JSON as the standard has it.

    Raises:
        ValueError: not JSON, or NaN and the like.
        DuplicateKey: as `unique`, if `hook` is not given.
    """
    return json.loads(text, parse_constant=_no_constant, object_pairs_hook=hook or unique)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object as a dict; JSON leaves open which of two equal keys counts, so neither is taken.

    Raises:
        DuplicateKey: naming the key.
    """
    value = dict(pairs)
    if len(value) < len(pairs):
        (name, count) = Counter(name for name, _ in pairs).most_common(1)[0]
        raise DuplicateKey(f"the key '{shorten(name)}' comes {count} times in one object; keep one")
    return value
