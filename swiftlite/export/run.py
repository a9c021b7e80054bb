"""Writes the formats of a recipe, opens each again, and leaves a receipt."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from swiftlite.dist.world import is_main
from swiftlite.export import report
from swiftlite.export.folder import check_target, staged
from swiftlite.export.onto import settle
from swiftlite.export.ranks import on_first_rank
from swiftlite.export.reload import logits_of
from swiftlite.export.tensors import pieces
from swiftlite.export.trained import Exporter, Trained
from swiftlite.export.verify import compare, prompt_rows, tolerance
from swiftlite.models.fp8_gap import without_float8
from swiftlite.recipe import tables
from swiftlite.recipe.errors import ModelError
from swiftlite.recipe.schema import ExportSection


@dataclass(frozen=True)
class Logits:
    """On the rows that exports are compared on.

    Attributes:
        rows: of ids, [T] int64 each.
        trained: [T, V] fp32, as the model computed in training.
        weights: the same in the compute type throughout, which is all that weights can say; differs where products are in float8.
    """

    rows: Sequence[Tensor]
    trained: Sequence[Tensor]
    weights: Sequence[Tensor]


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
        with without_float8(trained.model) as changed:
            meant = list(map(logits_of(trained.model), rows)) if changed else logits
        found = Logits(rows, logits, meant)
        return on_first_rank(trained, lambda: _export_each(trained, formats, section, output, found)) or []
    finally:
        trained.model.train(training)


def _export_each(
    trained: Trained, formats: Sequence[str], section: ExportSection, output: Path, logits: Logits
) -> list[report.Part]:
    settled, chosen = settle(trained, section, logits.rows, logits.trained, _device(trained))
    gc.collect()  # the second model
    return [_export(settled, name, chosen, output, logits, section.onto) for name in formats]


def _export(trained: Trained, name: str, section: ExportSection, output: Path, logits: Logits, asked: str) -> report.Part:
    """Writes and proves one format. `asked`: `export.onto` as it was before `settle`."""
    exporter: Exporter = tables.load(tables.EXPORTERS, name)
    target = output / name
    with staged(target) as folder:
        written = exporter.write(trained, folder, section)
        forward, faults = exporter.reload(trained, folder, written, _device(trained))
        exported = [forward(row) for row in logits.rows]
        # Merged onto other weights than those of training it is another model: base and adapter together say which one.
        other = trained.gaps is not None and written.onto == "original"
        found = compare(trained.gaps.adapted if trained.gaps and other else logits.weights, iter(exported))
        part = report.part(name, target, folder, written, found, tolerance(trained.compute_dtype, written.dtype), faults)
        if trained.gaps is not None:
            part["gaps"] = trained.gaps.as_dict()
        if written.onto:
            off = compare(logits.trained, iter(exported))
            part["onto"] = {"base": written.onto, "asked": asked, "differences_to_trained": off.as_dict()}
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
    needed = sum(s.numel() for p in pieces(trained.model) for s in p.shapes.values()) * trained.base_dtype.itemsize
    return device if torch.cuda.mem_get_info(device)[0] > 1.3 * needed else torch.device("cpu")
