"""Streams checkpoint tensors into a model that was built on meta, adapted and perhaps sharded.

Each rank reads only its own rows (transformers' shard-on-read loader, which also applies the key conversions of fused experts).
Source of the view and of the buffer rule: transformers' `core_model_loading`, which sees the model through `BaseView`.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from swiftlite.recipe.errors import ModelError

# Parts of a parameter's name that peft puts in front of a base weight, and parts that mark a weight of its own.
_WRAPPERS = re.compile(r"\.(base_layer|original_module|token_adapter)(?=\.)")
_ADAPTER = re.compile(r"\.(lora_\w+|modules_to_save|trainable_tokens_\w+)\.")


def base_name(name: str) -> str | None:
    """The Hugging Face name of a base weight in an adapted model; None for a weight that belongs to an adapter."""
    return None if _ADAPTER.search(name) else _WRAPPERS.sub("", name)


class BaseView:
    """Looks like the bare Hugging Face model to transformers' loader while the real one is adapted and sharded."""

    def __init__(self, root: Any) -> None:
        self.root = root
        names = ((base_name(n), n) for n in root.state_dict(keep_vars=True))
        self.names = {base: n for base, n in names if base is not None}
        self.modules = {base.rpartition(".")[0]: root.get_submodule(n.rpartition(".")[0]) for base, n in self.names.items()}

    def state_dict(self) -> dict[str, Tensor]:
        tensors = self.root.state_dict(keep_vars=True)
        return {base: tensors[n] for base, n in self.names.items()}

    def named_buffers(self) -> Any:
        return ((base_name(n) or n, b) for n, b in self.root.named_buffers())

    def get_submodule(self, path: str) -> nn.Module:
        module: nn.Module = self.modules.get(path) or self.root.get_submodule(path)
        return module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.root, name)


def conversions(root: Any) -> Any:
    """How checkpoint keys become this class's keys. To be asked for before sharding, which renames the class."""
    return get_model_conversion_mapping(root)


def stream(root: Any, tensors: Mapping[str, Any], mapping: Any, device: torch.device, where: object) -> list[str]:
    """Fills the base weights of `root` from `tensors` (name -> lazy slice or tensor), each in its parameter's own type.

    Returns notes: tensors of the file that the model has no place for.

    Raises:
        ModelError: when a weight is missing or has another shape.
    """
    view = BaseView(root)
    trainable = {n: p.requires_grad for n, p in root.named_parameters(remove_duplicate=False)}
    dtype = next(p.dtype for p in view.state_dict().values() if p.is_floating_point())
    config = LoadStateDictConfig(dtype=dtype, device_map={"": str(device)}, weight_mapping=mapping)
    info, _ = convert_and_load_state_dict_in_model(view, dict(tensors), config)
    root._weight_conversions = view.__dict__.get("_weight_conversions")
    tied: dict[str, str] = dict(getattr(root, "all_tied_weights_keys", None) or {})
    _tie(view, tied, info.missing_keys)
    for name, parameter in root.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(trainable.get(name, parameter.requires_grad))
    ignored = [re.compile(p) for p in getattr(root, "_keys_to_ignore_on_load_missing", None) or []]
    missing = sorted(
        k for k in info.missing_keys if k not in tied and k not in tied.values() and not any(p.search(k) for p in ignored)
    )
    if info.mismatched_keys:
        name, found, wanted = sorted(info.mismatched_keys)[0]
        raise ModelError(
            f"{name} has shape {list(found)}, and the config asks for {list(wanted)}",
            where=where,
            fix="Use the config.json that belongs to these weights.",
        )
    if missing:
        raise ModelError(
            f"{len(missing)} weights are missing, such as {missing[0]}",
            where=where,
            fix="Fetch the model again; its files are not complete.",
        )
    expected = [
        re.compile(p) for p in [*(getattr(root, "_keys_to_ignore_on_load_unexpected", None) or []), r"rotary_emb\.inv_freq$"]
    ]
    unused = sorted(k for k in info.unexpected_keys if not any(p.search(k) for p in expected))
    return (
        [f"{len(unused)} tensors of the model's files have no place in {type(root).__name__}, such as {unused[0]}"]
        if unused
        else []
    )


def _tie(view: BaseView, tied: dict[str, str], missing: set[str]) -> None:
    """Makes tied weights one parameter again: the loader replaced only one of them."""
    for target, source in tied.items():
        if source in missing and target not in missing:
            target, source = source, target
        (to, name), (of, attribute) = (path.rpartition(".")[::2] for path in (target, source))
        setattr(view.get_submodule(to), name, getattr(view.get_submodule(of), attribute))


def materialise_buffers(root: Any, device: torch.device) -> None:
    """Makes the buffers that no file holds (rotary frequencies, embedding scales) by the class's own initialisation."""
    with torch.no_grad():
        for module in root.modules():
            own = [n for n in module._non_persistent_buffers_set if module._buffers.get(n) is not None]
            if not own:
                continue
            for name in own:
                if module._buffers[name].is_meta:
                    module._buffers[name] = torch.empty_like(module._buffers[name], device=device)
            for parameter in module.parameters(recurse=False):
                parameter._is_hf_initialized = True
            root._init_weights(module)
        for module in root.modules():  # saved ones were read to where the weights are, which may be host memory
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device:
                    module._buffers[name] = buffer.to(device)


def require_loaded(root: nn.Module) -> None:
    """Raises AssertionError when a parameter or buffer has no memory: a fault of ours, not of the user."""
    left = [n for n, t in [*root.named_parameters(), *root.named_buffers()] if t.is_meta]
    assert not left, f"never loaded: {left[:5]}"
