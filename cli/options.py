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
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

# What is loaded, and how.
Target = Annotated[
    str, typer.Argument(metavar="TARGET", help="A run, a checkpoint, an adapter, or a model (folder, hub id, GGUF file).")
]
Base = Annotated[str | None, typer.Option(metavar="MODEL", help="Base model instead of the one that the adapter names.")]
Device = Annotated[str, typer.Option(help="auto, cuda, mps or cpu.")]
Dtype = Annotated[str, typer.Option(help="auto (fp32 on a CPU, else as in the model's files), bf16, fp16 or fp32.")]
Hub = Annotated[str, typer.Option(help="Where a hub id is looked up: hf or modelscope.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code shipped with the model.")]

# How answers are made.
System = Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt for messages that have none.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")]
Temperature = Annotated[float, typer.Option(min=0, help="0 takes the likeliest token; above, tokens are drawn.")]
TopP = Annotated[float, typer.Option(min=0, max=1, help="Draw from the likeliest tokens that make up this share.")]
Seed = Annotated[int | None, typer.Option(help="Seed of drawn tokens; without it they differ each time.")]
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
