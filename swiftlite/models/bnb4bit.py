"""4-bit files of bitsandbytes, read without it: a packed weight looks like a plain one, and gives its bytes where asked.

A weight X of n values is X (two in a byte, the first in the high half; perhaps seen as another type), X.absmax (fp32, one for 64
in their order), X.quant_map and X.quant_state.bitsandbytes__nf4 (JSON as bytes). With double quantisation absmax holds codes of
one byte, X.nested_absmax one scale for 256 of them, X.nested_quant_map what they stand for, and the JSON the mean taken off.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from swiftlite.models import nf4
from swiftlite.models.prequantised import NAME_PLAIN, SERVED
from swiftlite.recipe.errors import ModelError

_STATE = ".quant_state.bitsandbytes__"
_SIZES = {"U8": 1, "BF16": 2, "F16": 2}  # bytes of what packed values are seen as; else 4
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


@cache
def _map(kind: str) -> Tensor:
    return torch.tensor(nf4.VALUES if kind == "quant_map" else nf4.dynamic_map(), dtype=torch.float32)


class _Rows:
    """A lazy tensor that is read by ranges of its first axis; see `Weights`."""

    shape: tuple[int, ...]
    whole_only = False

    def rows(self, start: int, stop: int) -> Tensor:
        raise NotImplementedError

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, index: Any) -> Tensor:
        first, *rest = index if isinstance(index, tuple) else (index,)
        if isinstance(first, slice) and first.step in (None, 1) and not self.whole_only:
            start, stop, _ = first.indices(self.shape[0])
            return self.rows(start, max(start, stop))[(slice(None), *rest)]
        return self.rows(0, self.shape[0])[index]


class PackedSlice(_Rows):
    """A packed weight of the files: fp32 values of the rows that it is indexed with.

    bitsandbytes itself would round them to the type of before packing.

    Attributes:
        name: of the weight.
        shape: as it was before packing.
        double: whether its scales are packed too.
        nested: with double quantisation fp32 [blocks of 256 scales + 1], the mean last; else None. See `nf4.quantise_scales`.

    Raises:
        ModelError: it is packed in another way than is served, or what describes it is damaged.
    """

    def __init__(self, tensors: Mapping[str, Any], name: str, state: str) -> None:
        self.name, self._tensors = name, tensors
        self.double = f"{name}.nested_absmax" in tensors
        try:
            about = json.loads(bytes(tensors[state][...].tolist()))
            self.shape, self._kind = tuple(about["shape"]), str(about.get("dtype"))
            offset = float(about["nested_offset"]) if self.double else 0.0
            self._require(about)
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise ModelError(f"{state} cannot be read: {error!r}", fix="Fetch the model's files again.") from error
        self._require_sizes()
        self._row = prod(self.shape[1:])
        self.whole_only = self._row % nf4.BLOCK != 0  # blocks that run from one row into the next
        nested = self._part("nested_absmax") if self.double else None
        self.nested = None if nested is None else torch.cat([nested, torch.tensor([offset])])

    def _require(self, about: Mapping[str, Any]) -> None:
        kind, block, nested = about.get("quant_type"), about.get("blocksize"), about.get("nested_blocksize")
        if (kind, block) != ("nf4", nf4.BLOCK) or (self.double and nested != nf4.NESTED):
            how = f"{kind} in blocks of {block}" + (f", double quantisation in blocks of {nested}" if self.double else "")
            raise ModelError(f"{self.name} is packed as {how}. {SERVED}", fix=NAME_PLAIN)
        for kind in ("quant_map", *(["nested_quant_map"] if self.double else [])):
            # Other versions of torch computed the last digit of some differently.
            if not torch.allclose(self._part(kind), _map(kind), rtol=1e-5, atol=0):
                raise ModelError(f"{self.name}.{kind} is not bitsandbytes' own. {SERVED}", fix=NAME_PLAIN)

    def _require_sizes(self) -> None:
        count = prod(self.shape)
        scales = -(-count // nf4.BLOCK)
        wanted = {self.name: -(-count // 2), f"{self.name}.absmax": scales}
        wanted |= {f"{self.name}.nested_absmax": -(-scales // nf4.NESTED)} if self.double else {}
        for name, size in wanted.items():
            source = self._tensors[name]
            found = prod(source.get_shape()) * (_SIZES.get(source.get_dtype(), 4) if name == self.name else 1)
            if found != size:
                what = f"{name} holds {found} values or bytes, and {size} belong to a weight of shape {list(self.shape)}"
                raise ModelError(what, fix="Fetch the model's files again.")

    def _part(self, kind: str) -> Tensor:
        part: Tensor = self._tensors[f"{self.name}.{kind}"][...]
        return part.float()

    def get_dtype(self) -> str:
        """Of the weight before packing, as safetensors names types."""
        return {"bfloat16": "BF16", "float16": "F16"}.get(self._kind, "F32")

    def packed(self, start: int, stop: int) -> Tensor:
        """Packed values of a range of rows, uint8 [n / 2]."""
        source = self._tensors[self.name]
        if self.whole_only or len(source.get_shape()) != 2 or source.get_shape()[1] != 1:
            return source[...].reshape(-1).view(torch.uint8)[start * self._row // 2 : -(-stop * self._row // 2)]
        each = self._row // 2 // _SIZES.get(source.get_dtype(), 4)
        part: Tensor = source[start * each : stop * each]
        return part.reshape(-1).view(torch.uint8)

    def scales(self, start: int, stop: int) -> Tensor:
        """Scales of a range of rows as the files have them: fp32, or codes uint8, [n / 64]."""
        part: Tensor = self._tensors[f"{self.name}.absmax"][start * self._row // nf4.BLOCK : -(-stop * self._row // nf4.BLOCK)]
        return part if self.double else part.float()

    def wide_scales(self, start: int, stop: int) -> Tensor:
        """The same in fp32."""
        found = self.scales(start, stop)
        if self.nested is None:
            return found
        block = torch.arange(len(found)).add_(start * self._row // nf4.BLOCK) // nf4.NESTED
        return _map("nested_quant_map")[found.int()] * self.nested[block] + self.nested[-1]

    def rows(self, start: int, stop: int) -> Tensor:
        packed, scales = self.packed(start, stop), self.wide_scales(start, stop)
        packed = torch.nn.functional.pad(packed, (0, len(scales) * nf4.BLOCK // 2 - len(packed))).view(-1, nf4.BLOCK // 2)
        out = torch.empty(len(packed), nf4.BLOCK)
        for first in range(0, len(packed), nf4.CHUNK // nf4.BLOCK):
            part = slice(first, first + nf4.CHUNK // nf4.BLOCK)
            out[part] = nf4.dequantise(packed[part], scales[part, None], torch.float32)
        return out.view(-1)[: (stop - start) * self._row].view(stop - start, *self.shape[1:])


class RawSlice(_Rows):
    """The bytes of a packed weight [..., C], row by row: its values, then its scales; uint8 [..., C / 2 + C / 64 x 4, or x 1].

    Args:
        double: scales as codes; else in fp32, whatever the files have.
    """

    def __init__(self, weight: PackedSlice, double: bool) -> None:
        self.weight, self.double = weight, double
        self.shape = (*weight.shape[:-1], row_bytes(weight.shape[-1], double))

    def get_dtype(self) -> str:
        return "U8"

    def rows(self, start: int, stop: int) -> Tensor:
        weight, rows = self.weight, (stop - start, *self.shape[1:-1])
        scales = weight.scales(start, stop) if self.double else weight.wide_scales(start, stop)
        packed, half = weight.packed(start, stop), weight.shape[-1] // 2
        return torch.cat([packed.view(*rows, half), scales.view(torch.uint8).view(*rows, self.shape[-1] - half)], -1)


def row_bytes(columns: int, double: bool) -> int:
    """Bytes of a row of that many packed weights, with its scales."""
    return columns // 2 + columns // nf4.BLOCK * (1 if double else 4)


class Unpacked(Mapping[str, Any]):
    """The tensors of a model's files as if they were not packed: name -> lazy slice, a `PackedSlice` where it is.

    Attributes:
        packed: names of packed weights -> the tensor that describes each.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors
        self.packed = {name.partition(_STATE)[0]: name for name in tensors if _STATE in name}
        parts = {f"{name}.{part}" for name in self.packed for part in _PARTS} | set(self.packed.values())
        self._names = [name for name in tensors if name not in parts]
        self._slices: dict[str, PackedSlice] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self.packed:
            return self._tensors[name]
        if name not in self._slices:
            self._slices[name] = PackedSlice(self._tensors, name, self.packed[name])
        return self._slices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
