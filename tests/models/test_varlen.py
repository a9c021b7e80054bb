"""The varlen backend: joined rows compute what single rows compute, whatever carries their borders to the layers."""

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from transformers.masking_utils import create_bidirectional_sliding_window_mask, create_causal_mask

from swiftlite.dist.world import leave
from swiftlite.models import head, isolation, varlen
from swiftlite.models.families.lookup import attention_for, auto_class, family_for
from swiftlite.recipe.errors import RecipeError
from swiftlite.train.console import Console
from swiftlite.train.loop import train_step
from swiftlite.train.plan import make_plan
from swiftlite.train.run import Run
from tests.models.test_families import GQA, HEAD8, TINY, ids
from tests.training import recipe, token_rows

LENGTHS = [9, 5, 14, 1, 11]
# Beside the families of test_families: windows that come in other ways, some of them in every second layer.
WINDOWS = {
    "cohere2": lambda: tf.Cohere2Config(**GQA, sliding_window=4),
    "exaone4": lambda: tf.Exaone4Config(**GQA, sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
    "olmo3": lambda: tf.Olmo3Config(**GQA, sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
    "phi3": lambda: tf.Phi3Config(**GQA, sliding_window=4),
    "qwen2": lambda: tf.Qwen2Config(**GQA, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": lambda: tf.Qwen3Config(**HEAD8, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "smollm3": lambda: tf.SmolLM3Config(**GQA, use_sliding_window=True, sliding_window=4, no_rope_layers=[1, 0]),
    "starcoder2": lambda: tf.Starcoder2Config(**GQA, sliding_window=4),
}
# Query and key heads are larger than value heads here.
LATENT = {
    "deepseek_v3": lambda: tf.DeepseekV3Config(
        **GQA | {"num_key_value_heads": 4}, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8,
        first_k_dense_replace=2, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=16,
    ),
}  # fmt: skip


def right_for_varlen(config):
    try:
        return attention_for(family_for(config), config, "cpu", "varlen") == "varlen"
    except RecipeError:
        return False


MODELS = {name: config for name, (config, *_) in TINY.items()}
SERVED = [n for n in MODELS if right_for_varlen(MODELS[n]())] + [f"{n} windows" for n in WINDOWS] + [*LATENT]


def twins(name):
    """Two models of one kind with the same large weights: the reference, eager, and one on varlen."""
    kind = name.removesuffix(" windows")
    made = (WINDOWS if name.endswith(" windows") else {**MODELS, **LATENT})[kind]
    found = []
    for attention in ("eager", "varlen"):
        torch.manual_seed(0)
        config = made()
        for key, value in config.get_text_config().to_dict().items():
            if ("dropout" in key or "pdrop" in key) and isinstance(value, float):
                setattr(config.get_text_config(), key, 0.0)
        model = auto_class(config).from_config(config, dtype=torch.float32, attn_implementation=attention)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(3)
        found.append(model)
    varlen.attach(found[1])
    return found


def packs(*rows):
    """Token ids and positions [B, T] of packs of samples of these lengths, padded like `data.collate` does it."""
    width = max(map(sum, rows))
    drawn, positions = ids(len(rows), width), torch.zeros(len(rows), width, dtype=torch.int64)
    for row, lengths in zip(positions, rows, strict=True):
        row[: sum(lengths)] = torch.cat([torch.arange(n) for n in lengths])
    return drawn, positions


def pieces(tensor, *rows):
    """The samples of packs, in order."""
    return [part for row, lengths in zip(tensor, rows, strict=True) for part in row[: sum(lengths)].split(lengths)]


def reference(query, key, value, lengths, scale, window):
    """Attention by its definition over one flat row, in float64: query [H, T, D], key and value [K, T, D]."""
    q, k, v = (x.double() for x in (query, key, value))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    at = torch.arange(len(segment))
    back = at[:, None] - at
    seen = (segment[:, None] == segment) & (back >= 0) & (back < (window or len(at)))
    return (q @ k.mT * scale).masked_fill(~seen, -torch.inf).softmax(-1) @ v


def test_segments_begin_where_positions_do_not_go_on():
    _, positions = packs([3, 1, 4], [5], [2, 1, 1])
    found = varlen.segments_of(positions)
    # Row 0; row 1 and its padding; row 2, whose two one-token samples and padding are one.
    assert found.ends == (3, 4, 8, 13, 16, 18, 24)
    assert found.bounds.tolist() == [0, *found.ends] and found.bounds.dtype == torch.int32
    assert found.longest == 6
    assert varlen.segments_of(torch.arange(7)[None] + 3).ends == (7,)  # a row may begin anywhere


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize(("heads", "kv_heads", "value_size"), [(4, 4, 8), (4, 2, 8), (6, 2, 5)])
def test_attention_is_that_of_the_definition(heads, kv_heads, value_size, window):
    rows, width = [[9, 5, 6], [20]], 20
    torch.manual_seed(0)
    shapes = [(2, heads, width, 8), (2, kv_heads, width, 8), (2, kv_heads, width, value_size)]
    q, k, v = (torch.randn(s, requires_grad=True) for s in shapes)
    found, _ = varlen.attention(
        torch.nn.Module(), q, k, v, None, 0.3, sliding_window=window, segments=varlen.segments_of(packs(*rows)[1])
    )
    assert found.shape == (2, width, heads, value_size)
    flat = [x.transpose(0, 1).flatten(1, 2) for x in (q, k, v)]
    wanted = reference(*flat, [9, 5, 6, 20], 0.3, window).unflatten(1, (2, width)).permute(1, 2, 0, 3)
    torch.testing.assert_close(found, wanted.float(), rtol=0, atol=2e-6)
    weight = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad((found * weight).sum(), (q, k, v)),
        torch.autograd.grad((wanted * weight).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-6)


def kernel_211(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
    """torch 2.11's function: one head size in eights, window_size as (left, right); fewer key/value heads are grouped by itself,
    as benchmarks/attention.py found on a GPU."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0
    lengths = cu_seq_q.diff().tolist()
    assert cu_seq_q.dtype == torch.int32 and cu_seq_q is cu_seq_k and max_q == max_k == max(lengths) and window_size[1] == 0
    window = None if window_size[0] == -1 else window_size[0] + 1
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    return reference(q, k, v, lengths, scale, window).transpose(0, 1).to(query.dtype)


def kernel_213(query, key, value, *args, enable_gqa=False, **kwargs):
    """torch 2.13's: heads may be grouped where that is asked for."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    return kernel_211(query, key, value, *args, **kwargs)


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize(("kernel", "grouped"), [(kernel_211, False), (kernel_213, True)])
@pytest.mark.parametrize(("size", "value_size"), [(8, 8), (12, 8), (8, 6)])
def test_the_kernel_is_called_as_each_torch_wants_it(monkeypatch, kernel, grouped, window, size, value_size):
    rows = [[9, 5], [3, 2]]
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 14, size), torch.randn(2, 2, 14, size), torch.randn(2, 2, 14, value_size)
    given = {"sliding_window": window, "segments": varlen.segments_of(packs(*rows)[1])}
    plain, _ = varlen.attention(torch.nn.Module(), q, k, v, None, **given)
    monkeypatch.setattr(varlen, "_has_kernel", lambda query, value: True)
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(varlen, "GROUPED_HEADS", grouped)
    found, _ = varlen.attention(torch.nn.Module(), q, k, v, None, **given)
    torch.testing.assert_close(found, plain, rtol=0, atol=2e-6)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", SERVED)
def test_joined_rows_compute_what_single_rows_compute(name, recompute):
    rows = [LENGTHS, [20, 12]]
    single, joined = twins(name)
    inputs, positions = packs(*rows)
    if recompute:
        joined.train().gradient_checkpointing_enable({"use_reentrant": False})
    family = family_for(joined.config)
    call = [family.inputs({"input_ids": x[None]}) for x in pieces(inputs, *rows)]
    wanted = [single(**x, use_cache=False).logits[0] for x in call]
    found = joined(**family.inputs({"input_ids": inputs, "position_ids": positions}), use_cache=False).logits
    largest = torch.cat(wanted).abs().max().item()
    for ours, theirs in zip(pieces(found, *rows), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * max(1.0, largest))
    torch.cat(wanted).logsumexp(-1).sum().backward()
    torch.cat(pieces(found, *rows)).logsumexp(-1).sum().backward()
    named = dict(single.named_parameters())
    norm = torch.stack([p.grad.norm() for p in named.values() if p.grad is not None]).norm()
    gaps = [(p.grad - named[n].grad).norm() for n, p in joined.named_parameters() if p.grad is not None]
    assert norm > 0 and torch.stack(gaps).norm() <= 1e-4 * norm


def test_no_mask_is_made(monkeypatch):
    _, model = twins("mistral")
    inputs, positions = packs(LENGTHS)

    def refuse(*args, **kwargs):
        raise AssertionError("a mask of T x T")

    monkeypatch.setattr(varlen, "sdpa_mask", refuse)
    with torch.no_grad():
        model(input_ids=inputs, position_ids=positions, use_cache=False)
        with pytest.raises(AssertionError, match="T x T"):  # where one is needed, it would be noticed
            model(input_ids=inputs, attention_mask=torch.ones_like(inputs).index_fill(1, torch.tensor([0]), 0), use_cache=False)


@pytest.mark.parametrize("name", ["llama", "gemma3 vision-language", "opt"])
def test_borders_are_found_once_for_all_layers(monkeypatch, name):
    asked, plain = [], varlen.segments_of
    monkeypatch.setattr(varlen, "segments_of", lambda positions: asked.append(positions) or plain(positions))
    _, model = twins(name)
    inputs, positions = packs(LENGTHS)
    given = family_for(model.config).inputs({"input_ids": inputs, "position_ids": positions})
    head.attach(model)
    with torch.no_grad():
        head.own_forward(model, given)
        head.body(model, given)
    assert len(asked) == 2 and all(x is positions for x in asked)


def test_a_mask_of_the_classs_own_is_kept():
    config = tf.LlamaConfig(**GQA, sliding_window=2, attn_implementation="varlen")
    like = torch.zeros(1, 6, 32)
    assert create_causal_mask(config, like, None, None) is None
    found = create_causal_mask(config, like, None, None, or_mask_function=lambda b, h, q, k: k < 3)
    assert torch.equal(found[0, 0], torch.ones(6, 6).tril().bool() | (torch.arange(6) < 3))
    found = create_bidirectional_sliding_window_mask(config, like, None)
    assert found[0, 0, 0, 1] and not found[0, 0, 0, 5]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3 text"])
def test_padded_prompts_are_continued_as_on_other_backends(name):
    reference_model, model = twins(name)
    prompt, seen = ids(2, 12), torch.ones(2, 12, dtype=torch.int64)
    seen[0, :5] = 0
    with torch.no_grad():
        wanted, found = (m(prompt, attention_mask=seen, use_cache=False).logits[seen == 1] for m in (reference_model, model))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    for mask in (seen, None):
        given = {"input_ids": prompt, "attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        given = {k: v for k, v in given.items() if v is not None}
        assert model.eval().generate(**given).tolist() == reference_model.eval().generate(**given).tolist()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gemma2", "drops the soft cap on attention scores"),
        ("gpt_oss", "does not exist for this model"),
        ("bloom", "does not exist for this model"),
        ("falcon", "does not exist for this model"),
    ],
)
def test_models_that_need_more_are_refused_by_name(name, why):
    config = MODELS[name]()
    with pytest.raises(RecipeError, match=rf"'varlen' {why}.*\({config.model_type} on cuda\).*Usable here: auto") as fault:
        attention_for(family_for(config), config, "cuda", "varlen")
    assert "varlen" not in fault.value.fix
    llama = tf.LlamaConfig()
    with pytest.raises(RecipeError, match="Usable here: auto, sdpa, varlen, eager"):
        attention_for(family_for(llama), llama, "cpu", "flex_attention")


@pytest.mark.parametrize("name", varlen.REFUSED)
def test_what_a_class_asks_for_is_never_left_out(name):
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match=f"has no {name}"):
        varlen.attention(torch.nn.Module(), x, x, x, None, **{name: torch.ones(2)})


def test_borders_of_another_batch_are_refused():
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="5 tokens for a batch of 4"):
        varlen.attention(torch.nn.Module(), x, x, x, None, segments=varlen.segments_of(torch.arange(5)[None]))


