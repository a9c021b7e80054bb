"""Ranks and sums: what a training process knows of its fellows."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from swiftlite.recipe.errors import RecipeError, nearest


@dataclass(frozen=True)
class World:
    """The ranks of a run. `mesh` spans the data ranks; None where no process group is needed.

    One process is a world of size 1 and takes the same road through every function as a larger one.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None

    @property
    def data_rank(self) -> int:
        return self.rank

    @property
    def data_size(self) -> int:
        return self.size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Sums of `values` over the data ranks, in fp64."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return [float(v) for v in total]


def pick_device(wanted: str) -> torch.device:
    """The device of `train.device`.

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
    return torch.device(wanted, 0) if wanted == "cuda" else torch.device(wanted)


def join(device: torch.device, sharded: bool) -> World:
    """Joins the ranks of this run. `sharded` asks for a mesh, which FSDP2 needs at world size 1 too.

    Raises:
        RecipeError: when a launcher started more than one process.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        raise RecipeError(f"{size} processes were started, and this version trains with one", where="launcher", fix="Start swiftlite without a launcher.")
    if not sharded:
        return World(0, 1, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # Both backends on a GPU: offloaded gradients live on the CPU. A store in memory opens no port.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return World(0, 1, device, init_device_mesh(device.type, (size,)))


def leave() -> None:
    """Ends the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
