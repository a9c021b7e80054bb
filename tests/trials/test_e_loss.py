"""Trials of kind E: how losses are normalised, over accumulation, evaluation, rows without trained tokens, recomputation."""

import pytest
import torch
from safetensors.torch import load_file

from swiftlite.dist.tensors import whole
from swiftlite.dist.world import leave
from swiftlite.train.console import Console
from swiftlite.train.loop import train_step
from swiftlite.train.plan import make_plan
from swiftlite.train.run import Run
from tests.training import LORA, losses, metrics, model_folder, recipe, token_rows, train

R4 = [{"input_ids": list(range(10, end))} for end in (14, 16, 22, 30)]
R4_LOSS = 5.578132  # mean over its 38 targets
SPLITS = [(4, 1), (2, 2), (1, 4)]  # rows of a forward pass, forward passes of a step
METHODS = pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])


def sgd(size, passes, **keys):
    batch = {"per_device_train_batch_size": size, "gradient_accumulation_steps": passes, "global_batch_size": size * passes}
    return {"optim": "sgd", "learning_rate": 0.01, **batch, **keys}


def run(path, name, **sections):
    """Trains with a checkpoint at each step; the folder of the run."""
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": None}
    return train(recipe(path, **sections, checkpoint=saving, output=str(path / name)))


def weights(output, step):
    return load_file(output / "checkpoints" / f"step-{step:06d}" / "trainable.safetensors")


def assert_close(ours, theirs, relative):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert (ours[name] - value).norm() <= relative * value.norm(), name


@METHODS
def test_E01_a_step_depends_on_its_rows_alone(tmp_path, lora):
    steps, updates = [], []
    for size, passes in SPLITS:
        output = run(tmp_path, f"{size}", rows=R4, lora=lora, train=sgd(size, passes, max_steps=1))
        steps.append(metrics(output)[0])
        start = {} if lora else load_file(model_folder(tmp_path) / "model.safetensors")  # B starts at zero
        updates.append({n: w - start.get(n, 0) for n, w in weights(output, 1).items() if "lora_A" not in n})
    for step, update in zip(steps, updates, strict=True):
        assert step["loss"] == pytest.approx(R4_LOSS, abs=1e-5) and step["trained_tokens"] == 38
        assert step["grad_norm"] == pytest.approx(steps[0]["grad_norm"], rel=1e-5)
        assert_close(update, updates[0], 1e-4)
    assert all(change.abs().max() > 0 for change in updates[0].values())


@METHODS
def test_E02_a_short_last_window_is_divided_by_what_is_in_it(tmp_path, lora):
    seconds = []
    for size, passes in ((1, 4), (4, 1)):
        keys = sgd(size, passes, num_train_epochs=1)
        output = run(tmp_path, f"{size}", rows=token_rows([4, 6, 12, 20, 5, 9]), lora=lora, train=keys)
        assert len(losses(output)) == 2
        before, after = weights(output, 1), weights(output, 2)
        seconds.append({n: after[n] - before[n] for n in after if "lora_A" not in n})
    assert_close(*seconds, 1e-4)


def test_E04_the_evaluation_loss_is_the_mean_over_its_tokens(tmp_path):
    """On one process; several are compared with it where they are served."""
    for rows, size in ((R4, 1), (R4, 4), ([*R4, R4[0]], 2), ([*R4, R4[0]], 3)):
        evaluation = {"eval_on_start": True, "per_device_eval_batch_size": size}
        keys = {"rows": rows, "data": {"eval": str(tmp_path / "rows.jsonl")}, "eval": evaluation, "train": {"max_steps": 1}}
        output = train(recipe(tmp_path, **keys, output=str(tmp_path / f"{len(rows)}-{size}")))
        first = losses(
            train(recipe(tmp_path, rows=R4[:1], train={"max_steps": 1}, output=str(tmp_path / f"one-{len(rows)}-{size}")))
        )[0]
        expected = R4_LOSS if len(rows) == 4 else (38 * R4_LOSS + 3 * first) / 41
        assert metrics(output)[0]["step"] == 0 and metrics(output)[0]["eval_loss"] == pytest.approx(expected, abs=1e-5)


def test_E06_a_row_without_trained_tokens_changes_nothing(tmp_path):
    masked = {"input_ids": list(range(40, 49)), "labels": [-100] * 9}
    with_it = run(tmp_path, "with", rows=[{**r, "labels": r["input_ids"]} for r in R4] + [masked], train=sgd(1, 5, max_steps=1))
    without = run(tmp_path, "without", rows=R4, train=sgd(1, 4, max_steps=1))
    start = load_file(model_folder(tmp_path) / "model.safetensors")
    updates = [{n: w - start[n] for n, w in weights(output, 1).items()} for output in (with_it, without)]
    assert_close(*updates, 1e-4)
    assert all(w.isfinite().all() for w in weights(with_it, 1).values()) and metrics(with_it)[0]["loss"] == pytest.approx(
        R4_LOSS, abs=1e-5
    )
    assert "dropped 1: 1 no trainable tokens" in (with_it / "train.log").read_text()


@METHODS
@pytest.mark.parametrize("strategy", ["none", "fsdp"])
def test_E06_a_micro_batch_without_trained_tokens_adds_nothing(tmp_path, lora, strategy):
    """A rank that has no rows left in a step gets such batches."""
    found = []
    for empty in (False, True):
        loaded = recipe(tmp_path, rows=R4, lora=lora, strategy=strategy, train=sgd(2, 2))
        step = Run(make_plan(loaded), Console(quiet=True))
        step.optimizer.zero_grad = lambda *a, **k: None  # keeps the gradients to look at
        group = step.plan.loader.group(0)
        report = train_step(step, [step.plan.loader._micro_batch([]), *group] if empty else group, 0.0)
        found.append((report, {n: whole(p.grad) for n, p in step.root.named_parameters() if p.requires_grad}))
        leave()
    (plain, gradients), (padded, same) = found
    assert (padded.loss, padded.grad_norm) == pytest.approx((plain.loss, plain.grad_norm), rel=1e-6)
    assert padded.trained_tokens == plain.trained_tokens == 38
    assert_close(same, gradients, 1e-5)


@pytest.mark.parametrize("strategy", ["none", "fsdp"])
def test_E08_recomputing_activations_trains_the_same(tmp_path, strategy):
    found = {}
    for kind in ("none", "full"):
        keys = sgd(4, 1, optim="adamw", max_steps=3, gradient_checkpointing=kind)
        output = run(tmp_path, kind, rows=R4, lora=LORA, strategy=strategy, train=keys)
        found[kind] = losses(output)
        matrices = {n: w for n, w in weights(output, 1).items() if "lora_B" in n}
        assert len(matrices) == 14 and all(w.abs().max() > 0 for w in matrices.values())
    assert found["full"] == pytest.approx(found["none"], abs=1e-6) and found["none"][2] < found["none"][0]
    assert torch.tensor(found["none"]).isfinite().all()
