"""AdamW over all parameters at once against its plain twin, moments bit for bit, through Triton's interpreter or on the GPU."""

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from bmoe.kernels import adamw, adamw_triton
from bmoe.kernels.adamw import Tensors, adamw_split, split_master, step_scalars

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B1, B2, EPS = 0.9, 0.98, 1e-8
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """So that a parameter of a few hundred elements has several chunks, tiles and a rest."""
    if DEVICE == "cpu":
        monkeypatch.setattr(adamw_triton, "BLOCK", 32)
        monkeypatch.setattr(adamw_triton, "CHUNK", 128)
        monkeypatch.setattr(adamw_triton, "PROGRAMS", 3)


def parameter(size: int, weight=BF16, gradient=BF16, moment=FP32, shift: int = 0, seed: int = 0) -> Tensors:
    """Random tensors; those of bf16 weights start `shift` elements behind an aligned address."""
    generator = torch.Generator().manual_seed(seed + size)

    def random(dtype: torch.dtype, positive: bool = False) -> torch.Tensor:
        value = torch.randn(size, generator=generator)
        return placed((value.square() if positive else value).to(dtype))

    def placed(value: torch.Tensor) -> torch.Tensor:
        room = torch.empty(size + shift, dtype=value.dtype, device=DEVICE)
        room[shift:] = value
        return room[shift:]

    high, low = split_master(torch.randn(size, generator=generator))
    own = (placed(high), placed(low)) if weight == BF16 else (random(FP32), None)
    return Tensors(*own, random(gradient), random(moment), random(moment, positive=True))


def copies(parameters: list[Tensors]) -> list[Tensors]:
    return [Tensors(*(t if t is None else t.clone() for t in p)) for p in parameters]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.numel() == 0 or torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_same_step(got: Tensors, want: Tensors) -> None:
    """Moments have all bits (but for the interpreter, which cuts bf16 off); the update's division and root are fast ones on a
    GPU, and on a CPU torch's root is not always the nearest number."""
    for a, b in ((got.m, want.m), (got.v, want.v)):
        if b.dtype == BF16 and DEVICE == "cpu":
            torch.testing.assert_close(a, b, rtol=2.0**-7, atol=0.0)
        else:
            assert same_bits(a, b)
    masters = [p.weight if p.low is None else adamw.join_master(p.weight, p.low) for p in (got, want)]
    torch.testing.assert_close(*masters, rtol=2e-7, atol=1e-7)  # an update is 1e-3


def mixed() -> list[Tensors]:
    return [
        parameter(1),
        parameter(256),
        parameter(300),
        parameter(0),
        parameter(131, shift=1),
        parameter(256, shift=3),
        parameter(200, weight=FP32, gradient=FP32),
        parameter(77, weight=FP32, gradient=FP32),
        parameter(150, gradient=FP32),
        parameter(40000 if DEVICE == "cuda" else 520, seed=1),
    ]


SCALARS = {
    "step": (0.7, 1e-3, 1 - B1**3, math.sqrt(1 - B2**3), 1.0),
    "nothing": (math.nan, 1e-3, 1 - B1**3, math.sqrt(1 - B2**3), 0.0),
}


@pytest.mark.parametrize("clear", [False, True])
@pytest.mark.parametrize("scalars", SCALARS.values(), ids=SCALARS)
@pytest.mark.parametrize("moment", [FP32, BF16])
def test_a_step_of_mixed_parameters_equals_the_twin(moment, scalars, clear):
    parameters = [p._replace(m=p.m.to(moment), v=p.v.to(moment)) for p in mixed()]
    if math.isnan(scalars[0]):
        parameters[2].gradient[5] = math.nan
    decays = [0.1 * (i % 3) for i in range(len(parameters))]
    expected = copies(parameters)
    scalars = torch.tensor(scalars, device=DEVICE)
    for p, decay in zip(expected, decays, strict=True):
        if p.weight.numel():
            adamw_split(*p, scalars, B1, B2, EPS, decay)
    fused = adamw_triton.Fused(parameters, decays, [False] * len(parameters), clear)
    fused.locate(parameters)
    fused.step(scalars, B1, B2, EPS)
    for number, (got, want) in enumerate(zip(parameters, expected, strict=True)):
        assert not got.gradient.any() if clear else same_bits(got.gradient, want.gradient), number
        assert_same_step(got, want._replace(gradient=got.gradient))


