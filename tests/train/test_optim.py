"""Runs with 8-bit AdamW and with LoRA+: the same on every layout, resumed as if never stopped."""

from pathlib import Path

import pytest
import torch
from peft.optimizers import create_loraplus_optimizer
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from swiftlite.dist.checkpoint import Saved
from swiftlite.dist.launch import ranks
from swiftlite.dist.tensors import place_of, whole, with_local
from swiftlite.dist.world import leave
from swiftlite.recipe.errors import RecipeError
from swiftlite.recipe.load import Loaded
from swiftlite.recipe.resolve import resolve
from swiftlite.train.console import Console
from swiftlite.train.loop import train_step
from swiftlite.train.optim import load_state_tensors, state_tensors
from swiftlite.train.plan import make_plan
from swiftlite.train.run import Run
from swiftlite.train.state import load_trainable
from tests.ranks import run_ranks
from tests.training import LORA, losses, recipe, token_rows, train

LENGTHS = [4, 6, 12, 20, 9, 31, 2, 17, 25, 8, 11, 14, 3]
WIDE = {"rank": 8, "alpha": 16}  # rows of 8 elements are a block


@pytest.fixture(autouse=True)
def alone():
    yield
    leave()


def made(path, output="out", *, lora=None, strategy="none", steps=8, checkpoint=None, **keys) -> Loaded:
    """Two epochs of four steps, in 8 bits, saved after every second step."""
    optim = {"optim": "adamw_8bit", **keys}
    sections = {
        "train": {"global_batch_size": 4, "num_train_epochs": 2, "max_steps": steps, "learning_rate": 1e-3, **optim},
        "data": {"train_sampling_strategy": "random"},
        "checkpoint": {"save_strategy": "steps", "save_steps": 2, "save_total_limit": None, **(checkpoint or {})},
        "strategy": strategy,
        "output": str(path / output),
    }  # fmt: skip
    return recipe(path, rows=token_rows(LENGTHS), **sections, **({"lora": lora} if lora else {}))


def started(loaded: Loaded) -> Run:
    return Run(make_plan(resolve(loaded, ranks().size)), Console(quiet=True))


