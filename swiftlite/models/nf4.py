"""NF4: four bits a weight, 16 values, one scale for 64 weights of a row (Dettmers et al. 2023, QLoRA).

Bytes are those of bitsandbytes: the first of two weights in the high half of a byte, scales in fp32, or (double quantisation) in
eight bits of its dynamic map around their mean, in blocks of 256. Names: R rows and C columns of a weight, K = C / 64.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

BLOCK = 64
NESTED = 256
# Dettmers et al. 2023, appendix E: quantiles of a normal distribution, scaled to -1 ... 1, with an exact zero.
VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# Weights that are worked on at a time: on a CPU, for each thread, what stays in its cache; elsewhere what keeps fp32 copies and
# indices small.
CHUNK = 2**16
LARGE_CHUNK = 2**24
# Of the kernel: without fused multiply-add the sums of double quantisation are rounded as on a CPU.
OPTIONS = {"enable_fp_fusion": False}

Tables = tuple[Tensor, Tensor, Tensor]


@cache
def tables(kind: str, device: torch.device) -> Tables:
    """Values of the codes, fp32; upper borders of the codes; the lowest code [65536] of fp32 numbers by their upper half.

    Numbers that share sign, exponent and 7 bits of the mantissa lie in at most two codes, so one look-up and one comparison find
    the nearest code: on a CPU ten times faster than a binary search.

    Args:
        kind: nf4; signed and unsigned: the dynamic map.
    """
    values = torch.tensor(VALUES if kind == "nf4" else dynamic_map(kind == "signed"), dtype=torch.float32, device="cpu")
    borders = torch.cat([(values[:-1] + values[1:]) / 2, torch.tensor([torch.inf], device="cpu")])
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cpu") << 16
    ends = torch.stack([upper, upper | 0xFFFF]).view(torch.float32).nan_to_num()
    lowest = torch.bucketize(ends.amin(0), borders)
    return values.to(device), borders.to(device), lowest.to(device)


def nearest(scaled: Tensor, tables: Tables) -> Tensor:
    """Codes uint8 of the nearest values, for contiguous fp32 numbers in the range of the tables."""
    _, borders, lowest = tables
    flat = scaled.flatten()
    low = lowest.take(((flat.view(torch.int32) >> 16) + 2**15).long())
    return (low + (flat > borders.take(low))).to(torch.uint8).view_as(scaled)


def dynamic_map(signed: bool = True) -> list[float]:
    """256 sorted values of seven decades with more digits for the larger ones (Dettmers 2016), as bitsandbytes numbers them.

    An eighth bit of precision goes to the sign; without one, to a finer division of each decade.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        steps = 2**decade + 1 if signed else 2 ** (decade + 1) + 1
        edges = torch.linspace(0.1, 1, steps, dtype=torch.float32)
        for middle in (10 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist():
            values += [middle, -middle] if signed else [middle]
    return sorted([*values, *[0.0] * (256 - len(values))])


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [..., C], C a multiple of 64, as packed bytes uint8 [..., C / 2] and absolute maxima fp32 [..., C / 64]."""
    flat = weight.detach().reshape(-1, BLOCK)
    packed = torch.empty(flat.shape[0], BLOCK // 2, dtype=torch.uint8, device=weight.device)
    absmax = torch.empty(flat.shape[0], dtype=torch.float32, device=weight.device)
    codebook = tables("nf4", weight.device)
    step = _chunk(weight.device) // BLOCK
    for start in range(0, len(flat), step):
        part = slice(start, start + step)
        wide = flat[part].float()
        torch.amax(wide.abs(), 1, out=absmax[part])
        codes = nearest(wide / absmax[part, None].clamp_min(1e-38), codebook)
        packed[part] = codes[:, 0::2] << 4 | codes[:, 1::2]
    *rows, columns = weight.shape
    return packed.reshape(*rows, columns // 2), absmax.reshape(*rows, columns // BLOCK)


def dequantise(packed: Tensor, absmax: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse, [..., C] in `dtype`: the product of value and scale is made in fp32 and rounded once."""
    *rows, half = packed.shape
    blocks, scales, pairs = packed.reshape(-1, BLOCK // 2), absmax.reshape(-1, 1), _pairs(packed.device)
    out = torch.empty(len(blocks), BLOCK, dtype=dtype, device=packed.device)
    step = _chunk(packed.device) // BLOCK
    for start in range(0, len(blocks), step):
        part = slice(start, start + step)
        values = pairs.take(blocks[part].long()).view(torch.float32)
        torch.mul(values, scales[part], out=values)
        out[part] = values
    return out.reshape(*rows, 2 * half)


@cache
def _pairs(device: torch.device) -> Tensor:
    """The two fp32 values of each byte [256], as the halves of an int64: one look-up finds both."""
    values, codes = tables("nf4", device)[0], torch.arange(256, device=device)
    return torch.stack([values[codes >> 4], values[codes & 15]], -1).view(torch.int64).flatten()


def _chunk(device: torch.device) -> int:
    return CHUNK * torch.get_num_threads() if device.type == "cpu" else LARGE_CHUNK


def quantise_scales(absmax: Tensor) -> tuple[Tensor, Tensor]:
    """Scales [..., K] of a whole weight as codes uint8 [..., K], and fp32 [blocks + 1]: one absolute maximum for 256 scales in
    their order, and last the mean that was taken off.

    The mean is summed in fp64 over blocks in this order and on the CPU, so that it depends neither on how the weight is spread
    over ranks nor on the device.
    """
    flat = absmax.flatten()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % NESTED)).reshape(-1, NESTED)
    offset = (blocks.cpu().double().sum(1).sum() / len(flat)).float().to(flat.device)
    centred = torch.nn.functional.pad(flat - offset, (0, -len(flat) % NESTED)).reshape(-1, NESTED)
    nested = centred.abs().amax(1)
    codes = nearest(centred / nested.clamp_min(1e-38)[:, None], tables("signed", flat.device))
    return codes.flatten()[: len(flat)].reshape(absmax.shape), torch.cat([nested, offset[None]])


