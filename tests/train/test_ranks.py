"""One set of numbers: the first step and ten optimizer steps are those of one process, on every strategy and number of ranks."""

import pytest
import torch

from swiftlite.dist.launch import ranks
from swiftlite.dist.tensors import copy_into, whole
from swiftlite.dist.world import leave
from swiftlite.recipe.load import Loaded
from swiftlite.recipe.resolve import resolve
from swiftlite.train.console import Console
from swiftlite.train.loop import train_step
from swiftlite.train.plan import make_plan
from swiftlite.train.run import Run
from tests.ranks import run_ranks
from tests.training import LORA, recipe, token_rows

LENGTHS = [4, 6, 12, 20, 9, 31, 2, 17, 25]
SPREAD = ("ddp", "fsdp", "zero1", "zero2", "zero3", "hsdp")


def steps(loaded: Loaded, count: int) -> dict:
    """The first step's loss, norm and gradients, and the weights after `count` steps."""
    torch.manual_seed(0)
    run = Run(make_plan(resolve(loaded, ranks().size)), Console(quiet=True))
    with torch.no_grad():  # B starts at zero, which would leave A without a gradient
        for name, parameter in run.root.named_parameters():
            if "lora_B" in name:
                generator = torch.Generator().manual_seed(len(name))
                noise = torch.randn(parameter.shape, generator=generator) * 0.1
                for copy in {id(p): p for p in (parameter, run.masters[name])}.values():
                    copy_into(copy, noise)
    zero, grads = run.optimizer.zero_grad, {}

    def keep(*args, **kwargs):
        if not grads:
            grads.update({n: whole(p.grad).clone() for n, p in run.masters.items() if p.grad is not None})
        zero(*args, **kwargs)

    run.optimizer.zero_grad = keep
    reports = [train_step(run, run.plan.loader.group(step), run.recipe.train.learning_rate) for step in range(count)]
    weights = {n: whole(p).clone() for n, p in run.root.named_parameters() if p.requires_grad}
    return {
        "loss": reports[0].loss,
        "norm": reports[0].grad_norm,
        "tokens": reports[0].trained_tokens,
        "grads": grads,
        "weights": weights,
    }


def assert_same(found: dict, expected: dict) -> None:
    """DESIGN's tolerance: losses and norms 1e-5, gradients 5e-6 per tensor, weights after AdamW at 1e-3 to 1e-4."""
    assert found["tokens"] == expected["tokens"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5) and found["norm"] == pytest.approx(
        expected["norm"], rel=1e-5
    )
    assert found["grads"].keys() == expected["grads"].keys()
    for name, grad in expected["grads"].items():
        if grad.norm() > 1e-6 * expected["norm"]:
            assert (found["grads"][name] - grad).norm() / grad.norm() <= 5e-6, name
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=0, atol=1e-4, msg=name)


def one(path, kind, method, strategy, micro=1, **keys):
    sections = {
        "strategy": strategy,
        "train": {
            "global_batch_size": 8,
            "per_device_train_batch_size": micro,
            "learning_rate": 1e-3,
            "max_grad_norm": 1.0,
            **keys,
        },
    }
    return recipe(path, rows=token_rows(LENGTHS), kind=kind, **sections, **({"lora": LORA} if method == "lora" else {}))


def spread(name: str, size: int, **keys: str) -> dict:
    return {"name": name, **({"shard": size // 2} if name == "hsdp" else {}), **keys}


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("strategy", SPREAD)
def test_two_ranks_equal_one(tmp_path, strategy, method):
    expected = steps(one(tmp_path, "LLAMA", method, "none", 8), 3)
    for found in run_ranks(2, steps, one(tmp_path, "LLAMA", method, spread(strategy, 2), 2), 3):
        assert_same(found, expected)


@pytest.mark.parametrize("offload", ["params", "optimizer"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_offload_changes_nothing(tmp_path, method, offload):
    expected = steps(one(tmp_path, "GEMMA3", method, "none", 8), 3)
    for found in run_ranks(2, steps, one(tmp_path, "GEMMA3", method, spread("fsdp", 2, offload=offload), 2), 3):
        assert_same(found, expected)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_one_process_offloads_too(tmp_path, method):
    """Strategy none in fp32 wraps nothing by itself."""
    found = []
    for offload in ("none", "params", "optimizer"):
        found.append(steps(one(tmp_path, "LLAMA", method, {"name": "none", "offload": offload}, 8), 3))
        leave()
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("kind", ["LLAMA", "QWEN3_MOE", "GEMMA3", "GPT_OSS"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_strategy_and_split_equals_one_process(tmp_path, kind, method, size):
    """Ten AdamW steps at 1e-3, over epochs whose last step leaves ranks without rows."""
    expected = steps(one(tmp_path, kind, method, "none", 8), 10)
    for i, strategy in enumerate(SPREAD):
        for offload in ("none", "params", "optimizer") if strategy in ("fsdp", "zero3", "hsdp") else ("none",):
            how = spread(strategy, size, offload=offload)
            checkpointing = "full" if i % 2 else "none"
            loaded = one(tmp_path, kind, method, how, (1, 2, 4)[i % 3], gradient_checkpointing=checkpointing)
            for found in run_ranks(size, steps, loaded, 10):
                assert_same(found, expected)
