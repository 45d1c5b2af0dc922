"""The experts of precision fp8_row, whole: against the float64 loop within the rounding of E4M3."""

import pytest
import torch

pytest.importorskip("triton")

from bmoe.errors import RequestError  # noqa: E402
from bmoe.kernels import fp8_gemm, fused_gemm  # noqa: E402
from bmoe.model.experts import build_experts  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REAL = fp8_gemm.why_not(torch.device(DEVICE), torch.bfloat16, 32, 32) is None
SHAPES = [(29, 4, 2, 32, 48), (17, 16, 8, 64, 32), (1, 2, 1, 16, 16)]
PATTERNS = ["all", "tail", "one", "none"]
CASES = [(*s, p) for s in SHAPES for p in PATTERNS if REAL or s is SHAPES[0] or p == "all"]  # interpreted, each takes seconds


@pytest.fixture(autouse=True)
def products(monkeypatch):
    """Without a GPU the products are their plain-torch twins."""
    if REAL:
        return
    monkeypatch.setattr(fp8_gemm, "why_not", lambda *_: None)
    for name in ("up", "down", "ddown", "dup"):
        monkeypatch.setattr(fp8_gemm, name, getattr(fp8_gemm.Reference, name))
    for name in ("wdown", "wup"):
        monkeypatch.setattr(fused_gemm, name, getattr(fused_gemm.Reference, name))


def run(module, x_TD, ids_TK, weights_TK, dy_TD):
    x_TD, weights_TK = x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_()
    y_TD = module(x_TD, ids_TK, weights_TK)
    y_TD.backward(dy_TD)
    return {"y": y_TD.detach(), "x": x_TD.grad, "weights": weights_TK.grad} | {n: p.grad for n, p in module.named_parameters()}


def pair(tokens, experts, k, width, expert_width):
    torch.manual_seed(tokens + experts)
    loop = build_experts("loop", experts, width, expert_width).to(DEVICE)
    for parameter in loop.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    loop.bfloat16()
    module = build_experts("triton", experts, width, expert_width, precision="fp8_row").to(DEVICE).bfloat16()
    module.load_state_dict(loop.state_dict())
    x_TD, dy_TD = torch.randn(2, tokens, width, device=DEVICE, dtype=torch.bfloat16)
    return loop.double(), module, x_TD, torch.rand(tokens, k, device=DEVICE) + 0.1, dy_TD


def errors(actual, expected):
    return {n: float((actual[n].double() - e).norm() / e.norm().clamp(min=1e-30)) for n, e in expected.items()}


@pytest.mark.parametrize(("tokens", "experts", "k", "width", "expert_width", "pattern"), CASES)
def test_is_near_the_loop(tokens, experts, k, width, expert_width, pattern):
    """One E4M3 rounding of both inputs is 0.037 of a normal product; values pass through two, gradients through up to four."""
    loop, module, x_TD, weights_TK, dy_TD = pair(tokens, experts, k, width, expert_width)
    ids_TK = torch.randint(experts + (pattern == "tail"), (tokens, k), device=DEVICE)
    if pattern in ("one", "none"):
        ids_TK = torch.full_like(ids_TK, experts - (pattern == "one"))
    expected = run(loop, x_TD.double(), ids_TK, weights_TK.double(), dy_TD.double())
    actual = run(module, x_TD, ids_TK, weights_TK, dy_TD)
    assert all(actual[name].isfinite().all() for name in actual)
    far = errors(actual, expected)
    if tokens == 1:  # a single sum of few terms may cancel
        far.pop("weights")
    assert all(value < 0.12 for value in far.values()), far
    assert all(actual[name].dtype == (torch.float32 if name == "weights" else torch.bfloat16) for name in actual)
    assert (actual["x"][(ids_TK == experts).all(1)] == 0).all()
    assert (actual["weights"][ids_TK == experts] == 0).all()


