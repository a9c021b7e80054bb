"""The NF4 kernel of GPUs without one: by Triton's interpreter, and compiled for Hopper. See test_nf4_kernel.py."""

import os
import re
from contextlib import nullcontext

import torch
from torch import nn

from swiftlite.models import nf4
from swiftlite.models.packed import Stored
from swiftlite.recipe.schema import QuantizeSection


def interpreted() -> None:
    """Values are those of the CPU. The interpreter cuts bf16 off instead of rounding, so that type is for a GPU to show."""
    torch.cuda.device = lambda device: nullcontext()
    for shape in ((1, 64), (33, 192), (5, 1024), (3, 4, 128)):
        w = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        w.view(-1)[:64] = 0
        for double in (False, True):
            for dtype in (torch.float32, torch.float16):
                section = QuantizeSection(method="nf4", double_quant=double)
                stored = Stored(nn.Module(), "weight", torch.empty(shape, dtype=dtype, device="meta"), section)
                stored.pack(w.to(dtype))
                stored.finish()
                packed, *rest = nf4._bytes(stored.tensors())
                found = torch.full(shape, torch.nan, dtype=dtype)
                nf4._launch(packed, rest, found)
                assert torch.equal(found, stored.read(dtype)), (shape, double, dtype)


def compiled() -> None:
    """A product and a sum are two roundings, as on a CPU: Hopper's code has no fused multiply-add where the kernel forbids it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = dict.fromkeys(("size", "per_row", "stride", "last"), "i32") | {"DOUBLE": "constexpr", "N": "constexpr"}
    for dtype in ("fp32", "bf16", "fp16"):
        tensors = {"packed": "*u8", "first": "*u8", "second": "*fp32", "nf4": "*fp32", "dynamic": "*fp32", "out": f"*{dtype}"}
        source = ASTSource(nf4._kernel(), tensors | names, constexprs={"DOUBLE": True, "N": 1024})
        fused = []
        for options in ({}, nf4.OPTIONS):
            made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            fused.append(len(re.findall(r"\bfma\.", made.asm["ptx"])))
        assert fused[0] > 0 == fused[1], fused


if __name__ == "__main__":
    interpreted() if os.environ["TRITON_INTERPRET"] == "1" else compiled()
