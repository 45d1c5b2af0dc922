"""Mutated FASTA against Biopython, in process.

    PYTHONPATH=. python tests/data/fuzz_fasta.py [--inputs 200000] [--seed 0]

Every input goes through the block cutter (with random chunk sizes and ranges), the parser and the cleaner, and must give what
SimpleFastaParser gives under the documented policies, which `oracle` spells out, or be refused with a RequestError.
"""

import argparse
import gzip
import io
import random
import time
from functools import cache
from pathlib import Path

from Bio.SeqIO.FastaIO import SimpleFastaParser

from bmoe.data.alphabet import dna, protein
from bmoe.data.batch import Builder
from bmoe.data.blocks import cut
from bmoe.data.compression import decompressed, kind_of
from bmoe.data.formats import foreign
from bmoe.data.options import PrepareOptions
from bmoe.errors import RequestError

HERE = Path(__file__).parent
SPECIAL = [
    b">",
    b"\n",
    b"\r\n",
    b"\r",
    b"\n>",
    b"\r>",
    b"\n\n",
    b" ",
    b"\t",
    b";",
    b"#",
    b"\n;",
    b"*",
    b"-",
    b".",
    b"\0",
    b"\xef\xbb\xbf",
    b"\xff",
    b"J",
    b"j",
    b"0",
    b"^",
    b"n",
    b"\x0b",
    b"\x0c",
    b"\x1c",
    b"\x85",
    b"> ",
    b">\n",
    b"\n>\n>",
    b"*\n",
    b"\xc3\xa4",
    b"U",
    b"NNNN",
]
OTHER_BLANKS = bytes.maketrans(b"\x1c\x1d\x1e\x1f\x85\xa0", b"\x01" * 6)  # Python's str strips these, we read them as invalid letters
LETTERS = {"protein": "LAGVSERTIDPKQNFYMHWCXBUZO", "dna": "ACGTNRYSWKMBDHVU"}


def seeds() -> list[bytes]:
    """Plain texts to mutate: the dirty files and the beginning of a real one."""
    files = [p.read_bytes() for p in sorted((HERE / "dirty").iterdir()) if not p.name.endswith(".gz") and p.stat().st_size < 1000]
    real = gzip.decompress((HERE / "uniprot_500.fasta.gz").read_bytes())
    return [data for data in files if kind_of(data) is None] + [real[k : k + 900] for k in (0, 5000, 20_000)]


def mutated(draw: random.Random, pool: list[bytes]) -> bytes:
    """One of the pool after a few random edits."""
    data = bytearray(draw.choice(pool))
    for _ in range(draw.randrange(1, 8)):
        place = draw.randrange(len(data) + 1)
        kind = draw.randrange(6)
        if kind <= 2:
            data[place:place] = draw.choice(SPECIAL)
        elif kind == 3:
            del data[place : place + draw.randrange(1, 20)]
        elif kind == 4:
            data[place : place + 1] = bytes([draw.randrange(256)])
        else:
            other = draw.choice(pool)
            begin = draw.randrange(len(other) + 1)
            data[place:place] = other[begin : begin + draw.randrange(80)]
    return bytes(data)


def oracle(data: bytes, alphabet: str, min_length: int) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """Biopython's records under the documented policies: kept (header, sequence) and the number dropped by reason."""
    text = data.removeprefix(b"\xef\xbb\xbf").translate(OTHER_BLANKS).decode("latin-1")
    lines = [line for line in io.StringIO(text, newline=None) if line[0] not in ";#"]  # comment lines
    first = next((k for k, line in enumerate(lines) if line[0] == ">"), len(lines))  # text before the first record
    kept, dropped = [], {}
    known = {letter: letter.replace("U", "T") if alphabet == "dna" else letter for letter in LETTERS[alphabet]}
    known |= {letter.lower(): as_read for letter, as_read in known.items()}
    for title, sequence in SimpleFastaParser(io.StringIO("".join(lines[first:]))):
        body = "".join(c for c in sequence if c not in " \t\v\f-.").rstrip("*")  # blanks, gaps, terminal stops
        body = "".join(known.get(c, "?") for c in body)
        if len(body) < min_length or not body:
            reason = "too_short" if body else "empty"
            dropped[reason] = dropped.get(reason, 0) + 1
        else:
            kept.append((title.strip(" \t\v\f"), body))
    return kept, dropped


