"""Experts on NVIDIA GPUs: six grouped GEMMs, and every memory-bound stage either inside them or in one pass of its own.

Shapes: T tokens, D width, F expert width, E experts, K top-k, N = T x K rows sorted by expert, C = I = 2F.

Two paths with one result. On Hopper in bf16 with quack-kernels installed, gather and activation live inside the GEMMs
(kernels/fused_gemm.py):

    forward    sort | h, a = swiglu(x[token] gate_up^T) | o = a down^T | y = weighted sum of each token's K rows
    backward   dh, aw, dw = dswiglu(h, dy[token] down) | d_down | d_gate_up | dx = sum of each token's K rows

Elsewhere torch's grouped GEMM does the products, with a spread before, an activation pass between and a combine after
them (kernels/rows.py, kernels/swiglu.py).

Saved for the backward: x, h and the routing; no permuted copy, no activation. Forward and backward are one operator
each, opaque to torch.compile: one graph, no recompilation when counts change, no host-device synchronisation, no
atomics, the same bits on every run.
"""

import functools

import torch
import triton
from torch import Tensor

from bmoe.errors import RequestError
from bmoe.kernels import fused_gemm
from bmoe.kernels.grouped_gemm import grouped_linear, grouped_outer
from bmoe.kernels.operators import apply, operator
from bmoe.kernels.rows import Order, combine, sort_slots, spread, to_slots
from bmoe.kernels.swiglu import swiglu, swiglu_backward
from bmoe.model.experts.weights import Experts

_INTERPRETED = triton.knobs.runtime.interpret
"""Kernels were defined for Triton's interpreter, which runs them on the CPU (tests)."""


@functools.cache
def fused_path(gemms: str, device: torch.device, dtype: torch.dtype, width: int, expert_width: int) -> tuple[bool, str]:
    """(whether gather and activation run inside the GEMMs, the reason in words).

    Raises RequestError where `gemms` is "fused" and they cannot run; "torch" never fuses, "auto" where it can.
    """
    reason = fused_gemm.why_not(device, dtype, width, expert_width)
    if gemms == "fused" and reason is not None:
        raise RequestError(f"the fused expert GEMMs cannot run here: {reason}.")
    if gemms == "torch":
        return False, "torch's grouped GEMM was asked for"
    return (True, "Hopper, bf16, quack-kernels installed") if reason is None else (False, reason)


def _fused(gemms: str, x_TD: Tensor, down_EDF: Tensor) -> bool:
    empty = x_TD.shape[0] == 0
    return not empty and fused_path(gemms, x_TD.device, x_TD.dtype, down_EDF.shape[1], down_EDF.shape[2])[0]


def _forward_fake(x_TD, experts_TK, weights_TK, gate_up_ECD, down_EDF, residual_TD, gemms):
    n = experts_TK.numel()
    new = experts_TK.new_empty
    order = (
        new(n, dtype=torch.int32),
        new(n, dtype=torch.int32),
        new(n, dtype=torch.float32),
        new(gate_up_ECD.shape[0] + 1, dtype=torch.int32),
    )
    return x_TD.new_empty(x_TD.shape), x_TD.new_empty(n, gate_up_ECD.shape[1]), *order


