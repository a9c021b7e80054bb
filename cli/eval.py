"""`swiftlite eval`."""

from typing import Annotated

import typer

from swiftlite.cli.options import (
    Base,
    BatchSize,
    Debug,
    Device,
    Dtype,
    Hub,
    Json,
    MaxNewTokens,
    Target,
    TrustRemoteCode,
    print_json,
)


def evaluate(
    target: Target,
    data: Annotated[str, typer.Option(help="Rows to score: a file, folder, glob or hub dataset.")],
    format: Annotated[str | None, typer.Option(help="Row format, as data.format; default: the run's, else auto.")] = None,
    train_on: Annotated[
        str | None, typer.Option(help="What is scored, as data.train_on: assistant, last, all or completion; default: the run's.")
    ] = None,
    max_length: Annotated[int | None, typer.Option(min=1, help="Tokens a row may have; default: the run's.")] = None,
    no_generate: Annotated[bool, typer.Option("--no-generate", help="Loss only, no answers: faster.")] = False,
    batch_size: BatchSize = 8,
    max_new_tokens: MaxNewTokens = 256,
    base: Base = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    hub: Hub = "hf",
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Score a run, an adapter or a model on data.

    The loss over the trained tokens, and exact match: how many rows the model answers word for word.
    """
    from swiftlite import api

    scores = api.evaluate(
        target,
        data,
        format=format,
        train_on=train_on,
        max_length=max_length,
        generate=not no_generate,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        base=base,
        device=device,
        dtype=dtype,
        hub=hub,
        trust_remote_code=trust_remote_code,
    )
    if json:
        print_json(scores)
    else:
        from swiftlite.infer.scores import as_text

        print(as_text(scores))
