"""The fused router against its plain-torch twin in float64: choice, weights, losses, gradients."""

import pytest
import torch

pytest.importorskip("triton")

from bmoe.kernels.router import _split_kernel, route, route_reference  # noqa: E402
from bmoe.kernels.sizes import cdiv  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def outputs(function, x_TD, weight_ED, bias_E, real, k, score, normalize, dweights_TK):
    """Outputs and the gradients of <dweights, weights> + 0.7 balance + 0.3 z."""
    x_TD, weight_ED = x_TD.clone().requires_grad_(), weight_ED.clone().requires_grad_()
    experts_TK, weights_TK, balance, z, counts_E = function(x_TD, weight_ED, bias_E, real, k, score, normalize)
    ((weights_TK * dweights_TK).sum() + 0.7 * balance + 0.3 * z).backward()
    named = {"weights": weights_TK, "balance": balance, "z": z, "counts": counts_E, "x": x_TD.grad, "w": weight_ED.grad}
    return experts_TK, {name: value.detach() for name, value in named.items()}


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("tokens", "real", "width", "experts", "k"),
    [(1, 1, 16, 2, 1), (70, 51, 80, 8, 2), (130, 130, 33, 20, 6), (9, 0, 16, 4, 2), (139, 131, 72, 64, 8), (66, 65, 40, 130, 3)],
)
def test_equals_the_twin(score, normalize, tokens, real, width, experts, k):
    torch.manual_seed(tokens)
    x_TD = torch.randn(tokens, width, device=DEVICE)
    weight_ED = torch.randn(experts, width, device=DEVICE) * width**-0.5
    bias_E = torch.randn(experts, device=DEVICE) * 0.1
    real_tokens = torch.tensor(real, device=DEVICE)
    dweights_TK = torch.randn(tokens, k, device=DEVICE)
    ids_TK, actual = outputs(route, x_TD, weight_ED, bias_E, real_tokens, k, score, normalize, dweights_TK)
    wide = [t.double() for t in (x_TD, weight_ED, bias_E)]
    expected_TK, expected = outputs(route_reference, *wide, real_tokens, k, score, normalize, dweights_TK.double())
    assert torch.equal(ids_TK, expected_TK)
    for name, reference in expected.items():
        torch.testing.assert_close(actual[name].double(), reference, rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("experts_and_width", [(3, 5), (8, 1280)])
def test_three_bf16_hold_a_weight(experts_and_width):
    """24 bits of an fp32 are three times the 8 of a bf16: nothing is lost."""
    weight_ED = torch.randn(experts_and_width, device=DEVICE) * torch.logspace(-3, 3, experts_and_width[1], device=DEVICE)
    weight_PED = torch.empty(3, *experts_and_width, dtype=torch.bfloat16, device=DEVICE)
    _split_kernel[(cdiv(weight_ED.numel(), 512),)](weight_ED, weight_PED, weight_ED.numel(), 3, 512)
    assert torch.equal(weight_PED.double().sum(0), weight_ED.double())
    assert (weight_PED[1].abs() <= weight_PED[0].abs() * 2.0**-7).all()


@pytest.mark.parametrize("tokens", [0, 70])
def test_what_passes_through_has_its_gradient_added(tokens):
    torch.manual_seed(0)
    x_TD, dx_TD = (torch.randn(tokens, 80, device=DEVICE) for _ in range(2))
    weight_ED, dweights_TK = torch.randn(8, 80, device=DEVICE), torch.randn(tokens, 2, device=DEVICE)
    arguments = (torch.zeros(8, device=DEVICE), torch.tensor(51, device=DEVICE), 2)
    gradients = []
    for through in (True, False):
        leaves = [t.clone().requires_grad_() for t in (x_TD, weight_ED)]
        _, weights_TK, balance, z, _, *rest = route(leaves[0], leaves[1], *arguments, through=through)
        read_TD = rest[0] if through else leaves[0]
        assert torch.equal(read_TD, x_TD)
        ((weights_TK * dweights_TK).sum() + balance + z + (read_TD * dx_TD).sum()).backward()
        gradients.append([leaf.grad for leaf in leaves])
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want)


def test_identical_tokens_and_ties_choose_distinct_experts():
    x_TD, weight_ED = torch.zeros(5, 16, device=DEVICE), torch.ones(8, 16, device=DEVICE)
    ids_TK, weights_TK, *_ = route(x_TD, weight_ED, torch.zeros(8, device=DEVICE), torch.tensor(5, device=DEVICE), 3)
    assert ids_TK.tolist() == [[0, 1, 2]] * 5
    torch.testing.assert_close(weights_TK, torch.full_like(weights_TK, 1 / 3))


@pytest.mark.parametrize("through", [False, True])
def test_compiles_into_one_graph(through):
    x_TD, weight_ED = torch.randn(20, 16, device=DEVICE), torch.randn(4, 16, device=DEVICE, requires_grad=True)
    arguments = (x_TD, weight_ED, torch.zeros(4, device=DEVICE), torch.tensor(13, device=DEVICE), 2, "softmax", True, through)
    compiled = torch.compile(route, backend="aot_eager", fullgraph=True)
    for actual, expected in zip(compiled(*arguments), route(*arguments), strict=True):
        torch.testing.assert_close(actual, expected)
