"""LoRA that starts inside the base: each adapted weight W is split into scale * B A, which is trained, and a frozen rest.

PiSSA: Meng et al. 2024, "PiSSA: Principal Singular Values and Singular Vectors Adaptation of Large Language Models", equations 2
to 4. OLoRA: Büyükakyüz 2024, "OLoRA: Orthonormal Low-Rank Adaptation of Large Language Models". The products are those of peft's
`pissa` and `olora`; A and B may differ from peft's in signs, for which there is a rule here.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from swiftlite.dist.checkpoint import Saved
from swiftlite.dist.tensors import copy_into, local, place_of, whole
from swiftlite.models.adapter_files import ADAPTER, INITIAL, Slot, slots
from swiftlite.recipe.errors import ModelError, RecipeError
from swiftlite.recipe.schema import LoraSection

Factors = tuple[Tensor, Tensor]


def require(model: PreTrainedModel, lora: LoraSection, targets: Sequence[str], fused: Sequence[str]) -> None:
    """Refuses what `split` cannot split. The model may be on meta.

    Args:
        targets, fused: full names of the modules, and of the fused expert weights, that are to take an adapter.

    Raises:
        RecipeError: an embedding, a tied weight, a rank above a weight's own, fused experts.
    """
    default = "or use lora.init: default."
    if fused:
        what = f"'{lora.init}' does not split fused experts ({fused[0]})."
        raise RecipeError(what, where="lora.init", fix=f"Leave lora.experts out, {default}")
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for target in targets:
        module = model.get_submodule(target)
        weight: Tensor = module.weight  # type: ignore[assignment]
        leave = f"Leave it out of lora.target_modules, {default}"
        if isinstance(module, nn.Embedding):
            raise RecipeError(f"'{lora.init}' splits linear layers, and {target} is an embedding.", where="lora.init", fix=leave)
        if others := [n for n in names[id(weight)] if n != f"{target}.weight"]:
            what = f"'{lora.init}' would change {others[0]} too, which is the same weight as {target}.weight."
            raise RecipeError(what, where="lora.init", fix=leave)
        if lora.rank > min(weight.shape):
            what = f"{lora.rank} is above the rank of {target}, whose weight is {' x '.join(map(str, weight.shape))}."
            raise RecipeError(what, where="lora.rank", fix=f"Set it to {min(weight.shape)} or less, {default}")


class Layer(NamedTuple):
    """An adapted linear layer: its two factors, and the module with the base weight."""

    name: str
    a: Slot
    b: Slot
    base: nn.Module

    @property
    def weight(self) -> Tensor:
        found: Tensor = self.base.weight  # type: ignore[assignment]
        return found

    @property
    def transposed(self) -> bool:
        """Whether the weight is [in, out]."""
        return isinstance(self.base, Conv1D)

    @property
    def scale(self) -> float:
        return float(self.a.layer.scaling[ADAPTER])


def adapted(root: nn.Module) -> list[Layer]:
    """In model order, the same on all ranks."""
    places = slots(root)
    names = [key.removesuffix("lora_A.weight") for key, slot in places.items() if slot.kind == "lora_A"]
    pairs = ((n, places[f"{n}lora_A.weight"], places[f"{n}lora_B.weight"]) for n in names)
    return [Layer(name, a, b, a.layer.get_base_layer()) for name, a, b in pairs]


@torch.no_grad()
def split(root: nn.Module, lora: LoraSection, device: torch.device, saved: Saved | None = None) -> str:
    """Moves a part of each loaded base weight into its adapter; all ranks must call. Returns a note.

    Layer by layer, so that no more than one weight a rank is whole and in fp64. Ranks share the layers, and the one that
    decomposed a layer hands A and B to all: two machines need not find the same singular vectors to the last bit. What A and B
    started as is kept in host memory, sharded as they are (`Slot.initial`): exports and checkpoints need it.

    Args:
        root: the Hugging Face model with peft's layers, in any sharding, every weight loaded.
        device: where the model computes.
        saved: a checkpoint of the run, whose A and B stand for new ones: the rest is then what it was on any machine.

    Raises:
        ModelError: a base weight is not finite, or the checkpoint does not say what A and B started as.
    """
    began, layers = time.perf_counter(), adapted(root)
    device = torch.device("cpu") if device.type == "mps" else device  # which has no fp64
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    for first in range(0, len(layers), size):
        turn = layers[first : first + size]
        factors = _decomposed(turn, lora.init, rank, size, device) if saved is None else _saved(turn, saved, device)
        for layer, (a, b) in zip(turn, factors, strict=True):
            _take_out(layer, a, b)
    took = f"in {time.perf_counter() - began:.1f} s"
    return f"lora.init {lora.init}: the adapters start as a part of {len(layers)} weights, taken out of them {took}"


def _decomposed(turn: Sequence[Layer], method: str, rank: int, size: int, device: torch.device) -> Iterator[Factors]:
    """A [r, in] and B [out, r], fp32, of one layer a rank; the same on all ranks."""
    mine: Tensor | None = None
    for i, layer in enumerate(turn):  # gathering takes all ranks, so all of it comes before the work
        weight = whole(layer.weight)
        mine = weight if i == rank else mine
    found: Factors | None = None
    if mine is not None:
        layer = turn[rank]
        if not mine.isfinite().all():
            raise ModelError(f"the base weight of {layer.name.removesuffix('.')} holds NaN or infinity.")
        found = METHODS[method]((mine.T if layer.transposed else mine).to(device), layer.a.tensor.shape[0], layer.scale)
    yield from share_out(turn, found, device)


def share_out(turn: Sequence[Layer], found: Factors | None, device: torch.device) -> Iterator[Factors]:
    """A [r, in] and B [out, r], fp32, of the layers of a turn, the same on all ranks: each is from the rank of its place.

    Args:
        found: this rank's own; None where the turn is shorter than the ranks.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    for i, layer in enumerate(turn):
        if found is not None and i == rank:
            pair = tuple(t.float().contiguous() for t in found)
        else:
            pair = tuple(torch.empty(slot.tensor.shape, device=device) for slot in (layer.a, layer.b))
        if dist.is_initialized():
            for tensor in pair:
                dist.broadcast(tensor, i)
        yield pair[0], pair[1]


