"""Reads the weights of a trained model block by block, whole and with adapters merged, whatever their sharding."""

import re
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.pytorch_utils import Conv1D

from swiftlite.dist.tensors import whole
from swiftlite.recipe.errors import ModelError

# Wrappers of activation checkpointing and compilation: they stand in the module tree, not in Hugging Face names.
_TRANSPARENT = {"_checkpoint_wrapped_module", "_orig_mod"}


@dataclass(frozen=True)
class Piece:
    """Tensors that are read together: one of the model's own, or those of one adapted layer.

    Attributes:
        shapes: Hugging Face name -> global shape.
        read: name -> whole tensor on the model's device; fp32 for an adapted layer.
        source: identity of the parameter behind an unadapted tensor; None for an adapted layer.
    """

    shapes: dict[str, torch.Size]
    read: Callable[[], dict[str, Tensor]]
    source: int | None = None


def pieces(model: nn.Module) -> list[Piece]:
    """All saved tensors of a Hugging Face model in the order of its modules."""
    # After a forward pass FSDP2 may still hold gathered copies in the compute type; the master weights are in the shards.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    found = list(_walk(model, ""))
    announce = getattr(model, "swiftlite_announce", None)  # the other ranks are to take part in a read, see export.ranks
    return found if announce is None else [replace(p, read=_announced(p.read, announce, i)) for i, p in enumerate(found)]


def _announced(
    read: Callable[[], dict[str, Tensor]], announce: Callable[[int], Any], number: int
) -> Callable[[], dict[str, Tensor]]:
    def both() -> dict[str, Tensor]:
        announce(number)
        return read()

    return both


def blocks(model: nn.Module, skip: Set[str] = frozenset()) -> Iterator[dict[str, Tensor]]:
    """Merged tensors by Hugging Face name, one numbered block (`model.layers.3`) or one tensor outside of blocks at a time.

    A block is the unit in which transformers converts fused weights to the names in files.
    """

    def block(piece: Piece) -> str:
        name = next(iter(piece.shapes))
        found = re.match(r".*?\.\d+\.", name)
        return found[0] if found else name

    wanted = (p for p in pieces(model) if not p.shapes.keys() <= skip)
    for _, group in groupby(wanted, key=block):
        merged: dict[str, Tensor] = {}
        for piece in group:
            merged |= {name: t for name, t in piece.read().items() if name not in skip}
        yield merged


def ties(model: nn.Module, dtype: torch.dtype) -> tuple[set[str], set[str]]:
    """Names the class ties to another weight: those that still equal it when written in `dtype`, and those that no longer do."""
    by_name = {name: piece for piece in pieces(model) for name in piece.shapes}
    tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    same: set[str] = set()
    different: set[str] = set()
    for name, source in tied.items():
        if name not in by_name or source not in by_name:
            continue
        a, b = by_name[name], by_name[source]
        alias = a.source is not None and a.source == b.source
        equal = alias or torch.equal(a.read()[name].to(dtype), b.read()[source].to(dtype))
        (same if equal else different).add(name)
    return same, different


def _walk(module: nn.Module, prefix: str) -> Iterator[Piece]:
    if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
        base = base_layer(module)
        yield Piece({prefix + n: t.shape for n, t in _own(base)}, lambda: _merge(module, prefix))
        return
    for name, tensor in _own(module, recurse=False):
        yield _plain_piece(prefix + name, tensor)
    for name, child in module.named_children():
        yield from _walk(child, prefix if name in _TRANSPARENT else f"{prefix}{name}.")


def _plain_piece(name: str, tensor: Tensor) -> Piece:
    return Piece({name: tensor.shape}, lambda: {name: whole(tensor)}, id(tensor))


