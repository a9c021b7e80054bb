"""A frozen weight in float8 (e4m3), one fp32 scale for each of its rows; products in float8 where the GPU has them.

One copy serves both products of a layer: the backward one sums over the weight's rows, so their scales are multiplied into the
gradient before that is rounded to float8 itself. Activations and gradients are scaled token by token: no token's rounding depends
on what else is in the batch, so a batch may be split in any way. Names: N tokens, R rows (outputs) and C columns (inputs).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
# Float8 products of a GPU want sizes in whole vectors of 16 bytes.
MULTIPLE = 16


def native(device: torch.device) -> bool:
    """Whether a device multiplies in float8: NVIDIA GPUs from Ada and Hopper on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., C] in float8, and the fp32 scales [..., 1] of its rows: x is about their product."""
    x = x.detach()
    # Not divided: a GPU divides by a number as it multiplies by its reciprocal, a CPU does not, and bytes are to be the same.
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) * (1 / LARGEST)
    return (x.float() / scale).to(E4M3), scale


def _for_back(grad: Tensor, scale: Tensor, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `product_back` multiplies: the gradient [N, R] in float8 with the weight's scales in it, its own scales [N, 1], and
    the weight turned over, [C, R]. The GPU multiplies along rows of both sides only; bytes are turned, as not every kernel moves
    float8."""
    return *round_rows(grad.float() * scale.mT), packed.mT.contiguous()


def _in_one_pass(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """A function of small steps on a GPU as one kernel, also where the layer around it is not compiled: step by step it would
    take longer than float8 saves."""
    # While a layer is being compiled, tensors of its backward pass are stand-ins of other classes.
    if torch.compiler.is_compiling() or type(tensors[0]) is not Tensor or not _compiles(tensors[0].device):
        return function(*tensors)
    # What a view was taken from, and whether it has a gradient, would be compiled in: soon more variants than torch keeps.
    with torch.no_grad():
        return _compiled(function)(*(tensor.data for tensor in tensors))


def _compiles(device: torch.device) -> bool:
    return device.type == "cuda"


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def carriers(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Names of the carriers of a weight of `shape`, and their shapes in bytes."""
    return {"packed": shape, "scale": (*shape[:-1], 4)}


def _read(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    packed, scale = tensors
    return packed.detach().view(torch.uint8), scale.detach().view(torch.float32)


def unpack(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The weight that whole carriers hold, in `dtype`."""
    packed, scale = _read(tensors)
    return (packed.view(E4M3).float() * scale).to(dtype)


def _mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """a [N, C] times the transpose of b [R, C], both float8, with scales [N, 1] and [R, 1]; on a CPU by way of fp32."""
    if a.is_cuda:
        return torch._scaled_mm(a, b.mT, scale_a=scale_a, scale_b=scale_b.mT, out_dtype=dtype, use_fast_accum=True)
    return ((a.float() * scale_a) @ (b.float() * scale_b).mT).to(dtype)


def product(x: Tensor, tensors: list[Tensor]) -> Tensor:
    """x [N, C] times the transposed weight [R, C]: [N, R], in the type of x. Layers that share an input share its rounding, where
    compiled."""
    y: Tensor = _product(x, *_in_one_pass(round_rows, x), *tensors)
    return y


@torch.library.custom_op("swiftlite::fp8_mm", mutates_args=())
def _product(x: Tensor, rounded: Tensor, scale_x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """The product of x as rounded. One op, so that recomputation sees it; x is what the gradient belongs to."""
    weight, scale_w = _read([packed, scale])
    return _mm(rounded, weight.view(E4M3), scale_x, scale_w, x.dtype)


@_product.register_fake
def _(x: Tensor, rounded: Tensor, scale_x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], packed.shape[0])


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[3:])


def _back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return product_back(grad, list(ctx.saved_tensors)), None, None, None, None


_product.register_autograd(_back, setup_context=_keep)


def product_back(grad: Tensor, tensors: list[Tensor]) -> Tensor:
    """grad [N, R] times the weight [R, C]: [N, C], in the type of grad."""
    packed, scale = _read(tensors)
    rounded, scale_g, turned = _in_one_pass(_for_back, grad, scale, packed)
    ones = torch.ones_like(turned[:, :1], dtype=torch.float32)
    return _mm(rounded, turned.view(E4M3), scale_g, ones, grad.dtype)
