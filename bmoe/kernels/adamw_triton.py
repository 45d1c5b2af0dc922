"""The AdamW step of kernels/adamw.py over all parameters at once: mathematics, layout and bytes are explained there.

A model has a hundred parameters, most of them small; a launch for each, and a reduction for each norm, would cost more in
gaps than in work. Here a table on the device holds the ADDRESSES of every parameter's tensors, and a list of chunks says
which part of which parameter a program works on, so that one launch serves all parameters of the same dtypes:

    squares   sum of g^2 of each program's chunks, one partial sum per program    reads the gradients: 2 or 4 bytes a weight
    total     the partial sums in a fixed order                                   two numbers: sharded and whole parameters
    scalars   norm -> clipping, bias corrections, keep, counters                  one program
    adamw     the update; accumulated gradients are cleared in the same pass      bytes: see kernels/adamw.py

No atomics: the same bits on every run. Moments are rounded as torch rounds them (no contraction to fma) and equal the plain
twin's bit for bit; weights differ from it in the last bits of the update, whose division and root are the fast ones.

The addresses of gradients change from step to step unless a CUDA graph holds them. `locate` compares them with the table and
sends a new one from pinned memory, in the background, only if any moved. A recording reads whatever the table holds when it is
replayed, so who replays it sends the addresses of its time again if a step outside of it has changed them.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bmoe.kernels.adamw import Tensors
from bmoe.kernels.sizes import next_power_of_2

BLOCK = 4096
"""Elements of a tile of the sum of squares."""

TILE, REST = 2048, 256
"""Elements of a tile of the update (64 registers a thread), and of one of what is left or not aligned."""

CHUNK = 16384
"""Elements that one program updates: some tiles, so that looking up addresses costs little."""

PROGRAMS = 1056
"""Of the sum of squares: eight for each multiprocessor of an H100 or H200. A constant, as the order of the sum depends on it."""

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@triton.jit
def _at(address, offset, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers to elements of the tensor at an address; ALIGNED promises 16 bytes, which makes accesses that wide."""
    pointers = address.to(tl.pointer_type(DTYPE)) + offset
    if ALIGNED:
        pointers = tl.multiple_of(pointers, 16)
    return pointers


@triton.jit
def _squared(g):
    wide = g.to(tl.float32)
    return wide * wide


