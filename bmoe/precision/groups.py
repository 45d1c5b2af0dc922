"""Rounded copies of a matrix whose rows belong to several experts, one after the other.

Blocks down the columns start anew at each expert's first row, so no block mixes two experts. On CUDA the copies come
from the Triton kernel of `fused`; elsewhere from the plain-torch quantisers; the results are equal bit for bit.

Shapes: N rows, I columns, E experts; offsets_E int32, the end of each expert's rows; rows beyond the last belong to
no expert and form a group of their own.
"""

import torch
from torch import Tensor

from bmoe.precision import block, mxfp8

QUANTISERS = {"mxfp8": mxfp8, "fp8_block": block}


def group_of_rows(offsets_E: Tensor, rows: int) -> Tensor:
    """int64 [N]: the group of each row, 0..E; E stands for the rows beyond the last offset."""
    return torch.searchsorted(offsets_E, torch.arange(rows, device=offsets_E.device, dtype=offsets_E.dtype), right=True)


def _aligned_rows(offsets_E: Tensor, rows: int, size: int) -> tuple[Tensor, int]:
    """Places int64 [N] of the rows in a matrix where each group starts at a multiple of `size`, and its row count.

    The count depends on N and E only, so nothing waits for the device.
    """
    ends_G = torch.cat([offsets_E.long(), offsets_E.new_full((1,), rows).long()])
    starts_G = torch.cat([ends_G.new_zeros(1), ends_G[:-1]])
    padded_G = (ends_G - starts_G + size - 1) // size * size
    shift_G = torch.cumsum(padded_G, 0) - padded_G - starts_G
    place_N = torch.arange(rows, device=offsets_E.device) + shift_G[group_of_rows(offsets_E, rows)]
    return place_N, -(-rows // size) * size + ends_G.numel() * size


def rounded_copies(x_NI: Tensor, kind: str, offsets_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """x quantised and dequantised with blocks along its rows, and down its columns within each group; x's dtype."""
    if x_NI.is_cuda:
        from bmoe.precision import fused

        ends_G = None if offsets_E is None else torch.cat([offsets_E, offsets_E.new_full((1,), x_NI.shape[0])])
        return fused.copies(x_NI, kind, ends_G)
    quantiser = QUANTISERS[kind]
    along = quantiser.quantize_dequantize(x_NI, -1)
    if offsets_E is None:
        return along, quantiser.quantize_dequantize(x_NI, -2)
    place_N, rows = _aligned_rows(offsets_E, x_NI.shape[0], quantiser.BLOCK)
    padded = x_NI.new_zeros(rows, x_NI.shape[1]).index_copy(0, place_N, x_NI)
    return along, quantiser.quantize_dequantize(padded, -2)[place_N]


def rounded_weight(w: Tensor, kind: str, axis: int) -> Tensor:
    """w_OI or w_EOI quantised and dequantised for a contraction over `axis` (-1 or -2); block FP8 uses squares for both."""
    if not w.is_cuda:
        return QUANTISERS[kind].quantize_dequantize(w, None if kind == "fp8_block" else axis)
    from bmoe.precision import fused

    flat, ends_G = w.reshape(-1, w.shape[-1]), None
    if w.ndim == 3 and w.shape[1] % QUANTISERS[kind].BLOCK:
        ends_G = torch.arange(1, w.shape[0] + 1, device=w.device, dtype=torch.int32) * w.shape[1]
    if kind == "fp8_block":
        return fused.squares(flat, ends_G).view(w.shape)
    return fused.copies(flat, kind, ends_G, rows=axis == -1, columns=axis == -2)[0 if axis == -1 else 1].view(w.shape)
