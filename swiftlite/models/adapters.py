"""LoRA adapters from recipe to model: attached on meta before sharding, initialised after the base weights are loaded."""

import hashlib
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from swiftlite.dist.tensors import whole
from swiftlite.models import decompose
from swiftlite.models.adapter_files import (
    ADAPTER,
    PREFIX,
    Slot,
    adapter_state,
    load_adapter_weights,
    read_adapter_config,
    save_adapter,
    slots,
)
from swiftlite.models.coverage import Coverage, coverage
from swiftlite.models.experts import expert_parameters, matched_parameters, wrappers
from swiftlite.models.families.family import Family
from swiftlite.models.placing import fill
from swiftlite.models.sources import ModelFiles
from swiftlite.models.targets import lora_targets, matched, peft_config, renamed, select_trainable
from swiftlite.recipe.errors import ModelError, RecipeError
from swiftlite.recipe.schema import LoraSection, Recipe

_LISTS = ("target_modules", "target_parameters", "exclude_modules", "modules_to_save")


@contextmanager
def without_adapters(root: nn.Module) -> Iterator[None]:
    """Inside, the model computes as if it had no adapters, and modules_to_save are what they were.

    Sets the flag that peft's layers read and no more: peft's own switch also changes which weights require gradients, behind the
    back of the sharding.
    """
    layers: list[Any] = [m for m in root.modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def attach(
    model: PreTrainedModel, recipe: Recipe, family: Family, files: ModelFiles, tokenizer: PreTrainedTokenizerBase
) -> tuple[PeftModel, list[str]]:
    """Puts the recipe's adapter, or the one of `model.adapter`, on a model that may be on meta. Returns it with notes.

    Raises:
        RecipeError: targets match nothing, or the recipe contradicts the existing adapter.
        ModelError: the existing adapter cannot be used.
    """
    if recipe.model.adapter is not None:
        config, notes = read_adapter_config(recipe.model.adapter)
        agree(recipe.lora, config, model, family, recipe.model.adapter)
        config.base_model_name_or_path, config.revision = files.base_id, files.revision
        said = f"going on from {recipe.model.adapter}: rank {config.r}, alpha {config.lora_alpha}"
        return inject(model, config), [*notes, said]
    assert recipe.lora is not None
    targets = lora_targets(model, recipe.lora, family)
    fused = expert_parameters(model, recipe.lora, family) if recipe.lora.experts else []
    if recipe.lora.splits:
        decompose.require(model, recipe.lora, targets, fused)
    added = [int(tokenizer.convert_tokens_to_ids(token)) for token in recipe.model.add_tokens]
    config = peft_config(model, recipe.lora, targets, files.base_id, files.revision, added, fused)
    return inject(model, config, [*targets, *wrappers(fused)]), []


def inject(model: PreTrainedModel, config: LoraConfig, targets: list[str] | None = None) -> PeftModel:
    """Adds adapter layers to `model` in place and freezes all else; `peft.base_model.model` stays the model that is trained.

    Adapter parameters are on meta and in fp32 whatever the base has; `init_adapters` gives them memory and values.

    Args:
        targets: full names that must have got an adapter layer; given for new adapters.

    Raises:
        RecipeError: peft refuses the config, or could not load the adapter again.
        ModelError: peft put adapters elsewhere than asked.
    """
    kept = {name: getattr(config, name) for name in ("base_model_name_or_path", "revision", *_LISTS)}
    kept = {name: sorted(value) if isinstance(value, set | list) else value for name, value in kept.items()}
    expected = [*matched(model, config), *wrappers(matched_parameters(model, config))] if targets is None else targets
    if lost := renamed(model, expected):
        fault = f"peft would look for the adapter on {min(lost)} under another name, and lose it."
        raise RecipeError(fault, where="lora.target_modules", fix="Leave that layer out.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on Conv1D, tied weights and renamed bases: all decided before
        try:
            peft = get_peft_model(model, config, adapter_name=ADAPTER, low_cpu_mem_usage=True)
        except (ValueError, TypeError, AttributeError) as error:
            raise RecipeError(f"peft refuses this adapter: {str(error).splitlines()[0]}", where="lora") from error
    turned = set(config.target_parameters or ()) - set(kept["target_parameters"] or ())
    # peft writes its own name of the base and a condensed, unordered set of targets into the config.
    for name, value in kept.items():
        setattr(config, name, value)
    if turned:
        what = f"the adapter was made for experts that are linear layers; here they are fused ({', '.join(sorted(turned))})."
        raise ModelError(what, fix="Convert it with peft: load it, then save it.")
    got = [n for n, m in model.named_modules() if isinstance(m, LoraLayer)]
    if set(got) != set(expected):
        odd = sorted(set(got) ^ set(expected))
        raise ModelError(f"peft put adapters on {len(got)} modules instead of {len(expected)}; they differ in {odd[0]}.")
    inner, outer = model.get_input_embeddings(), model.get_output_embeddings()
    if config.ensure_weight_tying and isinstance(outer, ModulesToSaveWrapper):
        # On meta peft gives each copy a parameter of its own.
        outer.modules_to_save[ADAPTER].weight = inner.modules_to_save[ADAPTER].weight
    for slot in slots(model).values():
        tensor = slot.tensor
        if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
            tensor.data = tensor.data.float()
    return peft


def agree(lora: LoraSection | None, config: LoraConfig, model: PreTrainedModel, family: Family, folder: str | Path) -> None:
    """An existing adapter decides its own shape: the recipe may repeat it, not contradict it.

    Only keys that were written count. An alpha of twice the rank is the default that reading a recipe fills in, so it does not.

    Raises:
        RecipeError: names the key and both values.
    """
    if lora is None:
        return
    given = lora.model_fields_set
    pairs: dict[str, tuple[object, object]] = {
        "rank": (lora.rank, config.r),
        "alpha": (lora.alpha, config.lora_alpha),
        "use_rslora": (lora.use_rslora, config.use_rslora),
        "use_dora": (lora.use_dora, config.use_dora),
        "modules_to_save": (sorted(lora.modules_to_save), sorted(config.modules_to_save or [])),
    }
    if "experts" in given:
        parts = family.parts(model)
        pairs["experts"] = (
            lora.experts,
            bool(config.target_parameters) or any(parts.role(n) == "expert" for n in matched(model, config)),
        )
    if lora.alpha in (None, 2 * lora.rank):
        del pairs["alpha"]
    for key, (ours, theirs) in pairs.items():
        if key in given and ours != theirs:
            fault = f"{ours} contradicts the adapter in {folder}, which has {theirs}."
            raise RecipeError(fault, where=f"lora.{key}", fix="Leave the key out.")
    if "target_modules" in given or "exclude_modules" in given:
        wanted, has = set(lora_targets(model, lora, family)), set(matched(model, config))
        if wanted != has:
            has_names = config.target_modules if isinstance(config.target_modules, str) else sorted(config.target_modules or [])
            fault = f"{lora.target_modules} contradicts the adapter in {folder}, which has {has_names}"
            raise RecipeError(
                f"{fault}: they differ in {min(wanted ^ has)}.", where="lora.target_modules", fix="Leave the key out."
            )
    if "dropout" in given:
        config.lora_dropout = lora.dropout


def init_adapters(model: nn.Module, lora: LoraSection | None, seed: int, device: torch.device | str) -> None:
    """Gives the adapter memory on `device` and its first values. Call it after the base weights are loaded; on all ranks.

    Matrices are drawn whole on the CPU, by seed and name alone, and each rank keeps its slice: the same adapter on any number of
    ranks, without a message between them. A and B start as in peft (their product is zero); DoRA's magnitudes, fully trained
    modules and token rows start as the base weights.

    Args:
        model: the peft wrapper or the Hugging Face model inside it.
    """
    root = model.base_model.model if isinstance(model, PeftModel) else model
    gaussian = lora is not None and lora.init == "gaussian"
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for key, slot in slots(root).items():
        old = slot.tensor
        if id(old) in made:  # copies of a tied embedding and head are one parameter
            slot.module._parameters[slot.name] = made[id(old)][1]
            continue
        fill(slot.module, slot.name, _first_value(slot, key.removeprefix(PREFIX), seed, gaussian), device)
        made[id(old)] = (old, slot.tensor)
        if slot.kind == "trainable_tokens_delta":
            originals = slot.layer.token_adapter.trainable_tokens_original
            fill(originals, ADAPTER, whole(slot.tensor).to(originals[ADAPTER].dtype), device)


def _first_value(slot: Slot, name: str, seed: int, gaussian: bool) -> Tensor:
    """The whole first value of one adapter tensor."""
    shape = slot.tensor.shape
    if slot.kind in ("lora_B", "lora_embedding_A", "lora_bias"):
        return torch.zeros(shape)
    if slot.kind in ("lora_A", "lora_embedding_B"):
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        if slot.kind == "lora_embedding_B":
            return torch.randn(shape, generator=generator)
        if gaussian:
            return torch.randn(shape, generator=generator) / slot.layer.r[ADAPTER]
        bound = 1 / math.sqrt(shape[1])  # kaiming_uniform with a = sqrt(5), peft's default
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)
    if slot.kind == "lora_magnitude_vector":
        weight = whole(slot.layer.get_base_layer().weight).float()
        # Rows are outputs; B is zero at the start, so the norm is the base weight's alone.
        return torch.linalg.norm(weight.T if slot.module.fan_in_fan_out else weight, dim=1)
    if slot.kind == "modules_to_save":
        path = next(p for p, m in slot.layer.modules_to_save[ADAPTER].named_modules() if m is slot.module)
        return whole(getattr(slot.layer.original_module.get_submodule(path), slot.name))
    indices = slot.layer.token_adapter.token_indices[ADAPTER]
    return whole(slot.layer.token_adapter.base_layer.weight)[indices]


__all__ = [
    "Coverage",
    "adapter_state",
    "agree",
    "attach",
    "coverage",
    "init_adapters",
    "inject",
    "load_adapter_weights",
    "lora_targets",
    "peft_config",
    "read_adapter_config",
    "save_adapter",
    "select_trainable",
]
