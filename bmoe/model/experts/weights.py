"""The parameters every expert implementation shares: the canonical layout of checkpoints.

Shapes: T tokens, D width, F expert width, E experts, K top-k, N = T x K routed rows, C = 2F for swiglu, F for gelu.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from bmoe.errors import RequestError


class Experts(nn.Module):
    """Parameters of E feed-forward experts and the activation between their two matrices.

    gate_up_ECD: [E, 2F, D], the first F rows are the gate, the last F the up projection (swiglu), or [E, F, D] (gelu).
    down_EDF:    [E, D, F].
    gate_up_bias [E, C] and down_bias [E, D] exist with `bias=True` and are None otherwise.

    Every subclass computes, for x_TD in its own dtype, experts_TK int64 in [0, E] and weights_TK fp32,

        y_t = sum over k of  down_e (w_tk * act(gate_up_e x_t + b_e)) + w_tk * c_e        with e = experts_TK[t, k]

    The value E stands for "no expert": that (t, k) adds nothing and receives gradients that are exactly zero.
    """

    adds_residual = False
    """Whether `forward` takes a fourth argument, residual_TD, to be added to y_TD without a pass of its own."""

    def __init__(self, experts: int, width: int, expert_width: int, ffn: str = "swiglu", bias: bool = False):
        super().__init__()
        if ffn not in ("swiglu", "gelu"):
            raise RequestError(f"model.ffn is {ffn!r}, but experts know only swiglu and gelu; choose one of them.")
        self.experts, self.width, self.expert_width, self.ffn = experts, width, expert_width, ffn
        hidden = 2 * expert_width if ffn == "swiglu" else expert_width
        self.gate_up = nn.Parameter(torch.empty(experts, hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, expert_width))
        self.gate_up_bias = nn.Parameter(torch.empty(experts, hidden)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(experts, width)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Matrices from N(0, 0.02^2), biases zero; the model's own `initialize(seed)` comes after this one."""
        for matrix in (self.gate_up, self.down):
            nn.init.normal_(matrix, std=0.02)
        for bias in (self.gate_up_bias, self.down_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def activate(self, h_NC: Tensor, weights_N: Tensor) -> Tensor:
        """Weighted activation [N, F]: computed in fp32 (or float64), rounded once to h's dtype."""
        wide = torch.promote_types(h_NC.dtype, torch.float32)
        h_NC, weights_N1 = h_NC.to(wide), weights_N[:, None].to(wide)
        if self.ffn == "gelu":
            return functional.gelu(h_NC) * weights_N1
        gate_NF, up_NF = h_NC.chunk(2, dim=-1)
        return functional.silu(gate_NF) * up_NF * weights_N1

    def extra_repr(self) -> str:
        return f"experts={self.experts}, width={self.width}, expert_width={self.expert_width}, ffn={self.ffn}"
