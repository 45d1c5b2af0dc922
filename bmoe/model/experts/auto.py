"""Which expert implementation `auto` means on a device, and why: a pure function of what is known, and a measured table.

The table holds fractions of the bf16 peak (an 8192^3 product of the same run) of one layer's forward + backward pass
on one H200, torch 2.11, triton 3.6, quack-kernels 0.6.5, 2026-12-01; docs/kernels.md has the runs.
"""

import math
from dataclasses import dataclass

import torch

from bmoe.kernels import fused_gemm
from bmoe.precision.te import KINDS as TE_PRECISIONS


@dataclass(frozen=True)
class Measured:
    """One shape of the table: fractions of the peak."""

    width: int
    expert_width: int
    experts: int
    top_k: int
    fused: float
    hugging_face: float

    def __str__(self) -> str:
        shape = f"H{self.width} F{self.expert_width} {self.experts} experts k{self.top_k}"
        return f"{shape}: {self.fused:.2f} of the bf16 peak, compiled grouped_mm of transformers {self.hugging_face:.2f}"


TABLE = (
    Measured(2048, 5632, 8, 2, 0.88, 0.72),
    Measured(1280, 3584, 8, 2, 0.83, 0.65),
    Measured(1280, 768, 64, 8, 0.69, 0.47),
)


def nearest(width: int, expert_width: int, experts: int) -> Measured:
    """The measured shape that is nearest in the logarithms of width, expert width and experts."""

    def distance(row: Measured) -> float:
        pairs = ((row.width, width), (row.expert_width, expert_width), (row.experts, experts))
        return sum(math.log(a / b) ** 2 for a, b in pairs)

    return min(TABLE, key=distance)


def choose(
    device: torch.device,
    precision: str,
    width: int,
    expert_width: int,
    experts: int,
    ffn: str = "swiglu",
    bias: bool = False,
    emulate: bool = False,
) -> tuple[str, str]:
    """(kind for `build_experts`, the reason in one line) for a model layer on `device` in `precision`."""
    if device.type != "cuda":
        return "grouped", "no GPU: rows sorted once, one product per expert"
    if emulate:
        return "grouped", f"{precision} is emulated, which loop and grouped can"
    if ffn != "swiglu" or bias:
        return "grouped", "the fused kernels compute swiglu without biases only"
    if precision in TE_PRECISIONS:
        return "te", f"{precision} runs in Transformer Engine"
    if precision == "fp8_row":
        return "triton", "fp8_row runs in the fused kernels and nowhere else"
    if precision == "fp32":
        return "grouped", "fp32: the fused kernels are for bf16"
    capability = torch.cuda.get_device_capability(device)
    if capability < (9, 0):
        return "grouped", f"compute capability {capability[0]}.{capability[1]}: the kernels are for Hopper and later"
    reason = fused_gemm.why_not(device, torch.bfloat16, width, expert_width)
    if reason is None:
        return (
            "triton",
            f"gather and activation inside the GEMMs; nearest measured shape {nearest(width, expert_width, experts)}",
        )
    return "triton", f"torch's grouped GEMM with one pass per memory-bound stage; fused GEMMs cannot run: {reason}"
