"""What a target's name stands for: a run, one of its checkpoints, an adapter, or a model."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from swiftlite.dist import checkpoint
from swiftlite.recipe.errors import ModelError, SwiftliteError
from swiftlite.recipe.load import load_recipe
from swiftlite.recipe.schema import Recipe

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"


@dataclass(frozen=True)
class Place:
    """Where the weights are.

    Attributes:
        kind: model (anything that `resolve_model` takes), adapter (a peft folder), or full (a checkpoint of full fine-tuning).
        name: the folder, or the name of the model.
        recipe: of the run that the folder belongs to, where there is one.
    """

    kind: Literal["model", "adapter", "full"]
    name: str
    recipe: Recipe | None = None
    notes: list[str] = field(default_factory=list)


def locate(target: str) -> Place:
    """Finds what to load; a run gives its merged folder, else its adapter, else its newest complete checkpoint.

    Raises:
        ModelError: a run without anything to load, or a checkpoint that is not complete.
    """
    path = Path(target).expanduser()
    if not path.is_dir():
        return Place("model", target)
    if (path / ADAPTER_CONFIG).is_file():
        return _with_recipe("adapter", path)
    if (path / CONFIG).is_file():
        return _with_recipe("model", path)
    if checkpoint.step_of(path) is not None:
        return _checkpoint(path)
    if (path / "recipe.yaml").is_file() or (path / "merged" / CONFIG).is_file() or (path / "adapter" / ADAPTER_CONFIG).is_file():
        return _run(path)
    return Place("model", target)


def _run(run: Path) -> Place:
    good, _ = checkpoint.complete(run / "checkpoints")
    for name, marker, kind in (("merged", CONFIG, "model"), ("adapter", ADAPTER_CONFIG, "adapter")):
        written = run / name / marker
        if not written.is_file():
            continue
        place = _with_recipe("model" if kind == "model" else "adapter", run / name)
        if good and (good[-1] / checkpoint.MARKER).stat().st_mtime > written.stat().st_mtime:
            place.notes.append(
                f"{good[-1].name} is newer than the export {run / name}, which is used; name {good[-1]} to use that one"
            )
        return place
    if not good:
        fix = "Train it to its first checkpoint: swiftlite train ... --resume auto."
        raise ModelError("this run has neither an export nor a complete checkpoint", where=run, fix=fix)
    return _checkpoint(good[-1])


def _checkpoint(folder: Path) -> Place:
    if (why := checkpoint.fault(folder)) is not None:
        raise ModelError(
            f"not a complete checkpoint: {why}", where=folder, fix="Name the run's folder to take the newest complete one."
        )
    if (folder / "adapter" / ADAPTER_CONFIG).is_file():
        return _with_recipe("adapter", folder / "adapter")
    return _with_recipe("full", folder)


def _with_recipe(kind: Literal["model", "adapter", "full"], folder: Path) -> Place:
    run = _run_of(folder.absolute())
    if run is None or not (run / "recipe.yaml").is_file():
        return Place(kind, str(folder))
    try:
        # Whoever talks to a model has not asked to run the code of its recipe.
        recipe = load_recipe(str(run / "recipe.yaml"), run_plugins=False).recipe
        notes = [f"the run's plugins are not run here: {', '.join(recipe.plugins)}"] if recipe.plugins else []
        return Place(kind, str(folder), recipe, notes)
    except SwiftliteError as error:  # as where it refers to a variable of the environment that is not set
        return Place(kind, str(folder), None, [f"the run's recipe cannot be read, so its template_kwargs are not known: {error}"])


def _run_of(folder: Path) -> Path | None:
    """The output folder of the run that wrote `folder`, by the layout of runs."""
    if folder.name in ("adapter", "merged"):
        folder = folder.parent
        return _run_of(folder) if checkpoint.step_of(folder) is not None else folder
    return folder.parent.parent if checkpoint.step_of(folder) is not None else None
