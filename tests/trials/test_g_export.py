"""Trials of kind G: what is trained on packed weights, and what becomes of it.

The trials' model has rows of 32 weights, which nf4 leaves as they are: here it is twice as wide.
"""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from swiftlite import api
from swiftlite.dist.checkpoint import Saved
from swiftlite.models.packed import packed_weights
from swiftlite.train.console import Console
from swiftlite.train.loop import fit
from swiftlite.train.plan import make_plan
from swiftlite.train.run import Run
from tests.training import metrics, model_folder, recipe, train, write_rows
from tests.trials.exporting import logits, reload, run

WIDE = {"vocab": 261, "hidden_size": 64, "intermediate_size": 128}
LORA = {"rank": 4, "alpha": 16}


def packed_run(path, monkeypatch, capsys, onto, learning_rate, dtype="auto"):
    """The run of G01: its outcome, the base's tensors, the merged ones, and s B A of every adapted layer."""
    base = load_file(model_folder(path, **WIDE) / "model.safetensors")
    export = {"formats": ["merged"], "onto": onto, "dtype": dtype}
    done = run(
        path, monkeypatch, capsys,
        lora=LORA, quantize="nf4", train={"max_steps": 3, "learning_rate": learning_rate}, export=export,
    )  # fmt: skip
    layers = {n: m for n, m in done.trained.model.named_modules() if hasattr(m, "lora_A")}
    updates = {
        f"{n}.weight": m.scaling["default"] * m.lora_B["default"].weight.detach() @ m.lora_A["default"].weight.detach()
        for n, m in layers.items()
    }
    assert len(updates) == 14
    return done, base, load_file(done.output / "merged" / "model.safetensors"), updates


@pytest.mark.parametrize("onto", ["original", "auto"])
def test_G01_a_tiny_update_is_not_rounded_away(onto, tmp_path, monkeypatch, capsys):
    """`auto` merges onto the dequantised weights, which are what was trained; asked for, the original ones serve."""
    done, base, merged, updates = packed_run(tmp_path, monkeypatch, capsys, onto, 1e-5)
    starts = base if onto == "original" else {n: w.unpacked(torch.float32) for n, w in packed_weights(done.trained.model).items()}
    for name, update in updates.items():
        assert update.abs().max() > 0
        # The update is 1e-6 itself: the bound of the trial would hold for one that is gone.
        torch.testing.assert_close(merged[name] - starts[name], update, atol=1e-8, rtol=0)
        assert not torch.equal(merged[name], starts[name])
    assert {t.dtype for t in merged.values()} == {torch.float32}
    report = json.loads((done.output / "export_report.json").read_text())["merged"]
    assert report["updates"]["error"] == 0


def test_G01_what_bf16_rounds_away_is_told(tmp_path, monkeypatch, capsys):
    done, *_ = packed_run(tmp_path, monkeypatch, capsys, "auto", 1e-5, dtype="bf16")
    report = json.loads((done.output / "export_report.json").read_text())["merged"]
    assert report["updates"]["vanished"] > 0.75
    assert re.search(r"bfloat16 rounds the updates by \d+% of their norm .*export\.dtype: fp32 holds them", done.printed)


@pytest.mark.parametrize("onto", ["original", "dequantised"])
def test_G03_both_merges_are_offered_and_recorded(onto, tmp_path, monkeypatch, capsys):
    done, base, merged, updates = packed_run(tmp_path, monkeypatch, capsys, onto, 1e-2)
    dequantised = {n: w.unpacked(torch.float32) for n, w in packed_weights(done.trained.model).items()}
    starts = base if onto == "original" else dequantised
    for name, update in updates.items():
        torch.testing.assert_close(merged[name] - update, starts[name], atol=1e-6, rtol=0)
        assert (dequantised[name] - base[name]).abs().max() > 1e-3
    apart = (logits(reload(done.output / "merged")) - done.logits()).abs().max()
    assert (apart < 1e-4) if onto == "dequantised" else (apart > 1e-3)
    report = json.loads((done.output / "export_report.json").read_text())["merged"]
    assert report["onto"]["base"] == onto
    assert f"merged onto the {'weights of the model' if onto == 'original' else 'nf4 weights, dequantised'}" in done.printed


def test_G04_trainable_weights_are_fp32_whatever_the_base(tmp_path):
    model_folder(tmp_path, vocab=261, dtype=torch.float16)
    keys = {"lora": {**LORA, "modules_to_save": ["lm_head"]}, "train": {"precision": "fp16", "max_steps": 4}}
    run = Run(make_plan(recipe(tmp_path, **keys)), Console(quiet=True))
    trainable = {n: p for n, p in run.root.named_parameters() if p.requires_grad}
    assert any("lm_head" in n for n in trainable)
    before = {n: p.detach().clone() for n, p in trainable.items()}
    run.begin(0)
    fit(run)
    run.finish()
    assert {p.dtype for p in trainable.values()} == {torch.float32}
    # The scale begins too high for this model, so that the first steps only lower it.
    assert any(not torch.equal(before[n], p) for n, p in trainable.items())


def test_G06_the_best_adapter_on_a_packed_base_is_kept_and_exported(tmp_path):
    model_folder(tmp_path, **WIDE)
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]} for text in ("yo", "zzzzzzzz")
    ]
    every = {"eval_strategy": "steps", "eval_steps": 1}
    output = train(
        recipe(
            tmp_path,
            rows=rows[:1],
            data={"eval": str(write_rows(tmp_path / "eval.jsonl", rows[1:]))},
            lora={"rank": 8, "alpha": 16},
            quantize="nf4",
            train={"max_steps": 6, "optim": "adamw", "learning_rate": 0.01},
            eval=every,
            checkpoint={"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "metric_for_best_model": "eval_loss"},
        )
    )
    values = {r["step"]: r["eval_loss"] for r in metrics(output) if "eval_loss" in r}
    best = min(values, key=lambda step: values[step])
    assert 1 < best < 6, "a best step at either end would try nothing"
    assert Saved(output / "checkpoints" / "step-000006").meta["best"]["step"] == best
    assert f"eval at step {best}" in (output / "train.log").read_text()
    kept = output / "checkpoints" / f"step-{best:06d}"
    folder = api.export(kept, format="adapter", output=tmp_path / "best", device="cpu")
    meant, found = (load_file(f / "adapter_model.safetensors") for f in (kept / "adapter", folder))
    assert meant.keys() == found.keys()
    assert all(torch.equal(meant[n], found[n]) for n in meant)
