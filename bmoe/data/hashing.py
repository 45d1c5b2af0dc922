"""Hashes of sequences and what follows from them: the split. Hashes of names.

Sequences are hashed with XXH3 (64 bits, seed 0), over their ids before any byte-pair encoding, so that a split is the same on every
machine, in every order and for every version.
"""

import numpy as np

from bmoe.data.compiled import compiled, inlined, load64
from bmoe.data.xxh3 import xxh3

_U = np.uint64


def hashes(data: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Hash of each data[start:end] (uint8), uint64, never 0, which marks an empty place in HashSet."""
    return np.maximum(xxh3(data, start, end), np.uint64(1))


def name_hashes(names: list[bytes]) -> np.ndarray:
    """The hash of `word_hash` for each of some names, uint64."""
    ends = np.cumsum([len(name) for name in names], dtype=np.int64)
    found = np.empty(len(names), np.uint64)
    _word_hashes(np.frombuffer(b"".join(names), np.uint8), ends, found)
    return found


@compiled
def _word_hashes(text, ends, found):
    begin = _U(0)
    for k in range(ends.size):
        end = _U(ends[k])
        found[k] = word_hash(text, begin, end)
        begin = end


@inlined
def word_hash(text, at, end):
    """Hash of the word that begins at `at` in text (uint8) and ends before `end` or the next byte below `!`; 0 where there is no word.

    Eight bytes at a time; the mixing is that of MurmurHash3's finaliser (Appleby, public domain).
    """
    found = _U(0)
    while True:
        word = _U(0)
        if at + _U(8) <= end:
            word = load64(text, at)
        else:  # zeros follow the text, and end a word
            for k in range(at, end):
                word |= _U(text[k]) << (_U(8) * (k - at))
        below = (word - _U(0x2121212121212121)) & ~word & _U(0x8080808080808080)  # its lowest bit: that of the first byte below `!`
        first = below & (~below + _U(1))
        word = found ^ (word & ((first >> _U(7)) - _U(1)))
        word = (word ^ (word >> _U(33))) * _U(0xFF51AFD7ED558CCD)
        word = (word ^ (word >> _U(33))) * _U(0xC4CEB9FE1A85EC53)
        found = word ^ (word >> _U(33))
        if below:
            return found
        at += _U(8)


def split_of(hash_n: np.ndarray, valid: float, test: float, seed: int) -> np.ndarray:
    """Split of every hash, uint8: 0 train, 1 valid, 2 test, uniformly by share. Another seed is another split."""
    if valid + test == 0:
        return np.zeros(hash_n.size, np.uint8)
    x = hash_n + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)  # splitmix64 (Steele et al., OOPSLA 2014)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    share = ((x ^ (x >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) / 2.0**53
    return (share < valid + test).astype(np.uint8) + ((share >= valid) & (share < valid + test))
