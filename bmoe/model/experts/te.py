"""Experts by Transformer Engine: `te.ops.Sequential(GroupedLinear, ScaledSwiGLU, GroupedLinear)`, as its authors publish it.

Shapes: T tokens, D width, F expert width, E experts, K top-k, N = T x K slots, R rows of the padded layout.

Rows are sorted by expert with every expert's block padded to a multiple (`conditions.ROW_MULTIPLE`). R depends on N, E and
the multiple only, and the blocks' sizes stay on the device, so nothing here waits for it. Padding rows are zero rows with
routing weight zero; the last expert's block takes those left over. Transformer Engine's own permute is not used: its routing
map cannot say "no expert", and its padded variant synchronises twice.

Whether Transformer Engine then reads the sizes on the host depends on the GPU, the precision and cuBLASLt:
`TeExperts.host_syncs`.

Weights are the canonical `gate_up` and `down`: the operators hold views of them, and the autograd Function below hands
their gradients back as two tensors. MXFP8's fused kernel wants gate and up rows of the first matrix interleaved in
blocks of 32, so there a copy is made, and its gradient is brought back to halves.

Sources: Transformer Engine 2.20 (ops/basic/grouped_linear.py, ops/fused/grouped_mlp.py).
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from bmoe.errors import RequestError, RunError
from bmoe.model.experts.grouped import sort_by_expert
from bmoe.model.experts.weights import Experts
from bmoe.precision.conditions import ROW_MULTIPLE, unmet
from bmoe.precision.machine import probe
from bmoe.precision.te import autocast, te_recipe
from bmoe.recipe import ModelSection, MoESection

GLU_BLOCK = 32
"""Rows of one gate (or up) block in the interleaved first matrix of the fused MXFP8 kernel."""

FUSED_OPERATOR = "GroupedMLP_CuTeGEMMGLU"


class PaddedLayout(NamedTuple):
    """Where each slot's row lies, the size of each expert's block, and their number of rows together."""

    row_of_slot_N: Tensor  # int32, -1 for "no expert"
    splits_E: Tensor  # int64, on the device, each a multiple; their sum is `rows`
    rows: int


def padded_layout(experts_TK: Tensor, experts: int, multiple: int) -> PaddedLayout:
    """Blocks of rows sorted by expert, each padded to `multiple`; shapes depend on N, E and `multiple` only."""
    ids_N, order_N, _, ends_E = sort_by_expert(experts_TK, experts)
    n = ids_N.numel()
    rows = -(-(n + experts * (multiple - 1)) // multiple) * multiple
    ends_E = ends_E.long()
    starts_E = torch.cat([ends_E.new_zeros(1), ends_E[:-1]])
    padded_E = (ends_E - starts_E + multiple - 1) // multiple * multiple
    shift_E = padded_E.cumsum(0) - padded_E - starts_E
    shift_N = shift_E[ids_N.clamp(max=experts - 1)]
    place_N = torch.where(ids_N < experts, torch.arange(n, device=ids_N.device) + shift_N, -1)
    row_of_slot_N = torch.empty_like(place_N).scatter_(0, order_N, place_N).int()
    rest = rows - padded_E.sum()
    splits_E = torch.cat([padded_E[:-1], (padded_E[-1] + rest)[None]])
    return PaddedLayout(row_of_slot_N, splits_E, rows)


def interleave_glu(halves_CD: Tensor) -> Tensor:
    """[..., 2F, D] of gate rows then up rows -> blocks of 32 gate rows, 32 up rows, and so on. F a multiple of 32."""
    *lead, rows, width = halves_CD.shape
    blocks = halves_CD.reshape(*lead, 2, rows // (2 * GLU_BLOCK), GLU_BLOCK, width)
    return blocks.transpose(-4, -3).reshape(halves_CD.shape)


def deinterleave_glu(blocks_CD: Tensor) -> Tensor:
    """The inverse of `interleave_glu`."""
    *lead, rows, width = blocks_CD.shape
    blocks = blocks_CD.reshape(*lead, rows // (2 * GLU_BLOCK), 2, GLU_BLOCK, width)
    return blocks.transpose(-4, -3).reshape(blocks_CD.shape)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD: Tensor, row_of_slot_N: Tensor, k: int, rows: int) -> Tensor:
        from bmoe.kernels.rows import spread

        ctx.save_for_backward(row_of_slot_N)
        ctx.k = k
        return spread(x_TD, row_of_slot_N, k, rows)

    @staticmethod
    def backward(ctx, dx_RD: Tensor):
        from bmoe.kernels.rows import combine

        return combine(dx_RD.contiguous(), *ctx.saved_tensors, ctx.k), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_RD: Tensor, row_of_slot_N: Tensor, k: int) -> Tensor:
        from bmoe.kernels.rows import combine

        ctx.save_for_backward(row_of_slot_N)
        ctx.k, ctx.rows = k, y_RD.shape[0]
        return combine(y_RD.contiguous(), row_of_slot_N, k)

    @staticmethod
    def backward(ctx, dy_TD: Tensor):
        from bmoe.kernels.rows import spread

        return spread(dy_TD, *ctx.saved_tensors, ctx.k, ctx.rows), None, None


class _Operators:
    """Transformer Engine's three operators over views of our weights. No module of ours: it owns no parameter."""

    def __init__(self, experts: int, width: int, expert_width: int, interleaved: bool, device, dtype):
        import transformer_engine.pytorch as te

        linear = dict(bias=False, device=device, dtype=dtype)
        self.experts, self.interleaved = experts, interleaved
        self.up = te.ops.GroupedLinear(experts, width, 2 * expert_width, **linear)
        self.down = te.ops.GroupedLinear(experts, expert_width, width, **linear)
        activation = te.ops.ScaledSwiGLU(glu_interleave_size=GLU_BLOCK if interleaved else None)
        self.sequence = te.ops.Sequential(self.up, activation, self.down)

    def weights(self) -> list[nn.Parameter]:
        """The 2 E matrices of the operators: the first E of `up`, then those of `down`."""
        return [getattr(op, f"weight{e}") for op in (self.up, self.down) for e in range(self.experts)]

    def bind(self, gate_up_ECD: Tensor, down_EDF: Tensor) -> None:
        """Let the operators' weights be our weights: views, or an interleaved copy of the first."""
        first = interleave_glu(gate_up_ECD) if self.interleaved else gate_up_ECD
        for weight, ours in zip(self.weights(), [*first.unbind(), *down_EDF.unbind()], strict=True):
            weight.data = ours

    def __call__(self, x_RD: Tensor, weight_R: Tensor, splits_E: Tensor, precision: str) -> Tensor:
        with autocast(precision):
            y_RD = self.sequence(x_RD, splits_E, weight_R, splits_E)
        if self.interleaved:
            ran = type(self.sequence._module_groups[0]._forward_ops[0][0]).__name__
            if ran != FUSED_OPERATOR:
                raise RunError(f"Transformer Engine ran {ran} instead of the fused MXFP8 grouped MLP {FUSED_OPERATOR}.")
        return y_RD


