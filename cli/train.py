"""`swiftlite train`."""

from typing import Annotated

import typer

from swiftlite.cli.options import Debug, Overrides, RecipeName, load


def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    strategy: Annotated[str | None, typer.Option(help="Parallel strategy; strategy=... of the recipe.")] = None,
    resume: Annotated[str | None, typer.Option(help="auto (newest complete checkpoint), or a checkpoint folder.")] = None,
    output: Annotated[str | None, typer.Option(help="Folder of the run.")] = None,
    debug: Debug = False,
) -> None:
    """Train, evaluate, save and export."""
    loaded = load(recipe, overrides, strategy=strategy, checkpoint__resume=resume, output=output)
    from swiftlite import api  # behind the recipe: its mistakes are told before torch is loaded

    api.train(loaded)
