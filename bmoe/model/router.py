"""The router: which K of E experts a token visits, with which weights, and what keeps the load balanced.

Legend: T tokens, D width, E experts, K top-k, n real tokens of the batch.

Everything here is fp32 (fp64 in a double model) under any autocast: rounding logits to bf16 makes ties and reorders
experts. For logits l_te = x_t w_e:

- scores: softmax over all experts, or a sigmoid per expert.
- selection: the K largest of score + bias. With groups (DeepSeek-V2, -V3), only the experts of the `groups_kept` best
  groups take part; a group is worth its best score (softmax) or the sum of its two best (sigmoid).
- weights: the scores of the chosen, without the bias; divided by their sum with `normalize_weights`.
- balance loss (Switch Transformer, Fedus et al. 2021, eq. 4): E * sum_e f_e P_e, with f_e the fraction of the n K
  routed slots on expert e and P_e the mean over tokens of the score's share p_te = s_te / sum_e s_te. It is 1 under
  perfect balance and at most E. Only P carries a gradient.
- z-loss (ST-MoE, Zoph et al. 2022, eq. 5): mean over tokens of logsumexp(l_t)^2.
- aux-loss-free bias (DeepSeek-V3, Wang et al. 2024): once per optimizer step, b_e += rate * sign(mean load - load_e).

All means and counts are over the n real tokens. A dummy slot gets the expert E, which is none, and weight 0.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmoe.model.layers import Layout, wide


class Routing(NamedTuple):
    experts_TK: Tensor  # int64 in [0, E]; E is "no expert"
    weights_TK: Tensor  # fp32
    balance: Tensor  # fp32 [], differentiable
    z: Tensor  # fp32 [], differentiable
    counts_E: Tensor  # fp32, real tokens on each expert
    x_TD: Tensor  # the router's input, for the experts: fused kernels add the gradient that comes back through it to their own


class Router(nn.Module):
    """Linear router without bias in the logits; `selection_bias` moves the choice only."""

    def __init__(
        self,
        width: int,
        experts: int,
        top_k: int,
        score: str = "softmax",
        normalize_weights: bool = True,
        groups: int | None = None,
        groups_kept: int | None = None,
        jitter: float = 0.0,
        fused: bool = False,
    ):
        """`fused`: on CUDA in fp32, all of it in the kernels of kernels/router.py; they know no groups."""
        super().__init__()
        self.experts, self.top_k, self.score, self.normalize_weights = experts, top_k, score, normalize_weights
        self.groups, self.groups_kept, self.jitter = groups, groups_kept, jitter
        self.weight = nn.Parameter(torch.empty(experts, width))
        self.register_buffer("selection_bias", torch.zeros(experts))
        self.kernels = None
        if fused:
            from bmoe.kernels.router import route  # imported here: it needs triton

            self.kernels = route

    def _apply(self, fn, recurse: bool = True):
        """Follow a move to another device; refuse casts to half precision, the router stays fp32."""

        def keep(tensor: Tensor) -> Tensor:
            out = fn(tensor)
            return tensor.to(out.device) if out.dtype in (torch.bfloat16, torch.float16) else out

        return super()._apply(keep, recurse)

    def forward(self, x_TD: Tensor, layout: Layout) -> Routing:
        with torch.autocast(x_TD.device.type, enabled=False):
            read_TD, noisy = x_TD, self.jitter > 0.0 and self.training
            if noisy:
                read_TD = wide(x_TD)
                read_TD = read_TD * self._noise(read_TD, layout.jitter_key)
            if self._by_kernel(x_TD):
                options = (self.top_k, self.score, self.normalize_weights, not noisy)
                routed = self.kernels(read_TD, self.weight, self.selection_bias, layout.real_tokens, *options)
                return Routing(*routed, x_TD) if noisy else Routing(*routed)
            logits_TE = F.linear(read_TD.to(self.weight.dtype), self.weight)
            scores_TE = logits_TE.softmax(dim=-1) if self.score == "softmax" else logits_TE.sigmoid()
            return Routing(*self._route(logits_TE, scores_TE, layout), x_TD)

    def _by_kernel(self, x_TD: Tensor) -> bool:
        return self.kernels is not None and x_TD.is_cuda and self.weight.dtype == torch.float32

    def _route(self, logits_TE: Tensor, scores_TE: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        real_T1, tokens = layout.real_T[:, None], layout.real_tokens.clamp(min=1)
        experts_TK = self._select(scores_TE.detach())
        weights_TK = scores_TE.gather(1, experts_TK)
        if self.normalize_weights:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True).clamp(min=1e-20)
        experts_TK = experts_TK.masked_fill(~real_T1, self.experts)
        weights_TK = weights_TK.masked_fill(~real_T1, 0.0)

        ids_E = torch.arange(self.experts, device=experts_TK.device)
        counts_E = (experts_TK[:, :, None] == ids_E).sum(dim=(0, 1)).to(scores_TE.dtype)
        shares_TE = scores_TE if self.score == "softmax" else scores_TE / scores_TE.sum(dim=-1, keepdim=True).clamp(min=1e-20)
        mean_share_E = shares_TE.masked_fill(~real_T1, 0.0).sum(dim=0) / tokens
        balance = self.experts * (counts_E / (tokens * self.top_k) * mean_share_E).sum()
        z = logits_TE.logsumexp(dim=-1).square().masked_fill(~layout.real_T, 0.0).sum() / tokens
        return experts_TK, weights_TK, balance, z, counts_E

    def _select(self, scores_TE: Tensor) -> Tensor:
        selection_TE = scores_TE + self.selection_bias
        if self.groups is not None:
            grouped_Tge = selection_TE.unflatten(1, (self.groups, -1))
            best = 1 if self.score == "softmax" else min(2, grouped_Tge.shape[-1])
            worth_Tg = grouped_Tge.topk(best, dim=-1).values.sum(dim=-1)
            kept_Tg = torch.zeros_like(worth_Tg, dtype=torch.bool).scatter(1, worth_Tg.topk(self.groups_kept, dim=-1).indices, True)
            selection_TE = grouped_Tge.masked_fill(~kept_Tg[:, :, None], float("-inf")).flatten(1)
        return selection_TE.topk(self.top_k, dim=-1).indices

    def _noise(self, x_TD: Tensor, key: Tensor | None) -> Tensor:
        """Uniform in 1 +- jitter, a function of (key, token slot, channel) alone: the same on any device and after a resume."""
        if key is None:
            raise ValueError("router jitter in training needs a jitter_key that differs from batch to batch")
        T, D = x_TD.shape
        index_TD = torch.arange(T * D, device=x_TD.device).view(T, D)
        bits_TD = mix(mix(index_TD & 0xFFFFFFFF) ^ key)
        uniform_TD = (bits_TD >> 8).to(x_TD.dtype) * 2.0**-24
        return 1.0 + self.jitter * (2.0 * uniform_TD - 1.0)

    @torch.no_grad()
    def update_bias(self, counts_E: Tensor, rate: float) -> None:
        """One step of the aux-loss-free bias from the loads of a whole optimizer step."""
        self.selection_bias += rate * torch.sign(counts_E.mean() - counts_E)


def layer_key(key: Tensor, layer: int) -> Tensor:
    """The noise key of one layer from that of the batch. Kept out of the router: a number of its own in each layer would
    make torch.compile compile every layer anew."""
    return mix((key + (layer + 1) * 0x9E3779B9) & 0xFFFFFFFF)


def mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash in int64 arithmetic (lowbias32, C. Wellons 2018: exact avalanche within 0.2 %)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)
