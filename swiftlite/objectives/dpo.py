"""Direct preference optimisation: of two answers to a prompt the better one is to become likelier, measured against the start.

Source: Rafailov et al. 2023, "Direct Preference Optimization", equation 7: the mean over pairs of
-log sigmoid(beta * (log p(better) / p0(better) - log p(worse) / p0(worse))), p0 being the model that training starts from.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftlite.data.render import IGNORE
from swiftlite.models.adapters import without_adapters
from swiftlite.objectives.protocol import REFERENCE, Batch, model_inputs
from swiftlite.recipe.errors import RecipeError
from swiftlite.recipe.schema import Recipe


@dataclass(frozen=True)
class Dpo:
    """DPO. With new adapters the model without them is p0. Where it is not (an adapter that is trained on or was split off the
    base, a model that is trained itself) p0 is asked of every pair before training, so that no second model is held.

    Batches are [2 * pairs, T], better and worse answer in turn.
    """

    beta: float = 0.1
    keeps_reference: bool = False
    name: str = "dpo"
    eats: str = "pairs"
    metrics: tuple[str, ...] = ("rewards_margin", "rewards_accuracy")

    def of(self, recipe: Recipe) -> "Dpo":
        for key in ("label_smoothing_factor", "router_aux_loss_coef"):
            if getattr(recipe.train, key):
                raise RecipeError("the objective dpo has no place for it.", where=f"train.{key}", fix="Remove it.")
        # Without adapters that were split off the base, or that give back what packing took, the model is not p0.
        keeps = recipe.lora is None or recipe.model.adapter is not None or not recipe.lora.starts_at_base
        if keeps and recipe.data.streaming:
            what = "dpo compares with the model at the start, asked of all pairs before step 1 unless a new adapter is trained."
            fix = "Use a lora section with lora.init: default and without model.adapter, or do not stream."
            raise RecipeError(what, where="data.streaming", fix=fix)
        assert recipe.train.dpo_beta is not None
        return replace(self, beta=recipe.train.dpo_beta, keeps_reference=keeps)

    def weight(self, batch: Batch) -> int:
        return int(_real(batch).sum())

    def loss_sum(self, root: Any, batch: Batch) -> Tensor:
        reference = batch[REFERENCE] if self.keeps_reference else self.reference(root, batch)
        ratio = _logps(root, batch) - reference
        margin = self.beta * (ratio[0::2] - ratio[1::2])[_real(batch)]
        gained = margin.detach()
        return torch.stack([-F.logsigmoid(margin).sum(), gained.sum(), (gained > 0).sum().float()])

    def reference(self, root: Any, batch: Batch) -> Tensor:
        """log p0 of each row [2 * pairs], fp32. Of a model that keeps no reference beside it the one that it is now."""
        training = root.training
        root.eval()  # without dropout and noise
        try:
            with torch.no_grad(), nullcontext() if self.keeps_reference else without_adapters(root):
                return _logps(root, batch)
        finally:
            root.train(training)


def _logps(root: Any, batch: Batch) -> Tensor:
    logps: Tensor = root.logp_sums(model_inputs(batch), batch["labels"], batch["attention_mask"])
    return logps


def _real(batch: Batch) -> Tensor:
    """Which pairs are not padding [pairs]."""
    return (batch["labels"][0::2, 1:] != IGNORE).any(1)


DPO = Dpo()
