"""Training beside packed weights: the numbers of one process on every layout, those of bitsandbytes, and what is refused."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from swiftlite import api
from swiftlite.data.render import IGNORE
from swiftlite.dist.launch import ranks
from swiftlite.dist.tensors import whole
from swiftlite.dist.world import leave
from swiftlite.models import fp8, nf4, packed
from swiftlite.models.adapters import without_adapters
from swiftlite.models.choice import choose
from swiftlite.models.families.lookup import auto_class
from swiftlite.models.packed import packed_weights, stored_weights
from swiftlite.recipe.errors import ModelError, RecipeError
from swiftlite.recipe.resolve import resolve
from swiftlite.recipe.schema import QuantizeSection
from swiftlite.train.console import Console
from swiftlite.train.loop import evaluate, train_step
from swiftlite.train.memory import plan_memory
from swiftlite.train.plan import make_plan
from swiftlite.train.run import Run
from tests.fixtures import tok
from tests.models.test_families import TINY, make
from tests.ranks import run_ranks
from tests.train.test_dpo import ROWS
from tests.train.test_dpo import first_step as first_dpo_step
from tests.train.test_ranks import assert_same, spread, steps
from tests.training import LORA, losses, model_folder, recipe, token_rows, train

NF4, DOUBLE, FP8 = {"method": "nf4"}, {"method": "nf4", "double_quant": True}, {"method": "fp8"}
SIZES = {"hidden_size": 64, "intermediate_size": 128}
BY_KIND = {"QWEN3_MOE": {**SIZES, "moe_intermediate_size": 64}}
LENGTHS = [4, 6, 12, 20, 9, 31, 2, 17, 25]


@pytest.fixture(autouse=True)
def no_group_left():
    yield
    leave()


def made(path, quantize, strategy="none", kind="LLAMA", micro=8, **sections):
    model_folder(path, kind, **BY_KIND.get(kind, SIZES))
    given = {"global_batch_size": 8, "per_device_train_batch_size": micro, "learning_rate": 1e-3, "max_grad_norm": 1.0}
    sections["train"] = {**given, **sections.get("train", {})}
    sections = {"rows": token_rows(LENGTHS), "lora": LORA, "strategy": strategy, **sections}
    if quantize is not None:
        sections["quantize"] = quantize
    return recipe(path, kind=kind, **sections)


def started(loaded) -> Run:
    return Run(make_plan(resolve(loaded, ranks().size)), Console(quiet=True))


def plain_with_the_same_weights(run: Run, folder) -> torch.nn.Module:
    """Plain transformers with the values that the packed weights stand for."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in packed_weights(run.root).items():
            assert not torch.equal(own[name], weight.unpacked(torch.float32))
            own[name].copy_(weight.unpacked(torch.float32))
    return model


# The numbers of one process.

CASES = [
    (2, NF4, "fsdp", {}, "LLAMA"),
    (2, DOUBLE, "zero3", {"offload": "params"}, "QWEN3_MOE"),
    (2, FP8, "hsdp", {}, "GEMMA3"),
]


@pytest.mark.parametrize(("size", "quantize", "strategy", "keys", "kind"), CASES)
def test_ranks_equal_one_process(tmp_path, size, quantize, strategy, keys, kind):
    expected = steps(made(tmp_path, quantize, kind=kind), 3)
    leave()
    for found in run_ranks(size, steps, made(tmp_path, quantize, spread(strategy, size, **keys), kind, 2), 3):
        assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "quantize"),
    [("LLAMA", NF4), ("LLAMA", FP8), ("QWEN3_MOE", DOUBLE), ("QWEN3_MOE", FP8), ("GPT_OSS", NF4), ("GEMMA3", DOUBLE)],
)
@pytest.mark.parametrize("size", [2, 4])
def test_every_layout_equals_one_process(tmp_path, kind, quantize, size):
    expected = steps(made(tmp_path, quantize, kind=kind), 10)
    leave()
    for i, strategy in enumerate(("ddp", "fsdp", "zero2", "zero3", "hsdp")):
        for offload in ("none", "params", "optimizer") if strategy in ("fsdp", "zero3") else ("none",):
            how = spread(strategy, size, offload=offload)
            checkpointing = ("none", "full", "selective")[i % 3]
            loaded = made(tmp_path, quantize, how, kind, (1, 2, 4)[i % 3], train={"gradient_checkpointing": checkpointing})
            for found in run_ranks(size, steps, loaded, 10):
                assert_same(found, expected)


