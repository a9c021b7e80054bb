"""An adapter in a folder, as peft writes it: reading its config, loading its weights, gathering and writing them."""

import dataclasses
import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from swiftlite.dist.tensors import whole
from swiftlite.models.placing import fill
from swiftlite.recipe.errors import ModelError

ADAPTER = "default"
INITIAL = "swiftlite_initial"  # of a LoRA layer: what its factors started as, by kind, where that came out of the base
ADAPTER_READ = -2  # what is announced before the reads of all adapter tensors
PREFIX = "base_model.model."
CONFIG, WEIGHTS, OLD_WEIGHTS = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
# What activation checkpointing and compilation put into module names.
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")
# Keys of LoraConfig that we act on, or that say nothing about the weights; any other one must have its default.
_SERVED = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out"),
    *(
        "lora_bias",
        "target_modules",
        "target_parameters",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "modules_to_save",
        "trainable_token_indices",
    ),
    *("ensure_weight_tying", "init_lora_weights", "megatron_core", "qalora_group_size"),
}

_NOTHING = (None, False, "", [], {})
# Always written, in this order. The rest only where it says something: older peft versions stop at keys that they do not know.
_WRITTEN = (
    *(
        "peft_type",
        "task_type",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "r",
        "lora_alpha",
        "lora_dropout",
        "bias",
    ),
    *("use_rslora", "use_dora", "target_modules", "exclude_modules", "modules_to_save", "fan_in_fan_out", "init_lora_weights"),
    "peft_version",
)


class Slot(NamedTuple):
    """Where a tensor of an adapter file lives in the model.

    Attributes:
        kind: lora_A, lora_B, lora_embedding_A, lora_embedding_B, lora_magnitude_vector, modules_to_save, trainable_tokens_delta.
        module, name: owner and attribute of the parameter (rarely a buffer).
        layer: the peft layer it belongs to.
    """

    kind: str
    module: nn.Module
    name: str
    layer: Any

    @property
    def tensor(self) -> Tensor:
        found: Tensor = getattr(self.module, self.name)
        return found

    @property
    def initial(self) -> Tensor | None:
        """What a factor that was split off the base started as, in host memory and sharded as the factor is; see decompose."""
        found: dict[str, Tensor] = getattr(self.layer, INITIAL, {})
        return found.get(self.kind)


def slots(root: nn.Module) -> dict[str, Slot]:
    """Every tensor of the adapter by its key in adapter_model.safetensors, in model order, the same on all ranks.

    Args:
        root: the Hugging Face model (peft.base_model.model).
    """
    found: dict[str, Slot] = {}
    for path, module in root.named_modules():
        name = PREFIX + ".".join(part for part in path.split(".") if part not in _WRAPPERS)
        if isinstance(module, LoraLayer):
            found |= {f"{name}.{key}": slot for key, slot in _lora_slots(module)}
        elif isinstance(module, ModulesToSaveWrapper) and ADAPTER in module.modules_to_save:
            copy = module.modules_to_save[ADAPTER]
            for key in copy.state_dict():
                owner, _, attribute = key.rpartition(".")
                found[f"{name}.{key}"] = Slot("modules_to_save", copy.get_submodule(owner), attribute, module)
        elif isinstance(module, TrainableTokensWrapper) and not module.token_adapter.tied_adapter:
            delta = module.token_adapter.trainable_tokens_delta
            if ADAPTER in delta:
                found[f"{name}.token_adapter.trainable_tokens_delta"] = Slot("trainable_tokens_delta", delta, ADAPTER, module)
    return found


def _lora_slots(layer: LoraLayer) -> Iterator[tuple[str, Slot]]:
    for kind in ("lora_A", "lora_B"):
        if ADAPTER in (table := getattr(layer, kind)):
            yield f"{kind}.weight", Slot(kind, table[ADAPTER], "weight", layer)
            if table[ADAPTER].bias is not None:
                yield f"{kind}.bias", Slot("lora_bias", table[ADAPTER], "bias", layer)
    for kind in ("lora_embedding_A", "lora_embedding_B"):
        if ADAPTER in (table := getattr(layer, kind)):
            yield kind, Slot(kind, table, ADAPTER, layer)
    if ADAPTER in layer.lora_magnitude_vector:
        yield "lora_magnitude_vector", Slot("lora_magnitude_vector", layer.lora_magnitude_vector[ADAPTER], "weight", layer)


def read_adapter_config(folder: str | Path) -> tuple[LoraConfig, list[str]]:
    """The config of an existing adapter, made ready for training, and notes on keys that were ignored.

    A key that this peft does not know is ignored where its value says nothing (null, false, empty): newer versions write all
    their options. Where it says something, the weights mean something that we cannot compute.

    Raises:
        ModelError: no LoRA adapter, or one that uses something we do not serve.
    """
    path = Path(folder) / CONFIG
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ModelError("no adapter here: adapter_config.json is missing.", where=folder) from None
    except ValueError as error:
        raise ModelError(f"the adapter's config is no JSON: {error}.", where=path) from None
    if not isinstance(values, dict) or values.get("peft_type") != "LORA":
        kind = values.get("peft_type") if isinstance(values, dict) else None
        raise ModelError(f"the adapter's peft_type is {kind!r}; only LORA is served.", where=path)
    defaults = {f.name: getattr(LoraConfig(), f.name) for f in dataclasses.fields(LoraConfig)}
    unknown = [k for k in values if k not in defaults]
    if said := [k for k in unknown if values[k] not in _NOTHING]:
        fault = f"the adapter's config sets '{said[0]}', which this peft does not know."
        raise ModelError(fault, where=path, fix="Update peft, or train the adapter again.")
    for key in [k for k in values if k in defaults and k not in _SERVED]:
        if values[key] not in (*_NOTHING, defaults[key]):
            raise ModelError(f"the adapter uses '{key}' ({values[key]!r}), which is not served.", where=path)
    if values.get("task_type") not in (None, "CAUSAL_LM"):
        raise ModelError(f"the adapter's task_type is {values['task_type']}; only CAUSAL_LM is served.", where=path)
    init = values.get("init_lora_weights", True)
    if not isinstance(init, bool) and init not in (None, "gaussian", "eva", "orthogonal"):
        fault = f"the adapter was begun with '{init}', which changed the base weights too."
        raise ModelError(fault, where=path, fix="Convert it with peft.")
    kept = {k: v for k, v in values.items() if k in defaults and v is not None}
    config = LoraConfig(**kept | {"inference_mode": False, "task_type": "CAUSAL_LM", "init_lora_weights": True})
    return config, [f"{path}: ignored '{key}', which this peft does not know" for key in unknown]


