"""The model of a target by transformers' own loader, with an adapter or trained weights put on it."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from transformers.utils import logging as hf_logging

from swiftlite.dist.checkpoint import Saved
from swiftlite.models.adapter_files import slots
from swiftlite.models.adapters import inject, load_adapter_weights
from swiftlite.models.build import DTYPES
from swiftlite.models.families.lookup import attention_for, auto_class, family_for
from swiftlite.models.files import ModelFiles, open_weights
from swiftlite.models.prequantised import section_of
from swiftlite.recipe.errors import ModelError, RecipeError


def pick_dtype(wanted: str, device: torch.device, config: Any) -> torch.dtype:
    """The type to compute in; auto: fp32 on a CPU, else that of the model's files."""
    if wanted != "auto":
        return DTYPES[wanted]
    stored = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    no_bf16 = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    # Most CPUs multiply in fp32 only; anything narrower is slower there.
    if device.type == "cpu" or stored not in DTYPES.values() or (stored == torch.bfloat16 and no_bf16):
        return torch.float32
    assert isinstance(stored, torch.dtype)
    return stored


def load_plain(files: ModelFiles, config: Any, device: torch.device, dtype: torch.dtype, notes: list[str]) -> Any:
    """The model by transformers' own loader; no weight may be missing. 4-bit weights of bitsandbytes become plain.

    Raises:
        ModelError: it cannot be loaded, or a weight is missing.
    """
    attention = attention_for(family_for(config), config, device.type)
    kwargs: dict[str, Any] = {"local_files_only": True, "trust_remote_code": files.remote_code, "output_loading_info": True}
    # flex_attention compiles anew for every length, and an answer has all of them.
    kwargs |= {"dtype": dtype, "attn_implementation": "eager" if attention == "flex_attention" else attention}
    kind, source, tensors = auto_class(config), files.folder, open_weights(files) if reads_packed(files) else {}
    if tensors:
        vars(config).pop("quantization_config", None)
        with torch.device("meta"):
            kind, source = type(kind.from_config(config, trust_remote_code=files.remote_code)), None
        kwargs["state_dict"] = dict(tensors)
        notes.append("the 4-bit weights of the model's files are dequantised")
    if device.type != "cpu":
        kwargs["device_map"] = "auto" if device.type == "cuda" and not _fits(files, tensors, dtype) else {"": device}
    try:
        with _progress_on_terminal():
            model, found = kind.from_pretrained(source, config=config, **kwargs)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ModelError(f"cannot be loaded: {str(error).strip().splitlines()[0]}", where=files.folder) from error
    if missing := sorted(found["missing_keys"]):
        raise ModelError(
            f"{len(missing)} weights are missing, such as {missing[0]}", where=files.folder, fix="Fetch the weights again."
        )
    if unused := sorted(found["unexpected_keys"]):
        notes.append(f"{len(unused)} tensors of the files are not used by {type(model).__name__}, such as {unused[0]}")
    return model


def reads_packed(files: ModelFiles) -> bool:
    """Whether packed weights are read by us; others are left to transformers and their own library."""
    try:
        return section_of(files.folder) is not None
    except ModelError:
        return False


def _fits(files: ModelFiles, tensors: Mapping[str, Any], dtype: torch.dtype) -> bool:
    """Whether the model and a cache fit the first GPU, judged by the size of its files at 2 bytes a weight, or of `tensors`."""
    size = sum(path.stat().st_size for path in files.weights) * max(1, dtype.itemsize / 2)
    if tensors:
        size = sum(prod(tensor.get_shape()) for tensor in tensors.values()) * dtype.itemsize
    free: int = torch.cuda.mem_get_info(0)[0]
    return 1.15 * size < free


@contextmanager
def _progress_on_terminal() -> Iterator[None]:
    shown = hf_logging.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def attach(model: Any, folder: str, lora: LoraConfig) -> None:
    """Puts an adapter on the model, every tensor of it, in the model's own type.

    Raises:
        ModelError: adapter and model do not fit each other; names one key.
    """
    try:
        peft = inject(model, lora)
    except RecipeError as error:
        raise ModelError(f"the adapter does not fit {type(model).__name__}: {error.what}", where=folder, fix=error.fix) from error
    load_adapter_weights(peft, folder)
    for slot in slots(model).values():
        # Spread over several GPUs, each layer's adapter belongs where the layer is.
        base: Any = slot.layer.get_base_layer() if isinstance(slot.layer, LoraLayer) else slot.layer.original_module
        device = next(base.parameters()).device
        if device.type == "meta":
            fix = "Use device cpu, or export the run as merged and use that."
            raise ModelError("base model and adapter do not fit the GPUs of this machine", where=folder, fix=fix)
        slot.tensor.data = slot.tensor.data.to(device, model.dtype)


def load_full(model: Any, folder: Path) -> None:
    """Puts the weights of a full fine-tuning checkpoint into its base.

    Raises:
        ModelError: a weight has no place in the model.
    """
    saved, parameters = Saved(folder), dict(model.named_parameters(remove_duplicate=False))
    for name in saved.names("trainable"):
        shape = saved.shape("trainable", name)
        if name not in parameters or list(parameters[name].shape) != shape:
            what = f"{name} {shape} has no place in {type(model).__name__}"
            raise ModelError(what, where=folder, fix="Name the base it was trained on with --base MODEL.")
        with torch.no_grad():
            parameters[name].copy_(saved.rows("trainable", name))
