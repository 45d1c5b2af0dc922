"""The router against hand-worked numbers and a naive reference."""

import math

import pytest
import torch

from bmoe.model.layers import Layout
from bmoe.model.router import Router, layer_key


def layout(slots, real=None, key=None):
    real = slots if real is None else real
    key = None if key is None else torch.tensor(key)
    empty = torch.zeros(0)
    return Layout(empty, empty, torch.tensor([0, real]), real, torch.arange(slots) < real, torch.tensor(real), key)


def router(experts=8, top_k=2, width=6, seed=0, **options):
    module = Router(width, experts, top_k, **options)
    with torch.no_grad():
        module.weight.normal_(generator=torch.Generator().manual_seed(seed))
    return module


def identity(experts, top_k, **options):
    module = Router(experts, experts, top_k, **options)
    with torch.no_grad():
        module.weight.copy_(torch.eye(experts))
    return module


def test_hand_worked_losses():
    """Two real tokens, two experts, k = 1, scores (3/4, 1/4) and (3/5, 2/5): f = (1, 0), P = (0.675, 0.325)."""
    logits = torch.tensor([[math.log(3.0), 0.0], [math.log(1.5), 0.0], [0.0, 9.0]])
    routing = identity(2, 1)(logits, layout(3, real=2))
    assert routing.experts_TK.tolist() == [[0], [0], [2]]
    assert routing.counts_E.tolist() == [2.0, 0.0]
    torch.testing.assert_close(routing.balance, torch.tensor(2 * 0.675))
    torch.testing.assert_close(routing.z, torch.tensor((math.log(4.0) ** 2 + math.log(2.5) ** 2) / 2))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_perfect_balance_is_one(score, top_k):
    """Each token prefers k experts, and all experts are preferred equally often."""
    logits = torch.stack([torch.roll(torch.tensor([1.0] * top_k + [0.0] * (8 - top_k)), shift) for shift in range(8)])
    routing = identity(8, top_k, score=score)(logits, layout(8))
    assert routing.counts_E.tolist() == [float(top_k)] * 8
    torch.testing.assert_close(routing.balance, torch.tensor(1.0))


def test_collapse_costs_the_number_of_experts():
    logits = torch.zeros(5, 8)
    logits[:, 3] = 50.0
    torch.testing.assert_close(identity(8, 1)(logits, layout(5)).balance, torch.tensor(8.0))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("groups", [(None, None), (4, 2)])
def test_choice_and_weights_against_a_naive_reference(score, normalize, groups):
    module = router(experts=8, top_k=3, score=score, normalize_weights=normalize, groups=groups[0], groups_kept=groups[1])
    torch.manual_seed(1)
    module.selection_bias.normal_(0.0, 0.3)
    x = torch.randn(40, 6)
    routing = module(x, layout(40))
    for t in range(40):
        logits = [sum(float(a) * float(b) for a, b in zip(x[t], row, strict=True)) for row in module.weight.detach()]
        total = sum(math.exp(value) for value in logits)
        scores = [math.exp(v) / total if score == "softmax" else 1 / (1 + math.exp(-v)) for v in logits]
        selection = [s + float(b) for s, b in zip(scores, module.selection_bias, strict=True)]
        allowed = list(range(8))
        if groups[0]:
            members = [range(2 * g, 2 * g + 2) for g in range(4)]
            worth = [max(selection[e] for e in m) if score == "softmax" else sum(selection[e] for e in m) for m in members]
            best = sorted(range(4), key=lambda g: -worth[g])[:2]
            allowed = [e for g in best for e in members[g]]
        chosen = sorted(allowed, key=lambda e: -selection[e])[:3]
        weights = [scores[e] / (sum(scores[c] for c in chosen) if normalize else 1.0) for e in chosen]
        assert routing.experts_TK[t].tolist() == chosen
        torch.testing.assert_close(routing.weights_TK[t], torch.tensor(weights), rtol=1e-4, atol=1e-6)


def test_dummy_slots_are_outside_everything():
    module = router()
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(3))
    alone, padded = module(x[:13], layout(13)), module(torch.cat((x[:13], torch.full((7, 6), 100.0))), layout(20, real=13))
    assert padded.experts_TK[13:].eq(8).all() and padded.weights_TK[13:].eq(0).all()
    torch.testing.assert_close(padded.experts_TK[:13], alone.experts_TK)
    for name in ("balance", "z", "counts_E"):
        torch.testing.assert_close(getattr(padded, name), getattr(alone, name), msg=name)
    nothing = module(x, layout(20, real=0))
    assert nothing.balance == 0 and nothing.z == 0 and nothing.counts_E.eq(0).all()


