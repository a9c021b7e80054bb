"""Weights that the model's files hold packed: which of them a model takes as they are, and how they come into it.

transformers' loader moves them, so that its conversions of keys hold: as rows of bytes, values and scales together.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.quantizers_utils import should_convert_module

from swiftlite.dist.tensors import local, with_local
from swiftlite.models.bnb4bit import PackedSlice, RawSlice, Unpacked, row_bytes
from swiftlite.models.choice import Choice, choose
from swiftlite.models.families.family import Family
from swiftlite.models.files import PICKLED, SAFETENSORS, ModelFiles, Weights, open_weights, read_json, weight_names
from swiftlite.models.packed import Inlet, Stored, inlets
from swiftlite.models.placing import materialise
from swiftlite.models.prequantised import NAME_PLAIN, quantization_config, section_of
from swiftlite.recipe.errors import ModelError, RecipeError
from swiftlite.recipe.schema import QuantizeSection


@dataclass(frozen=True)
class Held:
    """Which weights of a model its files hold packed.

    Attributes:
        whole: whether a weight, by its name in the model, can be taken as it is.
        known: weights that come from packed ones, all or in part; empty where the files are not here, and their names unknown.
    """

    whole: Callable[[str], bool]
    known: frozenset[str] = frozenset()

    def choose(self, root: nn.Module, quantize: QuantizeSection, family: Family, in_full: Iterable[str]) -> Choice:
        """What of `choice.choose` can be taken as it is; its notes say what else is packed, and so has to be dequantised.

        Raises:
            ModelError: nothing can.
        """
        nothing = ModelError(f"no packed weight of the files can be kept so in {type(root).__name__}", fix=NAME_PLAIN)
        try:
            choice = choose(root, quantize, family, in_full)
        except RecipeError as error:
            raise error if error.where != "quantize" else nothing from error
        names = {id(module): name for name, module in root.named_modules()}
        linears = [m for m in choice.linears if self.whole(f"{names[id(m)]}.weight")]
        fused = [(m, [n for n in own if self.whole(f"{names[id(m)]}.{n}")]) for m, own in choice.experts]
        experts = [(m, own) for m, own in fused if own]
        if not linears and not experts:
            raise nothing
        taken = {f"{names[id(m)]}.weight" for m in linears} | {f"{names[id(m)]}.{n}" for m, own in experts for n in own}
        left = sorted(self.known - taken)
        what = f"{len(left)} packed weights of the model's files are dequantised, as they are not kept packed here"
        return Choice(linears, experts, [f"{what}: such as {left[0]}"] if left else [])


def held(root: Any, files: ModelFiles, mapping: Any) -> Held | None:
    """What the files of `root`, a bare model on meta, hold packed; None: nothing.

    Args:
        mapping: how checkpoint keys become those of the class; see `weights.conversions`.

    Raises:
        ModelError: the config speaks of packed weights, and there are none.
    """
    if section_of(files.folder) is None:
        return None
    tensors = _tensors(files)
    if tensors is None:  # what transformers takes by config.json; `check` has no more of a model in one file on a hub
        skip = quantization_config(files.folder).get("llm_int8_skip_modules") or ["lm_head"]
        return Held(lambda name: name.endswith(".weight") and should_convert_module(name.removesuffix(".weight"), skip))
    if not tensors.packed:
        fix = "Remove quantization_config from it, or fetch the model's files again."
        raise ModelError("speaks of 4-bit weights, and the files hold none", where=files.folder / "config.json", fix=fix)
    axes = {name: tensor.ndim for name, tensor in root.state_dict().items()}
    known = {
        target: sources
        for target, sources in destinations(root, mapping, tensors).items()
        if any(name in tensors.packed for name, _ in sources)
    }
    whole = {
        target
        for target, sources in known.items()
        if all(name in tensors.packed and _by_rows(axes[target], converter) for name, converter in sources)
    }
    return Held(whole.__contains__, frozenset(known))


def _tensors(files: ModelFiles) -> Unpacked | None:
    """The tensors of the files, or their names alone where only an index is here; None without one."""
    if files.weights:
        found = open_weights(files)
        return found if isinstance(found, Unpacked) else Unpacked(found)
    names, is_safetensors = weight_names(files.folder)
    paths = [files.folder / name for name in names]
    if paths and all(path.exists() for path in paths):
        return Unpacked(Weights(paths, is_safetensors))
    index = files.folder / f"{SAFETENSORS if is_safetensors else PICKLED}.index.json"
    return Unpacked(read_json(index).get("weight_map", {})) if index.exists() else None


def destinations(view: Any, mapping: Any, names: Iterable[str]) -> dict[str, list[tuple[str, Any]]]:
    """Where tensors of the files go, by transformers' rules: weight of the model -> [(tensor, the converter between or None)].

    Args:
        view: has `state_dict()` and `base_model_prefix`, as for transformers' loader.
    """
    mapping = deepcopy(mapping or [])  # which keeps a record of what was asked
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known, prefix, found = view.state_dict(), view.base_model_prefix, dict[str, list[tuple[str, Any]]]()
    for name in names:
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, pattern = rename_source_key(name, [], [], prefix, known)
        converter = None if pattern is None else by_pattern[pattern]
        first, *others = [""] if converter is None else converter.target_patterns
        for each in (target, *(target.replace(first, other) for other in others)):
            if each in known:
                found.setdefault(each, []).append((name, converter))
    return found


def _by_rows(axes: int, converter: Any) -> bool:
    """Whether rows of the files stay rows of the model's weight: else their bytes would not be those of the result.

    A weight of two axes must be one tensor of the files, since packed scales cannot be joined; experts have theirs in fp32.
    """
    if converter is None:
        return True
    kinds = [(type(op).__name__, getattr(op, "dim", None)) for op in converter.operations]
    return axes == 3 and all(kind in (("MergeModulelist", 0), ("Concatenate", 1)) for kind in kinds)


class GivenInlet(Inlet):
    """Takes rows of bytes, see `RawSlice`, and puts them into the carriers."""

    def __setattr__(self, name: str, value: Tensor) -> None:
        if name in self._weights:
            _take(self._weights[name], local(value.detach()))
        else:
            super().__setattr__(name, value)

    def placeholder(self, name: str) -> Tensor:
        """The rows of bytes, on meta and sharded like the carriers."""
        stored = self._weights[name]
        shape = (*stored.shape[:-1], row_bytes(stored.shape[-1], stored.double))
        model, full = getattr(stored.owner, stored.names["packed"]), torch.empty(shape, dtype=torch.uint8, device="meta")
        return with_local(full[: local(model).shape[0]], model, full.shape) if isinstance(model, DTensor) else full


@torch.no_grad()
def _take(stored: Stored, rows: Tensor) -> None:
    half = stored.shape[-1] // 2
    for kind, part in {"packed": rows[..., :half], "codes" if stored.double else "absmax": rows[..., half:]}.items():
        carrier = local(materialise(stored.owner, stored.names[kind], stored.home or rows.device)).view(torch.uint8)
        carrier.zero_()[..., : part.shape[-1]].copy_(part)  # padding too, as bytes are compared


def given_inlets(root: nn.Module) -> dict[str, Inlet]:
    """As `packed.inlets`, for a model that takes all its packed weights as they are."""
    return {path: GivenInlet(inlet._module, list(inlet._weights.values())) for path, inlet in inlets(root).items()}


def as_given(tensors: Mapping[str, Any], view: Any, mapping: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The tensors of the files as the loader is to read them, and what double quantisation has beside its rows, by weight.

    Args:
        view: the model as the loader sees it; see `weights.BaseView`.

    Raises:
        ModelError: a packed weight does not fit the model.
    """
    found, nested = dict(tensors), dict[str, Tensor]()
    packed = {name: tensor for name, tensor in found.items() if isinstance(tensor, PackedSlice)}
    for target, sources in destinations(view, mapping, packed).items():
        path, _, attribute = target.rpartition(".")
        module = view.get_submodule(path)
        if not isinstance(module, GivenInlet) or attribute not in module.names:
            continue
        stored = module._weights[attribute]
        for name, converter in sources:
            weight = packed[name]
            if converter is None and weight.shape != stored.shape:
                what = f"{name} has shape {list(weight.shape)}, and the config asks for {list(stored.shape)}"
                raise ModelError(what, fix="Use the config.json that belongs to these weights.")
            if stored.double and weight.nested is None:
                what = f"{name} has plain scales, and config.json says that they are packed"
                raise ModelError(what, fix="Use the config.json that belongs to these weights.")
            found[name] = RawSlice(weight, stored.double)
            if stored.double and weight.nested is not None:
                nested[target] = weight.nested
    return found, nested
