"""`swiftlite chat`."""

from typing import Annotated

import typer

from swiftlite.cli.options import Debug, Device, MaxNewTokens, Target, Temperature


def chat(
    target: Target,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Talk to a run, an adapter or a model."""
    from swiftlite import api

    api.chat(target, system=system, max_new_tokens=max_new_tokens, temperature=temperature, device=device)
