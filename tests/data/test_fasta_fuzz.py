"""A sample of the fuzz run (`fuzz_fasta.py`; 200,000 inputs before a release), and inputs that hypothesis makes up."""

import gzip
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
import fuzz_fasta as fuzz  # noqa: E402  a script beside this test, not part of the package

from bmoe.data import fasta  # noqa: E402


@pytest.mark.parametrize("count", [1_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_mutated_files_read_as_biopython_reads_them(count):
    draw, pool = random.Random(count), fuzz.seeds()
    for _ in range(count):
        fuzz.check(draw, pool)


def test_corrupt_gzip_is_never_taken_for_whole():
    draw, pool = random.Random(0), fuzz.seeds()
    for _ in range(1_000):
        fuzz.check_compressed(draw, [gzip.compress(pool[-1] * 3), gzip.compress(pool[-1]) + gzip.compress(pool[-2])])


LINES = st.lists(
    st.one_of(
        st.text("ACDEFGHIKLMNPQRSTVWYXBZUOJacd*-. \t", max_size=30), st.text(">;#\x00AC d", max_size=8), st.just(""), st.just(">id text")
    ),
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(LINES, st.sampled_from(["\n", "\r\n", "\r"]), st.booleans(), st.sampled_from(["protein", "dna"]), st.randoms(use_true_random=False))
def test_any_lines_read_as_biopython_reads_them(lines, end, last, alphabet, draw):
    data = (end.join(lines) + (end if last else "")).encode()
    assert fuzz.ours(data, alphabet, 2, draw) == fuzz.oracle(data, alphabet, 2)


def test_the_fuzzer_finds_a_broken_reader(monkeypatch):
    """A reader that takes comment lines for sequence, as many do, is found within a few hundred inputs."""
    monkeypatch.setattr(fuzz, "builder_of", fuzz.builder_of.__wrapped__)
    real = fasta.parse
    monkeypatch.setattr(fasta, "parse", lambda data, *rest: real(data.replace(b"\n;", b"\n"), *rest))
    draw, pool = random.Random(0), fuzz.seeds()
    with pytest.raises(AssertionError):
        for _ in range(500):
            fuzz.check(draw, pool)
