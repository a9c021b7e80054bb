"""config.json and generation_config.json: the base's own, changed only where the tensors or the training ask for it."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, GenerationConfig

from swiftlite.export.config import generation_config, model_config
from swiftlite.export.run import export_all
from swiftlite.recipe.schema import ExportSection
from tests.export.making import save_base, train
from tests.fixtures import tok

LORA = {"target_modules": ["q_proj"]}


def edit(path, **changes):
    value = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({k: v for k, v in (value | changes).items() if v != "gone"}))


def test_config_is_the_bases_own(tmp_path):
    files = save_base(tmp_path / "base")
    edit(files.folder / "config.json", architectures=["LlamaForCausalLM"], publisher_note={"kept": True})
    config, notes = model_config(train(files, LORA), torch.float32, untied=False)
    assert config == json.loads((files.folder / "config.json").read_text())  # use_cache too, which training switches off
    assert notes == []


@pytest.mark.parametrize("keys", [("dtype",), ("torch_dtype",), ("dtype", "torch_dtype"), ()])
def test_dtype_stands_where_the_base_has_it(keys, tmp_path):
    files = save_base(tmp_path / "base")
    edit(files.folder / "config.json", **{"dtype": "gone", **dict.fromkeys(keys, "float32")})
    config, _ = model_config(train(files, LORA), torch.bfloat16, untied=False)
    assert {k: config[k] for k in ("dtype", "torch_dtype") if k in config} == dict.fromkeys(keys or ("dtype",), "bfloat16")


def test_quantisation_of_the_base_is_not_claimed(tmp_path):
    files = save_base(tmp_path / "base")
    trained = train(files, LORA)
    edit(files.folder / "config.json", quantization_config={"quant_method": "fp8"})
    config, notes = model_config(trained, torch.bfloat16, untied=False)
    assert "quantization_config" not in config
    assert any("quantization_config" in n for n in notes)


def test_grown_vocabulary_is_in_the_config(tmp_path):
    files = save_base(tmp_path / "base", "LLAMA_TIED")
    tokenizer = tok()
    tokenizer.add_tokens(["<tool>"], special_tokens=True)
    trained = train(files, None, tokenizer=tokenizer, tokens_added=True)
    trained.model.resize_token_embeddings(262)
    parts = export_all(trained, ["merged"], ExportSection(), tmp_path / "run")
    assert AutoConfig.from_pretrained(tmp_path / "run" / "merged").vocab_size == 262
    assert any("vocab_size is 262 (base: 261)" in n for n in parts[0]["notes"])


@pytest.mark.parametrize(
    ("base", "stops", "meant"),
    [
        ({"eos_token_id": 3}, {0}, [3, 0]),
        ({"eos_token_id": [3, 4]}, {4, 0}, [3, 4, 0]),
        ({"eos_token_id": 3}, {3}, 3),
        ({"eos_token_id": [3]}, {3}, [3]),
        ({"eos_token_id": "gone"}, {0}, [3, 0]),  # config.json has 3
    ],
)
def test_stop_tokens_are_added_to_the_bases(base, stops, meant, tmp_path):
    files = save_base(tmp_path / "base")
    edit(files.folder / "generation_config.json", **base)
    config, notes = generation_config(train(files, LORA, stop_ids=stops))
    assert config["eos_token_id"] == meant
    assert any("eos_token_id" in n for n in notes) == (set(stops) - {3, 4} != set())


def test_base_without_generation_config_gets_one(tmp_path):
    files = save_base(tmp_path / "base")
    (files.folder / "generation_config.json").unlink()
    config, _ = generation_config(train(files, LORA))
    assert config == {"bos_token_id": 2, "eos_token_id": [3, 0], "pad_token_id": 1}


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({"do_sample": False, "temperature": 0.9}, "temperature"),
        ({"top_p": 0.5, "top_k": 3}, "top_p"),
        ({"early_stopping": "sometimes"}, "early_stopping"),
        ({"num_beams": 1, "length_penalty": 2.0}, "length_penalty"),
        ({"max_new_tokens": -4}, "max_new_tokens"),
        ({"pad_token_id": -1}, "pad_token_id"),
        ({"pad_token_id": 5000}, "pad_token_id"),
    ],
)
def test_contradictions_are_removed_and_named(broken, named, tmp_path):
    files = save_base(tmp_path / "base")
    trained = train(files, LORA)
    edit(files.folder / "generation_config.json", repetition_penalty=1.1, **broken)
    config, notes = generation_config(trained)
    GenerationConfig(**config).validate(strict=True)
    assert any(named in n for n in notes)
    assert config["repetition_penalty"] == 1.1
    assert config["pad_token_id"] == 1


def test_sampling_settings_that_agree_are_kept(tmp_path):
    files = save_base(tmp_path / "base")
    edit(files.folder / "generation_config.json", do_sample=True, temperature=0.6, top_p=0.9)
    config, notes = generation_config(train(files, LORA, stop_ids={3}))
    assert (config["do_sample"], config["temperature"], config["top_p"]) == (True, 0.6, 0.9)
    assert notes == []


def test_padding_outside_of_the_vocabulary_is_mended(tmp_path):
    files = save_base(tmp_path / "base", tokenizer=tok(pad=None))
    edit(files.folder / "config.json", pad_token_id=-1)
    edit(files.folder / "generation_config.json", pad_token_id=-1)
    trained = train(files, LORA)
    trained.model.config.pad_token_id = None
    config, notes = model_config(trained, torch.float32, untied=False)
    assert config["pad_token_id"] == 3  # the end of text
    assert any("pad_token_id" in n for n in notes)
    assert generation_config(trained)[0]["pad_token_id"] == 3


def test_code_and_processor_files_come_along(tmp_path):
    files = save_base(tmp_path / "base")
    trained = train(files, LORA)
    edit(files.folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    for name in ("modeling_own.py", "configuration_own.py", "preprocessor_config.json", "secret.env"):
        (files.folder / name).write_text("{}")
    # The built-in class is loaded: remote code was not allowed.
    export_all(replace(trained), ["merged"], ExportSection(), tmp_path / "run")
    names = {p.name for p in (tmp_path / "run" / "merged").iterdir()}
    assert {"modeling_own.py", "configuration_own.py", "preprocessor_config.json"} <= names
    assert "secret.env" not in names
