"""Attention probabilities of every head, by the definition: fused kernels never form them.

Legend: H heads, L layers, n tokens of one sequence.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from bmoe.evaluation.forward import packed


@torch.no_grad()
def attention_maps(model: nn.Module, sequences: Iterable[np.ndarray], slots: int, device: torch.device) -> Iterator[Tensor]:
    """softmax(q k^T / sqrt(d)) of each sequence, at least fp32 [L * H, n, n], layer-major, on `device`.

    Queries and keys are what the layer itself projects, normalises and rotates; rows are queries. Sequences carry their
    specials. Decoders attend to earlier tokens only.
    """
    layers = [block.attention for block in model.blocks]
    for batch in packed(sequences, slots, device):
        projected: list[tuple[Tensor, Tensor]] = []

        def note(attention: nn.Module, args: tuple, projected=projected) -> None:
            q_THd, k_TGd, _ = attention.project(*args)
            projected.append((q_THd, k_TGd))

        handles = [attention.register_forward_pre_hook(note) for attention in layers]
        try:
            model(**batch.inputs, select_M=torch.zeros(1, dtype=torch.int64, device=device))
        finally:
            for handle in handles:
                handle.remove()
        for begin, end in zip(batch.bounds[:-1], batch.bounds[1:], strict=True):
            yield torch.cat([
                _probabilities(q[begin:end], k[begin:end], attention.causal) for attention, (q, k) in zip(layers, projected, strict=True)
            ])  # fmt: skip


def _probabilities(q_nHd: Tensor, k_nGd: Tensor, causal: bool) -> Tensor:
    wide = torch.promote_types(q_nHd.dtype, torch.float32)
    q, k = q_nHd.to(wide) / q_nHd.shape[-1] ** 0.5, k_nGd.to(wide).repeat_interleave(q_nHd.shape[1] // k_nGd.shape[1], dim=1)
    scores_Hnn = torch.einsum("qhd,khd->hqk", q, k)
    if causal:
        later = torch.ones(scores_Hnn.shape[1:], dtype=torch.bool, device=scores_Hnn.device).triu(1)
        scores_Hnn = scores_Hnn.masked_fill(later, float("-inf"))
    return scores_Hnn.softmax(dim=-1)