@cache
def builder_of(alphabet: str, min_length: int) -> Builder:
    letters = protein() if alphabet == "protein" else dna()
    return Builder(PrepareOptions(alphabet=alphabet, min_length=min_length, n_runs="keep"), letters, letters, None)


def ours(data: bytes, alphabet: str, min_length: int, draw: random.Random) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """The same from the pipeline, with random chunks, block sizes and ranges."""
    builder = builder_of(alphabet, min_length)
    letters = builder.letters
    size = draw.choice([7, 100, 10_000, 10_000])
    unit = draw.choice([None, None, None, 150])
    ranges = [(0, None)] if unit is None else [(b, b + unit) for b in range(0, max(len(data), 1), unit)]
    kept, dropped, lines = [], {}, 0
    for begin, stop in ranges:
        start = max(begin - 1, 0)
        chunks = (data[k : k + size] for k in range(start, len(data), size))
        carry = None
        for piece in cut(chunks, begin, stop, target=draw.choice([100, 10_000, 10_000])):
            batch, carry = builder.build(piece, carry)
            lines += batch.summary.lines
            for reason, number in batch.summary.dropped.items():
                dropped[reason] = dropped.get(reason, 0) + number
            for number, (a, b) in enumerate(zip(batch.start.tolist(), batch.end.tolist(), strict=True)):
                text = letters.decode(batch.tokens[a:b]).replace("<unk>", "?")
                kept.append((batch.headers[number].translate(OTHER_BLANKS).decode("latin-1"), text))
    text_lines = len(list(io.StringIO(data.removeprefix(b"\xef\xbb\xbf").decode("latin-1"), newline=None)))
    assert lines == text_lines, f"{lines} lines counted, there are {text_lines}"
    return kept, dropped


def check(draw: random.Random, pool: list[bytes]) -> None:
    """One mutated input. AssertionError, or any error but RequestError, is a fault."""
    data = mutated(draw, pool)
    if foreign(data):  # refused as what it begins like
        return
    alphabet, min_length = draw.choice(["protein", "protein", "dna"]), draw.choice([0, 1, 2, 5])
    try:
        found = ours(data, alphabet, min_length, draw)
    except RequestError:
        raise AssertionError(f"refused: {data!r}") from None
    assert found == oracle(data, alphabet, min_length), f"{alphabet} {min_length} {data!r}"


def check_compressed(draw: random.Random, packed: list[bytes]) -> None:
    """A corrupt compressed file: the right bytes, or a RequestError; nothing else, and never a part taken for the whole."""
    whole = draw.choice(packed)
    data = bytearray(whole)
    for _ in range(draw.randrange(1, 4)):
        place = draw.randrange(len(data))
        if draw.random() < 0.5:
            data[place] ^= 1 << draw.randrange(8)
        else:
            del data[place : place + draw.randrange(1, 30)]
            data = data or bytearray(b"x")
    kind = kind_of(bytes(data))
    if kind is None:
        return
    try:
        b"".join(decompressed(io.BytesIO(bytes(data)), kind, "in.fasta"))
    except RequestError as error:
        assert "in.fasta is" in str(error) and "byte" in str(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw, pool = random.Random(options.seed), seeds()
    packed = [gzip.compress(pool[-1] * 3), gzip.compress(pool[-1]) + gzip.compress(pool[-2])]
    begun = time.perf_counter()
    for _ in range(options.inputs):
        check(draw, pool)
    between = time.perf_counter()
    for _ in range(options.inputs // 10):
        check_compressed(draw, packed)
    end = time.perf_counter()
    print(f"{options.inputs} mutated inputs equal Biopython under the policies, {options.inputs / (between - begun):.0f} a second")
    print(f"{options.inputs // 10} corrupt gzip files refused or read whole, {options.inputs / 10 / (end - between):.0f} a second")


if __name__ == "__main__":
    main()
