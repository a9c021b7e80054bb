"""Packed weights on a GPU: the kernel has the CPU's values to the bit, float8 its numbers, and nothing stays unpacked."""

import pytest
import torch
from torch import nn

from swiftlite.dist.tensors import whole
from swiftlite.dist.world import leave
from swiftlite.models import fp8, nf4, packed
from swiftlite.models.adapter_files import slots
from swiftlite.models.packed import PackedLinear, Stored, stored_weights
from swiftlite.recipe.schema import QuantizeSection
from tests.models.test_packed import DOUBLE, EXPERTS, FP8, LORA, NF4, carriers, made, seen_in_a_step, started
from tests.training import losses, model_folder, recipe, token_rows, train

pytestmark = pytest.mark.gpu
TYPES = [torch.float32, torch.bfloat16, torch.float16]
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def no_group_left():
    yield
    leave()


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def needs_float8() -> None:
    if not fp8.native(CUDA):
        pytest.skip("no float8 products on this GPU")


def layer(rows: int, columns: int, quantize: dict, dtype=torch.bfloat16, device=CUDA, native: bool = True) -> PackedLinear:
    with torch.device("meta"):
        plain = nn.Linear(columns, rows, bias=False, dtype=dtype)
    result = PackedLinear(plain, QuantizeSection(**quantize), native)
    result.stored.pack((numbers(rows, columns) / 10).to(device, dtype))
    result.stored.finish()
    return result


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("shape", [(1, 64), (6, 192), (129, 704), (1024, 4096), (8, 96, 128)])
def test_the_kernel_has_the_values_of_the_cpu(shape, double, dtype):
    w = numbers(*shape)
    w.view(-1)[:64] = 0
    w.view(-1)[-1] = 300.0
    section = QuantizeSection(method="nf4", double_quant=double)
    stored = Stored(nn.Module(), "weight", torch.empty(shape, dtype=dtype, device="meta"), section)
    bytes_, absmax = nf4.quantise(w.to(dtype))
    stored.put("packed", bytes_, CUDA)
    if double:
        codes, nested = nf4.quantise_scales(absmax)
        stored.put("codes", nn.functional.pad(codes, (0, -codes.shape[-1] % dtype.itemsize)), CUDA)
        stored.put("nested", nested.view(torch.uint8), CUDA)
        absmax = nf4.dequantise_scales(codes, nested)
    else:
        stored.put("absmax", absmax.view(torch.uint8), CUDA)
    for wanted in TYPES:
        found = stored.read(wanted)
        assert found.is_cuda and torch.equal(found.cpu(), nf4.dequantise(bytes_, absmax, wanted))


@pytest.mark.parametrize("dtype", TYPES)
def test_packing_has_the_bytes_of_the_cpu(dtype):
    w = numbers(512, 1024).to(dtype)
    w[3, :64] = 0
    here, there = nf4.quantise(w.to(CUDA)), nf4.quantise(w)
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.cpu(), other)
    codes, nested = (t.cpu() for t in nf4.quantise_scales(here[1]))
    expected = nf4.quantise_scales(there[1])
    torch.testing.assert_close(nested, expected[1], rtol=2e-7, atol=0)
    assert (codes != expected[0]).float().mean() < 1e-3
    for one, other in zip(fp8.round_rows(w.to(CUDA)), fp8.round_rows(w), strict=True):
        assert torch.equal(one.cpu().view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("quantize", [NF4, DOUBLE], ids=["nf4", "double"])
def test_products_are_those_of_the_unpacked_weight(quantize):
    made_layer = layer(512, 1024, quantize)
    x = numbers(64, 1024, seed=1).to(CUDA, torch.bfloat16).requires_grad_()
    y = made_layer(x)
    g = numbers(64, 512, seed=2).to(CUDA, torch.bfloat16)
    y.backward(g)
    w = made_layer.unpacked(torch.bfloat16)
    assert torch.equal(y, x.detach() @ w.mT) and torch.equal(x.grad, g @ w)


@pytest.mark.parametrize("method", [NF4, DOUBLE, FP8], ids=["nf4", "double", "fp8"])
def test_a_compiled_layer_is_the_same_without_a_break(method):
    made_layer = layer(512, 1024, method, native=fp8.native(CUDA))
    outs = []
    for run in (made_layer, torch.compile(made_layer, fullgraph=True)):
        x = numbers(4, 16, 1024, seed=1).to(CUDA, torch.bfloat16).requires_grad_()
        y = run(x)
        y.float().square().sum().backward()
        outs.append((y.detach(), x.grad))
    for one, other in zip(*outs, strict=True):
        assert (one.float() - other.float()).norm() <= 5e-3 * one.float().norm()


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.cpu().float() - exact.cpu().float()).norm() / exact.cpu().float().norm())


def test_float8_products_are_those_of_the_cpu():
    needs_float8()
    here = layer(512, 1024, FP8)
    there = layer(512, 1024, FP8, device=torch.device("cpu"))
    assert here.stored.method == "fp8"
    x, g = (numbers(64, n, seed=n).to(torch.bfloat16) for n in (1024, 512))
    assert off(fp8.product(x.to(CUDA), here.stored.tensors()), fp8.product(x, there.stored.tensors())) < 4e-3
    assert off(fp8.product_back(g.to(CUDA), here.stored.tensors()), fp8.product_back(g, there.stored.tensors())) < 4e-3
    w = numbers(512, 1024) / 10
    assert 0.03 < off(fp8.product(x.to(CUDA), here.stored.tensors()), x.float() @ w.mT) < 0.042


