"""NEFTune: uniform noise on the input embeddings while training.

Source: Jain et al. 2023, "NEFTune: Noisy Embeddings Improve Instruction Finetuning", algorithm 1.
"""

from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from swiftlite.recipe.errors import RecipeError


def add_noise(root: Any, alpha: float) -> None:
    """Hooks `root`'s input embedding, adapted or not, and to be sharded or not: in training mode it adds to each row
    uniform(-1, 1) * alpha / sqrt(L * D), with L real tokens of the row and D the hidden size.

    L is read from `root.swiftlite_mask` ([B, T], 1 for real tokens), which the loss sets; None: all tokens are real. The noise is
    drawn by torch's own generator of the device, whose state is in every checkpoint.

    Raises:
        RecipeError: the class names no input embedding.
    """
    try:
        embedding = root.get_input_embeddings()
    except NotImplementedError:
        embedding = None
    if not isinstance(embedding, nn.Module):
        fault = f"{type(root).__name__} names no input embedding to put noise on."
        raise RecipeError(fault, where="train.neftune_noise_alpha", fix="Leave the key out.")

    def hook(module: nn.Module, args: Any, embedded_BTD: Tensor) -> Tensor:
        if not root.training:
            return embedded_BTD
        rows, length, width = embedded_BTD.shape
        mask = root.swiftlite_mask
        real_B = embedded_BTD.new_full((rows,), length, dtype=torch.float32) if mask is None else mask.sum(1).clamp_min(1)
        bound_B = alpha / sqrt(width) * real_B.float().rsqrt()
        noise_BTD = embedded_BTD.new_empty(embedded_BTD.shape).uniform_(-1, 1)
        return embedded_BTD + noise_BTD * bound_B[:, None, None].to(embedded_BTD.dtype)

    root.swiftlite_mask = None
    embedding.register_forward_hook(hook)
