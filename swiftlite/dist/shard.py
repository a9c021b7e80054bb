"""The one caller of `fully_shard`."""

from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method

from swiftlite.dist.strategies import Strategy
from swiftlite.dist.world import World


@dataclass(frozen=True)
class Sharding:
    """How weights are kept, computed in and fetched.

    Attributes:
        compute_dtype: type of the gathered weights, and of all that is computed with them.
        reduce_dtype: type in which gradients are summed over ranks.
        offload: weights and gradients live in host memory; only what computes is on the device.
        prefetch: blocks that are gathered ahead of the one that computes; 1 is what FSDP2 does by itself.
    """

    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype = torch.float32
    offload: bool = False
    prefetch: int = 1


def needs_wrap(
    root: nn.Module,
    strategy: Strategy,
    compute_dtype: torch.dtype,
    size: int = 1,
    offload: bool = False,
    cast: Set[nn.Parameter] = frozenset(),
) -> bool:
    """Whether the model must be wrapped: it is to be spread, its weights are to live in host memory, or some of them are kept in
    another type than they compute in.

    FSDP2's policy is what casts fp32 master weights to the compute type. Without such weights one process can run the plain
    modules, which is a little faster (no unshard copies).

    Args:
        cast: weights that their layers cast themselves.
    """
    own_type = any(p.is_floating_point() and p.dtype != compute_dtype and p not in cast for p in root.parameters())
    return size > 1 or offload or strategy.sharded or own_type


def shard(
    root: nn.Module,
    blocks: Sequence[str],
    strategy: Strategy,
    world: World,
    sharding: Sharding,
    *,
    alone: Sequence[str] = (),
    forward_methods: Sequence[str] = (),
) -> None:
    """Wraps each of `blocks` and `alone` (module names), and then `root`, which holds the rest: final norm and head.

    Where weights are not sharded, frozen ones that are kept in the compute type are left out: there is nothing to shard, to cast
    or to reduce, and gathering them would only copy them.

    Args:
        alone: modules that are gathered by themselves, once a pass, as an embedding that is tied to nothing.
        forward_methods: methods of the root that run the model, as its loss: FSDP2 only gathers weights for calls it knows.

    Parameters become DTensors on `world.mesh`; gradients are averaged over it in `reduce_dtype`.
    """
    plain = {p for p in root.parameters() if world.shards == 1 and not p.requires_grad and p.dtype == sharding.compute_dtype}
    if sharding.offload:
        plain = set()  # what is to leave the device between its uses must be known to FSDP2
    pinned = torch.accelerator.is_available() and sharding.offload
    # FSDP2 gathers what a module's own forward uses: a module without weights of its own gets no group.
    names = [n for n in [*blocks, *alone] if any(p not in plain for p in root.get_submodule(n).parameters())]
    for name in [*names, ""]:
        fully_shard(
            root.get_submodule(name),
            mesh=world.mesh,
            mp_policy=MixedPrecisionPolicy(param_dtype=sharding.compute_dtype, reduce_dtype=sharding.reduce_dtype),
            # The root's weights are needed first in the backward pass: a re-gather there has nothing to hide behind.
            reshard_after_forward=strategy.reshard == "all" or (strategy.reshard == "blocks" and name != ""),
            ignored_params=plain,
            offload_policy=CPUOffloadPolicy(pin_memory=pinned) if sharding.offload else OffloadPolicy(),
        )
    for method in forward_methods:
        register_fsdp_forward_method(root, method)
    if sharding.prefetch > 1:
        wrapped = [root.get_submodule(n) for n in blocks if n in names]
        for i, module in enumerate(wrapped):
            module.set_modules_to_forward_prefetch(wrapped[i + 1 : i + 1 + sharding.prefetch])  # type: ignore[operator]
            module.set_modules_to_backward_prefetch(wrapped[max(0, i - sharding.prefetch) : i][::-1])  # type: ignore[operator]


def begin_micro_batch(root: nn.Module, strategy: Strategy, last: bool) -> None:
    """Says before each forward pass whether it is the step's last one: when gradients are reduced is the strategy's business."""
    if not isinstance(root, FSDPModule):
        return
    if strategy.reduce == "last":
        root.set_requires_gradient_sync(last)
    elif strategy.mesh == "hybrid":
        root.set_requires_all_reduce(last)  # sums inside a group at each micro-batch, over the groups once
    root.set_is_last_backward(last)


def reshard(root: nn.Module) -> None:
    """Frees gathered weights. After a forward pass without a backward the modules else still show them, in the compute type."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
