"""Compares an export with the trained model on real prompts, against tolerances that a wrong weight cannot pass."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

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


# By the type in which the trained model multiplies, and the type written. Largest relative difference and KL on SmolLM2-135M (30
# narrow layers: it is sensitive) after 2 to some hundred LoRA steps, and on an 8B model with random weights. KL moves by a factor
# of 100 with the state of the training, so its limits are 8 times the largest, the others 3 times:
#   fp32 -> fp32   5e-6   1e-11   merging only reorders sums
#   fp32 -> fp16   0.006  2e-5    weights are rounded          fp16 -> fp16   0.008  2e-5   activations are rounded too, in both
#   fp32 -> bf16   0.06   6e-3                                 bf16 -> bf16   0.1    7e-3
# Faults on SmolLM2: no adapter 1 to 3, 1 to 3; half of the layers without theirs 0.9 to 1.6, 0.1 to 0.4; adapter scaled by 1.4:
# 0.4 to 0.7, 0.1. One layer without its adapter, 0.02 to 0.16, can hide behind 16 bits. So these limits do not stand alone:
# merging is checked layer by layer in fp32 (tensors.py), and the tensors read back must be exactly the merged ones.
_EXACT = Tolerance(1e-4, 1e-4, 1e-6)
_ROUNDED = {torch.float16: Tolerance(0.02, 0.03, 2e-4), torch.bfloat16: Tolerance(0.15, 0.2, 0.05)}
_COMPUTED = {torch.float16: Tolerance(0.05, 0.06, 1e-3), torch.bfloat16: Tolerance(0.3, 0.35, 0.06)}


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


@dataclass(frozen=True)
class Gaps:
    """How far a model that was trained on packed weights is from its adapter on weights that are not.

    Attributes:
        method: how the weights were packed: nf4, fp8.
        dequantised: on the values that the packed weights stand for.
        original: on the weights of the model's files; None: they hold packed ones only.
        adapted: logits [T, V] of the latter, one tensor a row.
    """

    method: str
    dequantised: Differences
    original: Differences | None
    adapted: Sequence[Tensor] = ()

    def as_dict(self) -> dict[str, Any]:
        original = None if self.original is None else self.original.as_dict()
        return {"packed": self.method, "dequantised": self.dequantised.as_dict(), "original": original}


def tolerance(compute: torch.dtype, written: torch.dtype) -> Tolerance:
    """What a model that computes in `compute` may differ from its export in `written`."""
    limits = [_EXACT, *(table[d] for table, d in ((_ROUNDED, written), (_COMPUTED, compute)) if d in table)]
    return Tolerance(*(max(values) for values in zip(*map(astuple, limits), strict=True)))


def prompt_rows(prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """The rows that are compared: [T] int64 each."""
    return [torch.tensor(list(row[:MAX_TOKENS]), dtype=torch.int64) for row in prompts[:MAX_ROWS] if len(row)]


def _kl(ours: Tensor, theirs: Tensor) -> Tensor:
    return F.kl_div(theirs.log_softmax(-1), ours.log_softmax(-1), reduction="sum", log_target=True)


def compare(trained: Sequence[Tensor], exported: Iterator[Tensor]) -> Differences:
    """Differences of logits, one tensor [T, V] in fp32 a row."""
    positions = agree = 0
    squares = norm = kl = max_abs = largest = 0.0
    for ours, theirs in zip(trained, exported, strict=True):
        difference = (ours - theirs).double()
        squares += float(difference.square().sum())
        norm += float((ours - ours.mean(-1, keepdim=True)).double().square().sum())
        # Never below 0 but by rounding; clamp_min keeps NaN.
        kl += float(_kl(ours.double(), theirs.double()).clamp_min(0))
        # Python's max() drops NaN, so it is carried by hand.
        max_abs = float(torch.maximum(difference.abs().max(), torch.tensor(max_abs).double()))
        largest = float(torch.maximum(ours.abs().max(), torch.tensor(largest)))
        agree += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        positions += len(ours)
    relative = (squares / max(norm, 1e-30)) ** 0.5
    return Differences(positions, max_abs, relative, kl / max(positions, 1), largest, agree / max(positions, 1))
