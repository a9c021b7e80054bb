"""`swiftlite export`."""

from pathlib import Path
from typing import Annotated

import typer

from swiftlite.cli.options import Debug, Device


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run, or one of its checkpoints.")],
    format: Annotated[str, typer.Option(help="adapter or merged; see `swiftlite explain export.formats`.")],
    dtype: Annotated[str, typer.Option(help="Of merged weights: auto (the base's), bf16, fp16 or fp32.")] = "auto",
    onto: Annotated[
        str, typer.Option(help="After quantize, what to merge onto: dequantised, original, or auto, the closer of them.")
    ] = "auto",
    output: Annotated[
        Path | None, typer.Option(help="Where the folder named like the format goes; default: the run's folder.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")] = False,
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Write and verify an adapter or merged weights.

    From a run, whose newest complete checkpoint is taken, or from any checkpoint. What was written is opened again by plain
    transformers or peft and compared; export_report.json beside it says how.
    """
    from swiftlite import api

    api.export(run, format=format, dtype=dtype, onto=onto, output=output, overwrite=overwrite, device=device)
