"""`swiftlite explain`."""

from typing import Annotated

import typer

from swiftlite.cli.options import Json, print_json


def explain(
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="A key, a section, a part of a name, another toolkit's name.")
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema for editors.")] = False,
    json: Json = False,
) -> None:
    """Say what a key of the recipe does.

    Its type, default and values. Without a key, all are listed.
    """
    from swiftlite.recipe import explain as help_texts

    if schema:
        from swiftlite.recipe import json_schema

        print(json_schema.as_text(), end="")
    elif json:
        print_json(help_texts.as_data(key))
    else:
        print(help_texts.as_text(key))
