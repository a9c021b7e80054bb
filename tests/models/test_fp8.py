"""Float8 weights: one copy for both products, errors as float8 makes them, no token that feels another."""

import pytest
import torch
from torch import nn

from swiftlite.models import fp8
from swiftlite.models.packed import PackedLinear, packing_notes, stored_weights
from swiftlite.recipe.schema import QuantizeSection

TYPES = [torch.float32, torch.bfloat16, torch.float16]


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.float() - exact).norm() / exact.norm())


def layer(rows: int, columns: int, native: bool, bias: bool = False, dtype=torch.float32, method: str = "fp8") -> PackedLinear:
    """A packed layer with the weight numbers(rows, columns) / 10."""
    with torch.device("meta"):
        plain = nn.Linear(columns, rows, bias=bias, dtype=dtype)
    made = PackedLinear(plain, QuantizeSection(method=method.partition("_")[0]), native)
    made.stored.pack(numbers(rows, columns, dtype=dtype) / 10)
    made.stored.finish()
    if bias:
        made.bias = nn.Parameter(numbers(rows, seed=5, dtype=dtype))
    return made


def test_rows_are_rounded_with_a_scale_of_their_own():
    x = numbers(64, 256)
    x[3] *= 1e4
    x[4] *= 1e-6
    x[5] = 0
    rounded, scale = fp8.round_rows(x)
    assert rounded.dtype == torch.float8_e4m3fn and scale.shape == (64, 1)
    back = rounded.float() * scale
    assert back[5].eq(0).all() and rounded.float().isfinite().all()
    nonzero = x.abs().sum(1) > 0
    errors = (back - x).norm(dim=1)[nonzero] / x.norm(dim=1)[nonzero]
    assert errors.max() < 0.035 and 0.02 < float(errors.mean()) < 0.03
    assert torch.equal(rounded.float().abs().amax(1)[nonzero], torch.full((63,), fp8.LARGEST))


@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_stored_is_the_rounded_weight(dtype):
    made = layer(48, 64, native=False, dtype=dtype)
    rounded, scale = fp8.round_rows(numbers(48, 64, dtype=dtype) / 10)
    for wanted in TYPES:
        assert torch.equal(made.unpacked(wanted), (rounded.float() * scale).to(wanted))
    assert sum(p.numel() * p.element_size() for p in made.parameters()) == 48 * 64 + 48 * 4


def test_products_err_as_float8_does():
    """Both sides are rounded: by 2.6e-2 each, so the product by about 1.4 times as much, in either direction."""
    w, x, g = numbers(256, 512) / 10, numbers(128, 512, seed=1), numbers(128, 256, seed=2)
    tensors = layer(256, 512, native=True).stored.tensors()
    assert 0.02 < off(fp8.unpack(tensors, torch.float32), w) < 0.03
    assert 0.03 < off(fp8.product(x, tensors), x @ w.mT) < 0.042
    assert 0.03 < off(fp8.product_back(g, tensors), g @ w) < 0.042


def test_one_copy_serves_the_way_back_as_well_as_a_second_one():
    """Scales of rows go into the gradient before it is rounded; a second copy, with scales by column, errs no less."""
    w, g = numbers(256, 512) / 10, numbers(128, 256, seed=2)
    w[::7] *= 30  # rows of different sizes
    made = layer(256, 512, native=True)
    made.stored.pack(w)
    turned, scale = fp8.round_rows(w.mT)
    rounded, scale_g = fp8.round_rows(g)
    second = fp8._mm(rounded, turned, scale_g, scale, torch.float32)
    assert off(fp8.product_back(g, made.stored.tensors()), g @ w) < 1.1 * off(second, g @ w)


@pytest.mark.parametrize("dtype", TYPES)
def test_no_token_feels_another(dtype):
    x, g = numbers(32, 64, seed=1, dtype=dtype), numbers(32, 48, seed=2, dtype=dtype)
    tensors = layer(48, 64, native=True, dtype=dtype).stored.tensors()
    ways = [(fp8.product, x), (fp8.product_back, g)]
    for way, rows in ways:
        before, other = way(rows, tensors), rows.clone()
        other[5] *= 1000
        other[6] = 0
        after = way(other, tensors)
        untouched = [i for i in range(32) if i not in (5, 6)]
        assert torch.equal(after[untouched], before[untouched])
        assert not torch.equal(after[5], before[5]) and after[6].eq(0).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_the_gradient_is_the_product_back(dtype, bias):
    made = layer(48, 64, native=True, bias=bias, dtype=dtype)
    x, g = numbers(3, 5, 64, seed=1, dtype=dtype).requires_grad_(), numbers(3, 5, 48, seed=2, dtype=dtype)
    y = made(x)
    y.backward(g)
    plain = fp8.product(x.detach().reshape(15, 64), made.stored.tensors()).reshape(3, 5, 48)
    assert y.dtype == dtype and torch.equal(y, plain if made.bias is None else plain + made.bias)
    assert torch.equal(x.grad, fp8.product_back(g.reshape(15, 48), made.stored.tensors()).reshape(3, 5, 64))
    assert all(not p.requires_grad for p in made.stored.tensors())