def test_towers_look_both_ways():
    x = torch.randn(1, 2, 4, 8)
    tower = torch.nn.Module()
    tower.is_causal = False
    torch.testing.assert_close(varlen.attention(tower, x, x, x, None)[0], F.scaled_dot_product_attention(x, x, x).transpose(1, 2))


def test_dropout_that_is_asked_for_is_kept(monkeypatch):
    monkeypatch.setattr(varlen, "_has_kernel", lambda query, value: True)  # the kernel has none
    x = torch.randn(1, 2, 40, 8)
    torch.manual_seed(0)
    found = varlen.attention(torch.nn.Module(), x, x, torch.ones_like(x), None, dropout=0.5)[0]
    assert (found - 1).abs().max() > 0.1 and abs(found.mean() - 1) < 0.2


@pytest.fixture
def no_group_left():
    yield
    leave()


def step(tmp_path, data, **sections):
    keys = {"rows": token_rows([7, 13, 9, 12, 4, 11, 20, 6]), "kind": "GEMMA3", "data": data}
    sizes = {"global_batch_size": 64, "per_device_train_batch_size": 2, **sections.pop("train", {})}
    run = Run(make_plan(recipe(tmp_path, **keys, train=sizes, **sections)), Console(quiet=True))
    run.optimizer.zero_grad = lambda *a, **k: None
    return train_step(run, run.plan.loader.group(0), 0.0), run


