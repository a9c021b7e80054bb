"""The generic family over tiny random models: parts found, adapters attached, trained, saved, loaded by plain peft."""

import re
import warnings

import pytest
import torch
import transformers as tf
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from swiftlite.models import adapters
from swiftlite.models.families.describe import describe
from swiftlite.models.families.family import Family, class_name, inside
from swiftlite.models.families.lookup import attention_for, auto_class, family_for
from swiftlite.recipe import tables
from swiftlite.recipe.errors import ModelError, RecipeError
from swiftlite.recipe.schema import LoraSection

VOCAB = 96
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GQA = BASE | {"num_key_value_heads": 2}
HEAD8 = GQA | {"head_dim": 8}
OLD = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
MOE = {"num_experts_per_tok": 2}


def qwen3_next():
    text = HEAD8 | MOE | {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    return tf.Qwen3NextConfig(**text, **linear, layer_types=["linear_attention", "full_attention"])


def gemma3_vl():
    text = HEAD8 | {"model_type": "gemma3_text", "sliding_window": 8, "query_pre_attn_scalar": 8}
    return tf.Gemma3Config(
        text_config=text,
        vision_config=VISION | {"model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
        image_token_index=90,
        boi_token_index=91,
        eoi_token_index=92,
    )


def llava():
    text, vision = GQA | {"model_type": "llama"}, VISION | {"model_type": "clip_vision_model"}
    return tf.LlavaConfig(text_config=text, vision_config=vision, image_token_id=90, image_token_index=90)


def jamba():
    mamba = {"mamba_d_state": 4, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
    return tf.JambaConfig(**GQA, **MOE, num_experts=4, expert_layer_period=2, expert_layer_offset=1, **mamba)


def molmo2():
    small = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    vision = small | {"num_hidden_layers": 2, "image_size": [28, 28], "num_position_embeddings": 4}
    return tf.Molmo2Config(
        text_config=HEAD8 | {"additional_vocab_size": 8},
        vision_config=vision,
        adapter_config=small | {"text_hidden_size": 32, "vision_feature_layer": [0, 1]},
    )


# Name -> (config, class of the decoder blocks, last parts of the modules all-linear adapts).
QKVO, MLP = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
NEOX = {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}
TINY = {
    "llama": (lambda: tf.LlamaConfig(**GQA), "LlamaDecoderLayer", QKVO | MLP),
    "llama tied": (lambda: tf.LlamaConfig(**GQA, tie_word_embeddings=True), "LlamaDecoderLayer", QKVO | MLP),
    "mistral": (lambda: tf.MistralConfig(**GQA, sliding_window=8), "MistralDecoderLayer", QKVO | MLP),
    "qwen2": (lambda: tf.Qwen2Config(**GQA), "Qwen2DecoderLayer", QKVO | MLP),
    "qwen3": (lambda: tf.Qwen3Config(**HEAD8), "Qwen3DecoderLayer", QKVO | MLP),
    "qwen2_moe": (
        lambda: tf.Qwen2MoeConfig(**GQA, **MOE, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16),
        "Qwen2MoeDecoderLayer",
        QKVO | MLP,  # the shared expert; peft reads the same names as fused experts in Qwen3-Next, not here
    ),
    "qwen3_moe": (
        lambda: tf.Qwen3MoeConfig(**HEAD8, **MOE, num_experts=4, moe_intermediate_size=16),
        "Qwen3MoeDecoderLayer",
        QKVO,
    ),
    "qwen3_next": (
        qwen3_next,
        "Qwen3NextDecoderLayer",
        QKVO | {"in_proj_qkvz", "in_proj_ba", "out_proj"},
    ),
    "mixtral": (lambda: tf.MixtralConfig(**GQA, **MOE, num_local_experts=4), "MixtralDecoderLayer", QKVO),
    "gpt_oss": (
        lambda: tf.GptOssConfig(**HEAD8, **MOE, num_local_experts=4, sliding_window=8),
        "GptOssDecoderLayer",
        QKVO,
    ),
    "granitemoe": (lambda: tf.GraniteMoeConfig(**GQA, **MOE, num_local_experts=4), "GraniteMoeDecoderLayer", QKVO),
    "gemma2": (lambda: tf.Gemma2Config(**HEAD8, sliding_window=8, query_pre_attn_scalar=8), "Gemma2DecoderLayer", QKVO | MLP),
    "gemma3 text": (
        lambda: tf.Gemma3TextConfig(**HEAD8, sliding_window=8, query_pre_attn_scalar=8),
        "Gemma3DecoderLayer",
        QKVO | MLP,
    ),
    "gemma3 vision-language": (gemma3_vl, "Gemma3DecoderLayer", QKVO | MLP),
    "llava": (llava, "LlamaDecoderLayer", QKVO | MLP),
    "phi3": (lambda: tf.Phi3Config(**GQA), "Phi3DecoderLayer", {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}),
    "gpt2": (lambda: tf.GPT2Config(**OLD), "GPT2Block", {"c_attn", "c_proj", "c_fc"}),
    "bloom": (
        lambda: tf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, pad_token_id=0),
        "BloomBlock",
        NEOX,
    ),
    "gpt_neox": (lambda: tf.GPTNeoXConfig(**BASE), "GPTNeoXLayer", NEOX),
    "olmo2": (lambda: tf.Olmo2Config(**GQA), "Olmo2DecoderLayer", QKVO | MLP),
    "cohere": (lambda: tf.CohereConfig(**GQA), "CohereDecoderLayer", QKVO | MLP),
    "granite": (lambda: tf.GraniteConfig(**GQA), "GraniteDecoderLayer", QKVO | MLP),
    "opt": (
        lambda: tf.OPTConfig(**{k: v for k, v in BASE.items() if k != "intermediate_size"}, ffn_dim=48, word_embed_proj_dim=32),
        "OPTDecoderLayer",
        {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"},
    ),
    "falcon": (lambda: tf.FalconConfig(**BASE), "FalconDecoderLayer", NEOX),
    "starcoder2": (lambda: tf.Starcoder2Config(**GQA), "Starcoder2DecoderLayer", QKVO | {"c_fc", "c_proj"}),
    # No `_no_split_modules` at all: the list with most parameters.
    "biogpt": (lambda: tf.BioGptConfig(**BASE), "BioGptDecoderLayer", {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"}),
    "jamba": (jamba, "JambaMambaDecoderLayer", QKVO | MLP | {"in_proj"}),
}
if hasattr(tf, "Molmo2Config"):
    TINY["molmo2"] = (molmo2, "Molmo2DecoderLayer", QKVO | MLP)


def make(name, device="cpu", **changes):
    """A tiny model with weights large enough that adapters matter, its config and its family."""
    config = TINY[name][0]()
    for key, value in changes.items():
        setattr(config, key, value)
    attention = attention_for(family_for(config), config, "cpu")
    torch.manual_seed(0)
    with torch.device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = auto_class(config).from_config(config, dtype=torch.float32, attn_implementation=attention)
    if device == "cpu":
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(3)
    return model.eval(), config, family_for(config)


def ids(rows=2, length=12, seed=1):
    return torch.randint(3, 88, (rows, length), generator=torch.Generator().manual_seed(seed))


def attached(name, rank=4, **lora):
    model, _, family = make(name)
    section = LoraSection(rank=rank, **lora)
    targets = adapters.lora_targets(model, section, family)
    peft = adapters.inject(model, adapters.peft_config(model, section, targets, "base"), targets)
    adapters.init_adapters(peft, section, seed=0, device="cpu")
    return peft, model, family, targets


@pytest.mark.parametrize("name", TINY)
def test_blocks_and_targets(name):
    _, block, leaves = TINY[name]
    model, _, family = make(name, "meta")
    blocks = family.blocks(model)
    assert len(blocks) == 2
    assert block in {class_name(model.get_submodule(b)) for b in blocks}
    targets = adapters.lora_targets(model, LoraSection(), family)
    assert {t.rpartition(".")[2] for t in targets} == leaves
    head = model.get_output_embeddings()
    for target in targets:
        module = model.get_submodule(target)
        assert inside(target, blocks)
        assert module is not head
        assert not isinstance(module, nn.Embedding)
        assert not any(part in target for part in ("experts", "router", "mlp.gate.", "vision", "shared_expert_gate"))
        assert not target.endswith((".gate", ".router"))


@pytest.mark.parametrize("name", TINY)
def test_a_step_learns_and_plain_peft_reloads(name, tmp_path):
    peft, model, family, targets = attached(name)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    x = ids()
    inputs = family.inputs({"input_ids": x}) | {"labels": x, "use_cache": False}
    loss = model(**inputs).loss
    bare, _, _ = make(name)
    torch.testing.assert_close(loss, bare(**inputs).loss)  # B is zero: nothing has changed yet
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * len(targets)
    assert all("lora_" in n and p.dtype == torch.float32 for n, p in trained.items())
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    model.train()  # classes that demand inputs do so only here
    for _ in range(3):
        model(**inputs).loss.backward()
        optimizer.step()
        # A zero gradient is one that never arrived; key biases of attention have none, and are no targets.
        assert all(p.grad is not None for p in trained.values())
        reached = {n for n, p in trained.items() if p.grad.abs().max() > 0}
        optimizer.zero_grad()
    assert reached == set(trained)
    model.eval()
    with torch.no_grad():
        after = model(**inputs)
    assert after.loss < loss
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters() if n in before)

    bare.save_pretrained(tmp_path / "base")
    adapters.save_adapter(peft, tmp_path / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        plain = auto_class(bare.config).from_pretrained(
            tmp_path / "base", dtype=torch.float32, attn_implementation=model.config._attn_implementation
        )
        loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs).logits, after.logits, rtol=0, atol=1e-6)
    assert sum(isinstance(m, LoraLayer) for m in loaded.modules()) == len(targets)

    ours, theirs = adapters.adapter_state(peft), get_peft_model_state_dict(peft, save_embedding_layers=False)
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)


@pytest.mark.parametrize("name", TINY)
def test_order_of_time(name):
    """Whatever is served must not see the token that it predicts."""
    model, _, family = make(name)
    x = ids(1)
    y = x.clone()
    y[0, -1] += 1
    with torch.no_grad():
        a, b = (model(**family.inputs({"input_ids": t}), use_cache=False).logits for t in (x, y))
    torch.testing.assert_close(a[:, :-1], b[:, :-1], rtol=0, atol=1e-5)
    assert (a[:, -1] - b[:, -1]).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["gemma3 vision-language", "llava"])
def test_tower_is_frozen_and_never_adapted(name):
    model, _, family = make(name, "meta")
    towers = family.towers_of(model)
    assert towers == ["model.vision_tower"]
    family.freeze(model)
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert {n.split(".")[1] for n in frozen} == {"vision_tower", "multi_modal_projector"}
    assert {n for n, _ in model.named_parameters() if ".vision_tower." in n or "projector" in n} == frozen
    with pytest.raises(RecipeError, match="no weight that rows of text reach"):
        adapters.select_trainable(model, ["*vision_tower*"])
    assert not any("vision" in n for n in adapters.select_trainable(model, ["*q_proj*"]))
    # Names that the tower has too must not reach it, whichever way they are written.
    for targets in (["q_proj"], r".*q_proj"):
        found = adapters.lora_targets(model, LoraSection(target_modules=targets), family)
        assert len(found) == 2
        assert all("language_model" in n for n in found)


def test_tower_layers_are_sharded_apart():
    model, _, family = make("gemma3 vision-language", "meta")
    assert family.other_blocks(model) == [f"model.vision_tower.encoder.layers.{i}" for i in range(2)]
    assert family.other_blocks(make("mixtral", "meta")[0]) == []


def test_wrap_names_classes():
    model, _, family = make("llama", "meta")
    assert family.blocks(model, wrap=["LlamaMLP"]) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    with pytest.raises(RecipeError, match=r"LlamaBlock.*LlamaDecoderLayer"):
        family.blocks(model, wrap=["LlamaBlock"])


def test_no_blocks_is_an_error():
    model, _, family = make("llama", "meta")
    model.model.layers = nn.Sequential(*model.model.layers)
    with pytest.raises(ModelError, match="LlamaDecoderLayer"):
        family.blocks(model)


def test_description_adds_up():
    model, _, family = make("llama tied")
    model.tie_weights()
    first, *rows = describe(model, family)
    assert first.parameters == sum(p.numel() for p in model.parameters()) == sum(r.parameters for r in rows)
    assert {r.part: r.what for r in rows}["decoder blocks"] == "2 x LlamaDecoderLayer"
    assert {r.part: r.what for r in rows}["embeddings"] == "model.embed_tokens tied with lm_head"
    assert "4 experts a layer" in describe(*make("mixtral", "meta")[::2])[0].what


@pytest.mark.parametrize(
    ("kind", "why"),
    [("t5", "encoder-decoder"), ("bert", "encoder"), ("xlnet", "encoder"), ("clip_text_model", "no causal language model")],
)
def test_what_cannot_be_served_says_so(kind, why):
    config = tf.AutoConfig.for_model(kind)
    with pytest.raises(ModelError, match=f"'{kind}' cannot be served: .*{why}"):
        auto_class(config)


def test_image_text_only_classes_are_loaded_as_such():
    assert auto_class(tf.LlavaConfig()) is tf.AutoModelForImageTextToText
    assert auto_class(gemma3_vl()) is tf.AutoModelForCausalLM
    assert type(make("gemma3 vision-language", "meta")[0]).__name__ == "Gemma3ForConditionalGeneration"


@pytest.mark.parametrize(
    ("name", "device", "chosen"),
    [
        ("llama", "cpu", "sdpa"),
        ("llama", "cuda", "sdpa"),
        ("gemma2", "cpu", "eager"),
        ("gemma2", "cuda", "eager"),
        ("gpt_oss", "cpu", "eager"),
        ("gpt_oss", "cuda", "eager"),
        ("gemma3 vision-language", "cpu", "sdpa"),
        ("bloom", "cuda", "eager"),
    ],
)
def test_attention(name, device, chosen):
    config = TINY[name][0]()
    assert attention_for(family_for(config), config, device) == chosen
    assert attention_for(family_for(config), config, device, chosen) == chosen


@pytest.mark.parametrize(
    ("name", "device", "wanted"),
    [
        ("gemma2", "cpu", "sdpa"),
        ("gemma2", "cuda", "sdpa"),
        ("gpt_oss", "cuda", "sdpa"),
        ("gpt_oss", "cuda", "flash_attention_2"),
        ("gpt2", "cuda", "flex_attention"),
        ("llama", "cpu", "flex_attention"),
        ("llama", "cpu", "flash_attention_2"),
    ],
)
def test_wrong_attention_is_refused(name, device, wanted):
    config = TINY[name][0]()
    with pytest.raises(RecipeError, match=rf"model.attn_implementation: '{wanted}' .*Usable here: auto"):
        attention_for(family_for(config), config, device, wanted)


def test_sdpa_would_drop_the_soft_cap():
    """The reason for the refusal: scores above the cap change the logits."""
    config = tf.Gemma2Config(**HEAD8, query_pre_attn_scalar=8, attn_logit_softcapping=0.5)
    free = tf.Gemma2Config(**HEAD8, query_pre_attn_scalar=8, attn_logit_softcapping=None)
    assert attention_for(family_for(free), free, "cpu") in ("sdpa", "eager")  # 5.24 marks the class as without sdpa
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        parameter.data.mul_(5 if parameter.ndim > 1 else 1)
    twin = tf.AutoModelForCausalLM.from_config(free, attn_implementation="eager")
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        gap = (model(ids()).logits - twin(ids()).logits).abs().max()
    assert gap > 1e-3


@pytest.mark.parametrize("name", tables.FAMILIES)
def test_rows_of_the_table(name):
    family = tables.load(tables.FAMILIES, name)
    assert isinstance(family, Family)
    assert family.name == name
    batch = family.inputs({"input_ids": ids()})
    assert set(batch) == {"input_ids", *family.text_inputs}
    assert all(torch.equal(batch[k], torch.zeros_like(ids())) for k in family.text_inputs)


def test_a_row_named_like_the_type_is_taken(monkeypatch):
    assert family_for(tf.LlamaConfig()).name == "generic"
    monkeypatch.setitem(tables.FAMILIES, "llama", tables.FAMILIES["molmo2"])
    assert family_for(tf.LlamaConfig()).name == "molmo2"


ALL_TYPES = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})


