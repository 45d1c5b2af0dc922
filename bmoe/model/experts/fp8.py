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

A step of several batches quantises its weights once (weight caching, `is_first_microbatch` in Transformer Engine): `hold` does it
before the first, into memory that stays (6 D F bytes an expert), and the passes of the step read that until `let_go`. Otherwise
every forward pass quantises them.
"""

import torch
from torch import Tensor

from bmoe.errors import RequestError
from bmoe.kernels import fp8, fp8_gemm, fused_gemm
from bmoe.kernels.operators import apply, operator
from bmoe.kernels.rows import combine, sort_slots, to_slots
from bmoe.model.experts.triton import TritonExperts


def _weights_fake(gate_up_ECD, down_EDF):
    E, C, D = gate_up_ECD.shape
    F, new = C // 2, gate_up_ECD.new_empty
    up8 = (new(E, C, D, dtype=fp8.E4M3), new(E, D, C, dtype=fp8.E4M3), new(E, dtype=torch.float32))
    return *up8, new(E, D, F, dtype=fp8.E4M3), new(E, F, D, dtype=fp8.E4M3), new(E, dtype=torch.float32)


@operator("experts_fp8_weights", _weights_fake)
def quantize_weights(gate_up_ECD: Tensor, down_EDF: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """gate_up8_EID (interleaved), its transpose gate_up8_EDI, gate_up_scale_E, and down8_EDF, down8_EFD, down_scale_E.

    Raises RequestError where the products cannot run (here, where torch.compile does not look).
    """
    _check(down_EDF)
    return *fp8.quantize_weight(gate_up_ECD, interleave=True), *fp8.quantize_weight(down_EDF)


def _check(down_EDF: Tensor) -> None:
    reason = fp8_gemm.why_not(down_EDF.device, down_EDF.dtype, down_EDF.shape[1], down_EDF.shape[2])
    if reason is not None:
        raise RequestError(f"precision.kind fp8_row cannot run here: {reason}.")


def _forward_fake(x_TD, experts_TK, weights_TK, residual_TD, gate_up8_EID, gate_up_scale_E, down8_EDF, down_scale_E):
    n, new = experts_TK.numel(), experts_TK.new_empty
    E, C, D = gate_up8_EID.shape
    order = (new(n, dtype=torch.int32), new(n, dtype=torch.int32), new(n, dtype=torch.float32), new(E + 1, dtype=torch.int32))
    return x_TD.new_empty(x_TD.shape), x_TD.new_empty(n, C), *order


@operator("experts_fp8", _forward_fake)
def experts_forward(
    x_TD: Tensor,
    experts_TK: Tensor,
    weights_TK: Tensor,
    residual_TD: Tensor | None,
    gate_up8_EID: Tensor,
    gate_up_scale_E: Tensor,
    down8_EDF: Tensor,
    down_scale_E: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y_TD, and for the backward h_NI and the Order."""
    x_TD, k = x_TD.contiguous(), experts_TK.shape[1]
    order = sort_slots(experts_TK, weights_TK, gate_up8_EID.shape[0])
    bounds_E1 = order.bounds_E1
    x8_TD, scale_T = fp8.quantize_rows(x_TD)
    scale_N = fp8.row_scales(scale_T, order.token_of_row_N, gate_up_scale_E, bounds_E1)
    h_NI, a_NF = fp8_gemm.up(x8_TD, gate_up8_EID, scale_N, order.token_of_row_N, bounds_E1)
    a8_NF, scale_N = fp8.quantize_rows(a_NF, bounds_E1, down_scale_E, order.weight_of_row_N)
    o_ND = fp8_gemm.down(a8_NF, down8_EDF, bounds_E1)
    y_TD = combine(o_ND, order.row_of_slot_N, k, to_slots(scale_N, order.row_of_slot_N), residual_TD)
    return y_TD, h_NI, *order


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
    def forward(ctx, x_TD, experts_TK, weights_TK, residual_TD, gate_up_ECD, down_EDF, *held):
        up8_EID, up8_EDI, up_scale_E, down8_EDF, down8_EFD, down_scale_E = held or quantize_weights(gate_up_ECD, down_EDF)
        y_TD, *saved = experts_forward(x_TD, experts_TK, weights_TK, residual_TD, up8_EID, up_scale_E, down8_EDF, down_scale_E)
        ctx.k, ctx.held = experts_TK.shape[1], len(held)
        ctx.save_for_backward(x_TD, *saved, up8_EDI, down8_EFD, up_scale_E, down_scale_E)
        return y_TD

    @staticmethod
    def backward(ctx, dy_TD):
        dx_TD, dweights_TK, dgate_up_ECD, ddown_EDF = experts_backward(dy_TD, *ctx.saved_tensors, ctx.k)
        dresidual_TD = dy_TD if ctx.needs_input_grad[3] else None
        return dx_TD, None, dweights_TK, dresidual_TD, dgate_up_ECD, ddown_EDF, *[None] * ctx.held


class Fp8Experts(TritonExperts):
    """SwiGLU experts without biases in row-wise FP8."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.held: tuple[Tensor, ...] = ()
        self.holds = False

    @torch.no_grad()
    def hold(self) -> None:
        """Quantise the weights (bf16, whole on this rank) as they are now, for all passes up to `let_go`. Raises RequestError where
        the products cannot run, TypeError for another dtype."""
        _check(self.down)
        up = fp8.quantize_weight(self.gate_up, interleave=True, out=self.held[:3] or None)
        self.held, self.holds = (*up, *fp8.quantize_weight(self.down, out=self.held[3:] or None)), True

    def let_go(self) -> None:
        """Quantise the weights in every pass from here on. The memory stays: CUDA graphs have recorded its addresses."""
        self.holds = False

    def forward(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        """y_TD in bf16, of bf16 x_TD, plus `residual_TD`. Raises RequestError where the products cannot run."""
        if x_TD.shape[0] == 0:
            return super().forward(x_TD, experts_TK, weights_TK, residual_TD)
        held = self.held if self.holds else ()
        weights = (self.gate_up.to(x_TD.dtype), self.down.to(x_TD.dtype))
        return apply(_Experts, x_TD, experts_TK, weights_TK, residual_TD, *weights, *held)