def steps(loaded: Loaded, count: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and weights at the end."""
    run = started(loaded)
    reports = [train_step(run, run.plan.loader.group(step), 1e-3) for step in range(count)]
    found = {n: whole(p).clone() for n, p in run.root.named_parameters() if p.requires_grad}
    leave()
    return [r.loss for r in reports], found


def assert_near(found, expected):
    """Gradients that differ in the last bit now and then put a moment on the next code: a tenth of a step's way."""
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for name, weight in expected[1].items():
        torch.testing.assert_close(found[1][name], weight, rtol=0, atol=2e-4, msg=name)


@pytest.mark.parametrize("lora", [WIDE, None], ids=["lora", "full"])
@pytest.mark.parametrize("offload", ["optimizer", "params"])
def test_offload_changes_nothing(tmp_path, lora, offload):
    expected = steps(made(tmp_path, lora=lora), 4)
    assert_near(steps(made(tmp_path, lora=lora, strategy={"name": "none", "offload": offload}), 4), expected)


SLOW = [("ddp", "none"), ("zero1", "none"), ("zero2", "none"), ("hsdp", "none"), ("zero3", "params"), ("hsdp", "optimizer")]


@pytest.mark.parametrize(
    ("strategy", "offload"),
    [("fsdp", "none"), ("fsdp", "optimizer"), ("fsdp", "params"), *(pytest.param(*c, marks=pytest.mark.slow) for c in SLOW)],
)
def test_two_ranks_train_as_one(tmp_path, strategy, offload):
    expected = steps(made(tmp_path), 4)
    how = {"name": strategy, "offload": offload, **({"shard": 1} if strategy == "hsdp" else {})}
    for found in run_ranks(2, steps, made(tmp_path, strategy=how), 4):
        assert_near(found, expected)


def saved(path, name, step) -> Saved:
    return Saved(path / name / "checkpoints" / f"step-{step:06d}")


def assert_equal(one: Saved, other: Saved) -> None:
    for group in ("trainable", "optimizer"):
        assert set(one.names(group)) == set(other.names(group)) != set()
        for name in one.names(group):
            assert torch.equal(one.rows(group, name), other.rows(group, name)), name


@pytest.mark.parametrize("lora", [WIDE, None], ids=["lora", "full"])
@pytest.mark.parametrize(("size", "strategy"), [(1, "none"), (1, {"name": "none", "offload": "optimizer"}), (2, "fsdp")], ids=str)
def test_resumed_equals_uninterrupted(tmp_path, size, strategy, lora):
    def go(loaded):
        train(loaded) if size == 1 else run_ranks(size, train, loaded)

    go(made(tmp_path, "whole", lora=lora, strategy=strategy))
    go(made(tmp_path, "parts", lora=lora, strategy=strategy, steps=6))
    go(made(tmp_path, "parts", lora=lora, strategy=strategy, checkpoint={"resume": "auto"}))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert_equal(saved(tmp_path, "whole", 8), saved(tmp_path, "parts", 8))
    codes = [n for n in saved(tmp_path, "parts", 8).names("optimizer") if n.endswith("_absmax")]
    assert any(saved(tmp_path, "parts", 8).rows("optimizer", n.removesuffix("_absmax")).dtype == torch.uint8 for n in codes)


def taken_over(loaded: Loaded, folder: Path) -> bool:
    """Whether what was saved by others is here, bit for bit, and what comes after one more step with it."""
    run, before = started(loaded), Saved(folder)
    load_trainable(run.masters, before)
    load_state_tensors(run.masters, run.optimizer, before)
    state = state_tensors(run.masters, run.optimizer)
    right = state.keys() == set(before.names("optimizer")) and all(
        t.dtype == before.rows("optimizer", n).dtype and torch.equal(whole(t), before.rows("optimizer", n))
        for n, t in state.items()
    )
    if run.recipe.strategy.offload == "optimizer":
        run.optimizer.upload()
    train_step(run, run.plan.loader.group(6), 1e-3)
    finite = all(whole(p).isfinite().all() for p in run.masters.values())
    leave()
    return right and finite


LATER = [
    (1, "fsdp", "params"),
    (1, "none", "optimizer"),
    (2, "fsdp", "optimizer"),
    (2, "ddp", "none"),
    (4, "fsdp", "none"),
    (4, "hsdp", "none"),
]


@pytest.mark.parametrize(
    ("size", "strategy", "offload"),
    [(1, "none", "none"), *(pytest.param(*c, marks=pytest.mark.slow) for c in LATER)],
)
def test_a_checkpoint_of_two_ranks_goes_on_in_any_layout(tmp_path, size, strategy, offload):
    run_ranks(2, train, made(tmp_path, "whole", strategy="fsdp"))
    run_ranks(2, train, made(tmp_path, "parts", strategy="fsdp", steps=6))
    how = {"name": strategy, "offload": offload, **({"shard": 2} if strategy == "hsdp" else {})}
    folder = saved(tmp_path, "parts", 6).folder
    assert all(run_ranks(size, taken_over, made(tmp_path, "other", strategy=how), folder))
    again = made(tmp_path, "parts", strategy=how, checkpoint={"resume": "auto"})
    train(again) if size == 1 else run_ranks(size, train, again)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    one, other = saved(tmp_path, "whole", 8), saved(tmp_path, "parts", 8)
    for name in one.names("trainable"):
        torch.testing.assert_close(other.rows("trainable", name), one.rows("trainable", name), rtol=0, atol=2e-4)


def test_a_checkpoint_of_one_process_goes_on_on_two(tmp_path):
    train(made(tmp_path, "parts", steps=6))
    folder = saved(tmp_path, "parts", 6).folder
    assert all(run_ranks(2, taken_over, made(tmp_path, "other", strategy="fsdp"), folder))


def test_another_optimizer_cannot_go_on(tmp_path):
    train(made(tmp_path, steps=2))
    with pytest.raises(RecipeError, match="adamw_8bit"):
        train(made(tmp_path, steps=4, checkpoint={"resume": "auto"}, optim="adamw"))


def overflowing(loaded: Loaded) -> tuple[list[bool], list[float], dict[str, torch.Tensor]]:
    """Four fp16 steps, in the second of which the last rank alone meets an infinite gradient. Returns skips, scales, weights."""
    run = started(loaded)
    loss_sum, skips, scales = run.objective.loss_sum, [], []

    class Objective:
        name, eats = "sft", run.objective.eats
        weight = staticmethod(run.objective.weight)

        @staticmethod
        def loss_sum(root, batch):
            return loss_sum(root, batch) * (1e8 if run.step == 1 and ranks().rank == ranks().size - 1 else 1)

    run.objective = Objective()
    for step in range(4):
        before = {n: whole(p).clone() for n, p in run.masters.items()}
        skips.append(train_step(run, run.plan.loader.group(step), 1e-3).skipped)
        assert skips[-1] == all(torch.equal(whole(p), before[n]) for n, p in run.masters.items())
        run.step += 1
        scales.append(run.scaler.get_scale())
    found = {n: whole(p.detach()).clone() for n, p in run.masters.items()}
    leave()
    return skips, scales, found


@pytest.mark.parametrize(("size", "offload"), [(1, "none"), (2, "none"), (2, "optimizer"), (2, "params")])
def test_fp16_overflow_skips_the_step_on_all_ranks(tmp_path, size, offload):
    found = run_ranks(size, overflowing, made(tmp_path, precision="fp16", strategy={"name": "fsdp", "offload": offload}))
    for skips, scales, end in found:
        assert skips == [False, True, False, False] and scales[1] == scales[0] / 2
        assert all(torch.equal(end[n], found[0][2][n]) and end[n].isfinite().all() for n in end)


def test_weights_in_bf16_learn(tmp_path):
    ends = {}
    for optim in ("adamw", "adamw_8bit"):
        output = train(made(tmp_path, optim, precision="bf16_pure", optim=optim, checkpoint={"save_strategy": "no"}))
        ends[optim] = losses(output)
    assert ends["adamw_8bit"][-1] < ends["adamw_8bit"][0] and ends["adamw_8bit"] == pytest.approx(ends["adamw"], abs=0.02)


def test_what_is_offloaded_stays_in_host_memory():
    """A mesh of GPUs, of which none is needed to hold a shard in host memory."""
    mesh = DeviceMesh("cuda", torch.arange(2), _init_backend=False, _rank=0)
    meta = TensorMeta(torch.Size([4, 6]), (6, 1), torch.float32)
    weight = DTensor(torch.zeros(2, 6), DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=False)
    part = torch.ones(2, 3)
    state = with_local(part, weight, (4, 3))
    assert state.device.type == "cpu" and state.to_local().data_ptr() == part.data_ptr()
    assert (state.shape, state.placements, place_of(state)) == ((4, 3), weight.placements, ((2, 3), (0, 0)))


PLUS = {**LORA, "lr_ratio": 16.0}


@pytest.mark.parametrize(
    "lora",
    [
        PLUS,
        {**PLUS, "use_dora": True},
        {**PLUS, "modules_to_save": ["lm_head"]},
        {**PLUS, "target_modules": ["q_proj", "embed_tokens"]},
    ],
    ids=["lora", "dora", "saved", "embedding"],
)
def test_the_groups_of_lora_plus_are_those_of_peft(tmp_path, lora):
    run = started(made(tmp_path, lora=lora, optim="adamw", weight_decay=0.1))
    theirs = create_loraplus_optimizer(
        run.built.peft, torch.optim.AdamW, lr=1.0, loraplus_lr_ratio=16.0, loraplus_lr_embedding=1.0
    )
    rates = {id(p): group["lr"] for group in theirs.param_groups for p in group["params"]}
    ours = {id(p): group["lr_ratio"] for group in run.optimizer.param_groups for p in group["params"]}
    assert ours == rates and set(ours.values()) == {1.0, 16.0}
    decay = {group["weight_decay"] for group in run.optimizer.param_groups for p in group["params"] if p.ndim >= 2}
    assert decay == {0.1}


@pytest.mark.parametrize("strategy", [{"name": "none"}, {"name": "none", "offload": "optimizer"}], ids=str)
def test_b_moves_lr_ratio_times_as_far(tmp_path, strategy):
    moves = []
    for ratio in (1.0, 4.0):
        run = started(made(tmp_path, lora={**WIDE, "lr_ratio": ratio}, optim="sgd", strategy=strategy))
        with torch.no_grad():  # B starts at zero, which leaves A without a gradient
            for name, p in run.masters.items():
                p.add_(0.1 if "lora_B" in name else 0)
        if strategy.get("offload"):
            run.optimizer.upload()
        before = {n: p.detach().clone() for n, p in run.masters.items()}
        train_step(run, run.plan.loader.group(0), 0.5)
        moves.append({n: p.detach() - before[n] for n, p in run.masters.items()})
        leave()
    assert all(float(m.norm()) > 0 for m in moves[0].values())
    for name, move in moves[0].items():
        torch.testing.assert_close(moves[1][name], move * (4 if "lora_B" in name else 1), rtol=1e-3, atol=1e-6)


def test_the_ratio_is_part_of_what_is_resumed(tmp_path):
    lora = {**WIDE, "lr_ratio": 8.0}
    train(made(tmp_path, "whole", lora=lora))
    train(made(tmp_path, "parts", lora=lora, steps=4))
    with pytest.raises(RecipeError, match=r"lora\.lr_ratio: the checkpoint was made with 8\.0, and the recipe says 1\.0"):
        train(made(tmp_path, "parts", lora=WIDE, checkpoint={"resume": "auto"}))
    train(made(tmp_path, "parts", lora=lora, checkpoint={"resume": "auto"}))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert_equal(saved(tmp_path, "whole", 8), saved(tmp_path, "parts", 8))


def test_other_toolkits_names(tmp_path):
    loaded = made(tmp_path, lora={**LORA, "loraplus_lr_ratio": 16}, optim="adamw_bnb_8bit")
    assert (loaded.recipe.lora.lr_ratio, loaded.recipe.train.optim) == (16.0, "adamw_8bit")
