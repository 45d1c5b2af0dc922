"""Expert implementations behind one contract; `loop` is the definition, every other is tested against it."""

import importlib.util

from torch import nn

from bmoe.errors import RequestError
from bmoe.model.experts.grouped import GroupedExperts
from bmoe.model.experts.loop import LoopExperts

KINDS = ("loop", "grouped", "te", "triton")


def build_experts(
    kind: str,
    experts: int,
    width: int,
    expert_width: int,
    ffn: str = "swiglu",
    bias: bool = False,
    precision: str = "bf16",
) -> nn.Module:
    """Module with `forward(x_TD, experts_TK int64, weights_TK fp32) -> y_TD`, see `weights.Experts` for the contract.

    `precision` is the format of the GEMM inputs; `te` and `triton` read it, the others compute in the input's dtype.
    Raises RequestError for a kind that does not exist or does not know this ffn or bias.
    """
    if kind == "loop":
        return LoopExperts(experts, width, expert_width, ffn, bias)
    if kind == "grouped":
        return GroupedExperts(experts, width, expert_width, ffn, bias)
    if kind == "te":
        from bmoe.model.experts.te import TeExperts

        return TeExperts(experts, width, expert_width, ffn, bias, precision)
    if kind == "triton":
        if importlib.util.find_spec("triton") is None:
            raise RequestError("backend.experts triton needs the package triton, which is not installed; choose grouped.")
        if precision == "fp8_row":
            from bmoe.model.experts.fp8 import Fp8Experts

            return Fp8Experts(experts, width, expert_width, ffn, bias)
        from bmoe.model.experts.triton import TritonExperts

        return TritonExperts(experts, width, expert_width, ffn, bias)
    raise RequestError(f"backend.experts is {kind!r}; choose one of {', '.join(KINDS)}.")