def _own(module: nn.Module, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Parameters and saved buffers, without state-dict hooks: FSDP2's would swap the shards back in."""
    for prefix, m in module.named_modules() if recurse else [("", module)]:
        own: dict[str, Tensor | None] = {
            **m._parameters,
            **{n: b for n, b in m._buffers.items() if n not in m._non_persistent_buffers_set},
        }
        yield from ((f"{prefix}.{n}" if prefix else n, t) for n, t in own.items() if t is not None)


def base_layer(module: nn.Module) -> nn.Module:
    """The Hugging Face module inside peft's wrappers."""
    while isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
        module = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module.original_module
    return module


def _merge(layer: Any, prefix: str) -> dict[str, Tensor]:
    """The tensors of an adapted layer after merging in fp32. The layer itself stays as it was.

    Raises:
        ModelError: peft cannot merge this kind of adapter, or the merged layer does not compute what the adapted one does.
    """
    with torch.no_grad(), _full_fp32(layer), _exact_products():
        probe = _probe(layer)
        outputs = None if probe is None else (base_layer(layer).forward(probe), layer.forward(probe))
        try:
            if hasattr(layer, "unload_and_optionally_merge_module"):
                merged = layer.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
            else:
                layer.merge(safe_merge=False)
                merged = layer.get_base_layer()
        except (RuntimeError, NotImplementedError) as e:
            if isinstance(e, torch.OutOfMemoryError):
                raise
            raise ModelError(f"the adapter on {prefix.rstrip('.')} cannot be merged: {e}", fix="Use export: [adapter].") from e
        if outputs and not _agree(*outputs, merged.forward(probe)):
            raise ModelError(
                f"merging the adapter on {prefix.rstrip('.')} changes what it computes", fix="Use export: [adapter]."
            )
        return {prefix + name: tensor.detach() for name, tensor in _own(merged)}


def _probe(layer: nn.Module) -> Tensor | None:
    """A small input of a LoRA layer: random numbers, or ids that spread over an embedding. None for what takes other inputs."""
    base, generator = base_layer(layer), torch.Generator().manual_seed(0)
    if not isinstance(layer, LoraLayer) or not isinstance(base, nn.Linear | Conv1D | nn.Embedding):
        return None
    device = base.weight.device
    if isinstance(base, nn.Embedding):
        return torch.randint(base.num_embeddings, (16,), generator=generator).to(device)
    return torch.randn(16, base.weight.shape[0 if isinstance(base, Conv1D) else 1], generator=generator).to(device)


def _agree(base: Tensor, adapted: Tensor, merged: Tensor) -> bool:
    """Whether outputs before and after merging differ by rounding only, measured by what the adapter adds to the base's output.

    What is not finite is left to the writer, which names the tensor.
    """
    limit = 0.01 * (adapted - base).norm() + 1e-5 * adapted.norm()
    return not bool(torch.isfinite(merged).all()) or bool((merged - adapted).norm() <= limit)


@contextmanager
def _full_fp32(layer: nn.Module) -> Iterator[None]:
    """Stands whole fp32 copies in for the parameters of one layer, so that peft's own merge never touches the real ones.

    A deep copy would do the same, but FSDP2 modules refuse to be copied.
    """
    own = [(m, n, p) for m in layer.modules() for n, p in m._parameters.items() if p is not None]
    marks = [
        (m, list(m.merged_adapters), dict(getattr(m, "_caches", {}))) for m in layer.modules() if isinstance(m, BaseTunerLayer)
    ]
    copies: dict[int, nn.Parameter] = {}
    for module, name, parameter in own:
        if id(parameter) not in copies:
            wide = torch.promote_types(parameter.dtype, torch.float32) if parameter.is_floating_point() else parameter.dtype
            copies[id(parameter)] = nn.Parameter(whole(parameter).to(wide, copy=True), requires_grad=False)
        module._parameters[name] = copies[id(parameter)]
    try:
        yield
    finally:
        for module, name, parameter in own:
            module._parameters[name] = parameter
        for tuner, merged, caches in marks:
            tuner.merged_adapters = merged
            if hasattr(tuner, "_caches"):
                tuner._caches = caches  # type: ignore[assignment]


@contextmanager
def _exact_products() -> Iterator[None]:
    """fp32 products at full precision: TF32 would round the update to ten bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
