"""`swiftlite selftest`: the promise "same numbers everywhere", tried on this machine with a tiny model.

One process is the reference. The same rows are trained under every strategy and many ways to split a step, by workers that stay
alive over all cases, and what they learn is compared. Loads no torch by itself.
"""

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from swiftlite.dist import launch, worker
from swiftlite.recipe import tables
from swiftlite.recipe.errors import RecipeError, SwiftliteError

if TYPE_CHECKING:
    from swiftlite.train.console import Console

# Largest relative differences: of losses and norms of all steps, of the first step's gradients and of the last weights by tensor.
LIMITS = {"loss": 1e-5, "norm": 1e-5, "gradients": 5e-6, "weights": 1e-4}
STEPS, SAVED_AT = 4, 2
# Files of the folder in which parent and workers meet.
SPEC, RESULTS, RUNNING = "spec.json", "results.json", "running"
NAME_WIDTH = 70
# Characters of what a worker said at its end.
LOG_END = 4000


@dataclass(frozen=True)
class Case:
    """A way to train the tiny model that must learn what one process learns.

    Attributes:
        reference: name of the run of one process.
        keys: of the recipe, by path, with their values.
        resumed: keys of a second run, which goes on from the first one's checkpoint of step `at`. Its exports are read again.
    """

    name: str
    reference: str
    keys: Mapping[str, Any]
    resumed: Mapping[str, Any] = field(default_factory=dict)
    at: int = SAVED_AT


@dataclass(frozen=True)
class Result:
    """Largest differences of a case by the keys of LIMITS, None for what it does not show; and the tensors where they are."""

    name: str
    differences: Mapping[str, float | None]
    tensors: Mapping[str, str] = field(default_factory=dict)

    @property
    def faults(self) -> list[str]:
        """What is too large."""
        found = []
        for key, value in self.differences.items():
            if value is not None and not value <= LIMITS[key]:
                at = f" in {self.tensors[key]}" if key in self.tensors else ""
                found.append(f"{key} {value:.1e} apart{at}, allowed {LIMITS[key]:.0e}")
        return found


@dataclass(frozen=True)
class Setting:
    """Where the cases run; `rows` in the data, `batch` of a step. An epoch's last step is short: a rank has no rows in it."""

    size: int
    device: str

    @property
    def batch(self) -> int:
        return 4 * self.size

    @property
    def rows(self) -> int:
        return self.batch + max(1, self.size - 1)

    @property
    def words(self) -> str:
        where = f"{self.size} GPU{'s' * (self.size > 1)}" if self.device == "cuda" else "the CPU"
        return f"{self.size} process{'es' * (self.size > 1)} on {where}"


def setting(nproc: int | None) -> Setting:
    """As many processes as there are GPUs, or as wanted; on the CPU where there are fewer GPUs, two by default."""
    import torch

    gpus = torch.cuda.device_count()  # asks the driver's library: CUDA is not initialised
    size = nproc or gpus or 2
    return Setting(size, "cuda" if size <= gpus else "cpu")


def references(where: Setting, folder: Path) -> dict[str, dict[str, Any]]:
    """The runs of one process, each with the rows of a step in one forward pass: name -> keys."""
    one: dict[str, Any] = {"strategy.name": "none"}
    # Batch sizes count packs where rows are packed: with all rows in each step they are the same rows.
    all_rows = {"train.global_batch_size": where.rows, "train.per_device_train_batch_size": where.rows}
    whole = {"train.per_device_train_batch_size": where.batch}
    return {
        "full": one | whole,
        "lora": one | whole | adapter(folder),
        "full, all rows": one | all_rows,
        "lora, all rows": one | all_rows | adapter(folder),
    }


def adapter(folder: Path) -> dict[str, Any]:
    return {"model.adapter": str(folder / "adapter")}