def shrink(config, depth=0):
    """At most four layers, in sub-configs too, where a config lets itself be cut."""
    for key in ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth"):
        if isinstance(value := getattr(config, key, None), int) and value > 4:
            setattr(config, key, 4)
    for key in ("layer_types", "mlp_layer_types", "layers_block_type"):
        if isinstance(value := getattr(config, key, None), list) and len(value) > 4:
            setattr(config, key, value[:4])
    for value in vars(config).values() if depth < 2 else ():
        if isinstance(value, tf.PreTrainedConfig):
            shrink(value, depth + 1)
    return config


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL_TYPES)
def test_every_type_of_transformers_is_served_or_refused_by_name(kind):
    try:
        config = CONFIG_MAPPING[kind]()
    except Exception as error:
        pytest.skip(f"no default config: {error!r:.80}")
    try:
        served = auto_class(config)
    except ModelError as error:
        refused = error.what
    else:
        refused = None
    if refused is not None:
        assert re.match(
            f"model type '{kind}' cannot be served: (it is an encoder|.* no causal language model|.* generates no text)", refused
        )
        return
    try:
        with torch.device("meta"):
            model = served.from_config(shrink(config), dtype=torch.bfloat16)
    except Exception as error:
        pytest.skip(f"its default config makes no model: {error!r:.80}")
    family = family_for(config)
    family.freeze(model)
    section = LoraSection(rank=2)
    try:
        targets = adapters.lora_targets(model, section, family)
    except RecipeError as error:
        if "under another name" not in error.what:
            raise
        return
    adapters.inject(model, adapters.peft_config(model, section, targets, "base"), targets)
    assert adapters.coverage(model, family).adapted == len(targets)
    for device in ("cpu", "cuda"):
        assert attention_for(family, config, device) in ("sdpa", "eager", "flex_attention")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "gemma3 text", "llama"])
def test_backend_chosen_on_a_gpu_gives_the_eager_logits(name):
    model, config, family = make(name, head_dim=16)  # the least that flex_attention takes
    x = ids(2, 32).cuda()
    with torch.no_grad():
        eager = model.cuda()(x, use_cache=False).logits
        model.set_attn_implementation(attention_for(family, config, "cuda", packed=True))
        torch.testing.assert_close(model(x, use_cache=False).logits, eager, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ({"packed": True, "joined": True, "half": True}, "varlen"),
        ({"joined": True, "half": True}, "varlen"),
        ({"packed": True, "joined": True}, "flex_attention"),  # fp32 has no such kernel
        ({"joined": True}, "sdpa"),
        ({"half": True}, "sdpa"),
    ],
    ids=str,
)
def test_joined_rows_get_the_fastest_backend_of_a_gpu(how, wanted):
    config = tf.LlamaConfig(hidden_size=32, num_attention_heads=4, vocab_size=272)
    assert attention_for(family_for(config), config, "cuda", **how) == wanted
    assert attention_for(family_for(config), config, "cpu", **how) == "sdpa"
