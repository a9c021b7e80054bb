"""Reads the weights of a trained model block by block, whole, unpacked and with adapters merged, whatever their sharding."""

import re
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from swiftlite.models.adapter_files import ADAPTER, INITIAL
from swiftlite.models.packed import PackedLinear, Stored
from swiftlite.recipe.errors import ModelError

# Wrappers of activation checkpointing and compilation: they stand in the module tree, not in Hugging Face names.
_TRANSPARENT = {"_checkpoint_wrapped_module", "_orig_mod"}


# The weight to merge onto, by the Hugging Face name of a packed one.
Bases = Callable[[str], Tensor]


@dataclass
class Read:
    """Whole tensors by Hugging Face name, on the model's device.

    Attributes:
        tensors: as trained; fp32 for an adapted layer.
        before: of adapted layers, the weights that were merged onto.
        full: names of those that were trained in full, without an adapter.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    full: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Piece:
    """Tensors that are read together: one of the model's own, or those of one adapted layer.

    Attributes:
        shapes: Hugging Face name -> global shape.
        read: a collective where the model is sharded.
        source: identity of the parameter behind an unadapted tensor; None for an adapted layer.
        packed: names of weights that are kept in few bits.
    """

    shapes: dict[str, torch.Size]
    read: Callable[[], Read]
    source: int | None = None
    packed: frozenset[str] = frozenset()


def pieces(model: nn.Module, bases: Bases | None = None) -> list[Piece]:
    """All saved tensors of a Hugging Face model in the order of its modules.

    Args:
        bases: gives the weights that stand for packed ones; None: what the model computes with.
    """
    # After a forward pass FSDP2 may still hold gathered copies in the compute type; the master weights are in the shards.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    found = list(_walk(model, "", bases))
    announce = getattr(model, "swiftlite_announce", None)  # the other ranks are to take part in a read, see export.ranks
    return found if announce is None else [replace(p, read=_announced(p.read, announce, i)) for i, p in enumerate(found)]


def _announced(read: Callable[[], Read], announce: Callable[[int], Any], number: int) -> Callable[[], Read]:
    def both() -> Read:
        announce(number)
        return read()

    return both


def blocks(model: nn.Module, skip: Set[str] = frozenset(), bases: Bases | None = None) -> Iterator[Read]:
    """Merged tensors, one numbered block (`model.layers.3`) or one tensor outside of blocks at a time. `bases`: see `pieces`.

    A block is the unit in which transformers converts fused weights to the names in files.
    """
    wanted = (p for p in pieces(model, bases) if not p.shapes.keys() <= skip)
    for _, group in groupby(wanted, key=lambda piece: block_of(next(iter(piece.shapes)))):
        whole_block = Read()
        for piece in group:
            part = piece.read()
            whole_block.tensors |= {name: t for name, t in part.tensors.items() if name not in skip}
            whole_block.before |= {name: t for name, t in part.before.items() if name not in skip}
            whole_block.full += part.full
        yield whole_block


def block_of(name: str) -> str:
    """`model.layers.3.` of the names of that block; a name outside of blocks itself."""
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found else name


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
        equal = alias or torch.equal(a.read().tensors[name].to(dtype), b.read().tensors[source].to(dtype))
        (same if equal else different).add(name)
    return same, different


def _walk(module: nn.Module, prefix: str, bases: Bases | None) -> Iterator[Piece]:
    if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
        base = base_layer(module)
        packed = {prefix + s.name: torch.Size(s.shape) for s in stored_of(base)}
        shapes = {prefix + n: t.shape for n, t in _own(base)} | packed
        yield Piece(shapes, lambda: _merge(module, prefix, bases), packed=frozenset(packed))
        return
    yield from (_packed_piece(prefix, stored, bases) for stored in stored_of(module))
    for name, tensor in _own(module, recurse=False):
        yield _plain_piece(prefix + name, tensor)
    for name, child in module.named_children():
        yield from _walk(child, prefix if name in _TRANSPARENT else f"{prefix}{name}.", bases)


def _plain_piece(name: str, tensor: Tensor) -> Piece:
    full = [name] if tensor.requires_grad else []
    return Piece({name: tensor.shape}, lambda: Read({name: whole(tensor)}, {}, full), id(tensor))


def _packed_piece(prefix: str, stored: Stored, bases: Bases | None) -> Piece:
    name = prefix + stored.name
    return Piece({name: torch.Size(stored.shape)}, lambda: Read({name: _base_of(name, stored, bases)}), packed=frozenset([name]))


def stored_of(module: nn.Module) -> list[Stored]:
    """The packed weights of a module's own."""
    return [module.stored] if isinstance(module, PackedLinear) else list(getattr(module, "swiftlite_stored", {}).values())


