"""Gives memory and values to parameters that were made on meta, sharded or not."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def materialise(module: nn.Module, name: str, device: torch.device | str) -> nn.Parameter:
    """Makes sure that a parameter of `module` has memory on `device`; its values are undefined where it had none.

    A parameter on meta cannot be given memory in place, so the module gets a new one: of the same type, sharding, data type and
    requires_grad. Buffers kept in peft's BufferDict are handled like parameters.
    """
    table = module._parameters if name in module._parameters else module._buffers
    old = table[name]
    assert old is not None
    if not old.is_meta:
        return old
    if isinstance(old, DTensor):
        local = torch.empty_like(old.to_local(), device=device)
        new: Tensor = DTensor.from_local(
            local, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
        )
    else:
        new = torch.empty_like(old, device=device)
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
    with torch.no_grad():
        if isinstance(target, DTensor):
            shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
            full = full[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
            target = target.to_local()
        target.copy_(full)


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded, on the device where it is computed with. All ranks must call it."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    if tensor.device.type != tensor.device_mesh.device_type:  # offloaded: the mesh cannot gather from host memory
        local = tensor.to_local().to(tensor.device_mesh.device_type)
        tensor = DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    return tensor.detach().full_tensor()
