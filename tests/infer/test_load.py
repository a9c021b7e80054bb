"""What a target's name stands for, and that the model opened is the one meant."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swiftlite.infer.load import load_target
from swiftlite.recipe.errors import ModelError, RecipeError
from tests.fixtures import CHATML, LLAMA3, tok
from tests.infer.making import chat, logits, save_adapter, save_base, save_checkpoint


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


def recipe(run: Path, base: Path, text: str = "data: rows.jsonl\n") -> Path:
    run.mkdir(exist_ok=True)
    (run / "recipe.yaml").write_text(f"model: {base}\n{text}")
    return run


def moved(base: Path, by: float) -> torch.nn.Module:
    """The base after full fine-tuning."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by * torch.ones_like(parameter).cumsum(-1)
    return model


def test_a_model_folder(base: Path):
    target = load_target(str(base))
    theirs = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert torch.equal(logits(target.model), logits(theirs.eval()))
    assert not target.model.training
    assert not any(p.requires_grad for p in target.model.parameters())
    assert target.renderer.prompt(chat("hi")) == tok().apply_chat_template(chat("hi"), add_generation_prompt=True)["input_ids"]
    assert str(base) in target.description


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"use_rslora": True, "target_modules": ["down_proj", "lm_head"]},
        {"use_dora": True},
        {"modules_to_save": ["norm"], "target_modules": ["embed_tokens", "o_proj"]},
    ],
)
def test_an_adapter_gives_the_logits_of_plain_peft(tmp_path: Path, base: Path, lora: dict):
    peft = save_adapter(tmp_path / "a", base, **lora)
    ours = logits(load_target(str(tmp_path / "a")).model)
    torch.testing.assert_close(ours, logits(peft))
    assert not torch.allclose(ours, logits(load_target(str(base)).model), atol=1e-3)


def test_tokens_trained_beside_the_adapter_need_new_rows(tmp_path: Path, base: Path):
    """The tokenizer beside the adapter has a token that the base has no row for."""
    tokenizer = tok()
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    rows = model.get_input_embeddings().weight.shape[0]
    tokenizer.add_tokens([f"<extra{i}>" for i in range(rows - len(tokenizer) + 2)], special_tokens=True)
    assert len(tokenizer) == rows + 2
    grown = tmp_path / "grown"
    model.resize_token_embeddings(rows + 2, mean_resizing=False)
    model.save_pretrained(grown)
    indices = {"embed_tokens": [rows, rows + 1], "lm_head": [rows, rows + 1]}
    peft = save_adapter(tmp_path / "a", grown, names=str(base), trainable_token_indices=indices)
    tokenizer.save_pretrained(tmp_path / "a")
    target = load_target(str(tmp_path / "a"))
    ids = torch.tensor([[69, rows, 70, rows + 1]])
    with torch.no_grad():
        torch.testing.assert_close(target.model(input_ids=ids).logits, peft(input_ids=ids).logits)


def test_the_template_beside_the_adapter_wins(tmp_path: Path):
    plain = save_base(tmp_path / "b", template=LLAMA3)
    save_adapter(tmp_path / "with", plain, template=CHATML)
    save_adapter(tmp_path / "without", plain)
    save_adapter(tmp_path / "only", plain)
    (tmp_path / "only" / "chat_template.jinja").write_text(CHATML)
    prompts = {name: load_target(str(tmp_path / name)).renderer.prompt(chat("hi")) for name in ("with", "without", "only")}
    expected = {"with": CHATML, "without": LLAMA3, "only": CHATML}
    for name, template in expected.items():
        assert prompts[name] == tok(template).apply_chat_template(chat("hi"), add_generation_prompt=True)["input_ids"], name


def test_a_base_that_is_gone(tmp_path: Path, base: Path):
    save_adapter(tmp_path / "a", base, names=str(tmp_path / "gone"))
    with pytest.raises(ModelError) as caught:
        load_target(str(tmp_path / "a"))
    assert "base model" in str(caught.value)
    assert str(tmp_path / "gone") in str(caught.value)
    assert "--base" in str(caught.value.fix)
    given = load_target(str(tmp_path / "a"), base=str(base))
    assert str(base) in given.description
    # In a run the recipe still knows the base.
    run = recipe(tmp_path / "run", base)
    shutil.copytree(tmp_path / "a", run / "adapter")
    assert torch.equal(logits(load_target(str(run)).model), logits(given.model))


def test_an_adapter_without_a_base(tmp_path: Path, base: Path):
    save_adapter(tmp_path / "a", base)
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": None}))
    with pytest.raises(ModelError, match="does not name its base") as caught:
        load_target(str(tmp_path / "a"))
    assert "--base" in str(caught.value)


def test_an_adapter_of_another_model(tmp_path: Path, base: Path):
    other = save_base(tmp_path / "other", num_key_value_heads=4)
    save_adapter(tmp_path / "a", base, names=str(other))
    with pytest.raises(ModelError, match=r"adapter does not fit LlamaForCausalLM.*v_proj"):
        load_target(str(tmp_path / "a"))
    save_adapter(tmp_path / "b", base)
    file = tmp_path / "b" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": ["query_key_value"]}))
    with pytest.raises(ModelError, match="adapter does not fit LlamaForCausalLM"):
        load_target(str(tmp_path / "b"))


