"""What training adds to the loss or the input: label smoothing, NEFTune noise, the load-balancing loss of experts."""

from math import sqrt

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from swiftlite.dist.tensors import whole
from swiftlite.dist.world import leave
from swiftlite.recipe.errors import RecipeError
from swiftlite.train.console import Console
from swiftlite.train.loop import evaluate, train_step
from swiftlite.train.plan import make_plan
from swiftlite.train.run import Run
from tests.fixtures import SMALL, tok
from tests.training import LORA, losses, recipe, token_rows, train

LENGTHS = [4, 6, 12, 20]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8, "vocab_size": 288}


@pytest.fixture(autouse=True)
def no_group_left():
    yield
    leave()


def begin(loaded):
    """A run whose first gradients stay in place."""
    run = Run(make_plan(loaded), Console(quiet=True))
    run.optimizer.zero_grad = lambda *a, **k: None
    return run


def first_step(loaded):
    run = begin(loaded)
    report = train_step(run, run.plan.loader.group(0), 0.0)
    return report, {n: whole(p.grad) for n, p in run.root.named_parameters() if p.grad is not None}, run


def moe_folder(path, kind):
    """A tiny mixture of experts, where fixtures.py has none of that kind."""
    if kind == "QWEN3_MOE" and not (folder := path / kind.lower()).exists():
        torch.manual_seed(0)
        transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**{**SMALL, **EXPERTS})).save_pretrained(folder)
        tok().save_pretrained(folder)
    return kind


@pytest.mark.parametrize("strategy", ["none", "fsdp"])
@pytest.mark.parametrize("kind", ["MIXTRAL", "QWEN3_MOE"])
def test_balance_loss_is_that_of_transformers(tmp_path, kind, strategy):
    """One padded batch: loss and gradients with and without it differ by what transformers' own forward adds."""

    def step(coefficient, checkpointing="none"):
        keys = {"router_aux_loss_coef": coefficient, "global_batch_size": 4, "per_device_train_batch_size": 4}
        keys["gradient_checkpointing"] = checkpointing
        report, grads, run = first_step(
            recipe(tmp_path, rows=token_rows(LENGTHS), kind=moe_folder(tmp_path, kind), strategy=strategy, train=keys)
        )
        leave()
        return report.loss, grads, run

    (off, off_grads, run), (on, on_grads, noted) = step(0), step(0.5)
    assert any("router_aux_loss_coef" in note for note in noted.plan.notes)
    assert not any("router_aux_loss_coef" in note for note in run.plan.notes)
    batch = run.plan.loader.group(0)[0].tensors
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / kind.lower(), output_router_logits=True, router_aux_loss_coef=0.5)
    out = theirs.train()(**batch)
    assert out.aux_loss.item() > 0.5 and on == pytest.approx(out.loss.item(), rel=1e-5)
    assert on - off == pytest.approx(0.5 * out.aux_loss.item(), rel=1e-4)
    out.loss.backward()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(on_grads[name], parameter.grad, rtol=1e-4, atol=1e-6)
    router = next(n for n in off_grads if n.endswith("gate.weight"))
    assert (on_grads[router] - off_grads[router]).norm() > 0.01 * off_grads[router].norm()

    recomputed, recomputed_grads, _ = step(0.5, "full")
    assert recomputed == pytest.approx(on, rel=1e-6)
    for name, grad in on_grads.items():
        torch.testing.assert_close(recomputed_grads[name], grad, rtol=1e-5, atol=1e-7)


def test_balance_loss_is_a_mean_over_micro_batches_by_their_trained_tokens(tmp_path):
    def step(size, coefficient):
        keys = {"router_aux_loss_coef": coefficient, "global_batch_size": 4, "per_device_train_batch_size": size}
        return first_step(recipe(tmp_path, rows=token_rows(LENGTHS), kind="MIXTRAL", train=keys))

    (on, _, run), (off, _, _) = step(1, 0.5), step(1, 0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "mixtral", output_router_logits=True)
    parts = [(model(**m.tensors).aux_loss.item(), run.objective.weight(m.tensors)) for m in run.plan.loader.group(0)]
    mean = sum(aux * weight for aux, weight in parts) / sum(weight for _, weight in parts)
    assert len(parts) == 4 and on.loss - off.loss == pytest.approx(0.5 * mean, rel=1e-4)