@pytest.mark.parametrize("offload", ["params", "optimizer"])
def test_one_process_offloads_too(tmp_path, offload):
    expected = steps(made(tmp_path, DOUBLE), 3)
    leave()
    assert_same(steps(made(tmp_path, DOUBLE, {"name": "none", "offload": offload}), 3), expected)


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
@pytest.mark.parametrize("kind", ["LLAMA", "QWEN3_MOE"])
def test_recomputing_changes_nothing(tmp_path, kind, checkpointing):
    expected = steps(made(tmp_path, DOUBLE, kind=kind), 2)
    again = made(tmp_path, DOUBLE, kind=kind, micro=2, train={"gradient_checkpointing": checkpointing})
    assert_same(steps(again, 2), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("quantize", "checkpointing"), [(DOUBLE, "full"), (FP8, "none")], ids=["double", "fp8"])
def test_compiled_blocks_give_the_same(tmp_path, quantize, checkpointing):
    expected = steps(made(tmp_path, quantize), 2)
    again = made(tmp_path, quantize, micro=2, train={"gradient_checkpointing": checkpointing, "torch_compile": True})
    assert_same(steps(again, 2), expected)


def native_steps(loaded, count: int) -> dict:
    """As on a card that multiplies in float8, by way of fp32."""
    fp8.native = lambda device: True
    return steps(loaded, count)


@pytest.mark.parametrize(("size", "strategy"), [(1, "none"), (2, "fsdp")])
def test_float8_products_do_not_depend_on_the_split(tmp_path, monkeypatch, size, strategy):
    """Sums in another order may lead to the next float8 number, so this is no equality to rounding in fp32."""
    monkeypatch.setattr(fp8, "native", lambda device: True)
    sections = {"train": {"gradient_checkpointing": "selective"}}
    alone = native_steps(made(tmp_path, FP8), 2)
    stored = {s.method for _, s in stored_weights(started(made(tmp_path, FP8)).root)}
    assert stored == {"fp8"}
    loaded = made(tmp_path, FP8, spread(strategy, size) if size > 1 else "none", micro=2, **sections)
    found = run_ranks(size, native_steps, loaded, 2)[0]
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-4) and found["norm"] == pytest.approx(alone["norm"], rel=2e-3)
    for name, grad in alone["grads"].items():
        assert (found["grads"][name] - grad).norm() <= 0.02 * grad.norm(), name
    exact = run_ranks(1, steps, loaded if size == 1 else made(tmp_path, FP8), 2)[0]
    error = max(float((alone["grads"][n] - g).norm() / g.norm()) for n, g in exact["grads"].items())
    assert 0.005 < error < 0.2 and alone["loss"] != exact["loss"] == pytest.approx(alone["loss"], rel=0.01)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_pure"])
@pytest.mark.parametrize("quantize", [DOUBLE, FP8], ids=["double", "fp8"])
def test_sixteen_bits_are_near_to_thirty_two(tmp_path, quantize, precision):
    """Carriers of another type hold the same bytes, and products are made in it."""
    exact, found = (steps(made(tmp_path, quantize, train={"precision": p}), 1) for p in ("fp32", precision))
    assert found["loss"] == pytest.approx(exact["loss"], rel=5e-3)
    assert found["norm"] == pytest.approx(exact["norm"], rel=0.05)


