"""Experts one after the other: the definition that every other implementation is tested against.

Shapes: T tokens, D width, F expert width, E experts, K top-k; n rows of the expert at hand.
"""

import torch
from torch import Tensor
from torch.nn import functional

from bmoe.model.experts.weights import Experts


class LoopExperts(Experts):
    """For each expert: pick its tokens, apply its two matrices, add the result to those tokens' rows."""

    matmul = staticmethod(functional.linear)  # low-precision emulation puts its own here

    def forward(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """y_TD in x's dtype, summed in fp32 (float64 for float64 input)."""
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        y_TD = torch.zeros_like(x_TD, dtype=wide)
        matrices = zip(self.gate_up.to(x_TD.dtype).unbind(), self.down.to(x_TD.dtype).unbind(), strict=True)
        for expert, (gate_up_CD, down_DF) in enumerate(matrices):
            token_n, slot_n = torch.where(experts_TK == expert)
            weights_n = weights_TK[token_n, slot_n]
            h_nC = self.matmul(x_TD[token_n], gate_up_CD)
            if self.gate_up_bias is not None:
                h_nC = h_nC + self.gate_up_bias[expert].to(x_TD.dtype)
            a_nF = self.activate(h_nC, weights_n).to(x_TD.dtype)
            y_nD = self.matmul(a_nF, down_DF).to(wide)
            if self.down_bias is not None:
                y_nD = y_nD + weights_n[:, None].to(wide) * self.down_bias[expert].to(wide)
            y_TD = y_TD.index_add(0, token_n, y_nD)
        return y_TD.to(x_TD.dtype)
