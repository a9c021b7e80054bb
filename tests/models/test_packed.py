"""Packed weights: the same bytes on every layout and in every pass, whatever they hold, and never the plain model beside them."""

import gc
import os

import pytest
import torch
from torch import nn

from swiftlite.dist.launch import ranks
from swiftlite.dist.strategies import FSDP
from swiftlite.dist.tensors import copy_into, local, part_of, whole
from swiftlite.dist.world import leave
from swiftlite.models import packed, weights
from swiftlite.models.packed import PackedLinear, packed_weights, stored_weights
from swiftlite.recipe.resolve import resolve
from swiftlite.train.console import Console
from swiftlite.train.loop import train_step
from swiftlite.train.plan import make_plan
from swiftlite.train.run import Run
from tests.ranks import run_ranks
from tests.training import LORA, model_folder, recipe, token_rows, train

NF4, DOUBLE, FP8 = {"method": "nf4"}, {"method": "nf4", "double_quant": True}, {"method": "fp8"}
# Four ranks do not divide 6 rows, which leave one of them without any, and 12 columns make no whole block.
ODD = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6}
EVEN = {"hidden_size": 64, "intermediate_size": 128}
EXPERTS = {"hidden_size": 64, "moe_intermediate_size": 64}
LENGTHS = [4, 6, 12, 20, 9, 31, 2, 17]
BOTH = [(NF4, "fp32"), (DOUBLE, "bf16"), (DOUBLE, "fp16"), (FP8, "bf16")]


@pytest.fixture(autouse=True)
def no_group_left():
    yield
    leave()


def made(path, quantize, strategy="none", kind="LLAMA", sizes=EVEN, **sections):
    model_folder(path, kind, **sizes)
    sections["train"] = {"global_batch_size": 8, "per_device_train_batch_size": 2, **sections.get("train", {})}
    sections = {"lora": LORA, **sections}
    return recipe(path, rows=token_rows(LENGTHS), kind=kind, quantize=quantize, strategy=strategy, **sections)


def started(loaded) -> Run:
    return Run(make_plan(resolve(loaded, ranks().size)), Console(quiet=True))


def carriers(root: nn.Module) -> dict[str, torch.Tensor]:
    """Every carrier's bytes by its parameter's name, gathered from all ranks."""
    found = {}
    for name, stored in stored_weights(root):
        for own, tensor in zip(stored.names.values(), stored.tensors(), strict=True):
            assert not tensor.requires_grad
            found[f"{name.rpartition('.')[0]}.{own}"] = whole(tensor).contiguous().view(torch.uint8).clone()
    return found


def loaded_bytes(loaded) -> tuple[dict[str, torch.Tensor], int, set[str]]:
    """The bytes of all carriers, how many of them lie here, and on which kinds of device."""
    run = started(loaded)
    here = [local(t) for _, s in stored_weights(run.root) for t in s.tensors()]
    return carriers(run.root), sum(t.numel() * t.element_size() for t in here), {t.device.type for t in here}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [n for n, b in expected.items() if not torch.equal(found[n], b)] == []


LAYOUTS = [
    (2, {"name": "fsdp"}),
    (2, {"name": "ddp"}),
    (4, {"name": "hsdp", "shard": 2}),
    (4, {"name": "zero3", "offload": "params"}),
]


@pytest.mark.parametrize("quantize", [NF4, DOUBLE, FP8], ids=["nf4", "double", "fp8"])
def test_bytes_are_those_of_one_process(tmp_path, quantize):
    alone, size, _ = loaded_bytes(made(tmp_path, quantize, sizes=ODD))
    assert any(n.endswith("k_proj.base_layer.packed") for n in alone)
    assert any("o_proj" in n for n in alone) == (quantize is FP8)  # float8 has no blocks
    leave()
    for count, strategy in [LAYOUTS[0], LAYOUTS[3]]:
        answers = run_ranks(count, loaded_bytes, made(tmp_path, quantize, strategy, sizes=ODD))
        for found, here, _ in answers:
            same(found, alone)
            assert here < 0.75 * size
        assert sum(here for _, here, _ in answers) == size


@pytest.mark.slow
@pytest.mark.parametrize(("quantize", "precision"), BOTH)
@pytest.mark.parametrize(("kind", "sizes"), [("LLAMA", ODD), ("LLAMA", EVEN), ("QWEN3_MOE", EXPERTS)])
def test_bytes_are_the_same_on_every_layout(tmp_path, kind, sizes, quantize, precision):
    keys = {"kind": kind, "sizes": sizes, "train": {"precision": precision}}
    alone, size, _ = loaded_bytes(made(tmp_path, quantize, **keys))
    leave()
    for count, strategy in LAYOUTS:
        divided = {"ddp": 1, "hsdp": 2}.get(strategy["name"], count)
        answers = run_ranks(count, loaded_bytes, made(tmp_path, quantize, strategy, **keys))
        for found, _, devices in answers:
            same(found, alone)
            assert devices == {"cpu"}
        assert sum(here for _, here, _ in answers) == size * count // divided


