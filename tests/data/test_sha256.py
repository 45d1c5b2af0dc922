"""SHA-256 of two streams at once is that of the standard library, whatever the pieces."""

import hashlib

import numpy as np
import pytest

from bmoe.data import sha256


@pytest.mark.parametrize("supported", [sha256.SUPPORTED, False])
def test_two_streams_have_the_hashes_of_the_library(supported, monkeypatch):
    """Pieces of all lengths around a block, of equal and of different lengths, also none."""
    monkeypatch.setattr(sha256, "SUPPORTED", supported)
    draw = np.random.default_rng(0)
    for _ in range(300):
        ours, theirs = [sha256.sha256(), sha256.sha256()], [hashlib.sha256(), hashlib.sha256()]
        for _ in range(draw.integers(0, 6)):
            parts = [draw.integers(0, 256, draw.choice([0, 1, 55, 56, 63, 64, 65, 128, 1000, draw.integers(3000)]), np.uint8) for _ in ours]
            sha256.both(ours[0], memoryview(parts[0]), ours[1], memoryview(parts[1]))
            for library, part in zip(theirs, parts, strict=True):
                library.update(part)
            assert [hash.hexdigest() for hash in ours] == [hash.hexdigest() for hash in theirs]  # asking does not change it


def test_published_values():
    """FIPS 180-2, appendix B: one block, two blocks, a million letters."""
    for text, value in (
        (b"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
        (b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"),
        (b"a" * 1_000_000, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"),
    ):
        found = sha256.sha256()
        found.update(memoryview(text))
        assert found.hexdigest() == value