def cases(where: Setting, folder: Path) -> list[Case]:
    """Every strategy with both methods, and every kind of split, checkpointing, offload and packing at least once."""
    methods: dict[str, dict[str, Any]] = {"full": {}, "lora": adapter(folder)}
    # Lengths without a common divisor, and odd ones, so that both methods meet all of them.
    micro, checkpointing = cycle((1, 2, 3, 4, 2)), cycle(("none", "full", "selective"))
    found = []

    def add(strategy: str, method: str, name: str = "", reference: str = "", **keys: Any) -> Case:
        size, kept = next(micro), next(checkpointing)
        given = {"strategy.name": strategy} | _group(strategy, where) | methods[method]
        given |= {"train.per_device_train_batch_size": size, "train.gradient_checkpointing": kept}
        given |= {key.replace("__", "."): value for key, value in keys.items()}
        passes = [f"micro-batch {size}"] if not reference else []
        extra = [name] * bool(name) + [f"{kept} checkpointing"] * (kept != "none")
        case = Case(", ".join([strategy, method, *passes, *extra]), reference or method, given)
        found.append(case)
        return case

    for strategy, row in tables.STRATEGIES.items():
        if strategy != "none" and row.plugin is None:  # a recipe's own rows are not known to the workers
            add(strategy, "full")
            add(strategy, "lora")
    add("fsdp", "full", "offload params", strategy__offload="params")
    add("zero3", "lora", "offload params", strategy__offload="params")
    add("hsdp", "full", "offload optimizer", strategy__offload="optimizer")
    add("fsdp", "lora", "offload optimizer", strategy__offload="optimizer")
    for strategy, method in (("fsdp", "full"), ("ddp", "lora")):
        sizes = {"train__global_batch_size": where.rows, "train__per_device_train_batch_size": 1}
        add(strategy, method, "packing", f"{method}, all rows", data__packing=True, **sizes)
    add("zero2", "full", "padding-free", data__padding_free=True)
    found.append(_resumed("fsdp", "ddp", "full", "merged", where, methods))
    found.append(_resumed("zero1", "hsdp", "lora", "adapter", where, methods))
    return found


