"""Blocks that take a batch a few rows at a time learn the same, and keep less while they are recomputed."""

import pytest
import torch
import transformers

from swiftlite.dist.launch import ranks
from swiftlite.dist.world import leave
from swiftlite.models import blocks
from swiftlite.models.adapters import init_adapters, inject, lora_targets, peft_config
from swiftlite.models.blocks import rows_of_slice, unwrap_blocks, wrap_blocks
from swiftlite.recipe.resolve import resolve
from swiftlite.recipe.schema import LoraSection
from swiftlite.train.console import Console
from swiftlite.train.plan import make_plan
from swiftlite.train.run import Run
from tests.models.test_families import TINY, ids, make
from tests.ranks import run_ranks
from tests.train.test_ranks import assert_same, one, spread, steps
from tests.training import LORA, model_folder, recipe, token_rows

FULL = {"gradient_checkpointing": "full"}
SLICED = {**FULL, "activation_offload": True}  # slices save memory where memory is wanted


@pytest.fixture(autouse=True)
def no_group_left():
    yield
    leave()


@pytest.fixture
def calls(monkeypatch):
    """Rows of the blocks' passes, with slices of 40 tokens."""
    monkeypatch.setattr(blocks, "SLICE", 40)
    seen, plain = [], blocks._full

    def watched(block, *args, **kwargs):
        seen.append(len(args[0] if args else kwargs["hidden_states"]))
        return plain(block, *args, **kwargs)

    monkeypatch.setattr(blocks, "_full", watched)
    return seen


def sliced(path, kind="LLAMA", method="lora", strategy="none", micro=8, **keys):
    return one(path, kind, method, strategy, micro, **{**SLICED, **keys})


def test_how_many_rows_a_slice_has():
    for rows, tokens, expected in [
        (4, 4096, 1), (8, 1024, 4), (8, 512, 0), (9, 512, 8), (1, 9000, 0), (3, 9000, 1), (7, 600, 6), (4096, 4096, 0),
    ]:  # fmt: skip
        assert rows_of_slice(rows, tokens) == expected


@pytest.mark.parametrize("kind", ["LLAMA", "GEMMA3", "QWEN3_MOE", "GPT_OSS"])
def test_slices_change_nothing(tmp_path, calls, kind):
    """Rows of 2 to 31 tokens, padded; experts get each token from another slice."""
    expected = steps(one(tmp_path, kind, "lora", "none", 8), 2)
    assert calls == []
    assert_same(steps(sliced(tmp_path, kind), 2), expected)
    assert set(calls) == {1}  # 8 rows of 31 tokens, one at a time


def test_in_sixteen_bits(tmp_path, calls):
    """Adapters sum their gradients over slices in fp32, so that slices add no error of their own."""
    exact = steps(one(tmp_path, "LLAMA", "lora", "none", 8), 1)
    errors = []
    for loaded in (one(tmp_path, "LLAMA", "lora", "none", 8, precision="bf16"), sliced(tmp_path, precision="bf16")):
        found = steps(loaded, 1)
        assert found["loss"] == pytest.approx(exact["loss"], rel=2e-3)
        errors.append(max(float((found["grads"][n] - g).norm() / g.norm()) for n, g in exact["grads"].items()))
    assert set(calls) == {1} and errors[1] < 1.2 * errors[0] < 0.1


@pytest.mark.parametrize(("quantize", "expected"), [("nf4", {1}), ("fp8", {8}), (None, {8})])
def test_who_takes_slices(tmp_path, calls, quantize, expected):
    keys = {"quantize": quantize} if quantize else {}
    model_folder(tmp_path, "LLAMA", hidden_size=64, intermediate_size=128)
    given = {**FULL, "global_batch_size": 8, "per_device_train_batch_size": 8}
    steps(recipe(tmp_path, rows=token_rows([31] * 8), lora=LORA, train=given, **keys), 1)
    assert set(calls) == expected


def sliced_steps(loaded, count):
    blocks.SLICE = 40
    return steps(loaded, count)


@pytest.mark.parametrize(("strategy", "keys"), [("fsdp", {"offload": "params"}), ("zero2", {})])
def test_over_ranks(tmp_path, strategy, keys):
    expected = steps(one(tmp_path, "GEMMA3", "lora", "none", 8), 2)
    for found in run_ranks(2, sliced_steps, sliced(tmp_path, "GEMMA3", "lora", spread(strategy, 2, **keys), 4), 2):
        assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size"), [("LLAMA", 2), ("QWEN3_MOE", 2), ("GPT_OSS", 4)])
