"""The exporter `adapter`: a PEFT folder that plain `PeftModel.from_pretrained(base, folder)` loads, with vLLM's names of keys."""

import json
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import save_file

from swiftlite.export.config import vocab_rows, write_small_files
from swiftlite.export.folder import check_space
from swiftlite.export.reload import Reloaded, load_plain, logits_of
from swiftlite.export.trained import Exporter, Trained, Written
from swiftlite.models.adapters import adapter_state
from swiftlite.models.files import read_json
from swiftlite.models.tokenizer import save_tokenizer
from swiftlite.recipe.errors import RecipeError
from swiftlite.recipe.schema import ExportSection

# Always written, in this order; whatever else differs from peft's default follows. Older peft versions stop at unknown keys.
_KEYS = """peft_type task_type base_model_name_or_path revision inference_mode r lora_alpha lora_dropout bias use_rslora use_dora
target_modules exclude_modules modules_to_save fan_in_fan_out init_lora_weights peft_version""".split()


def adapter_config(trained: Trained) -> dict[str, Any]:
    """Content of adapter_config.json: lists sorted, the base named as the user named it."""
    assert trained.peft is not None
    config = trained.peft.peft_config["default"]
    default = type(config)().to_dict()
    values = config.to_dict() | {
        "inference_mode": True,
        "base_model_name_or_path": trained.files.base_id,
        "revision": trained.files.revision,
    }
    values["task_type"] = values["task_type"] or "CAUSAL_LM"
    rest = sorted(k for k in values if k not in _KEYS and _plain(values[k]) != _plain(default.get(k)))
    return {key: _plain(values[key]) for key in (*_KEYS, *rest)}


def vllm_notes(config: dict[str, Any], grown: bool) -> list[str]:
    """What vLLM cannot load of this adapter, by its own loader's rules (vllm/lora/peft_helper.py and lora/utils.py)."""
    targets = [config["target_modules"]] if isinstance(config["target_modules"], str) else config["target_modules"] or []
    ends = [e for e in ("lm_head", "embed_tokens") if any(e in t for t in targets)]
    patterns = config.get("rank_pattern") or config.get("alpha_pattern")
    merged = "serve the merged export instead"
    notes = {
        f"vLLM refuses modules_to_save ({', '.join(config['modules_to_save'] or [])}): {merged}": config["modules_to_save"],
        f"vLLM refuses use_dora: {merged}": config["use_dora"],
        f"vLLM refuses trained token rows (trainable_token_indices): {merged}": config.get("trainable_token_indices"),
        f"vLLM refuses bias '{config['bias']}': {merged}": config["bias"] != "none",
        f"vLLM takes one rank and alpha for all modules (rank_pattern, alpha_pattern): {merged}": patterns,
        f"vLLM does not load adapters on parameters (target_parameters): {merged}": config.get("target_parameters"),
        f"vLLM takes ranks up to 512, this one is {config['r']}: {merged}": config["r"] > 512,
        f"vLLM needs --max-lora-rank {config['r']} or above; versions before 0.11 stop at 256": 256 < config["r"] <= 512,
        f"vLLM needs --max-lora-rank {config['r']} or above": 16 < config["r"] <= 256,
        f"vLLM loads adapters on {' and '.join(ends)} for some model classes only": ends,
        f"the vocabulary grew: call resize_token_embeddings on the base before loading; vLLM cannot ({merged})": grown,
    }
    return [text for text, holds in notes.items() if holds]


def check(trained: Trained, section: ExportSection) -> None:
    if trained.peft is None:
        raise RecipeError(
            "full fine-tuning leaves no adapter", where="export.formats", fix="Use export: [merged], or train with lora."
        )


def write(trained: Trained, folder: Path, section: ExportSection) -> Written:
    """Writes adapter_config.json, adapter_model.safetensors, tokenizer files and generation settings into an empty folder."""
    assert trained.peft is not None
    # peft's own save_pretrained asks the hub for the base's config to guess whether the vocabulary was resized.
    tensors = {name: tensor.contiguous().cpu() for name, tensor in sorted(adapter_state(trained.peft).items())}
    check_space(folder, sum(t.numel() * t.element_size() for t in tensors.values()))
    config = adapter_config(trained)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    notes = vllm_notes(config, _base_rows(trained) != vocab_rows(trained))
    if trained.config_overrides:
        notes.append(f"load the base with the settings it was trained with: {dict(trained.config_overrides)}")
    notes += write_small_files(trained, folder, None)
    save_tokenizer(trained.tokenizer, trained.files, folder, changed=trained.tokens_added, chat_template=trained.chat_template)
    return Written(next(iter(tensors.values())).dtype, notes)


def reload(trained: Trained, folder: Path, written: Written, device: torch.device) -> Reloaded:
    """Opens base and adapter with plain transformers and peft, the base in the type of training, and compares every tensor."""
    assert trained.peft is not None
    model = load_plain(trained, trained.files.folder, device, dtype=trained.compute_dtype, overrides=True)
    if model.get_input_embeddings().weight.shape[0] < vocab_rows(trained):
        model.resize_token_embeddings(vocab_rows(trained), mean_resizing=False)
    loaded = PeftModel.from_pretrained(model, folder)
    found, meant = adapter_state(loaded), adapter_state(trained.peft)
    faults = [f"{name} is missing" for name in meant.keys() - found.keys()]
    faults += [f"{name} is new" for name in found.keys() - meant.keys()]
    wrong = [name for name in meant.keys() & found.keys() if not torch.equal(found[name], meant[name].to(found[name].dtype))]
    faults += [f"{name} is not what was trained" for name in wrong]
    return logits_of(loaded), sorted(faults)


def _base_rows(trained: Trained) -> int:
    config = read_json(trained.files.folder / "config.json")
    rows: int = (config.get("text_config") or config).get("vocab_size") or vocab_rows(trained)
    return rows


def _plain(value: Any) -> Any:
    """A value as JSON has it; sets become sorted lists, so that the same run writes the same bytes."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value.value if isinstance(value, Enum) else value


EXPORTER = Exporter("adapter", check, write, reload)
