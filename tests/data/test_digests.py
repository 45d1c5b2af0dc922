"""Hashes of files that grow are those of the whole files."""

import hashlib
import time

import numpy as np
import pytest

from bmoe.data import digests


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_file_hashed_while_it_grows_has_the_digest_and_counts_of_the_whole(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "CHUNK", 1000)
    tokens = np.random.default_rng(0).integers(0, 30, 40_123).astype(dtype)
    headers = b"a header" * 700
    growing = digests.Growing(tmp_path, dtype)
    for end in (700, 900, 20_000, 33_333):  # bytes beyond `end` may still change, and do
        (tmp_path / "train-00000.tokens.partial").write_bytes(tokens.tobytes()[:end] + b"later")
        (tmp_path / "train-00000.headers.partial").write_bytes(headers[: end // 10])
        growing.upto({"train-00000.tokens": end, "train-00000.headers": end // 10}, ".partial")
        time.sleep(0.02)
    (tmp_path / "train-00000.tokens").write_bytes(tokens.tobytes())
    (tmp_path / "train-00000.headers").write_bytes(headers)
    begun = growing.stop()
    assert begun["train-00000.tokens"].done > 0
    found = begun["train-00000.tokens"].finish(tmp_path / "train-00000.tokens")
    whole = digests.digest(tmp_path / "train-00000.tokens", dtype)
    assert found["sha256"] == whole["sha256"] == hashlib.sha256(tokens.tobytes()).hexdigest()
    assert found["bytes"] == tokens.nbytes and (found["counted"] == whole["counted"]).all()
    assert begun["train-00000.headers"].finish(tmp_path / "train-00000.headers") == {
        "bytes": len(headers),
        "sha256": hashlib.sha256(headers).hexdigest(),
    }


def test_a_small_file_of_tokens_is_counted_whole(tmp_path):
    tokens = np.random.default_rng(1).integers(0, 25, 5_001).astype(np.uint8)
    (tmp_path / "tokens").write_bytes(tokens.tobytes())
    counted = digests.digest(tmp_path / "tokens", np.uint8)["counted"]
    assert (counted[:25] == np.bincount(tokens, minlength=25)).all() and not counted[25:].any()


def test_a_file_that_vanishes_is_reported(tmp_path):
    growing = digests.Growing(tmp_path, np.uint8)
    growing.upto({"train-00000.tokens": digests.CHUNK}, ".partial")
    time.sleep(0.05)
    with pytest.raises(OSError):
        growing.stop()
