"""Gives memory and values to parameters that were made on meta, sharded or not."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from swiftlite.dist.tensors import copy_into, local, with_local


def materialise(module: nn.Module, name: str, device: torch.device | str) -> Tensor:
    """Makes sure that a parameter of `module` has memory on `device`; its values are undefined where it had none.

    A parameter on meta cannot be given memory in place, so the module gets a new one: of the same type, sharding, data type and
    requires_grad. Buffers kept in peft's BufferDict are handled like parameters.
    """
    table = module._parameters if name in module._parameters else module._buffers
    old = table[name]
    assert old is not None
    if not old.is_meta:
        return old
    part = torch.empty_like(local(old), device=device)
    new = with_local(part, old) if isinstance(old, DTensor) else part
    table[name] = nn.Parameter(new, requires_grad=old.requires_grad) if table is module._parameters else new
    return table[name]


def fill(module: nn.Module, name: str, full: Tensor, device: torch.device | str) -> None:
    """Writes the whole tensor `full`, of the parameter's global shape, into a parameter; a shard takes its own slice.

    Raises:
        ValueError: the shapes differ.
    """
    target = materialise(module, name, device)
    if tuple(target.shape) != tuple(full.shape):
        raise ValueError(f"{name}: {list(full.shape)} does not fit {list(target.shape)}")
    copy_into(target, full)
