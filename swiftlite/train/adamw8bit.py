"""AdamW whose two moments are kept in 8 bits: codes of a dynamic map with one scale a block (Dettmers et al., arXiv 2110.02861).

A block is a part of one row, and which rows a rank holds is all that a strategy decides: no block is ever cut, so every layout
gives the same bits, and the state of one is read by any other.

What is kept of the second moment is its square root. The map ends at a millionth: squares of gradients under a thousandth of
their block's largest would become 0, and weights be divided by epsilon. Ten steps of a tiny Llama drift from fp32 AdamW by 2% of
the way they go, a weight by up to 4 rates; with the squares by 30%, and up to 700 rates.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from swiftlite.dist.tensors import local, with_local
from swiftlite.models.nf4 import Tables, nearest, tables

BLOCK = 256
# Smaller blocks would not save much: of 8 elements the scale takes half a byte each.
MIN_BLOCK = 8
# Elements that are unpacked at a time: on a CPU, for each thread, what stays in its cache; on a GPU what hides a launch.
CHUNK = {"cpu": 2**16, "cuda": 2**24}
MOMENTS = ("exp_avg", "exp_avg_sq_root")


def block_of(shape: Sequence[int]) -> int:
    """Elements that share a scale: the largest part of a row, up to 256, that divides it evenly.

    Args:
        shape: of the whole weight, so that all ranks of all layouts answer the same.

    Returns:
        0 where both moments stay fp32: for vectors, and rows that have no such part of at least 8 elements.
    """
    row = shape[-1] if len(shape) > 1 else 0
    return next((size for size in range(min(BLOCK, row), MIN_BLOCK - 1, -1) if row % size == 0), 0)


def quantize(blocks: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    """Nearest codes uint8 [n, block] and largest magnitudes fp32 [n] of fp32 `blocks` [n, block]."""
    absmax = blocks.abs().amax(1)
    return nearest(blocks / absmax.clamp(min=torch.finfo(torch.float32).tiny)[:, None], tables), absmax


def dequantize(codes: Tensor, absmax: Tensor, tables: Tables) -> Tensor:
    """fp32 [n, block] of codes uint8 [n, block] and scales fp32 [n]."""
    return tables[0].take(codes.long()) * absmax[:, None]


def _stepped(weight: Tensor, grad: Tensor, first: Tensor, second: Tensor, scalars: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weight and both moments after a step of AdamW; all fp32.

    Products and sums are written one by one: each is rounded alike wherever an element lies, which a fused one may not be.
    """
    keep1, take1, keep2, take2, root_correction, eps, decay, rate = scalars.unbind()
    grad = grad.float()
    first = first * keep1 + grad * take1
    second = second * keep2 + grad * grad * take2
    wide = weight.float()
    # One subtraction: a factor 1 - rate x decay would itself be rounded, and being near 1 keep little of a small decay.
    return wide - (wide * decay + first / (second.sqrt() / root_correction + eps) * rate), first, second


def _plain_step(weight: Tensor, grad: Tensor, first: Tensor, second: Tensor, scalars: Tensor) -> None:
    for old, new in zip((weight, first, second), _stepped(weight, grad, first, second, scalars), strict=True):
        old.copy_(new)


def _packed_step(
    weight: Tensor, grad: Tensor, codes1: Tensor, absmax1: Tensor, codes2: Tensor, absmax2: Tensor,
    scalars: Tensor, signed: Tables, unsigned: Tables,
) -> None:  # fmt: skip
    """One step in place: weight, gradient and codes are [n, block], the scales [n]."""
    root = dequantize(codes2, absmax2, unsigned)
    new, first, second = _stepped(weight, grad, dequantize(codes1, absmax1, signed), root * root, scalars)
    weight.copy_(new)
    for codes, absmax, moment, maps in ((codes1, absmax1, first, signed), (codes2, absmax2, second.sqrt(), unsigned)):
        packed, scales = quantize(moment, maps)
        codes.copy_(packed)
        absmax.copy_(scales)


@cache
def _compiled() -> Callable[..., None]:
    return torch.compile(_packed_step, dynamic=True)


def _packed(columns: Sequence[Any], scalars: Tensor) -> None:
    """`_packed_step`; on a GPU as one kernel, which reads and writes each number once."""
    device = scalars.device
    maps = tables("signed", device), tables("unsigned", device)
    if device.type != "cuda" or find_spec("triton") is None:
        return _packed_step(*columns, scalars, *maps)
    # `data` is no view: the sizes of what a view was taken from would be compiled in. Of all sizes only the number of blocks is
    # left open, so that the kernel can hold a block in its registers.
    columns = [column.data for column in columns]
    for column in (c for c in columns if c.ndim == 2):
        torch._dynamo.mark_static(column, 1)
    for constant in (scalars, *maps[0], *maps[1]):
        torch._dynamo.mark_static(constant, 0)
    return _compiled()(*columns, scalars, *maps)


