"""Tiny tokenizer, chat templates and random models: offline, CPU, the same numbers everywhere."""

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

SPECIALS = ["<|im_end|>", "<|pad|>", "<s>", "</s>", "<|im_start|>"]  # ids 0..4; the 256 byte symbols follow: 5..260
IM_END, PAD, BOS, EOS, IM_START = range(5)

# Chat templates in the manner of public model families, each with one trait that has fooled a toolkit.
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT
CHATML_GEN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{{ '\n' }}{% else %}" + TURN + "{% endif %}{% endfor %}" + PROMPT
)
LLAMA3 = "{{ bos_token }}" + CHATML  # the template itself writes bos
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}" + TURN + "{% endfor %}" + PROMPT
)
TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}{% for t in m.tool_calls %}"
    '{"name": {{ t.function.name | tojson }}, "arguments": {{ t.function.arguments | tojson }}}{% endfor %}'
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + PROMPT
)
_THINK_TURNS = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% set c = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set r = m.content.split('</think>')[0].replace('<think>', '').strip('\n') if '</think>' in m.content else '' %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ r }}\n</think>\n\n{% endif %}{{ c }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}"
)
THINK = _THINK_TURNS + PROMPT  # earlier reasoning is stripped, an empty block is injected
THINK_GP = _THINK_TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"


def tok(
    template: str | None = CHATML,
    eos: str | None = "</s>",
    pad: str | None = "<|pad|>",
    bos: str | None = "<s>",
    add_bos: bool = False,
    merge_newlines: bool = False,
    trim_offsets: bool = False,
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 261 ids (262 with `merge_newlines`, which merges two newlines into one token)."""
    vocab = {token: i for i, token in enumerate(SPECIALS)}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[symbol] = len(vocab)
    merges = []
    if merge_newlines:
        merges = [("\u010a", "\u010a")]
        vocab["\u010a\u010a"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    if trim_offsets:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 2)]
        )
    names = {name: token for name, token in {"bos_token": bos, "eos_token": eos, "pad_token": pad}.items() if token}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.chat_template = template
    return fast


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "pad_token_id": 1,
}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "LLAMA": ("LlamaForCausalLM", "LlamaConfig", {"vocab_size": 272}),
    "LLAMA_TIED": ("LlamaForCausalLM", "LlamaConfig", {"vocab_size": 261, "tie_word_embeddings": True}),
    "QWEN3": ("Qwen3ForCausalLM", "Qwen3Config", {"vocab_size": 288, "head_dim": 8}),
    "GEMMA3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {"vocab_size": 261, "head_dim": 8, "sliding_window": 8}),
    "QWEN3_MOE": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {"vocab_size": 261, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "GPT_OSS": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {"vocab_size": 261, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "MIXTRAL": ("MixtralForCausalLM", "MixtralConfig", {"vocab_size": 261, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


def model(kind: str = "LLAMA", vocab: int | None = None, seed: int = 0, **config: Any) -> PreTrainedModel:
    """A random fp32 model of two layers and width 32, in eval mode; `config` replaces values. Reseeds torch."""
    dtype: torch.dtype = config.pop("dtype", torch.float32)
    torch.manual_seed(seed)
    cls, config_cls, extra = KINDS[kind]
    values = {**SMALL, **extra, **config, **({"vocab_size": vocab} if vocab else {})}
    return getattr(transformers, cls)(getattr(transformers, config_cls)(**values)).to(dtype).eval()