def _group(strategy: str, where: Setting) -> dict[str, Any]:
    """Ranks of a group of hsdp: as many as leave more than one group, where ranks can be divided so."""
    divisors = [n for n in range(1, where.size // 2 + 1) if where.size % n == 0]
    return {"strategy.shard": max(divisors, default=1)} if strategy == "hsdp" else {}


def _resumed(first: str, second: str, method: str, kind: str, where: Setting, methods: Mapping[str, dict[str, Any]]) -> Case:
    saved = methods[method] | {"strategy.name": first, "checkpoint.save_strategy": "steps", "checkpoint.save_steps": SAVED_AT}
    going_on = methods[method] | {"strategy.name": second, "train.per_device_train_batch_size": 2} | _group(second, where)
    name = f"{first}, {method}, saved at step {SAVED_AT} and resumed as {second}"
    return Case(name, method, saved, going_on | {"export": [kind]})


def heading() -> str:
    """The first two lines of the table."""
    keys, limits = "".join(f"{key:>11}" for key in LIMITS), "".join(f"{limit:>11.0e}" for limit in LIMITS.values())
    return f"{'largest relative difference':<{NAME_WIDTH}}{keys}\n{'allowed':<{NAME_WIDTH}}{limits}"


def line(result: Result) -> str:
    """A row of the table."""
    values = "".join(f"{'-' if v is None else f'{v:.1e}':>11}" for v in result.differences.values())
    return f"{result.name:<{NAME_WIDTH}}{values}  {'FAIL' if result.faults else 'ok'}"


def selftest(nproc: int | None, console: "Console") -> dict[str, Any]:
    """Runs the cases, prints the table, and returns it for machines; see `swiftlite.api.selftest`.

    Raises:
        RecipeError: under a launcher, whose processes this does not know to use.
        SwiftliteError: a case did not come to its end.
    """
    if launch.is_worker():
        fix = "Start `swiftlite selftest --nproc N` by itself."
        raise RecipeError("selftest starts processes of its own, and a launcher has started this one", where="launcher", fix=fix)
    began, where = time.perf_counter(), setting(nproc)
    console.line(f"selftest with {where.words}: a tiny Llama, {STEPS} steps of AdamW in fp32, against one process")
    sys.stdout.flush()
    with _interruptible(), TemporaryDirectory(prefix="swiftlite-selftest-") as name:
        folder = Path(name)
        ask(folder, where, cases(where, folder), quiet=console.quiet)
        with _compiling_in(folder / "compiled"):
            _work(folder, where)
        results = answers(folder)
    failed = [f"{result.name.strip()}: {'; '.join(result.faults)}" for result in results if result.faults]
    seconds = time.perf_counter() - began
    console.line(f"{len(results) - len(failed)} of {len(results)} rows are within what is allowed, in {seconds:.0f} s")
    return {
        **asdict(where),
        "steps": STEPS,
        "allowed": LIMITS,
        "cases": [_as_data(result) for result in results],
        "failed": failed,
        "seconds": round(seconds, 1),
    }


def ask(folder: Path, where: Setting, wanted: Sequence[Case], quiet: bool) -> None:
    """Writes down for the workers what they are to do in `folder`."""
    spec = asdict(where) | {"rows": where.rows, "batch": where.batch, "steps": STEPS, "quiet": quiet}
    spec |= {"references": references(where, folder), "cases": [asdict(case) for case in wanted]}
    (folder / SPEC).write_text(json.dumps(spec))


def answers(folder: Path) -> list[Result]:
    """What the workers found."""
    return [Result(**result) for result in json.loads((folder / RESULTS).read_text())]


def _as_data(result: Result) -> dict[str, Any]:
    """JSON has no infinity: its name stands for it."""
    shown = {k: str(v) if v is not None and not math.isfinite(v) else v for k, v in result.differences.items()}
    return {"name": result.name.strip(), "differences": shown, "tensors": dict(result.tensors), "ok": not result.faults}


def _work(folder: Path, where: Setting) -> None:
    """Runs the workers to their end; where one process is enough, this one."""
    try:
        if where.size == 1:
            from swiftlite.train import comparing

            comparing.work(folder)
        else:
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns of its own affairs
            launch.launch(["-m", "swiftlite.train.selftest", str(folder)], output=folder / "workers", nproc=where.size)
    except SwiftliteError as error:
        running = folder / RUNNING
        case = f"case '{running.read_text()}'" if running.exists() else None
        told = SwiftliteError(error.what, where=", ".join(text for text in (case, error.where) if text) or None)
        for log in sorted(folder.glob("workers/logs/*.log")):  # they go with the folder
            told.add_note(f"{log.name}: {log.read_text(errors='replace')[-LOG_END:]}")
        raise told from error


@contextmanager
def _compiling_in(folder: Path) -> Iterator[None]:
    """Torch keeps compiled kernels there, and not in a folder that stays, unless it was told where."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    if name in os.environ:
        yield
        return
    os.environ[name] = str(folder)
    try:
        yield
    finally:
        os.environ.pop(name, None)


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end as Ctrl-C does, so that no file and no process stays behind. Handlers are put back at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    old = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in old.items():
        if handler is signal.SIG_DFL:
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def main() -> None:
    """A worker: `python -m swiftlite.train.selftest FOLDER`."""
    folder, code = Path(sys.argv[1]), 0
    worker.hush(folder / "workers")
    try:
        from swiftlite.train import comparing

        comparing.work(folder)
    except KeyboardInterrupt as error:
        code = 130
        worker.report(error, code)
    except Exception as error:
        code = getattr(error, "exit_code", 1)
        worker.report(error, code)
    sys.stdout.flush()
    os._exit(code)  # what is left of a broken group may hang at the end of the interpreter


if __name__ == "__main__":
    main()
