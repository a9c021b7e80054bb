"""The loss head: equal to plain cross-entropy over all logits, in value and in every gradient."""

import pytest
import torch
import torch.nn.functional as F

from swiftlite.models import head
from swiftlite.models.head import LinearNLL, LogitTransform


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_equals_plain_cross_entropy(monkeypatch, softcap, scale, bias, frozen):
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 31 * 4)  # several chunks, the last one short
    torch.manual_seed(0)
    hidden, weight = torch.randn(10, 8, requires_grad=True), torch.randn(31, 8, requires_grad=not frozen)
    b = torch.randn(31, requires_grad=not frozen) if bias else None
    target = torch.randint(0, 31, (10,))
    transform = LogitTransform(scale, softcap)
    inputs = [t for t in (hidden, weight, b) if t is not None and t.requires_grad]

    loss = LinearNLL.apply(hidden, weight, b, target, transform)
    grads = torch.autograd.grad(loss * 0.37, inputs)
    logits = F.linear(hidden, weight, b) * scale
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    expected = F.cross_entropy(logits, target, reduction="sum")
    for ours, theirs in zip(grads, torch.autograd.grad(expected * 0.37, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss, expected)


def test_a_second_backward_fails_instead_of_being_wrong():
    hidden = torch.randn(4, 8, requires_grad=True)
    loss = LinearNLL.apply(hidden, torch.randn(9, 8), None, torch.randint(0, 9, (4,)), LogitTransform())
    loss.backward(retain_graph=True)
    with pytest.raises(TypeError):
        loss.backward()
