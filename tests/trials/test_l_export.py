"""Trials of kind L (export) that need a whole run, and those of kind N that ask about an exported folder."""

import json
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.fixtures import CHATML, IM_END, LLAMA3, model, tok
from tests.training import model_folder
from tests.trials.exporting import BOTH, logits, reload, run

LORA = {"rank": 4, "alpha": 16, "target_modules": ["q_proj"]}
ONE_STEP = {"max_steps": 1}
DTYPES = {"auto": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_L01_dtype_is_the_bases_or_the_chosen_one(lora, dtype, tmp_path, monkeypatch, capsys):
    base = model_folder(tmp_path, dtype=torch.bfloat16)
    done = run(tmp_path, monkeypatch, capsys, lora=lora, train=ONE_STEP, export={"formats": ["merged"], "dtype": dtype})
    merged = done.output / "merged"
    assert {t.dtype for t in load_file(merged / "model.safetensors").values()} == {DTYPES[dtype]}
    assert AutoConfig.from_pretrained(merged).dtype == DTYPES[dtype]
    if dtype == "auto":
        sizes = [(folder / "model.safetensors").stat().st_size for folder in (base, merged)]
        assert sizes[1] == pytest.approx(sizes[0], rel=0.02)


def test_L03_inconsistent_generation_settings_never_stop_a_save(tmp_path, monkeypatch, capsys):
    base = model_folder(tmp_path)
    file = base / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "do_sample": False, "temperature": 0.9, "eos_token_id": [3, 4]}))
    saving = {"save_strategy": "steps", "save_steps": 1}
    done = run(tmp_path, monkeypatch, capsys, lora=LORA, train=ONE_STEP, checkpoint=saving, export=BOTH)
    assert "temperature" in done.printed
    for name in BOTH:
        config = GenerationConfig.from_pretrained(done.output / name)
        config.validate(strict=True)
        assert config.eos_token_id[:2] == [3, 4]


def test_L04_tokenizer_files_are_copies(tmp_path, monkeypatch, capsys):
    base = model_folder(tmp_path)
    done = run(tmp_path, monkeypatch, capsys, lora=LORA, train=ONE_STEP, export=BOTH)
    probe = "Hello 123 \u4f60\u597d \n\n\t x"
    for name in BOTH:
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            digests = {sha256((folder / file).read_bytes()).hexdigest() for folder in (base, done.output / name)}
            assert len(digests) == 1, file
        assert AutoTokenizer.from_pretrained(done.output / name)(probe).input_ids == tok()(probe).input_ids


@pytest.mark.parametrize("kind", ["LLAMA_TIED", "GEMMA3"])
def test_L08_tied_models_save_resume_and_reload(kind, tmp_path, monkeypatch, capsys):
    saving = {"save_strategy": "steps", "save_steps": 1, "resume": "auto"}
    run(tmp_path, monkeypatch, capsys, kind=kind, train={"max_steps": 1}, checkpoint=saving, export=["merged"])
    export = {"formats": ["merged"], "overwrite": True}
    done = run(tmp_path, monkeypatch, capsys, kind=kind, train={"max_steps": 2}, checkpoint=saving, export=export)
    assert "lm_head.weight" not in load_file(done.output / "merged" / "model.safetensors")
    loaded = reload(done.output / "merged")
    assert loaded.config.tie_word_embeddings is True
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert (logits(loaded) - logits(reload(model_folder(tmp_path, kind)))).abs().max() > 0.01  # it was trained
    torch.testing.assert_close(logits(loaded), done.logits(), atol=1e-5, rtol=0)


def test_N01_the_trained_end_token_stops_plain_generation(tmp_path, monkeypatch, capsys):
    base = tmp_path / "llama"
    always_0 = model("LLAMA", vocab=261)
    torch.nn.init.zeros_(always_0.model.norm.weight)  # greedy decoding gives id 0
    always_0.save_pretrained(base)
    tok(CHATML, eos="</s>").save_pretrained(base)
    done = run(tmp_path, monkeypatch, capsys, train={**ONE_STEP, "learning_rate": 0.0}, export=["merged"])
    loaded = AutoModelForCausalLM.from_pretrained(done.output / "merged")
    assert loaded.generation_config.eos_token_id == [3, IM_END]
    prompt = torch.tensor([[10, 11, 12]])
    assert loaded.generate(prompt, max_new_tokens=8).tolist() == [[10, 11, 12, IM_END]]


