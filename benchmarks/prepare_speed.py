"""Speed of `bmoe prepare` on UniRef-like FASTA, beside Biopython's SimpleFastaParser merely iterating.

    python benchmarks/prepare_speed.py FASTA... [--megabytes 500] [--runs 5] [--folder DIR] [--json FILE]

FASTA are real proteins (for example uniprot_20k.fasta.gz). They are repeated under new UniRef-like headers, each copy with a
few letters changed and one in twenty unchanged, so that the search for duplicates has work to do. Every way of reading runs
once per round, rounds follow each other, and medians are printed: on a shared machine compare ratios, not single numbers.
Start-up is measured with a file of one record and subtracted; the first start, which loads (or for the first time compiles) the
loops, is printed apart. Beside the wall clock, which needs both cores free, the CPU time of the process is given in ns a byte, which
hardly does. MB are 10^6 bytes of FASTA text, also for gzip.
"""

import argparse
import json
import os
import resource
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
BIOPYTHON = "Biopython SimpleFastaParser"
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


def cpu_seconds() -> float:
    """User and system time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


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
        size = plain.stat().st_size
        ways = {
            BIOPYTHON: lambda: biopython(plain),
            "plain, 1 worker": lambda: ours(plain, folder, 1),
            "plain, 2 workers": lambda: ours(plain, folder, 2),
            "gzip, 1 worker": lambda: ours(packed, folder, 1),
            "gzip, 2 workers": lambda: ours(packed, folder, 2),
        }
        first, *starts = (ours(one, folder, 1) for _ in range(4))
        start = statistics.median(starts)
        before = os.getloadavg()[0]
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        cpu: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(options.runs):
            for way, run in ways.items():
                begun = cpu_seconds()
                seconds[way].append(run() - (start if way != BIOPYTHON else 0.0))
                cpu[way].append(cpu_seconds() - begun)
    print(f"{size / 1e6:.0f} MB, {records} records, {options.runs} rounds on {len(os.sched_getaffinity(0))} cores")
    print(f"load before {before:.1f}, after {os.getloadavg()[0]:.1f}; first start {first:.2f} s, further starts {start:.2f} s")
    results = {}
    for way, times in seconds.items():
        ratios = [bio / t for bio, t in zip(seconds[BIOPYTHON], times, strict=True)]
        results[way] = {
            "mb_per_s": size / 1e6 / statistics.median(times),
            "ratio": statistics.median(ratios),
            "best_mb_per_s": size / 1e6 / min(times),
            "cpu_ns_per_byte": statistics.median(cpu[way]) / size * 1e9,
            "seconds": times,
        }
        found = results[way]
        print(
            f"{way:28s} median {found['mb_per_s']:4.0f} best {found['best_mb_per_s']:4.0f} MB/s  {found['ratio']:5.2f} x Biopython  "
            f"CPU {found['cpu_ns_per_byte']:.2f} ns/byte  seconds {' '.join(f'{t:.2f}' for t in times)}"
        )
    if options.json:
        Path(options.json).write_text(json.dumps({"bytes": size, "records": records, "start_up": start, "results": results}, indent=1))


if __name__ == "__main__":
    main()