def loaded_and_trained(loaded, steps: int) -> tuple[dict, dict]:
    run = started(loaded)
    before = carriers(run.root)
    for step in range(steps):
        train_step(run, run.plan.loader.group(step), 0.01)
    return before, carriers(run.root)


@pytest.mark.parametrize("quantize", [DOUBLE, pytest.param(FP8, marks=pytest.mark.slow)], ids=["double", "fp8"])
def test_training_and_resuming_change_no_byte(tmp_path, quantize):
    saving = {"checkpoint": {"save_strategy": "steps", "save_steps": 1}, "train": {"max_steps": 2}}
    loaded = made(tmp_path, quantize, sizes=ODD, **saving)
    before, after = loaded_and_trained(loaded, 2)
    same(after, before)
    leave()
    train(loaded)
    leave()
    again = made(tmp_path, quantize, sizes=ODD, **{**saving, "checkpoint": {"resume": "auto"}})
    same(loaded_bytes(again)[0], before)
    leave()
    for found, later in run_ranks(2, loaded_and_trained, made(tmp_path, quantize, {"name": "zero2"}, sizes=ODD), 2):
        same(found, before)
        same(later, before)


# What the type of a carrier calls NaN, infinite, subnormal or negative zero, and every byte there is.
PATTERNS = {
    "bf16": [0x7FFF, 0xFF81, 0x7F81, 0x7F80, 0x0001, 0x8000, 0xFFFF],
    "fp16": [0x7FFF, 0xFC01, 0x7C01, 0x7C00, 0x0001, 0x8000, 0xFFFF],
    "fp32": [0x7FFFFFFF, 0x7F800001, 0xFF800001, 0xFFBFFFFF, 0x7F800000, 0x00000001, 0x80000000],
}


def hostile(name: str, like: torch.Tensor, precision: str) -> torch.Tensor:
    """A carrier of the shape of `like` that is half of random bytes, half of patterns."""
    size = 4 if precision == "fp32" else 2
    table = torch.tensor([list(p.to_bytes(size, "little")) for p in PATTERNS[precision]], dtype=torch.uint8)
    generator = torch.Generator().manual_seed(sum(name.encode()))
    words = torch.randint(0, 256, (like.numel(), size), generator=generator, dtype=torch.uint8)
    picked = torch.rand(like.numel(), generator=generator) < 0.5
    words[picked] = table[torch.randint(0, len(table), (int(picked.sum()),), generator=generator)]
    return words.flatten().view(like.dtype).reshape(like.shape)


def raw(tensor: torch.Tensor) -> bytes:
    # A copy, since FSDP2 could not free memory that numpy has seen.
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8).cpu().numpy().tobytes()


def seen_in_a_step(loaded, precision: str) -> list[str]:
    """Puts hostile bytes into all carriers, runs both passes, and compares what reached the products. Returns faults."""
    run = started(loaded)
    expected: dict[str, bytes] = {}
    for name, stored in stored_weights(run.root):
        for kind, own in stored.names.items():
            tensor = getattr(stored.owner, own)
            full = hostile(f"{name}.{kind}", torch.empty(tensor.shape, dtype=tensor.dtype), precision)
            local(tensor).view(torch.uint8).copy_(part_of(full, tensor).contiguous().view(torch.uint8))
            expected[f"{name}.{kind}"] = raw(full)
    known, faults = set(expected.values()), []
    for name, stored in stored_weights(run.root):
        assert stored.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        for kind, tensor in zip(stored.names, stored.tensors(), strict=True):
            if raw(whole(tensor)) != expected[f"{name}.{kind}"]:
                faults.append(f"{name}.{kind} as gathered for a reader")
    seen: dict[bool, set[bytes]] = {False: set(), True: set()}
    plain = packed._unpack

    def watched(tensors, method, dtype):
        way = torch._C._current_graph_task_id() >= 0
        for tensor in tensors:
            seen[way].add(raw(tensor))
        return torch.zeros_like(plain(tensors, method, dtype))  # numbers are of no interest, and NaN would spread

    packed._unpack = watched
    run.root.train()
    (micro, *_) = run.plan.loader.group(0)
    try:
        run.objective.loss_sum(run.root, run.to_model(micro.tensors)).sum().backward()
    finally:
        packed._unpack = plain
    # Nothing asks the first block for a gradient of its input, and experts stay unpacked, where they are not computed again.
    again = run.plan.checkpointing == "full"
    for way, found in seen.items():
        wanted = {n: b for n, b in expected.items() if again or not way or not (".layers.0." in n or ".experts." in n)}
        faults += [f"{n} in the {'backward' if way else 'forward'} pass" for n, b in wanted.items() if b not in found]
        faults += ["unknown bytes"] * len(found - known)
    return faults


