"""Epilogue of the first FP8 product in QuACK's language: a function of one accumulator, compiled into the GEMM.

Imported by kernels/fp8_gemm.py at first use only, because quack-kernels exists on CUDA hosts alone. Column vectors hold
one fp32 number per routed row.
"""

from quack.activation import swiglu
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.math import pack, unpack
from quack.epilogue.ops import ColVecLoad


@gemm_epilogue(outputs=("a",), ops={"row_scale": ColVecLoad("row_scale")}, mode="acc_pair")
def scaled_swiglu(acc, row_scale):
    """h = s acc in adjacent (gate, up) pairs, a = silu(g) u."""
    g, u = unpack(acc * row_scale)
    return {"D": pack(g, u), "a": swiglu(g, u)}
