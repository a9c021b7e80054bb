"""A resumed run is the uninterrupted one, bit for bit on a CPU; what cannot be resumed is refused by name."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from swiftlite.dist import checkpoint
from swiftlite.recipe.errors import ModelError, RecipeError
from swiftlite.train import state as states
from swiftlite.train.run import Run
from tests.training import CHAT, LORA, losses, metrics, recipe, token_rows, train

ROWS = token_rows([7, 9, 5, 11, 6, 8, 10, 4, 12, 5])


def sections(**train_keys):
    """Three shuffled epochs of five steps: dropout, clipping and a schedule, so that every kind of state matters."""
    return {
        "rows": ROWS,
        "lora": {**LORA, "dropout": 0.3},
        "data": {"train_sampling_strategy": "random"},
        "train": {
            "global_batch_size": 2,
            "num_train_epochs": 3,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 2,
            "max_grad_norm": 1.0,
            **train_keys,
        },
    }


def final(output):
    return load_file(checkpoint.complete(output / "checkpoints")[0][-1] / "trainable.safetensors")


def stop_after(monkeypatch, step):
    """Asks for a stop once `step` steps are done, as a signal would."""
    record = Run.record

    def asking(self, report):
        record(self, report)
        self.stop.asked = self.step == step

    monkeypatch.setattr(Run, "record", asking)


@pytest.mark.parametrize("strategy", ["none", "fsdp"])
@pytest.mark.parametrize("method", ["lora", "full", "sgd", "noise"])
def test_resumed_equals_uninterrupted(tmp_path, monkeypatch, method, strategy):
    keys = sections(**{"sgd": {"optim": "sgd"}, "noise": {"neftune_noise_alpha": 5}}.get(method, {}))
    if method == "full":
        keys["lora"] = None
    whole = train(
        recipe(
            tmp_path,
            **keys,
            strategy=strategy,
            output=str(tmp_path / "whole"),
            checkpoint={"save_strategy": "steps", "save_steps": 15},
        )
    )
    part = {
        **keys,
        "strategy": strategy,
        "output": str(tmp_path / "part"),
        "checkpoint": {"save_strategy": "steps", "save_steps": 15, "resume": "auto"},
    }
    for stop in (7, 11):
        with monkeypatch.context() as patch:
            stop_after(patch, stop)
            with pytest.raises(KeyboardInterrupt):
                train(recipe(tmp_path, **part))
        torch.manual_seed(stop)  # whatever ran in between must not matter
        random.seed(stop)
    again = train(recipe(tmp_path, **part))
    assert losses(again) == losses(whole) and len(losses(again)) == 15
    ours, theirs = final(again), final(whole)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path):
    keys = {**sections(num_train_epochs=40), "checkpoint": {"save_strategy": "steps", "save_steps": 3}}
    train(recipe(tmp_path, **keys, output=str(tmp_path / "whole")))
    loaded = recipe(tmp_path, **keys, output=str(tmp_path / "killed"))
    command = [sys.executable, "-m", "swiftlite", "train", loaded.path, "checkpoint.resume=auto"]
    log = tmp_path / "killed" / "metrics.jsonl"
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    kill_at = random.Random(time.time_ns()).randint(4, 40)  # of 200 steps: far from the end, however busy the machine is
    while child.poll() is None and not (log.exists() and len(log.read_text().splitlines()) >= kill_at):
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    child.wait()
    last = "checkpoints/step-000200"
    assert not (tmp_path / "killed" / last).exists(), "killed too late for a test"
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("trainable", "optimizer"):
        files = [tmp_path / run / last / f"{name}.safetensors" for run in ("whole", "killed")]
        assert files[0].read_bytes() == files[1].read_bytes(), f"killed at step {kill_at}"
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_leaves(tmp_path, number):
    loaded = recipe(
        tmp_path, **sections(num_train_epochs=400), checkpoint={"save_strategy": "epoch", "save_total_limit": 1, "resume": "auto"}
    )
    child = subprocess.Popen(
        [sys.executable, "-m", "swiftlite", "train", loaded.path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    log = tmp_path / "out" / "metrics.jsonl"
    while child.poll() is None and not (log.exists() and len(log.read_text().splitlines()) >= 7):
        time.sleep(0.01)
    child.send_signal(number)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130 and "Traceback" not in err
    newest = checkpoint.complete(tmp_path / "out" / "checkpoints")[0][-1]
    assert checkpoint.step_of(newest) == metrics(tmp_path / "out")[-1]["step"] and str(newest) in out


def test_every_key_is_free_layout_or_fixed(tmp_path):
    flat = states.flat(recipe(tmp_path, lora=LORA).recipe)
    assert states.check_resumable(flat, flat | {"log.logging_steps": 7, "train.num_train_epochs": 9, "output": "elsewhere"}) == []
    assert len(states.check_resumable(flat, flat | {"train.per_device_train_batch_size": 4, "strategy.name": "fsdp"})) == 2
    older = {k: v for k, v in flat.items() if k not in ("train.label_smoothing_factor", "lora.experts")}
    assert states.check_resumable(older, flat) == []  # a key that did not exist yet had its default
    with pytest.raises(RecipeError, match="label_smoothing_factor"):
        states.check_resumable(older, flat | {"train.label_smoothing_factor": 0.1})
    for key in ("train.learning_rate", "lora.rank", "seed", "data.max_length", "train.global_batch_size"):
        with pytest.raises(RecipeError) as error:
            states.check_resumable(flat, flat | {key: 12345})
        assert key in str(error.value) and "12345" in str(error.value) and str(flat[key]) in str(error.value)


def test_a_run_is_not_started_over_another(tmp_path):
    keys = {"lora": LORA, "checkpoint": {"save_strategy": "epoch"}, "train": {"max_steps": 2}}
    train(recipe(tmp_path, **keys))
    with pytest.raises(RecipeError, match=r"--resume auto"):
        train(recipe(tmp_path, **keys))


def test_changed_rows_are_refused(tmp_path):
    keys = {"lora": LORA, "checkpoint": {"save_strategy": "epoch", "resume": "auto"}, "train": {"max_steps": 2}}
    train(recipe(tmp_path, rows=CHAT, **keys))
    with pytest.raises(RecipeError, match="rows are not those"):
        train(recipe(tmp_path, rows=CHAT[:3], **keys))


def test_weights_alone_cannot_be_resumed(tmp_path):
    keys = {
        "lora": LORA,
        "checkpoint": {"save_strategy": "epoch", "save_only_model": True, "resume": "auto"},
        "train": {"max_steps": 2},
    }
    output = train(recipe(tmp_path, **keys))
    assert not list(output.rglob("optimizer.safetensors"))
    with pytest.raises(ModelError, match="save_only_model"):
        train(recipe(tmp_path, **keys))


def test_nothing_in_a_checkpoint_is_pickled(tmp_path):
    output = train(recipe(tmp_path, lora=LORA, checkpoint={"save_strategy": "epoch"}, train={"max_steps": 2}))
    files = [p for p in output.rglob("*") if p.is_file()]
    assert {p.suffix for p in files} <= {".safetensors", ".json", ".jsonl", ".yaml", ".log", ".jinja", ""}
    for path in files:
        if path.suffix == ".json" or path.name == "COMPLETE":
            json.loads(path.read_text())


@pytest.mark.parametrize("limit", [1, 2])
def test_the_best_and_the_newest_stay(tmp_path, limit):  # trial I02
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
    other = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "zzzzzzzz"}]}
    (tmp_path / "eval.jsonl").write_text(json.dumps(other))
    loaded = recipe(
        tmp_path, rows=[row], data={"eval": str(tmp_path / "eval.jsonl")}, lora={"rank": 8, "alpha": 16},
        train={"max_steps": 6}, eval={"eval_strategy": "steps", "eval_steps": 1},
        checkpoint={"save_strategy": "steps", "save_steps": 1, "save_total_limit": limit},
    )  # fmt: skip
    output = train(loaded)
    values = {r["step"]: r["eval_loss"] for r in metrics(output) if "eval_loss" in r}
    best = min(values, key=lambda step: values[step])
    kept = [checkpoint.step_of(p) for p in checkpoint.complete(output / "checkpoints")[0]]
    assert len(values) == 6 and {6, best} <= set(kept) and len(kept) <= limit + 1


@pytest.mark.parametrize(("strategy", "minutes", "saves"), [("epoch", 1e-9, 4), ("epoch", 0, 1), ("no", 1e-9, 0)])
def test_a_checkpoint_is_due_when_time_has_passed(tmp_path, strategy, minutes, saves):
    limits = {"save_strategy": strategy, "save_minutes": minutes, "save_total_limit": None}
    output = train(recipe(tmp_path, rows=token_rows([6] * 4), lora=LORA, checkpoint=limits))
    assert len(checkpoint.complete(output / "checkpoints")[0]) == saves
