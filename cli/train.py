"""`swiftlite train`."""

from pathlib import Path
from typing import Annotated

import typer

from swiftlite.cli.options import Debug, Overrides, RecipeName, load


def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    strategy: Annotated[str | None, typer.Option(help="Parallel strategy; strategy=... of the recipe.")] = None,
    resume: Annotated[str | None, typer.Option(help="auto (newest complete checkpoint), or a checkpoint folder.")] = None,
    output: Annotated[str | None, typer.Option(help="Folder of the run.")] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Processes on this host; default one for each GPU, else one.")] = None,
    nnodes: Annotated[int, typer.Option(min=1, help="Hosts; start the same command on each.")] = 1,
    node_rank: Annotated[
        int | None, typer.Option(min=0, help="0 on the host that --rdzv names, where it does not know itself by it.")
    ] = None,
    rdzv: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where several hosts meet: one of them.")] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="Times to go on from the newest checkpoint after a process died.")] = 0,
    debug: Debug = False,
) -> None:
    """Train, evaluate, save and export.

    On several GPUs one process for each. Also runs under torchrun, accelerate launch and srun, which bring their own processes.
    """
    from swiftlite.dist import launch, worker

    flags = {"strategy": strategy, "checkpoint__resume": resume, "output": output}
    loaded = load(recipe, overrides, **flags)
    folder = Path(str(loaded.recipe.output))
    if launch.is_worker():
        worker.hush(folder)
        if launch.start():
            from swiftlite.dist.checkpoint import complete

            if complete(folder / "checkpoints")[0]:
                loaded = load(recipe, overrides, **flags | {"checkpoint__resume": "auto"})
    else:
        nproc = launch.processes(nproc, loaded.recipe.train.device, loaded.recipe.strategy.name)
        if nproc > 1 or nnodes > 1 or max_restarts:
            given = {"--strategy": strategy, "--resume": resume, "--output": output}
            command = ["-m", "swiftlite", "train", recipe, *(overrides or [])]
            command += [f"{flag}={value}" for flag, value in given.items() if value is not None]
            launch.launch(
                [*command, "--debug"] if debug else command,
                output=folder,
                nproc=nproc,
                nnodes=nnodes,
                node_rank=node_rank,
                rdzv=rdzv,
                max_restarts=max_restarts,
            )
            return
    from swiftlite import api  # behind the recipe: its mistakes are told before torch is loaded

    api.train(loaded)
