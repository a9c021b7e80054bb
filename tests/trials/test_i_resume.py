"""Trials of kind I: checkpoints, resume, rotation, a full disk."""

import json
import shutil
import types

import pytest
import torch
from safetensors.torch import load_file

from swiftlite import api
from swiftlite.dist import checkpoint
from swiftlite.infer.evaluate import evaluate
from swiftlite.infer.load import load_target
from swiftlite.recipe.errors import RecipeError
from swiftlite.recipe.load import load_recipe
from swiftlite.train import session
from swiftlite.train.console import Console
from tests.training import LORA, losses, metrics, model_folder, recipe, token_rows, train, write_rows
from tests.trials import child

ROWS = token_rows([7, 9, 5, 11, 6, 8, 10, 4, 12, 5])
EVERY_2 = {"save_strategy": "steps", "save_steps": 2}


def steps(output):
    return [checkpoint.step_of(p) for p in checkpoint.complete(output / "checkpoints")[0]]


def weights(output, step):
    return load_file(output / "checkpoints" / f"step-{step:06d}" / "trainable.safetensors")


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_I01_resume_takes_the_newest_complete_checkpoint(tmp_path, capsys):
    whole = train(recipe(tmp_path, rows=ROWS, train={"max_steps": 8}, checkpoint=EVERY_2, output=str(tmp_path / "whole")))
    keys = {"rows": ROWS, "checkpoint": {**EVERY_2, "resume": "auto"}}
    output = train(recipe(tmp_path, **keys, train={"max_steps": 4}))
    fake = output / "checkpoints" / "step-000006"
    fake.mkdir()
    (fake / "trainable.safetensors").write_bytes(b"0123456789")
    session.train(recipe(tmp_path, **keys, train={"max_steps": 8}), Console())
    said = capsys.readouterr().out
    assert f"{fake} is passed over: it has no COMPLETE marker" in said and "at step 4 of 8" in said
    assert_equal(weights(output, 8), weights(whole, 8))
    # Step 6 was saved for good, and what lay there was moved out of the way, not deleted.
    assert steps(output) == [6, 8]
    assert [p.read_bytes() for p in (output / "checkpoints").glob("*.incomplete-*/*")] == [b"0123456789"]


def test_I01_killed_between_weights_and_optimizer(tmp_path):
    whole = train(recipe(tmp_path, rows=ROWS, train={"max_steps": 8}, checkpoint=EVERY_2, output=str(tmp_path / "whole")))
    loaded = recipe(tmp_path, rows=ROWS, train={"max_steps": 8}, checkpoint={**EVERY_2, "resume": "auto"})
    assert child.start({"kill": 6}, "train", loaded.path).returncode == -9
    assert steps(tmp_path / "out") == [2, 4]
    session.train(loaded, Console())
    log = (tmp_path / "out" / "train.log").read_text()
    assert "at step 4 of 8" in log and ".step-000006.part-" in log and "is passed over: it was never finished" in log
    assert_equal(weights(tmp_path / "out", 8), weights(whole, 8))


def test_I01_two_histories_do_not_mix(tmp_path):
    keys = {"rows": ROWS, "train": {"max_steps": 4}}
    output = train(recipe(tmp_path, **keys, checkpoint=EVERY_2))
    older = str(output / "checkpoints" / "step-000002")
    with pytest.raises(RecipeError, match=r"checkpoint.resume: .*up to step 4.*step 2"):
        train(recipe(tmp_path, **keys, checkpoint={**EVERY_2, "resume": older}))
    branch = train(recipe(tmp_path, **keys, checkpoint={**EVERY_2, "resume": older}, output=str(tmp_path / "branch")))
    assert_equal(weights(branch, 4), weights(output, 4))


@pytest.mark.parametrize("limit", [1, 2])
def test_I02_newest_and_best_survive_every_rotation(tmp_path, monkeypatch, limit):
    model_folder(tmp_path, vocab=261)
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]} for text in ("yo", "zzzzzzzz")
    ]
    file = write_rows(tmp_path / "eval.jsonl", rows[1:])
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": limit, "resume": "auto"}
    keys = {"rows": rows[:1], "data": {"eval": str(file)}, "lora": {"rank": 8, "alpha": 16}, "checkpoint": saving}
    keys["eval"] = {"eval_strategy": "steps", "eval_steps": 1}
    seen, rotate, remove = {}, checkpoint.rotate, shutil.rmtree

    def watched_rotate(root, *args):
        newest = steps(tmp_path / "out")[-1]
        done = rotate(root, *args)
        seen[newest] = steps(tmp_path / "out")
        return done

    def watched_remove(path, **kwargs):
        assert "step-" not in str(path) or ".part-" in str(path) or steps(tmp_path / "out")
        remove(path, **kwargs)

    monkeypatch.setattr(checkpoint, "rotate", watched_rotate)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", watched_remove)
    output = train(recipe(tmp_path, **keys, train={"max_steps": 6}))
    values = {r["step"]: r["eval_loss"] for r in metrics(output) if "eval_loss" in r}
    best = min(values, key=lambda step: values[step])
    assert len(values) == 6 and 1 < best < 6, "a best step at either end would try nothing"
    for step, kept in seen.items():
        best_so_far = min(range(1, step + 1), key=lambda s: values[s])
        assert kept == sorted({best_so_far, *range(max(1, step - limit + 1), step + 1)}), f"after step {step}"
    api.export(output / "checkpoints" / f"step-{best:06d}", format="merged", output=tmp_path / "best", device="cpu")
    assert evaluate(load_target(str(tmp_path / "best" / "merged")), file, generate=False)["loss"] == pytest.approx(
        values[best], rel=1e-5
    )
    train(recipe(tmp_path, **keys, train={"max_steps": 7}))
    assert steps(output)[-1] == 7 and best in steps(output)


