"""Both formats over model families and kinds of training: reopened by plain transformers and peft, equal to the trained model."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from swiftlite.export.reload import logits_of
from swiftlite.export.run import export_all
from swiftlite.recipe.errors import RecipeError
from swiftlite.recipe.schema import ExportSection
from tests.export.making import ROWS, save_base, train

ATTENTION = ["q_proj", "v_proj"]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    "llama": ("LLAMA", {"target_modules": ALL}),
    "llama tied": ("LLAMA_TIED", {"target_modules": ALL}),
    "rslora": ("LLAMA", {"target_modules": ATTENTION, "use_rslora": True}),
    "dora": ("LLAMA", {"target_modules": ALL, "use_dora": True}),
    "dora tied embedding": ("LLAMA_TIED", {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True}),
    "rank pattern": ("LLAMA", {"target_modules": ATTENTION, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}}),
    "gpt2 bias": ("GPT2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "lora_bias": True}),
    "modules to save": ("LLAMA", {"target_modules": ATTENTION, "modules_to_save": ["lm_head", "norm"]}),
    "modules to save tied": ("LLAMA_TIED", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    "head of a tied model": ("LLAMA_TIED", {"target_modules": ["q_proj", "lm_head"]}),
    "tokens": ("LLAMA", {"target_modules": ATTENTION, "trainable_token_indices": [10, 11]}),
    "tokens tied": ("LLAMA_TIED", {"target_modules": ATTENTION, "trainable_token_indices": [10, 11]}),
    "qwen3": ("QWEN3", {"target_modules": ALL}),
    "gemma3": ("GEMMA3", {"target_modules": ALL}),
    "gemma3 vision": ("GEMMA3_VISION", {"target_modules": r".*language_model.*\.(q_proj|v_proj)"}),
    "gpt2": ("GPT2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "gpt2 dora": ("GPT2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
    "mixtral": ("MIXTRAL", {"target_modules": ATTENTION}),
    "mixtral experts": (
        "MIXTRAL",
        {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
    "qwen3 moe": ("QWEN3_MOE", {"target_modules": ATTENTION}),
    "full llama": ("LLAMA", None),
    "full llama tied": ("LLAMA_TIED", None),
    "full gemma3": ("GEMMA3", None),
    "full gemma3 vision": ("GEMMA3_VISION", None),
    "full mixtral": ("MIXTRAL", None),
    "full gpt2": ("GPT2", None),
}


QUICK = {"llama", "dora", "modules to save tied", "head of a tied model", "tokens tied", "gpt2", "mixtral experts", "full gemma3"}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_formats_reopen_equal(case, tmp_path):
    kind, lora = CASES[case]
    trained = train(save_base(tmp_path / "base", kind), lora)
    before = {k: v.clone() for k, v in trained.model.state_dict().items()}
    trained.model.eval()
    ours = [logits_of(trained.model)(torch.tensor(row)) for row in ROWS]
    plain_base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    moved = max((logits_of(plain_base)(torch.tensor(row)) - mine).abs().max() for row, mine in zip(ROWS, ours, strict=True))
    assert moved > 0.01  # else every comparison below would hold for an export of the base

    parts = export_all(trained, ["adapter", "merged"] if lora else ["merged"], ExportSection(), tmp_path / "run")

    assert [p["verdict"] for p in parts] == ["verified"] * len(parts)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "merged")
    models = [merged, PeftModel.from_pretrained(plain_base, tmp_path / "run" / "adapter")] if lora else [merged]
    for model in models:
        for row, mine in zip(ROWS, ours, strict=True):
            torch.testing.assert_close(logits_of(model)(torch.tensor(row)), mine, atol=1e-4, rtol=0)
    assert all(torch.equal(v, before[k]) for k, v in trained.model.state_dict().items())


@pytest.mark.parametrize(
    "kind", [*(pytest.param(k, marks=pytest.mark.slow) for k in ("LLAMA_TIED", "GEMMA3", "GPT2")), "MIXTRAL", "QWEN3_MOE"]
)
def test_tensors_are_those_of_save_pretrained(kind, tmp_path):
    trained = train(save_base(tmp_path / "base", kind), None)
    export_all(trained, ["merged"], ExportSection(), tmp_path / "run")
    trained.model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("run/merged", "theirs"))
    assert ours.keys() == theirs.keys() == load_file(tmp_path / "base" / "model.safetensors").keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", ["LLAMA", "MIXTRAL"])
def test_several_files_with_an_index(kind, tmp_path):
    trained = train(save_base(tmp_path / "base", kind), {"target_modules": ATTENTION})
    export_all(trained, ["merged"], ExportSection(max_shard_size="40KB"), tmp_path / "run")
    folder = tmp_path / "run" / "merged"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {p.name: load_file(p) for p in folder.glob("*.safetensors")}
    assert len(files) > 2
    assert {name: file for file, tensors in files.items() for name in tensors} == index["weight_map"]
    sizes = {file: sum(t.nbytes for t in tensors.values()) for file, tensors in files.items()}
    assert sum(sizes.values()) == index["metadata"]["total_size"]
    assert all(size <= 40_000 or len(files[file]) == 1 for file, size in sizes.items())
    assert index["weight_map"].keys() == load_file(tmp_path / "base" / "model.safetensors").keys()


def test_merging_is_done_in_fp32_and_rounded_once(tmp_path):
    trained = train(save_base(tmp_path / "base", dtype=torch.bfloat16), {"target_modules": ATTENTION}, compute=torch.bfloat16)
    export_all(trained, ["adapter", "merged"], ExportSection(), tmp_path / "run")
    layer = trained.model.model.layers[1].self_attn.q_proj
    delta = 4.0 * layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float()
    meant = (layer.base_layer.weight.float() + delta).bfloat16()
    found = load_file(tmp_path / "run" / "merged" / "model.safetensors")["model.layers.1.self_attn.q_proj.weight"]
    assert torch.equal(found, meant)


def test_fp32_tensors_of_a_16_bit_base_stay_fp32(tmp_path):
    files = save_base(tmp_path / "base", dtype=torch.bfloat16)
    trained = train(files, {"target_modules": ATTENTION}, compute=torch.bfloat16)
    from safetensors.torch import save_file

    tensors = load_file(files.weights[0])
    name = "model.layers.0.input_layernorm.weight"
    save_file(tensors | {name: tensors[name].float()}, files.weights[0], metadata={"format": "pt"})
    export_all(trained, ["merged"], ExportSection(), tmp_path / "run")
    found = {n: t.dtype for n, t in load_file(tmp_path / "run" / "merged" / "model.safetensors").items()}
    assert found.pop(name) == torch.float32
    assert set(found.values()) == {torch.bfloat16}


def test_full_training_has_no_adapter(tmp_path):
    trained = train(save_base(tmp_path / "base"), None)
    with pytest.raises(RecipeError, match="no adapter"):
        export_all(trained, ["merged", "adapter"], ExportSection(), tmp_path / "run")
    assert not (tmp_path / "run").exists()  # refused before anything was written


def test_adapter_folder_is_stable_and_readable(tmp_path):
    files = save_base(tmp_path / "base")
    for run in ("a", "b"):
        export_all(train(files, {"target_modules": ALL}), ["adapter"], ExportSection(), tmp_path / run)
    first, second = ((tmp_path / run / "adapter" / "adapter_config.json").read_text() for run in ("a", "b"))
    assert first == second
    config = json.loads(first)
    assert list(config)[:3] == ["peft_type", "task_type", "base_model_name_or_path"]
    assert config["inference_mode"] is True
    assert config["target_modules"] == sorted(ALL)
    assert "loftq_config" not in config  # as peft's default, of no use to a reader


def test_adapter_names_the_hub_id_without_asking_the_hub(tmp_path, network_guard):
    from dataclasses import replace

    files = replace(save_base(tmp_path / "base"), base_id="example-org/not-there", revision="main")
    export_all(train(files, {"target_modules": ALL}), ["adapter", "merged"], ExportSection(), tmp_path / "run")
    config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("example-org/not-there", "main")
    assert network_guard == []


@pytest.mark.parametrize(
    ("lora", "word"),
    [
        ({"modules_to_save": ["lm_head"]}, "modules_to_save (lm_head)"),
        ({"use_dora": True}, "use_dora"),
        ({"trainable_token_indices": [10]}, "trainable_token_indices"),
        ({"r": 300}, "--max-lora-rank 300"),
        ({"r": 600}, "up to 512"),
        ({"rank_pattern": {"v_proj": 2}}, "rank_pattern"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
    ],
)
def test_report_says_what_vllm_cannot_load(lora, word, tmp_path):
    trained = train(save_base(tmp_path / "base"), {"target_modules": ATTENTION, **lora})
    notes = export_all(trained, ["adapter"], ExportSection(), tmp_path / "run")[0]["notes"]
    assert any("vLLM" in n and word in n for n in notes)


def test_plain_adapter_has_no_word_about_vllm(tmp_path):
    trained = train(save_base(tmp_path / "base"), {"target_modules": ATTENTION})
    assert not any("vLLM" in n for n in export_all(trained, ["adapter"], ExportSection(), tmp_path / "run")[0]["notes"])
