"""Compares an export with the trained model on real prompts, against tolerances that a wrong weight cannot pass."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

# Logits of 512 positions at a vocabulary of 150,000 are 300 MB in fp32.
MAX_ROWS, MAX_TOKENS = 8, 64


@dataclass(frozen=True)
class Tolerance:
    """Largest differences that rounding explains.

    Attributes:
        max_abs: of a logit, per unit of the largest logit where that is above 1.
        relative: norm of the difference over the norm of the logits (their mean per position taken off).
        kl: mean over positions of KL(trained || export), in nats.
    """

    max_abs: float
    relative: float
    kl: float


# fp32: merging reorders sums, which costs some ulp a layer. 16 bits: every weight and activation is rounded to 2^-9 (bf16) or
# 2^-12 (fp16) of itself; on SmolLM2-135M that gives relative differences of 0.3% to 1.5% (bf16), while one layer without its
# adapter after a short training gives several times that. Tensors themselves are compared exactly, whatever the type.
TOLERANCES = {
    torch.float32: Tolerance(1e-4, 1e-4, 1e-6),
    torch.float16: Tolerance(0.05, 0.02, 2e-3),
    torch.bfloat16: Tolerance(0.2, 0.08, 2e-2),
}


@dataclass(frozen=True)
class Differences:
    """Between the logits of the trained model and those of its export.

    Attributes:
        positions: tokens whose logits were compared.
        max_abs, relative, kl: see Tolerance; max_abs as it is, not per unit.
        largest_logit: of the trained model.
        top1_agreement: share of positions where both put the same token first.
    """

    positions: int
    max_abs: float
    relative: float
    kl: float
    largest_logit: float
    top1_agreement: float

    def within(self, tolerance: Tolerance) -> bool:
        """Whether all are inside the tolerance; NaN is not."""
        scale = max(1.0, self.largest_logit)
        pairs = ((self.max_abs / scale, tolerance.max_abs), (self.relative, tolerance.relative), (self.kl, tolerance.kl))
        return self.positions > 0 and all(value <= limit for value, limit in pairs)

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def tolerance(*dtypes: torch.dtype) -> Tolerance:
    """That of the coarsest of these types."""
    return TOLERANCES[max(dtypes, key=lambda d: torch.finfo(d).eps)]


def prompt_rows(prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """The rows that are compared: [T] int64 each."""
    return [torch.tensor(list(row[:MAX_TOKENS]), dtype=torch.int64) for row in prompts[:MAX_ROWS] if len(row)]


def compare(trained: Sequence[Tensor], exported: Iterator[Tensor]) -> Differences:
    """Differences of logits, one tensor [T, V] in fp32 a row."""
    positions = agree = 0
    squares = norm = kl = max_abs = largest = 0.0
    for ours, theirs in zip(trained, exported, strict=True):
        difference = (ours - theirs).double()
        squares += float(difference.square().sum())
        norm += float((ours - ours.mean(-1, keepdim=True)).double().square().sum())
        kl += float(F.kl_div(theirs.log_softmax(-1), ours.log_softmax(-1), reduction="sum", log_target=True))
        # Python's max() drops NaN, so it is carried by hand.
        max_abs = float(torch.maximum(difference.abs().max(), torch.tensor(max_abs).double()))
        largest = float(torch.maximum(ours.abs().max(), torch.tensor(largest)))
        agree += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        positions += len(ours)
    relative = (squares / max(norm, 1e-30)) ** 0.5
    return Differences(positions, max_abs, relative, kl / max(positions, 1), largest, agree / max(positions, 1))
