"""Arguments and options that several verbs share, and how a recipe is taken from them."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from swiftlite.recipe.load import Loaded

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="YAML file, or a name of `swiftlite recipes`.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values that beat the file: train.learning_rate=1e-4.")
]
Target = Annotated[str, typer.Argument(metavar="TARGET", help="A run, an adapter folder, or a model.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")]
Temperature = Annotated[float, typer.Option(min=0, help="0 takes the likeliest token; above, tokens are drawn.")]
Device = Annotated[str, typer.Option(help="auto, cuda, mps or cpu.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows of one forward pass.")]


def load(recipe: str, overrides: list[str] | None, **flags: str | None) -> "Loaded":
    """The recipe with overrides; each flag (`strategy`, `output`, `checkpoint__resume`) is one more, and the last."""
    from swiftlite.recipe.load import load_recipe

    given = [
        f"{key.replace('__', '.')}={json.dumps(value, ensure_ascii=False)}" for key, value in flags.items() if value is not None
    ]
    return load_recipe(recipe, [*(overrides or []), *given])


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))
