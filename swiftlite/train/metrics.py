"""What a run measures of itself, and where the numbers go: metrics.jsonl, the console, trackers."""

import json
import os
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swiftlite.models.packed import elements
from swiftlite.train.console import Console

# Dense bf16 matrix rates in FLOP/s by a part of the device's name (vendors' datasheets); first match counts.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "A10": 125e12,
    "L4": 121e12,
}
GIB = 2**30


def peak_flops(device: torch.device) -> float | None:
    """Matrix rate of the device by its datasheet; None where unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for part, rate in PEAK_FLOPS.items() if part in name), None)


def flops_per_token(root: nn.Module) -> float:
    """Matrix FLOPs of one token without recomputation: 2 a parameter forward, 2 for d(input), 2 for d(weight) of what is trained.

    Source: Kaplan et al. 2020 (6 N), with frozen weights counted 4. Attention scores, which grow with the length, are left out.
    """
    total = 0.0
    embeddings = {id(p) for m in root.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    seen: set[int] = set()
    for module in root.modules():
        for name, p in module.named_parameters(recurse=False):
            if p.ndim >= 2 and id(p) not in embeddings | seen:
                total += elements(module, name, p) * (6 if p.requires_grad else 4)
                seen.add(id(p))
    return total


class Metrics:
    """Appends one JSON object a row to metrics.jsonl and hands it on to the console and the trackers."""

    def __init__(self, path: Path, console: Console, trackers: "list[Any]", device: torch.device) -> None:
        self.path, self.console, self.trackers, self.device = path, console, trackers, device
        self._allocated: deque[float] = deque(maxlen=50)
        self._warned = False

    def cut(self, step: int) -> None:
        """Forgets rows after `step`: a resumed run writes them again."""
        if self.path.exists():
            rows = [line for line in self.path.read_text().splitlines() if line and json.loads(line)["step"] <= step]
            part = self.path.with_suffix(".part")
            part.write_text("".join(f"{row}\n" for row in rows))
            os.replace(part, self.path)

    def memory(self) -> dict[str, float]:
        """Peak and current GiB of the device's allocator; of the process on a CPU (peak resident size)."""
        if self.device.type == "cuda":
            return {
                "peak_memory_gib": torch.cuda.max_memory_allocated() / GIB,
                "allocated_gib": torch.cuda.memory_allocated() / GIB,
            }
        status = Path("/proc/self/status")
        if not status.exists():
            return {}
        kib = {
            k: int(v.split()[0])
            for k, _, v in (line.partition(":") for line in status.read_text().splitlines())
            if k in ("VmHWM", "VmRSS")
        }
        return {"peak_memory_gib": kib["VmHWM"] / 2**20, "allocated_gib": kib["VmRSS"] / 2**20}

    def write(self, row: dict[str, Any]) -> None:
        row = {k: float(f"{v:.7g}") if isinstance(v, float) else v for k, v in row.items()}
        with self.path.open("a") as f:
            f.write(json.dumps(row) + "\n")
        for tracker in self.trackers:
            tracker.log({k: v for k, v in row.items() if isinstance(v, int | float)}, step=row["step"])

    def watch_growth(self, allocated_gib: float) -> None:
        """Warns once when allocated memory rose at each of the last 50 steps: a leak shows so before it kills the run."""
        seen = self._allocated
        seen.append(allocated_gib)
        rising = len(seen) == seen.maxlen and all(b > a for a, b in zip(seen, list(seen)[1:], strict=False))
        if rising and not self._warned:
            self._warned = True
            self.console.warn(
                f"allocated memory grew at each of the last {len(seen)} steps, by {seen[-1] - seen[0]:.2f} GiB in all"
            )

    def close(self) -> None:
        while self.trackers:
            self.trackers.pop().finish()
