"""Who this process is among its fellows, and how they are started. Loads torch only to start them."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path

from swiftlite.recipe.errors import RecipeError

# Folder in which the workers of our own launcher say how they ended, and how often it has started them.
FOLDER, STARTS = "SWIFTLITE_WORKERS", "SWIFTLITE_STARTS"


@dataclass(frozen=True)
class Ranks:
    """Place of this process: `rank` of `size` in all, `local_rank` of `local_size` on this host."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1


def ranks() -> Ranks:
    """The place that a launcher gave this process; one process by itself without one.

    Understands torchrun's variables (which `accelerate launch` sets too). A task of `srun` gets those that torch reads to meet
    the others: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
    """
    for name, value in _slurm().items():
        os.environ.setdefault(name, value)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if "RANK" not in os.environ or size == 1:
        return Ranks()
    rank = int(os.environ["RANK"])
    return Ranks(rank, int(os.environ.get("LOCAL_RANK", rank)), size, int(os.environ.get("LOCAL_WORLD_SIZE", size)))


def is_worker() -> bool:
    """Whether a launcher started this process: ours, torchrun, `accelerate launch` of several processes, or `srun`."""
    return ("RANK" in os.environ and "WORLD_SIZE" in os.environ) or bool(_slurm())


def start() -> int:
    """How many times the launcher had started its workers before this time, because one died."""
    ours = os.environ.get(STARTS)
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if ours is None else int(ours) - 1


def _slurm() -> dict[str, str]:
    """torchrun's variables for a task of `srun` with several tasks; else nothing.

    SLURM_NTASKS is no proof: a batch script has it as well, and runs once.
    """
    env = os.environ
    if "RANK" in env or int(env.get("SLURM_STEP_NUM_TASKS", "1")) == 1:
        return {}
    # "gpu[03-05,9],x" starts with gpu03; tasks of each host are written "8(x2),4".
    first = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\])?", env.get("SLURM_STEP_NODELIST", "localhost"))
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", env["SLURM_STEP_NUM_TASKS"]))
    tasks = list(chain.from_iterable(repeat(count, int(times or 1)) for count, times in runs))
    return {
        "RANK": env["SLURM_PROCID"],
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
        "LOCAL_WORLD_SIZE": tasks[int(env.get("SLURM_NODEID", "0"))],
        "MASTER_ADDR": "".join(part or "" for part in first.groups()) if first else "localhost",
        # The same for all tasks of this step, another for the next one.
        "MASTER_PORT": str(15_000 + (int(env.get("SLURM_JOB_ID", "0")) + int(env.get("SLURM_STEP_ID", "0"))) % 20_000),
    }


def processes(wanted: int | None, device: str, strategy: str | None) -> int:
    """How many workers to start on this host: as wanted, else one for each GPU that a run of `device` and `strategy` may use.

    Raises:
        RecipeError: when more are wanted than there are GPUs.
    """
    one = device not in ("auto", "cuda") or strategy == "none" or "ACCELERATE_MIXED_PRECISION" in os.environ
    if wanted == 1 or (wanted is None and one):
        return 1
    if device not in ("auto", "cuda"):
        return wanted or 1
    import torch

    gpus = torch.cuda.device_count()  # asks the driver's library: CUDA is not initialised
    if wanted is not None and 0 < gpus < wanted:
        fix = "Start at most one process a GPU, or train on the CPU with train.device=cpu."
        raise RecipeError(f"{wanted} processes are wanted, and there are {gpus} GPUs here", where="--nproc", fix=fix)
    return wanted or max(1, gpus)


def launch(
    command: Sequence[str],
    *,
    output: Path,
    nproc: int,
    nnodes: int = 1,
    node_rank: int | None = None,
    rdzv: str | None = None,
    max_restarts: int = 0,
) -> None:
    """Runs `python COMMAND` as `nproc` workers on each of `nnodes` hosts and waits for their end.

    The first SIGINT, SIGTERM or SIGHUP reaches each worker once, as SIGTERM, and all have the time they need to save; a second
    one kills them. After a death the group starts again up to `max_restarts` times, but not after a user's mistake.

    Args:
        command: arguments of this Python, such as `-m swiftlite train recipe.yaml`.
        output: folder of the run; `logs/rank-N.log` in it takes what ranks other than 0 print.
        node_rank: 0 for the host that `rdzv` names; None finds out by its name.
        rdzv: host:port where several hosts meet.

    Raises:
        RecipeError: when several hosts have nowhere to meet.
        SwiftliteError: what ended the run, with the rank where it happened and the exit code it has there.
        KeyboardInterrupt: after a signal, once the workers have ended.
    """
    if nnodes > 1 and rdzv is None:
        fix = "Give each host the same --rdzv HOST:PORT, one of them and a free port there."
        raise RecipeError(f"{nnodes} hosts need a place to meet", where="--nnodes", fix=fix)
    # One process a core is what OpenMP takes by default; several would fight for the cores.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    from swiftlite.dist import agent

    agent.run(
        command, output=output, nproc=nproc, nnodes=nnodes, node_rank=node_rank, rdzv=rdzv or "localhost:0", restarts=max_restarts
    )
