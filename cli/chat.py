"""`swiftlite chat`."""

from typing import Annotated

import typer

from swiftlite.cli.options import (
    Base,
    Debug,
    Device,
    Dtype,
    Hub,
    MaxNewTokens,
    Seed,
    System,
    Target,
    Temperature,
    TopP,
    TrustRemoteCode,
)


def chat(
    target: Target,
    system: System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Give each line as it stands: no chat template, no history.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Print the token ids that the model is given.")] = False,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    base: Base = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    hub: Hub = "hf",
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Talk to a run, an adapter or a model.

    Lines go through the chat template of training. Also reads lines from a pipe.
    """
    from swiftlite import api

    api.chat(
        target,
        system=system,
        raw=raw,
        trace=trace,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        base=base,
        device=device,
        dtype=dtype,
        hub=hub,
        trust_remote_code=trust_remote_code,
    )