def test_dummy_slots_receive_no_gradient():
    module = router()
    x = torch.randn(20, 6, requires_grad=True)
    routing = module(x, layout(20, real=13))
    (routing.balance + routing.z + routing.weights_TK.square().sum()).backward()
    assert x.grad[13:].eq(0).all() and x.grad[:13].abs().sum(1).gt(0).all()


def test_balance_gradient_lowers_the_busy_expert():
    """A descent step on the balance loss alone moves probability away from the overloaded expert."""
    module = identity(4, 1)
    x = torch.tensor([[2.0, 0.0, 0.0, 0.0]] * 3 + [[0.0, 2.0, 0.0, 0.0]])
    x.requires_grad_()
    module(x, layout(4)).balance.backward()
    assert (x.grad[:, 0] > 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_router_is_fp32_whatever_surrounds_it(dtype):
    module = router(experts=64, top_k=8, width=32)
    x = torch.randn(100, 32).to(dtype)
    exact = module(x.float(), layout(100))
    with torch.autocast("cpu", dtype=dtype):
        cast = module.to(dtype)(x, layout(100))
    assert module.weight.dtype == torch.float32 and module.selection_bias.dtype == torch.float32
    assert cast.weights_TK.dtype == cast.balance.dtype == torch.float32
    torch.testing.assert_close(cast[:5], exact[:5], rtol=0, atol=0)


def test_bias_moves_the_choice_and_not_the_weights():
    module = identity(4, 1, score="sigmoid", normalize_weights=False)
    x = torch.tensor([[1.0, 0.9, 0.0, 0.0]])
    module.selection_bias[1] = 0.5
    routing = module(x, layout(1))
    assert routing.experts_TK.item() == 1
    torch.testing.assert_close(routing.weights_TK.item(), 1 / (1 + math.exp(-0.9)))


def test_bias_update_follows_the_sign_of_the_load():
    module = router(experts=4)
    module.update_bias(torch.tensor([10.0, 0.0, 4.0, 2.0]), 0.25)
    assert module.selection_bias.tolist() == [-0.25, 0.25, 0.0, 0.25]


def test_bias_updates_balance_a_skewed_router():
    module = router(experts=8, top_k=2, width=16, score="sigmoid")
    with torch.no_grad():
        module.weight[0] += 1.0
    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(0)) + 0.5
    before = module(x, layout(512)).counts_E
    for _ in range(600):
        module.update_bias(module(x, layout(512)).counts_E, 0.003)
    after = module(x, layout(512)).counts_E
    assert before.max() / before.mean() > 2.0 and after.max() / after.mean() < 1.2


def noise(module, slots=200, key=7):
    return module._noise(torch.zeros(slots, 6), torch.tensor(key))


def test_layers_draw_different_noise():
    keys = [int(layer_key(torch.tensor(key), layer)) for key in range(50) for layer in range(50)]
    assert len(set(keys)) == 2500 and all(0 <= key < 2**32 for key in keys)


def test_jitter_is_a_function_of_key_slot_and_channel():
    module = router(jitter=0.1)
    once = noise(module)
    assert torch.equal(once, noise(module)) and not torch.equal(once, noise(module, key=8))
    assert torch.equal(once[:50], noise(module, slots=50))
    assert (once - 1).abs().max() <= 0.1 and abs(float(once.mean()) - 1) < 0.01
    assert abs(float((once - 1).std()) - 0.1 / math.sqrt(3)) < 0.005
    assert once.unique().numel() > 0.99 * once.numel()


def test_jitter_is_for_training_only_and_needs_a_key():
    module, plain, x = router(jitter=0.5), router(), torch.randn(30, 6)
    torch.testing.assert_close(module.eval()(x, layout(30)), plain(x, layout(30)), rtol=0, atol=0)
    assert not torch.equal(module.train()(x, layout(30, key=1)).weights_TK, plain(x, layout(30)).weights_TK)
    with pytest.raises(ValueError, match="jitter_key"):
        module(x, layout(30))


def test_extreme_logits_stay_finite():
    for score in ("softmax", "sigmoid"):
        module = identity(4, 2, score=score)
        x = torch.tensor([[-1e4, -2e4, -3e4, 1e4], [-1e4] * 4, [1e4] * 4], requires_grad=True)
        routing = module(x, layout(3))
        (routing.balance + routing.weights_TK.sum()).backward()
        assert routing.weights_TK.isfinite().all() and x.grad.isfinite().all()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_the_kernels_twin_defines_the_same(score, normalize):
    """The fused kernels are held to their own plain twin (tests/kernels); that twin is this router."""
    reference = pytest.importorskip("bmoe.kernels.router").route_reference
    module = router(experts=8, top_k=3, score=score, normalize_weights=normalize)
    module.selection_bias.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(0))
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(1))
    twin = reference(x, module.weight, module.selection_bias, torch.tensor(41), 3, score, normalize)
    torch.testing.assert_close(tuple(module(x, layout(50, real=41)))[:5], twin)
