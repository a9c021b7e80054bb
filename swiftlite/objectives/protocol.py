"""What the training loop asks of an objective."""

from typing import Any, Protocol

from torch import Tensor

from swiftlite.recipe import tables
from swiftlite.recipe.schema import Recipe

Batch = dict[str, Tensor]

# A number for each row of a batch, of the model that training starts from; see `Objective`.
REFERENCE = "reference"
# What a batch carries for us and not for the model.
_OURS = {"labels", "attention_mask", REFERENCE}


class Objective(Protocol):
    """Something to learn. The loop divides the sum of losses once, by the sum of weights of the whole optimizer step.

    An objective may have more, and does without where it has not:
        eats: str, what its batches are made of: rows, or pairs, whose sides are neighbouring rows, the better one first.
        metrics: tuple[str, ...], names of the sums that stand behind the loss; logged divided as the loss is.
        of(recipe) -> Objective: itself with what the recipe says; raises RecipeError for what it cannot honour.
        keeps_reference: bool; where true, `reference(root, batch)` -> [B] fp32 is asked once for every row before step 1, of the
            model that training starts from, also in a resumed run; batches then carry it as `reference`.
    """

    name: str

    def weight(self, batch: Batch) -> int:
        """What the batch counts in the step's mean: its trained tokens, for a token mean. Read on the CPU."""

    def loss_sum(self, root: Any, batch: Batch) -> Tensor:
        """The undivided loss, differentiable, in fp32: a scalar, or [1 + metrics], the loss first. Enters the model only through
        methods of the sharded root."""


def load(recipe: Recipe) -> Objective:
    """The objective of a recipe.

    Raises:
        RecipeError: there is none of that name, or it cannot honour a key.
    """
    found: Any = tables.load(tables.OBJECTIVES, recipe.train.objective, "train.objective")
    objective: Objective = found.of(recipe) if hasattr(found, "of") else found
    return objective


def model_inputs(batch: Batch) -> Batch:
    """What the model's body takes of a batch. Rows are padded on the right, so causal attention needs no mask: no real token
    sees padding."""
    return {name: value for name, value in batch.items() if name not in _OURS}
