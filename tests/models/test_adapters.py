"""Adapters: targets and their errors, first values, files, shards, existing adapters, coverage."""

import json
import math
import tempfile
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers as tf
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from swiftlite.models import adapters
from swiftlite.models.adapter_files import slots
from swiftlite.models.families.lookup import family_for
from swiftlite.models.names import base_name
from swiftlite.models.placing import fill
from swiftlite.models.targets import short_names
from swiftlite.recipe.errors import ModelError, RecipeError
from swiftlite.recipe.schema import LoraSection, Recipe

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
X = torch.randint(3, 60, (2, 10), generator=torch.Generator().manual_seed(1))


def llama(device="cpu", dtype=torch.float32, **kw):
    torch.manual_seed(0)
    with torch.device(device):
        return tf.AutoModelForCausalLM.from_config(tf.LlamaConfig(**SMALL | kw), dtype=dtype).eval()


def mixtral(device="cpu"):
    torch.manual_seed(0)
    config = tf.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2)
    with torch.device(device):
        return tf.AutoModelForCausalLM.from_config(config).eval()


def attach(model, tokens=(), seed=0, **lora):
    section = LoraSection(**{"rank": 4, "alpha": 8} | lora)
    targets = adapters.lora_targets(model, section, family_for(model.config))
    peft = adapters.inject(model, adapters.peft_config(model, section, targets, "org/base", "v1", tokens), targets)
    adapters.init_adapters(peft, section, seed, "cpu")
    return peft


def stir(peft):
    """Gives every trained tensor its own values, as training would."""
    torch.manual_seed(5)
    for parameter in peft.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return peft


def logits(model):
    with torch.no_grad():
        return model(input_ids=X, use_cache=False).logits


def targets_of(model, **lora):
    return adapters.lora_targets(model, LoraSection(**lora), family_for(model.config))


