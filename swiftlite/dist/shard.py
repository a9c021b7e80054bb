"""The one caller of `fully_shard`."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from swiftlite.dist.strategies import Strategy
from swiftlite.dist.world import World


def needs_wrap(root: nn.Module, strategy: Strategy, compute_dtype: torch.dtype) -> bool:
    """Whether the model must be wrapped: it is to be sharded, or some weights are kept in another type than they compute in.

    FSDP2's policy is what casts fp32 master weights to the compute type. Without such weights one process can run the plain
    modules, which is a little faster (no unshard copies).
    """
    return strategy.sharded or any(p.is_floating_point() and p.dtype != compute_dtype for p in root.parameters())


def shard(
    root: nn.Module,
    blocks: Sequence[str],
    strategy: Strategy,
    world: World,
    *,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    forward_methods: Sequence[str] = (),
) -> None:
    """Wraps each of `blocks` (module names) and then `root`, which holds the rest: embeddings, final norm, head.

    On one rank frozen weights that are kept in the compute type are left out: there is nothing to shard or to cast, and gathering
    them would only copy them.

    `forward_methods` are methods of the root that run the model, as its loss: FSDP2 only gathers weights for calls it knows.
    Parameters become DTensors on `world.mesh`; gradients are averaged over it in `reduce_dtype`.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    plain = {p for p in root.parameters() if world.size == 1 and not p.requires_grad and p.dtype == compute_dtype}
    for name in blocks:
        block = root.get_submodule(name)
        fully_shard(block, mesh=world.mesh, mp_policy=policy, reshard_after_forward=strategy.reshard_after_forward, ignored_params=plain)
    # The root's weights are needed first in the backward pass: a re-gather there has nothing to hide behind.
    fully_shard(root, mesh=world.mesh, mp_policy=policy, reshard_after_forward=False, ignored_params=plain)
    for method in forward_methods:
        register_fsdp_forward_method(root, method)


def reshard(root: nn.Module) -> None:
    """Frees gathered weights. After a forward pass without a backward the modules else still show them, in the compute type."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
