"""Jumps of the loss and checksums; replicas that drift are in tests/parallel/test_guards.py."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from bmoe.training.guards import Spikes, checksum


@given(st.integers(0, 99), st.integers(0, 30), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_any_flipped_bit_changes_the_checksum(place, bit, dtype):
    bits = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}[dtype]
    x = torch.randn(100, generator=torch.Generator().manual_seed(0)).to(dtype)
    y = x.clone()
    y.view(bits)[place] ^= 1 << (bit % (8 * y.element_size() - 1))
    assert checksum([torch.zeros(3), x]) != checksum([torch.zeros(3), y])


def test_a_jump_is_noted_and_a_normal_descent_is_not():
    noise = np.random.default_rng(0)
    spikes, losses = Spikes(), 2.0 + np.exp(-np.arange(400) / 50) + noise.normal(0, 0.02, 400)
    assert [spikes.note(step, float(loss)) for step, loss in enumerate(losses)] == [None] * 400
    assert spikes.note(400, float("nan")) is None
    assert spikes.note(401, 2.02) is None
    assert "step 402: the loss jumped to 3.100" in spikes.note(402, 3.1)


def test_the_first_steps_are_no_jumps():
    spikes = Spikes()
    assert [spikes.note(step, loss) for step, loss in enumerate([3.0, 9.0, 3.0, 30.0])] == [None] * 4
