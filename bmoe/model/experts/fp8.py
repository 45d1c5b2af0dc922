"""Experts whose forward and data-gradient products are FP8 (precision `fp8_row`, Hopper): row-wise current scaling.

Shapes: T tokens, D width, F expert width, E experts, K top-k, N = T x K rows sorted by expert, I = 2F interleaved. An 8
marks E4M3 (kernels/fp8.py); its scales are by row of activations and gradients, and by expert of a weight.

    forward    x8 | h, a = swiglu(s x8[token] gate_up8^T) | a8 | o = a8 down8^T | y = sum of each token's K rows, scaled
    backward   dy8 | da = dy8[token] down8 | dh, dh8, aw, dw = dswiglu(h, s da) | dx = sum of the K rows of dh8 gate_up8, scaled
               d_down = dy[token]^T aw and d_gate_up = dh^T x[token] in bf16

Weight gradients contract over rows, where a scale by row is no factor of the sum; they stay in bf16, as do master
weights, activations in memory, and everything outside the experts. Scales of down's and gate_up's results are applied
where the K rows of a token are summed, in fp32. Compared with one scale per tensor a row of small numbers keeps its
precision beside a row of large ones, and no pass over a tensor is needed before it is quantised.

Saved for the backward: what the bf16 path saves, and the transposed FP8 weights (3 D F bytes an expert).
"""

import torch
from torch import Tensor

from bmoe.errors import RequestError
from bmoe.kernels import fp8, fp8_gemm, fused_gemm
from bmoe.kernels.operators import operator
from bmoe.kernels.rows import combine, sort_slots, to_slots
from bmoe.model.experts.triton import TritonExperts


def _forward_fake(x_TD, experts_TK, weights_TK, gate_up_ECD, down_EDF):
    n, new = experts_TK.numel(), experts_TK.new_empty
    E, C, D = gate_up_ECD.shape
    order = (new(n, dtype=torch.int32), new(n, dtype=torch.int32), new(n, dtype=torch.float32), new(E + 1, dtype=torch.int32))
    weights8 = (x_TD.new_empty(E, D, C, dtype=fp8.E4M3), x_TD.new_empty(E, C // 2, D, dtype=fp8.E4M3))
    scales = (new(E, dtype=torch.float32), new(E, dtype=torch.float32))
    return x_TD.new_empty(x_TD.shape), x_TD.new_empty(n, C), *order, *weights8, *scales


@operator("experts_fp8", _forward_fake)
def experts_forward(
    x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, gate_up_ECD: Tensor, down_EDF: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y_TD, and for the backward h_NI, the Order, both weights in FP8 transposed, and their scales.

    Raises RequestError where the products cannot run (here, where torch.compile does not look).
    """
    reason = fp8_gemm.why_not(x_TD.device, x_TD.dtype, down_EDF.shape[1], down_EDF.shape[2])
    if reason is not None:
        raise RequestError(f"precision.kind fp8_row cannot run here: {reason}.")
    x_TD, k = x_TD.contiguous(), experts_TK.shape[1]
    order = sort_slots(experts_TK, weights_TK, gate_up_ECD.shape[0])
    bounds_E1 = order.bounds_E1
    gate_up8_EID, gate_up8_EDI, gate_up_scale_E = fp8.quantize_weight(gate_up_ECD, interleave=True)
    down8_EDF, down8_EFD, down_scale_E = fp8.quantize_weight(down_EDF)
    x8_TD, scale_T = fp8.quantize_rows(x_TD)
    scale_N = fp8.row_scales(scale_T, order.token_of_row_N, gate_up_scale_E, bounds_E1)
    h_NI, a_NF = fp8_gemm.up(x8_TD, gate_up8_EID, scale_N, order.token_of_row_N, bounds_E1)
    a8_NF, scale_N = fp8.quantize_rows(a_NF, bounds_E1, down_scale_E, order.weight_of_row_N)
    o_ND = fp8_gemm.down(a8_NF, down8_EDF, bounds_E1)
    y_TD = combine(o_ND, order.row_of_slot_N, k, to_slots(scale_N, order.row_of_slot_N))
    return y_TD, h_NI, *order, gate_up8_EDI, down8_EFD, gate_up_scale_E, down_scale_E


def _backward_fake(dy_TD, x_TD, h_NI, row_N, token_N, weight_N, bounds_E1, gate_up8_EDI, down8_EFD, gate_up_scale_E, down_scale_E, k):
    E, D, C = gate_up8_EDI.shape
    dweights_TK = weight_N.new_empty(x_TD.shape[0], k)
    return x_TD.new_empty(x_TD.shape), dweights_TK, x_TD.new_empty(E, C, D), x_TD.new_empty(E, D, C // 2)


@operator("experts_fp8_backward", _backward_fake)
def experts_backward(
    dy_TD: Tensor,
    x_TD: Tensor,
    h_NI: Tensor,
    row_of_slot_N: Tensor,
    token_of_row_N: Tensor,
    weight_of_row_N: Tensor,
    bounds_E1: Tensor,
    gate_up8_EDI: Tensor,
    down8_EFD: Tensor,
    gate_up_scale_E: Tensor,
    down_scale_E: Tensor,
    k: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx_TD, dweights_TK, dgate_up_ECD, ddown_EDF."""
    x_TD, dy_TD = x_TD.contiguous(), dy_TD.contiguous()
    dy8_TD, scale_T = fp8.quantize_rows(dy_TD)
    scale_N = fp8.row_scales(scale_T, token_of_row_N, down_scale_E, bounds_E1)
    da_NF = fp8_gemm.ddown(dy8_TD, down8_EFD, token_of_row_N, bounds_E1)
    dh_NI, dh8_NI, dh_scale_N, aw_NF, dweight_N = fp8.dswiglu_quantize(da_NF, h_NI, scale_N, weight_of_row_N, bounds_E1, gate_up_scale_E)
    del da_NF
    ddown_EDF = fused_gemm.wdown(dy_TD, aw_NF, token_of_row_N, bounds_E1)
    del aw_NF
    dgate_up_ECD = fused_gemm.wup(dh_NI, x_TD, token_of_row_N, bounds_E1)
    del dh_NI
    dx_ND = fp8_gemm.dup(dh8_NI, gate_up8_EDI, bounds_E1)
    dx_TD = combine(dx_ND, row_of_slot_N, k, to_slots(dh_scale_N, row_of_slot_N))
    return dx_TD, to_slots(dweight_N, row_of_slot_N).view(-1, k), dgate_up_ECD, ddown_EDF


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, experts_TK, weights_TK, gate_up_ECD, down_EDF):
        y_TD, *saved = experts_forward(x_TD, experts_TK, weights_TK, gate_up_ECD, down_EDF)
        ctx.k = experts_TK.shape[1]
        ctx.save_for_backward(x_TD, *saved)
        return y_TD

    @staticmethod
    def backward(ctx, dy_TD):
        dx_TD, dweights_TK, dgate_up_ECD, ddown_EDF = experts_backward(dy_TD, *ctx.saved_tensors, ctx.k)
        return dx_TD, None, dweights_TK, dgate_up_ECD, ddown_EDF


class Fp8Experts(TritonExperts):
    """SwiGLU experts without biases in row-wise FP8."""

    def forward(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """y_TD in bf16, of bf16 x_TD. Raises RequestError where the products cannot run."""
        if x_TD.shape[0] == 0:
            return super().forward(x_TD, experts_TK, weights_TK)
        return _Experts.apply(x_TD, experts_TK, weights_TK, self.gate_up.to(x_TD.dtype), self.down.to(x_TD.dtype))
