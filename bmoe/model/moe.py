"""The Mixture-of-Experts feed-forward layer: a router, routed experts, and optionally a shared one.

Legend: T tokens, D width, F expert width, E experts, K top-k.

Routing and applying are two calls, so that a block may recompute the second in the backward pass with the choice of
experts saved: a second routing could differ at near ties, and would count the load twice.
"""

from torch import Tensor, nn

from bmoe.model.experts import build_experts
from bmoe.model.layers import FeedForward, Layout
from bmoe.model.router import Router, Routing
from bmoe.recipe import BackendSection, ModelSection


class MoE(nn.Module):
    """y_t = sum over the chosen e of weight_te * expert_e(x_t) + shared(x_t); dropless. `precision`: of the experts' GEMMs."""

    def __init__(self, model: ModelSection, backend: BackendSection, precision: str = "bf16"):
        super().__init__()
        moe = model.moe
        kind = "grouped" if backend.experts == "auto" else backend.experts
        self.router = Router(
            model.width, moe.experts, moe.top_k, moe.score, moe.normalize_weights, moe.groups, moe.groups_kept, moe.jitter,
            fused=kind == "triton" and moe.groups is None,
        )  # fmt: skip
        self.experts = build_experts(kind, moe.experts, model.width, moe.expert_width, model.ffn, model.bias, precision)
        shared = moe.shared_experts * moe.expert_width
        self.shared = FeedForward(model.ffn, model.width, shared, model.bias) if shared else None

    def route(self, x_TD: Tensor, layout: Layout) -> Routing:
        return self.router(x_TD, layout)

    def forward(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        """y_TD, or residual_TD + y_TD."""
        shared_TD = None if self.shared is None else self.shared(x_TD)
        if residual_TD is not None and self.experts.adds_residual:
            more_TD = residual_TD if shared_TD is None else residual_TD + shared_TD
            return self.experts(x_TD, experts_TK, weights_TK, more_TD)
        y_TD = self.experts(x_TD, experts_TK, weights_TK)
        y_TD = y_TD if shared_TD is None else y_TD + shared_TD
        return y_TD if residual_TD is None else residual_TD + y_TD
