"""Supervised fine-tuning: the mean negative log likelihood of the trained tokens."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from swiftlite.data.render import IGNORE
from swiftlite.objectives.protocol import Batch

# What a batch carries for us and not for the model.
_OURS = {"labels", "attention_mask"}


@dataclass(frozen=True)
class Sft:
    """Next-token cross-entropy. Rows are padded on the right, so causal attention needs no mask: no real token sees padding."""

    name: str = "sft"

    def weight(self, batch: Batch) -> int:
        return int((batch["labels"][:, 1:] != IGNORE).sum())

    def loss_sum(self, root: Any, batch: Batch) -> Tensor:
        inputs = {k: v for k, v in batch.items() if k not in _OURS}
        loss: Tensor = root.nll_sum(inputs, batch["labels"], batch["attention_mask"])
        return loss


SFT = Sft()
