"""Grouped matrix products by torch: one GEMM per expert over rows that are sorted by expert, in one launch.

Shapes: N rows sorted by expert, E experts, I inputs, O outputs; offsets_E int32 holds the end of each expert's rows.

torch's kernel (CUTLASS on Hopper, 650-750 TFLOP/s on an H200) takes bf16 and row strides of whole 16 bytes. Anything
else, fp32 on a CPU above all, is multiplied expert by expert, which reads the offsets on the host.
"""

import torch
from torch import Tensor


def _fits(*matrices: Tensor) -> bool:
    aligned = all(m.shape[-1] * m.element_size() % 16 == 0 for m in matrices)
    return aligned and matrices[0].dtype == torch.bfloat16 and matrices[0].shape[0] > 0


def grouped_linear(x_NI: Tensor, weight_EOI: Tensor, offsets_E: Tensor) -> Tensor:
    """Row n of expert e times weight_EOI[e]^T: [N, O]; rows at or beyond offsets_E[-1] are undefined. Differentiable."""
    if _fits(x_NI, weight_EOI, weight_EOI.transpose(1, 2)):
        return torch._grouped_mm(x_NI, weight_EOI.transpose(1, 2), offs=offsets_E)
    ends = offsets_E.tolist()
    sizes = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    *rows, rest_RI = x_NI.split([*sizes, x_NI.shape[0] - ends[-1]])
    products = [row_nI @ weight_OI.T for row_nI, weight_OI in zip(rows, weight_EOI.unbind(), strict=True)]
    return torch.cat([*products, rest_RI.new_zeros(rest_RI.shape[0], weight_EOI.shape[1])])


def grouped_outer(left_NO: Tensor, right_NI: Tensor, offsets_E: Tensor) -> Tensor:
    """Per expert, the sum over its rows of left^T right: [E, O, I]; zero for an expert without rows."""
    if _fits(left_NO, right_NI):
        return torch._grouped_mm(left_NO.T, right_NI, offs=offsets_E)
    ends = offsets_E.tolist()
    starts = [0, *ends[:-1]]
    return torch.stack([left_NO[a:b].T @ right_NI[a:b] for a, b in zip(starts, ends, strict=True)])
