"""The compiled loops: hashes equal xxHash's own, and everything works where no cache can be written."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from bmoe.data import batch
from bmoe.data.alphabet import protein
from bmoe.data.bulk import _gather
from bmoe.data.fasta import codes_of, parse
from bmoe.data.letters import AVX2
from bmoe.data.xxh3 import xxh3

ROOT = Path(__file__).parents[2]


def test_xxh3_is_that_of_its_library_for_every_length():
    """All branches of the specification: 0, 1-3, 4-8, 9-16, 17-128, 129-240 bytes, and more, with whole and partial blocks of 1,024."""
    draw = np.random.default_rng(0)
    data = draw.integers(0, 256, 5000, dtype=np.uint8)
    size = np.append(np.arange(600), draw.integers(600, 4000, 200))
    start = draw.integers(0, 5000 - size)
    text = data.tobytes()
    assert xxh3(data, start, start + size).tolist() == [xxh3_64_intdigest(text[a : a + n]) for a, n in zip(start, size, strict=True)]


def test_more_records_than_expected_are_all_read():
    """Room is made for records of a usual size; the pass is repeated where they are shorter, with counts of each record."""
    records = parse(b">\n" * 3000 + b">b\nM-k*\n", codes_of(protein()), 3, True)
    assert records.line.tolist() == [*range(3000), 3000] and records.lines == 3002
    assert records.headers[3000] == b"b" and records.ids.size == 2 and records.lower.tolist() == [False, True]
    assert records.odd.sum(0).tolist() == records.odd[3000].tolist() == [1, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("wide", [1, 2])
@pytest.mark.parametrize("size", range(20))
def test_gathered_bytes_are_those_asked_for(size, wide):
    """Of some rows, in their order, also rows that follow each other and empty ones."""
    data = np.arange(200, dtype=np.uint8)
    start = np.array([3, 50, 50, 50 + size, 20, 75])
    end = start + [size, 0, size, 3, size + 1, 2]
    rows = np.array([0, 1, 2, 3, 5])
    wanted = [wide * k + n for row in rows for k in range(start[row], end[row]) for n in range(wide)]
    joined = np.full(len(wanted) + 8, 255, np.uint8)
    _gather(data, start, end, rows, wide, joined)
    assert joined[:-8].tolist() == wanted and (joined[-8:] == 255).all()


def test_lower_case_runs_are_found():
    lower = np.array([0, 1, 1, 0, 1, 1, 1, 0, 0, 1], bool)
    runs, counts = batch._runs(lower, np.array([0, 5, 8]), np.array([5, 7, 10]))
    assert runs.tolist() == [[1, 3], [4, 5], [0, 2], [1, 2]] and counts.tolist() == [2, 1, 1]


def test_where_no_cache_can_be_written_everything_is_compiled_again():
    """A package folder and a home that are read-only: no error."""
    code = (
        "from numba.core.caching import CacheImpl\n"
        "for locator in CacheImpl._locator_classes:\n    locator.from_function = classmethod(lambda *_: None)\n"
        "import numpy as np\nfrom bmoe.data.xxh3 import xxh3\nprint(xxh3(np.arange(9, dtype=np.uint8), np.array([0]), np.array([9]))[0])\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == f"{xxh3_64_intdigest(bytes(range(9)))}\n", done.stderr


def test_only_preparing_loads_the_compiler():
    """Commands that read prepared data do not wait for it."""
    code = (
        "import sys\nimport bmoe.jobs.train, bmoe.jobs.evaluate, bmoe.jobs.prepare, bmoe.data.loader\nassert 'numba' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})


def test_processors_without_wide_instructions_read_the_same(tmp_path):
    """Letters 64 at a time where AVX2 is there, else eight: the same records from lines of any length, with either case and odd letters."""
    code = (
        "import sys, hashlib\nfrom llvmlite import binding\n"
        "features = binding.get_host_cpu_features()\nfeatures['avx2'] &= sys.argv[1] != 'plain'\n"
        "binding.get_host_cpu_features = lambda: features\n"
        "import numpy as np\nfrom bmoe.data import letters\nfrom bmoe.data.alphabet import dna, protein\n"
        "from bmoe.data.fasta import codes_of, parse\nassert letters.AVX2 == (sys.argv[1] != 'plain')\n"
        "draw, found = np.random.default_rng(0), hashlib.sha256()\n"
        "odd = np.frombuffer(b'acdnyzNBZXUO*-. \\t\\n\\r1@[`{~\\x00\\x7f\\x80\\xff\\xc1\\xe1', np.uint8)\n"
        "for size in [*range(140), 5000]:\n"
        "    text = draw.choice(np.frombuffer(b'ACDEFGHIKLMNPQRSTVWY', np.uint8), size)\n"
        "    text[draw.random(size) < draw.choice([0, 0.02, 0.2])] = draw.choice(odd)\n"
        "    for alphabet in (protein(), dna()):\n"
        "        records = parse(b'>a b\\n' + text.tobytes() + b'\\n>c\\nMKV', codes_of(alphabet), 3, True)\n"
        "        parts = (records.ids, records.bounds, records.line, records.odd, records.lower)\n"
        "        found.update(b'|'.join(b'' if part is None else part.tobytes() for part in parts))\n"
        "print(found.hexdigest())\n"
    )
    ways = {"plain": {"NUMBA_CACHE_DIR": str(tmp_path)}} | ({"wide": {}} if AVX2 else {})
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = {"capture_output": True, "text": True}
    found = [subprocess.run([sys.executable, "-c", code, way], env=environment | own, **run) for way, own in ways.items()]
    assert all(done.stdout for done in found) and len({done.stdout for done in found}) == 1, found
