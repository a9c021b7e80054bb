"""A model of a real shape with random weights, made on the GPU: speed and memory need no trained ones.

python benchmarks/random_model.py llama3-8b /tmp/llama3-8b
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.fixtures import tok

SHAPES = {
    "llama3-8b": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8,
        max_position_embeddings=131072, rms_norm_eps=1e-5,
        tie_word_embeddings=False, bos_token_id=2, eos_token_id=3, pad_token_id=1,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192},
    ),
}  # fmt: skip


def make(shape: str, folder: Path) -> None:
    """Writes config, bf16 weights and a byte-level tokenizer with a chat template."""
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(SHAPES[shape], dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="5GB")
    tok().save_pretrained(folder)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
