"""Emulated GEMMs against the recipe written out by hand, per expert, and the errors it must give."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from bmoe import recipe as recipes
from bmoe.errors import RequestError
from bmoe.model.experts import build_experts
from bmoe.model.transformer import Transformer, Vocabulary
from bmoe.precision import block, current, mxfp8, nvfp4
from bmoe.precision.emulate import KINDS, EmulatedLinear, EmulatedProduct, _each_row, _expert_weight, emulate, low_precision_layers
from bmoe.precision.float8 import E5M2
from bmoe.recipe import PrecisionSection, shipped_directory

D, F, E, K, T = 96, 64, 4, 2, 75


def by_hand(x, w, dy, kind):
    """y, dx, dw of one linear layer under the recipe's table, without the code under test."""
    if kind == "mxfp8":

        def q(t, axis):
            return mxfp8.quantize_dequantize(t, axis)

        wr, wc, dr, dc = q(w, -1), q(w, -2), q(dy, -1), q(dy, -2)
        xr, xc = q(x, -1), q(x, -2)
    elif kind == "fp8_block":

        def q(t, axis):
            return block.quantize_dequantize(t, axis)

        wr = wc = q(w, None)
        xr, xc, dr, dc = q(x, -1), q(x, -2), q(dy, -1), q(dy, -2)
    elif kind == "nvfp4":

        def columns(t, stochastic):
            t = functional.pad(t, (0, 0, 0, -len(t) % 16))
            t = (t.T.reshape(t.shape[1], -1, 16) @ nvfp4.hadamard(t.device, t.dtype)).flatten(1).T.contiguous()
            return q(t, -2, stochastic)

        def q(t, axis, stochastic=False):
            noise = nvfp4.noise_of(t, torch.arange(len(t))) if stochastic else None
            return nvfp4.dequantize(*nvfp4.quantize(t, axis, noise), axis)

        wr = wc = q(w, None)
        xr, xc, dr, dc = q(x, -1), columns(x, False), q(dy, -1, True), columns(dy, True)
    elif kind == "fp8_row":
        wr = wc = current.quantize_dequantize(w)
        xr, dr = (torch.stack([current.quantize_dequantize(row) for row in t]) for t in (x, dy))
        xc, dc = x, dy
    else:
        wr = wc = current.quantize_dequantize(w)
        xr = xc = current.quantize_dequantize(x)
        dr = dc = current.quantize_dequantize(dy, E5M2)
    return xr @ wr.T, dr @ wc, dc.T @ xc


def spread(*shape, generator):
    """Normal values times powers of two over 24 orders: blocks lose different values along rows than down columns."""
    exponents = torch.randint(-12, 12, shape, generator=generator)
    return torch.ldexp(torch.randn(*shape, generator=generator), exponents)


def inputs(seed=0, rows=T):
    g = torch.Generator().manual_seed(seed)
    return spread(rows, D, generator=g), spread(F, D, generator=g), spread(rows, F, generator=g)


@pytest.mark.parametrize("kind", KINDS)
def test_linear_is_the_recipe(kind):
    x, w, dy = inputs()
    linear = nn.Linear(D, F, bias=True)
    linear.weight.data.copy_(w)
    emulated = EmulatedLinear(linear, kind)
    assert emulated.weight is linear.weight and emulated.state_dict().keys() == linear.state_dict().keys()
    x.requires_grad_()
    y = emulated(x)
    y.backward(dy)
    expected = by_hand(x.detach(), w, dy, kind)
    for got, want in zip((y - linear.bias, x.grad, linear.weight.grad), expected, strict=True):
        assert (got - want).norm() < 2e-6 * want.norm()
    assert torch.allclose(linear.bias.grad, dy.sum(0))
    # The direct product is visibly different, so agreement above means something.
    assert (expected[0] - x.detach() @ w.T).norm() > 1e-3 * expected[0].norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(20, 30, 0, 25), (75, 0, 0, 0), (1, 1, 1, 1), (0, 0, 0, 0), (32, 33, 2, 0)])