@pytest.mark.parametrize("strategy", ["none", "fsdp"])
@pytest.mark.parametrize("data", [{"packing": True, "max_length": 29}, {"padding_free": True}, {}])
def test_a_run_learns_what_padded_rows_teach(tmp_path, no_group_left, data, strategy):
    wanted, _ = step(tmp_path, {}, model={"attn_implementation": "eager"})
    leave()
    report, run = step(
        tmp_path,
        data,
        model={"attn_implementation": "varlen"},
        strategy={"name": strategy},
        train={"gradient_checkpointing": True},
    )
    assert run.root.config._attn_implementation == "varlen"
    assert report.trained_tokens == wanted.trained_tokens
    assert report.loss == pytest.approx(wanted.loss, rel=1e-5) and report.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)


def test_a_class_that_loses_the_borders_is_refused(monkeypatch):
    """The trial on the model itself catches it: here, a body that hands nothing on."""
    _, model = twins("llama")
    plain = type(model.model).forward
    monkeypatch.setattr(type(model.model), "forward", lambda self, *args, segments=None, **more: plain(self, *args, **more))
    head.attach(model)
    isolation.attach(model)
    with pytest.raises(RecipeError, match="with varlen attention does not keep joined rows apart"):
        isolation.require(model.eval(), family_for(model.config), "data.packing", torch.device("cpu"))
    monkeypatch.undo()
    isolation.require(model, family_for(model.config), "data.packing", torch.device("cpu"))
