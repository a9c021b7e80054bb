"""Optimizers by name, parameter groups, and their state as named tensors."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from swiftlite.dist.tensors import laid_out, whole
from swiftlite.recipe.schema import TrainSection


def _adamw(groups: list[dict[str, Any]], train: TrainSection, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.0, betas=(train.adam_beta1, train.adam_beta2), eps=train.adam_epsilon, fused=fused)


def _sgd(groups: list[dict[str, Any]], train: TrainSection, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.0, fused=fused)


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]], TrainSection, bool], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "sgd": _sgd,
}


def make_optimizer(root: nn.Module, train: TrainSection) -> torch.optim.Optimizer:
    """The optimizer over all trainable parameters. Norms, biases and every other vector are exempt from weight decay."""
    trainable = [p for p in root.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    # No empty group: torch's own state functions trip over one.
    return OPTIMIZERS[train.optim]([g for g in groups if g["params"]], train, trainable[0].device.type == "cuda")


def state_tensors(root: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Optimizer state as `<parameter name>:<state name>` -> whole tensor on the CPU."""
    return {
        f"{n}:{key}": whole(value).cpu() for n, p in root.named_parameters() for key, value in optimizer.state.get(p, {}).items()
    }


def load_state_tensors(root: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Puts back what `state_tensors` gave, on any sharding."""
    states: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        parameter, _, key = name.rpartition(":")
        states.setdefault(parameter, {})[key] = value
    for name, p in root.named_parameters():
        if name not in states:
            continue
        # A fused optimizer counts its steps on the device; load_state_dict would know, but not of DTensors.
        fused = any(g.get("fused") for g in optimizer.param_groups)
        optimizer.state[p] = {
            k: laid_out(v, p) if v.shape == p.shape and k != "step" else v.to(p.device if fused else "cpu")
            for k, v in states[name].items()
        }
