"""The global norm and clipping by it, plain and sharded."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from swiftlite.dist.gradients import clip, global_norm
from swiftlite.dist.strategies import FSDP
from swiftlite.dist.tensors import copy_into, part_of, whole
from swiftlite.dist.world import World, join, leave


@pytest.fixture
def world():
    yield join(torch.device("cpu"), FSDP, wrap=True)
    leave()


@pytest.mark.parametrize("sharded", [False, True])
def test_norm_and_clip_equal_torch(world: World, sharded):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(7))]
    grads = [torch.randn_like(p) * 9 for p in params]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    expected = nn.utils.clip_grad_norm_(params, 1.0)
    ours = [DTensor.from_local(g.clone(), world.mesh, [Shard(0)]) if sharded else g.clone() for g in grads]
    norm = global_norm(ours)
    clip(ours, norm, 1.0)
    torch.testing.assert_close(norm, expected)
    for mine, p in zip(ours, params, strict=True):
        torch.testing.assert_close(whole(mine), p.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_large_tensor_has_last_counts_too(world: World, dtype):
    large = torch.randn(2**25 + 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = sum(float(part.double().square().sum()) for part in large.split(2**20)) ** 0.5
    assert float(global_norm([large])) == pytest.approx(exact, rel=1e-6)  # torch's own norm is 0.2% short


def test_no_gradient_has_norm_zero_and_small_ones_are_left(world):
    assert float(global_norm([])) == 0.0
    small = torch.full((4,), 0.1)
    clip([small], global_norm([small]), 1.0)
    assert torch.equal(small, torch.full((4,), 0.1))


def test_tensors_go_out_and_come_back(world):
    full = torch.arange(12.0).reshape(4, 3)
    model = DTensor.from_local(torch.zeros(4, 3), world.mesh, [Shard(0)])
    assert torch.equal(part_of(full, model), full)
    copy_into(model, full)
    assert torch.equal(whole(model), full)
