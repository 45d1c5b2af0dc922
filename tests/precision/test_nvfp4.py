"""NVFP4: both levels of scales over every bf16 maximum, the eight values, stochastic rounding, rotation, edges, invariants."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.precision import nvfp4

PUBLISHED = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FIXED_SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]  # Transformer Engine's of the random Hadamard transform
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
LARGEST = np.finfo(np.float32).max


def e4m3(v: np.ndarray) -> np.ndarray:
    """The nearest of all E4M3 numbers (not negative), ties to the even code, saturating."""
    v = np.minimum(v.astype(np.float64), 448.0)
    above = np.clip(np.searchsorted(E4M3, v), 1, 126)
    low, high = v - E4M3[above - 1], E4M3[above] - v
    return E4M3[np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)].astype(np.float32)


def e2m1(v: np.ndarray) -> np.ndarray:
    """The thresholds that the reference implementation publishes, by magnitude."""
    size = np.abs(v)
    closed = [size <= 0.25, size < 0.75, size <= 1.25, size < 1.75, size <= 2.5, size < 3.5, size <= 5.0]
    return np.select(closed, PUBLISHED[:-1], 6.0).astype(np.float32) * np.where(np.signbit(v), -1, 1).astype(np.float32)


def by_hand(x: np.ndarray, block: np.ndarray, amax: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(q, s) of finite values `x` in blocks of largest magnitude `block` in a tensor of `amax`, in numpy's float32."""
    one, six = np.float32(1), np.float32(6)
    with np.errstate(all="ignore"):
        S = np.where(amax == 0, one, np.minimum(np.float32(2688) / amax, LARGEST))
        s = e4m3(np.minimum(block * (S * (one / six)), LARGEST))
        inverse = np.minimum(one / (s * (one / S)), LARGEST)
        return e2m1(x * inverse), s


def test_all_sixteen_codes():
    codes = torch.arange(16, dtype=torch.uint8)
    values = nvfp4.decode(codes)
    assert values.tolist() == [*PUBLISHED, *(-v for v in PUBLISHED)] and values[8].signbit()
    again, scales, amax = nvfp4.quantize(values[None])  # largest 6: S = 448, block scale 448, so values are their own codes
    assert torch.equal(again[0], codes) and scales.float().item() == 448 and amax == 6


def test_rounding_to_four_bits_is_the_nearest_of_eight_values_and_ties_go_to_even_codes():
    x = torch.cat([torch.linspace(-6, 6, 48001), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])])
    got = nvfp4.round_to(x.clone(), nvfp4.E2M1)
    assert got[-7:].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    distance = (torch.tensor(PUBLISHED)[:, None] - x.abs()).abs().min(0).values
    assert torch.equal((got.abs() - x.abs()).abs(), distance) and bool((got * x >= 0).all())
    assert torch.equal(got, torch.from_numpy(e2m1(x.numpy())))


@pytest.mark.parametrize("top", [1.0, 3.140625, 2.0**-120, 3.3895e38])
def test_scales_and_values_of_every_bf16_block_maximum(top):
    """Blocks of every finite bf16 maximum up to the tensor's, each with values from all of its range."""
    maxima = torch.arange(0x7F80).to(torch.int16).view(torch.bfloat16).float()
    maxima = maxima[maxima <= top]
    shares = torch.tensor([1.0, -1.0, 0.9, -0.7, 0.584, 0.42, -0.2917, 0.25, 0.2083, -0.125, 0.0833, 0.0416, 0.01, 1e-4, 0.0, -0.0])
    x = maxima[:, None] * shares
    x[-1, 0] = top
    codes, scales, amax = nvfp4.quantize(x)
    assert amax == x.abs().max() == np.float32(top)
    q, s = by_hand(x.numpy(), x.abs().amax(1, keepdim=True).numpy(), amax.numpy())
    assert np.array_equal(scales.float().numpy(), s)
    assert np.array_equal(nvfp4.decode(codes).numpy(), q) and np.array_equal(codes.numpy() >= 8, np.signbit(x.numpy()))


def test_a_tensor_of_every_bf16_maximum():
    """One tensor each, its second block 37 times smaller."""
    maxima = torch.arange(0x7F80).to(torch.int16).view(torch.bfloat16).float()[::5]
    for top in (*maxima[:40].tolist(), *maxima[40::50].tolist()):
        x = torch.cat(
            [torch.tensor([top, -top / 3, top / 7]), torch.zeros(13), torch.tensor([top / 37, -top / 99, top / 60]), torch.zeros(13)]
        )
        codes, scales, amax = nvfp4.quantize(x[None])
        block = x.view(2, 16).abs().amax(1, keepdim=True)
        q, s = by_hand(x.view(2, 16).numpy(), block.numpy(), amax.numpy())
        assert np.array_equal(scales.float().numpy().ravel(), s.ravel()) and np.array_equal(nvfp4.decode(codes).numpy().ravel(), q.ravel())


