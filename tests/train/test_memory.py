"""The memory plan against what a model really takes."""

from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from swiftlite.dist.strategies import DDP, FSDP, ZERO2, Strategy
from swiftlite.dist.world import leave
from swiftlite.models.build import Precision, skeleton
from swiftlite.recipe.errors import RecipeError
from swiftlite.train.console import Console
from swiftlite.train.memory import GIB, MemoryPlan, plan_memory, reckon
from swiftlite.train.optim import OPTIMIZERS
from swiftlite.train.plan import make_plan
from swiftlite.train.run import Run
from tests.training import LORA, model_folder, recipe, token_rows


@pytest.fixture(autouse=True)
def alone():
    yield
    leave()


def size(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def kept(run: Run) -> int:
    """Bytes that autograd keeps of the body of the first micro-batch; weights not counted."""
    weights = {p.untyped_storage()._cdata for p in run.root.parameters()}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            seen[storage._cdata] = (storage.nbytes(), tensor)  # held, so that no address comes twice
        return tensor

    batch = run.to_model(run.plan.loader.group(0)[0].tensors)
    batch.pop("labels")
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run.root.base_model(**batch, use_cache=False)
    return sum(nbytes for nbytes, _ in seen.values())


def start(path, **given) -> tuple[MemoryPlan, Run]:
    """The plan from meta, and the built run."""
    given["train"] = {"per_device_train_batch_size": 4, "global_batch_size": 4, **given.get("train", {})}
    plan = make_plan(recipe(path, **{"rows": token_rows([40, 33, 17, 60]), **given}))
    memory = plan_memory(plan, skeleton(plan.files, plan.recipe, plan.tokenizer, plan.precision, plan.device))
    return memory, Run(plan, Console(quiet=True))


@pytest.mark.parametrize(
    "given",
    [
        {"lora": LORA},
        {},
        {"lora": LORA, "kind": "LLAMA_TIED"},
        {"lora": {**LORA, "modules_to_save": ["lm_head"]}},
        {"train": {"trainable": ["*layers.1.*"]}},
        {"train": {"optim": "sgd"}},
        {"train": {"optim": "adamw_8bit"}},
        {"train": {"precision": "bf16_pure"}},
        {"lora": LORA, "train": {"precision": "bf16"}},
    ],
    ids=str,
)
def test_weights_gradients_and_optimizer_are_exact(tmp_path, given):
    memory, run = start(tmp_path, **given)
    trained = list(run.masters.values())
    assert memory.trained == size(trained)
    own = {id(p): p for p in run.root.parameters() if not p.requires_grad}.values()
    assert memory.frozen == size(own) + size(run.root.buffers())
    assert (memory.rows, memory.tokens) == (4, 60)
    built = reckon(
        run.built, run.recipe.train, 4, 60, precision=run.plan.precision, strategy=run.plan.strategy, checkpointing="none",
        device=run.plan.device,
    )  # fmt: skip
    assert built == memory, "the built model gives the same plan as the one on meta"
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    run.optimizer.step()
    state = [v for s in run.optimizer.state.values() for v in s.values() if torch.is_tensor(v) and v.ndim]
    local = [v.to_local() if hasattr(v, "to_local") else v for v in state]
    assert memory.optimizer == size(local)
    assert memory.gradients == size(p.grad for p in trained)


def test_with_checkpointing_a_block_keeps_its_input(tmp_path):
    memory, run = start(tmp_path, lora=LORA, train={"gradient_checkpointing": "full"})
    assert memory.activations == 2 * 4 * 60 * 32 * 4  # blocks x rows x tokens x hidden x fp32
    rest = kept(run) - memory.activations  # positions, and what the norm at the end keeps
    assert 0 <= rest < memory.activations


def test_blocks_below_the_first_trained_weight_keep_nothing(tmp_path):
    memory, _ = start(tmp_path, train={"trainable": ["*layers.1.*"], "gradient_checkpointing": "full"})
    assert memory.activations == 4 * 60 * 32 * 4


@pytest.mark.parametrize("given", [{"lora": LORA}, {}], ids=["lora", "full"])
@pytest.mark.parametrize("kind", ["LLAMA", "QWEN3", "GEMMA3", "MIXTRAL"])
def test_without_checkpointing_the_estimate_is_near(tmp_path, kind, given):
    memory, run = start(tmp_path, kind=kind, **given)
    assert memory.activations == pytest.approx(kept(run), rel=0.3)


def test_adapted_experts_keep_a_changed_copy_of_their_weights(tmp_path):
    model_folder(tmp_path, "MIXTRAL", hidden_size=128, intermediate_size=256)
    memory, run = start(tmp_path, kind="MIXTRAL", lora={**LORA, "experts": True})
    experts = sum(p.numel() * 4 for n, p in run.root.named_parameters() if p.ndim == 3)
    assert memory.activations == pytest.approx(kept(run), rel=0.3) and experts > 0.3 * memory.activations


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_every_optimizer_says_what_it_holds(tmp_path, optim):
    memory, run = start(tmp_path, lora=LORA, train={"optim": optim})
    # Rows of A are blocks of 8-bit codes with a scale each; rows of B, four wide, stay as they are.
    eight = sum(2 * len(p) * (p.shape[1] + 4) if "lora_A" in n else 8 * p.numel() for n, p in run.masters.items())
    assert memory.optimizer == {"adamw": 8 * sum(p.numel() for p in run.masters.values()), "adamw_8bit": eight, "sgd": 0}[optim]


def llama_8b(path, rows: int, tokens: int, checkpointing: str, lora: bool = True, strategy: Strategy = FSDP, **how) -> MemoryPlan:
    """The plan for a GPU of the Llama-3.1-8B shape with LoRA r=16, or in full, made on meta."""
    config = {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    }  # fmt: skip
    sections = {"lora": {"rank": 16}} if lora else {"strategy": {"name": "fsdp", "offload": how.get("offload", "none")}}
    sections |= {"quantize": how.pop("quantize")} if "quantize" in how else {}
    train = {"activation_offload": how.pop("activation_offload", False), "gradient_checkpointing": checkpointing}
    loaded = recipe(path, model={"config_overrides": config}, train=train, **sections)
    plan = make_plan(loaded, need_weights=False)
    bf16 = Precision("bf16", torch.bfloat16, torch.float32)
    built = skeleton(plan.files, plan.recipe, plan.tokenizer, bf16, plan.device)
    return reckon(
        built, plan.recipe.train, rows, tokens, precision=bf16, strategy=strategy, checkpointing=checkpointing,
        device=plan.device, **how,
    )  # fmt: skip


def test_the_8b_recipe_on_a_gpu(tmp_path):
    """Measured on an H200: 24 GiB peak, of which weights 15.0, block inputs 4.0, adapters with gradients and AdamW 0.6."""
    memory = llama_8b(tmp_path, 4, 4096, checkpointing="full")
    assert memory.frozen / GIB == pytest.approx(15.0, abs=0.05)
    assert memory.activations == 4 * GIB
    assert (memory.trained + memory.gradients + memory.optimizer) / GIB == pytest.approx(0.6, abs=0.05)
    assert memory.total / GIB == pytest.approx(23.7, rel=0.05)
    text = "\n".join(memory.lines())
    assert "for 4 rows of 4,096 tokens" in text
    assert "block inputs 4.00" in text


COMPILED = {"compiled": True}
TWO = {**COMPILED, "size": 2, "shards": 2}
NF4 = {"method": "nf4", "double_quant": True}


@pytest.mark.parametrize(
    ("peak", "rows", "checkpointing", "how"),
    [
        (24.4, 4, "full", COMPILED),
        (50.7, 2, "none", COMPILED),
        (85.1, 4, "none", COMPILED),
        (46.6, 4, "selective", COMPILED),
        (18.5, 4, "full", TWO),
        (24.5, 4, "full", {**TWO, "shards": 1, "strategy": DDP}),
        (65.3, 4, "full", {**TWO, "lora": False}),
        (69.0, 4, "full", {**TWO, "lora": False, "strategy": ZERO2}),
        (18.4, 4, "full", {**TWO, "lora": False, "offload": "optimizer"}),
        (11.35, 4, "full", {**COMPILED, "quantize": NF4}),
        (7.51, 4, "full", {**COMPILED, "quantize": NF4, "activation_offload": True}),
        (18.3, 4, "full", {**COMPILED, "quantize": {"method": "fp8"}}),
        (78.6, 4, "none", {**COMPILED, "quantize": {"method": "fp8"}}),
        (9.6, 4, "full", {**TWO, "quantize": NF4}),
        (15.2, 4, "full", {**TWO, "quantize": {"method": "fp8"}}),
    ],
    ids=str,
)
def test_what_an_h200_took_is_within_a_tenth(tmp_path, peak, rows, checkpointing, how):
    assert llama_8b(tmp_path, rows, 4096, checkpointing, **how).total / GIB == pytest.approx(peak, rel=0.1)


def test_full_tuning_of_8b_does_not_fit_whole_on_each_gpu(tmp_path):
    plan = llama_8b(tmp_path, 4, 4096, "full", lora=False, strategy=DDP, **{**TWO, "shards": 1})
    with pytest.raises(RecipeError, match=r"a step needs about 12\d\.\d GiB on each GPU, which has 79\.1"):
        replace(plan, device="cuda", there=round(79.1 * GIB)).refuse()


def test_a_device_that_is_too_small_is_warned_about():
    plan = MemoryPlan(3 * GIB, 1, 1, 1, 1, 1, 1, 4, 128, "none", "cuda", 2 * GIB)
    assert "2.00 GiB that cuda has here" in str(plan.warning())
    assert "gradient_checkpointing: full" in str(plan.warning())
    with pytest.raises(RecipeError, match=r"memory: a step needs about 3\.00 GiB on each GPU, which has 2\.00.*Shard more"):
        plan.refuse()
    for there in (2 * GIB, None):
        fits = MemoryPlan(GIB, 1, 1, 1, 1, 1, 1, 4, 128, "none", "cuda", there)
        assert fits.warning() is None
        fits.refuse()
