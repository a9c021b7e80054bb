"""On a GPU: varlen and flex_attention equal an fp32 reference to the rounding of 16 bits, kernel by kernel and step by step."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from swiftlite.dist.world import leave
from swiftlite.models import varlen
from swiftlite.train.console import Console
from swiftlite.train.loop import train_step
from swiftlite.train.plan import make_plan
from swiftlite.train.run import Run
from tests.fixtures import model, tok
from tests.training import LORA, losses, recipe, token_rows, train

pytestmark = pytest.mark.gpu
LENGTHS = [300, 1, 40, 128, 500, 55]  # one row of 1024


def borders():
    segment = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).cuda()
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None].cuda()
    return segment, positions


def reference(query, key, value, window):
    """fp32 attention of each sample alone; [1, H, T, D] in, [1, T, H, D] out."""
    outs, groups = [], query.shape[1] // key.shape[1]
    for q, k, v in zip(*(x.split(LENGTHS, 2) for x in (query, key, value)), strict=True):
        at = torch.arange(q.shape[2], device=q.device)
        back = at[:, None] - at
        seen = (back >= 0) & (back < (window or len(at)))
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen))
    return torch.cat(outs, 2).transpose(1, 2)


def flex(query, key, value, window):
    segment, _ = borders()

    def seen(b, h, q, k):
        return (segment[q] == segment[k]) & (q >= k) & (q - k < (window or len(segment)))

    block = create_block_mask(seen, None, None, len(segment), len(segment), device="cuda")
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    return compiled(query, key, value, block_mask=block, enable_gqa=query.shape[1] != key.shape[1]).transpose(1, 2)


def ours(query, key, value, window):
    assert varlen._has_kernel(query, value)
    segments = varlen.segments_of(borders()[1])
    return varlen.attention(torch.nn.Module(), query, key, value, None, sliding_window=window, segments=segments)[0]


def gap(found, wanted):
    return float((found.detach().float() - wanted.detach()).norm() / wanted.detach().norm())


SHAPES = [(8, 8, 64), (8, 2, 128), (4, 2, 256)]
CASES = [
    (ours, *shape, window, dtype) for shape in SHAPES for window in (None, 1, 100) for dtype in (torch.bfloat16, torch.float16)
]
CASES += [(flex, 8, 2, 128, window, torch.bfloat16) for window in (None, 100)]  # each compiles anew


@pytest.mark.parametrize(("backend", "heads", "kv_heads", "size", "window", "dtype"), CASES)
def test_kernels_equal_fp32(backend, heads, kv_heads, size, window, dtype):
    torch.manual_seed(0)
    given = [torch.randn(1, n, sum(LENGTHS), size, device="cuda", dtype=dtype) for n in (heads, kv_heads, kv_heads)]
    exact = [x.float().requires_grad_() for x in given]
    given = [x.requires_grad_() for x in given]
    wanted = reference(*exact, window)
    weight = torch.randn_like(wanted).to(dtype)
    found = backend(*given, window)
    assert found.dtype == dtype and gap(found, wanted) <= 1e-2
    # A token that sees itself alone gives its scores no gradient, so that only rounding is left of it.
    first = 2 if window == 1 else 0
    grads = torch.autograd.grad((found * weight).float().sum(), given[first:])
    for grad, right in zip(grads, torch.autograd.grad((wanted * weight.float()).sum(), exact[first:]), strict=True):
        assert gap(grad, right) <= 1e-2


def test_value_heads_may_be_smaller_and_sizes_odd():
    torch.manual_seed(0)
    where = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    q, k, v = (torch.randn(1, 4, sum(LENGTHS), size, **where) for size in (100, 100, 64))
    found, wanted = ours(q, k, v, None), reference(q.float(), k.float(), v.float(), None)
    assert gap(found, wanted) <= 1e-2
    weight = torch.randn_like(wanted)
    for grad, right in zip(
        torch.autograd.grad((found * weight).sum(), (q, k, v)),
        torch.autograd.grad((wanted * weight).sum(), (q, k, v)),
        strict=True,
    ):
        assert gap(grad, right.float()) <= 1e-2


@pytest.fixture
def no_group_left():
    yield
    leave()


@pytest.mark.parametrize(("precision", "limit"), [("fp32", 1e-4), ("bf16", 5e-2)])
@pytest.mark.parametrize("data", [{"packing": True, "max_length": 160}, {"padding_free": True}])
@pytest.mark.parametrize("kind", ["LLAMA", "QWEN3", "GEMMA3", "MIXTRAL"])
def test_a_step_equals_single_rows_in_fp32(tmp_path, no_group_left, kind, data, precision, limit):
    folder = tmp_path / kind.lower()
    model(kind, head_dim=16).save_pretrained(folder)
    tok().save_pretrained(folder)
    found = []
    for device, name, joined in (("cpu", "fp32", {}), ("cuda", precision, data)):
        loaded = recipe(
            tmp_path, rows=token_rows([40, 90, 7, 130, 66, 25]), kind=kind, data=joined,
            model={"attn_implementation": "varlen" if joined else "eager"},
            train={"device": device, "precision": name, "global_batch_size": 64, "per_device_train_batch_size": 4,
                   "gradient_checkpointing": bool(joined)},
        )  # fmt: skip
        run = Run(make_plan(loaded), Console(quiet=True))
        run.optimizer.zero_grad = lambda *a, **k: None
        report = train_step(run, run.plan.loader.group(0), 0.0)
        named = {n: p.grad for n, p in run.root.named_parameters()}
        found.append((report, {n: (g.full_tensor() if hasattr(g, "full_tensor") else g).float().cpu() for n, g in named.items()}))
        leave()
    (plain, grads), (report, joined) = found
    # Two experts of nearly one weight may be told apart otherwise in bf16: for those the loss is enough.
    assert report.loss == pytest.approx(plain.loss, rel=limit)
    if kind == "MIXTRAL" and precision == "bf16":
        return
    assert report.grad_norm == pytest.approx(plain.grad_norm, rel=limit)
    difference = torch.stack([(joined[n] - grads[n]).norm() for n in grads]).norm()
    assert difference <= limit * torch.stack([g.norm() for g in grads.values()]).norm()


@pytest.mark.parametrize("strategy", ["none", "fsdp"])
def test_lora_runs_with_rows_of_many_lengths(tmp_path, no_group_left, strategy):
    folder = tmp_path / "llama"
    model("LLAMA", head_dim=128, num_attention_heads=4, num_key_value_heads=2).save_pretrained(folder)
    tok().save_pretrained(folder)
    loaded = recipe(
        tmp_path, rows=token_rows([100, 120, 90, 60, 150]), data={"padding_free": True, "eval": str(tmp_path / "rows.jsonl")},
        model={"attn_implementation": "varlen"}, strategy=strategy, lora=LORA,
        train={"device": "cuda", "precision": "bf16", "global_batch_size": 2, "per_device_train_batch_size": 2,
               "num_train_epochs": 8, "gradient_checkpointing": True},
        eval={"per_device_eval_batch_size": 4, "eval_on_start": True},
    )  # fmt: skip
    found = losses(train(loaded))
    assert len(found) == 24 and sum(found[-3:]) < sum(found[:3])
