"""Peak memory of `bmoe prepare` over the number of records, with and without the search for duplicates.

    python benchmarks/prepare_memory.py [--millions 0.5 1 2.5 5] [--folder DIR]

Each run is a process of its own; the peak is its resident set size as the system counts it (Linux). Records are random
proteins of 60 residues, all different.
"""

import argparse
import multiprocessing
import resource
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from bmoe.data.options import PrepareOptions

LETTERS = np.frombuffer(b"ACDEFGHIKLMNPQRSTVWY", np.uint8)


def generate(path: Path, records: int) -> None:
    """Write that many records of 60 random residues."""
    random = np.random.default_rng(0)
    with path.open("wb") as file:
        for first in range(0, records, 50_000):
            count = min(50_000, records - first)
            lines = np.full((count, 80), ord("\n"), np.uint8)
            lines[:, :18] = np.frombuffer(b"".join(b">UniRef_%010d" % k for k in range(first, first + count)), np.uint8).reshape(count, 18)
            lines[:, 19:79] = LETTERS[random.integers(0, 20, (count, 60))]
            file.write(lines.tobytes())


def measure(path: Path, out: Path, dedup: bool, workers: int, answer) -> None:
    """Prepare in this process and answer (MB of peak memory, MB before the work, seconds, sequences)."""
    from bmoe.data.prepare import prepare

    one = out.with_name("one.fasta")
    one.write_text(">a\nMKV\n")
    prepare([str(one)], out, PrepareOptions())  # loads what is compiled
    shutil.rmtree(out)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    result = prepare([str(path)], out, PrepareOptions(dedup=dedup), workers=workers)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    answer.put((peak, before, result["seconds"], result["records_kept"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=float, nargs="+", default=[0.5, 1, 2.5, 5])
    parser.add_argument("--folder", help="where the generated file and the output go")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        path, out = Path(name) / "in.fasta", Path(name) / "out"
        for millions in options.millions:
            generate(path, int(millions * 1e6))
            peak = {}
            for dedup, workers in ((False, 1), (True, 1), (False, 2), (True, 2), (False, 8), (False, 64)):
                answer = context.Queue()
                process = context.Process(target=measure, args=(path, out, dedup, workers, answer))
                begun = time.perf_counter()
                process.start()
                own, before, seconds, kept = answer.get()
                process.join()
                shutil.rmtree(out)
                peak[dedup, workers] = own
                print(
                    f"{millions:5.1f} M records, {'with' if dedup else 'without'} deduplication, {workers} worker(s): peak {own:6.1f} MB"
                    f" ({before:.1f} before the work), {seconds:5.1f} s, {time.perf_counter() - begun:.1f} s in all",
                    flush=True,
                )
                assert kept == int(millions * 1e6)
            for workers in (1, 2):
                more = (peak[True, workers] - peak[False, workers]) * 1e6
                print(f"      {workers} worker(s): {more / (millions * 1e6):.1f} bytes a sequence for deduplication", flush=True)


if __name__ == "__main__":
    main()
