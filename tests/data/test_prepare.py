"""What `prepare` promises: the same bytes for any workers, parts and interruptions; splits without leakage; counts that add up."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from Bio.SeqIO.FastaIO import SimpleFastaParser

from bmoe.data import blocks, compression, digests, tasks
from bmoe.data.alphabet import protein
from bmoe.data.fasta import codes_of, parse
from bmoe.data.hashing import name_hashes
from bmoe.data.hashset import HashSet
from bmoe.data.ledger import Ledger
from bmoe.data.lengths import Lengths
from bmoe.data.merge import merge
from bmoe.data.prepare import PrepareOptions, prepare
from bmoe.data.shards import Shards, manifest_sha256
from bmoe.data.verify import verify
from bmoe.errors import RequestError, RunError

HERE = Path(__file__).parent
PROTEINS = HERE / "uniprot_500.fasta.gz"
MANY = HERE.parents[1] / "recipes/data/uniprot_4k.fasta.gz"
SPLITS = ("train", "valid", "test")


@pytest.fixture(scope="module")
def proteins(tmp_path_factory) -> Path:
    """500 proteins as a plain file, the first 50 again at its end under other names."""
    text = gzip.decompress(PROTEINS.read_bytes())
    records = text[1:].split(b"\n>")
    path = tmp_path_factory.mktemp("proteins") / "in.fasta"
    path.write_bytes(text + b"".join(b">again" + record + b"\n" for record in records[:50]))
    return path


def tree(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}


def sequences(out: Path, split: str) -> list[str]:
    shards = Shards(out, split)
    return [shards.alphabet.decode(shards.sequence(i)) for i in range(len(shards))]


def sign(out: Path, manifest: dict) -> None:
    """Write a manifest that only its contents give away."""
    plain = {key: value for key, value in manifest.items() if key != "sha256"}
    (out / "manifest.json").write_text(json.dumps(plain | {"sha256": manifest_sha256(plain)}))


OPTIONS = PrepareOptions(valid_fraction=0.1, test_fraction=0.1)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("unit", [3_000, 40_000])
def test_any_number_of_workers_writes_the_same_bytes(workers, unit, proteins, tmp_path, monkeypatch):
    prepare([str(proteins)], tmp_path / "one", OPTIONS)
    monkeypatch.setattr(tasks, "UNIT", unit)  # many small ranges
    prepare([str(proteins)], tmp_path / "many", OPTIONS, workers=workers)
    assert tree(tmp_path / "one") == tree(tmp_path / "many")


def test_counts_add_up_and_first_of_equal_sequences_stays(proteins, tmp_path):
    result = prepare([str(proteins)], tmp_path / "out", OPTIONS)
    with open(proteins) as file:
        records = [(title, sequence) for title, sequence in SimpleFastaParser(file)]
    first = dict(reversed([(sequence, title) for title, sequence in records]))
    assert result["records_read"] == len(records)
    assert result["records_kept"] == len(first) == sum(entry["sequences"] for entry in result["splits"].values())
    assert result["records_dropped"] == {"duplicate": len(records) - len(first)}
    assert result["residues"] == sum(map(len, first))
    assert result["counts"]["sequences_with_duplicates"] == sum(
        sum(1 for _, other in records if other == sequence) > 1 for sequence in first
    )
    found = {}
    for split in SPLITS:
        shards = Shards(tmp_path / "out", split)
        found |= {shards.alphabet.decode(shards.sequence(i)): shards.header(i) for i in range(len(shards))}
    assert found == first
    log = (tmp_path / "out/prepare.log").read_text().splitlines()
    lines = open(proteins).read().splitlines()
    noted = [line.split("\t")[0].rsplit(":", 2) for line in log if "\tduplicate" in line]
    assert len(noted) == len(records) - len(first)
    for name, line, identifier in noted:
        assert name == str(proteins) and lines[int(line) - 1].split()[0] == ">" + identifier


# splits -----------------------------------------------------------------------------------------------------------------


def test_splits_do_not_depend_on_order_headers_case_or_line_length(proteins, tmp_path):
    with open(proteins) as file:
        records = [(title, sequence) for title, sequence in SimpleFastaParser(file)]
    random.Random(1).shuffle(records)
    (tmp_path / "b.fasta").write_text("".join(f"> x{k}\r\n{sequence.lower()}*\r\n" for k, (_, sequence) in enumerate(records)))
    prepare([str(proteins)], tmp_path / "a", OPTIONS)
    prepare([str(tmp_path / "b.fasta")], tmp_path / "b", OPTIONS)
    sizes = []
    for split in SPLITS:
        assert set(sequences(tmp_path / "a", split)) == set(sequences(tmp_path / "b", split))
        sizes.append(len(sequences(tmp_path / "a", split)))
    assert all(25 <= size <= 75 for size in sizes[1:])  # 10 % of 498 each


def test_the_split_of_a_sequence_is_fixed_for_ever(tmp_path):
    """Another value here would move sequences between training and validation for everyone."""
    (tmp_path / "in.fasta").write_text("".join(f">{k}\nMKTAYIAKQR{'ACDEFGHIKL'[k]}\n" for k in range(10)))
    out = {}
    for seed in (0, 1):
        prepare([str(tmp_path / "in.fasta")], tmp_path / str(seed), PrepareOptions(valid_fraction=0.5, seed=seed))
        out[seed] = "".join(s[-1] for s in sequences(tmp_path / str(seed), "valid"))
    assert out == {0: "CL", 1: "DGHI"}


def test_without_deduplication_equal_sequences_are_on_one_side(proteins, tmp_path):
    result = prepare([str(proteins)], tmp_path / "out", PrepareOptions(valid_fraction=0.3, dedup=False))
    assert result["records_kept"] == result["records_read"] == 550
    assert not set(sequences(tmp_path / "out", "train")) & set(sequences(tmp_path / "out", "valid"))


@pytest.mark.parametrize("columns", ["member first", "representative first", "gzip"])
def test_members_of_a_cluster_are_on_one_side(columns, tmp_path):
    draw = random.Random(0)
    members = [f"m{k}" for k in range(300)]
    cluster = {m: f"m{draw.randrange(40)}" for m in members}
    (tmp_path / "in.fasta").write_text("".join(f">{m} text\n{''.join(draw.choices('ACDEFGHIKL', k=50))}\n" for m in [*members, "alone"]))
    rows = [(m, c) if columns != "representative first" else (c, m) for m, c in cluster.items()]
    table = "".join("\t".join(row) + "\n" for row in rows).encode()
    (tmp_path / "c.tsv").write_bytes(gzip.compress(table) if columns == "gzip" else table)
    result = prepare([str(tmp_path / "in.fasta")], tmp_path / "out", PrepareOptions(valid_fraction=0.3, clusters=str(tmp_path / "c.tsv")))
    assert result["counts"]["unclustered_records"] == 1
    sides, numbers = {}, {}
    for split in SPLITS[:2]:
        shards = Shards(tmp_path / "out", split)
        for i in range(len(shards)):
            name = cluster.get(shards.header(i).split()[0], "alone")
            assert sides.setdefault(name, split) == split
            assert numbers.setdefault(name, shards.clusters[i]) == shards.clusters[i]
    assert len(set(numbers.values())) == len(numbers) and set(sides.values()) == {"train", "valid"}


def test_clusters_of_uniref_headers(tmp_path):
    (tmp_path / "in.fasta").write_text(
        ">UniRef90_A UniRef50_X n=1\nMKVA\n>UniRef90_B UniRef50_X n=2\nMKVC\n>UniRef90_C n=2 RepID=Q1_HUMAN\nMKVD\n>UniRef90_D\nMKVE\n"
    )
    prepare([str(tmp_path / "in.fasta")], tmp_path / "out", PrepareOptions(valid_fraction=0, clusters="uniref"))
    a, b, c, d = Shards(tmp_path / "out", "train").clusters
    assert a == b and len({a, c, d}) == 3


@pytest.mark.parametrize(
    "table, problem", [("a\tb\tc\n", ":1 has 3 columns"), ("", "is empty"), ("a\tb\na\tc\nd\tb\n", "lists members twice")]
)
def test_a_wrong_cluster_table_is_refused(table, problem, proteins, tmp_path):
    (tmp_path / "c.tsv").write_text(table)
    with pytest.raises(RequestError, match=problem):
        prepare([str(proteins)], tmp_path / "out", PrepareOptions(clusters=str(tmp_path / "c.tsv")))
    assert not (tmp_path / "out").exists()


# policies ---------------------------------------------------------------------------------------------------------------

ODD = ">ok\nMKV\n>bad\nMK1V\n>stop\nM*KV\n>gap\nM-K-V.C\n>short\nM\n>long\nMKVAAAAAAAAAAAAAAAAAAA\n"


@pytest.mark.parametrize(
    "options, kept, dropped",
    [
        ({}, ["MKV", "MK?V", "M?KV", "MKVC", "MKVAAAAAAAAAAAAAAAAAAA"], {"too_short": 1}),
        ({"on_invalid": "drop"}, ["MKV", "M?KV", "MKVC", "MKVAAAAAAAAAAAAAAAAAAA"], {"too_short": 1, "invalid": 1}),
        ({"internal_stop": "drop"}, ["MKV", "MK?V", "MKVC", "MKVAAAAAAAAAAAAAAAAAAA"], {"too_short": 1, "internal_stop": 1}),
        ({"gaps": "invalid", "on_invalid": "drop"}, ["MKV", "M?KV", "MKVAAAAAAAAAAAAAAAAAAA"], {"too_short": 1, "invalid": 2}),
        ({"gaps": "invalid"}, ["MKV", "MK?V", "M?KV", "M?K?V?C", "MKVAAAAAAAAAAAAAAAAAAA"], {"too_short": 1}),
        ({"min_length": 4, "max_length": 10}, ["MK?V", "M?KV", "MKVC"], {"too_short": 2, "too_long": 1}),
    ],
)
def test_policies(options, kept, dropped, tmp_path):
    (tmp_path / "in.fasta").write_text(ODD)
    result = prepare([str(tmp_path / "in.fasta")], tmp_path / "out", PrepareOptions(valid_fraction=0, **options))
    assert [s.replace("<unk>", "?") for s in sequences(tmp_path / "out", "train")] == kept
    assert result["records_dropped"] == dropped
    log = (tmp_path / "out/prepare.log").read_text()
    for reason in dropped:
        assert f"\t{reason}" in log


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "options, place",
    [
        ({"on_invalid": "error"}, "in.fasta:3:bad has the invalid letter '1'"),
        ({"internal_stop": "error"}, r"in.fasta:5:stop has a \* inside"),
    ],
)
def test_the_policy_error_names_file_line_and_record(options, place, workers, tmp_path):
    (tmp_path / "in.fasta").write_text(ODD)
    with pytest.raises(RequestError, match=place):
        prepare([str(tmp_path / "in.fasta")], tmp_path / "out", PrepareOptions(**options), workers=workers)
    assert not (tmp_path / "out").exists()


def test_lines_are_counted_over_ranges_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "UNIT", 500)
    (tmp_path / "in.fasta").write_text("".join(f">r{k}\nMKVAAAAA\n\nMKV\n" for k in range(400)) + ">bad\nM1V\n")
    with pytest.raises(RequestError, match="in.fasta:1601:bad"):
        prepare([str(tmp_path / "in.fasta")], tmp_path / "out", PrepareOptions(on_invalid="error"), workers=2)


@pytest.mark.parametrize(
    "options",
    [
        {"alphabet": "rna"},
        {"alphabet": "dna-bpe:3"},
        {"on_invalid": "keep"},
        {"valid_fraction": 1.0},
        {"valid_fraction": 0.6, "test_fraction": 0.4},
        {"min_length": -1},
        {"max_length": 1},
        {"format": "vcf"},
    ],
)
def test_impossible_options_are_refused(options):
    with pytest.raises(RequestError):
        PrepareOptions(**options)


def test_nothing_kept_is_an_error_with_the_reasons(tmp_path):
    (tmp_path / "in.fasta").write_text(">a\nM\n>b\nK\n>c\n")
    with pytest.raises(RequestError, match="no record of .*in.fasta was kept .3 read; .*2 too_short.*choose other limits"):
        prepare([str(tmp_path / "in.fasta")], tmp_path / "out")


# long records -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def short_blocks(monkeypatch):
    """Records of more than 300 kB come in fragments of about 70 kB."""
    monkeypatch.setattr(compression, "OUTPUT", 50_000)
    monkeypatch.setattr(blocks, "FRAGMENT", 70_000)
    monkeypatch.setattr(blocks.cut, "__defaults__", (70_000, 300_000, 70_000))


def chromosome(length: int, seed: int) -> str:
    draw = np.random.default_rng(seed)
    bases = np.frombuffer(b"ACGT", np.uint8)[draw.integers(0, 4, length)]
    bases[length // 3 : length // 3 + 5_000] = ord("N")
    bases[length // 2 : length // 2 + 900] += 32
    return bases.tobytes().decode()


@pytest.mark.parametrize("newline, workers", [(60, 1), (60, 3), (10**9, 2)])
def test_a_chromosome_in_fragments_is_cut_as_a_whole_one(newline, workers, tmp_path, request):
    text = ""
    for k, length in enumerate((900_000, 50_000, 65_536, 200_001)):
        sequence = chromosome(length, k + 1)
        text += f">chr{k} of test\n" + "\n".join(sequence[i : i + newline] for i in range(0, length, newline)) + "\n"
    (tmp_path / "in.fa").write_text(text)
    with gzip.open(tmp_path / "in.fa.gz", "wt") as file:
        file.write(text)
    options = PrepareOptions(alphabet="dna", valid_fraction=0.3)
    whole = prepare([str(tmp_path / "in.fa.gz")], tmp_path / "whole", options)
    request.getfixturevalue("short_blocks")
    cut = prepare([str(tmp_path / "in.fa.gz")], tmp_path / "cut", options, workers=workers)
    assert tree(tmp_path / "whole") == tree(tmp_path / "cut")
    assert whole == cut | {k: whole[k] for k in ("directory", "seconds", "mb_per_s")}
    assert whole["counts"]["n_run_bases"] == 4 * 5_000
    assert whole["residues"] + 4 * 5_000 + whole["counts"]["split_gap_bases"] == 900_000 + 50_000 + 65_536 + 200_001


def test_a_protein_beyond_all_limits_is_dropped_not_cut(tmp_path, short_blocks):
    (tmp_path / "in.fa").write_text(">a\nMKV\n>giant\n" + ("A" * 60 + "\n") * 10_000 + ">b\nMKVA\n")
    with gzip.open(tmp_path / "in.fa.gz", "wt") as file:
        file.write((tmp_path / "in.fa").read_text())
    result = prepare([str(tmp_path / "in.fa.gz")], tmp_path / "out", PrepareOptions(valid_fraction=0))
    assert result["records_dropped"] == {"too_long": 1} and result["records_kept"] == 2


def test_runs_of_n_can_stay(tmp_path):
    (tmp_path / "in.fa").write_text(f">c\nACGTACGT{'N' * 30}acgtt\n")
    options = {"alphabet": "dna", "valid_fraction": 0}
    prepare([str(tmp_path / "in.fa")], tmp_path / "split", PrepareOptions(**options))
    prepare([str(tmp_path / "in.fa")], tmp_path / "keep", PrepareOptions(n_runs="keep", soft_mask=False, **options))
    shards = Shards(tmp_path / "split", "train")
    assert [shards.header(i) for i in range(2)] == ["c:1-8", "c:39-43"]
    assert shards.soft_mask(1).all() and not shards.soft_mask(0).any()
    assert sequences(tmp_path / "keep", "train") == ["ACGTACGT" + "N" * 30 + "ACGTT"]
    assert Shards(tmp_path / "keep", "train").soft_mask(0) is None


def test_both_strands_of_a_read_are_on_one_side(tmp_path):
    draw = random.Random(2)
    reads = ["".join(draw.choices("ACGT", k=80)) for _ in range(200)]
    other = [read[::-1].translate(str.maketrans("ACGT", "TGCA")) for read in reads]
    (tmp_path / "in.fa").write_text("".join(f">{k}\n{read}\n" for k, read in enumerate(reads + other)))
    prepare([str(tmp_path / "in.fa")], tmp_path / "out", PrepareOptions(alphabet="dna", valid_fraction=0.5))
    train, valid = set(sequences(tmp_path / "out", "train")), set(sequences(tmp_path / "out", "valid"))
    assert len(train) + len(valid) == 400
    assert all((read in train) == (back in train) for read, back in zip(reads, other, strict=True))


def test_byte_pairs_decode_to_the_bases(tmp_path):
    (tmp_path / "in.fa").write_text("".join(f">{k}\n{chromosome(9_000, k)}\n" for k in range(8)))
    prepare([str(tmp_path / "in.fa")], tmp_path / "dna", PrepareOptions(alphabet="dna", valid_fraction=0, soft_mask=False))
    result = prepare([str(tmp_path / "in.fa")], tmp_path / "bpe", PrepareOptions(alphabet="dna-bpe:300", valid_fraction=0))
    assert sequences(tmp_path / "bpe", "train") == sequences(tmp_path / "dna", "train")
    shards = Shards(tmp_path / "bpe", "train")
    assert result["vocabulary"] == 300 and shards.sequence(0).dtype == np.uint16
    assert shards.residues < 0.5 * Shards(tmp_path / "dna", "train").residues
    text = shards.alphabet.decode(shards.sequence(0))
    assert shards.alphabet.encode(text.encode()).tolist() == shards.sequence(0).tolist()
    verify(tmp_path / "bpe")


# interruptions ----------------------------------------------------------------------------------------------------------

CHILD = """
import sys, tempfile
from bmoe.data import blocks, compression, prepare, run, tasks
tasks.UNIT, run.JOURNAL_S, blocks.FRAGMENT, compression.OUTPUT = 16_000, 0.0, 16_000, 16_000
blocks.cut.__defaults__ = (16_000, blocks.LIMIT, 16_000)
if __name__ == "__main__":
    name, out, workers = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:  # loads what is compiled, so that the kill hits the work
        with open(folder + "/in.fasta", "w") as file:
            file.write(">a\\nMKV\\n")
        prepare.prepare([folder + "/in.fasta"], folder + "/out")
    print("go", flush=True)
    options = prepare.PrepareOptions(valid_fraction=0.1)
    prepare.prepare([name], out, options, workers=int(workers), resume=True)
    print("done", flush=True)
