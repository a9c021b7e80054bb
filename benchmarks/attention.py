"""Attention over packed chat rows, forward and backward: varlen, flex_attention and sdpa, against fp32.

    python benchmarks/attention.py [--packs 4] [--length 4096] [--heads 32] [--kv-heads 8] [--size 128] [--window N]

Work: rows of log-normal length (mean about 425 tokens) in packs, in bf16; the functions are those that a model's layers call.
A line for each case: once a forward pass, the time to make borders or masks; for each layer, forward, forward and backward, and
the peak of what it allocates; and the distance of output and gradients from fp32 attention of each row alone, relative to their
norm. `sdpa padded` has the same rows unpacked, padded to the longest: what a run without packing does. `sdpa mask` is packing by
a T x T mask, and `varlen grouped` the kernel with fewer key/value heads than query heads, whether or not this torch documents it.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from swiftlite.data.packing import pack
from swiftlite.models import varlen

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Run = Callable[[Tensor, Tensor, Tensor], Tensor]  # query, key, value [1 or B, heads, T, D] -> [.., T, heads, D]


def chat_packs(count: int, capacity: int) -> list[list[int]]:
    """Lengths of the rows in `count` packs, taken evenly from the packs of 1,200 rows."""
    draw = random.Random(0)
    rows = [min(capacity, max(16, int(draw.lognormvariate(5.61, 0.95)))) for _ in range(1200)]
    packs = [[rows[i] for i in p] for p in pack(rows, capacity)]
    return packs[:: max(1, len(packs) // count)][:count]


def waited() -> float:
    """Seconds of the clock, once the device has done its work."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def median_ms(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = waited()
        call()
        times.append((waited() - start) * 1e3)
    return statistics.median(times)


class Work:
    """Tensors of one layer for packs of rows, and fp32 results to compare with.

    Attributes:
        given: query, key, value [B, heads, T, D] in the type of the benchmark.
        exact: output and gradients in fp32: [B, T, heads, D] and three as `given`.
    """

    def __init__(self, packs: list[list[int]], length: int, heads: tuple[int, int], size: int, window: int | None) -> None:
        torch.manual_seed(0)
        self.packs, self.length, self.window = packs, length, window
        self.dtype = torch.bfloat16
        shapes = [(len(packs), n, length, size) for n in (heads[0], heads[1], heads[1])]
        self.given = [torch.randn(s, device=DEVICE).to(self.dtype) for s in shapes]
        self.weight = torch.randn(len(packs), length, heads[0], size, device=DEVICE).to(self.dtype)
        self.positions = torch.zeros(len(packs), length, dtype=torch.int64, device=DEVICE)
        for row, lengths in zip(self.positions, packs, strict=True):
            row[: sum(lengths)] = torch.cat([torch.arange(n) for n in lengths])
        self.real = torch.zeros(len(packs), length, dtype=torch.bool, device=DEVICE)
        for filled, lengths in zip(self.real, packs, strict=True):
            filled[: sum(lengths)] = True
        self.weight *= self.real[:, :, None, None]
        self.config = LlamaConfig(
            hidden_size=heads[0] * size, num_attention_heads=heads[0], num_key_value_heads=heads[1], sliding_window=window
        )
        self.module = nn.Module()
        self.module.num_key_value_groups = heads[0] // heads[1]
        self.exact = self.results(self._one_by_one, torch.float32)

    def _one_by_one(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = []
        for b, lengths in enumerate(self.packs):
            outs, start = [], 0
            for n in [*lengths, *[1] * (self.length - sum(lengths))]:
                q, k, v = (x[b, :, start : start + n] for x in (query, key, value))
                k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
                at = torch.arange(n, device=DEVICE)
                back = at[:, None] - at
                seen = (back >= 0) & (back < (self.window or n))
                outs.append(F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen)[0])
                start += n
            rows.append(torch.cat(outs, 1).transpose(0, 1))
        return torch.stack(rows)

    def results(self, run: Run, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Output and gradients of `given`, in fp32."""
        given = [x.to(dtype or self.dtype).requires_grad_() for x in self.given]
        out = run(*given)
        grads = torch.autograd.grad(out, given, self.weight.to(out.dtype))
        return [out.detach().float() * self.real[:, :, None, None], *(g.float() for g in grads)]

    def mask(self, backend: str) -> Any:
        """transformers' mask of one kind of layer."""
        self.config._attn_implementation = backend
        make = create_sliding_window_causal_mask if self.window else create_causal_mask
        like = torch.empty(*self.positions.shape, 1, dtype=self.dtype, device=DEVICE)
        return make(self.config, like, None, None, position_ids=self.positions)


def cases(work: Work) -> dict[str, tuple[Callable[[], Any], Callable[[Any], Run]]]:
    """For each case: what makes borders or masks, and what makes the attention from them."""

    def ours(segments: Any, grouped: bool) -> Run:
        def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            repeat = 1 if grouped else query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(repeat, 1) if repeat > 1 else x for x in (key, value))
            more = {"sliding_window": work.window, "segments": segments}
            return varlen.attention(work.module, query, key, value, None, **more)[0]

        return run

    def theirs(backend: str) -> Callable[[Any], Run]:
        function = AttentionInterface()[backend]
        return lambda mask: lambda q, k, v: function(work.module, q, k, v, mask, is_causal=True)[0]

    def segments() -> Any:
        return varlen.segments_of(work.positions)

    found = {
        "varlen": (segments, lambda s: ours(s, True)),
        "varlen repeated": (segments, lambda s: ours(s, False)),
        "sdpa mask": (lambda: work.mask("sdpa"), theirs("sdpa")),
    }
    if DEVICE.type == "cuda":  # flex_attention has no backward pass elsewhere
        found["flex"] = (lambda: work.mask("flex_attention"), theirs("flex_attention"))
    return found