def test_gradients_may_move():
    parameters = mixed()
    fused = adamw_triton.Fused(parameters, [0.0] * len(parameters), [False] * len(parameters), False)
    for _ in range(3):
        moved = [p._replace(gradient=p.gradient * 2) for p in parameters]
        expected = copies(moved)
        fused.locate(moved)
        scalars = torch.tensor(SCALARS["step"], device=DEVICE)
        fused.step(scalars, B1, B2, EPS)
        for got, want in zip(moved, expected, strict=True):
            if want.weight.numel():
                adamw_split(*want, scalars, B1, B2, EPS, 0.0)
                assert_same_step(got, want)
        parameters = moved


def test_addresses_of_before_can_be_set_again():
    """What a replayed update needs after a step outside of its recording."""
    parameters = mixed()
    fused = adamw_triton.Fused(parameters, [0.0] * len(parameters), [False] * len(parameters), False)
    fused.locate(parameters)
    recorded = fused.addresses
    elsewhere = [p._replace(gradient=torch.full_like(p.gradient, math.nan)) for p in parameters]
    fused.locate(elsewhere)
    assert not fused.squares()[1].isfinite()
    fused.send(recorded)
    wanted = sum(float(p.gradient.double().square().sum()) for p in parameters)
    assert float(fused.squares()[1]) == pytest.approx(wanted, rel=1e-6)


def test_sums_of_squares_of_sharded_and_whole_parameters():
    parameters = mixed()
    sharded = [i % 2 == 0 for i in range(len(parameters))]
    fused = adamw_triton.Fused(parameters, [0.0] * len(parameters), sharded, False)
    fused.locate(parameters)
    first, again = fused.squares(), fused.squares()
    assert torch.equal(first, again)
    for kind, got in zip((True, False), first, strict=True):
        wanted = sum(float(p.gradient.double().square().sum()) for p, s in zip(parameters, sharded, strict=True) if s == kind)
        assert float(got) == pytest.approx(wanted, rel=1e-6)


def test_a_non_finite_gradient_shows_in_the_sum():
    for bad in (math.nan, math.inf):
        parameters = mixed()
        parameters[2].gradient[-1] = bad
        fused = adamw_triton.Fused(parameters, [0.0] * len(parameters), [False] * len(parameters), False)
        fused.locate(parameters)
        sharded, whole = fused.squares().tolist()
        assert sharded == 0.0 and not math.isfinite(whole)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_scalars_of_many_steps_equal_the_twins(clip):
    fused = adamw_triton.Fused([parameter(1)], [0.0], [False], False)
    ours, theirs = ([torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in range(3)] for _ in range(2))
    rate = torch.tensor(3e-4, dtype=torch.float64, device=DEVICE)
    for norm in (2.0, 0.0, 0.3, math.nan, math.inf, 1e-35, 7.0, 1e30):
        norm = torch.tensor(norm, device=DEVICE)
        got = fused.scalars(norm, rate, *ours, clip, B1, B2)
        want = step_scalars(norm, rate, *theirs, clip, B1, B2).float()
        assert [int(x) for x in ours] == [int(x) for x in theirs]
        assert same_bits(got[4:], want[4:])
        if want[4] > 0:
            assert same_bits(got, want), (got, want)
    assert [int(x) for x in theirs] == [8, 2, 0]


def test_another_dtype_than_announced_is_an_error():
    fused = adamw_triton.Fused([parameter(8)], [0.0], [False], False)
    with pytest.raises(ValueError, match="announced"):
        fused.locate([parameter(8, gradient=FP32)])


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20), st.integers(0, 3))
def test_masters_of_any_value_keep_their_bits_without_a_learning_rate(values, shift):
    high, low = split_master(torch.tensor(values))
    p = parameter(len(values), shift=shift)
    p.weight.copy_(high)
    p.low.copy_(low)
    fused = adamw_triton.Fused([p], [0.0], [False], False)
    fused.locate([p])
    fused.step(torch.tensor([1.0, 0.0, 0.1, 0.2, 1.0], device=DEVICE), B1, B2, EPS)
    got = adamw.join_master(p.weight, p.low).tolist()
    assert [struct.pack("f", x + 0.0) for x in got] == [struct.pack("f", x + 0.0) for x in values]
