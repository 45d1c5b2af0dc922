"""The global order: every unit once an epoch, crops over all windows, a state of two integers."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.data.sampler import Position, Sampler


class Lengths:
    def __init__(self, lengths, clusters=None):
        self.lengths = np.array(lengths, np.int64)
        self.clusters = None if clusters is None else np.array(clusters)


START = Position(0, 0)


def take(sampler, slots, count, position=START):
    return list(itertools.islice(sampler.batches(position, slots), count))


def test_an_epoch_is_every_sequence_once_in_a_new_order():
    sampler = Sampler(Lengths([10] * 50), 64, seed=3)
    first, second = sampler.crops(0, 0, 50), sampler.crops(1, 0, 50)
    assert sorted(first.sequence) == sorted(second.sequence) == list(range(50))
    assert (first.sequence != second.sequence).any()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=60), st.integers(64, 400), st.integers(0, 5))
def test_batches_are_the_global_order_cut_greedily(lengths, slots, seed):
    sampler = Sampler(Lengths(lengths), 64, seed)
    batches = take(sampler, slots, 12)
    stream = []
    for crops, _ in batches:
        stream += list(zip(crops.epoch.tolist(), crops.index.tolist(), crops.slots.tolist(), strict=True))
        assert crops.slots.sum() <= slots
    for (this, _), (after, _) in itertools.pairwise(batches):
        assert this.slots.sum() + after.slots[0] > slots  # greedy: the next crop would not have fitted
    expected = [(e, i) for e in range(len(stream)) for i in range(len(lengths))][: len(stream)]
    assert [(e, i) for e, i, _ in stream] == expected


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10))
def test_any_boundary_resumes_the_same_stream(cut):
    sampler = Sampler(Lengths(np.random.default_rng(0).integers(2, 300, 40)), 128, 1)
    batches = take(sampler, 512, 25)
    again = take(sampler, 512, 10, batches[cut][1])
    for (a, _), (b, _) in zip(batches[cut + 1 :], again, strict=False):
        assert all((x == y).all() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("length", [1021, 1022, 1023, 1024, 1025, 3000])
def test_crops_are_uniform_over_all_windows_with_both_ends(length):
    # The string is <cls> + length + <eos>; windows of 1024 slots start at 0 .. length + 2 - 1024, all equally likely.
    sampler = Sampler(Lengths([length]), 1024, 0)
    starts = np.array([sampler.crops(e, 0, 1).start[0] for e in range(3000)])
    slots = sampler.crops(0, 0, 1).slots[0]
    windows = max(length + 2 - 1024, 0) + 1
    assert slots == min(length + 2, 1024)
    assert starts.min() == 0 and starts.max() <= windows - 1
    if windows < 100:
        counts = np.bincount(starts, minlength=windows)
        assert (counts > 0).all() and counts.max() < 3000 / windows * 1.3


def test_cluster_sampling_draws_a_cluster_then_a_member():
    clusters = [7, 7, 7, 9, 4, 7]
    sampler = Sampler(Lengths([5] * 6, clusters), 64, 0, "cluster")
    seen = np.zeros(6)
    for epoch in range(600):
        chosen = sampler.crops(epoch, 0, 10).sequence
        assert sorted(clusters[s] for s in chosen) == [4, 7, 9]
        seen[chosen] += 1
    assert seen[3] == seen[4] == 600
    assert (np.abs(seen[[0, 1, 2, 5]] - 150) < 60).all()


def test_long_records_are_consecutive_windows():
    sampler = Sampler(Lengths([250, 30]), 128, 0, window=100, overlap=20)
    crops = sampler.crops(0, 0, 10)
    windows = sorted(zip(crops.sequence.tolist(), crops.offset.tolist(), crops.tokens.tolist(), crops.last.tolist(), strict=True))
    # 250 = windows at 0, 80, 160 (stride 80), the third ends the record
    assert windows == [(0, 0, 100, False), (0, 80, 100, False), (0, 160, 90, True), (1, 0, 30, True)]
    covered = {p for s, o, t, _ in windows if s == 0 for p in range(o, o + t)}
    assert covered == set(range(250))
