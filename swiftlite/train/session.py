"""One call trains, evaluates, saves and exports."""

from pathlib import Path

from swiftlite.data.report import table as rows_table
from swiftlite.dist import checkpoint
from swiftlite.dist.world import leave
from swiftlite.export import report
from swiftlite.export.folder import check_target
from swiftlite.export.run import check as check_export
from swiftlite.export.run import export_all
from swiftlite.models import adapters
from swiftlite.recipe.errors import ModelError
from swiftlite.recipe.load import Loaded
from swiftlite.train import state as states
from swiftlite.train.console import Console, calm_libraries
from swiftlite.train.loop import fit
from swiftlite.train.memory import plan_memory
from swiftlite.train.plan import make_plan
from swiftlite.train.run import Run


def train(loaded: Loaded, console: Console) -> Path:
    """Runs a recipe from data to verified exports. Returns the output folder.

    Raises:
        SwiftliteError: with its exit code.
        KeyboardInterrupt: after a signal, once a checkpoint is saved.
    """
    calm_libraries()
    plan = make_plan(loaded)
    recipe = plan.recipe
    assert recipe.export.formats is not None
    for name in recipe.export.formats:
        check_target(plan.output / name, recipe.export.overwrite, plan.files.folder)
    # Rows that were dropped or cut are told here too; all of them stand in data_report.json.
    lost = [rows_table({**r, "notes": []}, name) for name, r in plan.reports.items() if r["dropped"] or r["cut"]]
    for text in [*plan.lines(), *lost, *(f"note: {n}" for n in plan.notes)]:
        console.line(text)
    try:
        run = Run(plan, console)
        memory = plan_memory(plan, run.built)
        for text in [*adapters.coverage(run.root, run.built.family).lines(), *memory.lines()]:
            console.line(text)
        for note in [*run.built.notes, memory.warning()]:
            if note:
                console.line(f"note: {note}")
        check_export(run.trained(), recipe.export.formats, recipe.export, plan.output)
        weights = memory.trained * (2 if run.built.peft else 1)  # adapters lie in a checkpoint in both their forms
        run.begin(weights + (0 if recipe.checkpoint.save_only_model else memory.optimizer))
        console.log_to(plan.output / "train.log")
        with run.stop:
            try:
                fit(run)
            finally:
                run.finish()
        run.release()
        write_exports(run, plan.output)
    finally:
        leave()
    return plan.output


def write_exports(run: Run, output: Path) -> None:
    """Writes and verifies the recipe's formats below `output`, and prints the verdicts."""
    section = run.recipe.export
    assert section.formats is not None
    run.root.eval()
    for part in export_all(run.trained(), section.formats, section, output):
        for text in report.lines(part):
            run.console.line(text)


def export(loaded: Loaded, folder: Path, output: Path, console: Console) -> None:
    """Exports a run, or one of its checkpoints, in the formats of `loaded`, which is the run's own recipe.yaml but for `export`.

    Raises:
        ModelError: when there is no complete checkpoint.
    """
    saved = folder
    if checkpoint.step_of(folder) is None:
        good, _ = checkpoint.complete(folder / "checkpoints")
        if not good:
            raise ModelError("there is no complete checkpoint to export", where=folder)
        saved = good[-1]
    calm_libraries()
    state = checkpoint.read(saved)
    plan = make_plan(loaded)
    try:
        run = Run(plan, console)
        states.load_trainable(run.root, dict(state.tensors["trainable"]), saved)
        console.line(f"exporting {saved}")
        write_exports(run, output)
    finally:
        leave()
