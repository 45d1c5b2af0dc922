"""The FP8 products of precision fp8_row on a GPU against their plain-torch twins; their use without waiting for the device."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from bmoe.kernels import fp8, fp8_gemm, rows
from bmoe.model.experts import build_experts

pytestmark = pytest.mark.gpu

REASON = fp8_gemm.why_not(torch.device("cuda"), torch.bfloat16, 16, 16)
needs_kernels = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def ids_of(pattern: str, tokens: int, experts: int, k: int) -> torch.Tensor:
    if pattern == "one":
        return torch.full((tokens, k), experts - 1, device="cuda")
    ids_TK = torch.rand(tokens, experts, device="cuda").topk(k).indices
    if pattern == "empty":
        return ids_TK // 2 * 2
    if pattern == "tail":
        ids_TK[tokens // 2 :] = experts
    return ids_TK


def close(actual, expected):
    """Both round once to bf16; the tensor core sums in another order, with 14 bits between two promotions to fp32."""
    error = float((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))
    assert error < 4e-3, error


@needs_kernels
@pytest.mark.parametrize("pattern", ["all", "empty", "one", "tail"])
@pytest.mark.parametrize("sizes", [(257, 8, 2, 256, 384), (1001, 64, 8, 128, 256), (129, 16, 1, 208, 144), (1, 4, 2, 64, 64)], ids=str)
def test_products_equal_their_twins(sizes, pattern):
    tokens, experts, k, width, expert_width = sizes
    torch.manual_seed(tokens)
    ids_TK, weights_TK = ids_of(pattern, tokens, experts, k), torch.rand(tokens, k, device="cuda") + 0.1
    order = rows.sort_slots(ids_TK, weights_TK, experts)
    used, bounds_E1, token_N = int(order.bounds_E1[-1]), order.bounds_E1, order.token_of_row_N
    x_TD, dy_TD = torch.randn(2, tokens, width, device="cuda", dtype=torch.bfloat16)
    gate_up_ECD = torch.randn(experts, 2 * expert_width, width, device="cuda", dtype=torch.bfloat16) * width**-0.5
    down_EDF = torch.randn(experts, width, expert_width, device="cuda", dtype=torch.bfloat16) * expert_width**-0.5
    up8_EID, up8_EDI, up_scale_E = fp8.quantize_weight(gate_up_ECD, interleave=True)
    down8_EDF, down8_EFD, down_scale_E = fp8.quantize_weight(down_EDF)
    twin = fp8_gemm.Reference

    x8_TD, scale_T = fp8.quantize_rows(x_TD)
    arguments = (x8_TD, up8_EID, fp8.row_scales(scale_T, token_N, up_scale_E, bounds_E1), token_N, bounds_E1)
    (h_NI, a_NF), (expected_h, expected_a) = fp8_gemm.up(*arguments), twin.up(*arguments)
    close(h_NI[:used], expected_h[:used]), close(a_NF[:used], expected_a[:used])

    a8_NF, _ = fp8.quantize_rows(a_NF, bounds_E1, down_scale_E, order.weight_of_row_N)
    close(fp8_gemm.down(a8_NF, down8_EDF, bounds_E1)[:used], twin.down(a8_NF, down8_EDF, bounds_E1)[:used])

    dy8_TD, scale_T = fp8.quantize_rows(dy_TD)
    scale_N = fp8.row_scales(scale_T, token_N, down_scale_E, bounds_E1)
    da_NF = fp8_gemm.ddown(dy8_TD, down8_EFD, token_N, bounds_E1)
    close(da_NF[:used], twin.ddown(dy8_TD, down8_EFD, token_N, bounds_E1)[:used])

    dh8_NI = fp8.dswiglu_quantize(da_NF, h_NI, scale_N, order.weight_of_row_N, bounds_E1, up_scale_E)[1]
    close(fp8_gemm.dup(dh8_NI, up8_EDI, bounds_E1)[:used], twin.dup(dh8_NI, up8_EDI, bounds_E1)[:used])


def layer(tokens=512, experts=8, k=2, width=256, expert_width=384):
    torch.manual_seed(0)
    module = build_experts("triton", experts, width, expert_width, precision="fp8_row").cuda().bfloat16()
    x_TD, dy_TD = torch.randn(2, tokens, width, device="cuda", dtype=torch.bfloat16)
    return module, x_TD, torch.rand(tokens, k, device="cuda"), dy_TD


def run(module, x_TD, ids_TK, weights_TK, dy_TD):
    module.zero_grad(set_to_none=True)
    x_TD, weights_TK = x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_()
    y_TD = module(x_TD, ids_TK, weights_TK)
    y_TD.backward(dy_TD)
    return {"y": y_TD.detach(), "x": x_TD.grad, "weights": weights_TK.grad} | {name: p.grad for name, p in module.named_parameters()}


@needs_kernels
def test_the_same_bits_every_time():
    module, x_TD, weights_TK, dy_TD = layer()
    ids_TK = ids_of("all", 512, 8, 2)
    first, second = (run(module, x_TD, ids_TK, weights_TK, dy_TD) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@needs_kernels
def test_a_replayed_step_never_waits_and_follows_new_counts():
    module, x_TD, weights_TK, dy_TD = layer()
    ids_TK = ids_of("all", 512, 8, 2)
    run(module, x_TD, ids_TK, weights_TK, dy_TD)
    torch.cuda.set_sync_debug_mode("error")
    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run(module, x_TD, ids_TK, weights_TK, dy_TD)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = run(module, x_TD, ids_TK, weights_TK, dy_TD)
    ids_TK.copy_(ids_of("empty", 512, 8, 2))
    graph.replay()
    replayed = {name: value.clone() for name, value in recorded.items()}
    eager = run(module, x_TD, ids_TK, weights_TK, dy_TD)
    assert all(torch.equal(replayed[name], eager[name]) for name in eager)


@needs_kernels
def test_a_wrong_scale_is_noticed(monkeypatch):
    module, x_TD, weights_TK, dy_TD = layer()
    ids_TK = ids_of("all", 512, 8, 2)
    right = run(module, x_TD, ids_TK, weights_TK, dy_TD)
    scales = fp8.row_scales
    monkeypatch.setattr(fp8, "row_scales", lambda scale_T, token_N, *rest: scales(scale_T.roll(1), token_N, *rest))
    wrong = run(module, x_TD, ids_TK, weights_TK, dy_TD)
    assert float((wrong["y"] - right["y"]).norm() / right["y"].norm()) > 0.05
