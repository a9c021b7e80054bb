"""The optimizer in host memory by itself: what comes down is added up once, in fp32, and a failure is not swallowed."""

import pytest
import torch
from torch import nn

from swiftlite.train.offload import OffloadedOptimizer


def offloaded(*shapes) -> OffloadedOptimizer:
    parameters = [nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()) for shape in shapes]
    return OffloadedOptimizer(parameters, [(list(range(len(shapes))), {})], lambda groups: torch.optim.SGD(groups, lr=1.0))


@pytest.mark.parametrize("collected", [True, False])
def test_every_gradient_is_added_once_in_fp32(collected):
    """Also where one pass gives a weight two: the second may not land on the first."""
    optimizer = offloaded((300, 70), (40,))
    for factor in (256.0, 1.0, 1.0):  # bf16 would lose the ones
        sum(factor * p.sum() for p in optimizer.parameters).backward()
        if collected:
            optimizer.collect()
    optimizer.collect()
    for parameter, master in zip(optimizer.parameters, optimizer.masters, strict=True):
        assert master.grad.dtype == torch.float32 and (master.grad == 258).all() and parameter.grad is None
    optimizer.step()
    optimizer.zero_grad()
    optimizer.collect()
    assert all(torch.equal(p, m.bfloat16()) for p, m in zip(optimizer.parameters, optimizer.masters, strict=True))
    assert all(master.grad is None for master in optimizer.masters)


def test_a_gradient_that_cannot_be_added_ends_the_step(monkeypatch):
    optimizer = offloaded((4,))
    monkeypatch.setattr(optimizer, "masters", [])
    optimizer.parameters[0].sum().backward()
    with pytest.raises(IndexError):
        optimizer.collect()
