"""AdamW: torch's own as the oracle, masters without loss, clipping, skipping and accumulation."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bmoe.kernels.adamw import adamw_torch, join_master, split_master
from bmoe.recipe import OptimizerSection, ScheduleSection
from bmoe.training.optimizer import AdamW, learning_rate


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
def test_split_masters_lose_nothing(values):
    x = torch.tensor(values, dtype=torch.float32)
    weight, low = split_master(x)
    assert torch.equal(join_master(weight, low).view(torch.int32), x.view(torch.int32))
    finite = weight.float().isfinite()  # the very largest fp32 round to infinity in bf16, as torch's own cast does
    assert ((weight.float() - x).abs()[finite] <= x.abs()[finite] * 2.0**-8 + 2.0**-133).all()


def test_split_is_the_nearest_bf16_but_for_ties():
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    weight, _ = split_master(x)
    differs = weight != x.bfloat16()
    assert (x.view(torch.int32)[differs] & 0xFFFF == 0x8000).all()


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def torch_adamw(net, section):
    matrices = [p for p in net.parameters() if p.ndim > 1]
    vectors = [p for p in net.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": section.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=section.betas, eps=section.eps)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_torch_adamw_with_decay_on_matrices_only(dtype, clip):
    section = OptimizerSection(clip_norm=clip, weight_decay=0.1)
    ours, theirs = network().to(dtype), network().to(dtype)
    a, b = AdamW(ours.named_parameters(), section), torch_adamw(theirs, section)
    for step in range(6):
        x = torch.randn(5, 8, dtype=dtype, generator=torch.Generator().manual_seed(step))
        for net in (ours, theirs):
            net(x).square().sum().backward()
        gradients = [p.grad for p in theirs.parameters()]
        expected = torch.cat([g.flatten() for g in gradients]).norm()
        torch._foreach_mul_(gradients, min(1.0, clip / expected.item()) if clip else 1.0)
        norm = a.step(1e-2)
        b.step()
        b.zero_grad()
        assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (p - q).abs().max() < tolerance


def test_masters_follow_the_fp32_run_where_bf16_weights_alone_would_stand_still():
    """A step of 1e-6 on weights near 1 is lost in bf16; the masters keep it."""
    net = nn.Linear(4, 4, bias=False)
    net.weight.data.fill_(1.0)
    net.bfloat16()
    optimizer = AdamW(net.named_parameters(), OptimizerSection(weight_decay=0.0, clip_norm=None))
    for _ in range(20):
        net.weight.grad = torch.ones_like(net.weight)
        optimizer.step(1e-6)
    assert optimizer.master("weight").mean().item() == pytest.approx(1.0 - 20e-6, abs=2e-7)


def test_accumulation_sums_in_fp32():
    net = nn.Linear(1, 1, bias=False).bfloat16()
    optimizer = AdamW(net.named_parameters(), OptimizerSection(), accumulate=True)
    for size in (256.0, 1.0, 1.0):  # 256 + 1 is 256 in bf16
        (net.weight * size).sum().backward()
    assert optimizer.gradient("weight").item() == 258.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_changes_nothing_and_is_counted(bad):
    net = network()
    optimizer = AdamW(net.named_parameters(), OptimizerSection())
    reference = network()
    good = AdamW(reference.named_parameters(), OptimizerSection())
    for net_, optimizer_, poison in ((net, optimizer, True), (reference, good, False)):
        for step in range(4):
            if poison and step == 2:
                net_(torch.ones(1, 8)).sum().backward()
                net_[0].weight.grad[0, 0] = bad
                optimizer_.step(1e-2)
                assert optimizer_.skipped_in_a_row.item() == 1
            net_(torch.full((1, 8), float(step))).square().sum().backward()
            optimizer_.step(1e-2)
    assert optimizer.skipped.item() == 1 and optimizer.skipped_in_a_row.item() == 0
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), reference.parameters(), strict=True))


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("batches", [1, 3])
def test_the_kernels_over_all_parameters_step_as_the_plain_twin(batches, held, monkeypatch):
    """bf16 and fp32 weights, several batches a step, a step that is skipped, and gradients that are not contiguous."""
    kernels = pytest.importorskip("bmoe.kernels.adamw_triton")
    for name, size in (("BLOCK", 16), ("CHUNK", 64), ("PROGRAMS", 3)):
        monkeypatch.setattr(kernels, name, size)
    nets, optimizers = [], []
    for fused in (True, False):
        net = network()
        net[0].bfloat16()
        optimizer = AdamW(net.named_parameters(), OptimizerSection(clip_norm=0.5), accumulate=batches > 1)
        optimizer.fused = optimizer._fuse() if fused else None
        if held:
            optimizer.hold_gradients()
        nets.append(net)
        optimizers.append(optimizer)
    for step in range(5):
        norms = []
        for net, optimizer in zip(nets, optimizers, strict=True):
            for batch in range(batches):
                x = torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + batch)) + (math.nan if step == 2 else 0.0)
                net[2](net[0](x.bfloat16()).tanh().float()).square().sum().backward()
            if batches == 1:
                net[2].weight.grad = net[2].weight.grad.T.contiguous().T
            norms.append(float(optimizer.step(1e-2)))
            assert all(not s.any() for s in optimizer.sums.values())
            assert not held or batches == 1 or not net[2].weight.grad.any()
        assert norms[0] == pytest.approx(norms[1], rel=1e-6, nan_ok=True)
    for name in optimizers[0].parameters:
        torch.testing.assert_close(*(optimizer.master(name) for optimizer in optimizers), rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(optimizers[0].v[name], optimizers[1].v[name], rtol=1e-5, atol=1e-12)
    assert [int(optimizer.skipped) for optimizer in optimizers] == [1, 1]


def test_a_parameter_without_gradient_is_an_error():
    optimizer = AdamW(network().named_parameters(), OptimizerSection())
    with pytest.raises(RuntimeError, match="has no gradient"):
        optimizer.step(1e-2)


def test_bf16_moments_take_half_the_memory():
    optimizer = AdamW(network().named_parameters(), OptimizerSection(state_dtype="bf16"))
    assert all(m.dtype == torch.bfloat16 for m in optimizer.m.values())


def test_one_step_by_hand():
    """First step of Adam: m = (1-b1) g, v = (1-b2) g^2, both corrections cancel, so the update is lr sign(g)."""
    master, m, v = torch.tensor([1.0, -2.0]), torch.zeros(2), torch.zeros(2)
    scalars = torch.tensor([1.0, 0.1, 1 - 0.9, math.sqrt(1 - 0.98), 1.0])
    adamw_torch(master, torch.tensor([3.0, -0.5]), m, v, scalars, 0.9, 0.98, 0.0, 0.5)
    assert torch.allclose(master, torch.tensor([1.0 * 0.95 - 0.1, -2.0 * 0.95 + 0.1]), atol=1e-6)


def test_schedule_is_esm2s():
    """Linear warm-up over 2,000 steps to 4e-4, then linear to a tenth at the end."""
    schedule = ScheduleSection(warmup_steps=2000, decay="linear", final_fraction=0.1)
    assert learning_rate(1000, 4e-4, schedule, 500_000) == pytest.approx(2e-4)
    assert learning_rate(2000, 4e-4, schedule, 500_000) == pytest.approx(4e-4)
    assert learning_rate(251_000, 4e-4, schedule, 500_000) == pytest.approx(2.2e-4)
    assert learning_rate(500_000, 4e-4, schedule, 500_000) == pytest.approx(4e-5)
    assert learning_rate(10, 1.0, ScheduleSection(warmup_steps=100), 10) == pytest.approx(0.1)
    assert learning_rate(55, 1.0, ScheduleSection(warmup_steps=10, decay="cosine", final_fraction=0.0), 100) == pytest.approx(0.5)
    assert learning_rate(99, 1.0, ScheduleSection(warmup_steps=0, decay="constant"), 100) == 1.0