class AdamW8bit(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) with about 2 bytes of state a weight.

    State of a matrix: `exp_avg` and `exp_avg_sq_root`, uint8 codes in its shape, each with its `_absmax`, fp32, a number for each
    block of a row (`block_of`). Other weights have `exp_avg` and `exp_avg_sq` in fp32. All are sharded as the weight is.

    Args:
        params: contiguous weights or groups of them, of any floating type, DTensors too, sharded along rows.
        lr, betas, eps, weight_decay: as for torch.optim.AdamW.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every weight that has a gradient. Returns what `closure` gives, which is called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike: dict[Any, list[tuple[Tensor, ...]]] = {}
            for weight in (p for p in group["params"] if p.grad is not None):
                state = self.state[weight] or self._begin(weight)
                state["step"] += 1
                part, grad = local(weight), local(weight.grad)
                kind = (float(state["step"]), block_of(weight.shape), part.device, part.dtype, grad.dtype)
                alike.setdefault(kind, []).append(_rows(part, grad, state, kind[1]))
            for (steps, block, device, *_), tensors in alike.items():
                chunk = CHUNK["cpu"] * torch.get_num_threads() if device.type == "cpu" else CHUNK["cuda"]
                _step_all(tensors, block > 0, max(1, chunk // (block or 1)), _scalars(group, steps).to(device))
        return loss

    def _begin(self, weight: Tensor) -> dict[str, Tensor]:
        state = {"step": torch.tensor(0.0)}
        if block := block_of(weight.shape):
            blocks = (*weight.shape[:-1], weight.shape[-1] // block)
            for name in MOMENTS:
                state |= {
                    name: _zeros(weight, weight.shape, torch.uint8),
                    f"{name}_absmax": _zeros(weight, blocks, torch.float32),
                }
        else:
            state |= {name: _zeros(weight, weight.shape, torch.float32) for name in ("exp_avg", "exp_avg_sq")}
        self.state[weight] = state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would turn codes into the type of the weights."""
        super().load_state_dict(state_dict)
        names = [i for group in state_dict["param_groups"] for i in group["params"]]
        weights = [p for group in self.param_groups for p in group["params"]]
        for name, weight in zip(names, weights, strict=True):
            if name in state_dict["state"]:
                self.state[weight] = {
                    key: value.to(self.state[weight][key].device, copy=True) for key, value in state_dict["state"][name].items()
                }


def _zeros(weight: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """State of global `shape`, with this rank's rows of `weight`, beside them."""
    part = local(weight)
    zeros = torch.zeros((*part.shape[:1], *shape[1:]), dtype=dtype, device=part.device)
    return with_local(zeros, weight, shape) if isinstance(weight, DTensor) else zeros


def _scalars(group: dict[str, Any], steps: float) -> Tensor:
    """What `_stepped` multiplies with, fp32 [8]; a tensor, since each new plain number would compile the kernel anew."""
    beta1, beta2 = group["betas"]
    corrections = 1 - beta1**steps, (1 - beta2**steps) ** 0.5
    decay, rate = group["lr"] * group["weight_decay"], group["lr"] / corrections[0]
    return torch.tensor([beta1, 1 - beta1, beta2, 1 - beta2, corrections[1], group["eps"], decay, rate], dtype=torch.float32)


def _rows(part: Tensor, grad: Tensor, state: dict[str, Tensor], block: int) -> tuple[Tensor, ...]:
    """Views in which a block is a row, in the order that the steps take them; without blocks a number is one."""
    width = block or 1
    names = [f"{moment}{kind}" for moment in MOMENTS for kind in ("", "_absmax")] if block else ["exp_avg", "exp_avg_sq"]
    views = (local(state[name]).view(-1) if name.endswith("_absmax") else local(state[name]).view(-1, width) for name in names)
    return (part.view(-1, width), grad.reshape(-1, width), *views)


def _step_all(tensors: list[tuple[Tensor, ...]], packed: bool, limit: int, scalars: Tensor) -> None:
    """A step of weights of one kind, each given as `_rows`. Large ones are cut, small ones put together: launches cost too."""
    for pieces in _batches(tensors, limit):
        columns = [column[0] if len(column) == 1 else torch.cat(column) for column in zip(*pieces, strict=True)]
        if packed:
            _packed(columns, scalars)
        else:
            _plain_step(*columns, scalars)
        if len(pieces) > 1:
            for number, column in enumerate(zip(*pieces, strict=True)):
                if number != 1:  # the gradients are as they were
                    torch._foreach_copy_(list(column), list(columns[number].split([len(t) for t in column])))


def _batches(tensors: list[tuple[Tensor, ...]], limit: int) -> Iterator[list[tuple[Tensor, ...]]]:
    """Pieces of at most `limit` rows, as many together as have no more; a tensor without rows has no piece."""
    batch: list[tuple[Tensor, ...]] = []
    held = 0
    for several in tensors:
        whole = len(several[0]) <= limit
        for piece in [several] if whole else zip(*(t.split(limit) for t in several), strict=True):
            rows = len(piece[0])
            if batch and held + rows > limit:
                yield batch
                batch, held = [], 0
            if rows:
                batch.append(piece)
                held += rows
    if batch:
        yield batch
