"""The strategies as data: how parameters, gradients and optimizer state are spread over ranks."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Strategy:
    """One way to spread a model. Shares of full size on N ranks: weights, gradients, optimizer state.

    Attributes:
        sharded: modules are wrapped by FSDP2 even where one process could do without.
        mesh: shard: one axis of all ranks; replicate: the same on every rank; hybrid: sharded inside groups of `strategy.shard`
            ranks, the same in every group.
        reshard: which wrapped modules free their full weights after the forward pass: all, blocks (not what the root holds, as
            final norm and head, which the backward pass needs first), or none.
        reduce: gradients are summed over ranks at each micro-batch, which keeps only shards of them, or at a step's last one.
    """

    name: str
    sharded: bool
    mesh: Literal["shard", "replicate", "hybrid"]
    reshard: Literal["all", "blocks", "none"]
    reduce: Literal["each", "last"]


NONE = Strategy("none", sharded=False, mesh="replicate", reshard="blocks", reduce="each")
DDP = Strategy("ddp", sharded=True, mesh="replicate", reshard="none", reduce="last")
FSDP = Strategy("fsdp", sharded=True, mesh="shard", reshard="blocks", reduce="each")
ZERO1 = Strategy("zero1", sharded=True, mesh="shard", reshard="none", reduce="last")
ZERO2 = Strategy("zero2", sharded=True, mesh="shard", reshard="none", reduce="each")
ZERO3 = Strategy("zero3", sharded=True, mesh="shard", reshard="all", reduce="each")
HSDP = Strategy("hsdp", sharded=True, mesh="hybrid", reshard="blocks", reduce="each")
