"""`swiftlite generate`."""

from pathlib import Path
from typing import Annotated

import typer

from swiftlite.cli.options import BatchSize, Debug, Device, MaxNewTokens, Target, Temperature


def generate(
    target: Target,
    prompts: Annotated[Path, typer.Option(help="JSONL: prompt or messages in each row.")],
    output: Annotated[Path | None, typer.Option(help="JSONL to write; default: standard output.")] = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    batch_size: BatchSize = 8,
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Answer the prompts of a file."""
    from swiftlite import api

    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "batch_size": batch_size, "device": device}
    api.generate(target, prompts, output=output, **options)
