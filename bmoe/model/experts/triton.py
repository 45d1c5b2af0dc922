"""Experts on NVIDIA GPUs: grouped GEMMs with every memory-bound stage around them in one hand-written pass.

Shapes: T tokens, D width, F expert width, E experts, K top-k, N = T x K rows sorted by expert, C = 2F.

    forward    sort | x -> rows | h = rows gate_up^T | a = w swiglu(h) | o = a down^T | y = sum of each token's K rows
    backward   dy -> rows | da = rows down | dh, a, dw | d_down = rows^T a | d_gate_up = dh^T x_rows |
               dx = sum of each token's K rows of dh gate_up

Saved for the backward: x, h, the routing and both permutations; permuted copies and the activation are made again.
Forward and backward are one operator each, opaque to torch.compile: one graph, no recompilation when counts change,
no host-device synchronisation, no atomics, the same bits on every run.
"""

import torch
from torch import Tensor

from bmoe.errors import RequestError
from bmoe.kernels.rows import Order, combine, sort_slots, spread
from bmoe.kernels.swiglu import swiglu, swiglu_backward
from bmoe.model.experts.grouped import grouped_linear
from bmoe.model.experts.weights import Experts


@torch.library.custom_op("bmoe::experts", mutates_args=())
def experts_forward(
    x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, gate_up_ECD: Tensor, down_EDF: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y_TD, and for the backward: h_NC, row_of_slot_N, slot_of_row_N, offsets_E."""
    k = experts_TK.shape[1]
    order = sort_slots(experts_TK, gate_up_ECD.shape[0])
    h_NC = grouped_linear(spread(x_TD, order.row_of_slot_N, k), gate_up_ECD, order.offsets_E)
    a_NF = swiglu(h_NC, weights_TK.reshape(-1), order)
    y_TD = combine(grouped_linear(a_NF, down_EDF, order.offsets_E), order.row_of_slot_N, k)
    return y_TD, h_NC, *order


@experts_forward.register_fake
def _(x_TD, experts_TK, weights_TK, gate_up_ECD, down_EDF):
    n = experts_TK.numel()
    order_N = [experts_TK.new_empty(n, dtype=torch.int32) for _ in range(2)]
    offsets_E = experts_TK.new_empty(gate_up_ECD.shape[0], dtype=torch.int32)
    return torch.empty_like(x_TD), x_TD.new_empty(n, gate_up_ECD.shape[1]), *order_N, offsets_E


@torch.library.custom_op("bmoe::experts_backward", mutates_args=())
def experts_backward(
    dy_TD: Tensor,
    x_TD: Tensor,
    weights_TK: Tensor,
    gate_up_ECD: Tensor,
    down_EDF: Tensor,
    h_NC: Tensor,
    row_of_slot_N: Tensor,
    slot_of_row_N: Tensor,
    offsets_E: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx_TD, dweights_TK, dgate_up_ECD, ddown_EDF."""
    k = weights_TK.shape[1]
    order = Order(row_of_slot_N, slot_of_row_N, offsets_E)
    dy_ND = spread(dy_TD, row_of_slot_N, k)
    da_NF = grouped_linear(dy_ND, down_EDF.transpose(1, 2), offsets_E)
    dh_NC, dweights_N = swiglu_backward(h_NC, da_NF, weights_TK.reshape(-1), order)
    ddown_EDF = grouped_outer(dy_ND, da_NF, offsets_E)
    del dy_ND, da_NF
    dgate_up_ECD = grouped_outer(dh_NC, spread(x_TD, row_of_slot_N, k), offsets_E)
    dx_TD = combine(grouped_linear(dh_NC, gate_up_ECD.transpose(1, 2), offsets_E), row_of_slot_N, k)
    return dx_TD, dweights_N.view_as(weights_TK), dgate_up_ECD, ddown_EDF


@experts_backward.register_fake
def _(dy_TD, x_TD, weights_TK, gate_up_ECD, down_EDF, h_NC, row_of_slot_N, slot_of_row_N, offsets_E):
    return tuple(torch.empty_like(t) for t in (x_TD, weights_TK, gate_up_ECD, down_EDF))


def grouped_outer(left_NO: Tensor, right_NI: Tensor, offsets_E: Tensor) -> Tensor:
    """Per expert, the sum over its rows of left^T right: [E, O, I]; zero for an expert without rows."""
    aligned = all(t.shape[1] * t.element_size() % 16 == 0 for t in (left_NO, right_NI))
    if aligned and left_NO.dtype == torch.bfloat16 and left_NO.shape[0] > 0:
        return torch._grouped_mm(left_NO.T, right_NI, offs=offsets_E)
    ends = offsets_E.tolist()
    starts = [0, *ends[:-1]]
    return torch.stack([left_NO[a:b].T @ right_NI[a:b] for a, b in zip(starts, ends, strict=True)])


def _save(ctx, inputs, output):
    x_TD, _, weights_TK, gate_up_ECD, down_EDF = inputs
    ctx.save_for_backward(x_TD, weights_TK, gate_up_ECD, down_EDF, *output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, dy_TD, *_):
    dx_TD, dweights_TK, dgate_up_ECD, ddown_EDF = experts_backward(dy_TD, *ctx.saved_tensors)
    return dx_TD, None, dweights_TK, dgate_up_ECD, ddown_EDF


experts_forward.register_autograd(_backward, setup_context=_save)


class TritonExperts(Experts):
    """SwiGLU experts without biases."""

    def __init__(self, experts: int, width: int, expert_width: int, ffn: str = "swiglu", bias: bool = False):
        if ffn != "swiglu" or bias:
            raise RequestError(
                "backend.experts triton computes swiglu without biases only; "
                "set model.ffn to swiglu and model.bias to false, or backend.experts to grouped."
            )
        super().__init__(experts, width, expert_width)

    def forward(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """y_TD in x's dtype."""
        gate_up_ECD, down_EDF = self.gate_up.to(x_TD.dtype), self.down.to(x_TD.dtype)
        return experts_forward(x_TD, experts_TK, weights_TK, gate_up_ECD, down_EDF)[0]
