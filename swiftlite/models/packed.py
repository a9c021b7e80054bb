"""Layers whose frozen weights are kept in few bits: made on meta, sharded as they are, filled while the model is read.

A weight is one or several carriers, parameters of its module: bytes that are seen as the compute type, whatever they hold. FSDP2
so gathers packed bytes and casts nothing; nobody else may cast them. They are divided by rows, as the weight would be.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from swiftlite.dist.tensors import copy_into, local, whole, with_local
from swiftlite.models import fp8, nf4
from swiftlite.models.choice import Choice
from swiftlite.models.names import base_name
from swiftlite.models.placing import materialise
from swiftlite.recipe.errors import RecipeError
from swiftlite.recipe.schema import QuantizeSection


def _unpack(tensors: list[Tensor], method: str, dtype: torch.dtype) -> Tensor:
    return (nf4 if method == "nf4" else fp8).unpack(tensors, dtype)


@torch.library.custom_op("swiftlite::unpack", mutates_args=())
def unpack(tensors: list[Tensor], method: str, columns: int, dtype: torch.dtype) -> Tensor:
    """The weight [..., columns] that whole carriers hold, in `dtype`."""
    return _unpack(tensors, method, dtype)


@unpack.register_fake
def _(tensors: list[Tensor], method: str, columns: int, dtype: torch.dtype) -> Tensor:
    return tensors[0].new_empty(*tensors[0].shape[:-1], columns, dtype=dtype)


@torch.library.custom_op("swiftlite::packed_mm", mutates_args=())
def product(x: Tensor, tensors: list[Tensor], method: str) -> Tensor:
    """x [N, C] times the transpose of a packed weight [R, C]: [N, R].

    One op to the compiler, which else would keep the unpacked weight from forward to backward pass, as both have use for it; and
    nothing but the carriers waits for the backward pass.
    """
    return x @ _unpack(tensors, method, x.dtype).mT


@product.register_fake
def _(x: Tensor, tensors: list[Tensor], method: str) -> Tensor:
    return x.new_empty(x.shape[0], tensors[0].shape[0])


@torch.library.custom_op("swiftlite::packed_mm_back", mutates_args=())
def product_back(grad: Tensor, tensors: list[Tensor], method: str, columns: int) -> Tensor:
    """grad [N, R] times a packed weight [R, C]: [N, C]."""
    return grad @ _unpack(tensors, method, grad.dtype)


@product_back.register_fake
def _(grad: Tensor, tensors: list[Tensor], method: str, columns: int) -> Tensor:
    return grad.new_empty(grad.shape[0], columns)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, tensors, ctx.method = inputs
    ctx.columns = x.shape[-1]
    ctx.save_for_backward(*tensors)


def _back(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    tensors = list(ctx.saved_tensors)
    return product_back(grad.contiguous(), tensors, ctx.method, ctx.columns), [None] * len(tensors), None


product.register_autograd(_back, setup_context=_keep)


class PackedLinear(nn.Linear):
    """A frozen linear layer, its weight [out_features, in_features] in carriers.

    Attributes:
        stored: the weight's carriers, and how they are used.
    """

    def __init__(self, linear: nn.Linear, quantize: QuantizeSection, native: bool) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would make the weight
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        whole_vectors = self.in_features % fp8.MULTIPLE == 0 and self.out_features % fp8.MULTIPLE == 0
        self.stored = Stored(self, "weight", linear.weight, quantize, native and whole_vectors)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The unpacked weight, for code that looks at a layer's type or place."""
        return self.stored.read(self.stored.dtype)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """The whole weight [out_features, in_features], on the device it is computed with; every rank must call."""
        return self.stored.unpacked(dtype)

    def forward(self, x: Tensor) -> Tensor:
        rows, tensors = x.reshape(-1, x.shape[-1]), self.stored.tensors()
        y: Tensor = fp8.product(rows, tensors) if self.stored.method == "fp8" else product(rows, tensors, self.stored.method)
        return (y if self.bias is None else y + self.bias).reshape(*x.shape[:-1], -1)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, method={self.stored.method}"


