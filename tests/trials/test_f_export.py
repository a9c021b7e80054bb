"""Trials of kind F that end in an export: tied weights, experts, and what an adapter folder holds."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from tests.training import model_folder
from tests.trials.exporting import BOTH, logits, reload, run

QV = {"rank": 4, "alpha": 16, "target_modules": ["q_proj", "v_proj"]}


@pytest.mark.parametrize(
    "lora",
    [{"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}, {"target_modules": ["q_proj", "lm_head"]}],
)
def test_F01_a_tied_model_reloads_as_trained(lora, tmp_path, monkeypatch, capsys):
    train = {"max_steps": 5, "learning_rate": 0.01}
    done = run(tmp_path, monkeypatch, capsys, kind="LLAMA_TIED", lora={"rank": 4, "alpha": 16, **lora}, train=train, export=BOTH)
    loaded = reload(done.output / "merged")
    torch.testing.assert_close(logits(loaded), done.logits(), atol=1e-4, rtol=0)
    tensors = load_file(done.output / "merged" / "model.safetensors")
    if "lm_head.weight" in tensors:
        assert not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert loaded.config.tie_word_embeddings is ("lm_head.weight" not in tensors)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "k_proj", "v_proj", "o_proj"]])
def test_F02_experts_keep_their_names_in_files(targets, tmp_path, monkeypatch, capsys):
    lora = {"rank": 4, "alpha": 16, "target_modules": targets}
    done = run(tmp_path, monkeypatch, capsys, kind="MIXTRAL", lora=lora, train={"max_steps": 2}, export=BOTH)
    before, after = (load_file(f / "model.safetensors") for f in (model_folder(tmp_path, "MIXTRAL"), done.output / "merged"))
    assert before.keys() == after.keys()
    experts = [n for n in after if re.search(r"block_sparse_moe\.experts\.\d\.w[123]\.weight", n)]
    assert len(experts) == 2 * 4 * 3
    assert all(torch.equal(before[n], after[n]) for n in experts)  # left out of all-linear, which the coverage says
    assert any(not torch.equal(before[n], after[n]) for n in after if "q_proj" in n)
    torch.testing.assert_close(logits(reload(done.output / "merged")), done.logits(), atol=1e-4, rtol=0)


def test_F02_experts_trained_in_full_come_back(tmp_path, monkeypatch, capsys):
    done = run(tmp_path, monkeypatch, capsys, kind="MIXTRAL", train={"max_steps": 2}, export=["merged"])
    before, after = (load_file(f / "model.safetensors") for f in (model_folder(tmp_path, "MIXTRAL"), done.output / "merged"))
    assert before.keys() == after.keys()
    assert not torch.equal(
        before["model.layers.0.block_sparse_moe.experts.0.w1.weight"],
        after["model.layers.0.block_sparse_moe.experts.0.w1.weight"],
    )
    torch.testing.assert_close(logits(reload(done.output / "merged")), done.logits(), atol=1e-4, rtol=0)


def test_F05_an_adapter_folder_holds_lora_tensors_only(tmp_path, monkeypatch, capsys):
    done = run(tmp_path, monkeypatch, capsys, lora=QV, train={"max_steps": 1}, export=["adapter"])
    keys = load_file(done.output / "adapter" / "adapter_model.safetensors").keys()
    assert len(keys) == 2 * 2 * 2
    assert all(re.fullmatch(r"base_model\.model\.model\.layers\.\d\.self_attn\.[qv]_proj\.lora_[AB]\.weight", k) for k in keys)
    config = json.loads((done.output / "adapter" / "adapter_config.json").read_text())
    meant = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "bias": "none", "modules_to_save": None}
    assert {k: config[k] for k in meant} == meant
    assert config["target_modules"] == ["q_proj", "v_proj"]
    assert "modules_to_save" not in done.printed


def test_F05_full_modules_in_an_adapter_are_warned_about(tmp_path, monkeypatch, capsys):
    lora = {**QV, "modules_to_save": ["lm_head"]}
    done = run(tmp_path, monkeypatch, capsys, lora=lora, train={"max_steps": 1}, export=["adapter"])
    assert re.search(r"vLLM refuses modules_to_save \(lm_head\).*merged", done.printed)
