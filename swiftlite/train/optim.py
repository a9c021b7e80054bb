"""Optimizers by name, parameter groups, and their state as named tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from swiftlite.dist.checkpoint import Saved
from swiftlite.dist.tensors import local, with_local
from swiftlite.recipe.schema import TrainSection
from swiftlite.train.adamw8bit import AdamW8bit
from swiftlite.train.offload import OffloadedOptimizer

Optimizer = torch.optim.Optimizer | OffloadedOptimizer


def _adamw(groups: list[dict[str, Any]], train: TrainSection, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.0, betas=(train.adam_beta1, train.adam_beta2), eps=train.adam_epsilon, fused=fused)


def _adamw_8bit(groups: list[dict[str, Any]], train: TrainSection, fused: bool) -> torch.optim.Optimizer:
    return AdamW8bit(groups, lr=0.0, betas=(train.adam_beta1, train.adam_beta2), eps=train.adam_epsilon)


def _sgd(groups: list[dict[str, Any]], train: TrainSection, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.0, fused=fused)


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]], TrainSection, bool], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adamw_8bit": _adamw_8bit,
    "sgd": _sgd,
}


def make_optimizer(root: nn.Module, train: TrainSection, offload: str = "none", lr_ratio: float = 1.0) -> Optimizer:
    """The optimizer over all trainable parameters. Norms, biases and every other vector are exempt from weight decay.

    A group's `lr_ratio` is what the rate of a step is multiplied by for its weights.

    Args:
        offload: strategy.offload; `optimizer` puts state and master weights into host memory.
        lr_ratio: lora.lr_ratio, LoRA+ (Hayou et al., arXiv 2402.12354). As in peft, B matrices and all vectors learn that much
            faster; embeddings' adapters, which peft gives a rate of their own, learn at the rate itself.
    """
    trainable: list[nn.Parameter] = []
    alike: dict[tuple[float, float], list[int]] = {}
    for name, p in root.named_parameters():
        if p.requires_grad:
            fast = ".lora_B." in name or p.ndim < 2
            # No group is empty: torch's own state functions trip over one.
            settings = (train.weight_decay if p.ndim >= 2 else 0.0, lr_ratio if fast else 1.0)
            alike.setdefault(settings, []).append(len(trainable))
            trainable.append(p)
    groups = [(part, {"weight_decay": decay, "lr_ratio": ratio}) for (decay, ratio), part in alike.items()]
    if offload == "optimizer":
        on_gpu = trainable[0].device.type == "cuda"  # then many weights are worth the fused kernel of the CPU
        return OffloadedOptimizer(trainable, groups, lambda parts: OPTIMIZERS[train.optim](parts, train, on_gpu))
    # Weights that live in host memory while the device computes are stepped there.
    fused = trainable[0].device.type == "cuda" or offload == "params"
    parts = [{"params": [trainable[i] for i in part], **settings} for part, settings in groups]
    return OPTIMIZERS[train.optim](parts, train, fused)


def masters(root: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """Trained weights by parameter name, as the optimizer has them: in the type that keeps small updates."""
    named = {n: p for n, p in root.named_parameters() if p.requires_grad}
    if isinstance(optimizer, OffloadedOptimizer):
        return dict(zip(named, optimizer.masters, strict=True))
    return named


def state_tensors(weights: dict[str, nn.Parameter], optimizer: Optimizer) -> dict[str, Tensor]:
    """Optimizer state as `<parameter name>:<state name>` -> tensor, sharded as the parameter is. `weights`: see `masters`."""
    state = optimizer.state
    return {f"{n}:{key}": value for n, p in weights.items() for key, value in state.get(p, {}).items()}


def load_state_tensors(weights: dict[str, nn.Parameter], optimizer: Optimizer, saved: Saved) -> None:
    """Puts back what `state_tensors` gave, on any sharding; each rank reads its own rows."""
    keys: dict[str, list[str]] = {}
    for name in saved.names("optimizer"):
        parameter, _, key = name.rpartition(":")
        keys.setdefault(parameter, []).append(key)
    # A fused optimizer counts its steps on the device; load_state_dict would know, but not of DTensors.
    fused = any(g.get("fused") for g in optimizer.param_groups)
    for name, p in weights.items():
        state = {}
        for key in keys.get(name, []):
            full = f"{name}:{key}"
            shape = saved.shape("optimizer", full)
            if key != "step" and shape[:1] == list(p.shape[:1]):  # scales of blocks have a weight's rows, not its shape
                part = saved.part("optimizer", full, p).to(local(p).device)
                state[key] = with_local(part, p, shape) if isinstance(p, DTensor) else part
            else:
                state[key] = saved.rows("optimizer", full).to(local(p).device if fused else "cpu")
        if state and isinstance(optimizer, OffloadedOptimizer):
            optimizer.set_state(p, state)
        elif state:
            optimizer.state[p] = state