class _Run(torch.autograd.Function):
    """The operators as one function of x, routing weights and our two weight tensors."""

    @staticmethod
    def forward(ctx, x_RD, weight_R, gate_up_ECD, down_EDF, splits_E, operators, precision):
        operators.bind(gate_up_ECD.detach(), down_EDF.detach())
        if not any(ctx.needs_input_grad):
            return operators(x_RD, weight_R, splits_E, precision)
        with torch.enable_grad():
            inputs = x_RD.detach().requires_grad_(), weight_R.detach().requires_grad_()
            y_RD = operators(*inputs, splits_E, precision)
        ctx.operators, ctx.inputs, ctx.y_RD = operators, inputs, y_RD
        return y_RD.detach()

    @staticmethod
    def backward(ctx, dy_RD):
        operators = ctx.operators
        wanted = [*ctx.inputs, *operators.weights()]
        grads = torch.autograd.grad(ctx.y_RD, wanted, dy_RD.contiguous(), allow_unused=True)
        dx_RD, dweight_R, *dweights = [
            torch.zeros_like(tensor) if grad is None else grad for tensor, grad in zip(wanted, grads, strict=True)
        ]
        dgate_up_ECD = torch.stack(dweights[: operators.experts])
        if operators.interleaved:
            dgate_up_ECD = deinterleave_glu(dgate_up_ECD)
        ctx.operators = ctx.inputs = ctx.y_RD = None
        return dx_RD, dweight_R, dgate_up_ECD, torch.stack(dweights[operators.experts :]), None, None, None


