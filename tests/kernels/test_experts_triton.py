"""The `triton` experts, whole, against the float64 loop: values, every gradient, compilation, refusals."""

import pytest
import torch

pytest.importorskip("triton")

from bmoe.errors import RequestError  # noqa: E402
from bmoe.kernels import fused_gemm, rows  # noqa: E402
from bmoe.model.experts import build_experts  # noqa: E402
from bmoe.model.experts.triton import fused_path  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(module, x_TD, experts_TK, weights_TK, dy_TD):
    x_TD, weights_TK = x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_()
    y_TD = module(x_TD, experts_TK, weights_TK)
    y_TD.backward(dy_TD)
    named = module.named_parameters() if isinstance(module, torch.nn.Module) else ()
    return {"y": y_TD, "x": x_TD.grad, "weights": weights_TK.grad} | {n: p.grad for n, p in named}


def pair(tokens, experts, k, width=32, expert_width=48):
    torch.manual_seed(tokens + experts)
    loop = build_experts("loop", experts, width, expert_width).to(DEVICE)
    for parameter in loop.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    module = build_experts("triton", experts, width, expert_width).to(DEVICE)
    module.load_state_dict(loop.state_dict())
    x_TD, dy_TD = torch.randn(2, tokens, width, device=DEVICE)
    return loop.double(), module, x_TD, torch.rand(tokens, k, device=DEVICE) + 0.1, dy_TD


def errors(actual, expected):
    return {n: float((actual[n].detach().double() - e.detach()).norm() / e.detach().norm().clamp(min=1e-30)) for n, e in expected.items()}


@pytest.fixture(params=["torch", "fused"])
def path(request, monkeypatch):
    """Both paths of the experts; on a CPU the fused GEMMs are replaced by their plain-torch twins."""
    if request.param == "fused":
        monkeypatch.setattr(fused_gemm, "why_not", lambda *_: None)
        fused_path.cache_clear()
        for name in ("up", "down", "ddown", "wdown", "wup", "dup"):
            monkeypatch.setattr(fused_gemm, name, getattr(fused_gemm.Reference, name))
    yield request.param
    fused_path.cache_clear()


@pytest.mark.parametrize("pattern", ["all", "tail", "one", "none"])
@pytest.mark.parametrize(("tokens", "experts", "k", "width"), [(1, 2, 1, 32), (29, 4, 2, 32), (17, 16, 8, 20), (9, 3, 2, 5)])
def test_equals_the_loop(path, pattern, tokens, experts, k, width):
    loop, module, x_TD, weights_TK, dy_TD = pair(tokens, experts, k, width)
    ids_TK = torch.randint(experts + (pattern == "tail"), (tokens, k), device=DEVICE)
    if pattern in ("one", "none"):
        ids_TK = torch.full_like(ids_TK, experts - (pattern == "one"))
    expected = run(loop, x_TD.double(), ids_TK, weights_TK.double(), dy_TD.double())
    actual = run(module, x_TD, ids_TK, weights_TK, dy_TD)
    assert all(value < 1e-5 for value in errors(actual, expected).values())


def test_a_residual_is_added_with_its_gradient(path):
    _, module, x_TD, weights_TK, dy_TD = pair(29, 4, 2)
    ids_TK, residual_TD = torch.randint(5, (29, 2), device=DEVICE), torch.randn_like(x_TD).requires_grad_()
    expected = run(lambda *inputs: residual_TD + module(*inputs), x_TD, ids_TK, weights_TK, dy_TD)
    expected["residual"], residual_TD.grad = residual_TD.grad, None
    actual = run(lambda *inputs: module(*inputs, residual_TD), x_TD, ids_TK, weights_TK, dy_TD)
    actual["residual"] = residual_TD.grad
    assert all(value < 1e-6 for value in errors(actual, expected).values())


def test_a_wrong_kernel_fails(monkeypatch, path):
    loop, module, x_TD, weights_TK, dy_TD = pair(29, 4, 2)
    ids_TK = torch.randint(4, (29, 2), device=DEVICE)
    expected = run(loop, x_TD.double(), ids_TK, weights_TK.double(), dy_TD.double())
    right = rows.sort_slots

    def swapped(*arguments):
        order = right(*arguments)
        order.row_of_slot_N[:4] = order.row_of_slot_N[:4].flip(0)  # tokens 0 and 1 trade experts
        return order

    monkeypatch.setattr("bmoe.model.experts.triton.sort_slots", swapped)
    assert errors(run(module, x_TD, ids_TK, weights_TK, dy_TD), expected)["y"] > 1e-2


def test_compiles_once_into_one_graph():
    _, module, x_TD, weights_TK, dy_TD = pair(24, 4, 2)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for ids_TK in (torch.randint(4, (24, 2)), torch.full((24, 2), 3), torch.full((24, 2), 4)):
        ids_TK = ids_TK.to(DEVICE)
        torch.testing.assert_close(compiled(x_TD, ids_TK, weights_TK), module(x_TD, ids_TK, weights_TK))
    assert len(graphs) == 1


def test_compiled_it_gives_the_residual_its_gradient():
    _, module, x_TD, weights_TK, dy_TD = pair(24, 4, 2)
    ids_TK, found = torch.randint(4, (24, 2), device=DEVICE), []
    for call in (module, torch.compile(module, backend="aot_eager", fullgraph=True)):
        leaves = [t.clone().requires_grad_() for t in (x_TD, torch.ones_like(x_TD))]
        y_TD = call(leaves[0] * 2, ids_TK, weights_TK, leaves[1] * 3)
        y_TD.backward(dy_TD)
        found.append([y_TD.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[0][2], 3 * dy_TD)


def test_operators_keep_their_contracts():
    _, module, x_TD, weights_TK, _ = pair(6, 3, 2)
    arguments = (x_TD, torch.randint(3, (6, 2), device=DEVICE), weights_TK, module.gate_up, module.down)
    from bmoe.model.experts.triton import experts_forward

    for residual_TD in (None, x_TD):
        torch.library.opcheck(experts_forward.operator, (*arguments, residual_TD, "auto"), test_utils=("test_schema", "test_faketensor"))


def test_biases_and_gelu_are_refused():
    for options in ({"bias": True}, {"ffn": "gelu"}):
        with pytest.raises(RequestError, match="swiglu without biases"):
            build_experts("triton", 2, 8, 8, **options)


def test_the_fused_gemms_are_refused_with_their_missing_condition():
    with pytest.raises(RequestError, match="cannot run here: they need a GPU"):
        fused_path("fused", torch.device("cpu"), torch.bfloat16, 8, 8)


def test_interleaving_is_a_round_trip():
    halves = torch.arange(12).view(2, 6)
    assert fused_gemm.interleave(halves)[0].tolist() == [0, 3, 1, 4, 2, 5]
    assert torch.equal(fused_gemm.deinterleave(fused_gemm.interleave(halves)), halves)
