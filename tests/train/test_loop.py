"""What a step does beside the sum: precision, non-finite numbers, weight decay groups, what trains and what does not."""

import json
import math

import pytest
import torch

from swiftlite.dist.tensors import whole
from swiftlite.dist.world import leave
from swiftlite.recipe.errors import RecipeError
from swiftlite.train import loop
from swiftlite.train.console import Console
from swiftlite.train.loop import NonFiniteError, train_step
from swiftlite.train.plan import make_plan
from swiftlite.train.run import Run
from tests.training import LORA, losses, metrics, recipe, token_rows, train

ROWS = token_rows([8, 12, 6, 10])


@pytest.fixture(autouse=True)
def no_group_left():
    yield
    leave()


def poison(monkeypatch, step, value=float("nan")):
    """Makes the loss of one step, counted from 1, non-finite; its gradients follow."""
    plain = train_step

    def poisoned(run, group, rate):
        if run.step + 1 == step:
            objective = run.objective

            class Bad:
                weight = staticmethod(objective.weight)

                @staticmethod
                def loss_sum(root, batch):
                    return objective.loss_sum(root, batch) * value

            run.objective = Bad
            try:
                return plain(run, group, rate)
            finally:
                run.objective = objective
        return plain(run, group, rate)

    monkeypatch.setattr(loop, "train_step", poisoned)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_loss_stops_before_anything_is_saved(tmp_path, monkeypatch, value):
    poison(monkeypatch, 3, value)
    loaded = recipe(
        tmp_path, rows=ROWS, lora=LORA, train={"max_steps": 4}, checkpoint={"save_strategy": "steps", "save_steps": 1}
    )
    with pytest.raises(NonFiniteError, match=r"step 3.*rows.jsonl:3") as error:
        train(loaded)
    assert error.value.exit_code == 1
    assert sorted(p.name for p in (tmp_path / "out" / "checkpoints").iterdir()) == ["step-000001", "step-000002"]


def test_skip_leaves_the_weights_and_counts(tmp_path, monkeypatch):
    poison(monkeypatch, 2)
    seen = []
    record = Run.record

    def watch(self, report):
        record(self, report)
        seen.append({n: whole(p).clone() for n, p in self.root.named_parameters() if p.requires_grad})

    monkeypatch.setattr(Run, "record", watch)
    output = train(recipe(tmp_path, rows=ROWS, lora=LORA, train={"max_steps": 3, "on_nonfinite": "skip"}))
    assert all(torch.equal(seen[0][n], seen[1][n]) for n in seen[0]) and not all(
        torch.equal(seen[1][n], seen[2][n]) for n in seen[1]
    )
    assert metrics(output)[-1]["skipped_steps"] == 1 and all(
        math.isfinite(v) for t in seen[2].values() for v in t.flatten().tolist()
    )


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure", "fp16"])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_half_precision_follows_fp32(tmp_path, precision, lora):
    """fp32 masters under bf16 or fp16 compute: losses as in fp32 to rounding; trained weights are kept in fp32."""
    runs = {}
    for name in ("fp32", precision):
        keys = {"lora": LORA} if lora else {}
        train_keys = {"precision": name, "global_batch_size": 4, "max_steps": 5, "learning_rate": 0.003}
        loaded = recipe(tmp_path, rows=ROWS, output=str(tmp_path / name), train=train_keys, **keys)
        run = Run(make_plan(loaded), Console(quiet=True))
        kinds = {p.dtype for p in run.root.parameters() if p.requires_grad}
        assert kinds == ({torch.bfloat16} if name == "bf16_pure" else {torch.float32})
        frozen = {p.dtype for p in run.root.parameters() if not p.requires_grad}
        assert frozen <= {run.plan.precision.compute}
        leave()
        runs[name] = losses(train(loaded))
    assert runs[precision] == pytest.approx(runs["fp32"], abs=0.03) and runs["fp32"][-1] < runs["fp32"][0]


