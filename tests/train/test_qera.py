"""`lora.init: qera`: the paper's formula, the same start on every layout, nearer to the plain model; runs that go on from it."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from swiftlite import api
from swiftlite.dist.tensors import whole
from swiftlite.dist.world import leave
from swiftlite.models import qera
from swiftlite.models.adapter_files import slots
from swiftlite.recipe.errors import ModelError, RecipeError
from tests.ranks import run_ranks
from tests.train.test_dpo import ROWS as PAIRS
from tests.train.test_quantize import DOUBLE, FP8, NF4, SIZES, made, started
from tests.training import LORA, losses, model_folder, train

QERA = {**LORA, "init": "qera"}


@pytest.fixture(autouse=True)
def no_group_left():
    yield
    leave()


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("out", "inner"), [(24, 40), (40, 24), (32, 32)])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_the_update_is_that_of_the_paper(out, inner, scale):
    error, x, rank = numbers(out, inner), numbers(200, inner, seed=1) @ numbers(inner, inner, seed=2), 4
    a, b, share = qera.closest(error, x, torch.zeros(rank, inner), scale)
    values, vectors = torch.linalg.eigh(x.double().T @ x.double())
    root, inverse = ((vectors * values**power) @ vectors.T for power in (0.5, -0.5))
    u, s, v = torch.linalg.svd(error.double() @ root)
    expected = (u[:, :rank] * s[:rank]) @ v[:rank] @ inverse
    assert ((scale * b @ a).double() - expected).norm() < 0.01 * expected.norm()
    made_of_inputs = (error - scale * b @ a) @ x.T
    assert float(share) == pytest.approx(1 - float(made_of_inputs.square().sum() / (error @ x.T).square().sum()), abs=1e-5)
    assert float(share) >= 0.9999 * float(s[:rank].square().sum() / s.square().sum())
    torch.testing.assert_close(
        b.norm(dim=0), scale**-0.5 * (u[:, :rank].T @ error.double()).norm(dim=1).sqrt().float(), rtol=0.05, atol=0
    )


@pytest.mark.parametrize(("error", "inputs", "found"), [(0.0, 9, 0), (1.0, 0, 0), (1.0, 2, 2), (1.0, 9, 4)])
def test_what_nothing_is_found_for_stays_an_adapter_that_can_learn(error, inputs, found):
    a = numbers(4, 16)
    new, b, share = qera.closest(error * numbers(8, 16, seed=1), numbers(inputs, 16, seed=2), a, 2.0)
    assert torch.equal(new[found:], a[found:]) and not b[:, found:].any()
    assert (b[:, :found] != 0).all() and new.isfinite().all() and 0 <= float(share) <= 1 + 1e-6
    assert (float(share) > 0.1) == (found > 0)


def test_rows_are_from_everywhere_and_not_too_long():
    samples = [SimpleNamespace(input_ids=[i] * (5000 if i == 25 else 3)) for i in range(100)]
    rows = qera.sample(samples)
    assert [row[0] for row in rows] == [i * 100 // 32 for i in range(32)] and {len(row) for row in rows} == {3, 1024}
    assert [row[0] for row in qera.sample(samples[:5])] == [0, 1, 2, 3, 4]


def test_inputs_are_those_of_the_layers_spread_over_a_pass():
    first, second, unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    layers = [qera.Layer(name, None, None, module) for name, module in (("a", first), ("b", second), ("c", unused))]
    x, y = numbers(1, 10, 4), numbers(1, 3, 4)
    with qera._inputs_of(layers, 4) as found:
        for batch in (x, y):
            first(batch), second(batch)
    second(numbers(1, 5, 4))
    assert [t.tolist() for t in found[id(first)]] == [x[0, ::3].tolist(), y[0].tolist()]
    assert all(mine is shared for mine, shared in zip(found[id(first)], found[id(second)], strict=True))
    assert found[id(unused)] == []


def start_of(loaded) -> dict:
    """What the adapters of a new run are, and its hidden states."""
    run = started(loaded)
    factors = {key: whole(slot.tensor).float().cpu().clone() for key, slot in slots(run.root).items()}
    sharded, training = any(isinstance(slot.tensor, DTensor) for slot in slots(run.root).values()), run.root.training
    run.root.eval()
    with torch.no_grad():
        hidden = run.root.last_hidden({"input_ids": torch.tensor([run.plan.train.samples[3].input_ids])})
    return {"factors": factors, "hidden": hidden, "notes": run.built.notes, "sharded": sharded, "training": training}


def distance(found, other) -> float:
    return float((found["hidden"] - other["hidden"]).norm() / other["hidden"].norm())


@pytest.mark.parametrize("quantize", [NF4, DOUBLE, FP8], ids=str)
@pytest.mark.parametrize("kind", ["LLAMA", "QWEN3_MOE", "GEMMA3"])
def test_the_start_is_nearer_to_the_plain_model(tmp_path, kind, quantize):
    found = {}
    for name, how, lora in (("plain", None, LORA), ("packed", quantize, LORA), ("qera", quantize, QERA)):
        found[name] = start_of(made(tmp_path, how, kind=kind, lora={**lora, "rank": 32, "dropout": 0.5}))
        leave()
    assert distance(found["qera"], found["plain"]) < 0.75 * distance(found["packed"], found["plain"])
    changed = [
        key for key, factor in found["qera"]["factors"].items() if not torch.equal(factor, found["packed"]["factors"][key])
    ]
    assert len(changed) > 4 and found["qera"]["training"]
    (note,) = [n for n in found["qera"]["notes"] if "qera" in n]
    assert f"the adapters of {len(changed) // 2} packed weights start by giving back" in note and "9 rows" in note


def test_what_is_not_packed_starts_as_ever(tmp_path):
    skipped = {"method": "nf4", "skip": ["lm_head", "*layers.0*"]}
    found = [start_of(made(tmp_path, skipped, lora=lora)) for lora in (LORA, QERA)]
    same = {key for key in found[0]["factors"] if torch.equal(found[0]["factors"][key], found[1]["factors"][key])}
    assert same == {key for key in found[0]["factors"] if ".layers.0." in key}


@pytest.mark.parametrize(
    "keys",
    [
        {"train": {"gradient_checkpointing": "full", "activation_offload": True}},
        {"train": {"gradient_checkpointing": "selective", "torch_compile": True}},
        {"data": {"packing": True, "max_length": 64}, "train": {"global_batch_size": 2, "per_device_train_batch_size": 2}},
        {"data": {"streaming": True}, "train": {"max_steps": 3}},
    ],
    ids=str,
)
def test_how_blocks_and_rows_are_run_changes_nothing(tmp_path, keys):
    expected = start_of(made(tmp_path, NF4, lora=QERA))["factors"]
    leave()
    found = start_of(made(tmp_path, NF4, lora=QERA, **keys))["factors"]
    for key, factor in expected.items():
        torch.testing.assert_close(found[key], factor, rtol=0, atol=1e-5 * float(factor.abs().max()))


LAYOUTS = [
    (2, "fsdp", {}),
    (2, "ddp", {}),
    (2, "zero3", {"offload": "params"}),
    pytest.param(4, "fsdp", {}, marks=pytest.mark.slow),
    pytest.param(4, "hsdp", {"shard": 2}, marks=pytest.mark.slow),
    pytest.param(2, "zero2", {"offload": "optimizer"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("size", "strategy", "keys"), LAYOUTS)
def test_all_ranks_start_as_one_process_does(tmp_path, size, strategy, keys):
    kind = "QWEN3_MOE" if strategy == "zero3" else "LLAMA"
    alone = start_of(made(tmp_path, DOUBLE, kind=kind, lora=QERA))
    leave()
    for found in run_ranks(size, start_of, made(tmp_path, DOUBLE, {"name": strategy, **keys}, kind, lora=QERA)):
        assert found["sharded"] and found["factors"].keys() == alone["factors"].keys()
        for key, factor in alone["factors"].items():
            torch.testing.assert_close(found["factors"][key], factor, rtol=0, atol=1e-5 * float(factor.abs().max()))
        torch.testing.assert_close(found["hidden"], alone["hidden"], rtol=0, atol=1e-5)


def run_of(tmp_path, output, steps=4, **keys):
    given = {"max_steps": steps, "global_batch_size": 5, "per_device_train_batch_size": 5, **keys.pop("train", {})}
    rhythm = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": None, **keys.pop("checkpoint", {})}
    return train(made(tmp_path, DOUBLE, lora=QERA, train=given, checkpoint=rhythm, output=str(tmp_path / output), **keys))


def test_a_resumed_run_goes_on_and_exports_what_it_trained(tmp_path, monkeypatch):
    export = ["adapter", "merged"]
    done = run_of(tmp_path, "whole", export=export)
    shutil.copytree(done, tmp_path / "cut")
    for name in ("checkpoints/step-000004", *export):
        shutil.rmtree(tmp_path / "cut" / name)
    monkeypatch.setattr(qera, "closest", lambda *_: pytest.fail("the checkpoint holds the adapters"))
    again = run_of(tmp_path, "cut", export=export, checkpoint={"resume": "auto"})
    assert losses(again) == losses(done)
    files = [output / "adapter" / "adapter_model.safetensors" for output in (done, again)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert json.loads((done / "adapter" / "adapter_config.json").read_text())["init_lora_weights"] is True
    report = json.loads((done / "export_report.json").read_text())
    assert report["merged"]["onto"]["base"] == "dequantised"


def test_preferences_are_compared_with_the_start(tmp_path):
    keys = {"rows": PAIRS, "train": {"objective": "dpo"}}
    done = run_of(tmp_path, "run", **keys)
    assert losses(done)[0] == pytest.approx(0.693147, abs=1e-5) and losses(done)[-1] < 0.69
    shutil.rmtree(done / "checkpoints" / "step-000004")
    again = run_of(tmp_path, "run", checkpoint={"resume": "auto"}, **keys)
    assert losses(again) == losses(done)


@pytest.mark.parametrize(
    ("quantize", "lora", "more", "where", "words"),
    [
        (None, {}, {}, "lora.init", r"'qera' gives back what packing took, and nothing is packed. Add `quantize: nf4`"),
        (NF4, {"use_dora": True}, {}, "lora.use_dora", "DoRA"),
        (NF4, {}, {"model": {"adapter": "elsewhere"}}, "lora.init", "'qera' begins a new adapter"),
    ],
)
def test_what_cannot_be_is_refused_before_weights_are_read(tmp_path, quantize, lora, more, where, words):
    with pytest.raises(RecipeError, match=words) as caught:
        api.check(made(tmp_path, quantize, lora={**QERA, **lora}, **more), quiet=True)
    assert where in str(caught.value)


def test_adapters_beside_plain_weights_alone_are_refused(tmp_path):
    skipped = {"method": "nf4", "skip": ["lm_head", "q_proj"]}
    with pytest.raises(RecipeError, match=r"lora.init: 'qera' gives back .* no adapted weight is packed"):
        started(made(tmp_path, skipped, lora={**QERA, "target_modules": ["q_proj"]}))


def test_a_damaged_weight_is_named(tmp_path):
    file = model_folder(tmp_path, "LLAMA", **SIZES) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.inf
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model.layers.1.mlp.up_proj.weight holds NaN or infinity"):
        started(made(tmp_path, NF4, lora=QERA))
