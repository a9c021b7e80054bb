"""Writes the formats of a recipe, opens each again, and leaves a receipt."""

import gc
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from swiftlite.dist.world import is_main
from swiftlite.export import report
from swiftlite.export.folder import check_target, staged
from swiftlite.export.ranks import on_first_rank
from swiftlite.export.reload import logits_of
from swiftlite.export.trained import Exporter, Trained
from swiftlite.export.verify import compare, prompt_rows, tolerance
from swiftlite.recipe import tables
from swiftlite.recipe.errors import ModelError
from swiftlite.recipe.schema import ExportSection


def check(trained: Trained, formats: Sequence[str], section: ExportSection, output: Path) -> None:
    """Refuses what an export would refuse; to be asked before training.

    Raises:
        RecipeError: an unknown format, a target that may not be replaced, or a format that this kind of training cannot fill.
    """
    for name in formats:
        exporter: Exporter = tables.load(tables.EXPORTERS, name, "export.formats")
        check_target(output / name, section.overwrite, trained.files.folder)
        exporter.check(trained, section)


def export_all(trained: Trained, formats: Sequence[str], section: ExportSection, output: Path) -> list[report.Part]:
    """Writes OUTPUT/<format> for each format and OUTPUT/export_report.json. A folder has its name only once it is proven.
    All ranks must call; the first one writes.

    Returns:
        One report a format, on the first rank; `report.lines` makes text of it.

    Raises:
        RecipeError: see `check`.
        ModelError: an export differs from the trained model; its folder is gone, an earlier one is left as it was.
        DiskFullError: the disk is full; as for ModelError.
    """
    if is_main():
        check(trained, formats, section, output)
    if not formats:
        return []
    rows = prompt_rows(trained.prompts)
    if not rows:
        raise ModelError("there is no prompt to compare the exports on", fix="Give at least one row of data.")
    training = trained.model.training
    trained.model.train(False)  # dropout off
    try:
        logits = list(map(logits_of(trained.model), rows))
        expected = list(zip(rows, logits, strict=True))
        return on_first_rank(trained, lambda: [_export(trained, name, section, output, expected) for name in formats]) or []
    finally:
        trained.model.train(training)


def _export(
    trained: Trained, name: str, section: ExportSection, output: Path, expected: Sequence[tuple[Tensor, Tensor]]
) -> report.Part:
    """Writes and proves one format. `expected`: rows of ids [T] with the trained model's logits [T, V]."""
    exporter: Exporter = tables.load(tables.EXPORTERS, name)
    target = output / name
    with staged(target) as folder:
        written = exporter.write(trained, folder, section)
        forward, faults = exporter.reload(trained, folder, written, _device(trained))
        found = compare([logits for _, logits in expected], (forward(row) for row, _ in expected))
        part = report.part(name, target, folder, written, found, tolerance(trained.compute_dtype, written.dtype), faults)
        report.save(output, [part])
        gc.collect()  # the second model
        if part["verdict"] != "verified":
            fault = f"the export {name} is not the trained model: {report.why(part)}"
            raise ModelError(fault, where=target, fix=f"See {output / report.NAME}.")
    return part


def _device(trained: Trained) -> torch.device:
    """Where the second model goes: beside the first one if it fits there, else to the CPU."""
    device = torch.device(trained.model.device)
    if device.type != "cuda":
        return torch.device("cpu")
    gc.collect()
    torch.cuda.empty_cache()
    needed = sum(p.numel() for p in trained.model.parameters()) * trained.base_dtype.itemsize
    return device if torch.cuda.mem_get_info(device)[0] > 1.3 * needed else torch.device("cpu")
