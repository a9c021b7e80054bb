"""Runs on checkpoints that bitsandbytes packed: training, resume, export and use, without that library."""

import json
import sys

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from swiftlite import api
from swiftlite.dist.world import leave
from swiftlite.export.merged import base_dtypes
from swiftlite.infer.load import load_target
from swiftlite.models.files import ModelFiles
from swiftlite.models.packed import packed_weights
from swiftlite.recipe.errors import ModelError, RecipeError
from swiftlite.train.console import Console
from swiftlite.train.plan import make_plan
from swiftlite.train.run import Run
from tests.bnb import packed_by_hand, saved_by_transformers, tensors_of, unpacked_by_them
from tests.ranks import run_ranks
from tests.training import LORA, losses, model_folder, recipe, token_rows, train

ROWS = token_rows([4, 6, 12, 20, 9, 31, 2, 17])
EXPERTS = {"hidden_size": 64, "moe_intermediate_size": 64}
IDS = torch.tensor([[10, 11, 12, 40, 41, 42, 7]])


@pytest.fixture(autouse=True)
def no_group_left():
    yield
    leave()


@pytest.fixture
def no_bitsandbytes(monkeypatch):
    """To be asked for after the checkpoint is made, by `hide()`."""
    return lambda: monkeypatch.setitem(sys.modules, "bitsandbytes", None)


def made(path, folder, output="out", **sections):
    sections["train"] = {"max_steps": 3, "global_batch_size": 4, **sections.get("train", {})}
    keys = {"model": {"name": str(folder)}, "lora": LORA, "output": str(path / output), **sections}
    return recipe(path, rows=ROWS, **keys)


def adapter(output) -> dict[str, torch.Tensor]:
    return load_file(output / "adapter" / "adapter_model.safetensors")


def test_training_is_that_of_our_own_packing(tmp_path):
    folder = saved_by_transformers(tmp_path)
    ours = train(made(tmp_path, tmp_path / "llama", "ours", quantize="nf4", export=["adapter"]))
    given = train(made(tmp_path, folder, "given", export=["adapter"]))
    assert losses(given) == losses(ours) and len(losses(ours)) == 3
    a, b = adapter(given), adapter(ours)
    # Plain weights lie at other places of the file, and so in memory, on which the order of sums depends.
    assert a.keys() == b.keys() and all((a[n] - b[n]).norm() <= 1e-5 * b[n].norm() for n in b)
    assert "quantize:\n  method: nf4\n" in (given / "recipe.yaml").read_text()
    assert json.loads((given / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)


@pytest.mark.parametrize(
    ("size", "strategy", "double"),
    [
        (2, {"name": "fsdp"}, True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(2, {"name": "ddp"}, False), (2, {"name": "zero2"}, True)]),
        pytest.param(4, {"name": "zero3", "offload": "params"}, True, marks=pytest.mark.slow),
        pytest.param(4, {"name": "hsdp", "shard": 2}, False, marks=pytest.mark.slow),
    ],
)
def test_ranks_learn_what_one_process_does(tmp_path, size, strategy, double):
    plain = model_folder(tmp_path, "QWEN3_MOE", **EXPERTS)
    folder = packed_by_hand(plain, tmp_path / "packed", lambda n: n.endswith("_proj.weight"), double=double)
    alone = train(made(tmp_path, folder, "alone", export=["adapter"]))
    run_ranks(size, train, made(tmp_path, folder, "spread", strategy=strategy, export=["adapter"]))
    spread = tmp_path / "spread"
    assert losses(spread) == pytest.approx(losses(alone), rel=1e-5)
    a, b = adapter(spread), adapter(alone)
    # AdamW turns what is noise in a gradient into whole steps, so not every element is compared.
    assert all((a[n] - b[n]).norm() <= 1e-3 * b[n].norm() for n in b)


def test_a_run_goes_on_bit_for_bit_and_exports_later(tmp_path):
    folder = saved_by_transformers(tmp_path, double=True)
    keys = {"checkpoint": {"save_strategy": "steps", "save_steps": 2}}
    whole = train(made(tmp_path, folder, "whole", export=["adapter"], **keys))
    train(made(tmp_path, folder, "cut", train={"max_steps": 2, "lr_scheduler_type": "constant"}, **keys))
    keys["checkpoint"] |= {"resume": "auto"}
    cut = train(made(tmp_path, folder, "cut", export=["adapter"], **keys))
    assert losses(cut) == losses(whole)
    assert all(torch.equal(t, adapter(whole)[n]) for n, t in adapter(cut).items())
    later = api.export(cut, format="merged", output=tmp_path / "later")
    assert "quantization_config" not in (later / "config.json").read_text()
    with pytest.raises(RecipeError, match=r"export\.onto: the model's files hold packed weights and no original ones"):
        api.export(cut, format="merged", onto="original", output=tmp_path / "never")