class Stored:
    """One weight in carriers, which are parameters of `owner`.

    Attributes:
        name: of the weight in its module.
        method: nf4; fp8, with products in float8; fp8_stored, which computes in the compute type.
        shape, dtype: of the weight, and the type its carriers are seen as.
        gap: sums of squares of what packing this rank's rows changed, and of the rows themselves: fp32 [2]; None before.
    """

    def __init__(self, owner: nn.Module, name: str, weight: Tensor, quantize: QuantizeSection, native: bool = False) -> None:
        self.owner, self.name, self.double = owner, name, quantize.double_quant
        self.method = "fp8_stored" if quantize.method == "fp8" and not native else quantize.method
        self.shape, self.dtype = tuple(weight.shape), weight.dtype
        self.gap: Tensor | None = None
        self.home: torch.device | None = None  # where the carriers live; None: where rows come to
        self._scales: Tensor | None = None  # of double quantisation, until those of all rows are known
        size = self.dtype.itemsize
        if self.method == "nf4":
            layout = nf4.carriers(self.shape, quantize.double_quant, size)
        else:
            layout = fp8.carriers(self.shape)
        prefix = "" if name == "weight" else f"{name}_"
        self.names = {kind: prefix + kind for kind in layout}
        for kind, (*rows, count) in layout.items():
            carrier = torch.empty(*rows, count // size, dtype=self.dtype, device="meta")
            owner.register_parameter(self.names[kind], nn.Parameter(carrier, requires_grad=False))

    def tensors(self) -> list[Tensor]:
        return [getattr(self.owner, name) for name in self.names.values()]

    def read(self, dtype: torch.dtype) -> Tensor:
        """The weight, from carriers that are whole, as they are inside a forward pass."""
        weight: Tensor = unpack([local(t) for t in self.tensors()], self.method, self.shape[-1], dtype)
        return weight

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """The whole weight from shards; every rank must call."""
        return _unpack([whole(t) for t in self.tensors()], self.method, dtype)

    @torch.no_grad()
    def pack(self, rows: Tensor) -> None:
        """Takes in this rank's rows of the weight, from wherever they are."""
        home, work = self.home or rows.device, rows
        if rows.device.type == "cpu" and torch.cuda.is_available():  # offloaded, and packed a hundred times faster on the GPU
            work = rows.cuda()
        if self.method == "nf4":
            packed, scales = nf4.quantise(work)
            if self.double:
                self._scales = scales.to(home)
            else:
                self._put("absmax", scales, home)
        else:
            rounded, scales = fp8.round_rows(work)
            packed = rounded.view(torch.uint8)
            self._put("scale", scales, home)
        self._put("packed", packed, home)
        some = slice(0, max(1, nf4.LARGE_CHUNK // max(1, work[:1].numel())))  # enough of a large one to know it by
        if self.method == "nf4":
            back = nf4.dequantise(packed[some], scales[some], torch.float32)
        else:
            back = rounded[some].float() * scales[some]
        wide = work[some].float()
        self.gap = torch.stack([(back - wide).square().sum(), wide.square().sum()])

    @torch.no_grad()
    def finish(self) -> None:
        """Packs the scales of double quantisation, once all ranks have theirs; every rank must call, in the same order."""
        if self._scales is None:
            return
        model, scales = getattr(self.owner, self.names["packed"]), self._scales
        self._scales = None
        home, full = scales.device, scales
        if isinstance(model, DTensor):
            shape = (*self.shape[:-1], self.shape[-1] // nf4.BLOCK)
            full = whole(with_local(scales, model, shape))
        codes, nested = nf4.quantise_scales(full)
        padding = -codes.shape[-1] % self.dtype.itemsize
        self.put("codes", nn.functional.pad(codes, (0, padding)), home)
        self.put("nested", nested.view(torch.uint8), home)

    def put(self, kind: str, full: Tensor, home: torch.device) -> None:
        """Writes a carrier from all of its bytes."""
        copy_into(materialise(self.owner, self.names[kind], home), full.view(self.dtype))

    def _put(self, kind: str, rows: Tensor, home: torch.device) -> None:
        """Writes this rank's rows of a carrier."""
        part = local(materialise(self.owner, self.names[kind], home))
        if part.numel():  # with more ranks than rows some have none, and those have no stride to view
            part.copy_(rows.view(self.dtype))


@dataclass(frozen=True)
class PackedWeight:
    """A packed weight as the rest of the toolkit sees it. `method`: nf4, fp8 or fp8_stored."""

    shape: tuple[int, ...]
    method: str
    unpacked: Callable[[torch.dtype], Tensor]


def stored_weights(root: nn.Module) -> Iterator[tuple[str, Stored]]:
    """Every packed weight by its module's name in the adapted model and its own: `...q_proj.base_layer.weight`."""
    for path, module in root.named_modules():
        for stored in stored_in(module):
            yield f"{path}.{stored.name}" if path else stored.name, stored


def stored_in(module: nn.Module) -> list[Stored]:
    """The packed weights of one module."""
    if isinstance(module, PackedLinear):
        return [module.stored]
    return list(getattr(module, "swiftlite_stored", {}).values())


def elements(owner: nn.Module, name: str, parameter: Tensor) -> int:
    """Weights that a parameter of `owner` stands for: of a packed one its first carrier tells all."""
    for stored in stored_in(owner):
        if name in stored.names.values():
            return torch.Size(stored.shape).numel() if name == stored.names["packed"] else 0
    return parameter.numel()


def packed_weights(root: nn.Module) -> dict[str, PackedWeight]:
    """Every packed weight of a model by its Hugging Face name."""
    return {str(base_name(n)): PackedWeight(s.shape, s.method, s.unpacked) for n, s in stored_weights(root)}


def swap(root: nn.Module, choice: Choice, quantize: QuantizeSection, native: bool) -> None:
    """Puts packed layers where the chosen ones are now, perhaps inside adapters. All on meta.

    Raises:
        RecipeError: an adapter on one of them needs the plain weight.
    """
    chosen = {id(m) for m in choice.linears}
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            if id(child) not in chosen:
                continue
            if getattr(parent, "lora_variant", None):
                fault = "DoRA reads the base weights in every step, and packed ones cannot be read so"
                raise RecipeError(fault, where="lora.use_dora", fix="Leave use_dora or quantize out.")
            setattr(parent, name, PackedLinear(child, quantize, native))  # type: ignore[arg-type]
    adapted = [m.get_base_layer() for m in root.modules() if isinstance(m, ParamWrapper)]
    for module, names in choice.experts:
        if any(module is m for m in adapted):
            fault = "adapters on fused experts change the weights themselves, and packed ones cannot be changed"
            raise RecipeError(fault, where="lora.experts", fix="Leave lora.experts or quantize out.")
        stored = {}
        for name in names:
            weight = module._parameters.pop(name)
            assert weight is not None
            stored[name] = Stored(module, name, weight, quantize)
        module.swiftlite_stored = stored  # type: ignore[assignment]
        module.__class__ = _reading(type(module), tuple(names))


@cache
def _reading(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A class of experts whose fused weights are unpacked whenever its forward asks for them."""

    def reader(name: str) -> property:
        return property(lambda self: self.swiftlite_stored[name].read(self.swiftlite_stored[name].dtype))

    return type(kind.__name__, (kind,), {name: reader(name) for name in names})


class Inlet:
    """Stands for a module with packed weights where transformers' loader writes what it read."""

    def __init__(self, module: nn.Module, weights: list[Stored]) -> None:
        self.__dict__.update(_module=module, _weights={s.name: s for s in weights})

    def settle(self, home: torch.device) -> None:
        """Says where the carriers are to live, which may not be where rows come to."""
        for stored in self._weights.values():
            stored.home = home

    @property
    def names(self) -> list[str]:
        return list(self._weights)

    def __getattr__(self, name: str) -> Any:
        return self.placeholder(name) if name in self._weights else getattr(self._module, name)

    def __setattr__(self, name: str, value: Tensor) -> None:
        if name in self._weights:
            self._weights[name].pack(local(value.detach()))
        else:
            setattr(self._module, name, value)

    def placeholder(self, name: str) -> Tensor:
        """The weight as it would be unpacked, on meta and sharded like its carriers."""
        stored = self._weights[name]
        model, full = getattr(stored.owner, stored.names["packed"]), torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        if not isinstance(model, DTensor):
            return full
        return with_local(full[: local(model).shape[0]], model, full.shape)


def packing_notes(root: nn.Module) -> list[str]:
    """What packing did: how many weights, their bytes, and how far this rank's rows are from what was read."""
    all_stored = [s for _, s in stored_weights(root)]
    if not all_stored:
        return []
    size = sum(t.numel() * t.element_size() for s in all_stored for t in s.tensors())
    before = sum(torch.Size(s.shape).numel() * s.dtype.itemsize for s in all_stored)
    gaps = [s.gap for s in all_stored if s.gap is not None]
    method = all_stored[0].method.partition("_")[0]
    said = f"{len(all_stored)} weights packed as {method}: {size / 2**30:.3g} GiB instead of {before / 2**30:.3g}"
    if gaps:
        change, norm = torch.stack(gaps).sum(0).tolist()
        said += f"; rounding moved them by {(change / max(norm, 1e-30)) ** 0.5:.2%} (relative norm)"
    notes = [said]
    reasons = Counter(_why_stored(s) for s in all_stored if s.method == "fp8_stored")
    for why, count in reasons.items():
        notes.append(f"{count} float8 weights are only stored so, and multiplied in the compute type: {why}")
    if any(len(s.shape) == 3 for s in all_stored):
        notes.append("packed experts are unpacked in each pass, and kept so for the backward pass without full checkpointing")
    return notes


def _why_stored(stored: Stored) -> str:
    if len(stored.shape) == 3:
        return "experts are fused"
    odd = any(n % fp8.MULTIPLE for n in stored.shape)
    return f"no multiples of {fp8.MULTIPLE}" if odd else "this device has no float8 products"


def inlets(root: nn.Module) -> dict[str, Inlet]:
    """By module name in the adapted model."""
    grouped: dict[str, list[Stored]] = {}
    for name, stored in stored_weights(root):
        grouped.setdefault(name.rpartition(".")[0], []).append(stored)
    return {path: Inlet(root.get_submodule(path), weights) for path, weights in grouped.items()}