def measure(name: str, make: Callable[[], Any], attention: Callable[[Any], Run], work: Work, repeats: int) -> dict[str, Any]:
    for _ in range(2):  # compiles, and finds its kernels
        results = work.results(attention(make()))
    gaps = [float((x - y).norm() / y.norm()) for x, y in zip(results, work.exact, strict=True)]
    made = make()
    run = attention(made)
    return {"case": name, "make_ms": median_ms(make, repeats)} | timed(run, work.given, work.weight, repeats) | {"gaps": gaps}


def timed(run: Run, tensors: list[Tensor], weight: Tensor, repeats: int) -> dict[str, float]:
    given = [x.detach().requires_grad_() for x in tensors]
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    both = median_ms(lambda: torch.autograd.grad(run(*given), given, weight), repeats)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if DEVICE.type == "cuda" else float("nan")
    with torch.no_grad():
        forward = median_ms(lambda: run(*given), repeats)
    return {"forward_ms": forward, "both_ms": both, "peak_gib": peak}


def padded(work: Work, repeats: int) -> dict[str, Any]:
    """The rows unpacked, each padded to the longest, causal without a mask; windows are left out, which costs more."""
    rows = [n for lengths in work.packs for n in lengths]
    shapes = [(len(rows), x.shape[1], max(rows), x.shape[3]) for x in (*work.given, work.weight.transpose(1, 2))]
    q, k, v, weight = (torch.randn(s, device=DEVICE, dtype=work.dtype) for s in shapes)
    function = AttentionInterface()["sdpa"]

    def run(*given: Tensor) -> Tensor:
        return function(work.module, *given, None, is_causal=True)[0]

    timed(run, [q, k, v], weight.transpose(1, 2), 2)
    return {"case": "sdpa padded", "make_ms": 0.0} | timed(run, [q, k, v], weight.transpose(1, 2), repeats) | {"gaps": None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for key, value in {"packs": 4, "length": 4096, "heads": 32, "kv-heads": 8, "size": 128, "repeats": 30}.items():
        parser.add_argument(f"--{key}", type=int, default=value)
    parser.add_argument("--window", type=int)
    a = parser.parse_args()
    torch._dynamo.config.automatic_dynamic_shapes = False  # as in training; see swiftlite/models/build.py
    packs = chat_packs(a.packs, a.length)
    work = Work(packs, a.length, (a.heads, a.kv_heads), a.size, a.window)
    where = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    rows, tokens = sum(map(len, packs)), sum(map(sum, packs))
    print(f"{where}, torch {torch.__version__}, transformers {transformers.__version__}, bf16, {len(packs)} packs of {a.length}:")
    print(f"{rows} rows, {tokens} tokens, {a.heads}/{a.kv_heads} heads of {a.size}, window {a.window}")
    head = f"{'case':16}{'make ms':>9}{'fwd ms':>9}{'f+b ms':>9}{'GiB':>7}   distance from fp32: out, dq, dk, dv"
    print(head)
    lines = []
    for name, parts in cases(work).items():
        try:
            lines.append(measure(name, *parts, work, a.repeats))
        except (RuntimeError, ValueError, NotImplementedError) as error:
            print(f"{name:16}  fails: {str(error).splitlines()[0]}", flush=True)
            continue
        show(lines[-1])
    lines.append(padded(work, a.repeats))
    show(lines[-1])
    print(json.dumps(lines))


def show(line: dict[str, Any]) -> None:
    gaps = "  ".join(f"{g:.1e}" for g in line["gaps"]) if line["gaps"] else "-"
    numbers = f"{line['make_ms']:9.2f}{line['forward_ms']:9.2f}{line['both_ms']:9.2f}{line['peak_gib']:7.2f}"
    print(f"{line['case']:16}{numbers}   {gaps}", flush=True)


if __name__ == "__main__":
    main()
