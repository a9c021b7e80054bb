"""`swiftlite selftest`."""

from typing import Annotated

import typer

from swiftlite.cli.options import Debug, Json, print_json


def selftest(
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Processes; default one for each GPU, else two. More than GPUs: on the CPU.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Prove on this machine that every strategy and split learns the same.

    A tiny model is trained by one process, then under every strategy, split of a step, offload and packing; losses, norms,
    gradients and weights are compared. Nothing is downloaded or left behind. The exit code is 1 if a difference is too large.
    """
    from swiftlite import api
    from swiftlite.recipe.errors import SwiftliteError

    found = api.selftest(nproc=nproc, quiet=json)
    if json:
        print_json(found)
    if found["failed"]:
        raise SwiftliteError("; ".join(found["failed"]), where="selftest")
