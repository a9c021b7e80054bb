"""NF4 is bitsandbytes': its bytes and values on one process, and ours on any number of ranks."""

import pytest
import torch

from swiftlite.models import nf4
from swiftlite.models.packed import Stored
from swiftlite.recipe.schema import QuantizeSection

functional = pytest.importorskip("bitsandbytes.functional")

TYPES = [torch.float32, torch.bfloat16, torch.float16]


def weight(rows: int = 128, columns: int = 320, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal numbers with what real weights have besides: outliers, empty blocks, blocks of one sign, tiny and large rows."""
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02
    w[3, :64] = 0
    w[4, 70] = 900.0
    w[5] = w[5].abs()
    w[6, 1::2] = 0
    w[7] *= 1e-4
    w[8, :64] = 1.0
    return w.to(dtype)


def theirs(w: torch.Tensor, double: bool = False):
    return functional.quantize_4bit(w, blocksize=nf4.BLOCK, quant_type="nf4", compress_statistics=double)


def test_the_values_are_those_of_bitsandbytes():
    assert torch.equal(torch.tensor(nf4.VALUES), functional.get_4bit_type("nf4", device="cpu"))


@pytest.mark.parametrize("signed", [True, False])
def test_the_dynamic_map_is_that_of_bitsandbytes(signed):
    assert torch.equal(torch.tensor(nf4.dynamic_map(signed)), functional.create_dynamic_map(signed=signed))


@pytest.mark.parametrize("dtype", TYPES)
def test_bytes_scales_and_values_are_those_of_bitsandbytes(dtype):
    w = weight(dtype=dtype)
    packed, absmax = nf4.quantise(w)
    other, state = theirs(w)
    assert torch.equal(packed.flatten(), other.flatten())
    assert torch.equal(absmax.flatten(), state.absmax)
    assert torch.equal(nf4.dequantise(packed, absmax, dtype), functional.dequantize_4bit(other, state))


def test_halfway_values_go_where_bitsandbytes_puts_them():
    table = torch.tensor(nf4.VALUES)
    halves = (table[1:] + table[:-1]) / 2
    near = torch.cat([halves, halves.nextafter(torch.tensor(2.0)), halves.nextafter(torch.tensor(-2.0)), table, table[:3]])
    w = torch.cat([near, torch.ones(64)])[:64][None]
    w[0, 63] = 1.0
    assert torch.equal(nf4.quantise(w)[0].flatten(), theirs(w)[0].flatten())


def test_large_weights_are_packed_in_pieces(monkeypatch):
    w = weight(40, 192)
    packed, absmax = nf4.quantise(w)
    monkeypatch.setattr(nf4, "_chunk", lambda device: 7 * nf4.BLOCK)  # 120 blocks are no multiple of 7
    for one, other in zip(nf4.quantise(w), (packed, absmax), strict=True):
        assert torch.equal(one, other)


def test_fused_experts_are_packed_like_their_rows():
    w = weight(24, 128).reshape(4, 6, 128)
    packed, absmax = nf4.quantise(w)
    assert packed.shape == (4, 6, 64) and absmax.shape == (4, 6, 2)
    for expert in range(4):
        alone = nf4.quantise(w[expert])
        assert torch.equal(packed[expert], alone[0]) and torch.equal(absmax[expert], alone[1])
    assert torch.equal(nf4.dequantise(packed, absmax, torch.float32), functional.dequantize_4bit(*theirs(w)))


def test_the_error_is_that_of_nf4():
    w = torch.randn(512, 512, generator=torch.Generator().manual_seed(1))
    packed, absmax = nf4.quantise(w)
    for scales in (absmax, nf4.dequantise_scales(*nf4.quantise_scales(absmax))):
        error = (nf4.dequantise(packed, scales, torch.float32) - w).norm() / w.norm()
        assert 0.085 < error < 0.095


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(64, 256), (10, 64), (24, 704), (1, 64)])
def test_double_quantised_bytes_of_bitsandbytes_give_its_values(shape, dtype):
    """Also where the last block of scales is short: 10 and 264 scales."""
    w = (weight(64, 704, dtype)[: shape[0], : shape[1]]).contiguous()
    other, state = theirs(w, double=True)
    nested = torch.cat([state.state2.absmax, state.offset.reshape(1)])
    scales = nf4.dequantise_scales(state.absmax.reshape(shape[0], -1), nested)
    ours = nf4.dequantise(other.reshape(shape[0], -1), scales, dtype)
    assert torch.equal(ours, functional.dequantize_4bit(other, state))


def test_double_quantised_codes_are_nearly_those_of_bitsandbytes():
    """Its CPU search for a code is not always the nearest one; ours is."""
    different = count = 0
    for seed in range(4):
        w = torch.randn(256, 512, generator=torch.Generator().manual_seed(seed)) * 0.02
        codes, nested = nf4.quantise_scales(nf4.quantise(w)[1])
        _, state = theirs(w, double=True)
        assert (nested[-1] - state.offset).abs() <= 1e-7 * state.offset
        torch.testing.assert_close(nested[:-1], state.state2.absmax, rtol=1e-5, atol=0)
        different += int((codes.flatten() != state.absmax).sum())
        count += codes.numel()
    assert different <= 0.005 * count


def test_codes_of_scales_are_the_nearest():
    codes, nested = nf4.quantise_scales(nf4.quantise(weight(64, 256))[1])
    table = torch.tensor(nf4.dynamic_map())
    centred = nf4.quantise(weight(64, 256))[1] - nested[-1]
    scaled = centred.flatten() / nested[:-1].repeat_interleave(nf4.NESTED)[: centred.numel()]
    best = (scaled[:, None] - table).abs().amin(1)
    torch.testing.assert_close((scaled - table[codes.flatten().int()]).abs(), best, rtol=0, atol=1e-7)


@pytest.mark.parametrize("magnitude", [1.0, 1e4])
def test_the_mean_of_scales_does_not_depend_on_how_they_lie(magnitude):
    """fp32 sums of parts differ from the sum of all in most tensors; ours is made of blocks in their order."""
    absmax = torch.rand(37, 41, generator=torch.Generator().manual_seed(2)) * magnitude
    _, nested = nf4.quantise_scales(absmax)
    assert nested[-1] == absmax.double().sum().div(absmax.numel()).float()
    assert all(
        torch.equal(nf4.quantise_scales(absmax.reshape(shape))[1], nested) for shape in ((37 * 41,), (41, 37), (1, 37, 41))
    )


def test_scales_that_are_all_alike_survive():
    """What is left of them beside their mean is zero, or rounding."""
    for value in (0.0, 0.37):
        absmax = torch.full((6, 4), value)
        back = nf4.dequantise_scales(*nf4.quantise_scales(absmax))
        torch.testing.assert_close(back, absmax, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("shape", [(6, 64), (10, 192), (3, 4, 64)])
def test_carriers_hold_all_and_fit_their_type(shape, double, dtype):
    layout = nf4.carriers(shape, double, dtype.itemsize)
    owner, full = torch.nn.Module(), torch.empty(shape, dtype=dtype, device="meta")
    stored = Stored(owner, "weight", full, QuantizeSection(method="nf4", double_quant=double))
    for kind, size in layout.items():
        assert size[-1] % dtype.itemsize == 0
        carrier = getattr(owner, kind)
        assert carrier.dtype == dtype and carrier.numel() * dtype.itemsize == torch.Size(size).numel()
        assert not carrier.requires_grad
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    stored.pack(w)
    stored.finish()
    packed, absmax = nf4.quantise(w)
    scales = nf4.dequantise_scales(*nf4.quantise_scales(absmax)) if double else absmax
    for wanted in TYPES:
        assert torch.equal(stored.unpacked(wanted), nf4.dequantise(packed, scales, wanted))
