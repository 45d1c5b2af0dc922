"""Packing: whole crops, no padding between them, one dummy tail, positions from 0."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe import recipe as recipes
from bmoe.data.loader import TrainingLoader, build_batch, build_sampler, validation_batches
from bmoe.data.packing import SEGMENT_MULTIPLE, pack
from bmoe.data.sampler import Position, Sampler
from tests_fakes import Memory, proteins


def recipe(**data):
    return recipes.validate(
        {
            "data": {"max_length": 64, "tokens_per_batch": 256, **data},
            "training": {"tokens_per_step": 1024},
            "model": {"width": 32, "heads": 2, "moe": None},
        }
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000))
def test_every_crop_stands_in_its_slots(seed):
    shards = Memory(proteins(20, seed, 150))
    letters = shards.alphabet
    for crops, _ in [next(Sampler(shards, 64, seed).batches(Position(0, 0), 256))]:
        packed = pack(shards, crops, 256, seed)
        at = 0
        for s, size in enumerate(crops.slots):
            whole = [letters.cls_id, *shards.sequence(crops.sequence[s]).tolist(), letters.eos_id]
            start = crops.start[s]
            assert packed.tokens_T[at : at + size].tolist() == whole[start : start + size]
            assert packed.positions_T[at : at + size].tolist() == list(range(size))
            assert (packed.segments_T[at : at + size] == s).all()
            at += size
        assert at == packed.real and (packed.tokens_T[at:] == letters.pad_id).all()
        bounds = packed.cu_seqlens
        assert bounds.size % SEGMENT_MULTIPLE == 0 and bounds[0] == 0 and bounds[-1] == 256
        assert bounds[1 : crops.slots.size + 1].tolist() == np.cumsum(crops.slots).tolist()
        assert (np.diff(bounds) >= 0).all()


def test_last_window_shows_eos_and_middle_windows_show_neither():
    shards = Memory(["A" * 100])
    seen = set()
    for epoch in range(300):
        crops = Sampler(shards, 32, 0).crops(epoch, 0, 1)
        tokens = pack(shards, crops, 32, 0).tokens_T
        seen.add((bool((tokens == 0).any()), bool((tokens == 2).any())))
    assert seen == {(True, False), (False, True), (False, False)}


def test_reverse_complement_is_biopythons():
    from Bio.Seq import Seq

    text = "ACGTRYKMSWBDHVNACCGT"
    shards = Memory([text], "dna")
    both = set()
    for epoch in range(20):
        packed = pack(shards, Sampler(shards, 64, 0).crops(epoch, 0, 1), 64, 0, reverse_complement=True)
        both.add(shards.alphabet.decode(packed.tokens_T[1 : 1 + len(text)]))
    assert both == {text, str(Seq(text).reverse_complement())}


def test_batches_do_not_depend_on_world_size():
    shards, r = Memory(proteins(40, 1)), recipe()
    alone, shared = [], {}
    with TrainingLoader(shards, r, Position(0, 0)) as loader:
        for _ in range(3):
            step = loader.next()
            alone += [b.tokens_T for b in step.batches]
            position = step.after
    for rank in range(2):
        with TrainingLoader(shards, r, Position(0, 0), rank, 2) as loader:
            for step in range(3):
                got = loader.next()
                for number, batch in enumerate(got.batches):
                    shared[step * 4 + number * 2 + rank] = batch.tokens_T
            assert got.after == position
    assert all(torch.equal(alone[b], shared[b]) for b in range(12))


def test_select_rows_are_the_targets():
    shards, r = Memory(proteins(20, 2)), recipe()
    crops, _ = next(build_sampler(shards, r, 0).batches(Position(0, 0), 256))
    batch = build_batch(shards, crops, r, 0)
    wanted = torch.nonzero(batch.targets_T >= 0).squeeze(1)
    assert torch.equal(batch.select_M[: len(wanted)], wanted)
    assert torch.equal(batch.picked_M[: len(wanted)], batch.targets_T[wanted])
    assert (batch.picked_M[len(wanted) :] == -100).all() and batch.targets == len(wanted)
    assert batch.residues == int((crops.slots - (crops.start == 0) - (crops.start + crops.slots == crops.tokens + 2)).sum())


@pytest.mark.parametrize("slots", [64, 128, 1000])
def test_validation_asks_for_the_same_residues_at_any_batch_size_and_seed(slots):
    shards = Memory(proteins(30, 3))

    def asked(r, all_mask=False):
        found = []
        for batch in validation_batches(shards, r, 2000, all_mask):
            for slot in torch.nonzero(batch.targets_T >= 0).flatten().tolist():
                sequence = int(batch.sequence_ids[batch.segments_T[slot]])
                found.append((sequence, int(batch.positions_T[slot]), int(batch.targets_T[slot])))
        return sorted(found)

    base = asked(recipe())
    values = recipes.to_dict(recipe())
    values["data"]["tokens_per_batch"] = slots
    other = recipes.validate({**values, "seed": 99, "training": {"tokens_per_step": slots}})
    assert base and asked(other) == base and asked(other, all_mask=True) == base


def test_validation_batches_are_shared_out_over_ranks():
    shards, r = Memory(proteins(30, 4)), recipe()
    whole = [b.tokens_T for b in validation_batches(shards, r, None)]
    parts = [[b.tokens_T for b in validation_batches(shards, r, None, rank=k, world=3)] for k in range(3)]
    assert all(torch.equal(whole[i], parts[i % 3][i // 3]) for i in range(len(whole)))


def test_a_failing_loader_thread_raises_in_the_training_thread():
    class Broken(Memory):
        def sequence(self, index):
            raise OSError("gone")

    with TrainingLoader(Broken(proteins(5)), recipe(), Position(0, 0)) as loader, pytest.raises(OSError, match="gone"):
        loader.next()
