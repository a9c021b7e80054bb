"""Streams checkpoint tensors into a model that was built on meta, adapted and perhaps sharded.

Each rank reads only its own rows (transformers' shard-on-read loader, which also applies the key conversions of fused experts).
Source of the view and of the buffer rule: transformers' `core_model_loading`, which sees the model through `BaseView`.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from swiftlite.dist.tensors import local, with_local
from swiftlite.models.bnb4bit import PackedSlice
from swiftlite.models.given import as_given, given_inlets
from swiftlite.models.names import base_name
from swiftlite.models.packed import inlets, packing_notes, stored_weights
from swiftlite.recipe.errors import ModelError


class _Home:
    """Stands for a module, and puts what it is given where weights are to live: transformers' loader leaves what is sharded on
    the device of the mesh, wherever it was asked to read it to."""

    def __init__(self, module: nn.Module, home: torch.device) -> None:
        self.__dict__.update(_module=module, _home=home)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: nn.Parameter) -> None:
        if isinstance(value, DTensor) and value.device.type != self._home.type:
            part = with_local(local(value.detach()).to(self._home), value)
            value = nn.Parameter(part, requires_grad=value.requires_grad)
            value._is_hf_initialized = True
        setattr(self._module, name, value)


class BaseView:
    """Looks like the bare Hugging Face model to transformers' loader while the real one is adapted and sharded.

    Args:
        given: the files hold packed weights, which are taken as they are.
        home: where weights are to live.
    """

    def __init__(self, root: Any, home: torch.device, given: bool = False) -> None:
        self.root = root
        found = given_inlets(root) if given else inlets(root)
        # A packed weight is one tensor to whoever fills the model, and none of its carriers is.
        self.inlets = {str(base_name(f"{path}.{n}")): inlet for path, inlet in found.items() for n in inlet.names}
        hidden = {f"{n.rpartition('.')[0]}.{c}" for n, s in stored_weights(root) for c in s.names.values()}
        names = ((base_name(n), n) for n in root.state_dict(keep_vars=True) if n not in hidden)
        self.names = {base: n for base, n in names if base is not None}
        paths = {base.rpartition(".")[0]: n.rpartition(".")[0] for base, n in self.names.items()}
        self.modules: dict[str, Any] = {base: _Home(root.get_submodule(path), home) for base, path in paths.items()}
        self.modules |= {base.rpartition(".")[0]: inlet for base, inlet in self.inlets.items()}
        for inlet in found.values():
            inlet.settle(home)

    def state_dict(self) -> dict[str, Tensor]:
        tensors = self.root.state_dict(keep_vars=True)
        packed = {base: getattr(inlet, base.rpartition(".")[2]) for base, inlet in self.inlets.items()}
        return {base: tensors[n] for base, n in self.names.items()} | packed

    def named_buffers(self) -> Any:
        return ((base_name(n) or n, b) for n, b in self.root.named_buffers())

    def get_submodule(self, path: str) -> nn.Module:
        module: nn.Module = self.modules.get(path) or self.root.get_submodule(path)
        return module

    def get_parameter(self, path: str) -> Tensor:
        # Conversions that split a tensor of the files ask for the sizes of its parts.
        module, _, name = path.rpartition(".")
        return getattr(self.get_submodule(module), name)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.root, name)


def conversions(root: Any) -> Any:
    """How checkpoint keys become this class's keys. To be asked for before sharding, which renames the class."""
    return get_model_conversion_mapping(root)


