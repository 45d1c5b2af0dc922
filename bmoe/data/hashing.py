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
    found = xxh3(data, start, end)
    _no_zeros(found)
    return found


@compiled
def _no_zeros(found):
    for k in range(found.size):
        found[k] = max(found[k], _U(1))


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
    split = np.zeros(hash_n.size, np.uint8)
    if valid + test > 0:
        _split(hash_n, np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64), float(valid), float(valid + test), split)
    return split


@compiled
def _split(hash_n, step, valid, held_out, split):
    for k in range(hash_n.size):
        x = hash_n[k] + step  # splitmix64 (Steele et al., OOPSLA 2014)
        x = (x ^ (x >> _U(30))) * _U(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> _U(27))) * _U(0x94D049BB133111EB)
        share = np.float64((x ^ (x >> _U(31))) >> _U(11)) / 9007199254740992.0  # 2^53
        if share < held_out:
            split[k] = 1 if share < valid else 2