class TestTargets:
    def test_list_matches_last_parts(self):
        found = targets_of(llama("meta"), target_modules=["layers.1.self_attn.q_proj", "v_proj"])
        attention = "model.layers.{}.self_attn.{}"
        assert found == [attention.format(0, "v_proj"), attention.format(1, "q_proj"), attention.format(1, "v_proj")]

    def test_regex_matches_the_whole_name(self):
        assert targets_of(llama("meta"), target_modules=r".*\.0\..*(q|v)_proj") == [
            "model.layers.0.self_attn.q_proj",
            "model.layers.0.self_attn.v_proj",
        ]

    def test_exclude_and_modules_trained_in_full_are_left_out(self):
        found = targets_of(
            llama("meta"), exclude_modules=["layers.0.mlp.up_proj", "down_proj"], modules_to_save=["layers.1.self_attn"]
        )
        assert {n.rpartition(".")[2] for n in found} == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}
        assert "model.layers.0.mlp.up_proj" not in found
        assert "model.layers.1.mlp.up_proj" in found
        assert not any("layers.1.self_attn" in n for n in found)

    @pytest.mark.parametrize(
        ("lora", "says"),
        [
            ({"target_modules": ["q_prj"]}, r"lora.target_modules: 'q_prj' matches no module. Did you mean 'q_proj'?"),
            ({"target_modules": ["mlp.upproj"]}, r"Did you mean 'mlp.up_proj'?"),
            ({"target_modules": ["q_proj", "nothing_like_it"]}, r"'nothing_like_it' matches no module."),
            ({"target_modules": ["self_attn"]}, r"'self_attn' is a LlamaAttention.* k_proj, o_proj, q_proj, v_proj"),
            ({"target_modules": ["norm"]}, r"'norm' is a LlamaRMSNorm"),
            ({"target_modules": "q_proj"}, r"'q_proj' matches no linear layer's whole name. Write it as a list: \[q_proj\]"),
            ({"target_modules": "(q"}, r"'\(q' is no regular expression"),
            ({"exclude_modules": ["q_prj"]}, r"lora.exclude_modules: 'q_prj' matches no module. Did you mean 'q_proj'?"),
            ({"modules_to_save": ["lm_heed"]}, r"lora.modules_to_save: 'lm_heed' matches no module. Did you mean 'lm_head'?"),
            ({"target_modules": ["lm_head"], "modules_to_save": ["lm_head"]}, r"'lm_head' would be adapted and trained in full"),
            ({"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]}, r"no module of LlamaForCausalLM is left"),
        ],
    )
    def test_what_matches_nothing_is_an_error(self, lora, says):
        with pytest.raises(RecipeError, match=says):
            targets_of(llama("meta"), **lora)

    def test_names_that_peft_reads_as_experts_are_refused(self):
        config = tf.Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, mlp_only_layers=[0])
        with torch.device("meta"):
            model = tf.AutoModelForCausalLM.from_config(config)
        assert isinstance(model.model.layers[0].mlp.up_proj, torch.nn.Linear)
        assert not any("mlp" in n for n in targets_of(model))
        for targets in (["up_proj"], r".*up_proj"):
            with pytest.raises(RecipeError, match="fused experts"):
                targets_of(model, target_modules=targets)

    def test_short_names_select_exactly_the_targets(self):
        everything = ["a", "a.q", "a.k", "b", "b.q", "c.d.k", "lm.q"]
        assert short_names(["a.k", "c.d.k"], everything) == ["k"]
        assert short_names(["a.q", "b.q"], everything) == ["a.q", "b.q"]
        assert short_names(["x.1.a.q", "x.2.a.q"], ["x.1.a.q", "x.2.a.q", "x.1.b.q"]) == ["a.q"]
        assert short_names(["t.1.q", "t.2.q"], ["t.1.q", "t.2.q", "v.1.q"]) == ["2.q", "t.1.q"]


class TestInjection:
    @pytest.mark.parametrize("lora", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head", "norm"]}], ids=str)
    @pytest.mark.parametrize("tied", [False, True])
    def test_on_meta(self, lora, tied):
        model = llama("meta", torch.bfloat16, tie_word_embeddings=tied)
        section = LoraSection(**lora)
        targets = adapters.lora_targets(model, section, family_for(model.config))
        peft = adapters.inject(model, adapters.peft_config(model, section, targets, "org/base"), targets)
        assert peft.base_model.model is model
        assert all(t.is_meta for t in [*model.parameters()])
        trained = [p for p in model.parameters() if p.requires_grad]
        assert {p.dtype for p in trained} == {torch.float32}
        assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
        assert {id(s.tensor) for s in slots(model).values()} == {id(p) for p in trained}

    def test_config_is_plain_and_repeatable(self, tmp_path):
        for run in ("a", "b"):
            adapters.save_adapter(attach(llama(), use_rslora=True, dropout=0.1), tmp_path / run)
        texts = [(tmp_path / run / "adapter_config.json").read_bytes() for run in ("a", "b")]
        assert texts[0] == texts[1]
        config = json.loads(texts[0])
        assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
        assert (config["base_model_name_or_path"], config["revision"]) == ("org/base", "v1")
        said = {k: config[k] for k in ("r", "lora_alpha", "use_rslora", "lora_dropout", "peft_type", "task_type", "bias")}
        assert said == {
            "r": 4,
            "lora_alpha": 8,
            "use_rslora": True,
            "lora_dropout": 0.1,
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "bias": "none",
        }

    def test_a_vision_tower_with_the_same_names_forces_whole_names(self):
        text = SMALL | {"model_type": "llama"}
        vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
        config = tf.LlavaConfig(text_config=text, vision_config=vision | {"model_type": "clip_vision_model", "patch_size": 14})
        with torch.device("meta"):
            model = tf.AutoModelForImageTextToText.from_config(config)
        targets = targets_of(model)
        names = adapters.peft_config(model, LoraSection(), targets, "b").target_modules
        assert {"gate_proj", "up_proj", "down_proj", "o_proj", "model.language_model.layers.1.self_attn.q_proj"} <= set(names)
        peft = adapters.inject(model, adapters.peft_config(model, LoraSection(), targets, "b"), targets)
        assert len(slots(peft.base_model.model)) == 2 * len(targets)
        assert not any("vision" in key for key in slots(model))

    def test_adapters_elsewhere_than_asked_are_noticed(self):
        model = llama("meta")
        config = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
        with pytest.raises(ModelError, match=r"instead of 1; they differ in model\.layers\.1\.self_attn"):
            adapters.inject(model, config, ["model.layers.0.self_attn.q_proj"])


class TestFirstValues:
    def test_are_pefts_distribution(self):
        places = slots(attach(llama(hidden_size=256), rank=16).base_model.model)
        a = torch.stack([s.tensor for k, s in places.items() if "q_proj.lora_A" in k])
        bound = 1 / math.sqrt(256)
        assert a.abs().max() <= bound
        assert a.abs().max() > 0.99 * bound
        assert abs(a.std() - bound / math.sqrt(3)) < 0.02 * bound
        assert all((s.tensor == 0).all() for s in places.values() if s.kind == "lora_B")
        gauss = slots(attach(llama(hidden_size=256), rank=16, init="gaussian").base_model.model)
        a = torch.stack([s.tensor for k, s in gauss.items() if "q_proj.lora_A" in k])
        assert abs(a.std() * 16 - 1) < 0.05

    def test_depend_on_seed_and_name_alone(self):
        one, same = (adapters.adapter_state(attach(llama())) for _ in range(2))
        other, fewer = (
            adapters.adapter_state(attach(llama(), seed=1)),
            adapters.adapter_state(attach(llama(), target_modules=["v_proj"])),
        )
        assert all(torch.equal(one[k], same[k]) for k in one)
        first = [k for k in one if "lora_A" in k]
        assert not any(torch.equal(one[k], other[k]) for k in first)
        assert not torch.equal(one[first[0]], one[first[0].replace("layers.0", "layers.1")])
        assert all(torch.equal(one[k], v) for k, v in fewer.items())
        # The very numbers: adapters of a seed are the same on every machine and version.
        key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        torch.testing.assert_close(one[key][0, :3], torch.tensor([0.01482686, -0.16890688, 0.03501126]), rtol=0, atol=1e-6)

    def test_dora_starts_as_the_base_model(self):
        peft, bare = attach(llama(), use_dora=True), llama()
        torch.testing.assert_close(logits(peft), logits(bare), rtol=0, atol=1e-6)
        config = LoraConfig(r=4, lora_alpha=8, use_dora=True, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        theirs = get_peft_model_state_dict(get_peft_model(llama(), config))
        ours = adapters.adapter_state(peft)
        magnitudes = [k for k in theirs if k.endswith("lora_magnitude_vector")]
        assert len(magnitudes) == 4
        for key in magnitudes:
            torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=1e-6)

    def test_dora_on_gpt2_takes_columns(self):
        torch.manual_seed(0)
        config = tf.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4)
        bare = tf.AutoModelForCausalLM.from_config(config).eval()
        expected = logits(bare)
        torch.testing.assert_close(logits(attach(bare, use_dora=True)), expected, rtol=0, atol=1e-6)

    def test_adapted_embedding_starts_as_the_base_model(self):
        bare = llama()
        expected = logits(bare)
        peft = attach(bare, target_modules=["embed_tokens", "q_proj"])
        torch.testing.assert_close(logits(peft), expected)
        state = adapters.adapter_state(peft)
        assert state["base_model.model.model.embed_tokens.lora_embedding_B"].std() > 0.5
        assert not any("base_layer" in k for k in state)


def reload(peft, folder, base):
    """What plain peft makes of a saved adapter."""
    adapters.save_adapter(peft, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return PeftModel.from_pretrained(base, folder).eval()


class TestFiles:
    @pytest.mark.parametrize(
        "lora",
        [
            {},
            {"use_rslora": True, "init": "gaussian"},
            {"use_dora": True},
            {"target_modules": ["q_proj", "embed_tokens"]},
            {"target_modules": r".*layers\.1\..*_proj"},
            {"modules_to_save": ["norm"]},
            {"modules_to_save": ["lm_head"]},
            {"modules_to_save": ["embed_tokens", "lm_head"], "target_modules": ["q_proj"]},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("tied", [False, True])
    def test_plain_peft_reloads(self, lora, tied, tmp_path):
        peft = stir(attach(llama(tie_word_embeddings=tied), **lora))
        loaded = reload(peft, tmp_path, llama(tie_word_embeddings=tied))
        assert (logits(peft) - logits(llama(tie_word_embeddings=tied))).abs().max() > 1e-3
        torch.testing.assert_close(logits(loaded), logits(peft), rtol=0, atol=1e-6)
        again = attach(llama(tie_word_embeddings=tied), seed=9, **lora)
        adapters.load_adapter_weights(again, tmp_path)
        torch.testing.assert_close(logits(again), logits(peft), rtol=0, atol=0)

    @pytest.mark.parametrize("entries", [["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]])
    def test_a_tied_weight_trained_in_full_stays_one(self, entries):
        model = llama(tie_word_embeddings=True)
        peft = attach(model, modules_to_save=entries)
        inner, outer = (m.modules_to_save["default"].weight for m in (model.model.embed_tokens, model.lm_head))
        assert inner is outer
        assert inner.requires_grad
        assert torch.equal(inner, model.model.embed_tokens.original_module.weight)
        state = adapters.adapter_state(peft)
        assert torch.equal(state["base_model.model.lm_head.weight"], state["base_model.model.model.embed_tokens.weight"])

    @pytest.mark.parametrize("tied", [False, True])
    def test_rows_of_added_tokens(self, tied, tmp_path):
        base = llama(tie_word_embeddings=tied)
        expected = logits(base)
        peft = attach(base, tokens=[61, 62])
        torch.testing.assert_close(logits(peft), expected)
        rows = {k: v for k, v in adapters.adapter_state(peft).items() if "trainable_tokens" in k}
        assert len(rows) == (1 if tied else 2)
        assert all(torch.equal(v, w) for v, w in zip(rows.values(), _rows(base, tied), strict=True))
        stir(peft)
        loaded = reload(peft, tmp_path, llama(tie_word_embeddings=tied))
        torch.testing.assert_close(logits(loaded), logits(peft), rtol=0, atol=1e-6)
        gap = (logits(peft) - expected).abs()
        assert gap[..., 61:63].max() > 1e-3

    def test_rows_of_an_embedding_trained_in_full_need_no_own(self):
        config = adapters.peft_config(llama("meta"), LoraSection(modules_to_save=["embed_tokens", "lm_head"]), [], "b", None, [5])
        assert config.trainable_token_indices is None

    def test_pickled_weights_are_read_safely(self, tmp_path):
        peft = stir(attach(llama()))
        adapters.save_adapter(peft, tmp_path)
        torch.save(load_file(tmp_path / "adapter_model.safetensors"), tmp_path / "adapter_model.bin")
        (tmp_path / "adapter_model.safetensors").unlink()
        again = attach(llama(), seed=9)
        adapters.load_adapter_weights(again, tmp_path)
        assert torch.equal(logits(again), logits(peft))
        torch.save({"x": SimpleNamespace()}, tmp_path / "adapter_model.bin")
        with pytest.raises(ModelError, match="cannot be read"):
            adapters.load_adapter_weights(again, tmp_path)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"peft_type": "IA3"}, "'IA3'; only LORA"),
            ({"task_type": "SEQ_CLS"}, "SEQ_CLS"),
            ({"init_lora_weights": "pissa"}, "'pissa', which changed the base weights"),
            ({"bias": "all"}, "'bias'"),
            ({"layer_replication": [[0, 2]]}, "'layer_replication'"),
        ],
        ids=str,
    )
    def test_configs_that_mean_something_else_are_refused(self, change, says, tmp_path):
        adapters.save_adapter(attach(llama()), tmp_path)
        path = tmp_path / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        with pytest.raises(ModelError, match=says):
            adapters.read_adapter_config(tmp_path)

    def test_no_adapter(self, tmp_path):
        with pytest.raises(ModelError, match="no adapter here"):
            adapters.read_adapter_config(tmp_path)
        (tmp_path / "adapter_config.json").write_text("{")
        with pytest.raises(ModelError, match="no JSON"):
            adapters.read_adapter_config(tmp_path)
        with pytest.raises(ModelError, match="no adapter here"):
            adapters.load_adapter_weights(attach(llama()), tmp_path)


def _rows(model, tied):
    inner = model.model.embed_tokens.token_adapter.base_layer.weight[[61, 62]]
    return [inner] if tied else [inner, model.lm_head.token_adapter.base_layer.weight[[61, 62]]]


class TestExistingAdapter:
    """Going on from `model.adapter`."""

    @pytest.fixture
    def folder(self, tmp_path):
        adapters.save_adapter(stir(attach(llama(), rank=2, alpha=6, target_modules=["q_proj", "v_proj"])), tmp_path)
        return tmp_path

    def go_on(self, folder, **lora):
        recipe = Recipe.model_validate({"model": {"name": "x", "adapter": str(folder)}, "lora": lora})
        model = llama()
        files, tokenizer = SimpleNamespace(base_id="org/base", revision=None), None
        peft, notes = adapters.attach(model, recipe, family_for(model.config), files, tokenizer)
        adapters.init_adapters(peft, recipe.lora, 0, "cpu")
        adapters.load_adapter_weights(peft, folder)
        return peft, notes

    def test_its_shape_wins_where_the_recipe_is_silent(self, folder):
        peft, notes = self.go_on(folder)
        config = peft.peft_config["default"]
        assert (config.r, config.lora_alpha, config.inference_mode) == (2, 6, False)
        assert notes == [f"going on from {folder}: rank 2, alpha 6"]
        expected = load_file(folder / "adapter_model.safetensors")
        state = adapters.adapter_state(peft)
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[k], expected[k]) for k in state)
        assert all(s.tensor.requires_grad for s in slots(peft.base_model.model).values())

    def test_repeating_it_is_fine(self, folder):
        self.go_on(folder, rank=2, alpha=6, target_modules=["v_proj", "q_proj"], use_dora=False)

    @pytest.mark.parametrize(
        ("lora", "says"),
        [
            ({"rank": 4}, r"lora.rank: 4 contradicts .* which has 2"),
            ({"rank": 2, "alpha": 5}, r"lora.alpha: 5.0 contradicts .* which has 6"),
            ({"use_dora": True}, r"lora.use_dora: True contradicts .* False"),
            ({"modules_to_save": ["lm_head"]}, r"lora.modules_to_save: \['lm_head'\] contradicts .* \[\]"),
            (
                {"target_modules": "all-linear"},
                r"all-linear contradicts .* \['q_proj', 'v_proj'\]: they differ in model.layers.0.mlp",
            ),
        ],
        ids=str,
    )
    def test_a_contradiction_names_both(self, folder, lora, says):
        with pytest.raises(RecipeError, match=says):
            self.go_on(folder, **lora)

    def test_dropout_is_free(self, folder):
        peft, _ = self.go_on(folder, dropout=0.25)
        assert peft.peft_config["default"].lora_dropout == 0.25


class TestCoverage:
    def test_counts(self):
        model = mixtral()
        family = family_for(model.config)
        attach(model)
        report = adapters.coverage(model, family)
        assert report.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
        bare = mixtral()
        assert report.total == report.trainable + sum(p.numel() for p in bare.parameters())
        assert report.adapted == 8
        block = sum(p.numel() for n, p in bare.named_parameters() if "layers" in n)
        attention = sum(p.numel() for n, p in bare.named_parameters() if "_proj.weight" in n and "self_attn" in n)
        assert (report.block_weights, report.uncovered) == (block, block - attention)
        parts = {u.part: u for u in report.untrained}
        assert parts["experts"].classes == "2 x MixtralExperts"
        assert parts["experts"].parameters == sum(p.numel() for n, p in bare.named_parameters() if "experts" in n)
        assert parts["router"].parameters == sum(p.numel() for n, p in bare.named_parameters() if "mlp.gate." in n)
        assert {"norms", "head", "embeddings"} <= parts.keys()
        assert sum(u.parameters for u in report.untrained) == sum(p.numel() for p in bare.parameters()) - attention
        text = "\n".join(report.lines())
        assert f"trainable {report.trainable:,} of {report.total:,}" in text
        assert "router: 2 x Mixtral" in text

    def test_tokens_and_modules_in_full(self):
        model = llama()
        attach(model, tokens=[61], modules_to_save=["norm"])
        parts = {u.part: u.parameters for u in adapters.coverage(model, family_for(model.config)).untrained}
        assert parts["embeddings"] == 64 * 32  # one row trains, the rest does not
        assert "outside the blocks" not in parts

    def test_full_tuning(self):
        model = llama("meta")
        report = adapters.coverage(model, family_for(model.config))
        assert (report.trainable, report.uncovered, report.untrained) == (report.total, 0, [])
        assert len(report.lines()) == 1
        adapters.select_trainable(model, ["*.layers.1.*"])
        report = adapters.coverage(model, family_for(model.config))
        assert report.uncovered_share == 0.5


class TestTrainable:
    def test_patterns(self):
        model = llama("meta")
        names = adapters.select_trainable(model, ["model.layers.1.*", "*norm.weight"])
        assert {n for n, p in model.named_parameters() if p.requires_grad} == set(names)
        assert "model.norm.weight" in names
        assert "model.layers.1.mlp.up_proj.weight" in names
        assert "model.layers.0.mlp.up_proj.weight" not in names

    def test_none_is_everything(self):
        model = llama("meta")
        assert len(adapters.select_trainable(model, None)) == len(list(model.parameters()))

    def test_a_tied_head_has_a_name_of_its_own(self):
        model = llama(tie_word_embeddings=True)
        assert adapters.select_trainable(model, ["lm_head.weight"]) == ["lm_head.weight"]
        assert model.model.embed_tokens.weight.requires_grad

    def test_unmatched(self):
        with pytest.raises(
            RecipeError, match=r"train.trainable: 'model.norms.weight' matches no weight. Did you mean 'model.norm.weight'?"
        ):
            adapters.select_trainable(llama("meta"), ["*.layers.*", "model.norms.weight"])


def _rank(rank, world, store, out, lora):
    """One rank: built on meta, adapted, sharded, filled; then the state that two ranks gather, and that they gather of a file."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        full, model = llama().state_dict(), llama("meta")
        section = LoraSection(rank=3, **lora)
        targets = adapters.lora_targets(model, section, family_for(model.config))
        peft = adapters.inject(model, adapters.peft_config(model, section, targets, "b"), targets)
        mesh = init_device_mesh("cpu", (world,))
        for block in family_for(model.config).blocks(model):
            fully_shard(model.get_submodule(block), mesh=mesh)
        fully_shard(model, mesh=mesh)
        for name, _ in list(model.named_parameters(remove_duplicate=False)):
            if (base := base_name(name)) is not None:
                owner, _, attribute = name.rpartition(".")
                fill(model.get_submodule(owner), attribute, full[base], "cpu")
        adapters.init_adapters(peft, section, 0, "cpu")
        assert all(isinstance(p, DTensor) and not p.is_meta for p in model.parameters())
        started = adapters.adapter_state(peft)
        adapters.load_adapter_weights(peft, out)
        adapters.save_adapter(peft, f"{out}/again")
        model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
        loss = model(input_ids=X, labels=X, use_cache=False).loss
        loss.backward()
        if rank == 0:
            torch.save((started, loss.detach()), f"{out}/started.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("lora", [{"use_dora": True}, {"modules_to_save": ["lm_head", "norm"]}], ids=str)
def test_two_ranks_hold_the_same_adapter(lora, tmp_path):
    alone = attach(llama(), rank=3, alpha=None, **lora)
    expected = adapters.adapter_state(alone)
    adapters.save_adapter(stir(alone), tmp_path)
    loss = alone(input_ids=X, labels=X, use_cache=False).loss
    with tempfile.TemporaryDirectory() as store:
        mp.start_processes(_rank, (2, f"{store}/s", str(tmp_path), lora), nprocs=2, start_method="fork")
    started, sharded_loss = torch.load(tmp_path / "started.pt")
    assert list(started) == list(expected)
    for key in expected:
        torch.testing.assert_close(started[key], expected[key], rtol=0, atol=0)
    again, first = (load_file(f"{folder}/adapter_model.safetensors") for folder in (tmp_path / "again", tmp_path))
    assert all(torch.equal(again[k], first[k]) for k in first)
    torch.testing.assert_close(sharded_loss, loss.detach(), rtol=1e-6, atol=1e-6)
