"""The loss head: next-token cross-entropy that never holds the logits of all positions.

Positions without a label are dropped before the head; the others pass through it in chunks. Names: B batch, T tokens, N trained
positions, D hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from swiftlite.data.render import IGNORE
from swiftlite.models.balance import Balance

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
    Source of the gradient: d nll / d logit = softmax(logit) - onehot(target). With label smoothing e the loss is
    (1 - e) * nll + e * mean over the vocabulary of -log p, so that the target is (1 - e) * onehot + e / V.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        transform: LogitTransform,
        smoothing: float,
        chunk: "Chunk",
    ) -> Tensor:
        need_h, need_w, need_b = ctx.needs_input_grad[:3]
        grad_h = torch.empty_like(hidden_ND) if need_h else None
        grad_w = torch.zeros_like(weight_VD, dtype=torch.float32) if need_w else None
        grad_b = torch.zeros_like(bias_V, dtype=torch.float32) if need_b and bias_V is not None else None
        total = hidden_ND.new_zeros((), dtype=torch.float32)
        size = max(1, CHUNK_ELEMENTS // weight_VD.shape[0])
        for start in range(0, len(target_N), size):
            hidden, target = hidden_ND[start : start + size], target_N[start : start + size, None]
            nll, grad = chunk(F.linear(hidden, weight_VD, bias_V), target, transform, smoothing, need_h or need_w or need_b)
            total += nll
            if grad is None:
                continue
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
        return (*scaled, None, None, None, None)


Chunk = Callable[[Tensor, Tensor, LogitTransform, float, bool], tuple[Tensor, Tensor | None]]


def chunk_eager(
    raw: Tensor, target: Tensor, transform: LogitTransform, smoothing: float, need_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Sum over the rows of `raw` [N, V] (the head's output) of the smoothed nll of `target` [N, 1], fp32, and its gradient in the
    type of `raw`. Works in place where it can: the logits of a chunk are the largest tensors of a step.
    """
    logits = transform(raw)
    lse = torch.logsumexp(logits, -1, keepdim=True)
    total = (lse - (1 - smoothing) * logits.gather(-1, target)).sum()
    if smoothing:
        total -= smoothing * logits.mean(-1).sum()
    if not need_grad:
        return total, None
    slope = 1.0 if not transform.softcap else 1 - (logits / transform.softcap).square()
    grad = logits.sub_(lse).exp_()
    grad.scatter_add_(-1, target, torch.full_like(lse, smoothing - 1))
    if smoothing:
        grad.sub_(smoothing / logits.shape[-1])
    return total, (grad * slope if transform.softcap else grad).mul_(transform.scale).to(raw.dtype)