def test_over_ranks_of_every_strategy(tmp_path, kind, size):
    expected = steps(one(tmp_path, kind, "lora", "none", 8), 5)
    for strategy in ("ddp", "fsdp", "zero1", "zero2", "zero3", "hsdp"):
        for found in run_ranks(size, sliced_steps, sliced(tmp_path, kind, "lora", spread(strategy, size), 8 // size), 5):
            assert_same(found, expected)


@pytest.mark.slow
def test_compiled(tmp_path, calls):
    expected = steps(one(tmp_path, "LLAMA", "lora", "none", 8), 2)
    assert_same(steps(sliced(tmp_path, torch_compile=True), 2), expected)


def packs(path, attention, **train):
    keys = {"global_batch_size": 4, "per_device_train_batch_size": 4, "max_grad_norm": 1.0, "learning_rate": 1e-3, **train}
    sections = {"data": {"packing": True, "max_length": 48}, "train": keys}
    rows = token_rows([4, 6, 12, 20, 9, 31, 2, 17, 25, 33, 8, 7])
    model = {"attn_implementation": attention} if attention else {}
    loaded = recipe(path, rows=rows, lora=LORA, kind="LLAMA", **sections)
    if not model:
        return loaded
    return recipe(path, rows=rows, lora=LORA, **sections, model={"name": str(path / "llama"), **model})


@pytest.mark.parametrize(("attention", "slices"), [("sdpa", {1}), ("eager", {1}), ("varlen", {4})])
def test_packs_keep_their_positions(tmp_path, calls, attention, slices):
    """Masks and positions are cut with their rows; the borders that varlen hands on are of the whole batch, which stays whole."""
    expected = steps(packs(tmp_path, attention), 1)
    assert_same(steps(packs(tmp_path, attention, **SLICED), 1), expected)
    assert set(calls) == slices


@pytest.mark.parametrize(
    ("method", "keys"), [("full", {}), ("lora", {"router_aux_loss_coef": 0.01})], ids=["full fine-tuning", "balance loss"]
)
def test_what_takes_no_slices(tmp_path, calls, method, keys):
    """Weights trained in full would sum gradients in the compute type; the balance loss counts tokens by pass."""
    found = steps(sliced(tmp_path, "QWEN3_MOE", method, **keys), 1)
    assert set(calls) == {8}
    leave()
    assert_same(found, steps(one(tmp_path, "QWEN3_MOE", method, "none", 8, **keys), 1))


def test_evaluation_and_no_recomputation_take_no_slices(tmp_path, calls):
    steps(one(tmp_path, "LLAMA", "lora", "none", 8, gradient_checkpointing="selective"), 1)
    assert calls == []
    keys = {"max_steps": 1, "global_batch_size": 4, "per_device_train_batch_size": 4}
    run = Run(make_plan(recipe(tmp_path, lora=LORA, train={**SLICED, **keys})), Console(quiet=True))
    batch = run.to_model(run.plan.loader.group(0)[0].tensors)
    with torch.no_grad():
        run.objective.loss_sum(run.root, batch)
    run.root.eval()
    run.objective.loss_sum(run.root, batch)
    assert set(calls) == {4}


def test_a_slice_keeps_less(tmp_path, monkeypatch):
    """Memory that a backward pass takes beside what is there: all a block keeps, of the whole batch or of a slice."""
    peaks = []
    for slice_of in (4096, 64):
        monkeypatch.setattr(blocks, "SLICE", slice_of)
        keys = {"global_batch_size": 16, "per_device_train_batch_size": 16}
        loaded = recipe(tmp_path, rows=token_rows([64] * 16), lora=LORA, train={**SLICED, **keys})
        run = Run(make_plan(resolve(loaded, ranks().size)), Console(quiet=True))
        loss = run.objective.loss_sum(run.root, run.to_model(run.plan.loader.group(0)[0].tensors))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            loss.sum().backward()
        now = peak = 0
        for event in profile.profiler.kineto_results.events():
            now += event.nbytes() if event.name() == "[memory]" else 0
            peak = max(peak, now)
        peaks.append(peak)
    assert 0 < peaks[1] < peaks[0] / 3


FEW = ["llama", "bloom", "gpt2", "gpt_neox", "gemma3 text", "gpt_oss"]
OTHERS = [pytest.param(n, marks=pytest.mark.slow) for n in TINY if n not in FEW]


def learned(name, rows, sliced):
    own = TINY[name][0]().to_dict()
    model, _, family = make(name, **{k: 0.0 for k in own if "dropout" in k or "pdrop" in k})
    section = LoraSection(rank=4)
    targets = lora_targets(model, section, family)
    peft = inject(model, peft_config(model, section, targets, "base"), targets)
    init_adapters(peft, section, seed=0, device="cpu")
    for number, (kind, parameter) in enumerate(peft.named_parameters()):
        if "lora_B" in kind:
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.1
    model.train()
    names = family.blocks(model)
    wrap_blocks(model, names, "full", compiled=False, sliced=sliced)
    x = ids(rows, 12)
    mask = torch.ones_like(x)
    mask[0, 7:] = 0
    labels = x.masked_fill(mask == 0, -100)
    inputs = family.inputs({"input_ids": x, "attention_mask": mask})
    loss = model(**inputs, labels=labels, use_cache=False).loss
    loss.backward()
    unwrap_blocks(model, names)
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def falcon_alibi():
    config = TINY["falcon"][0]()
    config.alibi = True
    return config


def mpt():
    return transformers.MptConfig(vocab_size=96, d_model=32, n_layers=2, n_heads=4, max_seq_len=64)


@pytest.mark.parametrize("rows", [3, 4])
@pytest.mark.parametrize("name", [*FEW, *OTHERS, "falcon alibi", "mpt"])
def test_every_family_learns_the_same(name, rows, monkeypatch):
    """What else a block is given may be of all rows, of each or, as a bias of heads, of neither: four rows, and four heads."""
    monkeypatch.setitem(TINY, "mpt", (mpt, None, None))
    monkeypatch.setitem(TINY, "falcon alibi", (falcon_alibi, None, None))
    expected_loss, expected = learned(name, rows, sliced=False)
    monkeypatch.setattr(blocks, "SLICE", 12)
    loss, found = learned(name, rows, sliced=True)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    assert found.keys() == expected.keys()
    largest = max(g.norm() for g in expected.values())
    for key, grad in expected.items():
        if grad.norm() > 1e-6 * largest:
            assert (found[key] - grad).norm() <= 1e-5 * grad.norm(), key
