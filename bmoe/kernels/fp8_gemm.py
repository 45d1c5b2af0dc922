"""The four products of an expert MLP whose contraction runs along rows, in FP8 (E4M3).

Shapes and names as in kernels/fused_gemm.py; an 8 marks E4M3, quantised by kernels/fp8.py. Weights come with gate and up
interleaved, and transposed where the product contracts over their outputs. s are fp32 scales by row, which hold the scale
of the row and that of its expert's weight.

Mathematics                                                                        FLOPs
    up       h = s x8[token] gate_up8^T,  a = silu(g) u                            4 N D F
    down     o = a8 down8^T                                 (s: in the combine)    2 N D F
    ddown    da = dy8[token] down8                          (s: in dswiglu_quantize) 2 N D F
    dup      dx_rows = dh8 gate_up8                         (s: in the combine)    4 N D F

The weight gradients contract over rows, along which a scale by row is not constant, and stay in bf16
(kernels/fused_gemm.py): two thirds of the FLOPs are FP8. Sums are kept in fp32: every 128 terms the tensor core's
accumulator, which has 14 bits on Hopper, is added to fp32 registers. That doubles the registers of a tile, so tiles are
smaller than those of bf16.

Measured on an H200, T = 16,384, D 2048, F 5632, 8 experts (kernel times in a replayed layer): up 1,119 TFLOP/s, down and dup
together 1,398, where bf16 has 735 and 738. Tiles tried: 128x96, 128x128 and 64x192 ping-pong, 128x128, 128x160, 128x192,
192x128, 256x64 and 256x96 cooperative; ping-pong 128x128 spills.

The backward of the activation is no epilogue here: an epilogue of ddown that reads h and writes dh and aw runs at 380-530
TFLOP/s in either precision (H200), which is most of what FP8 would gain, and dh must be read again to be quantised.
"""

import functools
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional

from bmoe.kernels import fused_gemm


@functools.cache
def why_not(device: torch.device, dtype: torch.dtype, width: int, expert_width: int) -> str | None:
    """The reason why these products cannot run here, or None. `dtype`: of the activations."""
    if width % 16 or expert_width % 16:
        return f"width {width} and expert width {expert_width} are not both multiples of 16"
    return fused_gemm.why_not(device, dtype, width, expert_width)


@functools.cache
def _quack() -> SimpleNamespace:
    """The library's interface, our epilogue and our tiles; imported at first use, because it takes seconds."""
    from quack.gemm_config import GemmConfig
    from quack.gemm_interface import gemm_tuned

    from bmoe.kernels.fp8_epilogues import scaled_swiglu

    def tile(m: int, n: int):
        return GemmConfig(tile_m=m, tile_n=n, pingpong=False, cluster_m=2, cluster_n=1, is_dynamic_persistent=False)

    wide, fitting = tile(128, 192), tile(128, 160)
    return SimpleNamespace(
        gated=scaled_swiglu,
        plain=gemm_tuned.fn,
        up=wide,
        rows=lambda n: fitting if n % 160 == 0 else wide,
    )


def up(x8_TD: Tensor, gate_up8_EID: Tensor, scale_N: Tensor, token_of_row_N: Tensor, bounds_E1: Tensor) -> tuple[Tensor, Tensor]:
    """(h_NI interleaved, a_NF), both bf16."""
    quack = _quack()
    n, hidden = token_of_row_N.numel(), gate_up8_EID.shape[1]
    h_NI, a_NF = (x8_TD.new_empty(n, width, dtype=torch.bfloat16) for width in (hidden, hidden // 2))
    quack.gated(
        x8_TD, gate_up8_EID.transpose(1, 2), out={"D": h_NI, "a": a_NF}, cu_seqlens_m=bounds_E1, A_idx=token_of_row_N,
        config=quack.up, tuned=False, row_scale=scale_N,
    )  # fmt: skip
    return h_NI, a_NF


def _plain(rows8_NI: Tensor, weight8_EOI: Tensor, bounds_E1: Tensor, index_N: Tensor | None = None) -> Tensor:
    quack = _quack()
    rows = rows8_NI.shape[0] if index_N is None else index_N.numel()
    out_NO = rows8_NI.new_empty(rows, weight8_EOI.shape[1], dtype=torch.bfloat16)
    config = quack.rows(out_NO.shape[1])
    quack.plain(rows8_NI, weight8_EOI.transpose(1, 2), out_NO, cu_seqlens_m=bounds_E1, A_idx=index_N, config=config)
    return out_NO


def down(a8_NF: Tensor, down8_EDF: Tensor, bounds_E1: Tensor) -> Tensor:
    """o_ND in bf16, unweighted and unscaled."""
    return _plain(a8_NF, down8_EDF, bounds_E1)


def ddown(dy8_TD: Tensor, down8_EFD: Tensor, token_of_row_N: Tensor, bounds_E1: Tensor) -> Tensor:
    """da_NF in bf16, unscaled."""
    return _plain(dy8_TD, down8_EFD, bounds_E1, token_of_row_N)


def dup(dh8_NI: Tensor, gate_up8_EDI: Tensor, bounds_E1: Tensor) -> Tensor:
    """dx_ND in bf16 in row order, unscaled."""
    return _plain(dh8_NI, gate_up8_EDI, bounds_E1)


class Reference:
    """Plain-torch twins of the four products, by the same names, with fp32 sums."""

    @staticmethod
    def _linear(rows8_NI: Tensor, weight8_EOI: Tensor, bounds_E1: Tensor) -> Tensor:
        return fused_gemm.Reference._linear(rows8_NI.float(), weight8_EOI.float().transpose(1, 2), bounds_E1)

    @classmethod
    def up(cls, x8_TD, gate_up8_EID, scale_N, token_of_row_N, bounds_E1):
        h_NI = cls._linear(x8_TD.float()[token_of_row_N.long()], gate_up8_EID, bounds_E1) * scale_N[:, None]
        return h_NI.bfloat16(), (functional.silu(h_NI[:, ::2]) * h_NI[:, 1::2]).bfloat16()

    @classmethod
    def down(cls, a8_NF, down8_EDF, bounds_E1):
        return cls._linear(a8_NF, down8_EDF, bounds_E1).bfloat16()

    @classmethod
    def ddown(cls, dy8_TD, down8_EFD, token_of_row_N, bounds_E1):
        return cls._linear(dy8_TD[token_of_row_N.long()], down8_EFD, bounds_E1).bfloat16()

    @classmethod
    def dup(cls, dh8_NI, gate_up8_EDI, bounds_E1):
        return cls._linear(dh8_NI, gate_up8_EDI, bounds_E1).bfloat16()
