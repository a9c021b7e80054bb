"""`swiftlite generate`."""

from pathlib import Path
from typing import Annotated

import typer

from swiftlite.cli.options import (
    Base,
    BatchSize,
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


def generate(
    target: Target,
    prompts: Annotated[Path, typer.Option(help="JSONL (also json, csv, parquet): messages, prompt or text in each row.")],
    output: Annotated[str, typer.Option(help="JSONL to write, each row with answer and finish; - is standard output.")] = "-",
    system: System = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    batch_size: BatchSize = 8,
    base: Base = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    hub: Hub = "hf",
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Answer the prompts of a file.

    Rows with messages (also conversations, instruction) go through the model's chat template. Plain text under prompt or text
    is given to the model as it stands, without the template.
    """
    from swiftlite import api

    api.generate(
        target,
        prompts,
        output=output,
        system=system,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        batch_size=batch_size,
        base=base,
        device=device,
        dtype=dtype,
        hub=hub,
        trust_remote_code=trust_remote_code,
    )
