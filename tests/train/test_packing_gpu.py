"""Packing on a GPU: the backend that is chosen there equals an fp32 reference on single rows, to the rounding of its type."""

import pytest
import torch

from swiftlite.dist.world import leave
from swiftlite.train.console import Console
from swiftlite.train.loop import train_step
from swiftlite.train.plan import make_plan
from swiftlite.train.run import Run
from tests.fixtures import model, tok
from tests.training import LORA, losses, recipe, token_rows, train


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "limit"), [("fp32", 1e-4), ("bf16", 5e-2)])
@pytest.mark.parametrize("attention", ["auto", "sdpa"])
@pytest.mark.parametrize("kind", ["LLAMA", "QWEN3", "GEMMA3"])
def test_packed_equals_single_rows_in_fp32(tmp_path, kind, attention, precision, limit):
    folder = tmp_path / kind.lower()
    model(kind, head_dim=16).save_pretrained(folder)
    tok().save_pretrained(folder)
    found = []
    for device, name, packing in (("cpu", "fp32", False), ("cuda", precision, True)):
        loaded = recipe(
            tmp_path, rows=token_rows([40, 90, 7, 130, 66, 25]), kind=kind, data={"packing": packing, "max_length": 160},
            model={"attn_implementation": attention if packing else "eager"},
            train={"device": device, "precision": name, "global_batch_size": 64, "per_device_train_batch_size": 4},
        )  # fmt: skip
        run = Run(make_plan(loaded), Console(quiet=True))
        run.optimizer.zero_grad = lambda *a, **k: None
        if packing and attention == "auto":
            assert run.root.config._attn_implementation == "flex_attention"
        report = train_step(run, run.plan.loader.group(0), 0.0)
        named = {n: p.grad for n, p in run.root.named_parameters()}
        found.append((report, {n: (g.full_tensor() if hasattr(g, "full_tensor") else g).float().cpu() for n, g in named.items()}))
        leave()
    (plain, grads), (packed, joined) = found
    assert packed.loss == pytest.approx(plain.loss, rel=limit) and packed.grad_norm == pytest.approx(plain.grad_norm, rel=limit)
    gap = (
        torch.stack([(joined[n] - grads[n]).norm() for n in grads]).norm()
        / torch.stack([g.norm() for g in grads.values()]).norm()
    )
    assert gap <= limit


@pytest.mark.gpu
def test_short_steps_and_evaluation_keep_to_one_shape(tmp_path):
    """Heads of 128, a short last batch, and an evaluation between: compiled attention must not meet an unknown shape."""
    folder = tmp_path / "llama"
    model("LLAMA", head_dim=128, num_attention_heads=4, num_key_value_heads=2).save_pretrained(folder)
    tok().save_pretrained(folder)
    rows = token_rows([100, 120, 90, 60, 150])
    loaded = recipe(
        tmp_path, rows=rows, data={"packing": True, "max_length": 256, "eval": str(tmp_path / "rows.jsonl")},
        train={"device": "cuda", "precision": "bf16", "global_batch_size": 2, "per_device_train_batch_size": 2,
               "num_train_epochs": 2},
        eval={"per_device_eval_batch_size": 4, "eval_on_start": True}, strategy="fsdp", lora=LORA,
    )  # fmt: skip
    plan = make_plan(loaded)
    assert plan.loader.units_per_epoch % 2 == 1
    output = train(loaded)
    assert len(losses(output)) == 2 * plan.loader.steps_per_epoch