"""


def killed_often(name: Path, folder: Path, workers: int, kills: int, seed: int) -> int:
    """Prepare with `kills` SIGKILLs at random moments, each followed by --resume. Returns how many hit before the end."""
    (folder / "child.py").write_text(CHILD)
    draw, hits, span = random.Random(seed), 0, None
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    for attempt in range(kills + 1):
        child = subprocess.Popen(
            [sys.executable, folder / "child.py", name, folder / "killed", str(workers)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        assert child.stdout.readline() == "go\n"
        begun = time.monotonic()
        if attempt < kills:
            time.sleep(draw.uniform(0, span or 0.6))
            os.killpg(child.pid, signal.SIGKILL)
        rest = child.stdout.read()
        child.wait()
        hits += "done" not in rest
        if "done" in rest:
            span = min(span or 9, time.monotonic() - begun)
            if attempt < kills:  # it was faster: start again
                subprocess.run(["rm", "-r", folder / "killed"], check=True)
    return hits


@pytest.mark.parametrize(
    "kills, workers", [(2, 1), (2, 2), pytest.param(15, 1, marks=pytest.mark.slow), pytest.param(15, 2, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", ["plain", pytest.param("gzip", marks=pytest.mark.slow)])
def test_killed_and_resumed_gives_the_bytes_of_an_undisturbed_run(kills, workers, kind, tmp_path):
    name = tmp_path / ("in.fasta" if kind == "plain" else "in.fasta.gz")
    text = gzip.decompress(MANY.read_bytes())
    text += b"\n".join(b">again" + record for record in text[1:].split(b"\n>")[::7]) + b"\n"
    name.write_bytes(text if kind == "plain" else gzip.compress(text, 1))
    prepare([str(name)], tmp_path / "whole", PrepareOptions(valid_fraction=0.1))
    assert killed_often(name, tmp_path, workers, kills, kills + workers) > 0
    assert tree(tmp_path / "whole") == tree(tmp_path / "killed")


def test_an_unfinished_preparation_is_not_overwritten_and_resume_wants_the_same_request(proteins, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr("bmoe.data.finish.write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prepare([str(proteins)], out, OPTIONS)
    monkeypatch.undo()
    with pytest.raises(RequestError, match="unfinished.*--resume"):
        prepare([str(proteins)], out, OPTIONS)
    with pytest.raises(RequestError, match="other inputs or options"):
        prepare([str(proteins)], out, PrepareOptions(seed=5), resume=True)
    with pytest.raises(RequestError, match="no prepared data"):
        Shards(out, "train")
    prepare([str(proteins)], out, OPTIONS, resume=True)
    prepare([str(proteins)], tmp_path / "whole", OPTIONS)
    assert tree(out) == tree(tmp_path / "whole")


def test_resume_in_every_phase_keeps_the_hashes_of_streams(proteins, tmp_path, monkeypatch):
    """A stream that was read to its end before the kill is not read again, but its SHA-256 is in the manifest."""
    names = [str(PROTEINS), str(proteins), str(MANY)]
    prepare(names, tmp_path / "whole", OPTIONS)
    monkeypatch.setattr("bmoe.data.run.JOURNAL_S", 0.0)
    for stop in (1, 2, 3, 4, "finish"):
        with monkeypatch.context() as patch:
            if stop == "finish":
                patch.setattr("bmoe.data.finish.write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            else:
                saves = iter([*[None] * stop, KeyboardInterrupt])
                save = Ledger.save

                def killed(self, journal, saves=saves, save=save):
                    save(self, journal)
                    if (error := next(saves)) is not None:
                        raise error

                patch.setattr(Ledger, "save", killed)
            with pytest.raises(KeyboardInterrupt):
                prepare(names, tmp_path / str(stop), OPTIONS)
        prepare(names, tmp_path / str(stop), OPTIONS, resume=True)
        assert tree(tmp_path / str(stop)) == tree(tmp_path / "whole")


def test_the_same_again_is_already_prepared_and_anything_else_is_refused(proteins, tmp_path):
    first = prepare([str(proteins)], tmp_path / "out", OPTIONS)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    again = prepare([str(proteins)], tmp_path / "out", OPTIONS, workers=2)
    assert again["already_prepared"] and not first["already_prepared"] and again["splits"] == first["splits"]
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    with pytest.raises(RequestError, match="other options .min_length"):
        prepare([str(proteins)], tmp_path / "out", PrepareOptions(valid_fraction=0.1, test_fraction=0.1, min_length=3))
    with pytest.raises(RequestError, match="other inputs"):
        prepare([str(PROTEINS)], tmp_path / "out", OPTIONS)


def test_an_input_that_changed_without_growing_is_not_already_prepared(tmp_path):
    (tmp_path / "in.fasta").write_text(">a\nMKV\n")
    prepare([str(tmp_path / "in.fasta")], tmp_path / "out", PrepareOptions())
    later = time.time() + 10
    os.utime(tmp_path / "in.fasta", (later, later))
    assert prepare([str(tmp_path / "in.fasta")], tmp_path / "out", PrepareOptions())["already_prepared"]
    (tmp_path / "in.fasta").write_text(">a\nMKW\n")
    os.utime(tmp_path / "in.fasta", (later, later))
    with pytest.raises(RequestError, match=r"in\.fasta is not what .* was prepared from"):
        prepare([str(tmp_path / "in.fasta")], tmp_path / "out", PrepareOptions())


def test_a_damaged_journal_is_refused_by_name(tmp_path):
    (tmp_path / "in.fasta").write_text(">a\nMKV\n")
    (tmp_path / "out/.prepare").mkdir(parents=True)
    (tmp_path / "out/.prepare/journal").write_text("")
    with pytest.raises(RequestError, match=r"journal is damaged: remove .*out"):
        prepare([str(tmp_path / "in.fasta")], tmp_path / "out", PrepareOptions(), resume=True)


def test_a_folder_with_other_files_is_left_alone(proteins, tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(RequestError, match="not empty"):
        prepare([str(proteins)], tmp_path, OPTIONS)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_one_sentence_and_no_manifest(workers, proteins, tmp_path):
    """A limit on the size of files stands for the full disk; the system reports both from write()."""
    code = (
        "import resource, signal, errno\nfrom bmoe.data import prepare\nfrom bmoe.errors import RunError\n"
        "if __name__ == '__main__':\n"
        "    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        f"    try:\n        prepare.prepare([{str(proteins)!r}], {str(tmp_path / 'out')!r}, workers={workers})\n"
        "    except RunError as error:\n        print(error)\n"
    )
    (tmp_path / "run.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run([sys.executable, tmp_path / "run.py"], capture_output=True, text=True, env=environment)
    assert "out" in done.stdout and done.stdout.count("\n") == 1 and "Traceback" not in done.stderr, done
    assert not (tmp_path / "out/manifest.json").exists()
    prepare([str(proteins)], tmp_path / "out", resume=True)
    prepare([str(proteins)], tmp_path / "whole")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_no_space_names_the_way_on(proteins, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(RunError, match="is full: free some space and go on with --resume"):
        prepare([str(proteins)], tmp_path / "out")


@pytest.mark.parametrize("unit", [3_000, 1 << 21])
def test_inputs_are_hashed_as_they_are_on_disk(unit, proteins, tmp_path, monkeypatch):
    """With what stands before the first record, long records, parts that begin within a file, compressed and empty files, and resumed."""
    monkeypatch.setattr(tasks, "UNIT", unit)
    monkeypatch.setattr("bmoe.data.run.JOURNAL_S", 0.0)
    text = proteins.read_bytes()
    inputs = {
        "a.fa": b"\xef\xbb\xbfsome words\n\n" + text,
        "b.fa": text[: 3 * unit + 5],
        "c.fa": b">giant\n" + b"ACDEFGHIKL\n" * 4000 + text,
        "d.fa": text[:10_000].replace(b"\n", b"\r\n"),
        "e.fa.gz": gzip.compress(text),
    }
    for name, data in inputs.items():
        (tmp_path / name).write_bytes(data)
    names = [str(tmp_path / name) for name in inputs]
    wanted = {str(tmp_path / name): sha256(data).hexdigest() for name, data in inputs.items()}
    result = prepare(names, tmp_path / "out", OPTIONS, workers=2)
    assert {source["name"]: source["sha256"] for source in result["sources"]} == wanted
    for number in (1, 2, 3):
        result = prepare(names, tmp_path / f"p{number}", OPTIONS, part=(number, 3))
        for source in result["sources"]:
            begin, end = source.get("range", (0, None))
            assert source["sha256"] == sha256(Path(source["name"]).read_bytes()[begin:end]).hexdigest()
    saves, save = iter([None, None, None, KeyboardInterrupt]), Ledger.save

    def killed(self, journal):
        save(self, journal)
        if (error := next(saves)) is not None:
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare(names, tmp_path / "killed", OPTIONS)
    result = prepare(names, tmp_path / "killed", OPTIONS, resume=True)
    assert {source["name"]: source["sha256"] for source in result["sources"]} == wanted


# parts ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 7])
def test_parts_merge_into_what_one_machine_prepares(count, proteins, tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "UNIT", 10_000)
    names = [str(proteins), str(PROTEINS), str(MANY)]
    whole = prepare(names, tmp_path / "whole", OPTIONS)
    for k in range(1, count + 1):
        prepare(names, tmp_path / f"part{k}", OPTIONS, part=(k, count))
    merged = merge([tmp_path / f"part{k}" for k in reversed(range(1, count + 1))], tmp_path / "merged")
    verify(tmp_path / "merged")
    assert merged["copied"] == 0
    for key in ("records_read", "records_kept", "records_dropped", "residues", "lengths", "inputs", "options"):
        assert merged[key] == whole[key], key
    for split in SPLITS:
        one, other = Shards(tmp_path / "whole", split), Shards(tmp_path / "merged", split)
        assert len(one) == len(other) and one.lengths.tolist() == other.lengths.tolist()
        assert all((one.sequence(i) == other.sequence(i)).all() and one.header(i) == other.header(i) for i in range(len(one)))


def test_parts_with_byte_pairs_learn_one_encoding(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "UNIT", 20_000)
    (tmp_path / "in.fa").write_text("".join(f">{k}\n{chromosome(9_000, k)}\n" for k in range(12)))
    options = PrepareOptions(alphabet="dna-bpe:200", valid_fraction=0.3)
    whole = prepare([str(tmp_path / "in.fa")], tmp_path / "whole", options)
    for k in (1, 2):
        prepare([str(tmp_path / "in.fa")], tmp_path / f"p{k}", options, part=(k, 2))
    merged = merge([tmp_path / "p1", tmp_path / "p2"], tmp_path / "merged")
    verify(tmp_path / "merged")
    assert merged["files"]["tokenizer.json"] == whole["files"]["tokenizer.json"]
    for split in SPLITS:
        assert sequences(tmp_path / "merged", split) == sequences(tmp_path / "whole", split)
    manifest = json.loads((tmp_path / "p2/manifest.json").read_text())
    manifest["files"]["tokenizer.json"]["sha256"] = "0" * 64
    sign(tmp_path / "p2", manifest)
    with pytest.raises(RequestError, match="different byte-pair encodings"):
        merge([tmp_path / "p1", tmp_path / "p2"], tmp_path / "other")


def test_wrong_sets_of_parts_are_refused(proteins, tmp_path):
    for k in (1, 2):
        prepare([str(proteins)], tmp_path / f"p{k}", OPTIONS, part=(k, 2))
    prepare([str(proteins)], tmp_path / "whole", OPTIONS)
    prepare([str(proteins)], tmp_path / "other", PrepareOptions(seed=3), part=(2, 2))
    for folders, problem in (
        (["p1"], "part 2 of 2 is missing"),
        (["p1", "p1", "p2"], "both part 1"),
        (["p1", "whole"], "no part"),
        (["p1", "other"], "different"),
        ([], "no part was named"),
        (["p1", "nowhere"], "no prepared data"),
    ):
        with pytest.raises(RequestError, match=problem):
            merge([tmp_path / name for name in folders], tmp_path / "merged")
    with pytest.raises(RequestError, match="not empty"):
        merge([tmp_path / "p1", tmp_path / "p2"], tmp_path / "whole")


def test_a_merged_log_has_the_places_of_the_whole_input(tmp_path, monkeypatch):
    """Lines are counted through the parts, over two plain files and one that belongs whole to a part."""
    monkeypatch.setattr(tasks, "UNIT", 2_000)
    for name, first in (("a.fasta", 0), ("b.fasta", 150)):
        own = [f"{k:b}".replace("0", "A").replace("1", "C") for k in range(first, first + 150)]
        records = [f">r{k}\n{'!' * (k % 3 == 0)}MKVLW{'D' * 20}{letters}\n\n" for k, letters in enumerate(own, first)]
        (tmp_path / name).write_text("text before\n" + "".join(records))
    (tmp_path / "c.fasta.gz").write_bytes(gzip.compress(b">z\nMK!V\n"))
    inputs = [str(tmp_path / name) for name in ("a.fasta", "c.fasta.gz", "b.fasta")]
    prepare(inputs, tmp_path / "whole", OPTIONS)
    whole = (tmp_path / "whole/prepare.log").read_text()
    assert f"{tmp_path}/b.fasta:2:r150\tinvalid_unknown" in whole
    for count in (2, 3, 7):
        for k in range(count):
            prepare(inputs, tmp_path / f"{count}-{k}", OPTIONS, part=(k + 1, count))
        merged = merge([tmp_path / f"{count}-{k}" for k in range(count)], tmp_path / f"merged-{count}")
        assert (tmp_path / f"merged-{count}/prepare.log").read_text() == whole
        assert verify(tmp_path / f"merged-{count}")["sequences"] == sum(split["sequences"] for split in merged["splits"].values())
    assert "part_begins\tat byte" in (tmp_path / "7-1/prepare.log").read_text()
    refused = r"a\.fasta:\d+:r\d+ \(lines are counted from byte \d+, where this part begins\) has the invalid letter"
    with pytest.raises(RequestError, match=refused):
        prepare(inputs, tmp_path / "error", PrepareOptions(on_invalid="error"), part=(2, 7))


@pytest.mark.parametrize("damage", ["train-00000.tokens", "train-00000.offsets", "train-00000.hashes", "manifest.json"])
def test_parts_that_are_not_whole_are_refused_and_nothing_is_written(damage, proteins, tmp_path):
    for k in (1, 2):
        prepare([str(proteins)], tmp_path / f"p{k}", OPTIONS, part=(k, 2))
    path = tmp_path / "p1" / damage
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(RequestError, match=f"p1/{damage}"):
        merge([tmp_path / "p1", tmp_path / "p2"], tmp_path / "merged")
    path.unlink()
    with pytest.raises(RequestError, match="p1.*missing"):
        merge([tmp_path / "p1", tmp_path / "p2"], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


# verification -----------------------------------------------------------------------------------------------------------


def test_every_flipped_byte_is_found_and_named(tmp_path):
    (tmp_path / "in.fa").write_text(f">c\n{chromosome(70_000, 0)}\n>d\nACGTTAGACA\n")
    table = tmp_path / "c.tsv"
    table.write_text("c\tc\nd\tc\n")
    prepare([str(tmp_path / "in.fa")], tmp_path / "out", PrepareOptions(alphabet="dna", valid_fraction=0, clusters=str(table)))
    verify(tmp_path / "out")
    files = [p for p in (tmp_path / "out").iterdir() if p.name != "manifest.json"]
    assert len(files) >= 8
    for path in files:
        whole = path.read_bytes()
        for place in {0, len(whole) // 2, max(len(whole) - 1, 0)}:
            broken = bytearray(whole or b"?")
            broken[place] ^= 1
            path.write_bytes(broken)
            with pytest.raises(RequestError, match=path.name):
                verify(tmp_path / "out")
        path.write_bytes(whole[:-1] or b"?")
        with pytest.raises(RequestError, match=path.name):
            verify(tmp_path / "out")
        if not path.name.startswith("prepare"):
            with pytest.raises(RequestError, match=path.name):
                Shards(tmp_path / "out", "train")
        path.write_bytes(whole)
    files[0].unlink()
    with pytest.raises(RequestError, match=f"{files[0].name} is missing"):
        verify(tmp_path / "out")


def test_a_manifest_that_lies_is_found(proteins, tmp_path):
    prepare([str(proteins)], tmp_path / "out", OPTIONS)
    path = tmp_path / "out/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["splits"]["train"]["sequences"] += 1
    path.write_text(json.dumps(manifest))
    with pytest.raises(RequestError, match="manifest.json is damaged"):
        verify(tmp_path / "out")
    sign(tmp_path / "out", manifest)
    with pytest.raises(RequestError, match="split train"):
        verify(tmp_path / "out")
    path.write_text("{")
    with pytest.raises(RequestError, match="cannot be read"):
        verify(tmp_path / "out")
    path.write_text('{"format": 99}')
    with pytest.raises(RequestError, match="another format"):
        verify(tmp_path / "out")


def test_dry_run_leaves_nothing_and_predicts_a_small_input_exactly(proteins, tmp_path):
    predicted = prepare([str(proteins)], tmp_path / "out", OPTIONS, dry_run=True)
    assert list(tmp_path.iterdir()) == []
    real = prepare([str(proteins)], tmp_path / "out", OPTIONS)
    assert predicted["predicted"]["records_kept"] == real["records_kept"] and predicted["dry_run"]
    size = sum(p.stat().st_size for p in (tmp_path / "out").iterdir())
    assert abs(predicted["predicted"]["bytes"] - size) < 500  # the names in the manifest differ


@pytest.mark.parametrize("kind", ["plain", "gzip"])
def test_dry_run_reads_only_the_beginning(kind, tmp_path, monkeypatch):
    """Not even for a hash: an input may have terabytes."""
    monkeypatch.setattr("bmoe.data.prepare.DRY_RUN", 300_000)
    monkeypatch.setattr(tasks, "UNIT", 50_000)
    monkeypatch.setattr(compression, "CHUNK", 20_000)
    monkeypatch.setattr(blocks.cut, "__defaults__", (50_000, blocks.LIMIT, 50_000))
    name, count = tmp_path / "in.fasta", []
    text = gzip.decompress(MANY.read_bytes()) * 4
    name.write_bytes(text if kind == "plain" else gzip.compress(text, 1))
    for what, real in (("pread", os.pread), ("preadv", os.preadv)):
        monkeypatch.setattr(os, what, lambda *rest, real=real: count.append(real(*rest)) or count[-1])
    monkeypatch.setattr(digests.Inputs, "__init__", lambda *_: pytest.fail("the whole input is hashed"))
    dry = prepare([str(name)], tmp_path / "out", OPTIONS, dry_run=True)
    assert dry["share_read"] < 0.3 and sum(n if isinstance(n, int) else len(n) for n in count) < 0.3 * len(text)


@pytest.mark.parametrize("kind", ["plain", "gzip"])
def test_dry_run_of_a_part_predicts_the_whole(kind, tmp_path, monkeypatch):
    """Real proteins are alike enough that the first third tells the rest within 15 %."""
    monkeypatch.setattr("bmoe.data.prepare.DRY_RUN", 700_000)
    monkeypatch.setattr(tasks, "UNIT", 50_000)
    monkeypatch.setattr(blocks, "FRAGMENT", 50_000)
    monkeypatch.setattr(blocks.cut, "__defaults__", (50_000, blocks.LIMIT, 50_000))
    monkeypatch.setattr(compression, "CHUNK", 20_000)
    monkeypatch.setattr(compression, "OUTPUT", 40_000)
    name = tmp_path / "in.fasta"
    name.write_bytes(gzip.decompress(MANY.read_bytes()) if kind == "plain" else MANY.read_bytes())
    dry = prepare([str(name)], tmp_path / "out", OPTIONS, dry_run=True)
    real = prepare([str(name)], tmp_path / "out", OPTIONS)
    assert 0.2 < dry["share_read"] < 0.6
    for what in ("records_read", "records_kept", "residues"):
        assert abs(dry["predicted"][what] / real[what] - 1) < 0.15, what


@pytest.mark.parametrize("kind", ["plain", "gzip"])
def test_progress_reaches_the_end(kind, proteins, tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "UNIT", 10_000)
    monkeypatch.setattr(blocks, "FRAGMENT", 10_000)
    monkeypatch.setattr(blocks.cut, "__defaults__", (10_000, blocks.LIMIT, 10_000))
    monkeypatch.setattr(compression, "OUTPUT", 10_000)
    monkeypatch.setattr(compression, "CHUNK", 5_000)
    seen, name = [], proteins
    if kind == "gzip":
        name = tmp_path / "in.gz"
        name.write_bytes(gzip.compress(proteins.read_bytes()))
    monkeypatch.setattr("bmoe.data.run.SHOWN_S", 0.0)
    prepare([str(name)], tmp_path / "out", OPTIONS, progress=seen.append)
    done = [p.done for p in seen]
    assert done == sorted(done) and done[-1] == seen[-1].total == name.stat().st_size and len(set(done)) > 10


def test_lengths_are_exact_however_long(tmp_path):
    """Also beyond 65,536, where most inputs have none, and after a resumption."""
    draw = np.random.default_rng(0)
    given = np.concatenate([draw.integers(1, 5000, 3000), draw.integers(60_000, 300_000, 41), [65_535, 65_536, 4_938_920]])
    lengths, resumed = Lengths(), Lengths()
    for part in np.array_split(given, 5):
        lengths.add(part)
        resumed.restore(*json.loads(json.dumps(lengths.counts())))
    found = lengths.summary()
    assert found == resumed.summary()
    assert found["mean"] == round(given.mean(), 2)
    assert found["quantiles"] == {str(q): int(np.quantile(given, q / 100, method="inverted_cdf")) for q in (0, 5, 25, 50, 75, 95, 100)}
    edges = [start for start, _ in found["histogram"]]
    assert edges[0] <= given.min() and edges[-1] == 1 << 22
    assert [number for _, number in found["histogram"]] == np.histogram(given, [*edges, 2 * edges[-1]])[0].tolist()
    assert Lengths().summary() == {"mean": 0.0, "quantiles": {}, "histogram": []}


MEASURED = """
import sys
from bmoe.data.prepare import PrepareOptions, prepare
name, out, alphabet, workers = sys.argv[1:]
prepare([name], out, PrepareOptions(alphabet=alphabet, dedup=False), workers=int(workers))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def proteins_of(length: int, count: int) -> bytes:
    """Records of that length, in lines of 60, under names of their own."""
    lines = ("A" * 60 + "\n") * (length // 60) + "A" * (length % 60) + "\n"
    return "".join(f">UniRef50_{k:09d}\n{lines}" for k in range(count)).encode()


def chromosomes(length: int, count: int) -> bytes:
    """Records of that many bases, runs of lower case, in lines of 60."""
    line = b"ACGTACGGTACCA" * 5
    lines = b"".join((line[:60].lower() if k // 50 % 2 else line[:60]) + b"\n" for k in range(length // 60))
    return b"".join(b">c%d\n" % k + lines for k in range(count))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says what a process took")
@pytest.mark.parametrize("workers", [1, 64])
@pytest.mark.parametrize(
    "kind, alphabet, make",
    [
        ("plain", "protein", lambda: proteins_of(240, 200_000)),
        ("plain", "protein", lambda: proteins_of(3, 1_000_000)),
        ("plain", "dna", lambda: chromosomes(30_000_000, 3)),
        ("gzip", "dna", lambda: chromosomes(15_000_000, 5)),
    ],
    ids=["proteins", "tiny records", "chromosomes", "packed chromosomes"],
)
def test_a_process_stays_below_400_mb_without_deduplication(kind, alphabet, make, workers, tmp_path):
    """Whatever the records and the number of workers; measured as the system counts it, in a process of its own."""
    name, data = tmp_path / "in", make()
    name.write_bytes(gzip.compress(data, 1) if kind == "gzip" else data)
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, "-c", MEASURED, str(name), str(tmp_path / "out"), alphabet, str(workers)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert int(done.stdout) * 1024 < 400e6, done


def test_names_are_hashed_alike_wherever_they_stand():
    """Equal words, equal hashes, in a table of names and in a header; different words differ, also in length only."""
    names = [b"a" * n for n in range(1, 40)] + [b"sp|P12345|NAME_HUMAN", b"P12345", b"UniRef90_A0A009", b"UniRef90_A0A00A"]
    found = name_hashes(names)
    assert len(set(found.tolist())) == len(names) and 0 not in found
    text = b">" + b" text\n>".join(names) + b"\ttext\n"
    records = parse(text, codes_of(protein()), 3, True)
    assert records.identifier.tolist() == found.tolist() and records.lines == len(names)
    assert name_hashes([b"", b"x"])[0] == 0 and name_hashes([]).size == 0


def test_the_set_of_hashes_is_a_set_in_sixteen_bytes_each():
    draw, known = np.random.default_rng(0), set()
    found = HashSet()
    for size in (10, 1000, 50_000):
        batch = draw.integers(1, 40_000, size).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for key, new in zip(batch.tolist(), found.add(batch).tolist(), strict=True):
            assert new == (key not in known)
            known.add(key)
    for _ in range(80):
        batch = draw.integers(1, 2**63, 25_000).astype(np.uint64)
        assert found.add(batch).sum() == 25_000 and not found.add(batch[:100]).any()
    assert found.nbytes <= 16 * len(found)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_log_names_the_first_duplicates_and_counts_all(workers, tmp_path, monkeypatch):
    monkeypatch.setattr("bmoe.data.ledger.NOTES", 3)
    name = tmp_path / "in.fasta"
    name.write_text("".join(f">r{k}\n{'MK' * (2 + k % 4)}\n" for k in range(12)))
    result = prepare([str(name)], tmp_path / "out", PrepareOptions(), workers=workers)
    lines = (tmp_path / "out" / "prepare.log").read_text().splitlines()
    assert [line.split("\t")[0].rpartition(":")[2] for line in lines if line.endswith("\tduplicate")] == ["r4", "r5", "r6"]
    assert "# duplicate: 8" in lines and result["records_dropped"] == {"duplicate": 8}
