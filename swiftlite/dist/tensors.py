"""Whole tensors and this rank's parts of them, whatever the sharding."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_local(part: Tensor, model: DTensor) -> DTensor:
    """A DTensor laid out as `model`, made of this rank's `part`."""
    return DTensor.from_local(part, model.device_mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride())


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, detached, on the device it is computed with; every rank must call. No copy where nothing was sharded."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device.type != tensor.device_mesh.device_type:  # offloaded: the mesh cannot gather from host memory
        tensor = with_local(tensor.to_local().to(tensor.device_mesh.device_type), tensor)
    return tensor.full_tensor()


def place_of(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of this rank's part, and where it begins in the whole tensor."""
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


def part_of(full: Tensor, model: Tensor) -> Tensor:
    """This rank's rows of `full`, which has the global shape of `model`: a view; all of it where `model` is not sharded."""
    if not isinstance(model, DTensor):
        return full
    shape, offset = place_of(model)
    return full[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]


def copy_into(target: Tensor, full: Tensor) -> None:
    """Writes `full`, of the target's global shape, into a tensor of any sharding."""
    with torch.no_grad():
        local(target).copy_(part_of(full, target))
