"""What the training loop asks of an objective."""

from typing import Any, Protocol

from torch import Tensor

Batch = dict[str, Tensor]


class Objective(Protocol):
    """Something to learn. The loop divides the sum of losses once, by the sum of weights of the whole optimizer step."""

    name: str

    def weight(self, batch: Batch) -> int:
        """What the batch counts in the step's mean: its trained tokens, for a token mean. Read on the CPU."""

    def loss_sum(self, root: Any, batch: Batch) -> Tensor:
        """The undivided loss: a scalar in fp32, differentiable. Enters the model only through methods of the sharded root."""