@triton.jit
def _adamw_squares_kernel(
    table_P5, chunks_C3, partials, chunks, programs, GRADIENT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for chunk in range(tl.program_id(0), chunks, programs):
        row = tl.load(chunks_C3 + chunk * 3)
        start = tl.load(chunks_C3 + chunk * 3 + 1)
        length = tl.load(chunks_C3 + chunk * 3 + 2)
        address = tl.load(table_P5 + row * 5 + 2)
        if ((address & 15) == 0) & (length == CHUNK):
            for tile in tl.static_range(0, CHUNK, BLOCK):
                total += _squared(tl.load(_at(address, start + tile + lane, GRADIENT, True)))
        else:
            for first in range(0, length, BLOCK):
                at = _at(address, start + first + lane, GRADIENT, False)
                total += _squared(tl.load(at, mask=first + lane < length, other=0.0))
    tl.store(partials + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def _adamw_total_kernel(partials_GP, squares_2, groups, sharded, programs, PROGRAMS_P2: tl.constexpr):
    lane = tl.arange(0, PROGRAMS_P2)
    of_sharded = tl.zeros([PROGRAMS_P2], tl.float32)
    of_whole = tl.zeros([PROGRAMS_P2], tl.float32)
    for group in range(groups):
        part = tl.load(partials_GP + group * programs + lane, mask=lane < programs, other=0.0)
        if group < sharded:
            of_sharded += part
        else:
            of_whole += part
    tl.store(squares_2, tl.sum(of_sharded, axis=0))
    tl.store(squares_2 + 1, tl.sum(of_whole, axis=0))


@triton.jit
def _adamw_scalars_kernel(
    norm_p, rate_p, attempted_p, skipped_p, in_a_row_p, scalars_5, clip, CLIPS: tl.constexpr, LOG_B1: tl.constexpr, LOG_B2: tl.constexpr
):
    norm = tl.load(norm_p)
    keep = tl.abs(norm) < float("inf")
    attempted = tl.load(attempted_p) + 1
    skipped = tl.load(skipped_p) + tl.where(keep, 0, 1)
    tl.store(attempted_p, attempted)
    tl.store(skipped_p, skipped)
    tl.store(in_a_row_p, tl.where(keep, 0, tl.load(in_a_row_p) + 1))
    taken = tl.maximum(attempted - skipped, 1).to(tl.float64)
    if CLIPS:
        scale = tl.minimum(tl.div_rn(1.0, tl.maximum(norm, 1e-30)) * clip, 1.0)
    else:
        scale = tl.full([], 1.0, tl.float32)
    tl.store(scalars_5, scale)
    tl.store(scalars_5 + 1, tl.load(rate_p).to(tl.float32))
    tl.store(scalars_5 + 2, (1.0 - tl.exp(taken * LOG_B1)).to(tl.float32))
    tl.store(scalars_5 + 3, tl.sqrt(1.0 - tl.exp(taken * LOG_B2)).to(tl.float32))
    tl.store(scalars_5 + 4, tl.where(keep, 1.0, 0.0))


@triton.jit
def _update_tile(
    weight_a,
    low_a,
    gradient_a,
    m_a,
    v_a,
    at,
    inside,
    scalars_5,
    b1,
    rest1,
    b2,
    rest2,
    eps,
    decay,
    SPLIT: tl.constexpr,
    GRADIENT: tl.constexpr,
    MOMENT: tl.constexpr,
    CLEAR: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    gradient_p = _at(gradient_a, at, GRADIENT, ALIGNED)
    if tl.load(scalars_5 + 4) > 0:
        scale = tl.load(scalars_5)
        lr = tl.load(scalars_5 + 1)
        correction1 = tl.load(scalars_5 + 2)
        root_correction2 = tl.load(scalars_5 + 3)
        m_p = _at(m_a, at, MOMENT, ALIGNED)
        v_p = _at(v_a, at, MOMENT, ALIGNED)
        g = tl.load(gradient_p, mask=inside).to(tl.float32) * scale
        m = tl.load(m_p, mask=inside).to(tl.float32) * b1 + g * rest1
        v = tl.load(v_p, mask=inside).to(tl.float32) * b2 + g * g * rest2
        if SPLIT:
            weight_p = _at(weight_a, at, tl.int16, ALIGNED)
            low_p = _at(low_a, at, tl.int16, ALIGNED)
            low = tl.load(low_p, mask=inside).to(tl.int32) & 0xFFFF
            high = tl.load(weight_p, mask=inside).to(tl.int32)
            master = (((high - (low >> 15)) << 16) | low).to(tl.float32, bitcast=True)
        else:
            weight_p = _at(weight_a, at, tl.float32, ALIGNED)
            master = tl.load(weight_p, mask=inside)
        update = (m / correction1) / (tl.sqrt(v) / root_correction2 + eps)
        master = master * (1.0 - lr * decay) - lr * update
        tl.store(m_p, m.to(MOMENT), mask=inside)
        tl.store(v_p, v.to(MOMENT), mask=inside)
        if SPLIT:
            bits = master.to(tl.int32, bitcast=True)
            tl.store(low_p, bits.to(tl.int16), mask=inside)
            tl.store(weight_p, ((bits + 0x8000) >> 16).to(tl.int16), mask=inside)
        else:
            tl.store(weight_p, master, mask=inside)
    if CLEAR:
        tl.debug_barrier()  # another thread than the one that read an element may clear it
        tl.store(gradient_p, tl.zeros_like(at).to(GRADIENT), mask=inside)


@triton.jit
def _adamw_kernel(
    table_P5,
    chunks_C3,
    decay_P,
    scalars_5,
    b1,
    rest1,
    b2,
    rest2,
    eps,
    SPLIT: tl.constexpr,
    GRADIENT: tl.constexpr,
    MOMENT: tl.constexpr,
    CLEAR: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    chunk = chunks_C3 + tl.program_id(0) * 3
    row = tl.load(chunk)
    start = tl.load(chunk + 1)
    length = tl.load(chunk + 2)
    weight = tl.load(table_P5 + row * 5)
    low = tl.load(table_P5 + row * 5 + 1)
    gradient = tl.load(table_P5 + row * 5 + 2)
    m = tl.load(table_P5 + row * 5 + 3)
    v = tl.load(table_P5 + row * 5 + 4)
    decay = tl.load(decay_P + row)
    aligned = ((weight | low | gradient | m | v) & 15) == 0
    wide = tl.arange(0, BLOCK)
    whole = tl.where(aligned, length // BLOCK * BLOCK, 0)
    for first in range(0, whole, BLOCK):
        _update_tile(
            weight, low, gradient, m, v, start + first + wide, None, scalars_5, b1, rest1, b2, rest2, eps, decay,
            SPLIT, GRADIENT, MOMENT, CLEAR, True,
        )  # fmt: skip
    # What is left is little, and goes by small tiles: addresses of single elements would take registers from the tiles above.
    narrow = tl.arange(0, REST)
    for first in range(whole, length, REST):
        _update_tile(
            weight, low, gradient, m, v, start + first + narrow, first + narrow < length, scalars_5, b1, rest1, b2, rest2, eps, decay,
            SPLIT, GRADIENT, MOMENT, CLEAR, False,
        )  # fmt: skip


class _Group(NamedTuple):
    """Parameters of one launch: chunks_C3 int64 holds (row of the table, first element, elements)."""

    split: bool
    gradient: torch.dtype
    moment: torch.dtype
    chunks_C3: Tensor


class Fused:
    """AdamW over a fixed list of parameters whose gradients may move.

    Args:
        parameters: their tensors. The gradients given here tell the dtypes only.
        decays: weight decay of each. sharded: whether each holds one rank's part of a parameter.
        clear: whether a step leaves zeros in the gradients.
    """

    def __init__(self, parameters: list[Tensors], decays: list[float], sharded: list[bool], clear: bool):
        self.clear = clear
        self.device = parameters[0].weight.device
        self.decay_P = torch.tensor(decays, dtype=torch.float32, device=self.device)
        self.kinds = [(not s, p.low is not None, p.gradient.dtype, p.m.dtype) for p, s in zip(parameters, sharded, strict=True)]
        rows: dict[tuple, list[int]] = {}
        for row, kind in enumerate(self.kinds):
            rows.setdefault(kind, []).append(row)
        kinds = sorted(rows, key=str)
        kinds.sort(key=lambda kind: kind[0])  # the sharded first
        self.sharded_groups = sum(not kind[0] for kind in kinds)
        sizes = [p.weight.numel() for p in parameters]
        self.groups = [_Group(*kind[1:], _chunks(rows[kind], sizes).to(self.device)) for kind in kinds]
        self.partials_GP = torch.zeros(len(kinds), PROGRAMS, dtype=torch.float32, device=self.device)
        self.table_P5 = torch.zeros(len(parameters), 5, dtype=torch.int64, device=self.device)
        self.addresses: list[list[int]] = []

    def locate(self, parameters: list[Tensors]) -> None:
        """Note where the tensors are; what `squares` and `step` use until the next call. The host does not wait."""
        for p, kind in zip(parameters, self.kinds, strict=True):
            if (p.low is not None, p.gradient.dtype, p.m.dtype) != kind[1:]:
                raise ValueError(f"a gradient of {p.gradient.dtype} where {kind[2]} was announced")
            if not all(tensor is None or tensor.is_contiguous() for tensor in p):
                raise ValueError("the fused AdamW takes contiguous tensors")
        addresses = [[0 if tensor is None else tensor.data_ptr() for tensor in p] for p in parameters]
        if addresses != self.addresses:
            self.send(addresses)

    def send(self, addresses: list[list[int]]) -> None:
        """Work at these addresses until the next call, as `addresses` held them before."""
        self.addresses = addresses
        table_P5 = torch.tensor(addresses, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self.table_P5.copy_(table_P5, non_blocking=True)  # torch keeps pinned memory until such a copy has read it

    def squares(self) -> Tensor:
        """fp32 [2]: the sum of squares of the gradients of sharded and of whole parameters."""
        squares_2 = torch.empty(2, dtype=torch.float32, device=self.device)
        for group, partials_P in zip(self.groups, self.partials_GP, strict=True):
            _adamw_squares_kernel[(PROGRAMS,)](
                self.table_P5, group.chunks_C3, partials_P, group.chunks_C3.shape[0], PROGRAMS,
                _TYPES[group.gradient], BLOCK, CHUNK, num_warps=8,
            )  # fmt: skip
        _adamw_total_kernel[(1,)](
            self.partials_GP, squares_2, len(self.groups), self.sharded_groups, PROGRAMS, next_power_of_2(PROGRAMS), num_warps=4
        )
        return squares_2

    def scalars(
        self,
        norm: Tensor,
        rate: Tensor,
        attempted: Tensor,
        skipped: Tensor,
        skipped_in_a_row: Tensor,
        clip: float | None,
        b1: float,
        b2: float,
    ) -> Tensor:
        """`step_scalars` of kernels/adamw.py in one launch, for an fp32 norm; fp32 [5]."""
        scalars_5 = torch.empty(5, dtype=torch.float32, device=self.device)
        logs = (math.log(b) if b > 0 else -math.inf for b in (b1, b2))
        _adamw_scalars_kernel[(1,)](
            norm, rate, attempted, skipped, skipped_in_a_row, scalars_5, clip or 0.0, clip is not None, *logs, num_warps=1
        )
        return scalars_5

    def step(self, scalars_5: Tensor, b1: float, b2: float, eps: float) -> None:
        """One step in place; scalars fp32."""
        for group in self.groups:
            if group.chunks_C3.shape[0] == 0:
                continue
            _adamw_kernel[(group.chunks_C3.shape[0],)](
                self.table_P5, group.chunks_C3, self.decay_P, scalars_5, b1, 1.0 - b1, b2, 1.0 - b2, eps,
                group.split, _TYPES[group.gradient], _TYPES[group.moment], self.clear, TILE, REST,
                num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip


def _chunks(rows: list[int], sizes: list[int]) -> Tensor:
    """int64 [C, 3]: (row, first element, elements) of each chunk of the parameters in these rows."""
    parts = [torch.empty(0, 3, dtype=torch.int64)]
    for row in rows:
        start = torch.arange(0, sizes[row], CHUNK)
        parts.append(torch.stack([torch.full_like(start, row), start, (sizes[row] - start).clamp(max=CHUNK)], dim=1))
    return torch.cat(parts)
