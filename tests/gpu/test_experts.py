"""Expert implementations on a GPU in bf16 against the float64 loop: rounding, ragged counts, synchronisation."""

import importlib.util

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from bmoe.kernels import fused_gemm
from bmoe.kernels.router import route, route_reference
from bmoe.model.experts import build_experts
from bmoe.model.experts.triton import TritonExperts

pytestmark = pytest.mark.gpu

FUSED = fused_gemm.why_not(torch.device("cuda"), torch.bfloat16, 8, 8) is None
BUILDERS = {
    "grouped": lambda *sizes: build_experts("grouped", *sizes),
    "triton": lambda *sizes: TritonExperts(*sizes, gemms="torch"),
    "triton-fused": lambda *sizes: TritonExperts(*sizes, gemms="fused"),
}
KINDS = [
    pytest.param(kind, marks=pytest.mark.skipif(kind == "triton-fused" and not FUSED, reason="fused GEMMs missing")) for kind in BUILDERS
]
TE = importlib.util.find_spec("transformer_engine") is not None


def ids_of(pattern: str, tokens: int, experts: int, k: int) -> torch.Tensor:
    if pattern == "one":
        return torch.full((tokens, k), experts - 1, device="cuda")
    if pattern == "none":
        return torch.full((tokens, k), experts, device="cuda")
    ids_TK = torch.rand(tokens, experts, device="cuda").topk(k).indices
    if pattern == "empty":
        return ids_TK // 2 * 2
    if pattern == "tail":
        ids_TK[tokens // 2 :] = experts
    if pattern == "ragged":  # expert e gets a count of its own in 1..127, the rest of the slots nobody
        counts_E = (torch.arange(experts) * 37 + 1) % 127 + 1
        flat = torch.cat([torch.repeat_interleave(torch.arange(experts), counts_E), torch.full((tokens * k,), experts)])
        return flat[: tokens * k].cuda()[torch.randperm(tokens * k, device="cuda")].view(tokens, k)
    return ids_TK


def run(module, x_TD, ids_TK, weights_TK, dy_TD):
    module.zero_grad(set_to_none=True)
    x_TD, weights_TK = x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_()
    y_TD = module(x_TD, ids_TK, weights_TK)
    y_TD.backward(dy_TD)
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"y": y_TD.detach(), "x": x_TD.grad, "weights": weights_TK.grad, **grads}


def case(tokens, experts, k, width, expert_width):
    torch.manual_seed(tokens)
    loop = build_experts("loop", experts, width, expert_width).cuda()
    for parameter in loop.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)  # outputs of order 1
    loop.bfloat16()
    x_TD, dy_TD = torch.randn(2, tokens, width, device="cuda", dtype=torch.bfloat16)
    return loop, x_TD, torch.rand(tokens, k, device="cuda") + 0.1, dy_TD


def relative_errors(actual, reference):
    norm = {name: value.double().norm().clamp(min=1e-30) for name, value in reference.items()}
    return {name: float((actual[name].double() - reference[name]).norm() / norm[name]) for name in reference}


