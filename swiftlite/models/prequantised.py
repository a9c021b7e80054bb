"""Checkpoints that are quantised already: 4-bit ones of bitsandbytes are trained beside as they are, all others get an answer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from swiftlite.models.files import ModelFiles, read_json
from swiftlite.recipe.errors import ModelError, RecipeError
from swiftlite.recipe.load import Loaded
from swiftlite.recipe.resolve import packed_faults
from swiftlite.recipe.schema import QuantizeSection

SERVED = "Of such, nf4 in blocks of 64 is served, with or without double quantisation in blocks of 256"
NAME_PLAIN = "Name the unquantised model; `quantize: nf4` packs it while it is read."
# quant_method of config.json -> what it is.
KINDS = {
    "aqlm": "AQLM, codebooks",
    "auto-round": "AutoRound, integers in groups",
    "awq": "AWQ, 4-bit integers in groups",
    "bitnet": "BitNet, three values a weight",
    "compressed-tensors": "compressed-tensors, the format of llm-compressor and vLLM",
    "eetq": "EETQ, 8-bit integers",
    "fbgemm_fp8": "FBGEMM, float8 with a scale a row",
    "fp8": "block-scaled float8, as of DeepSeek",
    "fp_quant": "FP-Quant, 4-bit floats",
    "gptq": "GPTQ, integers in groups",
    "higgs": "HIGGS, grids of vectors",
    "hqq": "HQQ, integers in groups",
    "mlx": "MLX, integers in groups, for Apple's own library",
    "modelopt": "NVIDIA ModelOpt",
    "mxfp4": "MXFP4, 4-bit floats in blocks, as of gpt-oss",
    "quanto": "quanto, integers or float8",
    "quark": "AMD Quark",
    "spqr": "SpQR, integers and outliers",
    "torchao": "torchao",
    "vptq": "VPTQ, codebooks of vectors",
}
_FIXES = {
    "mxfp4": "Name a bf16 conversion of it, or make one with transformers: quantization_config=Mxfp4Config(dequantize=True), "
    "then save_pretrained; `quantize: nf4` packs it while it is read.",
}
# Files in which older checkpoints tell what their config.json does not.
_OLD = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


def quantization_config(folder: Path) -> dict[str, Any]:
    """The quantization_config of a model, with its quant_method; empty for a plain model."""
    config = read_json(folder / "config.json")
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    found = next((c[k] for c in (config, text) for k in ("quantization_config", "compression_config") if c.get(k)), None)
    found = found or config.get("quantization")  # mlx-lm writes it under both names, or under this one
    if not found:
        old = next((method for name, method in _OLD.items() if (folder / name).exists()), None)
        return {"quant_method": old} if old else {}
    found = found if isinstance(found, dict) else {}
    own = "bitsandbytes" if found.get("load_in_4bit") or found.get("load_in_8bit") else "mlx" if "group_size" in found else None
    return {**found, "quant_method": found.get("quant_method") or own or "an unnamed method"}


def section_of(folder: Path) -> QuantizeSection | None:
    """How the weights of a model folder are packed, by its config.json alone; None: they are plain.

    Raises:
        ModelError: they are quantised in a way that is not trained on.
    """
    config = quantization_config(folder)
    method = str(config.get("quant_method", "")).lower()
    if not method:
        return None
    if method.startswith("bitsandbytes"):
        kind = config.get("bnb_4bit_quant_type", "fp4") if config.get("load_in_4bit") else "int8"  # fp4 is their default
        if kind == "nf4":
            return QuantizeSection(method="nf4", double_quant=bool(config.get("bnb_4bit_use_double_quant")))
        what = f"its weights are quantised already: bitsandbytes, {kind}. {SERVED}"
    else:
        what = f"its weights are quantised already ({KINDS.get(method, method)}), and such ones are not trained on"
    raise ModelError(what, where=folder / "config.json", fix=_FIXES.get(method, NAME_PLAIN))


def adopt(loaded: Loaded, files: ModelFiles) -> tuple[Loaded, list[str]]:
    """The recipe with the `quantize` section that the model's files ask for, and notes.

    Raises:
        RecipeError: the recipe says otherwise, or asks for what packed weights cannot give.
    """
    found = section_of(files.folder)
    if found is None:
        return loaded, []
    given, fix = loaded.recipe.quantize, "Leave it out, or name the unquantised model."
    held = "the model's files hold 4-bit weights (bitsandbytes, nf4"
    held += ", double quantisation)" if found.double_quant else ", single quantisation)"
    if given is not None and given.method != found.method:
        raise RecipeError(f"{given.method} contradicts it: {held}", where="quantize.method", fix=fix)
    if given is not None and "double_quant" in given.model_fields_set and given.double_quant != found.double_quant:
        raise RecipeError(f"{given.double_quant} contradicts it: {held}", where="quantize.double_quant", fix=fix)
    section = found if given is None else given.model_copy(update={"double_quant": found.double_quant})
    recipe = loaded.recipe.model_copy(update={"quantize": section})
    if recipe.lora and recipe.lora.init == "qera":
        raise RecipeError(f"{held}, and nothing that 'qera' could give back", where="lora.init", fix="Use init: default.")
    for key, what, change in packed_faults(recipe):
        raise RecipeError(f"{held}: {what}", where=key, fix=change)
    origins = loaded.origins | ({} if given else {"quantize": "derived: the model's files"})
    return replace(loaded, recipe=recipe, origins=origins), [f"{held}, which are used as they are"]
