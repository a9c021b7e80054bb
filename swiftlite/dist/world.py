"""Ranks and sums: what a training process knows of its fellows."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from swiftlite.dist.launch import ranks
from swiftlite.dist.pulse import Pulse, meet
from swiftlite.dist.strategies import Strategy
from swiftlite.recipe.errors import RecipeError, nearest


@dataclass(frozen=True)
class World:
    """The ranks of a run, which all read different rows.

    `mesh` has the axes (replicate, shard), or the second alone where there is one copy: weights are the same along the first and
    sharded along the second. None where no process group is needed. One process is a world of size 1 and takes the same road
    through every function as a larger one. `pulse` finds ranks that no longer answer.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None
    pulse: Pulse

    @property
    def data_rank(self) -> int:
        return self.rank

    @property
    def data_size(self) -> int:
        return self.size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the weights."""
        return 1 if self.mesh is None else self.mesh.size(-1)

    def sum(self, *values: float) -> list[float]:
        """Sums of `values` over the data ranks, in fp64; all ranks must call."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return [float(v) for v in total]

    def gather(self, texts: list[str]) -> list[str]:
        """The texts of all ranks, one rank behind another; all ranks must call."""
        if self.size == 1:
            return texts
        found: list[list[str]] = [[]] * self.size
        dist.all_gather_object(found, texts)
        return [text for part in found for text in part]

    def barrier(self) -> None:
        """Waits for all ranks."""
        self.sum(0.0)


def pick_device(wanted: str) -> torch.device:
    """The device of `train.device`: of several GPUs the one with this process's local rank.

    Raises:
        RecipeError: when there is no such device, or this machine lacks it.
    """
    has = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted != "auto" and wanted not in has:
        what = f"'{wanted}' is no device.{nearest(wanted, has)}"
        raise RecipeError(what, where="train.device", fix=f"Known: auto, {', '.join(has)}.")
    if wanted == "auto":
        wanted = next(name for name, there in has.items() if there)
    if not has[wanted]:
        raise RecipeError(f"this machine has no '{wanted}' device", where="train.device", fix="Use train.device: auto.")
    if wanted != "cuda":
        return torch.device(wanted)
    here = ranks()
    if torch.cuda.device_count() == 1 and "SLURM_STEP_NUM_TASKS" in os.environ:
        return torch.device("cuda", 0)  # `srun --gpus-per-task=1` shows each task its own GPU only
    if here.local_rank >= torch.cuda.device_count():
        what = f"process {here.local_rank + 1} of {here.local_size} on this machine finds {torch.cuda.device_count()} GPUs"
        raise RecipeError(what, where="launcher", fix="Start one process a GPU.")
    return torch.device(wanted, here.local_rank)


def mesh_shape(strategy: Strategy, size: int, shard: int | None, local_size: int) -> tuple[int, int]:
    """Sizes of the axes (replicate, shard) for `size` ranks.

    Args:
        shard: strategy.shard, the ranks of one group of hsdp; default the ranks of a host.

    Raises:
        RecipeError: when the ranks do not fall into groups of that size, or strategy none is asked to spread a model.
    """
    if strategy.name == "none" and size > 1:
        fix = "Use ddp, fsdp or zero3, or start one process."
        raise RecipeError(f"{size} processes were started, and strategy none is for one", where="strategy.name", fix=fix)
    group = {"shard": size, "replicate": 1, "hybrid": shard or local_size}[strategy.mesh]
    if size % group:
        what = f"{size} ranks do not fall into groups of {group}"
        raise RecipeError(what, where="strategy.shard", fix=f"Set it to a divisor of {size}.")
    return size // group, group


def join(device: torch.device, strategy: Strategy, *, wrap: bool, shard: int | None = None, timeout_s: int = 600) -> World:
    """Joins the ranks of this run.

    Args:
        wrap: a mesh is needed, as FSDP2 does at world size 1 too.
        timeout_s: a rank that gives no sign for so long ends the run.

    Raises:
        RecipeError: see `mesh_shape`.
    """
    here = ranks()
    shape = mesh_shape(strategy, here.size, shard, here.local_size)
    if here.size == 1 and not wrap:
        return World(0, 1, device, None, Pulse(None, here, timeout_s))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    pulse = Pulse(None, here, timeout_s)
    if not dist.is_initialized():
        # Both backends on a GPU: counts and offloaded gradients live on the CPU.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        # The pulse names a silent rank; a collective that gives up before it names nobody.
        patience = timedelta(seconds=2 * timeout_s + 60)
        # One process alone keeps its store in memory, which opens no port.
        store: Any = dist.HashStore() if here.size == 1 else meet(patience)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=here.rank, world_size=here.size, timeout=patience)
        if here.size > 1:
            pulse = Pulse(store.clone(), here, timeout_s)
    axes = 1 if shape[0] == 1 else 2  # FSDP2 reduces over every axis that it is given, also one of size 1
    mesh = init_device_mesh(device.type, shape[-axes:], mesh_dim_names=("replicate", "shard")[-axes:])
    return World(here.rank, here.size, device, mesh, pulse)


def is_main() -> bool:
    """Whether this process is the first rank, or alone."""
    return not dist.is_initialized() or dist.get_rank() == 0


def leave() -> None:
    """Ends the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
