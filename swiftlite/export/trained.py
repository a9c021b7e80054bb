"""What an exporter is given, and what an exporter is."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from swiftlite.export.verify import Gaps
from swiftlite.models.files import ModelFiles
from swiftlite.recipe.schema import ExportSection


@dataclass(frozen=True)
class Trained:
    """A model after training, with all that makes a folder of it.

    Attributes:
        model: the root, with Hugging Face names; peft layers may be injected, parameters may be DTensors.
        peft: the wrapper of `model` that holds the adapter's config; None after full fine-tuning.
        files: the base model.
        tokens_added: the recipe added tokens, so the tokenizer's files differ from the base's.
        chat_template: the template used in training where it replaces the base's; None: the base's own.
        stop_ids: tokens that were trained to end an answer.
        prompts: rows of token ids on which the exports are compared with `model`.
        base_dtype: floating-point type of the base's files.
        compute_dtype: type in which `model` multiplies; fp32 master weights may compute in bf16.
        config_overrides: `model.config_overrides` of the recipe.
        gaps: measured before anything is written; None: the base is not packed.
    """

    model: PreTrainedModel
    peft: PeftModel | None
    files: ModelFiles
    tokenizer: PreTrainedTokenizerBase
    tokens_added: bool
    chat_template: str | None
    stop_ids: Set[int]
    prompts: Sequence[Sequence[int]]
    base_dtype: torch.dtype
    compute_dtype: torch.dtype
    trust_remote_code: bool = False
    config_overrides: Mapping[str, Any] = field(default_factory=dict)
    gaps: Gaps | None = None


@dataclass(frozen=True)
class Written:
    """What an exporter says of the folder it wrote.

    Attributes:
        dtype: of its weights.
        notes: what a reader of the report should know.
        updates: what rounding left of the trained updates, see Updates.as_dict; None: nothing was merged.
        onto: which weights a packed base was merged onto, dequantised or original; None: no packed base, or nothing was merged.
    """

    dtype: torch.dtype
    notes: list[str]
    updates: Mapping[str, Any] | None = None
    onto: str | None = None


@dataclass(frozen=True)
class Exporter:
    """A row of the table EXPORTERS.

    Attributes:
        check: refuses what cannot be written, before anything is: (trained, section).
        write: fills an empty folder: (trained, folder, section).
        reload: opens the folder as a user would, with plain transformers and peft, and compares tensors with the trained ones:
            (trained, folder, written, device) -> (a function from one row of ids [T] to logits [T, V], faults found).
    """

    name: str
    check: Callable[[Trained, ExportSection], None]
    write: Callable[[Trained, Path, ExportSection], Written]
    reload: Callable[[Trained, Path, Written, torch.device], tuple[Callable[[Tensor], Tensor], list[str]]]
