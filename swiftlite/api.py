"""swiftlite from Python: what the verbs do, as functions for notebooks and scripts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from swiftlite.data.report import dump as dump_rows
from swiftlite.data.report import preview, table
from swiftlite.models.sources import download_model
from swiftlite.recipe.errors import ModelError
from swiftlite.recipe.load import Loaded, load_recipe
from swiftlite.train import session
from swiftlite.train.console import Console

__all__ = ["chat", "check", "download", "evaluate", "export", "generate", "load_recipe", "train"]


def check(loaded: Loaded, *, dump: str | Path | None = None, quiet: bool = False) -> dict[str, Any]:
    """Everything that can be known before step 1, on a CPU, without weights. Prints it, and returns it for machines.

    Args:
        dump: file for one JSON line a training row, exactly as the model will get it.
    """
    console = Console(quiet=quiet)
    plan = session.check(loaded, console)
    for name, report in plan.reports.items():
        console.line(f"\n{name} rows\n{table(report)}")
    console.line("\n" + preview(plan.train.samples, plan.tokenizer, colour=console.rich.is_terminal))
    if dump is not None:
        dump_rows(plan.train.samples, dump)
    return {
        "rows": len(plan.train.samples),
        "steps": plan.schedule.total,
        "steps_per_epoch": plan.schedule.per_epoch,
        "warmup_steps": plan.schedule.rate.warmup,
        "learning_rate": plan.schedule.rate.peak,
        "reports": plan.reports,
        "notes": plan.notes,
    }


def train(loaded: Loaded) -> Path:
    """Trains, evaluates, saves and exports. Returns the run's folder.

    Raises:
        SwiftliteError: with its exit code.
        KeyboardInterrupt: after a signal, once a checkpoint is saved.
    """
    return session.train(loaded, Console())


def export(
    run: str | Path,
    *,
    format: str,
    dtype: str = "auto",
    output: str | Path | None = None,
    overwrite: bool = False,
    device: str = "auto",
) -> Path:
    """Writes and verifies one format from a run or any of its checkpoints. Returns the folder that holds it.

    Raises:
        ModelError: the folder is no run, or the export differs from what was trained.
    """
    run = Path(run)
    root = run.parent.parent if run.parent.name == "checkpoints" else run
    if not (root / "recipe.yaml").is_file():
        raise ModelError(
            "no run is in this folder: it has no recipe.yaml",
            where=run,
            fix="Name the output folder of a run, or a checkpoint in it.",
        )
    loaded = load_recipe(str(root / "recipe.yaml"), [f"train.device={device}"])
    section = loaded.recipe.export.model_copy(update={"formats": [format], "dtype": dtype, "overwrite": overwrite})
    loaded = replace(loaded, recipe=loaded.recipe.model_copy(update={"export": section, "output": str(root)}))
    target = Path(output) if output is not None else root
    session.export(loaded, run, target, Console())
    return target / format


def download(model: str, *, hub: str = "hf", revision: str | None = None) -> Path:
    """Fetches a model into the cache and returns its folder."""
    return download_model(model, hub_name=hub, revision=revision)


def evaluate(target: str, data: str, *, device: str = "auto", **options: Any) -> dict[str, Any]:
    """Loss and exact match of a run, adapter or model on rows; see `swiftlite.infer.evaluate.evaluate`."""
    from swiftlite.infer import evaluate as evaluating
    from swiftlite.infer.load import load_target

    return evaluating.evaluate(load_target(target, device=device), data, **options)


def generate(
    target: str, prompts: str | Path | Sequence[Any], *, output: str | Path | None = None, device: str = "auto", **options: Any
) -> list[str]:
    """Answers prompts: a JSONL file, or messages or texts. Writes `output`, or prints what came from a file."""
    from swiftlite.infer import generate as generating
    from swiftlite.infer.load import load_target

    loaded = load_target(target, device=device)
    if not isinstance(prompts, str | Path):
        return [answer.text for answer in generating.generate(loaded, prompts, **options)]
    rows = generating.read_prompts(prompts)
    answers = generating.generate(loaded, rows, **options)
    generating.write_answers(output, rows, answers)
    return [answer.text for answer in answers]


def chat(target: str, *, device: str = "auto", **options: Any) -> None:
    """Talks on the terminal; see `swiftlite.infer.chat.chat`."""
    from swiftlite.infer import chat as chatting
    from swiftlite.infer.load import load_target

    chatting.chat(load_target(target, device=device), **options)
