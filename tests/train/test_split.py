"""Runs whose adapters start as a part of the base: exported for the whole base, resumed from the start that they had."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swiftlite import api
from swiftlite.dist.checkpoint import MARKER, Saved
from swiftlite.dist.world import leave
from swiftlite.models import decompose
from swiftlite.recipe.errors import ModelError, RecipeError
from swiftlite.train import reference
from swiftlite.train.console import Console
from swiftlite.train.plan import make_plan
from swiftlite.train.run import Run
from tests.ranks import run_ranks
from tests.train.test_dpo import ROWS as PAIRS
from tests.train.test_ranks_runs import same, tensors
from tests.training import losses, model_folder, recipe, token_rows, train

ROWS = token_rows([9, 12, 7, 10, 5, 14])
INITS = ["pissa", "olora"]
ONE = ["pissa", pytest.param("olora", marks=pytest.mark.slow)]  # where the way A and B are made matters less


@pytest.fixture(autouse=True)
def no_group_left():
    yield
    leave()


def made(path, output, init="pissa", *, steps=4, strategy="none", resume=None, export=("adapter", "merged"), lora=None, **keys):
    return recipe(
        path, rows=keys.pop("rows", ROWS), lora={"rank": 4, "alpha": 6, "init": init, **(lora or {})}, strategy=strategy,
        train={"global_batch_size": 2, "max_steps": steps, "learning_rate": 5e-3, **keys.pop("train", {})},
        checkpoint={
            "save_strategy": "steps", "save_steps": 2, "save_total_limit": None, "resume": resume, **keys.pop("checkpoint", {}),
        },
        export=list(export), output=str(path / output), **keys,
    )  # fmt: skip


def plain_loss(base, adapter=None):
    net = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    net = PeftModel.from_pretrained(net, adapter) if adapter else net
    total = count = 0
    for row in ROWS:
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            total += float(net.eval()(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    return total / count


@pytest.mark.parametrize("init", INITS)
def test_a_run_starts_at_the_base_and_exports_for_it(tmp_path, init):
    output = train(made(tmp_path, "out", init, lora={"use_rslora": True}, train={"global_batch_size": 6}))
    base = model_folder(tmp_path)
    assert losses(output)[0] == pytest.approx(plain_loss(base), rel=1e-5)
    report = json.loads((output / "export_report.json").read_text())
    assert {name: part["verdict"] for name, part in report.items()} == {"adapter": "verified", "merged": "verified"}
    assert report["adapter"]["differences"]["max_abs"] < 1e-5
    now = plain_loss(base, output / "adapter")
    assert now == pytest.approx(plain_loss(output / "merged"), rel=1e-5) and abs(now - plain_loss(base)) > 0.01
    assert now == pytest.approx(plain_loss(base, output / "checkpoints" / "step-000004" / "adapter"), rel=1e-7)
    assert load_file(output / "adapter" / "adapter_model.safetensors")[
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    ].shape == (8, 32)
    # Any of the folders can be used, and trained on.
    again = train(
        recipe(
            tmp_path, rows=ROWS, model={"adapter": str(output / "adapter")}, output=str(tmp_path / "more"),
            train={"global_batch_size": 6, "max_steps": 1},
        )
    )  # fmt: skip
    assert losses(again)[0] == pytest.approx(now, rel=1e-5)


@pytest.mark.parametrize("init", ONE)
def test_a_later_export_is_the_one_at_the_end(tmp_path, init, monkeypatch):
    output = train(made(tmp_path, "out", init, checkpoint={"save_only_model": True}))
    # Another machine may decompose a little differently; what counts is what the run started from.
    monkeypatch.setattr(decompose, "METHODS", {})
    for name in ("adapter", "merged"):
        same(tensors(api.export(output, format=name, output=tmp_path / "later", device="cpu")), tensors(output / name), 0)


@pytest.mark.parametrize("strategy", ["none", "fsdp"])
@pytest.mark.parametrize("init", ONE)
def test_resumed_equals_uninterrupted(tmp_path, init, strategy, monkeypatch):
    train(made(tmp_path, "whole", init, strategy=strategy, steps=6))
    train(made(tmp_path, "parts", init, strategy=strategy, steps=2, export=()))
    monkeypatch.setattr(decompose, "METHODS", {})
    train(made(tmp_path, "parts", init, strategy=strategy, steps=6, resume="auto"))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole") and len(losses(tmp_path / "whole")) == 6
    whole, parts = (Saved(tmp_path / name / "checkpoints" / "step-000006") for name in ("whole", "parts"))
    for group in ("trainable", "optimizer", "initial"):
        assert whole.names(group) == parts.names(group) != []
        assert all(torch.equal(whole.rows(group, n), parts.rows(group, n)) for n in whole.names(group))
    for name in ("adapter", "merged"):
        same(tensors(tmp_path / "parts" / name), tensors(tmp_path / "whole" / name), 0)


@pytest.mark.parametrize(
    ("sizes", "init"),
    [
        ((2, 1), "pissa"),
        *(pytest.param(s, i, marks=pytest.mark.slow) for s, i in (((2, 1), "olora"), ((1, 2), "pissa"), ((2, 4), "pissa"))),
    ],
    ids=str,
)
def test_another_number_of_ranks_goes_on(tmp_path, sizes, init):
    train(made(tmp_path, "whole", init, steps=6))
    for size, steps, resume in zip(sizes, (2, 6), (None, "auto"), strict=True):
        loaded = made(
            tmp_path, "parts", init, strategy="none" if size == 1 else "fsdp", steps=steps, resume=resume,
            export=("adapter", "merged") if resume else (),
        )  # fmt: skip
        train(loaded) if size == 1 else run_ranks(size, train, loaded)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    whole, parts = (Saved(tmp_path / name / "checkpoints" / "step-000006") for name in ("whole", "parts"))
    assert set(whole.names("initial")) == set(parts.names("initial")) != set()
    assert all(torch.equal(whole.rows("initial", n), parts.rows("initial", n)) for n in whole.names("initial"))
    for name in ("adapter", "merged"):
        same(tensors(tmp_path / "parts" / name), tensors(tmp_path / "whole" / name), 1e-4)


def test_a_checkpoint_that_forgot_the_start_is_refused(tmp_path):
    output = train(made(tmp_path, "out", steps=2, export=()))
    folder = output / "checkpoints" / "step-000002"
    kept = load_file(folder / "initial.safetensors")
    kept.pop("base_model.model.model.layers.1.mlp.up_proj.lora_B.weight")
    save_file(kept, folder / "initial.safetensors")
    sizes = json.loads((folder / MARKER).read_text()) | {"initial.safetensors": (folder / "initial.safetensors").stat().st_size}
    (folder / MARKER).write_text(json.dumps(sizes))
    with pytest.raises(ModelError, match=r"does not say what .*layers\.1\.mlp\.up_proj\.lora_B\.weight started as"):
        train(made(tmp_path, "out", resume="auto"))


def test_the_start_is_fixed_on_resume(tmp_path):
    train(made(tmp_path, "out", "default", steps=2, export=()))
    assert not (tmp_path / "out" / "checkpoints" / "step-000002" / "initial.safetensors").exists()
    with pytest.raises(RecipeError, match="lora.init"):
        train(made(tmp_path, "out", "pissa", resume="auto"))


@pytest.mark.parametrize("strategy", ["none", "fsdp"])
@pytest.mark.parametrize("init", ONE)
def test_the_reference_of_preferences_is_the_base(tmp_path, init, strategy):
    """And not what is left of it without the adapters."""
    found = {}
    for name in ("default", init):
        train_keys = {"objective": "dpo", "global_batch_size": 5, "per_device_train_batch_size": 2}
        run = Run(
            make_plan(made(tmp_path, name, name, rows=PAIRS, strategy=strategy, train=train_keys, export=())), Console(quiet=True)
        )
        reference.keep(run)
        batch = run.plan.loader.group(0)[0].tensors
        found[name] = batch.get("reference", run.objective.reference(run.root, batch))
        assert run.objective.keeps_reference is (name == init)
        leave()
    torch.testing.assert_close(found[init], found["default"], rtol=1e-5, atol=1e-4)
    done = train(made(tmp_path, "run", init, rows=PAIRS, strategy=strategy, train=train_keys, export=()))
    assert losses(done)[0] == pytest.approx(0.693147, abs=1e-4) and losses(done)[-1] < 0.69
    shutil.rmtree(done / "checkpoints" / "step-000004")
    again = train(made(tmp_path, "run", init, rows=PAIRS, strategy=strategy, train=train_keys, export=(), resume="auto"))
    assert losses(again)[-1] == losses(done)[-1]


def test_streamed_preferences_have_no_reference(tmp_path):
    keys = {"objective": "dpo"}
    with pytest.raises(RecipeError, match=r"data.streaming: .* lora.init: default"):
        make_plan(made(tmp_path, "out", rows=PAIRS, data={"streaming": True}, train=keys, export=()))


def test_what_vllm_needs_is_twice_the_rank(tmp_path):
    output = train(made(tmp_path, "out", steps=1, lora={"rank": 12}, export=("adapter",)))
    report = json.loads((output / "export_report.json").read_text())
    assert "vLLM needs --max-lora-rank 24 or above" in report["adapter"]["notes"]
