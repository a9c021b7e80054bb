"""Supervised fine-tuning: the mean negative log likelihood of the trained tokens."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from swiftlite.data.render import IGNORE
from swiftlite.objectives.protocol import Batch, model_inputs


@dataclass(frozen=True)
class Sft:
    """Next-token cross-entropy."""

    name: str = "sft"
    eats: str = "rows"

    def weight(self, batch: Batch) -> int:
        return int((batch["labels"][:, 1:] != IGNORE).sum())

    def loss_sum(self, root: Any, batch: Batch) -> Tensor:
        loss: Tensor = root.nll_sum(model_inputs(batch), batch["labels"], batch["attention_mask"])
        return loss


SFT = Sft()
