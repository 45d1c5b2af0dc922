"""Rounded copies of a matrix whose rows belong to several experts, one after the other.

Blocks down the columns start anew at each expert's first row, so no block mixes two experts. On CUDA the copies come
from the Triton kernel of `fused`; elsewhere from the plain-torch quantisers; the results are equal bit for bit.

Shapes: N rows, I columns, E experts; offsets_E int32, the end of each expert's rows; rows beyond the last belong to
no expert and form a group of their own.
"""

import torch
from torch import Tensor

from bmoe.precision import block, blocks, mxfp8

QUANTISERS = {"mxfp8": mxfp8, "fp8_block": block}


def group_of_rows(offsets_E: Tensor, rows: int) -> Tensor:
    """int64 [N]: the group of each row, 0..E; E stands for the rows beyond the last offset."""
    return torch.searchsorted(offsets_E, torch.arange(rows, device=offsets_E.device, dtype=offsets_E.dtype), right=True)


def aligned_rows(offsets_E: Tensor, rows: int, size: int) -> tuple[Tensor, Tensor, int]:
    """Places int64 [N] of the rows in a matrix where each group starts at a multiple of `size`, the experts' ends int32 [E] there,
    and its row count, which is a multiple of `size`.

    The count depends on N and E only, so nothing waits for the device.
    """
    ends_G = torch.cat([offsets_E.long(), offsets_E.new_full((1,), rows).long()])
    starts_G = torch.cat([ends_G.new_zeros(1), ends_G[:-1]])
    padded_G = (ends_G - starts_G + size - 1) // size * size
    padded_ends_G = torch.cumsum(padded_G, 0)
    shift_G = padded_ends_G - padded_G - starts_G
    place_N = torch.arange(rows, device=offsets_E.device) + shift_G[group_of_rows(offsets_E, rows)]
    return place_N, padded_ends_G[:-1].int(), -(-rows // size) * size + ends_G.numel() * size


def amax_of_groups(x_NI: Tensor, offsets_E: Tensor | None) -> Tensor:
    """float32 max|x| of each group of rows, [E + 1] with the rows beyond the last offset, or [1] of all rows; 0 of none."""
    amax_N = blocks.amax(x_NI, -1).squeeze(-1) if x_NI.shape[1] else x_NI.new_zeros(x_NI.shape[0], dtype=torch.float32)
    groups = 1 if offsets_E is None else offsets_E.numel() + 1
    group_N = torch.zeros_like(amax_N, dtype=torch.long) if offsets_E is None else group_of_rows(offsets_E, x_NI.shape[0])
    return amax_N.new_zeros(groups).scatter_reduce(0, group_N, amax_N, "amax")


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
    place_N, _, rows = aligned_rows(offsets_E, x_NI.shape[0], quantiser.BLOCK)
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
