"""The `te` experts without Transformer Engine: layout, padding, gradients and refusals, with its operators replaced.

The stand-in computes what the three operators are documented to compute, from the blocks' sizes alone, so whatever the
padded layout gets wrong (a row in another expert's block, padding that leaks) shows up against the loop.
"""

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from bmoe.errors import RequestError  # noqa: E402
from bmoe.model.experts import build_experts, te  # noqa: E402
from bmoe.precision.machine import Machine  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tensors on the CPU need Triton's interpreter")

HOPPER = Machine("NVIDIA H200", (9, 0), (13, 0), (2, 20, 2), None, (13, 8), (1, 29), True)
BLACKWELL = Machine("NVIDIA B200", (10, 0), (13, 0), (2, 20, 2), None, (13, 8), (1, 29), True)


class PlainOperators:
    """`te._Operators` in plain torch; `interleaved` works on blocks of 32 rows as the fused kernel does."""

    def __init__(self, experts, width, expert_width, interleaved, device, dtype):
        self.experts, self.interleaved = experts, interleaved
        up = [torch.nn.Parameter(torch.empty(2 * expert_width, width)) for _ in range(experts)]
        self._weights = up + [torch.nn.Parameter(torch.empty(width, expert_width)) for _ in range(experts)]

    def weights(self):
        return self._weights

    bind = te._Operators.bind

    def __call__(self, x_RD, weight_R, splits_E, precision):
        sizes = splits_E.tolist()
        assert sum(sizes) == x_RD.shape[0], "Transformer Engine needs every row in a block"
        out = []
        blocks = zip(x_RD.split(sizes), weight_R.split(sizes), strict=True)
        for e, (x, w) in enumerate(blocks):
            h = x @ self._weights[e].T
            h = te.deinterleave_glu(h.T).T if self.interleaved else h
            gate, up = h.chunk(2, dim=-1)
            out.append((functional.silu(gate) * up * w[:, None]) @ self._weights[self.experts + e].T)
        return torch.cat(out)


def run(module, x_TD, ids_TK, weights_TK, dy_TD):
    x_TD, weights_TK = x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_()
    y_TD = module(x_TD, ids_TK, weights_TK)
    y_TD.backward(dy_TD)
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"y": y_TD.detach(), "x": x_TD.grad, "weights": weights_TK.grad, **grads}


@pytest.mark.parametrize("precision", ["bf16", "fp8_current", "mxfp8"])
@pytest.mark.parametrize("pattern", ["all", "tail", "one", "none"])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 2, 1), (29, 4, 2), (17, 16, 8)])
def test_layout_and_gradients_equal_the_loop(monkeypatch, precision, pattern, tokens, experts, k):
    monkeypatch.setattr(te, "_Operators", PlainOperators)
    monkeypatch.setattr(te, "probe", lambda _: BLACKWELL)
    torch.manual_seed(0)
    loop, module = (build_experts(kind, experts, 64, 64, precision=precision) for kind in ("loop", "te"))
    for parameter in loop.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    module.load_state_dict(loop.state_dict())
    ids_TK = torch.randint(experts + (pattern == "tail"), (tokens, k))
    if pattern in ("one", "none"):
        ids_TK = torch.full_like(ids_TK, experts - (pattern == "one"))
    x_TD, dy_TD = torch.randn(2, tokens, 64)
    arguments = (x_TD, ids_TK, torch.rand(tokens, k) + 0.1, dy_TD)
    expected, actual = run(loop, *arguments), run(module, *arguments)
    for name, reference in expected.items():
        torch.testing.assert_close(actual[name], reference, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("multiple", [1, 16, 32, 256])
def test_every_block_is_a_multiple_and_all_rows_are_used(multiple):
    ids_TK = torch.tensor([[0, 3], [3, 1], [4, 4], [3, 0]])  # expert 2 is empty, 4 is "no expert"
    layout = te.padded_layout(ids_TK, 4, multiple)
    sizes = layout.splits_E.tolist()
    assert sum(sizes) == layout.rows and all(size % multiple == 0 for size in sizes)
    starts = [sum(sizes[:e]) for e in range(5)]
    for slot, row in enumerate(layout.row_of_slot_N.tolist()):
        expert = int(ids_TK.flatten()[slot])
        assert row == -1 if expert == 4 else starts[expert] <= row < starts[expert + 1]
    used = [row for row in layout.row_of_slot_N.tolist() if row >= 0]
    assert len(set(used)) == len(used)


def test_row_multiples_are_the_published_ones():
    # TE's GroupedLinear; of fp8_block and mxfp8 the native grouped path, the only one that runs here. Its kernels stop the program
    # at less ("each tensor's first dimension must be a multiple of 128", group_quantize_fp8_blockwise.cuh of TE 2.20).
    published = {"bf16": 1, "fp8_current": 16, "fp8_delayed": 16, "fp8_block": 128, "mxfp8": 256}
    assert {p: te.TeExperts(2, 64, 64, precision=p).row_multiple for p in published} == published


def test_interleaving_alternates_blocks_of_32_rows_and_returns():
    halves = torch.arange(2 * 96).view(1, 192, 1)
    blocks = te.interleave_glu(halves)[0, :, 0].tolist()
    assert blocks[:32] == list(range(32)) and blocks[32:64] == list(range(96, 128)) and blocks[64] == 32
    assert torch.equal(te.deinterleave_glu(te.interleave_glu(halves)), halves)


@pytest.mark.parametrize(
    ("machine", "precision", "expert_width", "said"),
    [
        (Machine("a CPU", te_problem="transformer_engine is not installed"), "bf16", 64, "install bmoe"),
        (HOPPER, "mxfp8", 64, "compute capability 10.0"),
        (Machine(**{**BLACKWELL.__dict__, "fused_switch": False}), "mxfp8", 64, "NVTE_CUTEDSL_FUSED_GROUPED_MLP=1"),
        (Machine(**{**BLACKWELL.__dict__, "cudnn_frontend": (1, 22)}), "mxfp8", 64, "1.23 or later"),
        (BLACKWELL, "mxfp8", 96, "expert_width to be a multiple of 64"),
        (Machine(**{**HOPPER.__dict__, "cublas_lt": (13, 1)}), "fp8_block", 64, "13.6 or later"),
    ],
)
def test_refused_with_the_missing_condition(monkeypatch, machine, precision, expert_width, said):
    monkeypatch.setattr(te, "probe", lambda _: machine)
    module = te.TeExperts(2, 64, expert_width, precision=precision)
    with pytest.raises(RequestError, match=said):
        module(torch.randn(3, 64), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))


def test_biases_gelu_and_fp32_are_refused():
    for options in ({"bias": True}, {"ffn": "gelu"}, {"precision": "fp32"}):
        with pytest.raises(RequestError, match="backend.experts te"):
            build_experts("te", 2, 64, 64, **options)
