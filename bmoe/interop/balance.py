"""Routers of an upcycled model that spread the load from the first step.

Rows drawn at random leave experts without a token: the states that a trained model shows its router share a large mean, on which
each row puts an offset of its own, and few directions hold most of the rest. Published upcycling leaves that to the balance loss
(Komatsuzaki et al. 2023; He et al. 2024) or takes the centres of clusters of the states for rows (Cluster-aware Upcycling, 2026).
Here each row w_e of the seed becomes w_e + b_e u. The direction u has x.u as near to 1 as least squares gets over the states x
of some training batches, so that b_e is an offset of the expert's logit; the offsets are moved against the loads, as the
aux-loss-free bias is in training (Wang et al. 2024), until the loads are even. An upcycled model computes the same whatever
its router chooses.

Legend: T tokens, D width, E experts or, of a split feed-forward, groups of experts, K of them a token.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from bmoe.model.layers import wide
from bmoe.model.transformer import Transformer, Vocabulary
from bmoe.recipe import BackendSection, ModelSection

STEPS, RATE, SLOWER = 200, 0.3, 10.0  # a step moves offsets by at most RATE / (1 + step / SLOWER) deviations of the logits
RIDGE = 1e-3  # of the states' mean square


@torch.no_grad()
def balanced_routers(weights: dict[str, Tensor], model: ModelSection, vocabulary: Vocabulary, batches: Iterable[dict]) -> dict[str, Tensor]:
    """The routers' weights by name, in place of those in `weights`, an upcycled model's, so that loads over `batches` (arguments of
    its forward pass, on the CPU) are even."""
    with torch.device("meta"):
        network = Transformer(model, vocabulary, BackendSection(experts="loop", attention="sdpa"))
    network.load_state_dict({name: wide(tensor) for name, tensor in weights.items()}, assign=True)
    states: dict[int, list[Tensor]] = {layer: [] for layer in network.moe_layers}

    def keep(layer: int):
        return lambda router, arguments: states[layer].append(arguments[0][: int(arguments[1].real_tokens)])

    for layer in network.moe_layers:
        network.blocks[layer].ffn.router.register_forward_pre_hook(keep(layer))
    for arguments in batches:
        network(**arguments)
    pieces = _pieces(weights, model)
    out = {}
    for layer, parts in states.items():
        name = f"blocks.{layer}.ffn.router.weight"
        rows_ED = spread(torch.cat(parts).double(), weights[name][::pieces].double(), model.moe.top_k // pieces)
        out[name] = rows_ED.repeat_interleave(pieces, dim=0).to(weights[name].dtype)
    return out


def spread(x_TD: Tensor, rows_ED: Tensor, k: int) -> Tensor:
    """Router rows w_e + b_e u that send the states, float64, to their top k as evenly as STEPS steps get."""
    gram_DD = x_TD.T @ x_TD
    ridge_DD = RIDGE * gram_DD.diagonal().mean() * torch.eye(gram_DD.shape[0], dtype=gram_DD.dtype)
    u_D = torch.linalg.solve(gram_DD + ridge_DD, x_TD.sum(dim=0))
    one_T1, logits_TE = (x_TD @ u_D)[:, None], x_TD @ rows_ED.T
    offset_E, best_E, least = torch.zeros_like(logits_TE[0]), torch.zeros_like(logits_TE[0]), float("inf")
    for step in range(STEPS):
        chosen_TK = (logits_TE + one_T1 * offset_E).topk(k, dim=-1).indices
        load_E = torch.bincount(chosen_TK.flatten(), minlength=offset_E.numel()) / (chosen_TK.numel() / offset_E.numel())
        uneven = float((load_E - 1).square().sum())
        if uneven < least:
            best_E, least = offset_E, uneven
        offset_E = offset_E + logits_TE.std() * RATE / (1 + step / SLOWER) * (1 - load_E).clamp(-1, 1)
    return rows_ED + best_E[:, None] * u_D


def _pieces(weights: dict[str, Tensor], model: ModelSection) -> int:
    """How many experts with one router row hold the pieces of one feed-forward."""
    rows_ED = weights[f"blocks.{model.moe.dense_layers}.ffn.router.weight"]
    return next((e for e in range(1, len(rows_ED)) if not torch.equal(rows_ED[e], rows_ED[0])), len(rows_ED))