def test_a_tensor_worked_by_hand():
    # Largest 12: S = 2688 / 12 = 224. First block: 12 x 224 / 6 = 448, its scale; q = x x 224 / 448 = x / 2.
    # Second block: largest 0.3, 0.3 x 224 / 6 = 11.2, between 11 and 12 in E4M3: 11; q = x x 224 / 11 = 20.36 x.
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([12.0, 6.0, -3.0, 0.4])
    x[0, 16:19] = torch.tensor([0.3, -0.2, 0.01])
    codes, scales, amax = nvfp4.quantize(x)
    assert amax == 12 and scales.float().tolist() == [[448.0, 11.0]]
    assert nvfp4.decode(codes)[0, :4].tolist() == [6.0, 3.0, -1.5, 0.0]
    assert nvfp4.decode(codes)[0, 16:19].tolist() == [6.0, -4.0, 0.0]
    values = nvfp4.dequantize(codes, scales, amax)
    assert values[0, :3].tolist() == pytest.approx([12.0, 6.0, -3.0], rel=1e-6) and values[0, 16].item() == pytest.approx(6 * 11 / 224)


@pytest.mark.parametrize("top, block, scale", [(0.5, "0x1.edb6dap-16", 13 / 512), (0.50390625, "0x1.ba4922p-19", 2 / 512)])
def test_the_reciprocal_of_six_is_folded_into_the_tensors_factor(top, block, scale):
    """Maxima whose scale is a tie, or not, by the order of operations: blockmax / 6 x S and blockmax x S / 6 give the other neighbour."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = top, float.fromhex(block)
    assert nvfp4.quantize(x)[1].float()[0, 1] == scale
    S = np.float32(2688) / np.float32(top)
    for other in (np.float32(float.fromhex(block)) / np.float32(6) * S, np.float32(float.fromhex(block)) * S / np.float32(6)):
        assert e4m3(other) != scale


def test_zeros_infinities_and_nan():
    codes, scales, amax = nvfp4.quantize(torch.zeros(3, 16))
    assert not codes.any() and not scales.float().any() and amax == 0 and not nvfp4.dequantize(codes, scales, amax).any()
    x = torch.zeros(1, 48)
    x[0, :3] = torch.tensor([torch.inf, -torch.inf, 5.0])
    x[0, 16:19] = torch.tensor([600.0, 300.0, 1.0])
    x[0, 32] = 4000.0
    codes, scales, amax = nvfp4.quantize(x)  # S = 1: block scales 448, 600 / 6 = 100, a tie to 96, and 4000 / 6, too much
    assert amax == torch.inf and scales.float().tolist() == [[448.0, 96.0, 448.0]]
    assert nvfp4.decode(codes)[0, [0, 1, 2, 16, 17, 18, 32]].tolist() == [6.0, -6.0, 0.0, 6.0, 3.0, 0.0, 6.0]
    assert not nvfp4.dequantize(codes, scales, amax)[0, :2].isfinite().any()  # so training sees it
    x = torch.full((1, 16), 2.0)
    x[0, 0] = torch.nan
    codes, scales, amax = nvfp4.quantize(x)
    assert amax == 2 and codes.unique().tolist() == [7]
    assert nvfp4.quantize(torch.zeros(0, 16))[2] == 0


def test_blocks_too_small_for_a_scale_become_zero():
    x = torch.ones(1, 32)
    x[0, 16:] = 2.0**-20  # 2^-20 x 448 is below half of the smallest E4M3 number, 2^-9
    codes, scales, amax = nvfp4.quantize(x)
    assert scales.float()[0, 1] == 0 and not nvfp4.dequantize(codes, scales, amax)[0, 16:].any()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(1, 70), st.integers(-30, 30), st.sampled_from([-1, -2, None]), st.booleans())
def test_bytes_and_shortcut_agree_and_errors_are_bounded(seed, rows, columns, power, axis, stochastic):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=g) * 2.0**power * torch.logspace(-3, 3, columns)
    noise = nvfp4.noise_of(x, torch.arange(rows)) if stochastic else None
    codes, scales, amax = nvfp4.quantize(x, axis, noise)
    values = nvfp4.dequantize(codes, scales, amax, axis)
    short = nvfp4.scaled(x, nvfp4.factors(amax), axis, noise)
    assert torch.equal(short.bfloat16().float(), short)  # q s is exact there
    assert torch.allclose(values, short * (amax / 2688), rtol=1e-6, atol=0)
    assert scales.float().max() <= 448 and codes.max() <= 15
    # Half a step, or one if stochastic, of at most 2 s; E4M3 may round s up by 1/16, or down, which cuts off as much.
    cut = nvfp4._cut(x, axis)
    largest = nvfp4._join(nvfp4.blocks.amax(cut, (-3, -1) if axis is None else axis).expand_as(cut), axis, x)
    bound = largest * (17 / 16 / 6) * (2 if stochastic else 1) + largest / 16 + amax / 2688 * 2.0**-6
    assert ((values - x).abs() <= bound).all()
    if not stochastic:
        assert torch.equal(nvfp4.dequantize(*nvfp4.quantize(-x, axis), axis), -values)


@pytest.mark.parametrize("shape, axis", [((5, 33), -1), ((33, 5), -2), ((20, 20), None), ((2, 3, 70), -1)])
def test_a_last_block_need_not_be_full(shape, axis):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    full = torch.nn.functional.pad(x, (0, -shape[-1] % 16, 0, -shape[-2] % 16))
    whole = nvfp4.dequantize(*nvfp4.quantize(full, axis), axis)
    assert torch.equal(nvfp4.dequantize(*nvfp4.quantize(x, axis), axis), whole[..., : shape[-2], : shape[-1]])


def test_weights_have_one_copy_for_both_directions():
    w = torch.randn(48, 80, generator=torch.Generator().manual_seed(0))
    codes, scales, _ = nvfp4.quantize(w, None)
    turned, scales_turned, _ = nvfp4.quantize(w.T.contiguous(), None)
    assert torch.equal(codes, turned.T) and torch.equal(scales.float(), scales_turned.float().T) and scales.shape == (3, 5)


def test_stochastic_rounding_takes_a_neighbour_with_the_probability_of_its_distance():
    levels = torch.arange(2**10) * 2.0**-10  # every noise of ten bits once
    for value in (0.0, 0.1, 0.25, 0.5, 0.8125, 1.3, 1.5, 1.75, 2.25, 2.5, 3.3, 4.0, 4.5, 5.0, 5.9, 6.0):
        for sign in (1, -1):
            got = nvfp4._stochastic(torch.full_like(levels, sign * value), levels)
            low = max(v for v in PUBLISHED if v <= value)
            high = min(v for v in PUBLISHED if v >= value)
            assert set(got.abs().tolist()) <= {low, high} and bool((got * sign >= 0).all())
            assert got.double().mean().item() == pytest.approx(sign * value, abs=2 * 2.0**-10)


def test_codes_are_not_changed_by_any_noise():
    values = nvfp4.decode(torch.arange(16, dtype=torch.uint8))
    for noise in (0.0, 0.5, 1 - 2.0**-nvfp4.NOISE_BITS):
        assert torch.equal(nvfp4._stochastic(values, torch.full_like(values, noise)), values)


def test_noise_is_uniform_repeatable_and_hangs_on_value_and_place():
    x = torch.full((512, 256), 0.7)
    noise = nvfp4.noise_of(x, torch.arange(512))
    assert torch.equal(noise, nvfp4.noise_of(x, torch.arange(512))) and noise.min() >= 0 and noise.max() < 1
    n = noise.numel()
    share = torch.histc(noise, 16, 0, 1) / n
    assert ((share - 1 / 16).abs() < 5 * (1 / 16 * 15 / 16 / n) ** 0.5).all()
    for a, b in ((noise[:-1], noise[1:]), (noise[:, :-1], noise[:, 1:]), (noise, nvfp4.noise_of(x * 1.01, torch.arange(512)))):
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(correlation) < 5 / n**0.5
    # Rounding 0.7 of a tensor with largest 6, so in units of 1, between 0.5 and 1: its mean has no bias.
    x[0, 0] = 6.0
    x = x.view(-1, 16)
    x[:, 0] = 6.0  # every block's scale is 448
    got = nvfp4.scaled(x, nvfp4.factors(x.max()), -1, nvfp4.noise_of(x, torch.arange(len(x))))[:, 1:] / 448
    assert set(got.unique().tolist()) == {0.5, 1.0}
    assert abs(got.mean().item() - 0.7) < 5 * 0.25 / got.numel() ** 0.5


def test_rotation_is_transformer_engines_and_cancels_in_a_product():
    H = nvfp4.hadamard(torch.device("cpu"), torch.float64)
    assert (H[:, 0] * 4).tolist() == FIXED_SIGNS and torch.equal(H.abs(), torch.full_like(H, 0.25))
    assert torch.equal(H @ H.T, torch.eye(16, dtype=torch.float64))
    sylvester = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        sylvester = torch.cat([torch.cat([sylvester, sylvester], 1), torch.cat([sylvester, -sylvester], 1)])
    assert torch.equal(H * 4, torch.tensor(FIXED_SIGNS, dtype=torch.float64)[:, None] * sylvester)
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, n, generator=g, dtype=torch.float64) for n in (5, 7))
    assert torch.allclose(nvfp4.rotate(a).T @ nvfp4.rotate(b), a.T @ b, rtol=1e-12, atol=1e-12)
    assert torch.allclose(
        nvfp4.rotate(a)[16:32].T, a[16:32].T @ H, rtol=1e-14, atol=1e-14
    )  # along the last axis of the transpose, 16 at a time
    spike = torch.zeros(16, 1)
    spike[5] = 8.0
    assert torch.equal(nvfp4.rotate(spike).abs(), torch.full((16, 1), 2.0))


def test_error_of_normal_values():
    """E2M1 under a scale for 16 normal values: about 9.5 %; stochastic rounding has twice the variance within a step."""
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    nearest = nvfp4.dequantize(*nvfp4.quantize(x))
    drawn = nvfp4.dequantize(*nvfp4.quantize(x, -1, nvfp4.noise_of(x, torch.arange(256))))
    nearest, drawn = ((y - x).norm().item() / x.norm().item() for y in (nearest, drawn))
    assert 0.08 < nearest < 0.11 and 1.3 < drawn / nearest < 1.5
