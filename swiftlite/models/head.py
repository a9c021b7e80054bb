"""The loss head: next-token cross-entropy that never holds the logits of all positions.

Positions without a label are dropped before the head; the others pass through it in chunks. Names: B batch, T tokens, N trained
positions, D hidden size, V vocabulary.
"""

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from swiftlite.data.render import IGNORE

# fp32 logits alive at once: large enough for a full matrix product, small beside any model's activations.
CHUNK_ELEMENTS = 2**27


@dataclass(frozen=True)
class LogitTransform:
    """What a family does to the head's output: `softcap * tanh(scale * x / softcap)`; softcap 0 is none."""

    scale: float = 1.0
    softcap: float = 0.0

    @classmethod
    def of(cls, config: Any) -> "LogitTransform":
        """Reads the transform off a model's text config (Gemma 2 caps, Cohere multiplies, Granite divides)."""
        scale = getattr(config, "logit_scale", None) or 1.0
        scale /= getattr(config, "logits_scaling", None) or 1.0
        return cls(scale, getattr(config, "final_logit_softcapping", None) or 0.0)

    def __call__(self, logits: Tensor) -> Tensor:
        """fp32 logits of the model from the head's raw output."""
        logits = logits.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits


class LinearNLL(torch.autograd.Function):
    """Sum of negative log likelihoods behind a plain linear head; all gradients are made in the forward pass, chunk by chunk.

    The sum enters the final loss only through one scalar factor, so the backward pass just multiplies.
    Source of the gradient: d nll / d logit = softmax(logit) - onehot(target).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_N: Tensor, transform: LogitTransform
    ) -> Tensor:
        need_h, need_w, need_b = ctx.needs_input_grad[:3]
        grad_h = torch.empty_like(hidden_ND) if need_h else None
        grad_w = torch.zeros_like(weight_VD, dtype=torch.float32) if need_w else None
        grad_b = torch.zeros_like(bias_V, dtype=torch.float32) if need_b and bias_V is not None else None
        total = hidden_ND.new_zeros((), dtype=torch.float32)
        size = max(1, CHUNK_ELEMENTS // weight_VD.shape[0])
        for start in range(0, len(target_N), size):
            hidden, target = hidden_ND[start : start + size], target_N[start : start + size, None]
            logits = transform(F.linear(hidden, weight_VD, bias_V))
            lse = torch.logsumexp(logits, -1, keepdim=True)
            total += (lse - logits.gather(-1, target)).sum()
            if not (need_h or need_w or need_b):
                continue
            slope = 1.0 if not transform.softcap else 1 - (logits / transform.softcap).square()
            grad = logits.sub_(lse).exp_()
            grad.scatter_add_(-1, target, -torch.ones_like(lse))
            grad = (grad * slope if transform.softcap else grad).mul_(transform.scale).to(hidden.dtype)
            if grad_h is not None:
                torch.mm(grad, weight_VD, out=grad_h[start : start + size])
            if grad_w is not None:
                grad_w += grad.T @ hidden
            if grad_b is not None:
                grad_b += grad.sum(0)
        ctx.grads = (grad_h, grad_w, grad_b)
        ctx.dtypes = (hidden_ND.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (factor,) = grad_outputs
        scaled = tuple(
            None if g is None else g.mul_(factor.to(g.dtype)).to(d) for g, d in zip(ctx.grads, ctx.dtypes, strict=True)
        )
        ctx.grads = None  # multiplied in place: a second backward pass would be wrong, and fails here instead
        return (*scaled, None, None)


def hidden_states(root: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Output of the model's body after its final norm: [B, T, D] in the compute type."""
    hidden: Tensor = root.base_model(**inputs, use_cache=False).last_hidden_state
    return hidden


def full_logits(root: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Logits by the model's own forward: [B, T, V]."""
    # The class's forward, not the call: inside a method of a sharded root the gather has happened already.
    logits: Tensor = type(root).forward(root, **inputs, use_cache=False).logits
    return logits


def nll_sum(root: Any, inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    """Sum over trained positions of -log p(labels[t] | input_ids[<t]): a scalar in fp32. Bound to the root as `nll_sum`.

    Args:
        inputs: what the model's body takes, `input_ids` [B, T] int64 and whatever else the batch holds.
        labels: [B, T] int64, aligned with input_ids; IGNORE where nothing is learned.
    """
    targets = labels[:, 1:]
    keep = targets != IGNORE
    if root.swiftlite_head is None:
        logits = full_logits(root, inputs)[:, :-1]
        return F.cross_entropy(logits[keep].float(), targets[keep], reduction="sum")
    # A batch without trained tokens still runs the head, so that every rank makes the same collectives; its sum is 0.
    if not bool(keep.any()):
        return hidden_states(root, inputs)[:, :1].float().sum() * 0.0
    hidden_ND, target_N = hidden_states(root, inputs)[:, :-1][keep], targets[keep]
    head, transform = root.get_output_embeddings(), root.swiftlite_head
    if type(head) is nn.Linear or type(head).__name__ == "FSDPLinear":
        total: Tensor = LinearNLL.apply(hidden_ND, head.weight, head.bias, target_N, transform)
        return total

    # An adapted head is called as the module it is; its logits are made again in the backward pass instead of being kept.
    def chunk_sum(hidden: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(transform(head(hidden)), target, reduction="sum")

    size = max(1, CHUNK_ELEMENTS // root.config.get_text_config().vocab_size)
    pairs = zip(hidden_ND.split(size), target_N.split(size), strict=True)
    return torch.stack([checkpoint(chunk_sum, h, t, use_reentrant=False) for h, t in pairs]).sum()


def head_gap(root: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Largest difference between our logits and the model's own, relative to its largest. Bound to the root as `head_gap`."""
    theirs = full_logits(root, inputs).float()
    ours = root.swiftlite_head(root.get_output_embeddings()(hidden_states(root, inputs)))
    return (ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30)


METHODS = ("nll_sum", "head_gap")


def attach(root: Any) -> None:
    """Gives `root` the methods of this module: FSDP2 gathers weights for registered methods of the root and for nothing else."""
    has_head = isinstance(root.get_output_embeddings(), nn.Module)
    root.swiftlite_head = LogitTransform.of(root.config.get_text_config()) if has_head else None
    root.nll_sum = MethodType(nll_sum, root)
    root.head_gap = MethodType(head_gap, root)


def verify(root: Any, inputs: dict[str, Tensor]) -> str | None:
    """Compares our head with the model's own forward on a few tokens; where they differ the model's own is used from now on.

    Returns a note when that happened: the model keeps all logits then, which costs memory.
    """
    if root.swiftlite_head is not None:
        with torch.no_grad():
            gap = float(root.head_gap(inputs))
        if gap <= (1e-4 if next(root.parameters()).dtype == torch.float32 else 3e-2):
            return None
    root.swiftlite_head = None
    return (
        f"{type(root).__name__} is more than a body and a linear head: its own forward makes the loss, with all logits in memory"
    )