class TeExperts(Experts):
    """SwiGLU experts without biases in `precision`: bf16, fp8_current, fp8_block, fp8_delayed or mxfp8."""

    def __init__(
        self,
        experts: int,
        width: int,
        expert_width: int,
        ffn: str = "swiglu",
        bias: bool = False,
        precision: str = "bf16",
    ):
        if ffn != "swiglu" or bias:
            raise RequestError(
                "backend.experts te computes swiglu without biases only; "
                "set model.ffn to swiglu and model.bias to false, or backend.experts to grouped."
            )
        if precision not in ROW_MULTIPLE or precision == "fp32":
            raise RequestError(f"backend.experts te does not compute in {precision}; use grouped, or precision.kind bf16.")
        super().__init__(experts, width, expert_width)
        self.precision = precision
        self.row_multiple = ROW_MULTIPLE[precision]
        self._operators: _Operators | None = None

    def missing(self, device: torch.device) -> list[str]:
        """Each condition that this device or this layer fails, one sentence each; [] if it can run."""
        machine = probe(device)
        if machine.te is None:
            return [f"backend.experts te needs Transformer Engine, and {machine.te_problem}; install bmoe[te]."]
        section = ModelSection(width=self.width, moe=MoESection(experts=self.experts, expert_width=self.expert_width, top_k=1))
        return unmet(self.precision, machine, section)

    def host_syncs(self, dtype: torch.dtype = torch.bfloat16) -> int:
        """How often Transformer Engine reads the block sizes on the host in one pass: 0, or 1 where cuBLASLt is too old.

        Its native path needs cuBLASLt 13.4 on Hopper in bf16, 13.5 for fp8_current, 13.6 for fp8_block.
        """
        from transformer_engine.pytorch.ops.basic.grouped_linear import is_op_fuser_grouped_tensor_path_supported

        recipe = None if self.precision == "bf16" else te_recipe(self.precision)
        return 0 if is_op_fuser_grouped_tensor_path_supported(recipe, dtype) else 1

    @torch.compiler.disable
    def forward(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """y_TD in x's dtype. Raises RequestError, at the first call, with the first condition that is not met."""
        gate_up_ECD, down_EDF = self.gate_up.to(x_TD.dtype), self.down.to(x_TD.dtype)
        if self._operators is None:
            self._operators = self._build(x_TD.device, x_TD.dtype)
        layout = padded_layout(experts_TK, self.experts, self.row_multiple)
        k = experts_TK.shape[1]
        x_RD = _Spread.apply(x_TD, layout.row_of_slot_N, k, layout.rows)
        place_N = torch.where(layout.row_of_slot_N < 0, layout.rows, layout.row_of_slot_N).long()
        weight_R = weights_TK.new_zeros(layout.rows + 1).index_copy(0, place_N, weights_TK.reshape(-1))[: layout.rows]
        y_RD = _Run.apply(x_RD, weight_R, gate_up_ECD, down_EDF, layout.splits_E, self._operators, self.precision)
        return _Combine.apply(y_RD, layout.row_of_slot_N, k)

    def _build(self, device: torch.device, dtype: torch.dtype) -> _Operators:
        missing = self.missing(device)
        if missing:
            raise RequestError(missing[0])
        interleaved = self.precision == "mxfp8"
        return _Operators(self.experts, self.width, self.expert_width, interleaved, device, dtype)
