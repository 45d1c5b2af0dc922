"""Hashes of files as they are written are those of the whole files; repeats among millions of hashes."""

import hashlib

import numpy as np
import pytest

from bmoe.data import digests, repeats


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_file_hashed_while_it_is_written_has_the_digest_and_counts_of_the_whole(dtype, tmp_path, monkeypatch):
    """Whatever the pieces, also where the rest is read from the disk. Every 16th stretch is counted, and the first two."""
    monkeypatch.setattr(digests, "COUNTED", 1000)
    tokens = np.random.default_rng(0).integers(0, 30, 40_123).astype(dtype)
    (tmp_path / "tokens").write_bytes(tokens.tobytes())
    data, size = memoryview(tokens.tobytes()), tokens.itemsize
    whole = digests.digest(tmp_path / "tokens", dtype)
    for ends in ([], [0, 2], [700, 900, 20_000, 33_332], [40_123]):
        growing = digests.Digest(dtype)
        for begin, end in zip([0, *ends], ends, strict=False):
            growing.update(data[begin * size : end * size])
        found = growing.finish(tmp_path / "tokens")
        assert found["sha256"] == whole["sha256"] == hashlib.sha256(tokens.tobytes()).hexdigest()
        assert found["bytes"] == tokens.nbytes and (found["counted"] == whole["counted"]).all()
    stretches = [tokens[k * 1000 // size : (k + 1) * 1000 // size] for k in range(tokens.nbytes // 1000 + 1) if k < 2 or k % 16 == 0]
    assert (np.bincount(np.concatenate(stretches), minlength=30) == whole["counted"][:30]).all()


def test_a_small_file_of_tokens_is_counted_whole(tmp_path):
    tokens = np.random.default_rng(1).integers(0, 25, 5_001).astype(np.uint8)
    (tmp_path / "tokens").write_bytes(tokens.tobytes())
    counted = digests.digest(tmp_path / "tokens", np.uint8)["counted"]
    assert (counted[:25] == np.bincount(tokens, minlength=25)).all() and not counted[25:].any()


def test_repeated_hashes_are_found_in_memory_and_in_buckets(tmp_path, monkeypatch):
    draw = np.random.default_rng(0)
    hashes = draw.integers(1, 2**63, 30_000).astype(np.uint64) * np.uint64(2)
    for at, of in ((700, 20), (29_000, 20), (15, 4), (29_999, 3), (5_000, 4_999)):
        hashes[at] = hashes[of]
    hashes.tofile(tmp_path / "hashes")
    for rows, bits in ((1 << 20, 25), (1 << 20, 8), (4_000, 25), (4_000, 8)):
        monkeypatch.setattr(repeats, "ROWS", rows)
        monkeypatch.setattr(repeats, "BITS", max(bits, 6))
        count, found = repeats.repeated(tmp_path / "hashes", 4)
        assert count == 5 and found.tolist() == [15, 700, 5_000, 29_000]
        assert repeats.distinct(tmp_path / "hashes") == 29_995
    assert repeats.repeated(tmp_path / "none", 4)[0] == repeats.distinct(tmp_path / "none") == 0
