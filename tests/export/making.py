"""Trained models for the tests of exports: a tiny base in a folder, and weights moved away from it as training would."""

from dataclasses import replace
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from swiftlite.export.trained import Trained
from swiftlite.models.files import ModelFiles
from tests.fixtures import model as fixture_model
from tests.fixtures import tok

ROWS = [list(range(10, 22)), list(range(200, 230)), [7, 7, 7]]


def base_model(kind: str, dtype: torch.dtype = torch.float32, **config: object) -> PreTrainedModel:
    """The models of tests/fixtures.py and more: GPT2 (Conv1D), QWEN3_MOE (fused experts), GEMMA3_VISION (a composite config)."""
    torch.manual_seed(0)
    ends = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 1}
    if kind == "GPT2":
        return (
            GPT2LMHeadModel(GPT2Config(vocab_size=261, n_embd=32, n_layer=2, n_head=4, n_positions=256, **ends, **config))
            .to(dtype)
            .eval()
        )
    if kind == "QWEN3_MOE":
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "moe_intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        moe = {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 256,
        }
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=261, **sizes, **moe, **ends, **config)).to(dtype).eval()
    if kind == "GEMMA3_VISION":
        text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
        text |= {"num_key_value_heads": 2, "vocab_size": 272, "sliding_window": 8, "max_position_embeddings": 256, **ends}
        tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        tower |= {"image_size": 28, "patch_size": 14}
        marks = {"image_token_index": 270, "boi_token_index": 268, "eoi_token_index": 269, "mm_tokens_per_image": 4}
        return Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=tower, **marks)).to(dtype).eval()
    return fixture_model(kind, dtype=dtype, **config)


def save_base(
    folder: Path, kind: str = "LLAMA", dtype: torch.dtype = torch.float32, tokenizer: object = None, **config: object
) -> ModelFiles:
    base_model(kind, dtype, **config).save_pretrained(folder)
    (tokenizer or tok()).save_pretrained(folder)
    return ModelFiles(folder, str(folder), None, sorted(folder.glob("*.safetensors")), True)


def move(model: torch.nn.Module, scale: float = 0.05) -> None:
    """Stands for training: every trainable weight takes a random step."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted({n: p for n, p in model.named_parameters() if p.requires_grad}.items()):
            parameter += scale * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def train(
    files: ModelFiles, lora: dict[str, object] | None = None, compute: torch.dtype = torch.float32, **changes: object
) -> Trained:
    """`lora`: arguments of peft's LoraConfig; None is full fine-tuning with fp32 master weights. `changes`: fields of Trained."""
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_pretrained(files.folder, dtype=compute)
    base_dtype = AutoConfig.from_pretrained(files.folder).dtype or torch.float32
    model.config.use_cache = False
    wrapper = None
    if lora is None:
        model.float()
    else:
        wrapper = get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 16, **lora}))
    move(model)
    tokenizer = AutoTokenizer.from_pretrained(files.folder)
    trained = Trained(model, wrapper, files, tokenizer, False, None, {0}, ROWS, base_dtype, compute)
    return replace(trained, **changes)