def stream(root: Any, tensors: Mapping[str, Any], mapping: Any, device: torch.device, where: object) -> list[str]:
    """Fills the base weights of `root` from `tensors` (name -> lazy slice or tensor), each in its parameter's own type.

    Returns notes: what packing did, and tensors of the file that the model has no place for.

    Raises:
        ModelError: when a weight is missing or has another shape.
    """
    view = BaseView(root, device, given=any(isinstance(tensor, PackedSlice) for tensor in tensors.values()))
    trainable = {n: p.requires_grad for n, p in root.named_parameters(remove_duplicate=False)}
    dtype = next(p.dtype for p in view.state_dict().values() if p.is_floating_point())
    config = LoadStateDictConfig(dtype=dtype, device_map={"": str(device)}, weight_mapping=mapping)
    read, nested = as_given(tensors, view, mapping)
    with _one_by_one(bool(view.inlets)):
        info, _ = convert_and_load_state_dict_in_model(view, read, config)
    tied: dict[str, str] = dict(getattr(root, "all_tied_weights_keys", None) or {})
    _without_rows(view, info, tied.keys() | set(tied.values()), device)
    for name, stored in stored_weights(root):
        stored.finish()
        if (scales := nested.get(str(base_name(name)))) is not None:
            stored.put("nested", scales.view(torch.uint8), device)
    packed = packing_notes(root)
    root._weight_conversions = view.__dict__.get("_weight_conversions")
    _tie(view, tied, info.missing_keys)
    for name, parameter in root.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(trainable.get(name, parameter.requires_grad))
    ignored = [re.compile(p) for p in getattr(root, "_keys_to_ignore_on_load_missing", None) or []]
    missing = sorted(
        k for k in info.missing_keys if k not in tied and k not in tied.values() and not any(p.search(k) for p in ignored)
    )
    if info.conversion_errors:
        name, said = sorted(info.conversion_errors.items())[0]
        spread = any(isinstance(p, DTensor) and not p.requires_grad for p in root.parameters())
        fix = (
            "Where transformers splits a tensor of the files it cannot spread it over ranks: try strategy: ddp."
            if spread
            else None
        )
        raise ModelError(f"{name} cannot be made from the files: {said.strip().splitlines()[-1]}", where=where, fix=fix)
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
    if unused:
        packed.append(f"{len(unused)} tensors of the model's files have no place in {type(root).__name__}, such as {unused[0]}")
    return packed


def _without_rows(view: BaseView, info: Any, tied: set[str], device: torch.device) -> None:
    """Gives memory to weights of which this rank holds no row, and takes them out of what the loader says is missing: where it
    joins tensors (experts, of which there may be fewer than ranks), it fails to make nothing of none."""
    tensors = view.state_dict()
    for name in sorted(info.missing_keys - tied):
        model = tensors[name]
        if isinstance(model, DTensor) and not local(model).numel():
            path, _, attribute = name.rpartition(".")
            part = torch.empty(local(model).shape, dtype=model.dtype, device=device)
            setattr(view.get_submodule(path), attribute, nn.Parameter(with_local(part, model), requires_grad=False))
            info.missing_keys.discard(name)
            info.conversion_errors.pop(name, None)


@contextmanager
def _one_by_one(wanted: bool) -> Iterator[None]:
    """Inside, transformers reads a tensor only once the one before it is in place: what is packed would else be read faster than
    it is packed, up to the whole model."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    if wanted:
        os.environ[name] = "1"
    try:
        yield
    finally:
        if wanted:
            os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


class _Catch:
    """Stands for a model whose weights are only to be read: module names lead to itself, and what is set is kept."""

    def __init__(self, root: Any, shapes: Mapping[str, Any]) -> None:
        self.base_model_prefix, self.config = root.base_model_prefix, root.config
        self.wanted = {n: torch.empty(shape, dtype=torch.float32, device="meta") for n, shape in shapes.items()}
        self.found: dict[str, Tensor] = {}

    def state_dict(self) -> dict[str, Tensor]:
        return self.wanted

    def named_buffers(self) -> list[Any]:
        return []

    def get_submodule(self, path: str) -> Any:
        return _CatchModule(self, path)

    def get_parameter(self, path: str) -> Tensor:
        return self.wanted[path]


class _CatchModule:
    _buffers: ClassVar[dict[str, Tensor]] = {}

    def __init__(self, catch: _Catch, path: str) -> None:
        self.__dict__.update(_catch=catch, _path=path)

    def __getattr__(self, name: str) -> Tensor:
        return self._catch.wanted[f"{self._path}.{name}"]  # type: ignore[no-any-return]

    def __setattr__(self, name: str, value: Tensor) -> None:
        self._catch.found[f"{self._path}.{name}"] = value.detach()


def original(root: Any, tensors: Mapping[str, Any], mapping: Any, shapes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Weights of the model's files, by Hugging Face name and with key conversions applied: fp32, on the CPU.

    Args:
        tensors, mapping: as for `stream`.
        shapes: name -> shape of those that are wanted.

    Raises:
        ModelError: the files lack one.
    """
    catch = _Catch(root, shapes)
    config = LoadStateDictConfig(dtype=torch.float32, device_map={"": "cpu"}, weight_mapping=mapping)
    with _one_by_one(True):
        convert_and_load_state_dict_in_model(catch, dict(tensors), config)
    if missing := sorted(shapes.keys() - catch.found.keys()):
        raise ModelError(f"the model's files have no {missing[0]}", fix="Fetch the model again.")
    return catch.found


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