def test_a_small_row_keeps_its_precision_beside_a_large_one():
    loop, module, x_TD, weights_TK, dy_TD = pair(8, 2, 1, 64, 64)
    ids_TK = torch.zeros(8, 1, dtype=torch.int64, device=DEVICE)
    x_TD[0] *= 1e4
    expected = run(loop, x_TD.double(), ids_TK, weights_TK.double(), dy_TD.double())
    actual = run(module, x_TD, ids_TK, weights_TK, dy_TD)
    rows = (actual["y"].double() - expected["y"]).norm(dim=1) / expected["y"].norm(dim=1)
    assert (rows < 0.1).all()


@pytest.mark.no_cover
def test_compiles_into_one_graph():
    _, module, x_TD, weights_TK, dy_TD = pair(24, 4, 2, 32, 32)
    ids_TK = torch.randint(4, (24, 2), device=DEVICE)
    eager = run(module, x_TD, ids_TK, weights_TK, dy_TD)
    module.zero_grad(set_to_none=True)
    compiled = run(torch.compile(module, fullgraph=True, backend="aot_eager"), x_TD, ids_TK, weights_TK, dy_TD)
    assert all(torch.equal(eager[name], compiled[name.removeprefix("_orig_mod.")]) for name in ("y", "x", "weights"))


def test_refuses_what_it_cannot(monkeypatch):
    monkeypatch.undo()
    module = build_experts("triton", 2, 24, 16, precision="fp8_row").to(DEVICE).bfloat16()
    ids_TK = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(RequestError, match="multiples of 16"):
        module(torch.zeros(1, 24, device=DEVICE, dtype=torch.bfloat16), ids_TK, torch.ones(1, 1, device=DEVICE))


def test_held_weights_are_those_of_when_they_were_held():
    """The same bits as quantising in every pass, in memory that stays; new values count from the next `hold` or `let_go` on."""
    _, module, x_TD, weights_TK, dy_TD = pair(29, 4, 2, 32, 48)
    ids_TK = torch.randint(4, (29, 2), device=DEVICE)

    def results():
        module.zero_grad(set_to_none=True)
        return {name: value.clone() for name, value in run(module, x_TD, ids_TK, weights_TK, dy_TD).items()}

    def same(first, second):
        return all(torch.equal(first[name], second[name]) for name in first)

    before = results()
    module.hold()
    places = [tensor.data_ptr() for tensor in module.held]
    assert same(results(), before)
    with torch.no_grad():
        module.gate_up.mul_(-1.5)
        module.down.mul_(2.5)
    held = results()
    assert all(torch.equal(held[name], before[name]) for name in ("y", "x", "weights"))
    module.hold()
    after = results()
    assert not torch.equal(after["y"], before["y"]) and [tensor.data_ptr() for tensor in module.held] == places
    module.let_go()
    assert same(results(), after)
    assert not any("held" in name for name in module.state_dict())


def test_weights_in_fp32_are_not_held():
    module = build_experts("triton", 2, 32, 32, precision="fp8_row").to(DEVICE)
    with pytest.raises((TypeError, RequestError), match="bf16"):
        module.hold()
    assert not module.holds and not module.held


@pytest.mark.no_cover
def test_holding_compiles_each_way_once():
    """All layers share one program with held weights and one without."""
    modules = [pair(24, 4, 2, 32, 32)[1] for _ in range(3)]
    _, _, x_TD, weights_TK, dy_TD = pair(24, 4, 2, 32, 32)
    ids_TK = torch.randint(4, (24, 2), device=DEVICE)
    eager = run(modules[0], x_TD, ids_TK, weights_TK, dy_TD)
    torch._dynamo.reset()
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for module in modules:
        module.compile(fullgraph=True, backend=count)
    for _ in range(3):
        for module in modules:
            module.hold()
            module.zero_grad(set_to_none=True)
            compiled = run(module, x_TD, ids_TK, weights_TK, dy_TD)
            assert all(torch.equal(eager[name], compiled[name]) for name in eager)
            module.let_go()
            run(module, x_TD, ids_TK, weights_TK, dy_TD)
    assert count.frame_count == 2
