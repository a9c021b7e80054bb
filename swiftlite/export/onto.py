"""What an adapter that was trained on packed weights is merged onto: the values that it was trained on, or the weights of the
model's files."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from swiftlite.export.reload import holds_packed, load_adapted, logits_of
from swiftlite.export.tensors import Bases, block_of, pieces
from swiftlite.export.trained import Trained
from swiftlite.export.verify import Gaps, compare
from swiftlite.models import weights
from swiftlite.models.adapter_files import save_adapter
from swiftlite.models.files import ModelFiles, open_weights
from swiftlite.models.names import base_name
from swiftlite.models.packed import packed_weights
from swiftlite.recipe.errors import RecipeError
from swiftlite.recipe.schema import ExportSection


def refuse(onto: str, packed: bool, files: ModelFiles) -> None:
    """Raises RecipeError where `export.onto` has nothing to choose. `packed`: whether the base's weights are."""
    if onto != "auto" and not packed:
        fault = f"'{onto}' chooses what stands for packed weights, and this base is not packed"
        raise RecipeError(fault, where="export.onto", fix="Leave the key out.")
    if onto == "original" and holds_packed(files):
        fault = "the model's files hold packed weights and no original ones"
        raise RecipeError(fault, where="export.onto", fix="Use dequantised, which is what auto takes.")


def method_of(model: nn.Module) -> str | None:
    """How the weights of a model are packed, nf4 or fp8; None where they are not."""
    found = {weight.method.removesuffix("_stored") for weight in packed_weights(model).values()}
    return next(iter(found), None)


def settle(
    trained: Trained, section: ExportSection, rows: Sequence[Tensor], logits: Sequence[Tensor], device: torch.device
) -> tuple[Trained, ExportSection]:
    """Measures both gaps and makes the choice of `export.onto: auto`: the smaller one.

    Both are taken from plain transformers and peft on the base's own weights, in the type of training, before anything is rounded
    to the type of the export.

    Args:
        rows, logits: rows of ids [T], and what the trained model makes of them, [T, V].
        device: where the second model goes.
    """
    method = method_of(trained.model)
    if method is None:
        return trained, section
    assert trained.peft is not None
    with TemporaryDirectory() as folder:
        save_adapter(trained.peft, folder, base_model_name_or_path=trained.files.base_id, revision=trained.files.revision)
        model = load_adapted(trained, Path(folder), device)
    forward, adapted, original = logits_of(model), [], None
    if not holds_packed(trained.files):
        adapted = [forward(row) for row in rows]
        original = compare(logits, iter(adapted))
        unpack_into(model, trained)
    gaps = Gaps(method, compare(logits, (forward(row) for row in rows)), original, adapted)
    closer = "original" if original and original.relative < gaps.dequantised.relative else "dequantised"
    chosen = closer if section.onto == "auto" else section.onto
    return replace(trained, gaps=gaps), section.model_copy(update={"onto": chosen})


@torch.no_grad()
def unpack_into(model: PeftModel, trained: Trained) -> None:
    """Gives a plain model the values that the packed weights of the trained one stand for."""
    names = {base_name(n): p for n, p in model.base_model.model.named_parameters()}
    for piece in pieces(trained.model):
        if piece.packed:
            part = piece.read()
            for name in piece.packed:
                names[name].copy_(part.before.get(name, part.tensors[name]))


def bases_of(trained: Trained, onto: str | None) -> Bases | None:
    """What stands for packed weights when merging onto `dequantised` (None: what the model computes with) or `original`."""
    if onto != "original":
        return None
    shapes = {name: weight.shape for name, weight in packed_weights(trained.model).items()}
    held: dict[str, Tensor] = {}

    def base(name: str) -> Tensor:
        if name not in held:  # a block at a time: each reading goes through all names of the files
            held.clear()
            held.update(originals(trained, {n: s for n, s in shapes.items() if block_of(n) == block_of(name)}))
        return held.pop(name)

    return base


def originals(trained: Trained, shapes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Weights of the model's files by Hugging Face name: fp32, on the CPU. `shapes`: those wanted, as they are now."""
    if not shapes:
        return {}
    mapping = getattr(trained.model, "_weight_conversions", None)
    return weights.original(trained.model, open_weights(trained.files), mapping, shapes)
