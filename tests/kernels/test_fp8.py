"""Quantisation to E4M3 by row and by expert's weight, against its plain-torch twin."""

import pytest
import torch

pytest.importorskip("triton")

from bmoe.kernels import fp8, rows  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def same_numbers(actual, expected):
    """E4M3 tensors; CPU and GPU both round to nearest even."""
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("columns", [16, 48, 80, 336])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_equal_the_twin(columns, dtype):
    torch.manual_seed(columns)
    x_RC = (torch.randn(13, columns, device=DEVICE) * torch.logspace(-6, 6, 13, device=DEVICE)[:, None]).to(dtype)
    x_RC[3] = 0
    x_RC[5, 1:] = 0
    q_RC, scale_R = fp8.quantize_rows(x_RC)
    expected_RC, expected_R = fp8.quantize_rows_reference(x_RC)
    same_numbers(q_RC, expected_RC)
    assert torch.equal(scale_R, expected_R)
    assert scale_R[3] == 0
    error_RC = (q_RC.float() * scale_R[:, None] - x_RC.float()).abs()
    assert (error_RC <= x_RC.float().abs() / 16 + scale_R[:, None] * 2**-10).all()  # half a unit: 2^-4 of it, or of the smallest


@pytest.mark.parametrize("weighted", [True, False])
def test_routed_rows_carry_the_scale_of_their_expert(weighted):
    torch.manual_seed(0)
    ids_TK, weights_TK = torch.randint(6, (20, 3), device=DEVICE) // 2 * 2, torch.rand(20, 3, device=DEVICE)  # odd experts empty
    order = rows.sort_slots_reference(ids_TK, weights_TK, 5)  # an id of 5 is nobody, so some rows are nobody's
    used = int(order.bounds_E1[-1])
    x_NC, factor_E = torch.randn(60, 32, device=DEVICE), torch.rand(5, device=DEVICE)
    x_NC[used:] = float("nan")  # must not be read
    weight_N = order.weight_of_row_N if weighted else None
    q_NC, scale_N = fp8.quantize_rows(x_NC, order.bounds_E1, factor_E, weight_N)
    expected_NC, expected_N = fp8.quantize_rows_reference(x_NC, order.bounds_E1, factor_E, weight_N)
    same_numbers(q_NC[:used], expected_NC[:used])
    assert torch.equal(scale_N[:used], expected_N[:used])
    scale_T = torch.rand(20, device=DEVICE)
    arguments = (scale_T, order.token_of_row_N, factor_E, order.bounds_E1)
    torch.testing.assert_close(fp8.row_scales(*arguments)[:used], fp8.row_scales_reference(*arguments)[:used])


@pytest.mark.parametrize(("width", "experts", "k"), [(16, 3, 2), (80, 5, 1), (272, 2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backward_of_the_activation_equals_its_twin(dtype, width, experts, k):
    torch.manual_seed(width)
    ids_TK, weights_TK = torch.randint(experts + 1, (19, k), device=DEVICE), torch.rand(19, k, device=DEVICE)
    order = rows.sort_slots_reference(ids_TK, weights_TK, experts)
    used, n = int(order.bounds_E1[-1]), 19 * k
    da_NF, h_NI = torch.randn(n, width, device=DEVICE).to(dtype), torch.randn(n, 2 * width, device=DEVICE).to(dtype)
    scale_N, factor_E = torch.rand(n, device=DEVICE) + 0.1, torch.rand(experts, device=DEVICE) + 0.1
    da_NF[used:], h_NI[used:] = float("nan"), float("nan")  # must not be read
    arguments = (da_NF, h_NI, scale_N, order.weight_of_row_N, order.bounds_E1, factor_E)
    actual, expected = fp8.dswiglu_quantize(*arguments), fp8.dswiglu_quantize_reference(*arguments)
    tolerance = {} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-5}
    for index in (0, 3):
        torch.testing.assert_close(actual[index][:used], expected[index][:used], **tolerance)
    for index in (2, 4):
        torch.testing.assert_close(actual[index][:used], expected[index][:used])
    dh_NI = [result[1][:used].float() * result[2][:used, None] for result in (actual, expected)]
    assert (dh_NI[0] - dh_NI[1]).norm() < 0.01 * dh_NI[1].norm()  # a last bit of fp32 may move a number to the next E4M3 one


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize(("experts", "outputs", "inputs"), [(1, 16, 32), (3, 160, 48), (2, 272, 144)])
def test_weights_equal_the_twin(interleave, experts, outputs, inputs):
    torch.manual_seed(outputs)
    w_EOI = torch.randn(experts, outputs, inputs, device=DEVICE) * torch.logspace(-3, 0, experts, device=DEVICE)[:, None, None]
    w_EOI = w_EOI.bfloat16()
    actual, expected = fp8.quantize_weight(w_EOI, interleave), fp8.quantize_weight_reference(w_EOI, interleave)
    same_numbers(actual[0], expected[0])
    same_numbers(actual[1], expected[1])
    assert torch.equal(actual[2], expected[2])
    if interleave:
        gate = (actual[0][:, ::2].float() * actual[2][:, None, None]) - w_EOI[:, : outputs // 2]
        assert gate.abs().max() <= w_EOI.abs().max() / 16


def test_a_bad_number_shows():
    x_RC = torch.randn(3, 16, device=DEVICE)
    x_RC[0, 2], x_RC[1, 3] = float("nan"), float("inf")
    q_RC, scale_R = fp8.quantize_rows(x_RC)
    y_R = (q_RC.float() * scale_R[:, None]).sum(1)
    assert not y_R[:2].isfinite().any()
    assert y_R[2].isfinite()
