"""The small files of an exported model: config.json and generation_config.json, the base's own with only the needed changes."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from swiftlite.export.tensors import base_layer
from swiftlite.export.trained import Trained
from swiftlite.models.files import read_json

# What a vision-language base carries beside its tokenizer.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def vocab_rows(trained: Trained) -> int:
    """Rows of the embedding in memory."""
    weight: torch.Tensor = base_layer(trained.model.get_input_embeddings()).weight  # type: ignore[assignment]
    return weight.shape[0]


def override_is_inner(config: Any, key: str) -> bool:
    """Whether an entry of `model.config_overrides` goes to the text part of a composite config, as when the model is built."""
    return hasattr(config.get_text_config(), key) and not hasattr(config, key)


def model_config(trained: Trained, dtype: torch.dtype, untied: bool) -> tuple[dict[str, Any], list[str]]:
    """The base's config.json in agreement with the tensors written, and notes on what was changed.

    Args:
        dtype: type of the written tensors.
        untied: embedding and head differ now and are both in the files.
    """
    config, notes = read_json(trained.files.folder / "config.json"), []
    own = trained.model.config
    if config.get("model_type") != own.model_type:
        # A text model taken out of a composite one: the base's config describes another class.
        config = own.to_diff_dict() | {"model_type": own.model_type}
        for key in ("architectures", "use_cache"):  # the latter is switched off for training only
            config.pop(key, None)
        notes.append(f"config.json is that of the trained {own.model_type} model, not the base's")
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    for key, value in trained.config_overrides.items():
        (text if override_is_inner(own, key) else config)[key] = value
    config.setdefault("architectures", [type(trained.model).__name__.removeprefix("FSDP")])
    if config.pop("quantization_config", None) is not None:
        notes.append("quantization_config left out: the weights are written unquantised")
    if text.get("vocab_size") != (rows := vocab_rows(trained)):
        notes.append(f"vocab_size is {rows} (base: {text.get('vocab_size')})")
        text["vocab_size"] = rows
    if untied:
        notes.append("embedding and head differ after training: both are written, and tie_word_embeddings is false")
        config["tie_word_embeddings"] = False
        if "tie_word_embeddings" in text:
            text["tie_word_embeddings"] = False
    if not _set_dtype(config, dtype_name(dtype)):
        config["dtype"] = dtype_name(dtype)
    for part in {id(c): c for c in (config, text)}.values():
        pad = part.get("pad_token_id")
        if isinstance(pad, int) and not 0 <= pad < rows:
            part["pad_token_id"] = _pad(trained, {}, rows)
            notes.append(f"config.json: pad_token_id {pad} is no row of the embedding, changed to {part['pad_token_id']}")
    return config, notes


def generation_config(trained: Trained) -> tuple[dict[str, Any], list[str]]:
    """The base's generation settings with trained stop tokens added and contradictions removed, and notes on the changes."""
    path, notes = trained.files.folder / "generation_config.json", []
    config = read_json(path) if path.exists() else {}
    config.pop("_from_model_config", None)  # with it, transformers makes these settings anew from config.json
    for key in ("bos_token_id", "eos_token_id"):
        if config.get(key) is None and (value := _text_value(trained, key)) is not None:
            config[key] = value
    stops = _ids(config.get("eos_token_id"))
    stops += sorted(set(trained.stop_ids) - set(stops))
    if stops != _ids(config.get("eos_token_id")):
        added = stops[len(_ids(config.get("eos_token_id"))) :]
        notes.append(f"generation_config.json: trained stop tokens {added} added to eos_token_id")
        config["eos_token_id"] = stops if len(stops) > 1 else stops[0]
    pad, rows = config.get("pad_token_id"), vocab_rows(trained)
    if pad is None or not 0 <= pad < rows:
        config["pad_token_id"] = _pad(trained, config, rows)
        if pad is not None:
            notes.append(
                f"generation_config.json: pad_token_id {pad} is no row of the embedding, changed to {config['pad_token_id']}"
            )
    while (broken := _contradiction(config)) is not None:
        notes.append(
            f"generation_config.json: {broken} {config.pop(broken)!r} contradicts the other settings of the base and was removed"
        )
    return {k: v for k, v in config.items() if v is not None}, notes


def write_small_files(trained: Trained, folder: Path, config: Mapping[str, Any] | None) -> list[str]:
    """Writes generation_config.json and, of a whole model, config.json and what a remote-code or vision-language base needs.

    Returns:
        Notes on changed generation settings.
    """
    base = trained.files.folder
    generation, notes = generation_config(trained)
    _write(folder / "generation_config.json", generation)
    if config is None:
        return notes
    _write(folder / "config.json", config)
    names = list(PROCESSOR_FILES)
    if "auto_map" in config:
        names += [p.name for p in base.glob("*.py")]
    for name in names:
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)
    return notes


def _contradiction(config: Mapping[str, Any]) -> str | None:
    """The first setting that transformers' strict validation objects to; None when it has no objection."""
    try:
        GenerationConfig(**config).validate(strict=True)  # type: ignore[no-untyped-call]
    except ValueError as e:
        # "- `temperature`: `do_sample` is not set ..." in lists of small faults, "`early_stopping` must be ..." in single ones
        named = re.findall(r"^- `(\w+)`", str(e), re.MULTILINE) or re.findall(r"`(\w+)`", str(e))
        return next((n for n in named if n in config and n != "do_sample"), None)
    return None


def _pad(trained: Trained, generation: Mapping[str, Any], rows: int) -> int | None:
    tokens = [
        _text_value(trained, "pad_token_id"),
        trained.tokenizer.pad_token_id,
        *_ids(generation.get("eos_token_id")),
        trained.tokenizer.eos_token_id,
    ]
    return next((t for t in tokens if isinstance(t, int) and 0 <= t < rows), None)


def _text_value(trained: Trained, key: str) -> Any:
    config = trained.model.config
    return getattr(config.get_text_config(), key, None) if getattr(config, key, None) is None else getattr(config, key)


def _ids(value: Any) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _set_dtype(config: dict[str, Any], name: str) -> bool:
    """Replaces `dtype` and `torch_dtype` (its older name) at every depth; whether the top level has one."""
    for value in config.values():
        if isinstance(value, dict):
            _set_dtype(value, name)
    present = [key for key in ("dtype", "torch_dtype") if key in config]
    config |= dict.fromkeys(present, name)
    return bool(present)


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
