"""What is done to each decoder block: activations recomputed, or its passes compiled. Before sharding, whose hooks stay outside."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# Results that cost more to make again than to keep: attention, and every second matrix product of a block.
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
}
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


Pass = Callable[..., Any]


# Ways to run like blocks: kinds of attention, with and without a gradient behind it, training and evaluation, lengths of rows.
VARIANTS = 64


def wrap_blocks(root: nn.Module, blocks: Sequence[str], checkpointing: str, compiled: bool) -> None:
    """Sets how the blocks (module names) run, sharded or not: hooks of sharding stay outside.

    Args:
        checkpointing: full: while training only a block's input is kept for the backward pass, all else is computed again;
            selective: attention and half of the matrix products are kept too; none.
        compiled: compile the passes; like blocks share what is compiled. The first step of each shape of rows takes longer.
    """
    run: Pass = {"none": _plain, "full": _full, "selective": _selective}[checkpointing]
    if compiled:
        torch._dynamo.config.recompile_limit = max(VARIANTS, torch._dynamo.config.recompile_limit)
        run = torch.compile(run)
    elif checkpointing == "none":
        return
    for name in blocks:
        block: Any = root.get_submodule(name)
        # With the block as an argument one compiled function serves all; a closure over each would be compiled for each.
        block.forward = partial(run, block)


def _plain(block: Any, *args: Any, **kwargs: Any) -> Any:
    return type(block).forward(block, *args, **kwargs)


def _full(block: Any, *args: Any, **kwargs: Any) -> Any:
    return _recomputed(block, args, kwargs, {})


def _selective(block: Any, *args: Any, **kwargs: Any) -> Any:
    return _recomputed(block, args, kwargs, {"context_fn": _contexts})


def _recomputed(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any], how: dict[str, Any]) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return _plain(block, *args, **kwargs)

    def forward(*inputs: Any) -> Any:
        return _plain(block, *inputs, **kwargs)

    return checkpoint(forward, *args, use_reentrant=False, **how)


def _contexts() -> Any:
    counts = {False: 0, True: 0}  # forward pass, recomputation: both must choose the same products

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in _PRODUCTS:
            counts[context.is_recompute] += 1
            keep = counts[context.is_recompute] % 2 == 1
        else:
            keep = op in _ATTENTION
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