@operator("experts", _forward_fake)
def experts_forward(
    x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, gate_up_ECD: Tensor, down_EDF: Tensor, residual_TD: Tensor | None, gemms: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y_TD, and for the backward h_NC (interleaved on the fused path) and the Order."""
    x_TD, k = x_TD.contiguous(), experts_TK.shape[1]
    order = sort_slots(experts_TK, weights_TK, gate_up_ECD.shape[0])
    if _fused(gemms, x_TD, down_EDF):
        h_NC, a_NF = fused_gemm.up(x_TD, gate_up_ECD, order.token_of_row_N, order.bounds_E1)
        o_ND = fused_gemm.down(a_NF, down_EDF, order.bounds_E1)
        return combine(o_ND, order.row_of_slot_N, k, weights_TK, residual_TD), h_NC, *order
    offsets_E = order.bounds_E1[1:]
    h_NC = grouped_linear(spread(x_TD, order.row_of_slot_N, k), gate_up_ECD, offsets_E)
    a_NF = swiglu(h_NC, order.weight_of_row_N, order.bounds_E1)
    o_ND = grouped_linear(a_NF, down_EDF, offsets_E)
    return combine(o_ND, order.row_of_slot_N, k, residual_TD=residual_TD), h_NC, *order


def _backward_fake(dy_TD, x_TD, gate_up_ECD, down_EDF, h_NC, row_N, token_N, weight_N, bounds_E1, k, gemms):
    dweights_TK = weight_N.new_empty(x_TD.shape[0], k)
    return x_TD.new_empty(x_TD.shape), dweights_TK, torch.empty_like(gate_up_ECD), torch.empty_like(down_EDF)


@operator("experts_backward", _backward_fake)
def experts_backward(
    dy_TD: Tensor,
    x_TD: Tensor,
    gate_up_ECD: Tensor,
    down_EDF: Tensor,
    h_NC: Tensor,
    row_of_slot_N: Tensor,
    token_of_row_N: Tensor,
    weight_of_row_N: Tensor,
    bounds_E1: Tensor,
    k: int,
    gemms: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx_TD, dweights_TK, dgate_up_ECD, ddown_EDF."""
    x_TD, dy_TD = x_TD.contiguous(), dy_TD.contiguous()
    order = Order(row_of_slot_N, token_of_row_N, weight_of_row_N, bounds_E1)
    products = _fused_gradients if _fused(gemms, x_TD, down_EDF) else _gradients
    dx_ND, dweight_of_row_N, dgate_up_ECD, ddown_EDF = products(dy_TD, x_TD, gate_up_ECD, down_EDF, h_NC, order, k)
    dweights_TK = to_slots(dweight_of_row_N, row_of_slot_N).view(-1, k)
    return combine(dx_ND, row_of_slot_N, k), dweights_TK, dgate_up_ECD, ddown_EDF


def _fused_gradients(dy_TD, x_TD, gate_up_ECD, down_EDF, h_NI, order, k):
    token_N, bounds_E1 = order.token_of_row_N, order.bounds_E1
    dh_NI, aw_NF, dweight_N = fused_gemm.ddown(dy_TD, down_EDF, h_NI, token_N, order.weight_of_row_N, bounds_E1)
    ddown_EDF = fused_gemm.wdown(dy_TD, aw_NF, token_N, bounds_E1)
    del aw_NF
    dgate_up_ECD = fused_gemm.wup(dh_NI, x_TD, token_N, bounds_E1)
    return fused_gemm.dup(dh_NI, gate_up_ECD, bounds_E1), dweight_N, dgate_up_ECD, ddown_EDF


def _gradients(dy_TD, x_TD, gate_up_ECD, down_EDF, h_NC, order, k):
    offsets_E = order.bounds_E1[1:]
    dy_ND = spread(dy_TD, order.row_of_slot_N, k)
    da_NF = grouped_linear(dy_ND, down_EDF.transpose(1, 2), offsets_E)
    dh_NC, dweight_N = swiglu_backward(h_NC, da_NF, order.weight_of_row_N, order.bounds_E1)
    ddown_EDF = grouped_outer(dy_ND, da_NF, offsets_E)  # da_NF holds the activation now
    del dy_ND, da_NF
    dgate_up_ECD = grouped_outer(dh_NC, spread(x_TD, order.row_of_slot_N, k), offsets_E)
    return grouped_linear(dh_NC, gate_up_ECD.transpose(1, 2), offsets_E), dweight_N, dgate_up_ECD, ddown_EDF


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, experts_TK, weights_TK, gate_up_ECD, down_EDF, residual_TD, gemms):
        y_TD, *saved = experts_forward(x_TD, experts_TK, weights_TK, gate_up_ECD, down_EDF, residual_TD, gemms)
        ctx.k, ctx.gemms = experts_TK.shape[1], gemms
        ctx.save_for_backward(x_TD, gate_up_ECD, down_EDF, *saved)
        return y_TD

    @staticmethod
    def backward(ctx, dy_TD):
        dx_TD, dweights_TK, dgate_up_ECD, ddown_EDF = experts_backward(dy_TD, *ctx.saved_tensors, ctx.k, ctx.gemms)
        return dx_TD, None, dweights_TK, dgate_up_ECD, ddown_EDF, dy_TD if ctx.needs_input_grad[5] else None, None


class TritonExperts(Experts):
    """SwiGLU experts without biases. `gemms` chooses the path: auto (fused where it can run), fused or torch."""

    adds_residual = True

    def __init__(
        self,
        experts: int,
        width: int,
        expert_width: int,
        ffn: str = "swiglu",
        bias: bool = False,
        gemms: str = "auto",
    ):
        if ffn != "swiglu" or bias:
            raise RequestError(
                "backend.experts triton computes swiglu without biases only; "
                "set model.ffn to swiglu and model.bias to false, or backend.experts to grouped."
            )
        super().__init__(experts, width, expert_width)
        self.gemms = gemms

    def forward(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        """y_TD in x's dtype, plus `residual_TD`, of the same shape and dtype, rounded once. Raises RequestError where `gemms` cannot be
        had, or without a GPU."""
        if not (x_TD.is_cuda or _INTERPRETED):
            raise RequestError("backend.experts triton runs on a GPU; set it to grouped or auto on this device.")
        gate_up_ECD, down_EDF = self.gate_up.to(x_TD.dtype), self.down.to(x_TD.dtype)
        return apply(_Experts, x_TD, experts_TK, weights_TK, gate_up_ECD, down_EDF, residual_TD, self.gemms)
