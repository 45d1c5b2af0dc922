"""Masks: ESM-2's rates, only residues, free of batching; and the trivial baselines of facts that were published."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from bmoe.data import objectives
from bmoe.data.alphabet import alphabet
from bmoe.data.packing import pack
from bmoe.data.sampler import Position, Sampler
from bmoe.recipe import ObjectiveSection
from tests_fakes import Memory, proteins

MLM = ObjectiveSection()


def packed_of(shards, epoch=0, slots=4096, seed=0):
    crops, _ = next(Sampler(shards, 1024, seed).batches(Position(epoch, 0), slots))
    return pack(shards, crops, slots, seed)


def test_rates_are_15_and_80_10_10_and_specials_are_never_targets():
    shards = Memory(proteins(600, 0))
    packed = packed_of(shards, slots=80_000)
    inputs, targets = objectives.mlm(packed, shards.alphabet, MLM, 0)
    chosen = targets >= 0
    residues = packed.origin_T >= 0
    assert not (chosen & ~residues).any()
    assert (targets[chosen] == packed.tokens_T[chosen]).all()
    assert (inputs[~chosen] == packed.tokens_T[~chosen]).all()
    n = chosen.sum()
    assert abs(n / residues.sum() - 0.15) < 4 * np.sqrt(0.15 * 0.85 / residues.sum())
    masked, kept = inputs[chosen] == shards.alphabet.mask_id, inputs[chosen] == targets[chosen]
    assert abs(masked.mean() - 0.8) < 4 * np.sqrt(0.16 / n)
    assert abs(kept.mean() - (0.1 + 0.1 / 20)) < 4 * np.sqrt(0.1 / n)  # a random residue is the right one in 20
    shown = inputs[chosen][~masked]
    assert set(shown) <= set(shards.alphabet.residues)


def test_random_residues_are_uniform_over_the_twenty():
    shards = Memory(["A" * 900] * 60)
    packed = packed_of(shards, slots=54_120)
    objective = ObjectiveSection(mask_fraction=1.0, mask_token=0.0, random_token=1.0)
    inputs, targets = objectives.mlm(packed, shards.alphabet, objective, 0)
    counts = np.bincount(inputs[targets >= 0], minlength=33)[4:24]
    assert counts.sum() == (targets >= 0).sum()
    expected = counts.sum() / 20
    assert ((counts - expected) ** 2 / expected).sum() < 19 + 5 * np.sqrt(38)


def masks_by_sequence(shards, slots, seed=0, epoch=0):
    """(sequence, place in its record) of all targets of an epoch."""
    found = set()
    sampler = Sampler(shards, 1024, seed)
    for crops, after in sampler.batches(Position(epoch, 0), slots):
        packed = pack(shards, crops, slots, seed)
        _, targets = objectives.mlm(packed, shards.alphabet, MLM, seed)
        for slot in np.flatnonzero(targets >= 0):
            found.add((int(crops.epoch[packed.segments_T[slot]]), int(crops.sequence[packed.segments_T[slot]]), int(packed.origin_T[slot])))
        if after.epoch > epoch:
            return {(s, o) for e, s, o in found if e == epoch}
    raise AssertionError


def test_masks_depend_on_seed_epoch_and_sequence_only():
    shards = Memory(proteins(60, 5))
    base = masks_by_sequence(shards, 1024)
    assert masks_by_sequence(shards, 4000) == base
    assert masks_by_sequence(shards, 1024, epoch=1) != base
    assert masks_by_sequence(shards, 1024, seed=1) != base


def test_both_schemes_have_the_same_targets():
    shards = Memory(proteins(30, 6))
    packed = packed_of(shards)
    _, targets = objectives.mlm(packed, shards.alphabet, MLM, 0)
    inputs, same = objectives.mlm(packed, shards.alphabet, MLM, 0, all_mask=True)
    assert (targets == same).all() and (inputs[targets >= 0] == shards.alphabet.mask_id).all()


def test_unknown_letters_and_soft_masked_bases_are_no_targets():
    everything = ObjectiveSection(mask_fraction=1.0)
    shards = Memory(["AC1GT"], "protein")
    _, targets = objectives.mlm(packed_of(shards, slots=8), shards.alphabet, everything, 0)
    assert (targets >= 0).tolist() == [False, True, True, False, True, True, False, False]
    soft = [np.array([True, False, True, False])]
    dna = Memory(["ACGT"], "dna", soft=soft)
    crops = Sampler(dna, 64, 0).crops(0, 0, 1)
    packed = pack(dna, crops, 8, 0, soft_masked=True)
    _, targets = objectives.mlm(packed, dna.alphabet, everything, 0, skip_soft=True)
    assert (targets >= 0).tolist() == [False, False, True, False, True, False, False, False]
    _, next_targets = objectives.clm(packed, dna.alphabet, skip_soft=True)
    assert (next_targets >= 0).tolist() == [False, True, False, True, True, False, False, False]


def test_clm_predicts_the_next_token_within_the_crop():
    shards = Memory(["ACD", "EF"])
    packed = packed_of(shards, slots=12)
    inputs, targets = objectives.clm(packed, shards.alphabet)
    for slot in range(packed.real):
        inside = slot + 1 < packed.real and packed.segments_T[slot + 1] == packed.segments_T[slot]
        assert targets[slot] == (packed.tokens_T[slot + 1] if inside else -100)
    assert (targets[packed.real :] == -100).all() and (inputs == packed.tokens_T).all()


SAMPLES = Path(os.environ.get("BMOE_REAL_DATA", "no such folder"))  # public samples too large for the repository


@pytest.mark.parametrize("name,mask,scheme_8010", [("uniprot_20k.fasta.gz", 18.15, 15.17), ("uniref90_10k.fasta.gz", 17.6, 14.80)])
def test_baselines_of_real_proteins(name, mask, scheme_8010):
    path = SAMPLES / name
    if not path.is_file():
        pytest.skip("BMOE_REAL_DATA does not name the folder of real samples")
    letters = alphabet("protein")
    text = b"".join(line for line in gzip.open(path) if not line.startswith(b">")).replace(b"\n", b"")
    composition = np.bincount(letters.encode(text), minlength=33).astype(float)
    assert objectives.baseline(composition, letters) == pytest.approx(mask, abs=0.06)
    assert objectives.baseline(composition, letters, 0.8, 0.1) == pytest.approx(scheme_8010, abs=0.06)


def test_baseline_equals_a_simulation():
    """The posterior's cross entropy, counted out over many draws of (true, shown)."""
    letters, rng = alphabet("protein"), np.random.default_rng(0)
    p = rng.dirichlet(np.ones(20))
    composition = np.zeros(33)
    composition[4:24] = p
    true = rng.choice(20, 400_000, p=p)
    way = rng.random(true.size)
    shown = np.where(way < 0.8, -1, np.where(way < 0.9, rng.integers(0, 20, true.size), true))
    joint = np.zeros((21, 20))
    np.add.at(joint, (shown, true), 1.0)  # row -1 is `<mask>`
    conditional = joint / joint.sum(1, keepdims=True)
    entropy = -np.log(conditional[shown, true]).mean()
    assert objectives.baseline(composition, letters, 0.8, 0.1) == pytest.approx(np.exp(entropy), rel=0.01)