def test_fp16_overflow_lowers_the_scale_and_is_counted(tmp_path):
    loaded = recipe(tmp_path, rows=ROWS, lora=LORA, train={"precision": "fp16", "max_steps": 2})
    run = Run(make_plan(loaded), Console(quiet=True))
    run.scaler.load_state_dict({**run.scaler.state_dict(), "scale": 2.0**40})
    before = {n: whole(p).clone() for n, p in run.root.named_parameters() if p.requires_grad}
    report = train_step(run, run.plan.loader.group(0), 0.1)
    assert report.skipped and math.isfinite(report.loss) and run.scaler.get_scale() == 2.0**39
    assert all(torch.equal(before[n], whole(p)) for n, p in run.root.named_parameters() if p.requires_grad)


def test_norms_and_biases_are_exempt_from_weight_decay(tmp_path):
    run = Run(make_plan(recipe(tmp_path, rows=ROWS, train={"weight_decay": 0.1})), Console(quiet=True))
    decay = {id(p): g["weight_decay"] for g in run.optimizer.param_groups for p in g["params"]}
    names = {n: decay[id(p)] for n, p in run.root.named_parameters()}
    assert all((w == 0.0) == ("norm" in n) for n, w in names.items()) and len(decay) == len(list(run.root.parameters()))


def test_only_the_named_weights_train(tmp_path):
    loaded = recipe(
        tmp_path, rows=ROWS, train={"trainable": ["*layers.1.mlp*"], "max_steps": 2}, checkpoint={"save_strategy": "epoch"}
    )
    output = train(loaded)
    from safetensors import safe_open

    with safe_open(next(output.rglob("trainable.safetensors")), "pt") as f:
        assert sorted(f.keys()) == [f"model.layers.1.mlp.{n}_proj.weight" for n in ("down", "gate", "up")]
    with pytest.raises(RecipeError, match="mlpp"):
        train(recipe(tmp_path, rows=ROWS, train={"trainable": ["*layers.1.mlpp*"]}, output=str(tmp_path / "o2")))


def test_rows_are_taken_once_an_epoch_and_the_plan_is_kept(tmp_path):
    loaded = recipe(
        tmp_path,
        rows=token_rows([6] * 7),
        train={"global_batch_size": 3, "num_train_epochs": 2},
        data={"train_sampling_strategy": "random"},
    )
    plan = make_plan(loaded)
    assert plan.schedule.total == 6 and plan.loader.steps_per_epoch == 3
    for epoch in (0, 1):
        rows = [i for step in range(3) for i in plan.loader.rows_of(3 * epoch + step)]
        assert sorted(rows) == list(range(7))
    assert [r["step"] for r in metrics(train(loaded))] == [1, 2, 3, 4, 5, 6]


def test_metrics_rows_are_complete_and_trackers_see_them(tmp_path):
    (tmp_path / "eval.jsonl").write_text(json.dumps(ROWS[0]))
    loaded = recipe(
        tmp_path,
        rows=ROWS,
        lora=LORA,
        data={"eval": str(tmp_path / "eval.jsonl")},
        train={"max_steps": 2},
        eval={"eval_strategy": "steps", "eval_steps": 1},
    )
    rows = metrics(train(loaded))
    step = next(r for r in rows if "loss" in r)
    assert {
        "step",
        "epoch",
        "loss",
        "grad_norm",
        "learning_rate",
        "tokens",
        "trained_tokens",
        "tokens_per_second",
        "data_wait_s",
        "peak_memory_gib",
        "allocated_gib",
    } <= set(step)
    assert step["tokens"] == 8 and step["trained_tokens"] == 7
    assert [r["step"] for r in rows if "eval_loss" in r] == [1, 2]


def test_a_run_says_what_it_was_made_of(tmp_path):
    def about(**keys):
        train(recipe(tmp_path, rows=ROWS, lora=LORA, train={"max_steps": 1}, output=str(tmp_path / "o"), **keys))
        return json.loads((tmp_path / "o" / "environment.json").read_text())

    first, again = about(), about()
    assert first == again and first["packages"]["torch"] and first["model"]["base"] == str(tmp_path / "llama")
    assert list(first["model"]["weights"]) == ["model.safetensors"] and first["model"]["config_sha256"]
    assert about(data={"max_length": 9})["data"] != first["data"]
