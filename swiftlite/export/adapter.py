"""The exporter `adapter`: a PEFT folder that plain `PeftModel.from_pretrained(base, folder)` loads, with vLLM's names of keys."""

from pathlib import Path
from typing import Any

import torch

from swiftlite.export.config import vocab_rows, write_small_files
from swiftlite.export.folder import check_space
from swiftlite.export.onto import unpack_into
from swiftlite.export.reload import Reloaded, load_adapted, logits_of
from swiftlite.export.trained import Exporter, Trained, Written
from swiftlite.models.adapter_files import adapter_state, save_adapter, slots
from swiftlite.models.files import read_json
from swiftlite.models.tokenizer import save_tokenizer
from swiftlite.recipe.errors import RecipeError
from swiftlite.recipe.schema import ExportSection


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
    places = slots(trained.peft.base_model.model).values()
    check_space(folder, sum(s.tensor.nbytes * (1 if s.initial is None else 2) for s in places))
    # peft's own save_pretrained asks the hub for the base's config to guess whether the vocabulary was resized.
    config = save_adapter(trained.peft, folder, base_model_name_or_path=trained.files.base_id, revision=trained.files.revision)
    notes = vllm_notes(config, _base_rows(trained) != vocab_rows(trained))
    if trained.config_overrides:
        notes.append(f"load the base with the settings it was trained with: {dict(trained.config_overrides)}")
    notes += write_small_files(trained, folder, None)
    save_tokenizer(trained.tokenizer, trained.files, folder, changed=trained.tokens_added, chat_template=trained.chat_template)
    return Written(next(iter(places)).tensor.dtype, notes)


def reload(trained: Trained, folder: Path, written: Written, device: torch.device) -> Reloaded:
    """Opens base and adapter with plain transformers and peft, the base in the type of training, and compares every tensor.

    Where the base was packed, the logits are those on the values that were trained on; `Trained.gaps` has the others.
    """
    assert trained.peft is not None
    loaded = load_adapted(trained, folder, device)
    found, meant = adapter_state(loaded), adapter_state(trained.peft)
    faults = [f"{name} is missing" for name in meant.keys() - found.keys()]
    faults += [f"{name} is new" for name in found.keys() - meant.keys()]
    wrong = [name for name in meant.keys() & found.keys() if not torch.equal(found[name], meant[name].to(found[name].dtype))]
    faults += [f"{name} is not what was trained" for name in wrong]
    unpack_into(loaded, trained)
    return logits_of(loaded), sorted(faults)


def _base_rows(trained: Trained) -> int:
    config = read_json(trained.files.folder / "config.json")
    rows: int = (config.get("text_config") or config).get("vocab_size") or vocab_rows(trained)
    return rows


EXPORTER = Exporter("adapter", check, write, reload)
