"""When: which steps log, evaluate and save, and the learning rate of each."""

import math
from dataclasses import dataclass

from swiftlite.recipe.schema import Recipe


def _count(value: float, total: int) -> int:
    """Steps from a whole number, or from a share (< 1) of all steps."""
    return max(1, math.ceil(value * total)) if value < 1 else int(value)


@dataclass(frozen=True)
class Rate:
    """The learning rate: linear warm-up to `peak`, then the shape named by `kind`, down to `peak * floor`."""

    kind: str
    peak: float
    total: int
    warmup: int
    floor: float

    def at(self, step: int) -> float:
        """Learning rate of step `step`, counted from 0. The last warm-up step has the peak, and none has a rate of 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.total - self.warmup)
        match self.kind:
            case "constant":
                shape = 1.0
            case "linear":
                shape = 1 - done
            case "cosine":
                shape = 0.5 * (1 + math.cos(math.pi * done))
            case _:  # warmup_stable_decay: the last tenth falls linearly
                shape = min(1.0, (1 - done) * 10)
        return self.peak * (self.floor + (1 - self.floor) * shape)


@dataclass(frozen=True)
class Schedule:
    """Answers "when". Steps are counted from 1: `step` is the number of optimizer steps done."""

    total: int
    per_epoch: int
    log_every: int
    eval_every: int
    save_every: int
    rate: Rate

    @classmethod
    def of(cls, recipe: Recipe, steps_per_epoch: int | None) -> "Schedule":
        """The schedule of a recipe whose defaults are resolved; 0 stands for never.

        Args:
            steps_per_epoch: None: not known, as of a stream; the run is one epoch then, and needs train.max_steps.
        """
        train, total = recipe.train, recipe.train.max_steps
        total = total or max(1, math.ceil(recipe.train.num_train_epochs * (steps_per_epoch or 0)))
        steps_per_epoch = steps_per_epoch or total

        def every(strategy: str | None, steps: float | None) -> int:
            return {"epoch": steps_per_epoch, "steps": _count(steps or 1, total)}.get(strategy or "no", 0)

        warmup = min(total, _count(train.warmup_steps, total)) if train.warmup_steps else 0
        assert train.learning_rate is not None
        return cls(
            total,
            steps_per_epoch,
            recipe.log.logging_steps,
            every(recipe.eval.eval_strategy, recipe.eval.eval_steps),
            every(recipe.checkpoint.save_strategy, recipe.checkpoint.save_steps),
            Rate(train.lr_scheduler_type, train.learning_rate, total, warmup, train.min_lr_ratio),
        )

    def epoch(self, step: int) -> float:
        return step / self.per_epoch

    def log_due(self, step: int) -> bool:
        return step == 1 or step % self.log_every == 0 or step == self.total

    def eval_due(self, step: int) -> bool:
        return bool(self.eval_every) and (step % self.eval_every == 0 or step == self.total)

    def save_due(self, step: int) -> bool:
        return bool(self.save_every) and (step % self.save_every == 0 or step == self.total)
