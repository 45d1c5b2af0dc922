"""Epilogues of the FP8 products in QuACK's language: scalar functions of one accumulator, compiled into the GEMM.

Imported by kernels/fp8_gemm.py at first use only, because quack-kernels exists on CUDA hosts alone. Column vectors hold
one fp32 number per routed row.
"""

from quack.activation import dswiglu, swiglu
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.math import pack, unpack
from quack.epilogue.ops import ColVecLoad, ColVecReduce


@gemm_epilogue(outputs=("a",), ops={"row_scale": ColVecLoad("row_scale")}, mode="acc_pair")
def scaled_swiglu(acc, row_scale):
    """h = s acc in adjacent (gate, up) pairs, a = silu(g) u."""
    g, u = unpack(acc * row_scale)
    return {"D": pack(g, u), "a": swiglu(g, u)}


@gemm_epilogue(
    outputs=("aw",),
    ops={"row_scale": ColVecLoad("row_scale"), "weight": ColVecLoad("weight")},
    reduces={"dweight": ColVecReduce("dweight", scaled=True)},
    mode="packed_cd_b16x2",
)
def scaled_dswiglu(acc, c, row_scale, weight):
    """da = s acc; from the pre-activation c = (g, u): dh = w dswiglu(c, da), aw = w silu(g) u, dweight = sum da silu(g) u."""
    g, u = unpack(c)
    da = acc * row_scale
    dg, du, a = dswiglu(g, u, da * weight)
    return {"D": pack(dg, du), "aw": a * weight, "dweight": (a, da)}
