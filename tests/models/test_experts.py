"""LoRA on routed experts, over tiny models of many families: placed, trained, loaded again and merged by plain peft."""

import json
import warnings

import pytest
import torch
import transformers as tf
from peft import PeftModel
from peft.utils import get_peft_model_state_dict

from swiftlite.models import adapters
from swiftlite.models.experts import expert_parameters, wrappers
from swiftlite.models.families.lookup import auto_class, family_for
from swiftlite.recipe.errors import ModelError, RecipeError
from swiftlite.recipe.schema import LoraSection
from tests.models.test_families import HEAD8, MOE, ids, make

FUSED = ["qwen2_moe", "qwen3_moe", "qwen3_next", "mixtral", "gpt_oss", "granitemoe", "jamba"]


def attached(name, **lora):
    model, _, family = make(name)
    section = LoraSection(**{"rank": 4, "experts": True, **lora})
    targets, fused = adapters.lora_targets(model, section, family), expert_parameters(model, section, family)
    config = adapters.peft_config(model, section, targets, "base", parameters=fused)
    peft = adapters.inject(model, config, [*targets, *wrappers(fused)])
    adapters.init_adapters(peft, section, seed=0, device="cpu")
    return peft, model, family, targets, fused


@pytest.mark.parametrize("name", FUSED)
def test_experts_learn_and_plain_peft_reloads_and_merges_them(name, tmp_path):
    peft, model, family, targets, fused = attached(name)
    assert len(fused) == (2 if name == "jamba" else 4) and {f.rpartition(".")[2] for f in fused} == {"gate_up_proj", "down_proj"}
    x = ids(rows=4)
    inputs = family.inputs({"input_ids": x}) | {"labels": x, "use_cache": False}
    bare, _, _ = make(name)
    loss = model(**inputs).loss
    torch.testing.assert_close(loss, bare(**inputs).loss)  # B is zero: nothing has changed yet
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * (len(targets) + len(fused)) and all("lora_" in n for n in trained)
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    model.train()
    for _ in range(3):
        model(**inputs).loss.backward()
        optimizer.step()
        reached = {n for n, p in trained.items() if p.grad.abs().max() > 0}
        optimizer.zero_grad()
    assert reached == set(trained)
    model.eval()
    with torch.no_grad():
        after = model(**inputs)
    assert after.loss < loss

    bare.save_pretrained(tmp_path / "base")
    adapters.save_adapter(peft, tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_parameters"] == [
        "experts.down_proj",
        "experts.gate_up_proj",
    ]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", RuntimeWarning)
        plain = auto_class(bare.config).from_pretrained(
            tmp_path / "base", dtype=torch.float32, attn_implementation=model.config._attn_implementation
        )
        loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
        torch.testing.assert_close(loaded(**inputs).logits, after.logits, rtol=0, atol=1e-6)
        merged = loaded.merge_and_unload()
        torch.testing.assert_close(merged(**inputs).logits, after.logits, rtol=1e-4, atol=1e-4)
    ours, theirs = adapters.adapter_state(peft), get_peft_model_state_dict(peft, save_embedding_layers=False)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)

    # And by our own road, as chat and a continued run take it.
    config, _ = adapters.read_adapter_config(tmp_path / "adapter")
    adapters.agree(LoraSection(rank=4, experts=True), config, bare, family, tmp_path)
    with pytest.raises(RecipeError, match=r"lora\.experts: False contradicts the adapter"):
        adapters.agree(LoraSection(experts=False), config, bare, family, tmp_path)
    again = adapters.inject(bare, config)
    adapters.load_adapter_weights(again, tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(bare(**inputs).logits, after.logits, rtol=0, atol=1e-6)


def test_first_values_are_those_of_peft():
    """Uniform within 1 / sqrt(in), or normal with deviation 1 / rank, whatever the number of experts."""
    for init, spread in (("default", 1 / (3 * 32) ** 0.5), ("gaussian", 1 / 4)):
        _, model, *_ = attached("mixtral", init=init)
        a = torch.cat([p.flatten() for n, p in model.named_parameters() if "experts.base_layer.lora_A" in n])
        assert a.detach().std().item() == pytest.approx(spread, rel=0.1)


def test_excluded_experts_are_left_out():
    *_, fused = attached("mixtral", exclude_modules=["layers.0.mlp.experts"])
    assert {f.split(".")[2] for f in fused} == {"1"}


@pytest.mark.parametrize("change", [{"dropout": 0.1}, {"use_dora": True}], ids=str)
def test_what_they_cannot_do_is_refused_by_key(change):
    with pytest.raises(RecipeError, match=rf"lora\.{next(iter(change))}: adapters on fused experts"):
        attached("mixtral", **change)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_dense_model_has_none(name):
    with pytest.raises(RecipeError, match=r"lora\.experts: .*has no routed experts"):
        attached(name)


def test_the_adapter_of_another_model_does_not_fit(tmp_path):
    adapters.save_adapter(attached("mixtral")[0], tmp_path)
    config, _ = adapters.read_adapter_config(tmp_path)
    dense, _, _ = make("llama")
    peft = adapters.inject(dense, config)
    with pytest.raises(ModelError, match=r"tensors have no place, such as .*experts"):
        adapters.load_adapter_weights(peft, tmp_path)


@pytest.mark.skipif(not hasattr(tf, "LagunaConfig"), reason="a newer model class")
def test_layers_whose_adapters_peft_would_lose_are_left_out():
    """In Laguna a rule for old checkpoints renames the shared experts' keys, those of adapters too."""
    torch.manual_seed(0)
    config = tf.LagunaConfig(
        **HEAD8, **MOE, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        layer_types=["full_attention"] * 2, mlp_layer_types=["sparse"] * 2,
    )  # fmt: skip
    model, family = auto_class(config).from_config(config), family_for(config)
    found = adapters.lora_targets(model, LoraSection(), family)
    shared = [n for n, _ in model.named_modules() if n.endswith("shared_experts.up_proj")]
    assert found and len(shared) == 2 and not any("shared_experts" in n for n in found)
    section = LoraSection(target_modules=["shared_experts.up_proj"])
    with pytest.raises(RecipeError, match=r"lora\.target_modules: peft would look for the adapter on .* lose it"):
        adapters.inject(model, adapters.peft_config(model, section, shared, "base"), shared)
