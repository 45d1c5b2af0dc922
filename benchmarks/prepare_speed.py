"""Speed of `bmoe prepare` on UniRef-like FASTA, beside Biopython's SimpleFastaParser merely iterating.

    python benchmarks/prepare_speed.py FASTA... [--megabytes 500] [--runs 5] [--folder DIR] [--json FILE]

FASTA are real proteins (for example uniprot_20k.fasta.gz). They are repeated under new UniRef-like headers, each copy with a
few letters changed and one in twenty unchanged, so that the search for duplicates has work to do. Every way of reading runs
once per round, rounds follow each other, and medians are printed: on a shared machine compare ratios, not single numbers.
Start-up (processes, imports) is measured with a file of one record and subtracted; both are printed. MB are 10^6 bytes of
FASTA text, also for gzip.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from isal import igzip

from bmoe.data import prepare
from bmoe.data.blocks import cut
from bmoe.data.inputs import find, stream

NAMES = b"peptidylprolyl isomerase|Uncharacterized protein|ATP synthase subunit alpha|Cytochrome c oxidase subunit 2".split(b"|")
LETTERS = np.frombuffer(b"ACDEFGHIKLMNPQRSTVWY", np.uint8)


def sequences(names: list[str]) -> list[bytes]:
    """Sequences of FASTA files without line ends."""
    found = []
    for source in find(names, "fasta"):
        _, chunks = stream(source)
        for piece in cut(chunks, 0, None):
            found += [record.partition(b"\n")[2].replace(b"\n", b"") for record in piece.data[1:].split(b"\n>")]
    return found


def generate(proteins: list[bytes], path: Path, size: int, seed: int = 0) -> int:
    """Write about `size` bytes of UniRef-like FASTA, 60 letters a line. Returns the number of records."""
    random = np.random.default_rng(seed)
    written = records = 0
    with path.open("wb") as file:
        while written < size:
            parts = []
            for number in random.permutation(len(proteins)).tolist():
                letters = np.frombuffer(proteins[number], np.uint8).copy()
                if random.random() > 0.05:
                    places = random.integers(0, letters.size, 1 + letters.size // 100)
                    letters[places] = LETTERS[random.integers(0, 20, places.size)]
                text = letters.tobytes()
                name = b"A0A%09X" % records
                parts.append(
                    b">UniRef50_%s %s n=%d Tax=Homo sapiens TaxID=9606 RepID=%s_HUMAN\n" % (name, NAMES[number % 4], records % 9 + 1, name)
                )
                parts.append(b"\n".join([text[k : k + 60] for k in range(0, len(text), 60)]) + b"\n")
                written += len(parts[-1]) + len(parts[-2])
                records += 1
                if written >= size:
                    break
            file.write(b"".join(parts))
    return records


def biopython(path: Path) -> float:
    """Seconds to iterate with SimpleFastaParser."""
    from Bio.SeqIO.FastaIO import SimpleFastaParser

    begun = time.perf_counter()
    with path.open() as file:
        for _ in SimpleFastaParser(file):
            pass
    return time.perf_counter() - begun


def ours(path: Path, folder: Path, workers: int) -> float:
    """Seconds to prepare a file."""
    out = folder / "out"
    begun = time.perf_counter()
    prepare.prepare([str(path)], out, workers=workers)
    seconds = time.perf_counter() - begun
    shutil.rmtree(out)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fasta", nargs="+")
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", help="where the generated files and the output go")
    parser.add_argument("--json", help="write the numbers here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        plain, packed, one = folder / "uniref.fasta", folder / "uniref.fasta.gz", folder / "one.fasta"
        records = generate(sequences(options.fasta), plain, options.megabytes * 1_000_000)
        with plain.open("rb") as source, igzip.open(packed, "wb", compresslevel=2) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        one.write_text(">a\nMKTAYIAKQR\n")
        size = plain.stat().st_size / 1e6
        ways = {
            "Biopython SimpleFastaParser": lambda: biopython(plain),
            "plain, 1 worker": lambda: ours(plain, folder, 1),
            "plain, 2 workers": lambda: ours(plain, folder, 2),
            "gzip, 1 worker": lambda: ours(packed, folder, 1),
            "gzip, 2 workers": lambda: ours(packed, folder, 2),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        start = {workers: [ours(one, folder, workers) for _ in range(3)] for workers in (1, 2)}
        startup = {workers: statistics.median(times) for workers, times in start.items()}
        for _ in range(options.runs):
            for way, run in ways.items():
                seconds[way].append(run())
    print(
        f"{size:.0f} MB, {records} records, {options.runs} rounds; start-up {startup[1]:.2f} s (1 worker), {startup[2]:.2f} s (2 workers)"
    )
    results = {}
    reference = size / statistics.median(seconds["Biopython SimpleFastaParser"])
    for way, times in seconds.items():
        aside = 0.0 if way.startswith("Bio") else startup[2 if "2" in way else 1]
        speed = size / (statistics.median(times) - aside)
        ratios = [bio / (t - aside) for bio, t in zip(seconds["Biopython SimpleFastaParser"], times, strict=True)]
        results[way] = {"mb_per_s": speed, "ratio": statistics.median(ratios), "seconds": times, "start_up": aside}
        print(f"{way:30s} {speed:7.0f} MB/s   {statistics.median(ratios):5.2f} x Biopython   seconds {' '.join(f'{t:.2f}' for t in times)}")
    if options.json:
        Path(options.json).write_text(
            json.dumps({"megabytes": size, "records": records, "biopython": reference, "results": results}, indent=1)
        )


if __name__ == "__main__":
    main()
