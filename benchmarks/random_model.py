"""A model of a real shape with random weights, made on the GPU: speed and memory need no trained ones.

python benchmarks/random_model.py llama3-8b /tmp/llama3-8b [--no-weights]
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.fixtures import tok

TOKENS = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 1, "tie_word_embeddings": False}
LLAMA3 = {
    "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, **TOKENS,
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
}  # fmt: skip
SHAPES = {
    "tiny": LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, **LLAMA3),
    "llama3-8b": LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, **LLAMA3
    ),
    "llama3-70b": LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, **LLAMA3
    ),
    "qwen3-14b": Qwen3Config(
        vocab_size=151936, hidden_size=5120, intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, **TOKENS,
    ),
}  # fmt: skip


def make(shape: str, folder: Path, weights: bool = True) -> None:
    """Writes config, bf16 weights and a byte-level tokenizer with a chat template."""
    torch.manual_seed(0)
    tok().save_pretrained(folder)
    if not weights:
        config = SHAPES[shape]
        config.dtype, config.architectures = torch.bfloat16, [type(config).__name__.replace("Config", "ForCausalLM")]
        config.save_pretrained(folder)
        return
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(SHAPES[shape], dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="5GB")


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]), weights="--no-weights" not in sys.argv)