def test_a_gradient_that_is_no_plain_matrix_goes_back_too():
    made = layer(48, 64, native=True)
    x = numbers(4, 64, seed=1).requires_grad_()
    made(x).sum().backward()  # a gradient of one number, seen as a matrix
    assert torch.equal(x.grad, fp8.product_back(torch.ones(4, 48), made.stored.tensors()))


@pytest.mark.parametrize("dtype", TYPES)
def test_stored_only_is_a_plain_layer_with_the_rounded_weight(dtype):
    made = layer(48, 64, native=False, bias=True, dtype=dtype)
    plain = nn.Linear(64, 48, dtype=dtype)
    plain.weight.data, plain.bias.data = made.unpacked(dtype), made.bias.detach()
    grads = []
    for module in (made, plain):
        x = numbers(7, 64, seed=1, dtype=dtype).requires_grad_()
        y = module(x)
        y.square().sum().backward()
        grads += [y.detach(), x.grad]
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 64 * torch.finfo(dtype).eps}
    torch.testing.assert_close(grads[0], grads[2], **tolerance)
    torch.testing.assert_close(grads[1], grads[3], rtol=tolerance["rtol"], atol=4 * tolerance["atol"])


@pytest.mark.parametrize(
    ("rows", "columns", "native", "words"),
    [
        (48, 64, True, None),
        (48, 64, False, "this device has no float8 products"),
        (40, 64, True, "no multiples of 16"),
        (48, 72, True, "no multiples of 16"),
    ],
)
def test_layers_that_cannot_are_stored_only_and_that_is_said(rows, columns, native, words):
    root = nn.Sequential(layer(rows, columns, native))
    ((_, stored),) = stored_weights(root)
    notes = packing_notes(root)
    assert stored.method == ("fp8" if words is None else "fp8_stored")
    assert "1 weights packed as fp8" in notes[0] and "rounding moved them by 2." in notes[0]
    assert notes[1:] == [] if words is None else (words in notes[1] and "1 float8 weights" in notes[1])


def test_each_reason_for_storing_only_is_said():
    """One layer that cannot for its shape must not speak for others."""
    root = nn.Sequential(layer(40, 64, True), layer(48, 64, True), layer(40, 64, True), layer(48, 64, False))
    notes = packing_notes(root)[1:]
    assert [n[:16] for n in notes] == ["2 float8 weights", "1 float8 weights"]
    assert "no multiples of 16" in notes[0] and "this device" in notes[1]


def test_native_asks_the_device():
    assert not fp8.native(torch.device("cpu"))


def test_rounding_in_one_pass_is_the_same_and_compiled_once(monkeypatch):
    """Whatever an input is a view of, and with or without a gradient: layers that are not compiled see all of that."""

    def seen() -> list[torch.Tensor]:
        found = []
        for rows, columns in ((48, 64), (64, 96), (96, 48)):
            made = layer(rows, columns, native=True)
            for x in (numbers(6, columns, seed=1), numbers(2, 3, columns, seed=2)[:, :2], numbers(12, columns, seed=3)[::2]):
                x = x.requires_grad_(columns != 96)
                y = made(x * 2)
                y.square().sum().backward() if y.requires_grad else None
                found += [y.detach(), x.grad if x.grad is not None else y.detach()]
        return found

    plain = seen()
    torch._dynamo.reset()
    fp8._compiled.cache_clear()
    counts = torch._dynamo.utils.counters
    counts.clear()
    monkeypatch.setattr(fp8, "_compiles", lambda device: True)
    assert all(torch.equal(a, b) for a, b in zip(seen(), plain, strict=True))
    assert counts["stats"]["unique_graphs"] == 2  # one for what goes forward, one for what comes back


def test_ops_keep_their_word_to_the_compiler():
    x, made = numbers(4, 64, seed=1).requires_grad_(), layer(48, 64, native=True)
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")  # no kernel compares float8 inputs
    arguments = (x, *fp8.round_rows(x.detach()), *made.stored.tensors())
    torch.library.opcheck(torch.ops.swiftlite.fp8_mm.default, arguments, test_utils=checks)
    for method in ("fp8_stored", "nf4"):
        weights = layer(48, 64, False, method=method).stored.tensors()
        torch.library.opcheck(torch.ops.swiftlite.packed_mm.default, (x, weights, method))
        torch.library.opcheck(torch.ops.swiftlite.unpack.default, (weights, method, 64, torch.float32))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(bad):
    """Rounding must not make a number of it: a step that is not finite is stopped at."""
    tensors = layer(48, 64, native=True).stored.tensors()
    for way, width in ((fp8.product, 64), (fp8.product_back, 48)):
        rows = numbers(6, width, seed=1)
        rows[2, 7] = bad
        found = way(rows, tensors).isfinite().all(1)
        assert found.tolist() == [True, True, False, True, True, True]


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20, 1e30])
def test_rows_of_any_size_keep_their_digits(size):
    """Scales are fp32; what is below 1e-12 is as good as zero to all that follows."""
    tensors = layer(48, 64, native=True).stored.tensors()
    x, w = numbers(6, 64, seed=1), numbers(48, 64) / 10
    found = fp8.product(x * size, tensors)
    assert found.isfinite().all()
    if size > 1e-12:
        assert off(found / size, x @ w.mT) < 0.045
    else:
        assert found.abs().max() < 1e-12
