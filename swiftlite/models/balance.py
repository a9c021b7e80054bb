"""The load-balancing loss of mixture-of-experts models, by the function that the model's own class uses.

It belongs to a forward pass, not to a token: with it, how a batch is split over passes changes what is learned.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from swiftlite.recipe.errors import ModelError, RecipeError

KEY = "train.router_aux_loss_coef"
_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


@dataclass(frozen=True)
class Balance:
    """`coefficient` times the class's load_balancing_loss_func (Switch Transformer, equations 4 to 6).

    Attributes:
        experts: routed experts of a layer.
        top_k: experts a token goes to.
    """

    coefficient: float
    function: Callable[..., Tensor]
    experts: int
    top_k: int

    def __call__(self, router_logits: tuple[Tensor, ...] | None, mask: Tensor | None) -> Tensor:
        """A differentiable scalar in fp32.

        Args:
            router_logits: one [B * T, experts] a layer, as the body gives them with output_router_logits.
            mask: [B, T], 1 for real tokens and 0 for padding; None: all are real.

        Raises:
            ModelError: the body gave no router logits.
        """
        if not router_logits:
            raise ModelError("the model gives no router logits, so their loss cannot be computed.", where=KEY, fix="Set it to 0.")
        return self.coefficient * self.function(tuple(router_logits), self.experts, self.top_k, mask)


def balance_of(root: Any, coefficient: float) -> Balance | None:
    """The balance loss of a model; None where the coefficient is 0. To be asked for before sharding, which renames the class.

    Raises:
        RecipeError: the model is dense, or transformers has no such loss for its class.
    """
    if not coefficient:
        return None
    text, name = root.config.get_text_config(), type(root).__name__
    experts, top_k = (getattr(root, key, getattr(text, key, None)) for key in ("num_experts", "num_experts_per_tok"))
    if not (isinstance(experts, int) and experts > 1 and isinstance(top_k, int)):
        raise RecipeError(f"{name} has no routed experts to balance.", where=KEY, fix="Leave the key out.")
    function = getattr(sys.modules[type(root).__module__], "load_balancing_loss_func", None)
    if function is None or list(inspect.signature(function).parameters) != _ARGUMENTS:
        raise RecipeError(f"transformers has no load-balancing loss for {name}.", where=KEY, fix="Leave the key out.")
    return Balance(coefficient, function, experts, top_k)
