"""Whole tensors and this rank's parts of them, whatever the sharding."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_local(part: Tensor, model: DTensor, shape: Sequence[int] | None = None) -> DTensor:
    """A DTensor laid out as `model`, made of this rank's `part`, in the memory where that lies.

    Args:
        shape: of the whole tensor, where it has the rows of `model` but is not of its shape.
    """
    size = model.shape if shape is None else torch.Size(shape)
    stride = model.stride() if shape is None else torch.empty(size, device="meta").stride()
    # DTensor.from_local would move what is offloaded to the device of the mesh.
    spec = DTensorSpec(model.device_mesh, model.placements, tensor_meta=TensorMeta(size, stride, part.dtype))
    return DTensor(part, spec, requires_grad=part.requires_grad)  # type: ignore[no-untyped-call]


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