def test_grouped_product_rounds_each_expert_alone(kind, sizes):
    experts = build_experts("grouped", E, D, F // 2)
    product = EmulatedProduct(kind, experts.matmul)
    x, _, dy = inputs(1)
    w = spread(E, F, D, generator=torch.Generator().manual_seed(2)) * torch.tensor([0.1, 1, 10, 0.01])[:, None, None]
    offsets = torch.tensor(sizes).cumsum(0).int()
    end = int(offsets[-1])
    x[end:] = 0
    x.requires_grad_(), w.requires_grad_()
    y = product(x, w, offsets)
    mask = torch.arange(T)[:, None] < end
    torch.where(mask, y, 0).backward(dy)
    start = 0
    for e, size in enumerate(sizes):
        rows = slice(start, start + size)
        start += size
        if size == 0:
            assert not w.grad[e].any()
            continue
        want = by_hand(x.detach()[rows], w.detach()[e], dy[rows], kind)
        for got, right in zip((y[rows], x.grad[rows], w.grad[e]), want, strict=True):
            assert (got - right).norm() < 2e-6 * right.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_loop_and_grouped_experts_agree(kind):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(T, D, generator=g)
    ids = torch.stack([torch.randperm(E - 1, generator=g)[:K] for _ in range(T)])  # the last expert gets nothing
    ids[-5:] = E
    weights = torch.rand(T, K, generator=g)
    results = []
    for name in ("loop", "grouped"):
        experts = build_experts(name, E, D, F)
        torch.manual_seed(4)
        experts.reset_parameters()
        holder = nn.Module()
        holder.blocks = nn.ModuleList([experts])
        assert emulate(holder, PrecisionSection(kind=kind, emulate=True)) == ["blocks.0."]
        inp = x.clone().requires_grad_()
        y = experts(inp, ids, weights)
        y.square().sum().backward()
        results.append((y, inp.grad, experts.gate_up.grad, experts.down.grad))
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6 * b.detach().abs().max().item())
    assert not results[0][0][-5:].any() and not results[1][1][-5:].any()
    assert not results[1][2][E - 1].any()


def test_row_wise_values_are_those_of_the_kernels():
    """E4M3 codes and scales of `kernels/fp8.py`, whose plain twin its own tests hold against the kernel."""
    pytest.importorskip("triton")
    from bmoe.kernels import fp8

    x = inputs(6)[0].bfloat16()
    x[3] = 0
    q, scale = fp8.quantize_rows_reference(x)
    rounded = _each_row(x)
    assert torch.equal(rounded.values.float(), q.float()) and torch.equal(rounded.inverse, scale)
    q, _, scale = fp8.quantize_weight_reference(x.view(3, 25, D))
    rounded = _expert_weight(x.view(3, 25, D), "fp8_row")
    assert torch.equal(rounded.values.float(), q.float()) and torch.equal(rounded.inverse, scale)
    x[5, 5] = torch.inf
    assert EmulatedProduct("fp8_row", functional.linear)(x, x)[5].isinf().any()  # not cut to 448, as one of a tensor's scale is


