"""The numbers that must always hold: a step equals plain PyTorch + peft, however it is split."""

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from swiftlite.dist.tensors import whole
from swiftlite.dist.world import leave
from swiftlite.models.blocks import HostInputs
from swiftlite.recipe.errors import RecipeError
from swiftlite.train.console import Console
from swiftlite.train.loop import evaluate, train_step
from swiftlite.train.plan import make_plan
from swiftlite.train.run import Run
from tests.training import LORA, losses, recipe, token_rows, train

LENGTHS = [4, 6, 12, 20]


@pytest.fixture(autouse=True)
def no_group_left():
    yield
    leave()


def first_step(loaded):
    """A run with its first gradients still in place, and the step's report."""
    run = Run(make_plan(loaded), Console(quiet=True))
    run.optimizer.zero_grad = lambda *a, **k: None
    report = train_step(run, run.plan.loader.group(0), 0.0)
    return report, {n: whole(p.grad) for n, p in run.root.named_parameters() if p.requires_grad}, run


def reference(folder, rows, lora, adapters):
    """One step of a batch in plain PyTorch + peft: mean loss over all targets, gradient norm, gradients by name."""
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if lora:
        net = get_peft_model(net, LoraConfig(r=4, lora_alpha=16, target_modules="all-linear")).base_model.model
        for name, parameter in net.named_parameters():
            if parameter.requires_grad:
                parameter.data.copy_(adapters[name])
    width = max(len(r["input_ids"]) for r in rows)
    ids = torch.tensor([r["input_ids"] + [0] * (width - len(r["input_ids"])) for r in rows])
    mask = torch.tensor([[1] * len(r["input_ids"]) + [0] * (width - len(r["input_ids"])) for r in rows])
    logits = net.train()(input_ids=ids, attention_mask=mask, use_cache=False).logits
    targets = ids.masked_fill(mask == 0, -100)[:, 1:]
    loss = (
        F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        / (targets != -100).sum()
    )
    loss.backward()
    grads = {n: p.grad for n, p in net.named_parameters() if p.requires_grad}
    return float(loss.detach()), float(torch.stack([g.norm() for g in grads.values()]).norm()), grads


def assert_same_step(report, grads, expected):
    loss, norm, wanted = expected
    assert report.loss == pytest.approx(loss, rel=1e-5) and report.grad_norm == pytest.approx(norm, rel=1e-5)
    assert grads.keys() == wanted.keys()
    for name, grad in wanted.items():
        if grad.norm() > 1e-6 * norm:
            assert (grads[name] - grad).norm() / grad.norm() <= 5e-6, name


@pytest.mark.parametrize("strategy", ["none", "fsdp"])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("kind", ["LLAMA", "QWEN3", "GEMMA3"])
def test_first_step_equals_plain_pytorch(tmp_path, kind, lora, strategy):
    rows = token_rows(LENGTHS)
    expected = None
    for size in (4, 2, 1):
        sections = {"train": {"global_batch_size": 4, "per_device_train_batch_size": size}, "strategy": strategy}
        loaded = recipe(tmp_path, rows=rows, kind=kind, **sections, **({"lora": LORA} if lora else {}))
        report, grads, run = first_step(loaded)
        if expected is None:
            # B starts at zero, which would leave A without a gradient and the test without a point.
            if lora:
                torch.manual_seed(3)
                noise = {n: torch.randn(p.shape) * 0.1 for n, p in run.root.named_parameters() if "lora_B" in n}
            adapters = {
                n: noise[n] if lora and n in noise else whole(p) for n, p in run.root.named_parameters() if p.requires_grad
            }
            expected = reference(tmp_path / kind.lower(), rows, lora, adapters)
        if lora:
            run.root.zero_grad()
            for name, parameter in run.root.named_parameters():
                if name in noise:
                    parameter.data.copy_(noise[name]) if strategy == "none" else parameter.data.to_local().copy_(noise[name])
            report = train_step(run, run.plan.loader.group(0), 0.0)
            grads = {n: whole(p.grad) for n, p in run.root.named_parameters() if p.requires_grad}
        assert report.trained_tokens == sum(LENGTHS) - 4
        assert_same_step(report, grads, expected)
        leave()


@pytest.mark.parametrize(("kind", "offload"), [("full", False), ("full", True), ("selective", False)])
@pytest.mark.parametrize("strategy", ["none", "fsdp"])
def test_activation_checkpointing_changes_nothing(tmp_path, strategy, kind, offload, monkeypatch):
    came_back = []
    monkeypatch.setattr(HostInputs, "_up", lambda self, saved, up=HostInputs._up: (came_back.append(saved), up(self, saved))[1])

    def run(kind):
        return first_step(
            recipe(
                tmp_path,
                rows=token_rows(LENGTHS),
                lora=LORA,
                strategy=strategy,
                train={"gradient_checkpointing": kind, "global_batch_size": 4, "activation_offload": offload and kind == "full"},
            )
        )

    (off, off_grads, _), (on, on_grads, _) = run("none"), run(kind)
    assert off.loss == pytest.approx(on.loss, rel=1e-6)
    for name in off_grads:
        torch.testing.assert_close(off_grads[name], on_grads[name], rtol=1e-5, atol=1e-8)
    assert len([s for s in came_back if not torch.is_tensor(s)]) == (8 if offload else 0)  # two blocks, four passes


def test_eval_loss_does_not_depend_on_the_batch_size(tmp_path):
    values = []
    for size in (1, 2, 3):
        loaded = recipe(
            tmp_path,
            rows=token_rows([*LENGTHS, 9]),
            data={"eval": str(tmp_path / "rows.jsonl")},
            eval={"per_device_eval_batch_size": size},
        )
        run = Run(make_plan(loaded), Console(quiet=True))
        run.begin()
        values.append(evaluate(run)["eval_loss"])
    assert values[1:] == pytest.approx([values[0]] * 2, rel=1e-6)


def test_a_short_last_step_is_a_mean_of_its_own_tokens(tmp_path):
    runs = []
    for size in (1, 4):
        sizes = {"optim": "sgd", "global_batch_size": 4, "per_device_train_batch_size": size}
        loaded = recipe(tmp_path, rows=token_rows([4, 6, 12, 20, 5, 9]), output=str(tmp_path / f"o{size}"), train=sizes)
        runs.append(losses(train(loaded)))
    assert len(runs[0]) == 2 and runs[0] == pytest.approx(runs[1], rel=1e-5)


def test_wrap_names_the_modules_that_are_sharded(tmp_path):
    from torch.distributed.fsdp import FSDPModule

    def wrapped(**strategy):
        run = first_step(recipe(tmp_path, rows=token_rows(LENGTHS), strategy={"name": "fsdp", **strategy}))[2]
        return {n for n, m in run.root.named_modules() if isinstance(m, FSDPModule)}

    assert wrapped() == {"", "model.embed_tokens", "model.layers.0", "model.layers.1"}
    assert wrapped(wrap=["LlamaMLP"]) == {"", "model.embed_tokens", "model.layers.0.mlp", "model.layers.1.mlp"}
    with pytest.raises(RecipeError, match=r"strategy\.wrap.*LamaMLP"):
        wrapped(wrap=["LamaMLP"])


def test_after_training_blocks_run_as_their_class_says(tmp_path):
    run = first_step(recipe(tmp_path, rows=token_rows(LENGTHS), train={"gradient_checkpointing": "full"}))[2]
    blocks = [vars(run.root.get_submodule(name)) for name in run.built.blocks]
    assert all("forward" in block for block in blocks)
    run.release()
    assert not any("forward" in block for block in blocks)
