"""The exporter `merged`: a Hugging Face folder with adapters merged in, written block by block."""

import json
import re
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from swiftlite.export.config import dtype_name, model_config, write_small_files
from swiftlite.export.folder import check_space
from swiftlite.export.onto import bases_of, originals, refuse
from swiftlite.export.reload import Reloaded, load_plain, logits_of
from swiftlite.export.tensors import Read, blocks, pieces, ties
from swiftlite.export.trained import Exporter, Trained, Written
from swiftlite.export.updates import Updates
from swiftlite.models.files import open_weights
from swiftlite.models.packed import packed_weights
from swiftlite.models.tokenizer import save_tokenizer
from swiftlite.recipe.errors import ModelError, RecipeError
from swiftlite.recipe.schema import ExportSection

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FILE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def shard_bytes(text: str) -> int:
    """Bytes of `5GB`, `200 MB`, `1GiB`.

    Raises:
        RecipeError: the text is no size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?b)\s*", text, re.IGNORECASE)
    size = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if size <= 0:
        raise RecipeError(
            f"'{text}' is no size", where="export.max_shard_size", fix="Write a number and a unit, as 5GB or 200MB."
        )
    return size


def base_dtypes(trained: Trained) -> dict[str, torch.dtype]:
    """Tensor name in the base's files -> its floating-point type. Empty for a base without safetensors."""
    tensors = open_weights(trained.files) if trained.files.is_safetensors else {}
    names = {name: tensor.get_dtype() for name, tensor in tensors.items()}
    return {name: _FILE_DTYPES[kind] for name, kind in names.items() if kind in _FILE_DTYPES}


class ShardWriter:
    """Collects tensors and writes a file whenever the next one would not fit; holds one file's worth of memory."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self.pending: dict[str, Tensor] = {}
        self.pending_bytes = self.total_bytes = 0
        self.files: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self.pending and self.pending_bytes + size > self.max_bytes:
            self.flush()
        self.pending[name] = tensor.contiguous()
        self.pending_bytes += size
        self.total_bytes += size

    def flush(self) -> None:
        save_file(self.pending, self._temporary(len(self.files)), metadata={"format": "pt"})
        self.files.append(list(self.pending))
        self.pending, self.pending_bytes = {}, 0

    def finish(self) -> None:
        """Gives the files their names, which tell how many there are, and writes the index of several."""
        self.flush()
        count = len(self.files)
        names = ["model.safetensors"] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        for i, name in enumerate(names):
            self._temporary(i).rename(self.folder / name)
        if count > 1:
            where = {tensor: name for name, tensors in zip(names, self.files, strict=True) for tensor in tensors}
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(where.items()))}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _temporary(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}.safetensors"


def check(trained: Trained, section: ExportSection) -> None:
    shard_bytes(section.max_shard_size)
    refuse(section.onto, bool(packed_weights(trained.model)), trained.files)


def write(trained: Trained, folder: Path, section: ExportSection) -> Written:
    """Writes weights, config, generation config and tokenizer files into an empty folder. Nothing is packed again.

    Memory: one block in fp32, and as it was before, on the model's device; one weight file on the CPU.

    Raises:
        ModelError: a weight is not finite, by training or because the chosen type cannot hold it.
        DiskFullError: the weights do not fit on the disk.
    """
    dtype = DTYPES.get(section.dtype, trained.base_dtype)
    check_space(folder, sum(s.numel() for p in pieces(trained.model) for s in p.shapes.values()) * dtype.itemsize)
    tied, untied = ties(trained.model, dtype)
    in_base = base_dtypes(trained)
    usual = Counter(in_base.values()).most_common(1)[0][0] if in_base else dtype
    # A few fp32 tensors among 16-bit ones are meant to be fp32 (router biases, state-space parameters).
    wide = {n for n, d in in_base.items() if d == torch.float32 != usual}
    writer, updates = ShardWriter(folder, shard_bytes(section.max_shard_size)), Updates()
    onto = section.onto if trained.gaps else None
    for block in blocks(trained.model, skip=tied, bases=bases_of(trained, onto)):
        old = _before(trained, block, updates)
        for name, tensor in revert_weight_conversion(trained.model, block.tensors).items():
            kept = torch.float32 if name in wide else dtype
            writer.add(name, _cast(name, tensor, kept))
            if name in old:
                updates.add(name, old[name], tensor, kept)
    writer.finish()
    config, notes = model_config(trained, dtype, bool(untied))
    notes += write_small_files(trained, folder, config)
    save_tokenizer(trained.tokenizer, trained.files, folder, changed=trained.tokens_added, chat_template=trained.chat_template)
    names = {n for file in writer.files for n in file}
    if extra := sorted(names - set(in_base) - untied) if in_base else []:
        notes.append(f"{len(extra)} tensors have another name than in the base's files, as {extra[0]}")
    return Written(dtype, notes, updates.as_dict(), onto)


def _before(trained: Trained, block: Read, updates: Updates) -> dict[str, Tensor]:
    """What training changed of a block, as it was before, by names of files. What is not known of it is counted."""
    try:
        full = originals(trained, {name: block.tensors[name].shape for name in block.full})
    except ModelError:  # not in the files as it is now: grown by added tokens, or never saved
        full = {}
        updates.unknown += len(block.full)
    before = block.before | full
    if not before:
        return {}
    # Conversions want whole blocks; what was not changed is no update.
    whole_block: dict[str, Tensor] = revert_weight_conversion(trained.model, block.tensors | before)
    return whole_block


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor as it is written: on the CPU, floating-point values in `dtype`."""
    if not tensor.is_floating_point():
        return tensor.cpu()
    result = tensor.to(dtype)
    if not bool(torch.isfinite(result).all()):
        if bool(torch.isfinite(tensor).all()):
            largest = float(tensor.abs().max())
            raise ModelError(
                f"{name} holds {largest:.3g}, which {dtype_name(dtype)} cannot",
                where="export.dtype",
                fix="Use export.dtype: bf16.",
            )
        raise ModelError(
            f"{name} holds NaN or infinity after training",
            fix="Export an earlier checkpoint, or train with a lower learning rate.",
        )
    return result.cpu()


def reload(trained: Trained, folder: Path, written: Written, device: torch.device) -> Reloaded:
    """Opens the folder with plain transformers in the type its config names, and compares every tensor with what was trained."""
    model = load_plain(trained, folder, device)
    loaded, faults = model.state_dict(), []
    tied, _ = ties(trained.model, written.dtype)
    seen = set(tied)
    for block in blocks(trained.model, skip=tied, bases=bases_of(trained, written.onto)):
        for name, tensor in block.tensors.items():
            seen.add(name)
            if name not in loaded:
                faults.append(f"{name} is missing")
                continue
            found = loaded[name]
            meant = tensor.to(found.device)
            # Read back wider than written where transformers keeps a weight in fp32.
            rounded = meant.to(written.dtype) if meant.is_floating_point() else meant
            if found.shape != meant.shape or not (
                torch.equal(found, meant.to(found.dtype)) or torch.equal(found, rounded.to(found.dtype))
            ):
                faults.append(f"{name} is not what was trained")
    faults += [f"{name} is new" for name in loaded if name not in seen]
    del loaded
    return logits_of(model.to(trained.compute_dtype)), faults


EXPORTER = Exporter("merged", check, write, reload)
