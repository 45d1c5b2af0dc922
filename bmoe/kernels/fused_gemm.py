"""The six grouped products of a SwiGLU expert MLP with gather and activation inside the GEMM (Hopper, bf16).

Shapes: T tokens, D width, F expert width, E experts, N routed rows sorted by expert; row r belongs to token
token_of_row[r] and, for bounds[e] <= r < bounds[e + 1], to expert e. I = 2F with gate and up INTERLEAVED: column 2f is
the gate, 2f + 1 the up projection, so that one tile holds both. Weights keep the canonical [gate; up] halves: the
kernels read and write them through a strided view.

Mathematics                                                             replaces
    up        h = x[token] gate_up^T,  a = silu(g) u                    a gather, a GEMM, an activation pass
    down      o = a down^T                                              a GEMM (the routing weight: in the combine)
    ddown     da = dy[token] down;  dh = w dswiglu(h, da),              a gather, a GEMM, a pass over h, da, dh, a
              aw = w silu(g) u,  dw = sum da silu(g) u
    wdown     d_down[e] = dy[token]^T aw                                a GEMM over a gathered copy
    wup       d_gate_up[e] = dh^T x[token]                              a gather, a GEMM
    dup       dx_rows = dh gate_up                                      a GEMM

FLOPs: 2 N D F for each of down, ddown, wdown and 4 N D F for up, wup, dup: 18 N D F. Bytes of the two fused epilogues:
6 N F out (h, a), and 4 N F in (h), 6 N F out (dh, aw), hidden behind the tensor cores as far as they go. No permuted
copy of x or dy exists in memory at any time.

Measured on an H200, T = 16,384, TFLOP/s at (D 2048 F 5632 8 experts, D 1280 F 3584 8 experts, D 1280 F 768 64 experts),
where an 8192^3 product reached 791: up 679, 632, 604; down 727, 741, 606; ddown 506, 401, 370; wdown 684, 648, 644;
wup 705, 669, 626; dup 679, 689, 676. ddown carries the largest epilogue and is the furthest from the tensor cores.

The kernels are QuACK's persistent warp-specialised grouped GEMMs (CuTe DSL; quack-kernels 0.6), each with the tile
measured best on an H200: ping-pong consumers for the row products, cooperative 128 x 256 for the weight gradients.
Compiling one takes about 2 s per process and is kept on disk by QuACK.
"""

import functools
import importlib.util
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional


def why_not(device: torch.device, dtype: torch.dtype, width: int, expert_width: int) -> str | None:
    """The reason why these kernels cannot run here, or None."""
    if device.type != "cuda":
        return "they need a GPU"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "they are tuned for Hopper (compute capability 9.0)"
    if dtype != torch.bfloat16:
        return f"they take bf16, not {str(dtype).removeprefix('torch.')}"
    if width % 8 or expert_width % 8:
        return f"width {width} and expert width {expert_width} are not both multiples of 8"
    if importlib.util.find_spec("quack") is None:
        return "the package quack-kernels is not installed (pip install 'bmoe[fused]')"
    return None


@functools.cache
def _quack() -> SimpleNamespace:
    """The library's interface and our tiles; imported at first use, because it takes seconds."""
    interface: ModuleType = importlib.import_module("quack.gemm_interface")
    config = importlib.import_module("quack.gemm_config").GemmConfig

    def tile(m: int, n: int, pingpong: bool):
        return config(tile_m=m, tile_n=n, pingpong=pingpong, cluster_m=2, cluster_n=1, is_dynamic_persistent=False)

    return SimpleNamespace(
        gated=interface.gemm_act,
        dgated=interface.gemm_dgated,
        plain=interface.gemm_tuned.fn,
        up=tile(128, 192, True),
        rows=lambda n: tile(128, 160, True) if n % 160 == 0 else tile(192, 128, True),
        ddown=tile(128, 128, True),
        weights=tile(128, 256, False),
    )


