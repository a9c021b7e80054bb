"""From a model's config to its family row, the auto class that loads it, and the attention backend that is right for it."""

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationMixin, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from swiftlite.models.families.family import Family
from swiftlite.recipe import tables
from swiftlite.recipe.errors import ModelError, RecipeError

# Their causal classes attend in both directions unless the config says is_decoder.
BOTH_WAYS = {*MODEL_FOR_MASKED_LM_MAPPING_NAMES, "bert-generation", "xlnet"}


def family_for(config: PreTrainedConfig) -> Family:
    """The table's row named like the model type, else the generic one."""
    name = config.model_type if config.model_type in tables.FAMILIES else "generic"
    family: Family = tables.load(tables.FAMILIES, name)
    return family


def auto_class(config: PreTrainedConfig) -> Any:
    """AutoModelForCausalLM, or AutoModelForImageTextToText where only that one has the class: its text path is trained.

    Raises:
        ModelError: the type cannot be served; the message names it and says why.
    """
    # A config class out of the model's own folder exists only after model.trust_remote_code was given.
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if remote and type(config).__module__.startswith("transformers_modules."):
        return AutoModelForCausalLM
    if getattr(config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder model"
    elif config.model_type in BOTH_WAYS and not getattr(config, "is_decoder", False):
        reason = "it is an encoder, which sees the tokens it should predict"
    elif (cls := model_class(config)) is None:
        reason = "transformers has no causal language model of that type"
    elif not issubclass(cls, GenerationMixin):
        reason = f"its class {cls.__name__} generates no text"
    else:
        return AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText
    fault = f"model type '{config.model_type}' cannot be served: {reason}."
    raise ModelError(fault, where="model.name", fix="Take a decoder-only language model.")


def model_class(config: PreTrainedConfig) -> Any:
    """The class the auto class builds; None for code shipped inside a model folder."""
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            found = auto._model_mapping[type(config)]
            return found[0] if isinstance(found, (list, tuple)) else found
    return None


def attention_for(
    family: Family,
    config: PreTrainedConfig,
    device_type: str,
    wanted: str = "auto",
    *,
    packed: bool = False,
    joined: bool = False,
    half: bool = False,
) -> str:
    """Resolves `model.attn_implementation` for training.

    Decided by two facts, neither of which plain scaled-dot-product attention can compute: a soft cap on attention scores (a
    config value) and attention sinks (transformers marks such classes as without sdpa). transformers 5.17 drops the cap without
    a word. flex_attention computes both, but has no backward pass on a CPU.

    Args:
        config: the model's config.
        device_type: cpu, cuda or mps.
        wanted: auto, or the backend that a recipe names.
        packed: rows come in packs of one length.
        joined: rows are packed, or joined without padding. sdpa keeps samples apart by a T x T mask. varlen has a kernel for them
            in 16 bits; flex_attention skips what is masked too, but compiles for each length anew, which only packs repay. On an
            H200 packed rows of an 8B shape train at 12,237 tokens/s with varlen.
        half: computed in 16 bits.

    Returns:
        A name that from_pretrained and from_config take (varlen: once `models.varlen` is imported).

    Raises:
        RecipeError: the named backend would give wrong logits, or does not exist for this model or device.
    """
    cls, text = model_class(config), config.get_text_config()
    cap = next((key for key in family.score_caps if getattr(text, key, None)), None)
    sdpa = cap is None and bool(getattr(cls, "_supports_sdpa", False))
    flex = device_type == "cuda" and bool(getattr(cls, "_supports_flex_attn", False))
    # Like flash attention it takes no mask, so a window must reach it as a number; and it is a function from outside.
    varlen = sdpa and all(getattr(cls, f"_supports_{what}", False) for what in ("flash_attn", "attention_backend"))
    if wanted == "auto":
        if joined and half and varlen and device_type == "cuda":
            return "varlen"
        return "flex_attention" if flex and packed else "sdpa" if sdpa else "eager"
    fault = None
    if (wanted == "sdpa" and not sdpa) or (wanted == "varlen" and not varlen):
        fault = f"drops the soft cap on attention scores ({cap})" if cap else "does not exist for this model"
    elif wanted == "flex_attention" and not flex:
        fault = "does not exist for this model" if device_type == "cuda" else "has no backward pass off a CUDA device"
    elif wanted.startswith("flash_attention"):
        # Asked for another kernel than these, transformers takes one of them without a word.
        compatible = getattr(cls, "_compatible_flash_implementations", None) or [wanted]
        supported = getattr(cls, "_supports_flash_attn", False) and wanted in compatible
        fault = "needs a CUDA device" if device_type != "cuda" else None if supported else "does not exist for this model"
    if fault:
        usable = ["auto", *["sdpa"] * sdpa, *["varlen"] * varlen, *["flex_attention"] * flex, "eager"]
        fault = f"'{wanted}' {fault} ({config.model_type} on {device_type})."
        raise RecipeError(fault, where="model.attn_implementation", fix=f"Usable here: {', '.join(usable)}.")
    return wanted