SIZES = [
    (257, 8, 2, 256, 384),
    (1001, 64, 8, 128, 256),
    (129, 16, 1, 200, 136),
    (1, 4, 2, 64, 64),
    (4099, 8, 2, 640, 512),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pattern", ["all", "empty", "one", "none", "tail", "ragged"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rounding_is_that_of_bf16(kind, pattern, sizes):
    tokens, experts, k, width, expert_width = sizes
    loop, x_TD, weights_TK, dy_TD = case(*sizes)
    ids_TK = ids_of(pattern, tokens, experts, k)
    module = BUILDERS[kind](experts, width, expert_width).cuda().bfloat16()
    module.load_state_dict(loop.state_dict())
    actual = run(module, x_TD, ids_TK, weights_TK, dy_TD)
    rounding = run(loop, x_TD, ids_TK, weights_TK, dy_TD)
    exact = run(loop.double(), x_TD.double(), ids_TK, weights_TK.double(), dy_TD.double())
    allowed, errors = relative_errors(rounding, exact), relative_errors(actual, exact)
    for name, error in errors.items():
        assert actual[name].isfinite().all(), name
        assert error <= 1.5 * allowed[name], f"{name}: {error:.2e}, rounding alone gives {allowed[name]:.2e}"
    assert (actual["x"][(ids_TK == experts).all(1)] == 0).all()
    assert (actual["weights"][ids_TK == experts] == 0).all()


@pytest.mark.skipif(not TE, reason="Transformer Engine missing")
@pytest.mark.parametrize("pattern", ["all", "empty", "one", "tail"])
@pytest.mark.parametrize(("precision", "factor"), [("bf16", 1.5), ("fp8_current", 30), ("fp8_delayed", 30)])
def test_transformer_engine_rounds_as_its_format_does(pattern, precision, factor):
    """E4M3 keeps 3 bits after the point where bf16 keeps 7: 16 times the rounding, and two for E5M2 gradients."""
    sizes = (257, 8, 2, 256, 384)
    loop, x_TD, weights_TK, dy_TD = case(*sizes)
    ids_TK = ids_of(pattern, 257, 8, 2)
    module = build_experts("te", 8, 256, 384, precision=precision).cuda().bfloat16()
    module.load_state_dict(loop.state_dict())
    actual = run(module, x_TD, ids_TK, weights_TK, dy_TD)
    rounding = run(loop, x_TD, ids_TK, weights_TK, dy_TD)
    exact = run(loop.double(), x_TD.double(), ids_TK, weights_TK.double(), dy_TD.double())
    allowed, errors = relative_errors(rounding, exact), relative_errors(actual, exact)
    for name, error in errors.items():
        assert error <= factor * allowed[name], f"{name}: {error:.2e}, rounding to bf16 gives {allowed[name]:.2e}"


@pytest.mark.skipif(not FUSED, reason="fused GEMMs missing")
def test_a_wrong_kernel_is_noticed(monkeypatch):
    sizes = SIZES[0]
    loop, x_TD, weights_TK, dy_TD = case(*sizes)
    ids_TK = ids_of("all", 257, 8, 2)
    module = TritonExperts(8, 256, 384, gemms="fused").cuda().bfloat16()
    module.load_state_dict(loop.state_dict())
    right = fused_gemm.wup
    monkeypatch.setattr(fused_gemm, "wup", lambda dh, x, token, bounds: right(dh, x, token.roll(1), bounds))
    actual = run(module, x_TD, ids_TK, weights_TK, dy_TD)
    exact = run(loop.double(), x_TD.double(), ids_TK, weights_TK.double(), dy_TD.double())
    assert relative_errors(actual, exact)["gate_up"] > 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_every_time(kind):
    loop, x_TD, weights_TK, dy_TD = case(4099, 8, 2, 640, 512)
    ids_TK = ids_of("all", 4099, 8, 2)
    module = BUILDERS[kind](8, 640, 512).cuda().bfloat16()
    first, second = (run(module, x_TD, ids_TK, weights_TK, dy_TD) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_step_never_synchronises_nor_recompiles(kind):
    tokens, experts, k, width, expert_width = 512, 8, 2, 256, 384
    _, x_TD, _, dy_TD = case(tokens, experts, k, width, expert_width)
    module = BUILDERS[kind](experts, width, expert_width).cuda().bfloat16()
    router_ED = torch.randn(experts, width, device="cuda", requires_grad=True)
    bias_E, real = torch.zeros(experts, device="cuda"), torch.tensor(tokens - 5, device="cuda")

    @torch.compile(fullgraph=True)
    def layer(x_TD, bias_E):
        ids_TK, weights_TK, balance, z, _ = route(x_TD, router_ED, bias_E, real, k)
        return module(x_TD, ids_TK, weights_TK), balance + z

    def step(bias_E):
        y_TD, loss = layer(x_TD, bias_E)
        torch.autograd.backward([y_TD, loss], [dy_TD, torch.ones_like(loss)])

    favours = [bias_E, bias_E.clone().index_fill_(0, torch.tensor([0], device="cuda"), 100.0)]
    step(bias_E)
    step(bias_E)
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.cuda.set_sync_debug_mode("error")
        try:
            for bias_E in favours:
                step(bias_E)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("tokens", "width", "experts", "k"), [(1000, 1280, 64, 8), (4097, 2048, 8, 2), (513, 320, 8, 2), (129, 72, 256, 8), (300, 640, 128, 4)]
)
def test_fused_router_equals_its_twin(score, tokens, width, experts, k):
    torch.manual_seed(0)
    x_TD = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    weight_ED, bias_E = torch.randn(experts, width, device="cuda") * 0.02, torch.zeros(experts, device="cuda")
    real, dweights_TK = torch.tensor(tokens - 3, device="cuda"), torch.randn(tokens, k, device="cuda")

    def outputs(function, x_TD, weight_ED, bias_E, dweights_TK):
        x_TD, weight_ED = x_TD.clone().requires_grad_(), weight_ED.clone().requires_grad_()
        ids_TK, weights_TK, balance, z, counts_E = function(x_TD, weight_ED, bias_E, real, k, score)
        ((weights_TK * dweights_TK).sum() + balance + z).backward()
        return ids_TK, {"balance": balance, "z": z, "x": x_TD.grad, "w": weight_ED.grad, "counts": counts_E}

    ids_TK, actual = outputs(route, x_TD, weight_ED, bias_E, dweights_TK)
    wide = [t.double() for t in (x_TD, weight_ED, bias_E, dweights_TK)]
    expected_TK, expected = outputs(route_reference, *wide)
    same = (ids_TK.sort(-1).values == expected_TK.sort(-1).values).all(-1).double().mean()
    assert same > 0.999  # near ties may fall the other way
    bounds = {"balance": 1e-4, "z": 1e-4, "x": 5e-3, "w": 2e-2 if same < 1 else 1e-4, "counts": 1e-3}
    for name, bound in bounds.items():
        error = (actual[name].double() - expected[name]).norm() / expected[name].norm()
        assert error < bound, f"{name}: {error:.2e}"
