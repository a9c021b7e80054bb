"""Writes the formats of a recipe, opens each again, and leaves a receipt."""

import gc
from collections.abc import Sequence
from pathlib import Path

import torch

from swiftlite.export import report
from swiftlite.export.folder import check_target, staged
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

    Returns:
        One report a format; `report.lines` makes text of it.

    Raises:
        RecipeError: see `check`.
        ModelError: an export differs from the trained model; its folder is gone, an earlier one is left as it was.
        DiskFullError: the disk is full; as for ModelError.
    """
    check(trained, formats, section, output)
    rows = prompt_rows(trained.prompts)
    if not rows:
        raise ModelError("there is no prompt to compare the exports on", fix="Give at least one row of data.")
    forward = logits_of(trained.model)
    logits = [forward(row) for row in rows]
    parts = []
    for name in formats:
        exporter: Exporter = tables.load(tables.EXPORTERS, name)
        target = output / name
        with staged(target) as folder:
            written = exporter.write(trained, folder, section)
            reloaded, faults = exporter.reload(trained, folder, written, _device(trained))
            limit = tolerance(trained.compute_dtype, written.dtype)
            part = report.part(name, target, folder, written, compare(logits, map(reloaded, rows)), limit, faults)
            del reloaded  # holds a second model
            parts.append(part)
            report.save(output, parts)
            if part["verdict"] != "verified":
                raise ModelError(
                    f"the export {name} is not the trained model: {report.why(part)}",
                    where=target,
                    fix=f"See {output / report.NAME}.",
                )
        gc.collect()
    return parts


def _device(trained: Trained) -> torch.device:
    """Where the second model goes: beside the first one if it fits there, else to the CPU."""
    device = torch.device(trained.model.device)
    if device.type != "cuda":
        return torch.device("cpu")
    gc.collect()
    torch.cuda.empty_cache()
    needed = sum(p.numel() for p in trained.model.parameters()) * trained.base_dtype.itemsize
    return device if torch.cuda.mem_get_info(device)[0] > 1.3 * needed else torch.device("cpu")
