"""Packed attention against softmax written out in float64, and the rotary embedding's defining properties."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.errors import RequestError
from bmoe.model.attention import Rotary, attention, rotate


def definition(q_THd, k_TGd, v_TGd, bounds, causal):
    """softmax(q k^T / sqrt(d)) v, one sequence and head at a time; zero beyond the last bound."""
    rows = []
    group = q_THd.shape[1] // k_TGd.shape[1]
    for a, b in zip(bounds, bounds[1:], strict=False):
        heads = []
        for h in range(q_THd.shape[1]):
            q, k, v = q_THd[a:b, h], k_TGd[a:b, h // group], v_TGd[a:b, h // group]
            scores = q @ k.T / math.sqrt(q.shape[1])
            if causal:
                scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
            heads.append(scores.softmax(-1) @ v)
        rows.append(torch.stack(heads, 1))
    return torch.cat([*rows, torch.zeros_like(q_THd[bounds[-1] :])])


def inputs(slots, heads, kv_heads, dim, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(slots, n, dim, generator=generator).to(dtype).requires_grad_() for n in (heads, kv_heads, kv_heads)]


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 40), st.just(7)), min_size=1, max_size=6),  # runs of equal lengths too
    tail=st.integers(0, 5),
    heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    causal=st.booleans(),
    dim=st.sampled_from([2, 8, 16]),
)
def test_packed_attention_is_softmax_within_each_sequence(lengths, tail, heads, causal, dim):
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    slots = int(bounds[-1]) + tail
    if slots == 0:
        return
    q, k, v = inputs(slots, *heads, dim)
    out = attention(q, k, v, bounds, 64, causal)
    expected = definition(q, k, v, bounds.tolist(), causal)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    upstream = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), upstream)
    for grad, want in zip(got, torch.autograd.grad(expected, (q, k, v), upstream, allow_unused=True), strict=True):
        torch.testing.assert_close(grad, torch.zeros_like(grad) if want is None else want, rtol=1e-9, atol=1e-9)


def test_tail_has_zero_output_and_gradient():
    q, k, v = inputs(10, 2, 2, 8)
    out = attention(q, k, v, torch.tensor([0, 6], dtype=torch.int32), 6, False)
    grads = torch.autograd.grad(out.square().sum() + out[6:].sum(), (q, k, v))
    assert not out[6:].any() and not any(g[6:].any() for g in grads)


def test_gpu_kernel_is_refused_where_it_cannot_run():
    q, k, v = inputs(4, 2, 2, 8)
    with pytest.raises(RequestError, match="varlen needs a GPU"):
        attention(q, k, v, torch.tensor([0, 4], dtype=torch.int32), 4, False, kind="varlen")


def rotary(dim=16, base=10000.0):
    module = Rotary(dim, base)
    module.initialize()
    return module


def test_scores_depend_on_the_distance_of_positions_only():
    turn = rotary()
    q, k = torch.randn(1, 3, 16).expand(50, 3, 16), torch.randn(1, 3, 16).expand(50, 3, 16)
    cos, sin = turn(torch.arange(50))
    scores = torch.einsum("thd,shd->hts", rotate(q, cos, sin), rotate(k, cos, sin))
    for distance in (0, 1, 17):
        diagonal = scores.diagonal(distance, 1, 2)
        torch.testing.assert_close(diagonal, diagonal[:, :1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


def test_rotation_by_hand():
    """Pair (0, 1) of a two-dimensional head at position 3 turns by 3 radians."""
    cos, sin = rotary(2)(torch.tensor([3]))
    turned = rotate(torch.tensor([[[1.0, 2.0]]]), cos, sin)
    expected = [math.cos(3) - 2 * math.sin(3), math.sin(3) + 2 * math.cos(3)]
    torch.testing.assert_close(turned.flatten(), torch.tensor(expected))


def test_rotation_gradient():
    turn = rotary(8).double()
    cos, sin = turn(torch.arange(5))
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), torch.randn(5, 2, 8, dtype=torch.float64, requires_grad=True))


def test_frequencies_are_never_narrowed():
    """bf16 holds 8 bits: position 1000 would turn by a whole radian too much."""
    turn = rotary()
    assert turn.bfloat16().inverse_frequency.dtype == torch.float32
    assert turn.half().inverse_frequency.dtype == torch.float32
    assert turn.double().inverse_frequency.dtype == torch.float64