def up(x_TD: Tensor, gate_up_ECD: Tensor, token_of_row_N: Tensor, bounds_E1: Tensor) -> tuple[Tensor, Tensor]:
    """(h_NI interleaved, a_NF)."""
    quack = _quack()
    n, hidden = token_of_row_N.numel(), gate_up_ECD.shape[1]
    h_NI, a_NF = x_TD.new_empty(n, hidden), x_TD.new_empty(n, hidden // 2)
    quack.gated(
        x_TD, gate_up_ECD.transpose(1, 2), activation="swiglu", preact_out=h_NI, postact_out=a_NF,
        cu_seqlens_m=bounds_E1, A_idx=token_of_row_N, concat_layout=("B",), config=quack.up, tuned=False,
    )  # fmt: skip
    return h_NI, a_NF


def down(a_NF: Tensor, down_EDF: Tensor, bounds_E1: Tensor) -> Tensor:
    """o_ND, unweighted."""
    quack = _quack()
    o_ND = a_NF.new_empty(a_NF.shape[0], down_EDF.shape[1])
    quack.plain(a_NF, down_EDF.transpose(1, 2), o_ND, cu_seqlens_m=bounds_E1, config=quack.rows(o_ND.shape[1]))
    return o_ND


def ddown(
    dy_TD: Tensor, down_EDF: Tensor, h_NI: Tensor, token_of_row_N: Tensor, weight_of_row_N: Tensor, bounds_E1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dh_NI interleaved, aw_NF, dweight_of_row_N fp32)."""
    quack = _quack()
    dh_NI, aw_NF = torch.empty_like(h_NI), h_NI.new_empty(h_NI.shape[0], h_NI.shape[1] // 2)
    _, _, dweight_of_row_N = quack.dgated(
        dy_TD, down_EDF, h_NI, activation="swiglu", dx_out=dh_NI, postact_out=aw_NF, colvec_scale=weight_of_row_N,
        colvec_reduce=True, cu_seqlens_m=bounds_E1, A_idx=token_of_row_N, dynamic_scheduler=False,
        config=quack.ddown, tuned=False,
    )  # fmt: skip
    return dh_NI, aw_NF, dweight_of_row_N


def wdown(dy_TD: Tensor, aw_NF: Tensor, token_of_row_N: Tensor, bounds_E1: Tensor) -> Tensor:
    """d_down_EDF."""
    quack = _quack()
    ddown_EDF = dy_TD.new_empty(bounds_E1.numel() - 1, dy_TD.shape[1], aw_NF.shape[1])
    quack.plain(dy_TD.T, aw_NF, ddown_EDF, cu_seqlens_k=bounds_E1, A_idx=token_of_row_N, config=quack.weights)
    return ddown_EDF


def wup(dh_NI: Tensor, x_TD: Tensor, token_of_row_N: Tensor, bounds_E1: Tensor) -> Tensor:
    """d_gate_up_ECD in the canonical halves."""
    quack = _quack()
    dgate_up_ECD = x_TD.new_empty(bounds_E1.numel() - 1, dh_NI.shape[1], x_TD.shape[1])
    quack.plain(
        x_TD.T, dh_NI, dgate_up_ECD.transpose(1, 2), cu_seqlens_k=bounds_E1, A_idx=token_of_row_N,
        concat_layout=("out",), config=quack.weights,
    )  # fmt: skip
    return dgate_up_ECD


def dup(dh_NI: Tensor, gate_up_ECD: Tensor, bounds_E1: Tensor) -> Tensor:
    """dx_ND in row order."""
    quack = _quack()
    dx_ND = dh_NI.new_empty(dh_NI.shape[0], gate_up_ECD.shape[2])
    quack.plain(dh_NI, gate_up_ECD, dx_ND, cu_seqlens_m=bounds_E1, concat_layout=("B",), config=quack.rows(dx_ND.shape[1]))
    return dx_ND


def interleave(halves: Tensor) -> Tensor:
    """[..., 2F] of gate then up -> alternating gate, up."""
    gate, up_half = halves.chunk(2, dim=-1)
    return torch.stack([gate, up_half], dim=-1).flatten(-2)


def deinterleave(alternating: Tensor) -> Tensor:
    """The inverse of `interleave`."""
    return torch.cat([alternating[..., ::2], alternating[..., 1::2]], dim=-1)


def dswiglu_reference(h_NI: Tensor, da_NF: Tensor, weight_of_row_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The epilogue of `ddown` in plain torch: (dh_NI, aw_NF, dweight_of_row_N) of fp32 da_NF."""
    gate_NF, up_NF = h_NI[:, ::2].float(), h_NI[:, 1::2].float()
    sigmoid_NF, w_N1 = torch.sigmoid(gate_NF), weight_of_row_N[:, None]
    silu_NF = gate_NF * sigmoid_NF
    dgate_NF = w_N1 * da_NF * up_NF * (sigmoid_NF + silu_NF * (1 - sigmoid_NF))
    dh_NI = interleave(torch.cat([dgate_NF, w_N1 * da_NF * silu_NF], dim=-1)).to(h_NI.dtype)
    return dh_NI, (w_N1 * silu_NF * up_NF).to(h_NI.dtype), (da_NF * silu_NF * up_NF).sum(-1)


class Reference:
    """Plain-torch twins of the six products, by the same names."""

    @staticmethod
    def _by_expert(bounds_E1: Tensor):
        bounds = bounds_E1.tolist()
        return list(zip(bounds[:-1], bounds[1:], strict=True))

    @classmethod
    def _linear(cls, rows_NI: Tensor, weight_EIO: Tensor, bounds_E1: Tensor) -> Tensor:
        out_NO = rows_NI.new_zeros(rows_NI.shape[0], weight_EIO.shape[2])
        for expert, (a, b) in enumerate(cls._by_expert(bounds_E1)):
            out_NO[a:b] = rows_NI[a:b] @ weight_EIO[expert]
        return out_NO

    @classmethod
    def _outer(cls, left_NO: Tensor, right_NI: Tensor, bounds_E1: Tensor) -> Tensor:
        return torch.stack([left_NO[a:b].T @ right_NI[a:b] for a, b in cls._by_expert(bounds_E1)])

    @classmethod
    def up(cls, x_TD, gate_up_ECD, token_of_row_N, bounds_E1):
        halves_NC = cls._linear(x_TD[token_of_row_N.long()], gate_up_ECD.transpose(1, 2), bounds_E1)
        gate_NF, up_NF = halves_NC.float().chunk(2, dim=-1)
        return interleave(halves_NC), (functional.silu(gate_NF) * up_NF).to(x_TD.dtype)

    @classmethod
    def down(cls, a_NF, down_EDF, bounds_E1):
        return cls._linear(a_NF, down_EDF.transpose(1, 2), bounds_E1)

    @classmethod
    def ddown(cls, dy_TD, down_EDF, h_NI, token_of_row_N, weight_of_row_N, bounds_E1):
        da_NF = cls._linear(dy_TD[token_of_row_N.long()], down_EDF, bounds_E1).float()
        return dswiglu_reference(h_NI, da_NF, weight_of_row_N)

    @classmethod
    def wdown(cls, dy_TD, aw_NF, token_of_row_N, bounds_E1):
        return cls._outer(dy_TD[token_of_row_N.long()], aw_NF, bounds_E1)

    @classmethod
    def wup(cls, dh_NI, x_TD, token_of_row_N, bounds_E1):
        return cls._outer(deinterleave(dh_NI), x_TD[token_of_row_N.long()], bounds_E1)

    @classmethod
    def dup(cls, dh_NI, gate_up_ECD, bounds_E1):
        return cls._linear(deinterleave(dh_NI), gate_up_ECD, bounds_E1)