def _base_of(name: str, stored: Stored, bases: Bases | None) -> Tensor:
    """What stands for a packed weight: its unpacked values in the type they are computed with, or what `bases` gives."""
    # Always a collective, whatever is merged onto: the ranks that lend their parts do not know it.
    unpacked = stored.unpacked(stored.dtype)
    return unpacked if bases is None else bases(name).to(unpacked.device)


def _own(module: nn.Module, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Parameters but for carriers of packed weights, and saved buffers. Without state-dict hooks: FSDP2's would swap the shards
    back in."""
    for prefix, m in module.named_modules() if recurse else [("", module)]:
        carriers = {n for stored in stored_of(m) for n in stored.names.values()}
        own: dict[str, Tensor | None] = {
            **m._parameters,
            **{n: b for n, b in m._buffers.items() if n not in m._non_persistent_buffers_set},
        }
        yield from ((f"{prefix}.{n}" if prefix else n, t) for n, t in own.items() if t is not None and n not in carriers)


def base_layer(module: nn.Module) -> nn.Module:
    """The Hugging Face module inside peft's wrappers."""
    while isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
        module = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module.original_module
    return module


def _merge(layer: Any, prefix: str, bases: Bases | None) -> Read:
    """The tensors of an adapted layer after merging in fp32. The layer itself stays as it was.

    Raises:
        ModelError: peft cannot merge this kind of adapter, or the merged layer does not compute what the adapted one does.
    """
    with torch.no_grad(), _unpacked(layer, prefix, bases), _full_fp32(layer) as originals, _exact_products():
        before = {prefix + n: originals[id(t)] for n, t in _own(base_layer(layer)) if id(t) in originals}
        if start := getattr(layer, INITIAL, None):  # what was taken out of the base for the adapter to start as is no update
            rest = before[f"{prefix}weight"]
            taken = layer.scaling[ADAPTER] * (whole(start["lora_B"]).to(rest.device) @ whole(start["lora_A"]).to(rest.device))
            before[f"{prefix}weight"] = rest + (taken.T if layer.fan_in_fan_out else taken)
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
        tensors = {prefix + name: tensor.detach() for name, tensor in _own(merged)}
        return Read(tensors, {name: t for name, t in before.items() if name in tensors and t.is_floating_point()})


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
def _unpacked(layer: nn.Module, prefix: str, bases: Bases | None) -> Iterator[None]:
    """Stands plain linear layers in for packed ones inside an adapted layer: peft merges into nothing else."""
    packed = [(m, name, c) for m in layer.modules() for name, c in m._modules.items() if isinstance(c, PackedLinear)]
    for parent, name, child in packed:
        with torch.device("meta"):
            plain = nn.Linear(child.in_features, child.out_features, bias=False)
        plain.weight = nn.Parameter(_base_of(f"{prefix}weight", child.stored, bases), requires_grad=False)
        plain.bias = child.bias
        parent._modules[name] = plain
    try:
        yield
    finally:
        for parent, name, child in packed:
            parent._modules[name] = child


@contextmanager
def _full_fp32(layer: nn.Module) -> Iterator[dict[int, Tensor]]:
    """Stands whole fp32 copies in for the parameters of one layer, so that peft's own merge never touches the real ones.

    A deep copy would do the same, but FSDP2 modules refuse to be copied. Gives the real values, whole, by identity of the copies.
    """
    own = [(m, n, p) for m in layer.modules() for n, p in m._parameters.items() if p is not None]
    marks = [
        (m, list(m.merged_adapters), dict(getattr(m, "_caches", {}))) for m in layer.modules() if isinstance(m, BaseTunerLayer)
    ]
    copies: dict[int, nn.Parameter] = {}
    originals: dict[int, Tensor] = {}
    for module, name, parameter in own:
        if id(parameter) not in copies:
            wide = torch.promote_types(parameter.dtype, torch.float32) if parameter.is_floating_point() else parameter.dtype
            original = whole(parameter)
            copies[id(parameter)] = copy = nn.Parameter(original.to(wide, copy=True), requires_grad=False)
            originals[id(copy)] = original
        module._parameters[name] = copies[id(parameter)]
    try:
        yield originals
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
