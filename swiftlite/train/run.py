"""A run: the plan, the built model, and what is kept while it trains."""

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swiftlite.data.loader import MicroBatch
from swiftlite.data.order import draw
from swiftlite.data.prefetch import Prefetcher
from swiftlite.data.streaming import Stream
from swiftlite.dist import checkpoint
from swiftlite.dist.checkpoint import Saved, Saving
from swiftlite.dist.launch import is_worker
from swiftlite.export import adapter
from swiftlite.export.trained import Trained
from swiftlite.models import fp8_gap, qera
from swiftlite.models.adapter_files import adapter_state
from swiftlite.models.blocks import unwrap_blocks
from swiftlite.models.build import build
from swiftlite.models.files import identity, open_weights
from swiftlite.objectives.protocol import Objective
from swiftlite.recipe.errors import RecipeError
from swiftlite.recipe.writing import dump_yaml
from swiftlite.train import reference
from swiftlite.train import state as states
from swiftlite.train.console import Console
from swiftlite.train.environment import environment
from swiftlite.train.metrics import Metrics, flops_per_token, peak_flops
from swiftlite.train.optim import make_optimizer, masters
from swiftlite.train.plan import Plan
from swiftlite.train.trackers import make_trackers
from swiftlite.train.trained import export_facts, public_overrides, trained_of


class Stop:
    """SIGINT and SIGTERM ask for a stop after the running step; a second one interrupts at once."""

    def __init__(self) -> None:
        self.asked = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._old[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, number: int, frame: Any) -> None:
        if self.asked and not is_worker():  # a launcher may pass one signal on twice
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)