@pytest.mark.parametrize("name", ["I04", "I05"])
def test_I04_I05_a_new_process_goes_on_with_the_same_rows_and_chance(tmp_path, monkeypatch, name):
    """I04: rows of this epoch and the next come in the same order. I05: dropout draws the same numbers."""
    if name == "I04":
        stop, keys = 7, {"rows": ROWS, "data": {"train_sampling_strategy": "random"}, "seed": 3}
        keys |= {"train": {"global_batch_size": 2, "num_train_epochs": 3}}
    else:
        stop, keys = 4, {"rows": ROWS[:8], "lora": {**LORA, "dropout": 0.3}, "train": {"max_steps": 8}}
    saving = {"save_strategy": "epoch", "save_total_limit": None, "resume": "auto"}
    with monkeypatch.context() as patch:
        child.install({"rows": tmp_path / "whole.rows"}, patch.setattr)
        whole = train(recipe(tmp_path, **keys, checkpoint=saving, output=str(tmp_path / "whole")))
    loaded = recipe(tmp_path, **keys, checkpoint=saving)
    with monkeypatch.context() as patch:
        child.install({"rows": tmp_path / "part.rows", "stop": stop}, patch.setattr)
        with pytest.raises(KeyboardInterrupt):
            train(loaded)
    assert steps(tmp_path / "out")[-1] == stop
    done = child.start({"rows": tmp_path / "part.rows"}, "train", loaded.path)
    assert done.returncode == 0, done.stderr
    rows = [[json.loads(line) for line in (tmp_path / f).read_text().splitlines()] for f in ("part.rows", "whole.rows")]
    assert rows[0] == rows[1] and len(rows[1]) == (15 if name == "I04" else 8)
    if name == "I04":
        epochs = [[s for _, sources in rows[1][5 * e : 5 * e + 5] for s in sources] for e in range(3)]
        assert epochs[0] != epochs[1] != epochs[2] and len({*epochs[0]}) == 10
    assert losses(tmp_path / "out") == losses(whole)
    assert_equal(weights(tmp_path / "out", len(rows[1])), weights(whole, len(rows[1])))


def test_I07_a_disk_that_fills_up_leaves_what_was_whole(tmp_path):
    loaded = recipe(tmp_path, rows=ROWS, train={"max_steps": 6}, checkpoint={**EVERY_2, "resume": "auto"})
    done = child.start({"file_limit": [3, 64 * 1024]}, "train", loaded.path)
    output = tmp_path / "out"
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "space" in done.stderr and str(output / "checkpoints" / "step-000004") in done.stderr
    assert [p.name for p in (output / "checkpoints").iterdir()] == ["step-000002"]
    assert checkpoint.Saved(output / "checkpoints" / "step-000002").meta["step"] == 2
    train(loaded)
    assert steps(output) == [4, 6]
    whole = train(recipe(tmp_path, rows=ROWS, train={"max_steps": 6}, checkpoint=EVERY_2, output=str(tmp_path / "whole")))
    assert_equal(weights(output, 6), weights(whole, 6))


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_I07_space_is_asked_for_before_the_run_and_before_each_checkpoint(tmp_path, monkeypatch, lora):
    first = train(
        recipe(tmp_path, rows=ROWS, lora=lora, train={"max_steps": 1}, checkpoint=EVERY_2, output=str(tmp_path / "first"))
    )
    folder = first / "checkpoints" / "step-000001"
    size = sum((folder / f).stat().st_size for f in ("trainable.safetensors", "optimizer.safetensors"))
    free = [size // 2]
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=free[0]))
    loaded = recipe(tmp_path, rows=ROWS, lora=lora, train={"max_steps": 4}, checkpoint=EVERY_2)
    with pytest.raises(checkpoint.DiskFullError, match=r"out/checkpoints: not enough space .* needed, .* free") as refused:
        train(loaded)
    assert not (tmp_path / "out").exists() and refused.value.exit_code == 1
    # Space for one is there at first, and gone at the second.
    free = [2 * size]
    rotate = checkpoint.rotate
    monkeypatch.setattr(checkpoint, "rotate", lambda *args: (free.__setitem__(0, size // 2), rotate(*args)))
    with pytest.raises(checkpoint.DiskFullError, match=r"out/checkpoints/step-000004: not enough space"):
        train(loaded)
    assert [p.name for p in (tmp_path / "out" / "checkpoints").iterdir()] == ["step-000002"]
    free = [2 * size]
    monkeypatch.setattr(checkpoint, "rotate", rotate)
    train(load_recipe(str(loaded.path), ["checkpoint.resume=auto"]))
    assert steps(tmp_path / "out") == [2, 4]
