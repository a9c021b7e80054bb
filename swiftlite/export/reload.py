"""Opens exports as a user would: plain transformers, nothing of ours, no network."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from swiftlite.export.config import override_is_inner
from swiftlite.export.trained import Trained
from swiftlite.models.families.lookup import auto_class, family_for

Forward = Callable[[Tensor], Tensor]
Reloaded = tuple[Forward, list[str]]


def load_plain(
    trained: Trained, folder: Path, device: torch.device, *, dtype: torch.dtype | str = "auto", overrides: bool = False
) -> Any:
    """The model in a folder by transformers' automatic class; `overrides`: with the recipe's model.config_overrides."""
    kwargs: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trained.trust_remote_code}
    config = AutoConfig.from_pretrained(folder, **kwargs)
    if overrides and trained.config_overrides:
        for key, value in trained.config_overrides.items():
            setattr(config.get_text_config() if override_is_inner(config, key) else config, key, value)
        kwargs["config"] = config
    attention = getattr(trained.model.config, "_attn_implementation", None)
    if attention in ("eager", "sdpa"):
        kwargs["attn_implementation"] = attention  # the same sums in the same order as in training
    return auto_class(config).from_pretrained(folder, dtype=dtype, **kwargs).to(device)


def logits_of(model: Any) -> Forward:
    """A function from one row of ids [T] to the logits [T, V] of a model in eval mode, in fp32 on the CPU."""
    family = family_for(model.config)

    @torch.no_grad()
    def forward(ids: Tensor) -> Tensor:
        logits: Tensor = model(**family.inputs({"input_ids": ids[None].to(model.device)}), use_cache=False).logits[0]
        return logits.float().cpu()

    return forward
