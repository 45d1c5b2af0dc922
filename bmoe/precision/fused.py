"""Triton: one pass over a tensor makes its quantised-and-dequantised copies for both directions of a GEMM.

The plain-torch twins are `mxfp8.quantize_dequantize` and `block.quantize_dequantize`; results are equal bit for bit.
Everything is done with integer operations on float32 bits, additions and multiplications by powers of two, so nothing
depends on how a compiler divides or converts to float8.

Shapes: M rows, K columns. `ends` (int32 [G], the last one M) are the ends of groups of rows: blocks along columns
start anew in every group, as each expert's rows are a tensor of their own.
"""

import torch
import triton
import triton.language as tl

TILE_COLUMNS = 128
MX, BLOCK = "mxfp8", "fp8_block"
SIZES = {MX: 32, BLOCK: 128}


@triton.jit
def _scale_bits(amax_bits, IS_MX: tl.constexpr):
    """Bits of (factor before rounding, factor after it), both powers of two, for the bits of block maxima."""
    if IS_MX:
        v = amax_bits.to(tl.float32, bitcast=True) * 0.002232142857142857
        bits = v.to(tl.int32, bitcast=True)
        e = bits >> 23
        m = bits & 0x7FFFFF
        up = (m > 0) & (e != 0xFE) & ~((e == 0) & (m <= 0x400000))
        e = tl.where(bits >= 0x7F800000, 0xFE, e + up.to(tl.int32))
        before = tl.where(e == 254, 0x400000, (254 - e) << 23)
        after = tl.where(e == 0, 0x400000, e << 23)
    else:
        # 448 = 1.75 x 2^8, so the power below 448 / amax has exponent 8 - exponent(amax), less 1 if its fraction > 1.75
        e = 262 - (amax_bits >> 23) - ((amax_bits & 0x7FFFFF) > 0x600000).to(tl.int32)
        e = tl.minimum(e, 254)
        e = tl.where((amax_bits == 0) | (amax_bits >= 0x7F800000), 127, e)
        before = e << 23
        after = tl.where(e == 254, 0x400000, (254 - e) << 23)
    return before, after


@triton.jit
def _round(x, amax_bits, IS_MX: tl.constexpr):
    """float32 values of `x` rounded to E4M3 under the scale of `amax_bits` (broadcastable)."""
    before, after = _scale_bits(amax_bits, IS_MX)
    v = x * before.to(tl.float32, bitcast=True)
    v = tl.where(v > 448.0, 448.0, v)  # a NaN passes both comparisons
    v = tl.where(v < -448.0, -448.0, v)
    exponent = tl.maximum(v.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
    anchor = ((exponent + (20 << 23)) | 0x400000).to(tl.float32, bitcast=True)
    return ((v + anchor) - anchor) * after.to(tl.float32, bitcast=True)


@triton.jit
def _copies_kernel(
    x_ptr, rows_ptr, columns_ptr, ends_ptr, M, K, groups,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
    IS_MX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """Program (i, j): block i of SIZE rows, counted through the groups, and columns j * WIDTH onwards."""
    block = tl.program_id(0)
    if GROUPS == 0:
        first = block * SIZE
        stop = M
    else:
        g = tl.arange(0, GROUPS)
        end = tl.load(ends_ptr + g, mask=g < groups, other=0)
        start = tl.load(ends_ptr + g - 1, mask=(g > 0) & (g < groups), other=0)
        blocks = (end - start + SIZE - 1) // SIZE
        after = tl.cumsum(blocks, 0)
        mine = (block >= after - blocks) & (block < after)
        first = tl.sum(tl.where(mine, start + (block - (after - blocks)) * SIZE, 0), 0)
        stop = tl.sum(tl.where(mine, end, 0), 0)  # 0 if the block is beyond the last group: nothing to do
    r = first + tl.arange(0, SIZE)
    c = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    at = r[:, None].to(tl.int64) * K + c[None, :]
    inside = (r < stop)[:, None] & (c < K)[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bits = tl.where(bits > 0x7F800000, 0, bits)  # NaN does not count
    if SQUARES:
        amax = tl.max(tl.max(bits, 1), 0)
        tl.store(rows_ptr + at, _round(x, amax, IS_MX).to(rows_ptr.dtype.element_ty), mask=inside)
    if ROWS:
        cut = tl.reshape(bits, (SIZE, WIDTH // SIZE, SIZE))
        amax = tl.max(cut, 2)
        y = _round(tl.reshape(x, (SIZE, WIDTH // SIZE, SIZE)), amax[:, :, None], IS_MX)
        tl.store(rows_ptr + at, tl.reshape(y, (SIZE, WIDTH)).to(rows_ptr.dtype.element_ty), mask=inside)
    if COLUMNS:
        amax = tl.max(bits, 0)
        tl.store(columns_ptr + at, _round(x, amax[None, :], IS_MX).to(columns_ptr.dtype.element_ty), mask=inside)


@torch.library.custom_op("bmoe::quantized_copies", mutates_args=())
def _copies(
    x_MK: torch.Tensor, ends_G: torch.Tensor, kind: str, rows: bool, columns: bool, squares: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    x_MK, size = x_MK.contiguous(), SIZES[kind]
    M, K = x_MK.shape
    none = x_MK.new_empty(0)
    along = torch.empty_like(x_MK) if rows or squares else none
    down = torch.empty_like(x_MK) if columns else none
    groups = ends_G.numel()
    if M and K:
        grid = (-(-M // size) + groups, -(-K // TILE_COLUMNS))  # Triton's own functions take microseconds, on every call
        _copies_kernel[grid](
            x_MK, along, down, ends_G, M, K, groups,
            SIZE=size, WIDTH=TILE_COLUMNS, GROUPS=1 << (groups - 1).bit_length() if groups else 0,
            IS_MX=kind == MX, ROWS=rows, COLUMNS=columns, SQUARES=squares, num_warps=4 if size == 32 else 8,
        )  # fmt: skip
    return along, down


@_copies.register_fake
def _(x_MK, ends_G, kind, rows, columns, squares):
    none = x_MK.new_empty(0)
    full = torch.empty_like(x_MK, memory_format=torch.contiguous_format)
    return (full if rows or squares else none), (torch.empty_like(full) if columns else none)


def copies(
    x_MK: torch.Tensor, kind: str, ends_G: torch.Tensor | None = None, rows: bool = True, columns: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """(copy with blocks along the rows, copy with blocks down the columns of each group) in x's dtype.

    `kind`: "mxfp8" (blocks of 32) or "fp8_block" (128). A copy that is not asked for is an empty tensor.
    """
    ends_G = x_MK.new_empty(0, dtype=torch.int32) if ends_G is None else ends_G
    return _copies(x_MK, ends_G, kind, rows, columns, False)


def squares(x_MK: torch.Tensor, ends_G: torch.Tensor | None = None) -> torch.Tensor:
    """Copy of weights with one block-FP8 scale for each 128 x 128 square; squares, too, start anew in every group of rows."""
    ends_G = x_MK.new_empty(0, dtype=torch.int32) if ends_G is None else ends_G
    return _copies(x_MK, ends_G, BLOCK, False, False, True)[0]