def dequantise_scales(codes: Tensor, nested: Tensor) -> Tensor:
    """The inverse of `quantise_scales`, fp32 [..., K]."""
    each = nested[:-1].repeat_interleave(NESTED)[: codes.numel()].reshape(codes.shape)
    return tables("signed", codes.device)[0][codes.int()] * each + nested[-1]


# Carriers of a weight are parameters of its module: bytes that are seen as the compute type. FSDP2 gathers floating-point
# parameters only (torch 2.11), and would round scales kept as numbers.
def carriers(shape: tuple[int, ...], double: bool, itemsize: int) -> dict[str, tuple[int, ...]]:
    """Names of the carriers of a weight of `shape`, and their shapes in bytes; last dimensions are multiples of `itemsize`."""
    *rows, columns = shape
    scales = columns // BLOCK
    if not double:
        return {"packed": (*rows, columns // 2), "absmax": (*rows, 4 * scales)}
    count = scales
    for n in rows:
        count *= n
    padded = scales + -scales % itemsize
    return {"packed": (*rows, columns // 2), "codes": (*rows, padded), "nested": (4 * (-(-count // NESTED) + 1),)}


def _bytes(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().view(torch.uint8) for t in tensors]


def unpack(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The weight that whole carriers hold (see `carriers`), in `dtype`; one kernel on a GPU."""
    packed, *rest = _bytes(tensors)
    columns = 2 * packed.shape[-1]
    if packed.is_cuda:
        out = torch.empty(*packed.shape[:-1], columns, dtype=dtype, device=packed.device)
        _launch(packed, rest, out)
        return out
    if len(rest) == 1:
        return dequantise(packed, rest[0].view(torch.float32), dtype)
    return dequantise(packed, dequantise_scales(rest[0][..., : columns // BLOCK], rest[1].view(torch.float32)), dtype)


def _launch(packed: Tensor, scales: list[Tensor], out: Tensor) -> None:
    """Runs the kernel over all bytes of `packed`."""
    size, block = packed.numel(), 1024
    per_row = packed.shape[-1] // (BLOCK // 2)
    nf4, dynamic = tables("nf4", packed.device)[0], tables("signed", packed.device)[0]
    double = len(scales) == 2
    first, second = (scales[0], scales[1].view(torch.float32)) if double else (scales[0].view(torch.float32), scales[0])
    kernel: Any = _kernel()
    with torch.cuda.device(packed.device):
        last, grid = len(second) - 1 if double else 0, (-(-size // block),)
        kernel[grid](packed, first, second, nf4, dynamic, out, size, per_row, first.shape[-1], last, double, block, **OPTIONS)


@cache
def _kernel() -> Callable[..., Any]:
    """Unpacks bytes: made on first use, since a CPU's torch has no triton."""
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def unpack_nf4(  # type: ignore[no-untyped-def]  # noqa: ANN202
        packed, first, second, nf4, dynamic, out, size, per_row, stride, last, DOUBLE: tl.constexpr, N: tl.constexpr  # noqa: ANN001
    ):  # fmt: skip
        at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
        inside = at < size
        byte = tl.load(packed + at, mask=inside, other=0).to(tl.int32)
        block = at // 32
        if DOUBLE:
            code = tl.load(first + block // per_row * stride + block % per_row, mask=inside, other=0).to(tl.int32)
            scale = tl.load(dynamic + code) * tl.load(second + block // 256, mask=inside, other=0.0) + tl.load(second + last)
        else:
            scale = tl.load(first + block, mask=inside, other=0.0)
        high, low = tl.load(nf4 + (byte >> 4)) * scale, tl.load(nf4 + (byte & 15)) * scale
        both = tl.interleave(high, low)
        where = tl.program_id(0).to(tl.int64) * (2 * N) + tl.arange(0, 2 * N)
        tl.store(out + where, both.to(out.dtype.element_ty), mask=where < 2 * size)

    return unpack_nf4  # type: ignore[no-any-return]
