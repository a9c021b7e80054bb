"""The training loop. When things happen stands in `schedule`; what a step learns stands in the objective."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from swiftlite.data.loader import MicroBatch
from swiftlite.data.render import IGNORE
from swiftlite.dist.gradients import clip, global_norm
from swiftlite.dist.shard import begin_micro_batch, reshard
from swiftlite.recipe.errors import SwiftliteError
from swiftlite.train.offload import OffloadedOptimizer
from swiftlite.train.run import Run


@dataclass(frozen=True)
class StepReport:
    """One optimizer step: the objective's mean loss and metrics, gradient norm before clipping, token counts of all ranks."""

    loss: float
    grad_norm: float
    tokens: int
    trained_tokens: int
    skipped: bool
    metrics: dict[str, float] = field(default_factory=dict)


class NonFiniteError(SwiftliteError):
    """A loss or gradient was NaN or infinite."""


def fit(run: Run) -> None:
    """Trains until the schedule ends or a signal asks to stop; a stop saves first.

    Raises:
        NonFiniteError: with `train.on_nonfinite: stop`; nothing is saved after the bad step.
        KeyboardInterrupt: after a signal, once the checkpoint is written.
    """
    if run.step == 0 and run.recipe.eval.eval_on_start and run.plan.evals:
        evaluate(run)
    while run.step < run.schedule.total:
        report = train_step(run, run.next_group(), run.schedule.rate.at(run.step))
        run.step += 1
        run.record(report)
        if run.schedule.eval_due(run.step) and run.plan.evals:
            evaluate(run)
        run.agree()
        if run.save_due():
            run.save()
        if run.stopping:
            raise KeyboardInterrupt


def train_step(run: Run, group: Sequence[MicroBatch], rate: float) -> StepReport:
    """One optimizer step over its micro-batches. The loss is divided once, by the step's weight over all ranks."""
    objective, world, scaler = run.objective, run.world, run.scaler
    weight = world.sum(sum(objective.weight(micro.tensors) for micro in group))[0]
    sums = []
    for number, micro in enumerate(group, 1):
        begin_micro_batch(run.root, run.plan.strategy, last=number == len(group))
        made = objective.loss_sum(run.root, run.to_model(micro.tensors)).reshape(-1)
        # FSDP averages gradients over the data ranks; the sum over ranks is what is wanted.
        scaler.scale(made[0] * (world.data_size / max(weight, 1))).backward()
        sums.append(made.detach())
        if isinstance(run.optimizer, OffloadedOptimizer):
            run.optimizer.collect()
    scaler.unscale_(run.optimizer)
    gradients = [p.grad for p in run.masters.values() if p.grad is not None]
    run.expect_all(gradients)
    norm = global_norm(gradients)
    tokens = sum(int(micro.tensors["attention_mask"].sum()) for micro in group)
    trained = sum(int((micro.tensors["labels"] != IGNORE).sum()) for micro in group)
    totals = (sum(column) for column in zip(*torch.stack(sums).tolist(), strict=True))
    tokens, trained, *means = world.sum(tokens, trained, *totals)
    loss, *metrics = (total / max(weight, 1) for total in means)
    grad_norm = float(norm)
    # fp16 gradients overflow now and then; the scaler skips such a step and lowers its scale.
    overflow = scaler.is_enabled() and not math.isfinite(grad_norm) and math.isfinite(loss)
    bad = not (math.isfinite(loss) and math.isfinite(grad_norm))
    if bad and not overflow and run.recipe.train.on_nonfinite == "stop":
        raise _blame(run, group, sums, loss, grad_norm)
    if bad and not scaler.is_enabled():
        run.optimizer.zero_grad()
    else:
        if run.recipe.train.max_grad_norm and not bad:
            clip(gradients, norm, run.recipe.train.max_grad_norm)
        for parameters in run.optimizer.param_groups:
            parameters["lr"] = rate * parameters["lr_ratio"]
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
    named = dict(zip(getattr(objective, "metrics", ()), metrics, strict=True))
    return StepReport(loss, grad_norm, int(tokens), int(trained), bad, named)


def _blame(run: Run, group: Sequence[MicroBatch], sums: list[Tensor], loss: float, norm: float) -> NonFiniteError:
    """Says which step and rows were not finite, on all ranks the same."""
    culprits = [m for m, v in zip(group, sums, strict=True) if not bool(v.isfinite().all())]
    rows = run.world.gather([s for m in culprits for s in m.sources]) or run.world.gather([s for m in group for s in m.sources])
    shown = ", ".join(rows[:8]) + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")
    what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm}"
    return NonFiniteError(
        f"{what} at step {run.step + 1}, in the rows {shown}.",
        fix="Lower train.learning_rate, use train.precision bf16 or fp32, or set train.on_nonfinite: skip.",
    )


def evaluate(run: Run) -> dict[str, float]:
    """The objective's mean loss of each evaluation set: one number a set, the same for any batch size."""
    run.root.eval()
    sums: dict[str, tuple[float, float]] = {}
    with torch.no_grad():
        for name, loader in run.plan.evals.items():
            total = count = 0.0
            for step in range(loader.steps_per_epoch):
                for micro in loader.group(step):
                    total += float(run.objective.loss_sum(run.root, run.to_model(micro.tensors)).reshape(-1)[0])
                    count += run.objective.weight(micro.tensors)
            total, count = run.world.sum(total, count)
            sums[name] = (total, count)
    reshard(run.root)
    run.root.train()
    row: dict[str, Any] = {"eval_loss": sum(t for t, _ in sums.values()) / max(1, sum(c for _, c in sums.values()))}
    if len(sums) > 1:
        row |= {f"eval_loss/{name}": t / max(1, c) for name, (t, c) in sums.items()}
    run.record_eval(row)
    return row
