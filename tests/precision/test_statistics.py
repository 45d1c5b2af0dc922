"""Statistics of rounding: hand-made tensors with known underflow and saturation, and a step that is not disturbed."""

import math

import pytest
import torch
from torch import nn

from bmoe.model.experts import build_experts
from bmoe.precision.emulate import EmulatedProduct, emulate
from bmoe.precision.statistics import BINS, TENSORS, Recorder, _Watched, recording, shares, sums
from bmoe.recipe import PrecisionSection


def test_underflow_by_hand():
    x = torch.zeros(1, 32)
    # The block's scale is 2^-8 x 1.75 -> 2^-8 (amax 1: 1/448 rounds up to 2^-8); the smallest code is 2^-9 of it, so 2^-17,
    # and what is below half of that becomes 0.
    x[0, :4] = torch.tensor([1.0, 2.0**-17, 2.0**-19, -(2.0**-20)])
    total = sums(x, "mxfp8", "input_1")
    assert total[0] == 4 and shares(total)["underflow"] == 0.5 and shares(total)["saturation"] == 0.0
    assert total[5:].sum() == 1 and total[5 + (-8 + 128) // 4] == 1


def test_saturation_beside_an_infinity():
    x = torch.zeros(1, 128)
    x[0, :5] = torch.tensor([torch.inf, 1000.0, 460.0, 400.0, -2000.0])  # scale 1: beyond 464 is cut, 460 rounds to 448
    found = shares(sums(x, "fp8_block", "input_1"))
    assert found["saturation"] == 0.5 and math.isfinite(found["error"])


@pytest.mark.parametrize("kind", ["mxfp8", "fp8_block", "fp8_current"])
def test_error_of_normal_values_is_that_of_the_mantissa(kind):
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    found = shares(sums(x, kind, "input_1"))
    assert 0.02 < found["error"] < 0.03 and found["underflow"] < 0.01  # uniform within steps of 1/8: 0.026
    if kind == "fp8_current":
        assert 1.8 < shares(sums(x, kind, "gradient_1"))["error"] / found["error"] < 2.2  # one bit less


def test_row_wise_scales_are_counted_by_row():
    x = torch.zeros(2, 64)
    x[0, 0], x[1, :2] = 448.0, torch.tensor([448.0 * 2**-40, 2.0**-40])  # one scale for both rows would lose the second
    found = sums(x, "fp8_row", "input_1")
    assert shares(found)["underflow"] == 0 and found[5:].nonzero().flatten().tolist() == [(-40 + 128) // 4, 128 // 4]
    assert shares(sums(x, "fp8_current", "input_1"))["underflow"] == 2 / 3


def test_four_bits_by_hand():
    # Largest 6: S = 448 and block scales 448 and 448 / 6 = 74.67, which is 72 in E4M3: 1.0 is 6.2 of them and stays 6, 1.1 is cut.
    x = torch.zeros(1, 32)
    x[0, :3] = torch.tensor([6.0, 0.3, -0.2])
    x[0, 16] = 1.0
    found = shares(sums(x, "nvfp4", "weight_1"))
    assert found["underflow"] == 0.25 and found["saturation"] == 0
    g = torch.Generator().manual_seed(0)
    x = torch.randn(256, 256, generator=g)
    nearest, drawn = (shares(sums(x, "nvfp4", name))["error"] for name in ("input_1", "gradient_1"))
    assert 0.08 < nearest < 0.11 and 1.3 < drawn / nearest < 1.5  # tests/precision/test_nvfp4.py


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"experts": build_experts("grouped", 4, 64, 32)}) for _ in range(3))

    def forward(self, x, ids, weights):
        for block in self.blocks:
            x = x + block["experts"](x, ids, weights)
        return x


@pytest.mark.parametrize("kind, block", [("mxfp8", 32), ("nvfp4", 16 * 16)])
def test_a_recorded_step_is_the_same_step(kind, block):
    model = Toy()
    emulate(model, PrecisionSection(kind=kind, emulate=True, high_precision_layers={"first": 1}))
    products = [block["experts"].matmul for block in model.blocks]
    g = torch.Generator().manual_seed(0)
    x, ids = torch.randn(40, 64, generator=g), torch.randint(0, 5, (40, 2), generator=g)
    weights = torch.rand(40, 2, generator=g)
    gradients = []
    for watch in (False, True):
        model.zero_grad()
        if watch:
            with recording(model) as recorder:
                model(x, ids, weights).square().sum().backward()
        else:
            model(x, ids, weights).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)
    assert [block["experts"].matmul for block in model.blocks] == products
    metrics = recorder.metrics()
    assert set(metrics) == set(TENSORS)
    for tensor in metrics.values():
        for key in ("underflow", "saturation", "error"):
            assert tensor[key][0] is None and all(0 <= value < 0.25 for value in tensor[key][1:])
        assert len(tensor["scales"]) == BINS and sum(tensor["scales"]) > 0
    assert sum(metrics["weight_1"]["scales"]) == 2 * 4 * 64 * 64 / block  # 2 layers x 4 experts x 64 x 64 weights


@pytest.mark.parametrize("kind", ["fp8_current", "fp8_row", "nvfp4", "mxfp8"])
def test_what_is_recorded_is_the_rounding_of_the_products(kind):
    """Errors against the rounded tensors themselves, which identity matrices let through the products. Experts of other magnitudes:
    one scale for both would lose the smaller. Rows beyond the last expert's count nowhere."""
    g = torch.Generator().manual_seed(0)
    x_NI, eye_EOI = torch.randn(44, 64, generator=g), torch.eye(64).repeat(2, 1, 1)
    offsets_E = torch.tensor([16, 40], dtype=torch.int32)
    x_NI[:16] *= 2.0**-30
    x_NI[40:] = 0.0
    recorder = Recorder(1)

    def by_expert(x, w, ends):
        spans = zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)
        return torch.cat([*(x[a:b] @ w[e].T for e, (a, b) in enumerate(spans)), x[int(ends[-1]) :] * 0])

    y_NO = _Watched(EmulatedProduct(kind, by_expert), recorder, 0)(x_NI.requires_grad_(), eye_EOI, offsets_E)
    dy_NO = torch.randn(44, 64, generator=g).masked_fill(torch.arange(44)[:, None] >= 40, 0.0)
    y_NO.backward(dy_NO)
    found = recorder.metrics()
    for name, got, exact in (("input_1", y_NO, x_NI), ("gradient_1", x_NI.grad, dy_NO)):
        got, exact = got.detach()[:40].double(), exact.detach()[:40].double()
        error = float((got - exact).norm() / exact.norm())
        assert found[name]["error"][0] == pytest.approx(error, rel=1e-3), name
        scales = {"fp8_current": 2, "fp8_row": 40, "nvfp4": 40 * 64 // 16, "mxfp8": 40 * 64 // 32}[kind]
        assert sum(found[name]["scales"]) == scales
        assert found[name]["underflow"][0] < 0.1, "the smaller expert has a scale of its own"
    assert found["weight_1"]["error"] == [0.0] and sum(found["weight_1"]["scales"]) == {"nvfp4": 32, "mxfp8": 256}.get(kind, 2)