@pytest.mark.parametrize("path", sorted(shipped_directory().glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("kind", KINDS)
def test_every_shipped_recipe_can_be_emulated(path, kind):
    """All linear layers of the blocks but the routers, in every MoE layer and in dense ones."""
    recipe = recipes.load(
        path, [f"precision.kind={kind}", "precision.emulate=true", "precision.emulate_linears=true", "backend.experts=grouped"]
    )
    with torch.device("meta"):
        model = Transformer(recipe.model, Vocabulary(33, 1, 32), recipe.backend)
    changed = emulate(model, recipe.precision)
    moe = recipe.model.moe
    experts = [name for name in changed if name.endswith("experts")]
    assert len(experts) == (recipe.model.layers - moe.dense_layers if moe else 0)
    linears = [name for name, module in model.blocks.named_modules() if isinstance(module, nn.Linear)]
    assert set(changed) == {*experts, *(f"blocks.{name}" for name in linears if "router" not in name)}


def test_bf16_rounds_to_the_same_values():
    x, w, dy = inputs(5)
    x, w, dy = x.bfloat16(), w.bfloat16(), dy.bfloat16()
    x.requires_grad_()
    y = EmulatedProduct("mxfp8", functional.linear)(x, w)
    y.backward(dy)
    wide = by_hand(x.detach().float(), w.float(), dy.float(), "mxfp8")
    assert torch.allclose(y.float(), wide[0], rtol=2**-7, atol=1e-2)
    assert torch.allclose(x.grad.float(), wide[1], rtol=2**-7, atol=1e-2)


class Toy(nn.Module):
    def __init__(self, layers=4, kind="grouped"):
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(layers):
            layer = nn.Module()
            layer.linear = nn.Linear(32, 32)
            layer.experts = build_experts(kind, 2, 32, 32)
            self.blocks.append(layer)


def test_first_and_last_layers_and_linears_follow_the_recipe():
    section = PrecisionSection(kind="mxfp8", high_precision_layers={"first": 1, "last": 1})
    assert list(low_precision_layers(4, section)) == [1, 2]
    assert emulate(Toy(), section) == ["blocks.1.experts", "blocks.2.experts"]
    model = Toy()
    keys = list(model.state_dict())
    everything = section.model_copy(update={"emulate_linears": True})
    assert emulate(model, everything) == ["blocks.1.linear", "blocks.1.experts", "blocks.2.linear", "blocks.2.experts"]
    assert list(model.state_dict()) == keys
    assert type(model.blocks[0].linear) is nn.Linear and type(model.blocks[1].linear) is EmulatedLinear


def test_what_cannot_be_emulated_is_refused():
    with pytest.raises(RequestError, match="bf16 cannot be emulated"):
        emulate(Toy(), PrecisionSection(kind="bf16"))
    with pytest.raises(RequestError, match="no layer has experts"):
        emulate(Toy(), PrecisionSection(kind="mxfp8", high_precision_layers={"first": 4}))
    model = Toy()
    model.blocks[0].experts = fused = nn.Module()
    fused.gate_up = nn.Parameter(torch.zeros(1))
    with pytest.raises(RequestError, match="backend.experts"):
        emulate(model, PrecisionSection(kind="mxfp8"))


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
@pytest.mark.no_cover
def test_compiles_into_one_graph(kind):
    linear = EmulatedLinear(nn.Linear(64, 32, bias=False), kind)
    x = torch.randn(40, 64)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), linear(x))


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
@pytest.mark.no_cover
def test_grouped_experts_compile_into_one_graph(kind):
    experts = build_experts("grouped", E, D, F).bfloat16()
    holder = nn.Module()
    holder.blocks = nn.ModuleList([experts])
    emulate(holder, PrecisionSection(kind=kind, emulate=True))
    x = torch.randn(40, D).bfloat16().requires_grad_()
    ids, weights = torch.randint(0, E + 1, (40, K)), torch.rand(40, K)
    gradients = []
    for step in (experts, torch.compile(experts, fullgraph=True, backend="aot_eager")):
        x.grad = None
        step(x, ids, weights).float().square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("moe", [None, {"experts": 4, "top_k": 2, "expert_width": 32}])
def test_all_linears_of_a_model_are_rounded_and_still_train(moe):
    from bmoe.data.alphabet import protein
    from bmoe.recipe import BackendSection, ModelSection

    letters = protein()
    model = Transformer(
        ModelSection(layers=2, width=64, heads=4, ffn_width=96 if moe is None else None, moe=moe),
        Vocabulary(letters.size, letters.pad_id, letters.mask_id),
        BackendSection(attention="sdpa", experts="grouped", compile=False),
    )
    model.initialize(0)
    inputs = dict(
        tokens_T=torch.arange(40) % 20 + 4, positions_T=torch.arange(40) % 20, segments_T=torch.arange(40) // 20,
        cu_seqlens=torch.tensor([0, 20, 40], dtype=torch.int32), max_seqlen=20, real_tokens=40,
    )  # fmt: skip
    exact = model(**inputs).logits
    changed = emulate(model, PrecisionSection(kind="mxfp8", emulate=True, emulate_linears=True))
    assert "blocks.0.attention.qkv" in changed and not any("router" in name or "head" in name for name in changed)
    logits = model(**inputs).logits
    assert 0.005 < (logits - exact).norm() / exact.norm() < 0.15
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
