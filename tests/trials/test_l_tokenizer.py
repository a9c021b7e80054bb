"""Kinds C and L, what a run does to the tokenizer: nothing changes unasked, and added tokens keep id and flag in every reader."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from swiftlite.cli.main import run
from swiftlite.models.tokenizer import init_new_rows
from tests.fixtures import model, tok

PROBE = "Hello 123 你好 \n\n\t x"
ROW = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}


def base(folder: Path, *, tokenizer=None, **keys) -> Path:
    model("LLAMA", **keys).save_pretrained(folder / "base")
    (tokenizer or tok()).save_pretrained(folder / "base")
    return folder / "base"


def train(folder: Path, name: Path, *, add_tokens=(), export=("adapter", "merged"), rows=(ROW,)) -> Path:
    """One step of LoRA; the folder of the run."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    whole = {
        "model": {"name": str(name), "add_tokens": list(add_tokens)},
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 256},
        "lora": {"rank": 2, "target_modules": ["q_proj"]},
        "train": {"max_steps": 1, "global_batch_size": len(rows)},
        "export": list(export),
        "output": str(folder / "run"),
    }
    (folder / "recipe.yaml").write_text(json.dumps(whole))
    assert run(["train", str(folder / "recipe.yaml")]) == 0
    return folder / "run"


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_L04_without_new_tokens_the_files_are_those_of_the_base(tmp_path):
    name = base(tmp_path)
    # Known bytes: spacing that no library writes, so that a file written anew cannot be equal by chance.
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (name / file).write_text(json.dumps(json.loads((name / file).read_text()), indent=7))
    out = train(tmp_path, name)
    for folder in (out / "adapter", out / "merged"):
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            assert sha(folder / file) == sha(name / file)
        assert AutoTokenizer.from_pretrained(folder)(PROBE).input_ids == tok()(PROBE).input_ids


def test_L05_added_tokens_keep_id_and_flag(tmp_path):
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a<tool>b kilowort"}]}
    merged = train(tmp_path, base(tmp_path, vocab=261), add_tokens=["<tool>", "kilowort"], rows=[row]) / "merged"
    bare, auto = Tokenizer.from_file(str(merged / "tokenizer.json")), AutoTokenizer.from_pretrained(merged)
    assert (
        [bare.token_to_id(t) for t in ("<tool>", "kilowort")] == auto.convert_tokens_to_ids(["<tool>", "kilowort"]) == [261, 262]
    )
    for ids in (bare.encode("a<tool>b").ids, auto("a<tool>b").input_ids):
        assert ids.count(261) == 1 and len(ids) == 3
    ids = auto("a<tool>b kilowort").input_ids
    assert bare.decode(ids) == auto.decode(ids, skip_special_tokens=True) == "ab kilowort"
    written = json.loads((merged / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert (written["261"]["special"], written["262"]["special"]) == (True, False)
    config = json.loads((merged / "config.json").read_text())
    tensors = load_file(merged / "model.safetensors")
    assert config["vocab_size"] == 263 == len(tensors["model.embed_tokens.weight"]) == len(tensors["lm_head.weight"])


@pytest.mark.parametrize("layout", ["list", "dict", "additional"])
@pytest.mark.parametrize("add_tokens", [[], ["<tool>"]])
def test_L07_class_and_layout_of_the_base_stay(tmp_path, layout, add_tokens):
    name = base(tmp_path)
    config = json.loads((name / "tokenizer_config.json").read_text())
    extra = {"list": ["<s>"], "dict": {"image_token": "<s>"}, "additional": ["<s>"]}[layout]
    key = "additional_special_tokens" if layout == "additional" else "extra_special_tokens"
    config = {k: v for k, v in config.items() if k != "extra_special_tokens"} | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        key: extra,
    }
    (name / "tokenizer_config.json").write_text(json.dumps(config))
    out = train(tmp_path, name, add_tokens=add_tokens)
    for folder in (out / "adapter", out / "merged"):
        written = json.loads((folder / "tokenizer_config.json").read_text())
        assert {k: v for k, v in written.items() if k != "added_tokens_decoder"} == config
        assert AutoTokenizer.from_pretrained(folder)(PROBE).input_ids == tok()(PROBE).input_ids


def test_C04_padding_adds_no_token_and_no_row(tmp_path):
    merged = train(tmp_path, base(tmp_path, tokenizer=tok(pad=None), vocab=261, pad_token_id=None)) / "merged"
    tokenizer, rows = (
        AutoTokenizer.from_pretrained(merged),
        load_file(merged / "model.safetensors")["model.embed_tokens.weight"].shape[0],
    )
    config = json.loads((merged / "config.json").read_text())
    assert len(tokenizer) == 261 and max(tokenizer.get_vocab().values()) + 1 <= rows == config["vocab_size"] == 261
    generation = json.loads((merged / "generation_config.json").read_text())
    assert all((c.get("pad_token_id") or 0) < rows for c in (config, generation))


def test_C07_new_rows_start_near_the_old_ones():
    """The two matrices alone, grown by eight rows as the build grows them."""
    small, grown = model("LLAMA", vocab=261), model("LLAMA", vocab=269)
    for part in ("model.embed_tokens", "lm_head"):
        weight = grown.get_submodule(part).weight.data
        weight[:261] = small.get_submodule(part).weight.data
        init_new_rows(weight, 261, seed=0)
        norms = weight.norm(dim=1)
        typical = norms[:261].mean()
        assert (norms[261:] > typical / 3).all() and (norms[261:] < typical * 3).all()
    grown.load_state_dict(
        {n: t for n, t in small.state_dict().items() if "embed_tokens" not in n and "lm_head" not in n}, strict=False
    )
    with torch.no_grad():
        old, new = torch.tensor([[10, 11, 12, 13]]), torch.tensor([[10, 261, 12, 268]])
        before = small(input_ids=old, labels=old).loss
        assert (grown(input_ids=old, labels=old).loss - before).abs() < 0.05
        assert grown(input_ids=new, labels=new).loss < 2 * torch.log(torch.tensor(269.0))