def test_a_dense_model_has_nothing_to_balance(tmp_path):
    with pytest.raises(RecipeError, match=r"train\.router_aux_loss_coef.*LlamaForCausalLM has no routed experts"):
        begin(recipe(tmp_path, train={"router_aux_loss_coef": 0.1}))


def test_smoothing_and_noise_and_balance_stay_out_of_evaluation(tmp_path):
    def value(**keys):
        rows = token_rows(LENGTHS)
        run = begin(recipe(tmp_path, rows=rows, kind="MIXTRAL", data={"eval": str(tmp_path / "rows.jsonl")}, train=keys))
        run.begin()
        return evaluate(run)["eval_loss"]

    added = {"label_smoothing_factor": 0.3, "neftune_noise_alpha": 5, "router_aux_loss_coef": 0.5}
    assert value(**added) == value()


def test_smoothing_does_not_depend_on_the_split(tmp_path):
    steps = []
    for size in (1, 4):
        keys = {"label_smoothing_factor": 0.2, "global_batch_size": 4, "per_device_train_batch_size": size}
        steps.append(first_step(recipe(tmp_path, rows=token_rows(LENGTHS), lora=LORA, train=keys)))
    (one, one_grads, _), (four, four_grads, _) = steps
    assert one.loss == pytest.approx(four.loss, rel=1e-5) and one.grad_norm == pytest.approx(four.grad_norm, rel=1e-5)
    for name, grad in one_grads.items():
        assert (grad - four_grads[name]).norm() <= 5e-6 * max(float(grad.norm()), 1e-6 * one.grad_norm) or not grad.any()


@pytest.mark.parametrize("strategy", ["none", "fsdp"])
@pytest.mark.parametrize("kind", ["LLAMA_TIED", "GEMMA3"])
def test_noise_has_the_size_of_the_paper_and_is_off_in_evaluation(tmp_path, kind, strategy):
    keys = {"neftune_noise_alpha": 3.0, "global_batch_size": 4, "per_device_train_batch_size": 4}
    loaded = recipe(tmp_path, rows=token_rows(LENGTHS), kind=kind, lora=LORA, strategy=strategy, train=keys)
    run = begin(loaded)
    assert any("neftune_noise_alpha" in note for note in run.plan.notes)
    seen = []
    run.root.base_model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((args or tuple(kwargs.values()))[0].detach().clone()), with_kwargs=True
    )
    batch = run.plan.loader.group(0)[0].tensors
    for training in (False, True, True):
        run.root.train(training)
        with torch.no_grad():
            run.objective.loss_sum(run.root, run.to_model(batch))
    clean, *noisy = seen
    first, second = (n - clean for n in noisy)
    assert not torch.equal(first, second)  # drawn anew
    for row, length in zip(first, LENGTHS, strict=True):
        real, bound = row[:length], 3.0 / sqrt(length * 32)
        assert 0.9 * bound < real.abs().max() <= bound * 1.001
        assert float(real.mean()) == pytest.approx(0, abs=0.15 * bound)
        assert float(real.std()) == pytest.approx(bound / sqrt(3), rel=0.15)


def test_noise_comes_from_the_seed(tmp_path):
    def run(seed, folder, alpha=5):
        keys = {"train": {"neftune_noise_alpha": alpha, "max_steps": 3}, "lora": LORA, "output": str(tmp_path / folder)}
        return losses(train(recipe(tmp_path, rows=token_rows(LENGTHS), seed=seed, **keys)))

    one, again, other = run(1, "a"), run(1, "b"), run(2, "c")
    assert one == again
    # Adapters start as zero, so that the first losses differ by noise alone.
    assert len({one[0], other[0], run(1, "d", None)[0]}) == 3 and run(2, "e", None)[0] == run(1, "f", None)[0]
