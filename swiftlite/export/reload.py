"""Opens exports as a user would: plain transformers, nothing of ours, no network."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoConfig

from swiftlite.export.config import override_is_inner, vocab_rows
from swiftlite.export.tensors import pieces
from swiftlite.export.trained import Trained
from swiftlite.models import weights
from swiftlite.models.families.lookup import auto_class, family_for
from swiftlite.models.files import ModelFiles
from swiftlite.models.prequantised import quantization_config

Forward = Callable[[Tensor], Tensor]
Reloaded = tuple[Forward, list[str]]


def holds_packed(files: ModelFiles) -> bool:
    """Whether the files of a model hold packed weights and no others."""
    return bool(quantization_config(files.folder))


def _config(trained: Trained, folder: Path, overrides: bool) -> Any:
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trained.trust_remote_code)
    for key, value in trained.config_overrides.items() if overrides else ():
        setattr(config.get_text_config() if override_is_inner(config, key) else config, key, value)
    return config


def _how(trained: Trained) -> dict[str, Any]:
    attention = getattr(trained.model.config, "_attn_implementation", None)
    # The same sums in the same order as in training.
    same = {"attn_implementation": attention} if attention in ("eager", "sdpa") else {}
    return {"trust_remote_code": trained.trust_remote_code, **same}


def load_plain(
    trained: Trained, folder: Path, device: torch.device, *, dtype: torch.dtype | str = "auto", overrides: bool = False
) -> Any:
    """The model in a folder by transformers' automatic class; `overrides`: with the recipe's model.config_overrides."""
    config, how = _config(trained, folder, overrides), _how(trained)
    return auto_class(config).from_pretrained(folder, config=config, dtype=dtype, local_files_only=True, **how).to(device)


def _unpacked_base(trained: Trained, device: torch.device) -> Any:
    """The base of files that hold packed weights, made of what the trained model computes with beside its adapter: nothing else
    than their own library reads such files."""
    config = _config(trained, trained.files.folder, overrides=True)
    vars(config).pop("quantization_config", None)
    config.get_text_config().vocab_size = vocab_rows(trained)
    with torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=trained.compute_dtype, **_how(trained))
    types, tensors = {n: t.dtype for n, t in model.state_dict().items()}, {}
    for piece in pieces(trained.model):
        part = piece.read()
        found = part.tensors | part.before
        tensors |= {n: t.to(device, types[n], copy=True) for n, t in found.items() if n in types}
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    weights.materialise_buffers(model, device)
    weights.require_loaded(model)
    return model.eval()


def load_adapted(trained: Trained, folder: Path, device: torch.device) -> PeftModel:
    """The base model of the files in the type of training, with the adapter in `folder` on it."""
    if holds_packed(trained.files):
        return PeftModel.from_pretrained(_unpacked_base(trained, device), folder)
    model = load_plain(trained, trained.files.folder, device, dtype=trained.compute_dtype, overrides=True)
    if model.get_input_embeddings().weight.shape[0] < (rows := vocab_rows(trained)):
        model.resize_token_embeddings(rows, mean_resizing=False)
    return PeftModel.from_pretrained(model, folder)


def logits_of(model: Any) -> Forward:
    """A function from one row of ids [T] to the logits [T, V] of a model in eval mode, in fp32 on the CPU."""
    family = family_for(model.config)

    @torch.no_grad()
    def forward(ids: Tensor) -> Tensor:
        logits: Tensor = model(**family.inputs({"input_ids": ids[None].to(model.device)}), use_cache=False).logits[0]
        return logits.float().cpu()

    return forward
