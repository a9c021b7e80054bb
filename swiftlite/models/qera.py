"""`lora.init: qera`: adapters beside packed weights begin by giving back what packing took, as far as their rank allows.

QERA: Zhang et al. 2024, "QERA: an Analytical Framework for Quantization Error Reconstruction" (arXiv 2410.06040). With E the
weight less what it is packed as, and inputs X [tokens, in], the update of rank r that is closest to E in what it makes of X is
SVD_r(E S) S^-1 for S = (Xt X)^1/2. That is U Ut E, U being the first r left singular vectors of E Xt: no root and no inverse has
to be taken.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from swiftlite.dist.shard import reshard
from swiftlite.dist.tensors import copy_into, whole
from swiftlite.models import weights
from swiftlite.models.decompose import Layer, adapted, share_out
from swiftlite.models.names import base_name
from swiftlite.models.packed import PackedLinear, stored_weights
from swiftlite.recipe.errors import ModelError, RecipeError

# Training rows that are looked at, evenly spaced; tokens of a row; and inputs of each layer that are kept, of all rows together.
ROWS, LENGTH, INPUTS = 32, 1024, 2048
# Vectors beside the wanted ones, and rounds, of the search for singular vectors.
SPARE, ROUNDS = 16, 3


def sample(samples: Sequence[Any]) -> list[list[int]]:
    """The ids of some rows."""
    count = min(ROWS, len(samples))
    return [list(samples[i * len(samples) // count].input_ids[:LENGTH]) for i in range(count)]


@torch.no_grad()
def start(root: Any, batches: Sequence[dict[str, Tensor]], tensors: Mapping[str, Any], device: torch.device) -> str:
    """Sets A and B of each adapter beside a packed weight; all ranks must call, with the same batches. Returns a note.

    Ranks share the layers: each keeps inputs of its own ones in host memory, 3.5 GB together for 8 billion weights in 16 bits,
    and reads their plain weights one at a time. Adapters without inputs (an expert that no token was sent to) and beside plain
    weights stay as they are.

    Args:
        root: the Hugging Face model with peft's layers, in any sharding, as it was built.
        batches: what the model's body takes, one row each.
        tensors: the plain weights of the model's files, as for `weights.stream`.
        device: where the model computes.

    Raises:
        RecipeError: no adapted weight is packed.
        ModelError: a weight of the files is not finite.
    """
    began, layers = time.perf_counter(), [layer for layer in adapted(root) if isinstance(layer.base, PackedLinear)]
    device = torch.device("cpu") if device.type == "mps" else device  # which has no fp64
    if not layers:
        fix = "Use lora.init: default, or pack some of the layers that are adapted."
        raise RecipeError("'qera' gives back what packing took, and no adapted weight is packed.", where="lora.init", fix=fix)
    names = {id(stored.owner): str(base_name(name)) for name, stored in stored_weights(root)}
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    training = root.training
    root.eval()  # without dropout
    with _inputs_of(layers[rank::size], INPUTS // len(batches)) as inputs, torch.compiler.set_stance("force_eager"):
        for batch in batches:
            root.last_hidden(batch)
    root.train(training)
    reshard(root)
    shares = torch.zeros(2, dtype=torch.float64, device=device)  # their sum, and of how many
    for first in range(0, len(layers), size):
        turn, found = layers[first : first + size], None
        for i, layer in enumerate(turn):
            packed, a = layer.base.unpacked(torch.float32).to(device), whole(layer.a.tensor).float()  # type: ignore[operator]
            if i == rank:
                plain = _plain(root, names[id(layer.base)], packed, tensors)
                x = [part.to(device, torch.float32) for part in inputs.pop(id(layer.base))]
                a, b, share = closest(plain - packed, torch.cat(x) if x else packed[:0], a.to(device), layer.scale)
                found, shares = (a, b), shares + torch.stack([share, torch.ones_like(share)])
        for layer, pair in zip(turn, share_out(turn, found, device), strict=True):
            for slot, value in zip((layer.a, layer.b), pair, strict=True):
                copy_into(slot.tensor, value)
    if size > 1:
        dist.all_reduce(shares)
    mean, took = float(shares[0] / shares[1]), time.perf_counter() - began
    return (
        f"lora.init qera: the adapters of {len(layers)} packed weights start by giving back {mean:.0%} of what packing changed "
        f"in a layer's outputs (squares, in the mean; {len(batches)} rows), found in {took:.1f} s"
    )


@contextmanager
def _inputs_of(layers: Sequence[Layer], each: int) -> Iterator[dict[int, list[Tensor]]]:
    """Keeps up to `each` inputs [n, in] of a pass, evenly spaced, by the id of the layer that they go into: in host memory."""
    found: dict[int, list[Tensor]] = {id(layer.base): [] for layer in layers}
    last: list[Tensor] = [torch.empty(0)] * 2  # layers side by side are given one tensor, of which one copy is enough

    def keep(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        if given[0] is not last[0]:
            rows = given[0].reshape(-1, given[0].shape[-1])
            last[:] = given[0], rows[:: max(1, -(-len(rows) // each))].to("cpu", copy=True)
        found[id(module)].append(last[1])

    handles = [layer.base.register_forward_pre_hook(keep) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _plain(root: Any, name: str, packed: Tensor, tensors: Mapping[str, Any]) -> Tensor:
    """The weight of the model's files that was packed, fp32."""
    mapping = getattr(root, "_weight_conversions", None)
    plain = weights.original(root, tensors, mapping, {name: packed.shape})[name].to(packed.device)
    if not plain.isfinite().all():
        raise ModelError(f"{name} holds NaN or infinity.")
    return plain


def closest(error: Tensor, x: Tensor, a: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """A [r, in] and B [out, r]: scale * B A is the update of rank r that is closest to `error` in what it makes of the inputs.

    Args:
        error: [out, in], fp32.
        x: inputs [n, in], fp32.
        a: A as it is, [r, in], fp32; rows that nothing is found for stay so, with zeros in B.

    Returns:
        A, B, and the share of the squares of error times inputs that is taken away: an fp64 scalar.
    """
    y, rank = error @ x.T, len(a)
    generator = torch.Generator().manual_seed(0)  # of the CPU: the same on any device
    basis = torch.randn(len(y), min(rank + SPARE, *y.shape), generator=generator).to(y.device)
    for _ in range(ROUNDS):
        basis = torch.linalg.qr(y @ (y.T @ basis)).Q
    left, values, _ = torch.linalg.svd(basis.T @ y, full_matrices=False)
    u = (basis @ left)[:, :rank]
    rows = u.T @ error
    root = (rows.norm(dim=1) / scale).sqrt()
    some = root > 0
    new_a, b = a.clone(), error.new_zeros(len(error), rank)
    new_a[: len(rows)][some] = (rows / (scale * root)[:, None])[some]
    b[:, : len(rows)] = u * root
    return new_a, b, values[:rank].double().square().sum() / y.double().square().sum().clamp_min(1e-30)