def test_no_token_feels_another():
    needs_float8()
    tensors = layer(512, 1024, FP8).stored.tensors()
    for way, width in ((fp8.product, 1024), (fp8.product_back, 512)):
        x = numbers(256, width, seed=1).to(CUDA, torch.bfloat16)
        other = x.clone()
        other[5] *= 1000
        one, two = way(x, tensors), way(other, tensors)
        rest = [i for i in range(256) if i != 5]
        assert torch.equal(one[rest], two[rest]) and not torch.equal(one[5], two[5])


@pytest.mark.parametrize("rows", [1, 3, 17])
def test_float8_takes_any_number_of_tokens(rows):
    needs_float8()
    x = numbers(rows, 1024, seed=1).to(CUDA, torch.bfloat16).requires_grad_()
    y = layer(512, 1024, FP8)(x)
    y.sum().backward()
    assert y.shape == (rows, 512) and x.grad.isfinite().all()


@pytest.mark.parametrize("method", [NF4, DOUBLE, FP8], ids=["nf4", "double", "fp8"])
def test_nothing_unpacked_waits_for_the_backward_pass(method):
    """Eight layers keep their inputs; sixteen bits of any weight would be far more."""
    layers = nn.Sequential(*(layer(2048, 2048, method, native=fp8.native(CUDA)) for _ in range(8)))
    x = numbers(16, 2048).to(CUDA, torch.bfloat16).requires_grad_()
    layers(x).sum().backward()  # workspaces of libraries
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = layers(x)
    assert torch.cuda.memory_allocated() - before < 2048 * 2048 * 2
    torch.cuda.reset_peak_memory_stats()
    y.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 4 * 2048 * 2048 * 2


@pytest.mark.parametrize("strategy", ["none", {"name": "fsdp"}, {"name": "fsdp", "offload": "params"}], ids=str)
@pytest.mark.parametrize("quantize", [NF4, DOUBLE], ids=["nf4", "double"])
def test_no_byte_changes_on_its_way_through_a_gpu(tmp_path, quantize, strategy):
    loaded = made(tmp_path, quantize, strategy, train={"device": "cuda", "precision": "bf16", "gradient_checkpointing": "full"})
    assert seen_in_a_step(loaded, "bf16") == []


@pytest.mark.parametrize("quantize", [NF4, DOUBLE, FP8], ids=["nf4", "double", "fp8"])
def test_offloaded_weights_have_the_same_bytes(tmp_path, quantize):
    keys = {"train": {"device": "cuda", "precision": "bf16"}}
    there = carriers(started(made(tmp_path, quantize, **keys)).root)
    leave()
    run = started(made(tmp_path, quantize, {"name": "none", "offload": "params"}, **keys))
    assert all(t.device.type == "cpu" for _, s in stored_weights(run.root) for t in s.tensors())
    found = carriers(run.root)
    assert [n for n in there if not torch.equal(found[n].cpu(), there[n].cpu())] == []


@pytest.mark.parametrize("kind", ["LLAMA", "QWEN3_MOE"])
@pytest.mark.parametrize("quantize", [DOUBLE, FP8], ids=["double", "fp8"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_learns_as_on_a_cpu(tmp_path, kind, quantize, compiled):
    sizes = EXPERTS if kind == "QWEN3_MOE" else {"hidden_size": 64, "intermediate_size": 128}
    model_folder(tmp_path, kind, **sizes)
    found = []
    for device in ("cpu", "cuda"):
        keys = {"device": device, "precision": "bf16", "global_batch_size": 4, "per_device_train_batch_size": 4, "max_steps": 6}
        keys["torch_compile"] = compiled and device == "cuda"
        given = {"lora": LORA, "quantize": quantize, "train": {**keys, "learning_rate": 3e-3}, "output": str(tmp_path / device)}
        found.append(losses(train(recipe(tmp_path, rows=token_rows([30] * 8), kind=kind, **given))))
        leave()
    assert found[1] == pytest.approx(found[0], rel=0.02) and found[1][-1] < found[1][0]


@pytest.mark.parametrize("offload", ["none", "params"])
@pytest.mark.parametrize("quantize", [DOUBLE, FP8], ids=["double", "fp8"])
def test_adapters_give_back_as_on_a_cpu(tmp_path, quantize, offload):
    updates = []
    for device in ("cpu", "cuda"):
        keys = {
            "train": {"device": device, "precision": "bf16", "torch_compile": device == "cuda"},
            "lora": {**LORA, "init": "qera"},
        }
        run = started(made(tmp_path, quantize, {"name": "none", "offload": offload}, **keys))
        factors = {key: whole(slot.tensor).float().cpu() for key, slot in slots(run.root).items()}
        updates.append([factors[key.replace("lora_A", "lora_B")] @ a for key, a in factors.items() if "lora_A" in key])
        leave()
    gaps = [float((b - a).norm() / a.norm()) for a, b in zip(*updates, strict=True)]
    assert max(gaps) < 0.1, gaps


def test_the_kernel_is_the_way_taken(monkeypatch):
    calls = []
    plain = nf4._launch
    monkeypatch.setattr(nf4, "_launch", lambda *args: (calls.append(1), plain(*args)))
    one = layer(64, 128, DOUBLE)
    packed.unpack([t.detach() for t in one.stored.tensors()], "nf4", 128, torch.bfloat16)
    assert calls == [1]


def test_what_float8_products_add_is_said(tmp_path):
    needs_float8()
    run = started(made(tmp_path, FP8, train={"device": "cuda", "precision": "bf16", "torch_compile": True}))
    (said,) = [n for n in run.built.notes if "float8 products move" in n]
    assert 0.005 < float(said.partition(" by ")[2].partition("%")[0]) / 100 < 0.2