def load_adapter_weights(peft: PeftModel, folder: str | Path, device: torch.device | str = "cpu") -> None:
    """Loads an adapter's tensors into an injected model, sharded or not. Every tensor must fit, and none may be left.

    Args:
        device: where parameters that are still on meta get their memory.

    Raises:
        ModelError: the tensors do not line up with the model; the message names one key.
    """
    tensors, places = _read_weights(Path(folder)), slots(peft.base_model.model)
    missing = [k for k in places if k not in tensors]
    unexpected = [k for k in tensors if k not in places]
    faults = [f"{len(missing)} of its tensors are missing, such as {missing[0]}"] if missing else []
    faults += [f"{len(unexpected)} of its tensors have no place, such as {unexpected[0]}"] if unexpected else []
    for key, slot in places.items():
        if key in tensors and tensors[key].shape != slot.tensor.shape:
            faults += [f"{key} has shape {list(tensors[key].shape)} instead of {list(slot.tensor.shape)}"]
    if faults:
        fault = f"the adapter does not fit {type(peft.base_model.model).__name__}: {'; '.join(faults[:3])}."
        raise ModelError(fault, where=folder, fix="It was trained on another model, or its files are damaged.")
    for key, slot in places.items():
        fill(slot.module, slot.name, tensors[key], device)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of the file, on the CPU; the pickled form only where there is no other, and by the safe loader."""
    try:
        if (folder / WEIGHTS).exists():
            return dict(load_file(folder / WEIGHTS))
        if (folder / OLD_WEIGHTS).exists():
            return dict(torch.load(folder / OLD_WEIGHTS, map_location="cpu", weights_only=True))
    except Exception as error:  # whatever a damaged or hostile file makes the two readers raise
        raise ModelError(f"the adapter's weights cannot be read: {str(error).splitlines()[0]}.", where=folder) from error
    raise ModelError(f"no adapter here: {WEIGHTS} is missing.", where=folder)


def adapter_state(peft: PeftModel) -> dict[str, Tensor]:
    """The adapter's tensors under the keys of its file: whole, on the CPU. All ranks must call it.

    The same keys as peft's get_peft_model_state_dict, without its habit of adding whole embeddings. An adapter that was split off
    the base becomes the one of twice the rank that does the same on the whole base: B A - B0 A0 = [B, -B0] [A; A0].
    """
    root = peft.base_model.model
    announce = getattr(root, "swiftlite_announce", None)  # see export.ranks
    if announce is not None:
        announce(ADAPTER_READ)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after an evaluation the root still holds gathered copies in the compute type
    return {key: _for_whole_base(slot).contiguous() for key, slot in slots(root).items()}


def _for_whole_base(slot: Slot) -> Tensor:
    """A tensor of the adapter, whole and on the CPU, as it stands in a file."""
    now = whole(slot.tensor).to("cpu", copy=True)
    if slot.initial is None:
        return now
    start = whole(slot.initial).cpu()
    return torch.cat([now, start], 0) if slot.kind == "lora_A" else torch.cat([now, -start], 1)


def initial_state(root: nn.Module) -> dict[str, Tensor]:
    """What factors that were split off the base started as, by their key in adapter_model.safetensors; sharded as they are."""
    return {key: slot.initial for key, slot in slots(root).items() if slot.initial is not None}


def save_adapter(peft: PeftModel, folder: str | Path, **named: Any) -> dict[str, Any]:
    """Writes a folder that plain peft loads, and returns its config. All ranks must call it; the first one writes.

    Args:
        named: values that replace those of the config, as the base's name.
    """
    tensors, config = adapter_state(peft), adapter_config(peft, **named)
    if not dist.is_initialized() or dist.get_rank() == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, Path(folder) / WEIGHTS, metadata={"format": "pt"})
    return config


def adapter_config(peft: PeftModel, **named: Any) -> dict[str, Any]:
    """Content of adapter_config.json: known keys first, then whatever differs from peft's default; lists sorted."""
    config = peft.peft_config[ADAPTER]
    values, default = config.to_dict() | {"inference_mode": True, **named}, type(config)().to_dict()
    values["task_type"] = values["task_type"] or "CAUSAL_LM"
    if initial_state(peft.base_model.model):  # twice the rank at the same scale, which is alpha / r or alpha / sqrt(r)
        values["r"], values["lora_alpha"] = 2 * config.r, config.lora_alpha * (2**0.5 if config.use_rslora else 2)
    rest = sorted(k for k in values if k not in _WRITTEN and _plain(values[k]) != _plain(default.get(k)))
    return {key: _plain(values[key]) for key in (*_WRITTEN, *rest)}


def _plain(value: Any) -> Any:
    """A config value as JSON has it; sets become sorted lists, so that the same adapter gives the same bytes."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(value)
    return value.value if isinstance(value, Enum) else value
