"""`loop` and `grouped` against a float64 formula written per token, and against each other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from bmoe.errors import RequestError
from bmoe.model.experts import build_experts

NAMES = ("gate_up", "down", "gate_up_bias", "down_bias")


def routing(pattern: str, tokens: int, experts: int, k: int) -> torch.Tensor:
    """experts_TK for a named load pattern; experts of one token are distinct where E allows it."""
    if pattern == "one":
        return torch.full((tokens, k), experts - 1)
    live = {"all": experts, "empty": max(experts // 2, 1), "tail": experts}[pattern]
    ids_TK = torch.rand(tokens, live).argsort(1)[:, :k] if live >= k else torch.randint(live, (tokens, k))
    if pattern == "tail":
        ids_TK[tokens - tokens // 3 :] = experts
        ids_TK[0, 0] = experts
    return ids_TK


def per_token(module, x_TD, experts_TK, weights_TK):
    """The formula of the contract, token by token: slow and without any indexing trick."""
    rows = []
    for x_D, ids_K, weights_K in zip(x_TD, experts_TK.tolist(), weights_TK, strict=True):
        y_D = torch.zeros_like(x_D)
        for e, w in zip(ids_K, weights_K, strict=True):
            if e == module.experts:
                continue
            h = module.gate_up[e] @ x_D + (0 if module.gate_up_bias is None else module.gate_up_bias[e])
            f = module.expert_width
            a = functional.gelu(h) if module.ffn == "gelu" else functional.silu(h[:f]) * h[f:]
            y_D = y_D + module.down[e] @ (w * a) + (0 if module.down_bias is None else w * module.down_bias[e])
        rows.append(y_D)
    return torch.stack(rows)


def run(module, forward, x_TD, experts_TK, weights_TK, dy_TD):
    """Output and every gradient by name."""
    module.zero_grad(set_to_none=True)
    x_TD, weights_TK = x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_()
    y_TD = forward(x_TD, experts_TK, weights_TK)
    y_TD.backward(dy_TD)
    grads = {name: getattr(module, name).grad for name in NAMES if getattr(module, name) is not None}
    return {"y": y_TD.detach(), "x": x_TD.grad, "weights": weights_TK.grad, **grads}


def case(kind, pattern, tokens, experts, k, ffn="swiglu", bias=False, dtype=torch.float32, width=16, expert_width=24):
    torch.manual_seed(tokens * 1000 + experts * 10 + k)
    module = build_experts(kind, experts, width, expert_width, ffn, bias).to(dtype)
    for name, parameter in module.named_parameters():
        torch.nn.init.normal_(parameter, std=1.0 if "bias" in name else parameter.shape[-1] ** -0.5)
    x_TD, dy_TD = torch.randn(tokens, width, dtype=dtype), torch.randn(tokens, width, dtype=dtype)
    weights_TK = torch.rand(tokens, k, dtype=dtype) + 0.1
    return module, (x_TD, routing(pattern, tokens, experts, k), weights_TK, dy_TD)


def assert_close(actual, expected, bound):
    for name, reference in expected.items():
        assert actual[name] is not None, f"no gradient for {name}"
        assert actual[name].isfinite().all(), name
        error = (actual[name].double() - reference.double()).norm() / reference.double().norm().clamp(min=1e-30)
        if reference.double().norm() == 0:
            assert actual[name].abs().max() == 0, name
        else:
            assert error < bound, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("kind", ["loop", "grouped"])
@pytest.mark.parametrize("pattern", ["all", "empty", "one", "tail"])
@pytest.mark.parametrize(("ffn", "bias"), [("swiglu", False), ("swiglu", True), ("gelu", False), ("gelu", True)])
def test_equals_the_formula_in_float64(kind, pattern, ffn, bias):
    module, arguments = case(kind, pattern, 13, 5, 2, ffn, bias, torch.float64)
    expected = run(module, lambda *a: per_token(module, *a), *arguments)
    assert_close(run(module, module, *arguments), expected, 1e-12)


@pytest.mark.parametrize("pattern", ["all", "empty", "one", "tail"])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 2, 1), (17, 4, 1), (64, 8, 2), (101, 16, 8), (3, 64, 8)])
@pytest.mark.parametrize(("ffn", "bias"), [("swiglu", False), ("gelu", True)])
def test_grouped_equals_loop_in_fp32(pattern, tokens, experts, k, ffn, bias):
    loop, arguments = case("loop", pattern, tokens, experts, k, ffn, bias)
    grouped = build_experts("grouped", experts, 16, 24, ffn, bias)
    grouped.load_state_dict(loop.state_dict())
    reference = loop.double()
    wide = [a.double() if a.is_floating_point() else a for a in arguments]
    expected = run(reference, reference, *wide)
    assert_close(run(grouped, grouped, *arguments), expected, 1e-5)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_grouped_equals_loop_for_any_routing(data):
    experts, k, tokens = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    ids = data.draw(st.lists(st.integers(0, experts), min_size=tokens * k, max_size=tokens * k))
    width = data.draw(st.sampled_from([4, 5]))  # 5 floats are no whole 16 bytes: the path without torch's kernel
    loop, arguments = case("loop", "all", tokens, experts, k, width=width, expert_width=8)
    arguments = (arguments[0], torch.tensor(ids).view(tokens, k), *arguments[2:])
    grouped = build_experts("grouped", experts, width, 8)
    grouped.load_state_dict(loop.state_dict())
    assert_close(run(grouped, grouped, *arguments), run(loop, loop, *arguments), 1e-5)


@pytest.mark.parametrize("kind", ["loop", "grouped"])
def test_no_expert_rows_are_exactly_zero_and_touch_nothing(kind):
    module, (x_TD, experts_TK, weights_TK, dy_TD) = case(kind, "all", 12, 4, 2)
    experts_TK[9:] = 4
    x_TD[9:] = float("nan")
    weights_TK[9:] = float("inf")
    dy_TD[9:] = 1e30
    full = run(module, module, x_TD, experts_TK, weights_TK, dy_TD)
    part = run(module, module, x_TD[:9], experts_TK[:9], weights_TK[:9], dy_TD[:9])
    for name in ("y", "x", "weights"):
        assert (full[name][9:] == 0).all()
        torch.testing.assert_close(full[name][:9], part[name])
    for name in ("gate_up", "down"):
        torch.testing.assert_close(full[name], part[name])


@pytest.mark.parametrize("kind", ["loop", "grouped"])
def test_no_token_at_all_gives_zero_gradients(kind):
    module, (x_TD, experts_TK, weights_TK, dy_TD) = case(kind, "all", 6, 3, 2, bias=True)
    result = run(module, module, x_TD, torch.full_like(experts_TK, 3), weights_TK, dy_TD)
    assert all(value.abs().max() == 0 for value in result.values())


@pytest.mark.parametrize("kind", ["loop", "grouped"])
def test_output_has_the_dtype_of_the_input(kind):
    module, (x_TD, experts_TK, weights_TK, _) = case(kind, "all", 6, 3, 2)
    module = module.bfloat16()
    y_TD = module(x_TD.bfloat16(), experts_TK, weights_TK)
    assert y_TD.dtype == torch.bfloat16
    reference = module.double()(x_TD.bfloat16().double(), experts_TK, weights_TK.double())
    assert (y_TD.double() - reference).norm() / reference.norm() < 0.01


def test_grouped_compiles_once_into_one_graph():
    module, (x_TD, experts_TK, weights_TK, _) = case("grouped", "all", 32, 4, 2)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    module, x_TD = module.bfloat16(), x_TD.bfloat16()
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for pattern in ("all", "one", "tail"):
        ids_TK = routing(pattern, 32, 4, 2).contiguous()
        torch.testing.assert_close(compiled(x_TD, ids_TK, weights_TK), module(x_TD, ids_TK, weights_TK))
    assert len(graphs) == 1


def test_unknown_kind_and_activation_are_refused():
    with pytest.raises(RequestError, match="loop, grouped"):
        build_experts("magic", 2, 8, 8)
    with pytest.raises(RequestError, match="swiglu and gelu"):
        build_experts("loop", 2, 8, 8, ffn="relu")
