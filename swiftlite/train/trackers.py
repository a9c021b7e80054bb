"""Trackers of log.report_to, through accelerate's classes."""

from pathlib import Path
from typing import Any

from swiftlite.recipe.errors import RecipeError, nearest


def make_trackers(names: list[str], project: str, run_name: str, folder: Path, config: dict[str, Any]) -> list[Any]:
    """Started trackers; `config` is the flat recipe that they keep beside the run.

    Raises:
        RecipeError: for an unknown name, or one whose package is not installed.
    """
    if not names:
        return []
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState(cpu=True)  # accelerate's loggers ask it for the rank
    trackers = []
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            legal = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            raise RecipeError(
                f"unknown tracker '{name}'.{nearest(name, LOGGER_TYPE_TO_CLASS)}", where="log.report_to", fix=f"Known: {legal}."
            )
        kind = LOGGER_TYPE_TO_CLASS[name]
        try:
            tracker = kind(run_name, str(folder)) if kind.requires_logging_directory else kind(project)
            tracker.start()
        except ImportError as e:
            raise RecipeError(f"tracker '{name}' needs a package: {e}", where="log.report_to", fix=f"pip install {name}") from e
        tracker.store_init_configuration(config)
        trackers.append(tracker)
    return trackers
