"""`swiftlite check`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from swiftlite.cli.options import Debug, Json, Overrides, RecipeName, load, print_json


def check(
    recipe: RecipeName,
    overrides: Overrides = None,
    dump: Annotated[
        Path | None, typer.Option(help="Write one JSON line per training row or pack, exactly as the model will get it.")
    ] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Processes to plan for; default those that train would start.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show all that is known before step 1.

    The effective recipe with the origin of each value, rows and their masks, adapters, steps, memory. Reads no weights and trains
    nothing.
    """
    from swiftlite.recipe import show

    loaded = load(recipe, overrides)
    if not json:
        print(show.as_text(loaded), flush=True)
        print("".join(f"note: {note}\n" for note in loaded.notes), flush=True)
    from swiftlite import api  # behind the recipe: its mistakes are told before torch is loaded

    plan = api.check(replace(loaded, notes=[]), dump=dump, nproc=nproc, quiet=json)
    if json:
        print_json({**show.as_data(loaded), "plan": plan})