class Run:
    """Everything the loop touches. Attributes that a checkpoint carries: step, counters, best."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self.plan, self.console, self.recipe, self.schedule = plan, console, plan.recipe, plan.schedule
        torch.manual_seed(self.recipe.seed)
        if self.recipe.train.full_determinism:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses to be deterministic
            torch.use_deterministic_algorithms(True)
        self.objective: Objective = plan.objective
        # Known before the model is built: it may say how the base was split.
        self._found = self._checkpoint()
        self.built, self.world = build(
            plan.files, self.recipe, plan.tokenizer,
            precision=plan.precision, strategy=plan.strategy, device=plan.device, checkpointing=plan.checkpointing,
            compiled=plan.compiled, saved=self._found,
        )  # fmt: skip
        if self.world.data_rank:  # ranks read different rows, and draw other numbers for them
            torch.manual_seed(draw(self.recipe.seed, self.world.data_rank))
        self.root: Any = self.built.root
        if kept := sorted(self.recipe.model.config_overrides.keys() - public_overrides(self.recipe).keys()):
            self.built.notes.append(f"model.config_overrides: {', '.join(kept)} is from the environment and goes into no export")
        first = torch.tensor([plan.train.samples[0].input_ids[: fp8_gap.TOKENS]], device=plan.device)
        if (gap := fp8_gap.note(self.root, self.built.family.inputs({"input_ids": first}))) is not None:
            self.built.notes.append(gap)
        if self.recipe.lora and self.recipe.lora.init == "qera":
            self._give_back()
        lr_ratio = self.recipe.lora.lr_ratio if self.recipe.lora else 1.0
        self.optimizer = make_optimizer(self.root, self.recipe.train, self.recipe.strategy.offload, lr_ratio)
        self.masters = masters(self.root, self.optimizer)
        self.scaler = torch.amp.GradScaler(plan.device.type, enabled=plan.precision.name == "fp16")
        self.step = 0
        self.counters = {"tokens": 0, "trained_tokens": 0, "skipped_steps": 0}
        self.best: dict[str, float] | None = None
        self.stop = Stop()
        wanted = self.recipe.checkpoint.async_save
        self._async = plan.device.type == "cuda" if wanted is None else wanted
        self._saving: Saving | None = None
        self._due = self.stopping = False
        self.saved_at = time.monotonic()
        self.last_eval: tuple[int, float] | None = None
        self._reached = False
        self._groups: Prefetcher | None = None
        self._restart_window()
        self._flops, self._peak = flops_per_token(self.root), peak_flops(plan.device)

    def _give_back(self) -> None:
        """Starts the adapters with what packing took. A checkpoint holds them, but not what preferences are compared with."""
        if self._found is not None and not getattr(self.objective, "keeps_reference", False):
            return
        rows = qera.sample(self.plan.train.samples)
        batches = [self.built.family.inputs({"input_ids": torch.tensor([row], device=self.plan.device)}) for row in rows]
        self.built.notes.append(qera.start(self.root, batches, open_weights(self.plan.files), self.plan.device))

    @property
    def checkpoints(self) -> Path:
        return self.plan.output / "checkpoints"

    def begin(self, checkpoint_bytes: int = 0) -> None:
        """Claims the output folder, resumes where asked, and writes what the run is made of.

        Args:
            checkpoint_bytes: space that one checkpoint takes.

        Raises:
            RecipeError: when the folder holds a run that is not to be resumed, or one with other fixed keys.
            DiskFullError: when the first checkpoint would not fit.
        """
        self.plan.refuse_second_run()
        reference.keep(self)
        output, found = self.plan.output, self._found
        if found:
            states.restore(self, found)
        if self.step < self.schedule.total and self.recipe.checkpoint.save_strategy != "no":
            checkpoint.require_space(self.checkpoints, checkpoint_bytes)
        self.metrics = Metrics(output / "metrics.jsonl", self.console, [], self.plan.device)
        if self.world.is_main:
            self._write_start()
        if found:
            self.console.line(f"resumed   from {found.folder} at step {self.step:,} of {self.schedule.total:,}")
        self._groups = Prefetcher(self.plan.loader, self.recipe.data.num_workers, self.schedule.total)
        self.console.begin(self.step, self.schedule.total)
        self._restart_window()

    def _write_start(self) -> None:
        """What the run is made of, in its folder; the trackers begin."""
        output = self.plan.output
        output.mkdir(parents=True, exist_ok=True)
        (output / "recipe.yaml").write_text(dump_yaml(self.recipe))
        about = environment() | {"model": identity(self.plan.files), "data": {"rows_sha256": self.plan.data_hash}}
        if self.plan.loaded.plugins:
            about["plugins"] = self.plan.loaded.hashes
        (output / "environment.json").write_text(json.dumps(about, indent=2))
        self._write_report()
        name = self.recipe.log.run_name or output.name
        flat = {k: v for k, v in states.flat(self.recipe).items() if isinstance(v, int | float | str | bool)}
        self.metrics.trackers += make_trackers(
            self.recipe.log.report_to, self.recipe.log.project or "swiftlite", name, output / "trackers", flat
        )
        self.metrics.cut(self.step)

    def _write_report(self) -> None:
        """data_report.json; that of a stream grows."""
        if isinstance(self.plan.loader, Stream):
            self.plan.reports["train"] = self.plan.loader.report()
        (self.plan.output / "data_report.json").write_text(json.dumps(self.plan.reports, indent=2, ensure_ascii=False))

    def _checkpoint(self) -> Saved | None:
        """The checkpoint to go on from, None where there is none."""
        wanted = self.recipe.checkpoint.resume
        if wanted is None:
            return None
        good, skipped = checkpoint.complete(self.checkpoints)
        if wanted == "auto":
            for folder, why in skipped.items():
                self.console.warn(f"{folder} is passed over: {why}")
            if not good:
                return None
            folder = good[-1]
        else:
            folder = Path(wanted)
        saved = Saved(folder)
        if good and (newest := checkpoint.step_of(good[-1]) or 0) > saved.meta["step"]:
            raise RecipeError(
                f"{self.plan.output} has checkpoints up to step {newest}, and would go on from step {saved.meta['step']}: "
                "the two histories would mix.", where="checkpoint.resume", fix="Choose another --output for the new one.",
            )  # fmt: skip
        for note in states.check_resumable(saved.meta["recipe"], states.flat(self.recipe, self.plan.loaded.hashes)):
            self.console.line(f"note: {note}")
        return saved

    def next_group(self) -> list[MicroBatch]:
        """The micro-batches of the coming step; the time that takes is logged."""
        began = time.perf_counter()
        assert self._groups is not None
        group = self._groups.group(self.step)
        self._waited += time.perf_counter() - began
        return group

    def to_model(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """A batch on the run's device, with what the family's forward wants beside ids."""
        self.world.pulse.beat(self.step)
        moved = {k: v.to(self.plan.device, non_blocking=True) for k, v in tensors.items()}
        return self.built.family.inputs(moved)

    def expect_all(self, gradients: Sequence[Tensor]) -> None:
        """Once, after the first backward pass: warns of trainable weights that it did not reach."""
        if not self._reached and len(gradients) < len(self.masters):
            left = [n for n, p in self.masters.items() if p.grad is None]
            what = f"{len(left)} trainable weights got no gradient in the first step, such as {left[0]}"
            self.console.warn(f"{what}: no trained token depends on them")
        self._reached = True

    def record(self, report: Any) -> None:
        """Counts a step and logs it when due. Rates are over the steps since the last log row."""
        self.counters["tokens"] += report.tokens
        self.counters["trained_tokens"] += report.trained_tokens
        self.counters["skipped_steps"] += report.skipped
        self._tokens += report.tokens
        memory = self.metrics.memory()
        if "allocated_gib" in memory and self.plan.device.type == "cuda":
            self.metrics.watch_growth(memory["allocated_gib"])
        if report.skipped:
            self.console.warn(f"step {self.step} was skipped: loss {report.loss:.4g}, gradient norm {report.grad_norm:.4g}")
        if not self.world.is_main:
            return
        elapsed = time.perf_counter() - self._clock
        rate = self._tokens / max(elapsed, 1e-9)
        self.console.advance(self.step, f"loss {report.loss:.4f}  {rate:,.0f} tok/s")
        if not self.schedule.log_due(self.step):
            return
        row = {
            "step": self.step,
            "epoch": self.schedule.epoch(self.step),
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "learning_rate": self.schedule.rate.at(self.step - 1),
            **report.metrics,
            "tokens_per_second": rate,
            "data_wait_s": self._waited,
            **self.counters,
            **memory,
        }
        if self._peak:
            row["mfu"] = rate * self._flops / (self._peak * self.world.size)
        self.metrics.write(row)
        shown = f"loss {report.loss:.4f}  norm {report.grad_norm:.3f}  rate {row['learning_rate']:.2e}  {rate:,.0f} tok/s"
        peak = f"  {memory['peak_memory_gib']:.1f} GiB" if memory else ""
        self.console.line(f"step {self.step:>6,}/{self.schedule.total:,}  {shown}{peak}")
        self._restart_window()

    def _restart_window(self) -> None:
        """Rates are over the steps since the last log row; evaluating and saving are not training time."""
        self._clock, self._tokens, self._waited = time.perf_counter(), 0, 0.0

    def record_eval(self, row: dict[str, Any]) -> None:
        """Logs an evaluation and remembers the best step by checkpoint.metric_for_best_model."""
        self.last_eval = (self.step, row[self.recipe.checkpoint.metric_for_best_model])
        if self.world.is_main:
            self.metrics.write({"step": self.step, "epoch": self.schedule.epoch(self.step), **row})
        self.console.line(f"eval at step {self.step:,}  " + "  ".join(f"{k} {v:.4f}" for k, v in row.items()))
        self._restart_window()

    def agree(self) -> None:
        """Makes all ranks see a signal or the save that the clock asks for at the same step."""
        minutes = self.recipe.checkpoint.save_minutes
        timed = self.recipe.checkpoint.save_strategy != "no" and minutes and time.monotonic() - self.saved_at > 60 * minutes
        stop, due = self.world.sum(self.stop.asked, bool(timed) and self.world.is_main)
        self.stopping, self._due = stop > 0, due > 0

    def save_due(self) -> bool:
        return self.schedule.save_due(self.step) or self._due or self.stopping

    def save(self) -> None:
        """Writes a checkpoint, then removes old ones, never the best."""
        if (
            self.last_eval is not None
            and self.last_eval[0] == self.step
            and (self.best is None or self.last_eval[1] < self.best["value"])
        ):
            self.best = {"step": self.step, "value": self.last_eval[1]}
        began = time.monotonic()
        self.world.pulse.rest()
        if self.world.is_main:
            self._write_report()
        self.settle_save()
        self._saving = checkpoint.save(
            self.checkpoints, self.step, states.capture(self), self._write_adapter, world=self.world, background=self._async
        )
        what = "saving    {} in the background, copied in" if self._async else "saved     {} in"
        self.console.line(f"{what.format(self._saving.final)} {time.monotonic() - began:.1f} s")
        if not self._async:
            self.settle_save()
        self.saved_at = time.monotonic()
        self._restart_window()

    def settle_save(self) -> None:
        """Waits for the checkpoint that is being written, if one is, then removes old ones."""
        self.world.pulse.rest()
        saving, self._saving = self._saving, None
        if saving is None:
            return
        saving.wait()
        if self.world.is_main:
            best = int(self.best["step"]) if self.best else None
            checkpoint.rotate(self.checkpoints, self.recipe.checkpoint.save_total_limit, best)

    def _write_adapter(self, folder: Path) -> None:
        """The adapter beside a checkpoint's tensors, as the exporter writes it: with tokenizer and template, ready for use."""
        if self.built.peft is None:
            return
        if self.world.is_main:
            (folder / "adapter").mkdir()
            adapter.write(self.trained(), folder / "adapter", self.recipe.export)
        else:
            adapter_state(self.built.peft)  # whose parts the first rank gathers

    def trained(self) -> Trained:
        """What the exporters need of the model as it is now."""
        plan = self.plan
        return trained_of(self.built, plan.files, plan.tokenizer, self.recipe, plan.precision, export_facts(plan))

    def finish(self) -> None:
        """Ends the bar, the trackers and the writing of a checkpoint; a second call does nothing."""
        if self._groups is not None:
            self._groups.close()
            if self.world.is_main:
                self._write_report()
        self._groups = None
        self.console.end()
        self.metrics.close()
        self.settle_save()

    def release(self) -> None:
        """Frees what only training needed, before an export loads a second model."""
        unwrap_blocks(self.root, self.built.blocks)
        del self.optimizer, self.masters
        self.root.zero_grad()
