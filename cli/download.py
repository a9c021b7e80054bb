"""`swiftlite download`."""

from typing import Annotated

import typer

from swiftlite.cli.options import Debug, Json, print_json


def download(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, org/name.")],
    hub: Annotated[str, typer.Option(help="hf or modelscope.")] = "hf",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Fetch a model into the cache and print its folder."""
    from swiftlite import api

    folder = str(api.download(model, hub=hub, revision=revision))
    if json:
        print_json({"model": model, "folder": folder})
    else:
        print(folder)
