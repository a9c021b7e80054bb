"""How far float8 products move a model: against the same stored weights, multiplied in the compute type."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from swiftlite.dist.shard import reshard
from swiftlite.models.head import body
from swiftlite.models.packed import stored_weights

METHODS = ("last_hidden",)
# Tokens that are enough to know it by; longer rows would only cost time before the first step.
TOKENS = 256


def attach(root: Any) -> None:
    """Gives `root` the method that is measured: a sharded root gathers weights for its registered methods only."""
    root.last_hidden = MethodType(_last_hidden, root)


def _last_hidden(root: Any, inputs: dict[str, Tensor]) -> Tensor:
    hidden: Tensor = body(root, inputs).last_hidden_state
    return hidden.float()


@contextmanager
def without_float8(root: nn.Module) -> Iterator[bool]:
    """Inside, float8 layers compute in the compute type: their products round activations too, which is in no weight. Gives
    whether there are any."""
    float8 = [stored for _, stored in stored_weights(root) if stored.method == "fp8"]
    for stored in float8:
        stored.method = "fp8_stored"
    try:
        yield bool(float8)
    finally:
        for stored in float8:
            stored.method = "fp8"


@torch.no_grad()
def note(root: Any, inputs: dict[str, Tensor]) -> str | None:
    """What float8 products add to the rounding of weights, on a few tokens, in the relative norm of the last hidden states. None
    without such products. Every rank must call, with the same inputs.

    Args:
        inputs: what the body takes, `input_ids` [B, T] int64 and whatever else.
    """
    with without_float8(root) as any_float8:
        if not any_float8:
            return None
        training = root.training
        root.eval()
        # Blocks that were compiled for this length alone would cost a minute.
        with torch.compiler.set_stance("force_eager"):
            exact = root.last_hidden(inputs)
    with torch.compiler.set_stance("force_eager"):
        gap = (root.last_hidden(inputs) - exact).norm() / exact.norm().clamp_min(1e-30)
    root.train(training)
    reshard(root)
    tokens = inputs["input_ids"].numel()
    return f"float8 products move the last hidden states by {float(gap):.2%} (relative norm, the first {tokens} tokens)"