@pytest.mark.parametrize("base_template", [None, LLAMA3])
def test_N03_the_template_of_training_is_in_every_export(base_template, tmp_path, monkeypatch, capsys):
    model_folder(tmp_path, tokenizer=tok(base_template))
    rows = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}]
    given = {"rows": rows, "lora": LORA, "train": ONE_STEP, "export": BOTH}
    done = run(tmp_path, monkeypatch, capsys, data={"chat_template": CHATML}, **given)
    row = tok().decode(done.trained.prompts[0])
    for name in BOTH:
        loaded = AutoTokenizer.from_pretrained(done.output / name)
        text = loaded.apply_chat_template(rows[0]["messages"][:1], add_generation_prompt=True, tokenize=False)
        assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert row.startswith(text)


def test_C02_padded_embeddings_are_never_shrunk(tmp_path, monkeypatch, capsys):
    given = {"kind": "QWEN3", "lora": LORA, "train": ONE_STEP, "export": BOTH}
    tokens = ["<a>", "<b>", "<c>"]
    for added in ([], tokens):
        path = tmp_path / str(len(added))
        path.mkdir()
        base = model_folder(path, "QWEN3")
        done = run(path, monkeypatch, capsys, model={"add_tokens": added}, **given)
        merged = load_file(done.output / "merged" / "model.safetensors")
        before = load_file(base / "model.safetensors")
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert merged[name].shape[0] == 288
            assert torch.equal(merged[name][:261], before[name][:261])
            assert torch.equal(merged[name][264:], before[name][264:])
        assert AutoConfig.from_pretrained(done.output / "merged").vocab_size == 288
        adapted = PeftModel.from_pretrained(reload(base), done.output / "adapter")
        torch.testing.assert_close(logits(adapted), done.logits(), atol=1e-5, rtol=0)


def test_C04_tokenizer_weights_and_settings_agree(tmp_path, monkeypatch, capsys):
    model_folder(tmp_path, tokenizer=tok(pad=None), vocab=261)
    done = run(tmp_path, monkeypatch, capsys, lora=LORA, train=ONE_STEP, export=["merged"])
    folder: Path = done.output / "merged"
    tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    rows = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].shape[0]
    assert max(tokenizer.get_vocab().values()) + 1 <= rows == config.vocab_size
    assert len(tokenizer) == 261
    assert config.pad_token_id < rows
    assert GenerationConfig.from_pretrained(folder).pad_token_id < rows


@pytest.mark.parametrize("vocab", [272, 261], ids=["id fits", "vocabulary grows"])
def test_C05_rows_of_added_tokens_are_trained_and_saved(vocab, tmp_path, monkeypatch, capsys):
    base = model_folder(tmp_path, vocab=vocab)
    rows = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": f"<tool> {q}"}]} for q in "abcd"]
    train = {"max_steps": 20, "learning_rate": 0.01}
    done = run(tmp_path, monkeypatch, capsys, rows=rows, lora=LORA, model={"add_tokens": ["<tool>"]}, train=train, export=BOTH)
    in_memory = done.trained.model.get_input_embeddings().weight[261]
    merged = reload(done.output / "merged")
    plain = reload(base)
    if vocab == 261:
        plain.resize_token_embeddings(262, mean_resizing=False)
        assert "resize_token_embeddings" in done.printed
    adapted = PeftModel.from_pretrained(plain, done.output / "adapter").merge_and_unload()
    for loaded in (merged, adapted):
        torch.testing.assert_close(loaded.get_input_embeddings().weight[261], in_memory, atol=1e-6, rtol=0)
        torch.testing.assert_close(logits(loaded), done.logits(), atol=1e-4, rtol=0)
    if vocab == 272:
        assert (in_memory - reload(base).get_input_embeddings().weight[261]).abs().max() > 1e-3
    assert AutoTokenizer.from_pretrained(done.output / "merged").convert_tokens_to_ids("<tool>") == 261
