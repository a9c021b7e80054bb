"""What an objective keeps of the model that training starts from: a number for each row, so that no second model is held."""

from typing import Any

import torch

from swiftlite.data.loader import SAMPLES, Loader
from swiftlite.dist.shard import reshard
from swiftlite.objectives.protocol import REFERENCE


def keep(run: Any) -> None:
    """Asks the objective about every training and evaluation row, where it wants that, and hands the answers to the loaders.

    To be called while the model is as it was built, so in a resumed run before the checkpoint is read: the numbers are the same
    in every start, and need not be saved.
    """
    if not getattr(run.objective, "keeps_reference", False):
        return
    loaders = [run.plan.loader, *run.plan.evals.values()]
    pairs = sum(len(loader.samples) for loader in loaders) // SAMPLES["pairs"]
    run.console.line(f"reference of {pairs:,} pairs: the model as it is before training")
    for loader in loaders:
        loader.beside[REFERENCE] = _of(run, loader)
    reshard(run.root)


def _of(run: Any, loader: Loader) -> torch.Tensor:
    """The reference of each sample [samples], fp32, gathered from all ranks."""
    world, size = run.world, loader.micro_batch
    passes = Loader(
        loader.samples, seed=0, order="sequential", rows_per_step=size * world.data_size, micro_batch=size, pad_id=loader.pad_id,
        eats=loader.eats, data_rank=world.data_rank, data_size=world.data_size,
    )  # fmt: skip
    values = torch.zeros(len(loader.samples))
    for step in range(passes.steps_per_epoch):
        mine = [i for unit in passes.units_of(step)[world.data_rank :: world.data_size] for i in unit]
        (micro,) = passes.group(step)
        values[mine] = run.objective.reference(run.root, run.to_model(micro.tensors))[: len(mine)].cpu()
    return torch.tensor(world.sum(*values.tolist()))