@pytest.mark.parametrize("kind", ["QWEN3_MOE", "GPT_OSS"])
def test_experts_are_unpacked_once_a_pass(tmp_path, monkeypatch, kind):
    """A class that asked for them expert by expert would unpack them all each time."""
    run, seen, plain = started(made(tmp_path, NF4, kind=kind)), [], packed._unpack
    monkeypatch.setattr(packed, "_unpack", lambda t, m, d: (seen.append(t[0].ndim), plain(t, m, d))[1])
    run.objective.loss_sum(run.root, run.to_model(run.plan.loader.group(0)[0].tensors))
    assert seen.count(3) == sum(len(s.shape) == 3 for _, s in stored_weights(run.root)) == 4


# The numbers of others.


def test_qlora_is_that_of_bitsandbytes_and_peft(tmp_path):
    """Ten steps: losses and adapters of Linear4bit under peft, by plain PyTorch."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    loaded = made(tmp_path, NF4, train={"max_grad_norm": 0, "num_train_epochs": 10, "weight_decay": 0.01})
    run = started(loaded)
    packing = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.float32, quantization_config=packing)
    config = LoraConfig(r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules="all-linear", exclude_modules=["lm_head"])
    model = get_peft_model(model, config).base_model.model.train()
    weights = {n: p for n, p in model.named_parameters() if p.requires_grad}
    ours = {n: p for n, p in run.root.named_parameters() if p.requires_grad}
    assert weights.keys() == ours.keys()
    for name, weight in weights.items():
        weight.data.copy_(ours[name].detach())
    for name, stored in stored_weights(run.root):
        theirs = model.get_parameter(name)
        assert torch.equal(stored.tensors()[0].view(torch.uint8).flatten(), theirs.data.flatten()), name
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-3, weight_decay=0.01)
    for step in range(10):
        report = train_step(run, run.plan.loader.group(step), 1e-3)
        samples = [run.plan.loader.samples[i] for i in run.plan.loader.rows_of(step)]
        sums, count = torch.zeros(()), 0
        for sample in samples:
            labels = torch.tensor(sample.labels)[1:]
            logits = model(input_ids=torch.tensor([sample.input_ids]), use_cache=False).logits[0, :-1].float()
            sums = sums + torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
            count += int((labels != IGNORE).sum())
        (sums / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert report.loss == pytest.approx(float(sums.detach()) / count, rel=1e-5), step
    for name, weight in weights.items():
        torch.testing.assert_close(ours[name].detach(), weight.detach(), rtol=0, atol=1e-4, msg=name)
    moved = max(float(p.detach().abs().max()) for n, p in ours.items() if "lora_B" in n)
    assert moved > 5e-3  # fifty times the tolerance


@pytest.mark.parametrize(("kind", "quantize"), [("LLAMA", DOUBLE), ("GEMMA3", FP8), ("QWEN3_MOE", NF4), ("GPT_OSS", DOUBLE)])
def test_the_model_is_the_dequantised_one(tmp_path, kind, quantize):
    """Loss and gradients of plain peft on a model with the values that packed weights stand for; evaluation too."""
    keys = {"data": {"eval": str(tmp_path / "rows.jsonl")}, "train": {"max_grad_norm": 0}}
    loaded = made(tmp_path, quantize, kind=kind, **keys)
    found, run = steps(loaded, 1), started(loaded)
    folder = tmp_path / kind.lower()
    plain = plain_with_the_same_weights(run, folder)
    config = LoraConfig(r=4, lora_alpha=16, target_modules=sorted({n.split(".lora_")[0] for n in run.masters}))
    model = get_peft_model(plain, config).base_model.model.train()
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in own.items():
            if "lora_A" in name:
                parameter.copy_(dict(run.root.named_parameters())[name])
            if "lora_B" in name:
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1
                parameter.copy_(noise)
    total, sums = 0, torch.zeros(())
    for index in run.plan.loader.rows_of(0):
        ids = torch.tensor([run.plan.loader.samples[index].input_ids])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        sums = sums + torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
        total += ids.shape[1] - 1
    loss = sums / total
    loss.backward()
    assert found["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, grad in found["grads"].items():
        if grad.norm() > 1e-6 * found["norm"]:
            assert (own[name].grad - grad).norm() <= 2e-5 * grad.norm(), name
    start = plain_with_the_same_weights(run, folder).eval()
    with torch.no_grad():
        rows = [torch.tensor([s.input_ids]) for s in next(iter(run.plan.evals.values())).samples]
        logits = [start(input_ids=r, use_cache=False).logits[0, :-1].float() for r in rows]
        parts = [torch.nn.functional.cross_entropy(x, r[0, 1:], reduction="sum") for x, r in zip(logits, rows, strict=True)]
    run.metrics = type("Silent", (), {"write": lambda self, row: None})()
    expected = float(sum(parts)) / sum(r.shape[1] - 1 for r in rows)
    assert evaluate(run)["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_bytes_of_bitsandbytes_in_a_run_have_its_values(tmp_path):
    """Double-quantised ones, whose codes are not all our own."""
    functional = pytest.importorskip("bitsandbytes.functional")
    run = started(made(tmp_path, DOUBLE))
    for _, stored in stored_weights(run.root):
        w = torch.randn(stored.shape, generator=torch.Generator().manual_seed(3))
        other, state = functional.quantize_4bit(w, blocksize=64, quant_type="nf4", compress_statistics=True)
        codes = state.absmax.reshape(stored.shape[0], -1)
        padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % stored.dtype.itemsize))
        nested = torch.cat([state.state2.absmax, state.offset.reshape(1)])
        home = torch.device("cpu")
        stored.put("packed", other.reshape(stored.shape[0], -1), home)
        stored.put("codes", padded, home)
        stored.put("nested", nested.view(torch.uint8), home)
        assert torch.equal(stored.unpacked(torch.float32), functional.dequantize_4bit(other, state))
        assert stored.double and codes.shape[1] == stored.shape[1] // nf4.BLOCK


# Around training.


def dpo(path, quantize, strategy="none", micro=5):
    keys = {"objective": "dpo", "dpo_beta": 0.5, "global_batch_size": 5}
    return made(path, quantize, strategy, micro=micro, rows=ROWS, train=keys)


def test_dpo_compares_with_the_packed_base(tmp_path):
    loaded = dpo(tmp_path, DOUBLE)
    run = started(loaded)
    batch = run.to_model(run.plan.loader.group(0)[0].tensors)
    plain = plain_with_the_same_weights(run, tmp_path / "llama").eval()
    for parameter in run.masters.values():
        parameter.data.add_(0.1)  # what must not be asked
    with torch.no_grad():
        logits = plain(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits[:, :-1]
        targets = batch["labels"][:, 1:]
        each = logits.log_softmax(-1).gather(-1, targets.clamp_min(0)[..., None])[..., 0]
        expected = (each * (targets != IGNORE)).sum(1)
        torch.testing.assert_close(run.objective.reference(run.root, batch), expected, rtol=1e-5, atol=1e-4)
        with without_adapters(run.root):
            assert all(m._disable_adapters for m in run.root.modules() if hasattr(m, "lora_A"))
    leave()
    alone = first_dpo_step(loaded)
    leave()
    for found in run_ranks(2, first_dpo_step, dpo(tmp_path, DOUBLE, {"name": "fsdp"}, micro=2)):
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert found["norm"] == pytest.approx(alone["norm"], rel=1e-4)


@pytest.mark.parametrize("quantize", [DOUBLE, pytest.param(FP8, marks=pytest.mark.slow)], ids=["double", "fp8"])
def test_a_run_saves_goes_on_and_answers(tmp_path, quantize, capsys):
    """Resumed on one process bit for bit; the exported adapter is what was trained; questions are answered with it."""
    keys = {"checkpoint": {"save_strategy": "steps", "save_steps": 2}, "export": ["adapter"]}
    keys["train"] = {"max_steps": 4, "learning_rate": 0.01}
    whole_run = train(made(tmp_path, quantize, **keys, output=str(tmp_path / "whole")))
    leave()
    keys["train"]["max_steps"] = 2
    first = train(made(tmp_path, quantize, **keys, output=str(tmp_path / "parts")))
    leave()
    keys["train"]["max_steps"], keys["checkpoint"]["resume"] = 4, "auto"
    keys["export"] = {"formats": ["adapter"], "overwrite": True}
    assert train(made(tmp_path, quantize, **keys, output=str(tmp_path / "parts"))) == first
    leave()
    assert losses(first) == losses(whole_run)
    files = [folder / "adapter" / "adapter_model.safetensors" for folder in (first, whole_run)]
    assert files[0].read_bytes() == files[1].read_bytes()
    config = json.loads((first / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 4 and "quantization" not in json.dumps(config)
    answers = api.generate(first, ["hi"], max_new_tokens=3)
    assert len(answers) == 1
    log = (first / "train.log").read_text() if (first / "train.log").exists() else ""
    assert "weights packed as" in log


def test_a_run_goes_on_from_an_adapter(tmp_path):
    """Without a lora section: the adapter of a run is trained on beside packed weights, from where it was."""
    first = train(made(tmp_path, DOUBLE, train={"max_steps": 1}, export=["adapter"], output=str(tmp_path / "first")))
    model = {"name": str(tmp_path / "llama"), "adapter": str(first / "adapter")}
    run = started(made(tmp_path, DOUBLE, model=model, lora=None, output=str(tmp_path / "second")))
    assert all(s.method == "nf4" for _, s in stored_weights(run.root)) and packed_weights(run.root)
    saved = load_file(first / "adapter" / "adapter_model.safetensors")
    for name, tensor in saved.items():
        own = run.root.get_parameter(name.removeprefix("base_model.model.").replace(".weight", ".default.weight"))
        assert torch.equal(own.detach(), tensor) and own.requires_grad


@pytest.mark.parametrize("quantize", [NF4, DOUBLE, FP8], ids=["nf4", "double", "fp8"])
@pytest.mark.parametrize("kind", ["LLAMA", "QWEN3_MOE"])
def test_check_knows_the_packed_sizes(tmp_path, kind, quantize):
    plain = api.check(made(tmp_path, None, kind=kind), quiet=True)
    smaller = api.check(made(tmp_path, quantize, kind=kind), quiet=True)
    counts = [{k: v for k, v in found["coverage"].items() if k != "untrained"} for found in (plain, smaller)]
    assert counts[0] == counts[1]
    by_part = [{u["part"]: u["parameters"] for u in found["coverage"]["untrained"]} for found in (plain, smaller)]
    assert by_part[0] == by_part[1]
    run = started(made(tmp_path, quantize, kind=kind))
    weights = sum(torch.Size(s.shape).numel() for _, s in stored_weights(run.root))
    bits = {"nf4": 4.5, "double": 4 + 8 / 64, "fp8": 8}[("double" if quantize is DOUBLE else quantize["method"])]
    saved = (plain["memory"]["frozen_gib"] - smaller["memory"]["frozen_gib"]) * 2**30
    assert 0.94 * weights * (4 - bits / 8) < saved < 1.01 * weights * (4 - bits / 8)
    frozen = [t for t in [*run.root.parameters(), *run.root.buffers()] if not t.requires_grad]
    held = sum(t.numel() * t.element_size() for t in {id(t): t for t in frozen}.values())
    assert plan_memory(run.plan, run.built).frozen == held
    assert smaller["memory"]["total_gib"] < plain["memory"]["total_gib"]


def test_the_plan_of_spread_packed_weights_is_their_share(tmp_path):
    one, four = (api.check(made(tmp_path, DOUBLE, s), nproc=n, quiet=True)["memory"] for s, n in (("none", 1), ("fsdp", 4)))
    assert four["frozen_gib"] == pytest.approx(one["frozen_gib"] / 4, rel=0.01)


# What is refused, before any weight is read.


@pytest.mark.parametrize(
    ("sections", "where", "words"),
    [
        ({"quantize": "nf4", "lora": None}, "quantize", "every weight is trained"),
        ({"quantize": "nf4", "lora": {**LORA, "use_dora": True}}, "lora.use_dora", "DoRA"),
        ({"quantize": {"method": "fp8", "double_quant": True}}, "quantize.double_quant", "one scale a row"),
        ({"quantize": {"method": "nf4", "skip": ["q_projj"]}}, "quantize.skip", "'q_projj' matches no module"),
        ({"quantize": {"method": "nf4", "skip": ["*layers*"]}}, "quantize", "no weight of LlamaForCausalLM can be packed"),
        ({"quantize": "nf4", "lora": {**LORA, "init": "pissa"}}, "lora.init", "a packed base cannot give up"),
        ({"quantize": "nf4", "lora": {**LORA, "experts": True}, "kind": "QWEN3_MOE"}, "lora.experts", "fused experts"),
        ({"quantize": "fp8", "lora": {**LORA, "experts": True}, "kind": "GPT_OSS"}, "lora.experts", "fused experts"),
        ({"quantize": "int3"}, "quantize", "expected one of nf4, fp8, got 'int3'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path, sections, where, words):
    with pytest.raises(RecipeError) as caught:
        api.check(made(tmp_path, sections.pop("quantize"), **sections), quiet=True)
    message = str(caught.value)
    assert where in message and words in message, message
    assert caught.value.exit_code == 2


def test_rows_that_are_no_whole_blocks_are_refused_or_said(tmp_path):
    narrow = {"hidden_size": 32, "intermediate_size": 96}
    model_folder(tmp_path, "LLAMA", **narrow)
    with pytest.raises(RecipeError, match=r"no weight .* 14 .* model.layers.0.self_attn.q_proj \(Linear\): .* no multiple of 64"):
        api.check(made(tmp_path, NF4), quiet=True)
    model_folder(tmp_path, "GEMMA3", hidden_size=32, intermediate_size=64)
    notes = api.check(made(tmp_path, NF4, kind="GEMMA3"), quiet=True)["notes"]
    assert any("12 weights stay as they are, such as model.layers.0.self_attn.q_proj" in n for n in notes)


@pytest.mark.parametrize("name", ["falcon", "gpt2"])
def test_layers_of_other_classes_are_named(name):
    """FalconLinear and Conv1D are no plain linear layers: left as they are, and not in silence."""
    model, _, family = make(name, "meta")
    with pytest.raises(RecipeError, match=rf"8 weights .*{'FalconLinear' if name == 'falcon' else 'Conv1D'}\): their classes"):
        choose(model, QuantizeSection(method="fp8"), family)
    model.transformer.h[0].extra = torch.nn.Linear(64, 64, device="meta")
    found = choose(model, QuantizeSection(method="fp8"), family)
    assert found.linears == [model.transformer.h[0].extra] and len(found.notes) == 1 and "8 weights stay" in found.notes[0]


@pytest.mark.skipif("molmo2" not in TINY, reason="not in this transformers")
def test_tensors_of_the_files_may_hold_several_packed_weights(tmp_path, monkeypatch):
    """Molmo 2 keeps queries, keys and values in one tensor; transformers splits it by the sizes of what is packed."""
    config = TINY["molmo2"][0]()
    for key, value in {**SIZES, "vocab_size": 261}.items():
        setattr(config.get_text_config(), key, value)
    model = auto_class(config).from_config(config)
    model.save_pretrained(tmp_path / "molmo")
    tok().save_pretrained(tmp_path / "molmo")
    run = started(made(tmp_path, NF4, model={"name": str(tmp_path / "molmo")}))
    weights = packed_weights(run.root)
    assert len(weights) == 12  # not o_proj, whose rows are half a block
    for name, weight in weights.items():
        exact = model.get_parameter(name).detach()
        assert (weight.unpacked(torch.float32) - exact).norm() < 0.12 * exact.norm(), name
    monkeypatch.delattr("swiftlite.models.weights.BaseView.get_parameter")
    with pytest.raises(ModelError, match=r"layers.0.self_attn.q_proj.weight cannot be made from the files: .*Split on tensors"):
        started(made(tmp_path, NF4, model={"name": str(tmp_path / "molmo")}))


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        (["lm_head", "down_proj"], {"q", "k", "v", "o", "gate", "up"}),
        (["*mlp*"], {"q", "k", "v", "o"}),
        (["model.layers.0.self_attn.q_proj"], {"q", "k", "v", "o", "gate", "up", "down"}),
        (["model.layers.0"], {"q", "k", "v", "o", "gate", "up", "down"}),
    ],
)
def test_what_is_skipped_stays_plain(tmp_path, skip, left):
    run = started(made(tmp_path, {"method": "nf4", "skip": skip}))
    names = list(packed_weights(run.root))
    assert {n.split(".")[-2].partition("_")[0] for n in names} == left
    if skip[0].startswith("model"):
        assert not any(n.startswith(skip[0] + ".") for n in names) and any("layers.1" in n for n in names)


def test_modules_trained_in_full_are_not_packed(tmp_path):
    lora = {**LORA, "modules_to_save": ["model.layers.1.mlp.down_proj"], "exclude_modules": ["down_proj"]}
    run = started(made(tmp_path, NF4, lora=lora))
    names = packed_weights(run.root)
    assert "model.layers.0.mlp.down_proj.weight" in names and "model.layers.1.mlp.down_proj.weight" not in names
    trained = [n for n, p in run.root.named_parameters() if p.requires_grad and "down_proj" in n]
    assert trained and all("layers.1" in n for n in trained)
    assert whole(run.root.get_parameter(trained[0])).shape == (64, 128)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"load_in_4bit": True}, ("nf4", False)),
        ({"quantization": "nf4"}, ("nf4", False)),
        ({"quantization_bit": 4}, ("nf4", False)),
        ({"quantization_config": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}}, ("nf4", True)),
        ({"quantize": "4bit"}, ("nf4", False)),
        ({"quantize": "float8"}, ("fp8", False)),
        ({"quantize": {"quant_method": "bnb_4bit", "double_quantization": True}}, ("nf4", True)),
    ],
)
def test_names_of_other_toolkits_work(tmp_path, keys, expected):
    section = made(tmp_path, keys.pop("quantize", None), **keys).recipe.quantize
    assert section is not None and (section.method, section.double_quant) == expected


def test_load_in_4bit_false_says_nothing(tmp_path):
    assert made(tmp_path, None, load_in_4bit=False).recipe.quantize is None


def noted_on_a_rank(loaded) -> list[str]:
    fp8.native = lambda device: True
    return [n for n in started(loaded).built.notes if "float8 products move" in n]


def test_what_float8_products_add_is_said_before_the_first_step(tmp_path, monkeypatch):
    """The same on all ranks and for compiled blocks, which it compiles nothing for; of stored weights alone there is nothing."""
    assert not any("float8 products" in n for n in started(made(tmp_path, FP8)).built.notes if "move" in n)
    monkeypatch.setattr(fp8, "native", lambda device: True)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", None)  # would be called for what is compiled
    run = started(made(tmp_path, FP8, train={"torch_compile": True, "gradient_checkpointing": "full"}))
    (said,) = [n for n in run.built.notes if "float8 products move" in n]
    found = float(said.partition(" by ")[2].partition("%")[0]) / 100
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        ids = torch.tensor([run.plan.train.samples[0].input_ids])
        there = run.root.eval().base_model(input_ids=ids, use_cache=False).last_hidden_state
        plain = plain_with_the_same_weights(run, tmp_path / "llama").eval().base_model(input_ids=ids).last_hidden_state
    assert found == pytest.approx(float((there - plain).norm() / plain.norm()), rel=0.01) and 0.01 < found < 0.2
    assert {s.method for _, s in stored_weights(run.root)} == {"fp8"}
    leave()
    for notes in run_ranks(2, noted_on_a_rank, made(tmp_path, FP8, "fsdp")):
        assert notes == [said]