@pytest.mark.parametrize(
    ("precision", "quantize", "strategy"),
    [
        ("bf16", DOUBLE, {"name": "fsdp"}),
        ("fp16", NF4, {"name": "zero2"}),
        ("fp32", DOUBLE, {"name": "fsdp", "offload": "params"}),
        ("bf16", FP8, {"name": "ddp"}),
    ],
)
def test_no_byte_changes_on_its_way_into_a_product(tmp_path, precision, quantize, strategy):
    """Gathering, casting and fetching must leave alone what would be NaN as a number: hardware makes signalling NaN quiet."""
    sections = {"train": {"precision": precision, "gradient_checkpointing": "full"}}
    loaded = made(tmp_path, quantize, strategy, sizes=ODD, **sections)
    assert run_ranks(2, seen_in_a_step, loaded, precision) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize(("quantize", "precision"), BOTH)
@pytest.mark.parametrize(("kind", "sizes"), [("LLAMA", ODD), ("QWEN3_MOE", EXPERTS)])
def test_no_byte_changes_on_any_layout(tmp_path, kind, sizes, quantize, precision):
    for count, strategy in [(1, {"name": "none"}), (1, {"name": "none", "offload": "params"}), *LAYOUTS]:
        sections = {"train": {"precision": precision, "gradient_checkpointing": "full" if count == 4 else "none"}}
        loaded = made(tmp_path, quantize, strategy, kind, sizes, **sections)
        assert run_ranks(count, seen_in_a_step, loaded, precision) == [[]] * count


def floating_bytes() -> int:
    """Memory of all tensors that are alive, each storage once."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("quantize", [pytest.param(NF4, marks=pytest.mark.slow), DOUBLE, FP8], ids=["nf4", "double", "fp8"])
def test_the_plain_model_is_never_held(tmp_path, monkeypatch, quantize):
    """While weights stream in there is what is packed already, what is never packed, and one weight that is being packed."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6}
    loaded = made(tmp_path, quantize, sizes=sizes)
    largest = 128 * 512 * 4
    alive, pack = [], packed.Stored.pack

    def watched(stored, rows):
        alive.append(floating_bytes() if len(alive) % 7 == 0 else 0)
        pack(stored, rows)

    monkeypatch.setattr(packed.Stored, "pack", watched)
    gc.collect()
    before = floating_bytes()
    run = started(loaded)
    plain = sum(torch.Size(s.shape).numel() * 4 for _, s in stored_weights(run.root))
    kept = sum(t.numel() * t.element_size() for t in [*run.root.parameters(), *run.root.buffers()])
    assert len(alive) == 6 * 7 and plain > 15 * largest
    assert max(alive) - before < kept + 2 * largest < 0.5 * plain


def test_the_loader_waits_again_as_before(monkeypatch):
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "0")
    with weights._one_by_one(True):
        assert os.environ["HF_DEACTIVATE_ASYNC_LOAD"] == "1"
    assert os.environ["HF_DEACTIVATE_ASYNC_LOAD"] == "0"
    monkeypatch.delenv("HF_DEACTIVATE_ASYNC_LOAD")
    with weights._one_by_one(True):
        pass
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ


def unpacked_by_rank(loaded) -> dict[str, torch.Tensor]:
    return {n: p.unpacked(torch.float32) for n, p in packed_weights(started(loaded).root).items()}


@pytest.mark.parametrize(("kind", "sizes"), [("LLAMA", ODD), ("QWEN3_MOE", EXPERTS)])
def test_packed_weights_have_hugging_face_names_and_whole_shapes(tmp_path, kind, sizes):
    loaded = made(tmp_path, DOUBLE, kind=kind, sizes=sizes)
    run = started(loaded)
    plain = dict(model_plain(tmp_path, kind).named_parameters())
    table = packed_weights(run.root)
    assert table and all("lora" not in n and "base_layer" not in n for n in table)
    for name, weight in table.items():
        assert weight.shape == tuple(plain[name].shape) and weight.method == "nf4"
        back = weight.unpacked(torch.float32)
        assert 0.05 < (back - plain[name]).norm() / plain[name].norm() < 0.12, name
    assert ("model.layers.0.mlp.experts.gate_up_proj" in table) == (kind == "QWEN3_MOE")
    assert not any("lm_head" in n or "norm" in n or "mlp.gate.weight" in n or "embed" in n for n in table)
    leave()
    alone = {n: p.unpacked(torch.float32) for n, p in table.items()}
    for found in run_ranks(2, unpacked_by_rank, made(tmp_path, DOUBLE, {"name": FSDP.name}, kind, sizes)):
        same(found, alone)


def model_plain(path, kind) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(path / kind.lower())
    return model


def test_a_packed_layer_looks_like_a_linear_layer():
    with torch.device("meta"):
        plain = nn.Linear(64, 32)
    from swiftlite.recipe.schema import QuantizeSection

    layer = PackedLinear(plain, QuantizeSection(method="nf4"), False)
    layer.stored.pack(torch.randn(32, 64))
    assert isinstance(layer, nn.Linear) and (layer.in_features, layer.out_features) == (64, 32)
    assert layer.weight.shape == (32, 64) and layer.weight.dtype == torch.float32 and not layer.weight.requires_grad
    assert "method=nf4" in repr(layer)
    copy_into(layer.packed, torch.zeros_like(layer.packed))
    assert layer.weight.min() == layer.weight.max() or layer.weight.unique().numel() <= 32