def test_a_run_gives_merged_then_adapter_then_its_newest_checkpoint(tmp_path: Path, base: Path):
    run = recipe(tmp_path / "run", base)
    with pytest.raises(ModelError, match="neither an export nor a complete checkpoint"):
        load_target(str(run))
    early, late = save_adapter(tmp_path / "early", base), save_adapter(tmp_path / "late", base, lora_alpha=32)
    save_checkpoint(run, 2, early.base_model.model, tmp_path / "early")
    save_checkpoint(run, 10, late.base_model.model, tmp_path / "late")
    half = save_checkpoint(run, 12, late.base_model.model, tmp_path / "late")
    (half / "COMPLETE").unlink()

    from_checkpoint = load_target(str(run))
    assert "step-000010" in from_checkpoint.description
    torch.testing.assert_close(logits(from_checkpoint.model), logits(late))
    torch.testing.assert_close(logits(load_target(str(run / "checkpoints" / "step-000002")).model), logits(early))
    with pytest.raises(ModelError, match="no COMPLETE marker"):
        load_target(str(half))

    save_adapter(run / "adapter", base, lora_alpha=64)
    from_adapter = load_target(str(run))
    assert f"adapter {run / 'adapter'}" in from_adapter.description
    assert not from_adapter.notes

    moved(base, 0.01).save_pretrained(run / "merged")
    tok().save_pretrained(run / "merged")
    from_merged = load_target(str(run))
    assert f"model {run / 'merged'}" in from_merged.description
    os.utime(run / "checkpoints" / "step-000010" / "COMPLETE", (2e9, 2e9))
    assert any("step-000010 is newer" in note for note in load_target(str(run)).notes)


def test_a_checkpoint_of_full_tuning(tmp_path: Path, base: Path):
    run, trained = recipe(tmp_path / "run", base), moved(base, 0.01)
    folder = save_checkpoint(run, 3, trained)
    torch.testing.assert_close(logits(load_target(str(folder)).model), logits(trained))
    torch.testing.assert_close(logits(load_target(str(run)).model), logits(trained))
    (run / "recipe.yaml").unlink()
    with pytest.raises(ModelError) as caught:
        load_target(str(folder))
    assert "swiftlite export" in str(caught.value.fix)
    with pytest.raises(ModelError, match="has no place in Qwen3ForCausalLM"):
        load_target(str(folder), base=str(save_base(tmp_path / "other", "QWEN3")))


def test_a_run_keeps_its_template_and_config(tmp_path: Path, base: Path):
    template = CHATML.replace("{% for m", "{{ mood }}{% for m")
    text = (
        f"data: {{train: rows.jsonl, chat_template: {json.dumps(template)}, template_kwargs: {{mood: Fine.}}, train_on: last}}\n"
    )
    run = recipe(tmp_path / "run", base, text)
    peft = save_adapter(tmp_path / "a", base)
    folder = save_checkpoint(run, 1, peft.base_model.model, tmp_path / "a")
    for name in (str(run), str(folder), str(folder / "adapter")):
        target = load_target(name)
        assert target.tokenizer.decode(target.renderer.prompt(chat("hi"))).startswith("Fine.<|im_start|>user")
        assert any("template_kwargs" in note for note in target.notes)
        assert target.renderer.train_on == "last"
    recipe(run, base, text.replace("Fine.", "${NOT_SET_ANYWHERE}"))
    assert any("recipe cannot be read" in note for note in load_target(str(folder)).notes)


def test_the_run_s_config_overrides_hold_for_its_adapter(tmp_path: Path, base: Path):
    run = tmp_path / "run"
    save_adapter(run / "adapter", base)
    (run / "recipe.yaml").write_text(f"model: {{name: {base}, config_overrides: {{rms_norm_eps: 0.5}}}}\ndata: rows.jsonl\n")
    target = load_target(str(run))
    assert target.model.config.rms_norm_eps == 0.5
    assert target.model.config.use_cache


def test_a_missing_weight_is_an_error(tmp_path: Path):
    folder = save_base(tmp_path / "b")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"missing, such as model\.layers\.1\.mlp\.up_proj\.weight"):
        load_target(str(folder))


def test_data_types(base: Path, tmp_path: Path):
    small = save_base(tmp_path / "b", dtype=torch.bfloat16)
    assert load_target(str(small)).model.dtype == torch.float32, "a CPU computes in fp32"
    assert load_target(str(small), dtype="bf16").model.dtype == torch.bfloat16
    with pytest.raises(RecipeError, match="Did you mean 'bf16'"):
        load_target(str(base), dtype="bf61")
    with pytest.raises(RecipeError, match="Known: auto, cuda, mps, cpu") as caught:
        load_target(str(base), device="tpu")
    assert caught.value.where == "device"


def test_adapters_take_the_type_of_their_model(tmp_path: Path, base: Path):
    save_adapter(tmp_path / "a", base, modules_to_save=["norm"])
    target = load_target(str(tmp_path / "a"), dtype="bf16")
    assert {p.dtype for p in target.model.parameters()} == {torch.bfloat16}


def test_stop_ids_come_from_settings_template_and_tokenizer(tmp_path: Path):
    folder = save_base(tmp_path / "b")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load_target(str(folder)).stop_ids == {0, 3, 7, 9}
    save_adapter(tmp_path / "a", folder)
    (tmp_path / "a" / "generation_config.json").write_text(json.dumps({"eos_token_id": 11}))
    assert load_target(str(tmp_path / "a")).stop_ids == {0, 3, 7, 9, 11}


def test_no_template_is_said(tmp_path: Path):
    target = load_target(str(save_base(tmp_path / "b", template=None)))
    assert any("no chat template" in note for note in target.notes)
    assert len(target.notes) == len(set(target.notes))
