"""A model, an adapter, a tokenizer and rows of a few kilobytes, made on the spot, with a recipe that trains them."""

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# Tokens that a row may have, and a pack holds; the rows below are shorter.
LENGTH = 128
PAD, EOS, START, END = SPECIALS = ("<|pad|>", "<|end|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = "the key is under a red pot by our gate and two cats sleep on it all day long".split()


def write(folder: Path, *, rows: int, batch: int, steps: int, device: str) -> Path:
    """Writes all of it into `folder` and returns the recipe's path: full fine-tuning in fp32 of rows in random order.

    Args:
        rows: in the data; their answers are of very different lengths.
        batch: rows of an optimizer step.
        steps: optimizer steps.
        device: train.device.
    """
    tokenizer = byte_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(_config(tokenizer))
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        # A fresh adapter's B is zero, and then A has no gradient; this one starts with random values in both.
        lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        get_peft_model(model, lora).save_pretrained(folder / "adapter")
    lines = [json.dumps({"messages": _messages(i)}) for i in range(rows)]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    recipe: dict[str, Any] = {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "rows.jsonl"), "max_length": LENGTH, "cache_dir": str(folder / "cache"), "num_proc": 1},
        "train": {
            "device": device, "precision": "fp32", "global_batch_size": batch, "max_steps": steps, "learning_rate": 1e-3,
            "gradient_checkpointing": "none", "torch_compile": False,
        },
        "checkpoint": {"save_strategy": "no"},
        "export": [],
        "output": str(folder / "run"),
    }  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
    return path


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, four special ones, and the ChatML template."""
    names = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIALS))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=EOS)
    tokenizer.chat_template = CHATML
    return tokenizer


def _config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """Two blocks. The vocabulary is odd, so that shards of it are of unequal size."""
    return LlamaConfig(
        vocab_size=len(tokenizer) + 1,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * LENGTH,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )


def _messages(number: int) -> list[dict[str, str]]:
    def words(first: int, count: int) -> str:
        return " ".join(WORDS[(first + i) % len(WORDS)] for i in range(count))

    asked, answer = words(number, 1 + number % 5), words(3 * number, 1 + (7 * number) % 10)
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
