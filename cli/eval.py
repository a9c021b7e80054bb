"""`swiftlite eval`."""

from typing import Annotated

import typer

from swiftlite.cli.options import BatchSize, Debug, Device, Json, MaxNewTokens, Target, print_json


def evaluate(
    target: Target,
    data: Annotated[str, typer.Option(help="Rows to score.")],
    batch_size: BatchSize = 8,
    max_new_tokens: MaxNewTokens = 256,
    device: Device = "auto",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Score a model on data: loss, exact match."""
    from swiftlite import api

    scores = api.evaluate(target, data, batch_size=batch_size, max_new_tokens=max_new_tokens, device=device)
    if json:
        print_json(scores)
    else:
        print("\n".join(f"{name}: {value}" for name, value in scores.items()))
