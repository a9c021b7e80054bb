"""Trials of kind F: targets, adapter files, tied weights. What needs a whole run (merging, chat) is tried where those live."""

import json
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from swiftlite.models import adapters
from swiftlite.models.families.lookup import family_for
from swiftlite.recipe.errors import ModelError, RecipeError
from swiftlite.recipe.schema import LoraSection
from tests.fixtures import model

IDS = torch.arange(10, 20)[None]


def logits(net):
    with torch.no_grad():
        return net(input_ids=IDS, use_cache=False).logits


def attach(net, **lora):
    section = LoraSection(**{"rank": 4, "alpha": 16} | lora)
    targets = adapters.lora_targets(net, section, family_for(net.config))
    peft = adapters.inject(net, adapters.peft_config(net, section, targets, "base"), targets)
    adapters.init_adapters(peft, section, 0, "cpu")
    return peft


def stirred(net, **lora):
    """An adapter whose B matrices are not zero."""
    peft = attach(net, **lora)
    torch.manual_seed(3)
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return peft


def test_F01_a_tied_weight_is_trained_as_one(tmp_path: Path):
    net = model("LLAMA_TIED")
    peft = attach(net, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    optimizer = torch.optim.AdamW([p for p in peft.parameters() if p.requires_grad], lr=0.01)
    before = logits(peft)
    for _ in range(5):
        peft(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = logits(peft)
    assert (trained - before).abs().max() > 0.1
    state = adapters.adapter_state(peft)
    assert torch.equal(state["base_model.model.lm_head.weight"], state["base_model.model.model.embed_tokens.weight"])
    adapters.save_adapter(peft, tmp_path)
    merged = PeftModel.from_pretrained(model("LLAMA_TIED"), tmp_path).merge_and_unload()
    assert merged.config.tie_word_embeddings
    assert merged.lm_head.weight.data_ptr() == merged.model.embed_tokens.weight.data_ptr()
    torch.testing.assert_close(logits(merged), trained, rtol=0, atol=1e-4)


@pytest.mark.parametrize("target", ["gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3", "gate"])
def test_F02_a_target_that_reaches_nothing_is_an_error(target: str):
    with pytest.raises(RecipeError, match=f"lora.target_modules: '{target}'"):
        attach(model("MIXTRAL"), target_modules=["q_proj", target])


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "k_proj", "v_proj", "o_proj"]])
def test_F02_experts_are_left_out_and_listed(targets):
    net = model("MIXTRAL")
    family = family_for(net.config)
    peft = attach(net, target_modules=targets)
    trained = [n for n, p in net.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 4
    assert all("self_attn" in n for n in trained)
    report = adapters.coverage(net, family)
    text = "\n".join(report.lines())
    assert f"trainable {report.trainable:,} of" in text
    assert re.search(r"experts: 2 x MixtralExperts \([\d,]+\)", text)
    assert re.search(r"router: 2 x Mixtral\w*Router \([\d,]+\)", text)
    experts = {n: p.clone() for n, p in net.named_parameters() if "experts" in n}
    optimizer = torch.optim.AdamW([p for p in peft.parameters() if p.requires_grad], lr=0.01)
    for _ in range(2):
        peft(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step()
    assert experts
    assert all(torch.equal(p, dict(net.named_parameters())[n]) for n, p in experts.items())


def rename(key: str) -> str:
    return key.replace("model.layers", "model.language_model.layers")


BAD = {
    "other prefix": lambda t: {rename(k): v for k, v in t.items()},
    "half missing": lambda t: dict(list(t.items())[::2]),
    "other rank": lambda t: t | {k: torch.zeros(8, v.shape[1]) for k, v in list(t.items())[:1]},
    "one too many": lambda t: t | {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 32)},
}


def test_F04_a_good_adapter_changes_the_answer(tmp_path: Path):
    peft = stirred(model())
    adapters.save_adapter(peft, tmp_path)
    again = attach(model())
    adapters.load_adapter_weights(again, tmp_path)
    assert (logits(again) - logits(model())).abs().max() > 1e-2
    assert torch.equal(logits(again), logits(peft))


@pytest.mark.parametrize("name", BAD)
def test_F04_an_adapter_that_does_not_line_up_is_refused(name: str, tmp_path: Path):
    peft = stirred(model())
    adapters.save_adapter(peft, tmp_path)
    good = load_file(tmp_path / "adapter_model.safetensors")
    save_file(BAD[name](good), tmp_path / "adapter_model.safetensors")
    again = attach(model())
    before = adapters.adapter_state(again)
    with pytest.raises(ModelError) as caught:
        adapters.load_adapter_weights(again, tmp_path)
    assert caught.value.exit_code == 4
    assert "adapter" in caught.value.what
    named = re.findall(r"base_model\.[\w.]+\w", caught.value.what)
    assert set(named) <= good.keys() | BAD[name](good).keys()
    assert any(k not in BAD[name](good) or k not in good or BAD[name](good)[k].shape != good[k].shape for k in named)
    after = adapters.adapter_state(again)
    assert all(torch.equal(before[k], after[k]) for k in before)  # nothing was applied by halves


def test_F05_only_lora_tensors_are_written(tmp_path: Path):
    adapters.save_adapter(stirred(model(), target_modules=["q_proj", "v_proj"]), tmp_path)
    keys = load_file(tmp_path / "adapter_model.safetensors").keys()
    assert len(keys) == 2 * 2 * 2
    for key in keys:
        assert re.fullmatch(r"base_model\.model\..*\.lora_(A|B)\.weight", key)
        assert not any(part in key for part in ("base_layer", "embed_tokens", "lm_head"))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    expected = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "peft_type": "LORA", "bias": "none"}
    assert {k: config[k] for k in expected} == expected
    assert config["modules_to_save"] is None


def test_F05_a_module_trained_in_full_is_the_only_other_one(tmp_path: Path):
    adapters.save_adapter(stirred(model(), target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]), tmp_path)
    others = [k for k in load_file(tmp_path / "adapter_model.safetensors") if ".lora_" not in k]
    assert others == ["base_model.model.lm_head.weight"]
    assert json.loads((tmp_path / "adapter_config.json").read_text())["modules_to_save"] == ["lm_head"]


def test_F08_keys_of_newer_versions(tmp_path: Path):
    adapters.save_adapter(stirred(model()), tmp_path / "good")
    for name, value in {"quiet": None, "off": False, "loud": {"on": True}}.items():
        shutil.copytree(tmp_path / "good", tmp_path / name)
        path = tmp_path / name / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"new_thing": value}))
    expected, notes = adapters.read_adapter_config(tmp_path / "good")
    assert notes == []
    for name in ("quiet", "off"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            config, notes = adapters.read_adapter_config(tmp_path / name)
        assert config == expected
        assert len(notes) == 1
        assert "'new_thing'" in notes[0]
    with pytest.raises(ModelError, match="'new_thing'"):
        adapters.read_adapter_config(tmp_path / "loud")
