"""The loss head: equal to plain cross-entropy over all logits, in value and in every gradient."""

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers.trainer_pt_utils import LabelSmoother

from swiftlite.models import head
from swiftlite.models.head import Added, LinearNLL, LogitTransform
from tests.fixtures import model


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [head.chunk_eager, head.chunk_fused])
def test_equals_plain_cross_entropy(monkeypatch, softcap, scale, bias, frozen, smoothing, chunk):
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 31 * 4)  # several chunks, the last one short
    torch.manual_seed(0)
    hidden, weight = torch.randn(10, 8, requires_grad=True), torch.randn(31, 8, requires_grad=not frozen)
    b = torch.randn(31, requires_grad=not frozen) if bias else None
    target = torch.randint(0, 31, (10,))
    transform = LogitTransform(scale, softcap)
    inputs = [t for t in (hidden, weight, b) if t is not None and t.requires_grad]

    loss = LinearNLL.apply(hidden, weight, b, target, transform, smoothing, chunk)
    grads = torch.autograd.grad(loss * 0.37, inputs)
    logits = F.linear(hidden, weight, b) * scale
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    log_p = F.log_softmax(logits, -1)
    nll, spread = -log_p.gather(-1, target[:, None])[:, 0], -log_p.mean(-1)  # as transformers' LabelSmoother
    expected = ((1 - smoothing) * nll + smoothing * spread).sum()
    for ours, theirs in zip(grads, torch.autograd.grad(expected * 0.37, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss, expected)


def test_a_second_backward_fails_instead_of_being_wrong():
    hidden = torch.randn(4, 8, requires_grad=True)
    loss = LinearNLL.apply(hidden, torch.randn(9, 8), None, torch.randint(0, 9, (4,)), LogitTransform(), 0.0, head.chunk_eager)
    loss.backward(retain_graph=True)
    with pytest.raises(TypeError):
        loss.backward()


@pytest.mark.parametrize("path", ["plain", "adapted head", "own forward"])
def test_smoothed_loss_is_that_of_transformers_in_training_and_plain_in_evaluation(monkeypatch, path):
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 272 * 4)
    root = model("LLAMA")
    if path == "adapted head":
        root = get_peft_model(
            root, LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        ).base_model.model
    head.attach(root, Added(smoothing=0.2))
    if path == "own forward":
        root.swiftlite_head = None
    torch.manual_seed(0)
    ids = torch.randint(5, 250, (2, 9))
    labels = ids.clone()
    labels[0, 4:7] = labels[1, 6:] = -100
    trained = [p for p in root.parameters() if p.requires_grad]

    root.train()
    loss = root.nll_sum({"input_ids": ids}, labels)
    grads = torch.autograd.grad(loss, trained)
    count = (labels[:, 1:] != -100).sum()
    expected = LabelSmoother(0.2)(root(input_ids=ids), labels, shift_labels=True) * count
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(grads, torch.autograd.grad(expected, trained), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

    root.eval()
    plain = F.cross_entropy(root(input_ids=ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(root.nll_sum({"input_ids": ids}, labels), plain)
