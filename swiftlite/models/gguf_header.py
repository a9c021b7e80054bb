"""The metadata and tensor table of a GGUF file. Fast: the vocabulary, which fills most of it, is only stepped over.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from swiftlite.recipe.errors import ModelError

_FIXED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PLAIN = {0: "float32", 1: "float16", 30: "bfloat16"}  # ggml type ids that are values, not blocks


@dataclass(frozen=True)
class GgufTensor:
    """One row of the tensor table; shape in torch's order, offset in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata (arrays stand as their length) and tensors of a file."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def arch(self) -> str:
        return str(self.fields["general.architecture"])

    @property
    def elements(self) -> int:
        return sum(prod(t.shape) for t in self.tensors.values())

    @property
    def dtype(self) -> str:
        """The torch type for the unpacked weights: that of the file's matrices; bfloat16 where they are quantised."""
        kinds = {t.kind for t in self.tensors.values() if len(t.shape) > 1}
        if not kinds or not kinds <= set(_PLAIN):
            return "bfloat16"
        return _PLAIN[max(kinds)]  # tables in fp32 may lie beside matrices in half precision

    def read_float32(self, name: str) -> list[float] | None:
        """The values of an fp32 tensor; None when the file has no such tensor."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.kind != 0:
            return None
        count = prod(tensor.shape)
        with self.path.open("rb") as file, damaged(self.path):
            file.seek(tensor.offset)
            return list(struct.unpack(f"<{count}f", file.read(4 * count)))


@contextmanager
def damaged(path: Path) -> Iterator[None]:
    """What parsing a broken file raises becomes a ModelError."""
    try:
        yield
    except (struct.error, ValueError, KeyError, IndexError, OverflowError) as error:
        raise ModelError(
            f"is damaged or cut short ({type(error).__name__}: {error})", where=path, fix="Fetch the file again."
        ) from error


def read_header(path: Path) -> GgufHeader:
    """The header of a GGUF file.

    Raises:
        ModelError: no GGUF file, an old version of the format, damaged, or cut short.
    """
    with path.open("rb") as file:
        head = file.read(64)
        if head.startswith(b"version https://git-lfs"):
            raise ModelError("is a Git LFS pointer, not the file itself", where=path, fix="Run `git lfs pull` in its repository.")
        if head[:4] != b"GGUF":
            raise ModelError("is not a GGUF file: it does not start with GGUF", where=path, fix="Fetch the file again.")
        with damaged(path), mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _parse(path, _Cursor(data))
            start = max((t.offset for t in header.tensors.values()), default=0)
            if start >= len(data):
                raise ValueError(f"the last tensor starts at byte {start} of {len(data)}")
    return header


def _parse(path: Path, cursor: "_Cursor") -> GgufHeader:
    cursor.at = 4
    version, tensor_count, field_count = cursor.take("I"), cursor.take("Q"), cursor.take("Q")
    if version not in (2, 3):
        raise ModelError(
            f"is GGUF version {version}; versions 2 and 3 can be read", where=path, fix="Convert it again with a newer llama.cpp."
        )
    fields = {}
    for _ in range(field_count):
        name = cursor.string()
        fields[name] = cursor.value(cursor.take("I"))
    fields["general.architecture"]  # KeyError: says that the file is damaged
    rows = []
    for _ in range(tensor_count):
        name = cursor.string()
        shape = tuple(reversed([cursor.take("Q") for _ in range(cursor.take("I"))]))
        rows.append((name, shape, cursor.take("I"), cursor.take("Q")))
    align = int(fields.get("general.alignment", 32))
    start = (cursor.at + align - 1) // align * align
    return GgufHeader(path, fields, {n: GgufTensor(n, s, k, start + o) for n, s, k, o in rows})


class _Cursor:
    """Takes little-endian values off a mapped file, one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, kind: str) -> Any:
        (value,) = struct.unpack_from("<" + kind, self.data, self.at)
        self.at += struct.calcsize("<" + kind)
        return value

    def string(self) -> str:
        length = self.take("Q")
        start, self.at = self.at, self.at + length
        if self.at > len(self.data):
            raise ValueError("a string runs past the end")
        return self.data[start : self.at].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind in _FIXED:
            return self.take(_FIXED[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"unknown value type {kind}")
        inner, count = self.take("I"), self.take("Q")
        if inner in _FIXED:
            self.at += count * struct.calcsize("<" + _FIXED[inner])
        else:
            for _ in range(count):
                if inner == _STRING:
                    length = self.take("Q")
                    self.at += length
                else:
                    self.value(inner)
        return count