def _saved(turn: Sequence[Layer], saved: Saved, device: torch.device) -> Iterator[Factors]:
    """A and B as they started in the run of a checkpoint."""
    there = set(saved.names("initial"))
    for layer in turn:
        keys = [f"{layer.name}lora_{part}.weight" for part in "AB"]
        if missing := [key for key in keys if key not in there]:
            raise ModelError(f"the checkpoint does not say what {missing[0]} started as.", where=saved.folder)
        a, b = (saved.rows("initial", key).to(device) for key in keys)
        yield a, b


def _take_out(layer: Layer, a: Tensor, b: Tensor) -> None:
    """Sets the adapter to A and B, and the base weight to W - scale * B A, which is rounded once, to the weight's type."""
    # Adapters may be kept in fp32 and compute in the weight's type. What that rounds off the start goes into the rest.
    a, b = a.to(layer.weight.dtype), b.to(layer.weight.dtype)
    for slot, value in ((layer.a, a), (layer.b, b)):
        copy_into(slot.tensor, value)
        vars(slot.layer).setdefault(INITIAL, {})[slot.kind] = slot.tensor.detach().to("cpu", copy=True)
    # fp64 makes the rest the same on any device and in any layout.
    left, right = (a.T.double(), b.T.double()) if layer.transposed else (b.double(), a.double())
    weight, part = layer.weight, local(layer.weight)
    if isinstance(weight, DTensor):
        shape, offset = place_of(weight)
        left = left[offset[0] : offset[0] + shape[0]]
    part.copy_(part.to(left.device).double().addmm_(left, right, alpha=-layer.scale))


def pissa(weight: Tensor, rank: int, scale: float) -> Factors:
    """A [r, in] and B [out, r] in fp64: scale * B A is the best approximation of rank r of the weight [out, in].

    From the eigenvectors of W Wt (or Wt W, if smaller), which is cheaper than a singular value decomposition. It squares
    the singular values: in fp64 those that matter are still resolved better than by a decomposition in fp32.
    """
    wide = weight.shape[0] <= weight.shape[1]
    matrix = (weight if wide else weight.T).double()
    vectors = torch.linalg.eigh(matrix @ matrix.T).eigenvectors[:, -rank:].flip(1)
    rows = vectors.T @ matrix  # the other side's singular vectors times the singular values
    root = (rows.norm(dim=1) / scale).sqrt()
    left, right = vectors * root, rows / (scale * root).clamp_min(1e-30)[:, None]
    return _signed(right, left) if wide else _signed(left.T, right.T)


def olora(weight: Tensor, rank: int, scale: float) -> Factors:
    """A [r, in] and B [out, r] in fp64: the first r rows of R and columns of Q of the weight's [out, in] QR decomposition.

    Those columns of Q come from as many columns of the weight, and R is Qt W: the rest is not decomposed. Neither is divided by
    `scale`, as in peft: scale times the product is taken out.
    """
    matrix = weight.double()
    b = torch.linalg.qr(matrix[:, :rank]).Q
    return _signed(b.T @ matrix, b)


METHODS: dict[str, Callable[[Tensor, int, float], Factors]] = {"pissa": pissa, "olora": olora}


def _signed(a: Tensor, b: Tensor) -> Factors:
    """The largest entry of each column of B becomes positive, and A's row follows: decompositions leave the sign open."""
    sign = b.gather(0, b.abs().argmax(0, keepdim=True)).sign()
    sign = torch.where(sign == 0, 1, sign)
    return a * sign.T, b * sign