def chunk_fused(
    raw: Tensor, target: Tensor, transform: LogitTransform, smoothing: float, need_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """The same without updates in place, for the compiler: it reads the raw logits twice and never writes fp32 ones."""
    logits = transform(raw)
    lse = torch.logsumexp(logits, -1, keepdim=True)
    total = (lse - (1 - smoothing) * logits.gather(-1, target)).sum() - smoothing * logits.mean(-1).sum()
    if not need_grad:
        return total, None
    hit = torch.arange(raw.shape[-1], device=raw.device) == target
    grad = (logits - lse).exp() - torch.where(hit, 1 - smoothing, 0.0) - smoothing / raw.shape[-1]
    if transform.softcap:
        grad = grad * (1 - (logits / transform.softcap).square())
    return total, (grad * transform.scale).to(raw.dtype)


@dataclass(frozen=True)
class Added:
    """What training puts beside the negative log likelihood; evaluation has none of it.

    Attributes:
        smoothing: share of each target that is spread over the vocabulary (train.label_smoothing_factor).
        balance: load-balancing loss, once for each trained token, so that a step holds its mean over micro-batches.
    """

    smoothing: float = 0.0
    balance: Balance | None = None


def body(root: Any, inputs: dict[str, Any]) -> Any:
    """Outputs of the model's body: `last_hidden_state` [B, T, D] after its final norm, in the compute type."""
    return root.base_model(**_prepared(root, inputs), use_cache=False)


def own_forward(root: Any, inputs: dict[str, Any]) -> Any:
    """Outputs of the model's own forward: `logits` [B, T, V]."""
    # The class's forward, not the call: inside a method of a sharded root the gather has happened already.
    return type(root).forward(root, **_prepared(root, inputs), use_cache=False)


def _prepared(root: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs with the masks of joined rows, for classes that cannot make them (see `models.isolation`)."""
    return root.swiftlite_masks(root, inputs) if root.swiftlite_masks is not None else inputs


def nll_sum(root: Any, inputs: dict[str, Tensor], labels: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum over trained positions of -log p(labels[t] | input_ids[<t]), and in training mode what `Added` says: a scalar in fp32.
    Bound to the root as `nll_sum`.

    Args:
        inputs: what the model's body takes, `input_ids` [B, T] int64 and whatever else the batch holds.
        labels: [B, T] int64, aligned with input_ids; IGNORE where nothing is learned.
        mask: [B, T], 1 for real tokens and 0 for padding; None: all are real.
    """
    added = root.swiftlite_added if root.training else Added()
    root.swiftlite_mask = mask  # for the noise on the embedding
    more = {"output_router_logits": True} if added.balance else {}
    outputs = (own_forward if root.swiftlite_head is None else body)(root, inputs | more)
    targets = labels[:, 1:]
    keep = targets != IGNORE
    values = outputs.logits if root.swiftlite_head is None else outputs.last_hidden_state
    # A batch without trained tokens still runs body and head, on one position that counts nothing: the ranks of a sharded model
    # sum the same gradients, the head's too.
    if not bool(keep.any()):
        return _nll(root, values[:, 0][:1], targets[:1, 0].clamp_min(0), added.smoothing) * 0.0
    total = _nll(root, values[:, :-1][keep], targets[keep], added.smoothing)
    return total + keep.sum() * added.balance(outputs.router_logits, mask) if added.balance else total


def logp_sums(root: Any, inputs: dict[str, Tensor], labels: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum over the trained positions of each row of log p(labels[t] | input_ids[<t]) [B], fp32. Bound to the root as `logp_sums`.

    Args: as for `nll_sum`.
    """
    root.swiftlite_mask = mask  # for the noise on the embedding
    outputs = (own_forward if root.swiftlite_head is None else body)(root, inputs)
    values = outputs.logits if root.swiftlite_head is None else outputs.last_hidden_state
    targets = labels[:, 1:]
    keep = targets != IGNORE
    if not bool(keep.any()):  # as in `nll_sum`
        return _each(root, values[:, 0][:1], targets[:1, 0].clamp_min(0)) * labels.new_zeros(len(labels), dtype=torch.float32)
    each = -_each(root, values[:, :-1][keep], targets[keep])
    return torch.zeros(keep.shape, device=each.device).masked_scatter(keep, each).sum(1)


def _nll(root: Any, values: Tensor, target_N: Tensor, smoothing: float) -> Tensor:
    """The smoothed sum for hidden states [N, D], or for logits [N, V] where the model's own forward makes them."""
    transform, head = root.swiftlite_head, root.get_output_embeddings()
    if transform is None:
        return F.cross_entropy(values.float(), target_N, reduction="sum", label_smoothing=smoothing)
    if type(head) is nn.Linear or type(head).__name__ == "FSDPLinear":
        total: Tensor = LinearNLL.apply(values, head.weight, head.bias, target_N, transform, smoothing, root.swiftlite_chunk)
        return total

    return _each(root, values, target_N, smoothing).sum()


def _each(root: Any, values: Tensor, target_N: Tensor, smoothing: float = 0.0) -> Tensor:
    """What `_nll` sums, position by position [N], for any use of it: logits are made again in the backward pass instead of being
    kept. The head is called as the module it is, so it may be adapted."""
    transform, head = root.swiftlite_head, root.get_output_embeddings()

    def chunk(hidden: Tensor, target: Tensor) -> Tensor:
        logits = hidden.float() if transform is None else transform(head(hidden))
        return F.cross_entropy(logits, target, reduction="none", label_smoothing=smoothing)

    size = max(1, CHUNK_ELEMENTS // root.config.get_text_config().vocab_size)
    pairs = zip(values.split(size), target_N.split(size), strict=True)
    return torch.cat([checkpoint(chunk, h, t, use_reentrant=False) for h, t in pairs])


def head_gap(root: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Largest difference between our logits and the model's own, relative to its largest. Bound to the root as `head_gap`."""
    theirs = own_forward(root, inputs).logits.float()
    ours = root.swiftlite_head(root.get_output_embeddings()(body(root, inputs).last_hidden_state))
    return (ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30)


METHODS = ("nll_sum", "logp_sums", "head_gap")


def attach(root: Any, added: Added | None = None, compiled: bool = False) -> None:
    """Gives `root` the methods of this module: FSDP2 gathers weights for registered methods of the root and for nothing else.

    Args:
        compiled: compile what is done to the logits; numbers of rows vary, so for any.
    """
    root.swiftlite_chunk = torch.compile(chunk_fused, dynamic=True) if compiled else chunk_eager
    root.swiftlite_added, root.swiftlite_masks = added or Added(), None
    has_head = isinstance(root.get_output_embeddings(), nn.Module)
    root.swiftlite_head = LogitTransform.of(root.config.get_text_config()) if has_head else None
    root.nll_sum = MethodType(nll_sum, root)
    root.logp_sums = MethodType(logp_sums, root)
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
