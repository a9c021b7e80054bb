"""8-bit AdamW on a GPU: one kernel a batch of blocks, the numbers of a CPU, little memory beside its state."""

import pytest
import torch
from torch import nn
from torch._inductor import metrics

from swiftlite.dist.tensors import local
from swiftlite.dist.world import leave
from swiftlite.train import adamw8bit
from swiftlite.train.adamw8bit import AdamW8bit
from swiftlite.train.console import Console
from swiftlite.train.loop import train_step
from swiftlite.train.plan import make_plan
from swiftlite.train.run import Run
from tests.training import losses, recipe, token_rows, train

pytestmark = pytest.mark.gpu
SHAPES = [(64, 1024), (1024, 16), (96, 576), (3, 8, 64), (512,)]


def trained(device: str, dtype: torch.dtype, steps: int = 5) -> tuple[list[nn.Parameter], AdamW8bit]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]
    optimizer = AdamW8bit(parameters, lr=1e-2, weight_decay=0.1)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = (torch.randn(parameter.shape, generator=generator) ** 3).to(device, dtype)
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_gives_the_numbers_of_a_cpu(dtype):
    ours, optimizer = trained("cuda", dtype)
    theirs, reference = trained("cpu", dtype)
    for mine, other in zip(ours, theirs, strict=True):
        close = torch.isclose(mine.cpu().float(), other.float(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
        assert close.float().mean() > 0.999  # a product that is rounded once more may lead to the next code
        for name, state in optimizer.state[mine].items():
            if state.dtype == torch.uint8:
                off = (state.cpu().int() - reference.state[other][name].int()).abs()
                # Where a small number is left of two large ones, rounding is several codes.
                assert (off > 1).float().mean() < 1e-3 and (off > 0).float().mean() < (1e-3 if dtype == torch.float32 else 1e-2)


def test_blocks_of_one_size_are_one_kernel():
    torch._dynamo.reset()
    adamw8bit._compiled.cache_clear()
    metrics.reset()
    sizes = {adamw8bit.block_of(shape) for shape in SHAPES} - {0}
    trained("cuda", torch.float32)
    assert metrics.generated_kernel_count == len(sizes)


def test_large_weights_are_stepped_in_pieces():
    weight = nn.Parameter(torch.randn(16384, 8192, device="cuda"))
    weight.grad = torch.randn_like(weight)
    optimizer = AdamW8bit([weight], lr=1e-3)
    optimizer.step()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before < 64 * 2**20  # an fp32 copy of the weight would be 512 MiB


@pytest.mark.parametrize("optim", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("offload", ["optimizer", "params"])
def test_what_is_offloaded_is_in_host_memory(tmp_path, offload, optim):
    """On a mesh of GPUs too; and what is saved from there comes back to it."""
    keys = {"rows": token_rows([9, 17, 6, 12]), "strategy": {"name": "fsdp", "offload": offload}}
    keys["train"] = {"device": "cuda", "optim": optim, "max_steps": 4}
    train(recipe(tmp_path, **keys, output=str(tmp_path / "whole"), checkpoint={"save_strategy": "steps", "save_steps": 2}))
    keys["train"] = {**keys["train"], "max_steps": 2}
    train(recipe(tmp_path, **keys, output=str(tmp_path / "parts"), checkpoint={"save_strategy": "steps", "save_steps": 2}))
    keys["train"] = {**keys["train"], "max_steps": 4}
    run = Run(
        make_plan(recipe(tmp_path, **keys, output=str(tmp_path / "parts"), checkpoint={"resume": "auto"})), Console(quiet=True)
    )
    run.begin()
    states = [t for state in run.optimizer.state.values() for t in state.values()]
    assert states and all(local(t).device.type == "cpu" for t in [*run.masters.values(), *states])
    found = [train_step(run, run.plan.loader.group(step), 0.01).loss for step in (2, 3)]
    run.finish()
    leave()
    assert found == pytest.approx(losses(tmp_path / "whole")[2:], rel=1e-4)