def test_exports_are_proven_and_used_without_bitsandbytes(tmp_path, no_bitsandbytes):
    folder = saved_by_transformers(tmp_path, dtype=torch.bfloat16, double=True)
    tensors = tensors_of(folder)
    values = {n: unpacked_by_them(tensors, n) for n in tensors if f"{n}.absmax" in tensors}
    no_bitsandbytes()
    export = {"formats": ["adapter", "merged"], "dtype": "fp32"}
    output = train(made(tmp_path, folder, export=export))
    report = json.loads((output / "export_report.json").read_text())
    assert {part["verdict"] for part in report.values()} == {"verified"}
    assert report["merged"]["onto"] == {"asked": "auto", "base": "dequantised"} | report["merged"]["onto"]
    assert report["merged"]["gaps"]["original"] is None
    assert not any("another name" in note for note in report["merged"]["notes"])
    # The merged folder is the files' own values, and the update.
    a, merged = adapter(output), load_file(output / "merged" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    key = f"base_model.model.{name}.lora_{{}}.weight"
    update = 4 * a[key.format("B")] @ a[key.format("A")]
    torch.testing.assert_close(merged[f"{name}.weight"], values[f"{name}.weight"] + update, atol=1e-6, rtol=0)
    # Use: the base with its adapter gives the same as the merged folder.
    logits = []
    for target in (output / "merged", output / "adapter"):
        opened = load_target(str(target))
        logits.append(opened.model(input_ids=IDS).logits)
        assert [n for n in opened.notes if "beside" in n] == []
    torch.testing.assert_close(*logits, atol=1e-5, rtol=0)
    assert "the 4-bit weights of the model's files are dequantised" in opened.notes
    opened = load_target(str(folder))
    plain = dict(opened.model.named_parameters())
    assert all(torch.equal(plain[n], value) for n, value in values.items())


def test_plain_peft_on_their_own_layers_says_nearly_the_same(tmp_path):
    """The adapter's folder names the packed base, which plain transformers opens with bitsandbytes."""
    folder = saved_by_transformers(tmp_path)
    output = train(made(tmp_path, folder, export=["adapter", "merged"]))
    name = json.loads((output / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    theirs = AutoModelForCausalLM.from_pretrained(name, device_map="cpu")
    assert type(theirs.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    theirs = PeftModel.from_pretrained(theirs, output / "adapter").train()  # in use some CPUs multiply in bf16
    merged = AutoModelForCausalLM.from_pretrained(output / "merged")
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=IDS).logits, merged(input_ids=IDS).logits, atol=2e-5, rtol=0)


def test_types_of_the_files_are_those_before_packing(tmp_path):
    folder = saved_by_transformers(tmp_path, dtype=torch.bfloat16)
    files = ModelFiles(folder, str(folder), None, [folder / "model.safetensors"])

    class Trained:
        pass

    trained = Trained()
    trained.files = files
    found = base_dtypes(trained)
    assert set(found.values()) == {torch.bfloat16}
    assert found.keys() == tensors_of(tmp_path / "llama").keys()


def test_a_layer_in_full_starts_from_its_dequantised_weight(tmp_path):
    folder = saved_by_transformers(tmp_path)
    lora = {**LORA, "target_modules": ["q_proj"], "modules_to_save": ["o_proj"]}
    run = Run(make_plan(made(tmp_path, folder, lora=lora)), Console(quiet=True))
    assert len(packed_weights(run.root)) == 14 - 2
    layer = run.root.get_submodule("model.layers.0.self_attn.o_proj")
    wanted = unpacked_by_them(tensors_of(folder), "model.layers.0.self_attn.o_proj.weight")
    assert torch.equal(layer.modules_to_save["default"].weight, wanted)
    leave()
    output = train(made(tmp_path, folder, lora=lora, export={"formats": ["adapter", "merged"]}))
    report = json.loads((output / "export_report.json").read_text())
    assert {part["verdict"] for part in report.values()} == {"verified"}
    assert report["merged"]["updates"]["unknown"] == 0


def test_a_fault_of_the_files_names_them(tmp_path):
    """What describes a weight is read before anything is built on it."""
    plain = model_folder(tmp_path, hidden_size=64, intermediate_size=128)
    folder = packed_by_hand(plain, tmp_path / "packed", lambda n: "up_proj" in n, block=128)
    with pytest.raises(ModelError, match="up_proj.weight is packed as nf4 in blocks of 128"):
        train(made(tmp_path, folder))
