"""What becomes of every kind of input that people have: `tests/data/dirty`, a genome, and compressions of all sorts."""

import bz2
import gzip
import io
import json
import lzma
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from Bio.SeqIO.FastaIO import SimpleFastaParser

from bmoe.data.inputs import bgzf_index, find
from bmoe.data.prepare import PrepareOptions, prepare
from bmoe.data.shards import Shards
from bmoe.data.verify import verify
from bmoe.errors import RequestError
from bmoe.reports import prepare as report

HERE = Path(__file__).parent
DIRTY = HERE / "dirty"
PROTEINS = HERE / "uniprot_500.fasta.gz"


def stored(out, split="train") -> list[tuple[str, str]]:
    """(header, sequence) of every sequence of a split; unknown letters read `?`."""
    shards = Shards(out, split)
    return [(shards.header(i), shards.alphabet.decode(shards.sequence(i)).replace("<unk>", "?")) for i in range(len(shards))]


def run(name, tmp_path, **options):
    options = PrepareOptions(**{"valid_fraction": 0.0} | options)
    result = prepare([str(name)], tmp_path / "out", options)
    verify(tmp_path / "out")
    return result, stored(tmp_path / "out")


TABLE = {
    "bgzf_eof_inside.fasta.gz": ([("a", "MKTAY"), ("b", "MNNKV")], {}, {}),
    "multi_member.fasta.gz": ([("a", "MKTAY"), ("b", "MNNKV")], {}, {}),
    "gz_named_fasta.fasta": ([("a", "MKTAY")], {}, {}),
    "blank_lines.fasta": ([("a", "MKTV"), ("b", "MA")], {}, {}),
    "bom.fasta": ([("a", "MKV")], {}, {}),
    "cr_only.fasta": ([("a", "MKTAY"), ("b", "MNN")], {}, {}),
    "crlf.fasta": ([("a desc", "MKTAYIAK"), ("b", "MNN")], {}, {}),
    "dup_ids.fasta": (
        [("a", "MKTAYIAK"), ("a", "MNNNKVLA")],
        {"duplicate": 1},
        {"duplicate_identifiers": 1, "sequences_with_duplicates": 1},
    ),
    "empty_records.fasta": ([("b", "MKV"), ("d", "MA")], {"empty": 2}, {}),
    "glued_header.fasta": ([("b", "MKV")], {"empty": 1}, {"glued_headers": 1}),
    "no_newline.fasta": ([("a", "MKTAYIAK")], {}, {}),
    "nul.fasta": ([("a", "MK?MT"), ("b", "MKV")], {}, {"invalid_letters": 1}),
    "odd_residues.fasta": (
        [
            ("j", "MK?LLV"),
            ("lower", "MKVLAAA"),
            ("gap", "MKVL"),
            ("digit", "MK?VL"),
            ("caret", "MKV?LAA"),
            ("stop_end", "MKVLA"),
            ("stop_mid", "MK?VLA"),
            ("rare", "MUOBZXKV"),
        ],
        {},
        {"invalid_letters": 3, "internal_stops": 1, "terminal_stops": 1, "gaps": 2, "lower_case": 7},
    ),
    "preamble.fasta": ([("a", "MKVTTA")], {}, {"text_lines_before_first_record": 1}),
    "space_header.fasta": ([("P1 first protein", "MKTAYIAKQR"), ("", "MNNNKV"), ("P3\tTabbed", "MKV")], {}, {}),
    "starts_with_x.fasta": ([("a", "XKLAYMY")], {}, {"terminal_stops": 1}),
}


@pytest.mark.parametrize("name", TABLE)
def test_dirty_file(name, tmp_path):
    records, dropped, counts = TABLE[name]
    result, found = run(DIRTY / name, tmp_path)
    assert found == records
    assert result["records_dropped"] == dropped
    assert {k: v for k, v in result["counts"].items() if v} == counts
    assert result["records_read"] == result["records_kept"] + sum(dropped.values())


def test_every_dirty_file_is_in_a_test():
    others = {"empty.fasta", "not_fasta.fasta", "truncated.fasta.gz", "dna_iupac.fasta", "titin_like.fasta", "lengths_1021_1025.fasta"}
    assert {p.name for p in DIRTY.iterdir()} == set(TABLE) | others


@pytest.mark.parametrize(
    "name, problem",
    [("empty.fasta", "no record.*name an input"), ("not_fasta.fasta", "no FASTA record"), ("truncated.fasta.gz", "it ends at byte 48")],
)
def test_unusable_files_are_refused_by_name_and_leave_nothing(name, problem, tmp_path):
    with pytest.raises(RequestError, match=problem) as error:
        prepare([str(DIRTY / name)], tmp_path / "out", PrepareOptions())
    assert name in str(error.value)
    assert not (tmp_path / "out").exists()


def test_long_proteins_stay_whole(tmp_path):
    _, found = run(DIRTY / "titin_like.fasta", tmp_path)
    assert [len(sequence) for _, sequence in found] == [36_000]


def test_lengths_around_a_crop(tmp_path):
    _, found = run(DIRTY / "lengths_1021_1025.fasta", tmp_path)
    assert all(len(sequence) == int(header[1:]) for header, sequence in found) and len(found) >= 5


def test_dna_codes_and_soft_mask(tmp_path):
    result, found = run(DIRTY / "dna_iupac.fasta", tmp_path, alphabet="dna")
    assert found == [("chr1", "ACGTNNNNACGTRYKMACGWNNNACGT")]  # four N are unknown bases, not a gap of an assembly
    mask = Shards(tmp_path / "out", "train").soft_mask(0)
    assert "".join(".x"[int(m)] for m in mask) == "........xxxx...........xxxx"
    assert result["counts"]["lower_case"] == 8


def test_genome(tmp_path):
    """E. coli 536: 4,938,920 bases in one record give both splits, in regions of 65,536 bases."""
    result = prepare([str(HERE / "ecoli536_genome.fna.gz")], tmp_path / "out", PrepareOptions(alphabet="dna", valid_fraction=0.1))
    assert (result["records_read"], result["records_kept"]) == (1, 1)
    with gzip.open(HERE / "ecoli536_genome.fna.gz", "rt") as file:
        genome = "".join(sequence for _, sequence in SimpleFastaParser(file)).upper()
    assert result["residues"] + result["counts"]["split_gap_bases"] == len(genome) == 4_938_920
    spans = []
    for split in ("train", "valid"):
        for header, sequence in stored(tmp_path / "out", split):
            first, last = map(int, header.split()[0].rpartition(":")[2].split("-"))
            assert genome[first - 1 : last] == sequence
            spans.append((first - 1, last, split))
    spans.sort()
    assert {split for _, _, split in spans} == {"train", "valid"}
    for (_, end, one), (begin, _, other) in zip(spans, spans[1:], strict=False):
        assert begin - end == (1024 if one != other else 0)


def text() -> bytes:
    return gzip.decompress(PROTEINS.read_bytes())


def bgzf(data: bytes, block: int = 20_000) -> bytes:
    """bgzf as samtools writes it, with an end-of-file block in the middle as well."""
    import struct
    import zlib

    out = []
    for chunk in [
        *(data[k : k + block] for k in range(0, len(data) // 2, block)),
        b"",
        *(data[k : k + block] for k in range(len(range(0, len(data) // 2, block)) * block, len(data), block)),
        b"",
    ]:
        packer = zlib.compressobj(6, zlib.DEFLATED, -15)
        body = packer.compress(chunk) + packer.flush()
        head = b"\x1f\x8b\x08\x04\0\0\0\0\0\xff\x06\0BC\x02\0" + struct.pack("<H", len(body) + 25)
        out.append(head + body + struct.pack("<II", zlib.crc32(chunk), len(chunk)))
    return b"".join(out)


def zstd(data: bytes) -> bytes:
    return pytest.importorskip("zstandard", reason="the extra `zstd` is not installed").ZstdCompressor().compress(data)


PACKERS = {
    "gzip": gzip.compress,
    "gzip of two members": lambda data: gzip.compress(data[:1000]) + gzip.compress(data[1000:]),
    "gzip padded with zeros": lambda data: gzip.compress(data) + bytes(1000),
    "bgzf": bgzf,
    "bzip2": bz2.compress,
    "bzip2 of two": lambda data: bz2.compress(data[:1000]) + bz2.compress(data[1000:]),
    "xz": lzma.compress,
    "zstd": zstd,
    "zstd of two": lambda data: zstd(data[:1000]) + zstd(data[1000:]),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    (folder / "in.fasta").write_bytes(text())
    prepare([str(folder / "in.fasta")], folder / "out", PrepareOptions())
    return folder / "out"


def shard_bytes(out: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in out.iterdir() if p.name not in ("manifest.json", "prepare.log")}


@pytest.mark.parametrize("kind", PACKERS)
def test_every_compression_gives_the_shards_of_the_plain_file(kind, plain, tmp_path):
    (tmp_path / "in.fasta").write_bytes(PACKERS[kind](text()))  # the name does not tell: magic bytes do
    prepare([str(tmp_path / "in.fasta")], tmp_path / "out", PrepareOptions())
    assert shard_bytes(tmp_path / "out") == shard_bytes(plain)


@pytest.mark.parametrize("kind", PACKERS)
def test_truncated_and_corrupt_compression_is_refused_with_file_and_byte(kind, tmp_path):
    whole = PACKERS[kind](text())
    cut = len(gzip.compress(text())) if "zeros" in kind else len(whole)
    path = tmp_path / "in.fasta"
    broken = [whole[: cut * part // 7] for part in range(1, 7)] + [whole[: cut - 1]]
    if "zstd" not in kind:  # its frames carry a checksum only where the writer asked for one
        broken.append(whole[: cut // 3] + bytes(b ^ 0x55 for b in whole[cut // 3 : cut // 3 + 40]) + whole[cut // 3 + 40 :])
    for data in broken:
        path.write_bytes(data)
        with pytest.raises(RequestError, match=r"in\.fasta is (truncated|corrupt).* byte \d+"):
            prepare([str(path)], tmp_path / "out", PrepareOptions())
        assert not (tmp_path / "out").exists()


def tarred(data: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        entry = tarfile.TarInfo("a.fasta")
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def zipped(data: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("a.fasta", data)
    return packed.getvalue()


@pytest.mark.parametrize(
    "data, problem",
    [
        (tarred(b">a\nMKV\n"), "is a tar archive: unpack it"),
        (gzip.compress(tarred(b">a\nMKV\n")), "is a tar archive: unpack it"),
        (zipped(b">a\nMKV\n"), "is a zip archive: unpack it"),
        (">a\nMKV\n".encode("utf-16"), "is text in UTF-16: save it as UTF-8"),
        (b"<!DOCTYPE html>\n>\n", "is a web page"),
        (gzip.compress(b">a\nMKV\n") + b"more", "is corrupt: after its gzip stream, from byte 27 on, stands something else"),
        (b">" + b"A" * (17 << 20), "is no FASTA: its line at byte 0 begins like a header and has more than 16,777,216 bytes"),
    ],
    ids=["tar", "tar.gz", "zip", "utf-16", "html", "bytes after gzip", "endless header"],
)
@pytest.mark.parametrize("format", ["fasta", "genbank"])
def test_what_is_no_sequence_file_is_named_and_leaves_nothing(data, problem, format, tmp_path):
    (tmp_path / "in.fasta").write_bytes(data)
    with pytest.raises(RequestError, match="in.fasta " + (problem if format == "fasta" else "")):
        prepare([str(tmp_path / "in.fasta")], tmp_path / "out", PrepareOptions(format=format))
    assert not (tmp_path / "out").exists()


def test_names_that_are_no_utf8(tmp_path):
    name = os.fsencode(tmp_path) + b"/a\xff.fasta"
    with open(name, "wb") as file:
        file.write(b">a\nMK!V\n")
    results = prepare([os.fsdecode(name)], tmp_path / "out", PrepareOptions())
    assert results["records_kept"] == 1 and "a\ufffd.fasta:1:a\tinvalid_unknown" in (tmp_path / "out/prepare.log").read_text()
    report.write(tmp_path / "out", results)


def test_hidden_files_of_a_directory_are_left_out(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.fasta").write_text(">a\nMKV\n")
    (tmp_path / "in/._a.fasta").write_bytes(b"\0\5\x16\7\0\2\0\0Mac OS X")  # as macOS leaves them on other file systems
    assert prepare([str(tmp_path / "in")], tmp_path / "out", PrepareOptions())["records_read"] == 1


def test_bgzf_is_read_at_any_place(tmp_path):
    (tmp_path / "in.gz").write_bytes(bgzf(text()))
    (source,) = find([str(tmp_path / "in.gz")], "fasta")
    assert source.kind == "bgzf" and bgzf_index(source.name).shape[1] > 10


def test_stdin_is_a_stream(plain, tmp_path):
    code = f"from bmoe.data.prepare import *\nprepare(['-'], {str(tmp_path / 'out')!r}, PrepareOptions())"
    subprocess.run([sys.executable, "-c", code], input=gzip.compress(text()), check=True, env=os.environ | {"PYTHONPATH": os.getcwd()})
    assert shard_bytes(tmp_path / "out") == shard_bytes(plain)
    assert json.loads((tmp_path / "out/manifest.json").read_text())["sources"][0]["bytes"] == len(gzip.compress(text()))


def test_many_files_globs_and_directories(tmp_path):
    for k in range(30):
        (tmp_path / f"in/{k % 3}").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"in/{k % 3}/{k:02d}.fa").write_text(f">{k}\nMKV{'AC' * k}\n")
    (tmp_path / "in/readme.md").write_text("no sequences")
    by_directory, _ = run(tmp_path / "in", tmp_path / "a")
    by_glob, _ = run(tmp_path / "in/*/*.fa", tmp_path / "b")
    assert by_directory["records_kept"] == by_glob["records_kept"] == 30
    assert shard_bytes(tmp_path / "a/out") == shard_bytes(tmp_path / "b/out")


@pytest.mark.parametrize(
    "names, problem",
    [
        (["nowhere.fasta"], "does not exist"),
        (["*.nothing"], r"no file matches the glob \*\.nothing"),
        ([""], "empty name"),
        ([], "no input"),
        ([str(PROTEINS), str(PROTEINS)], "named twice"),
    ],
)
def test_inputs_that_are_not_there(names, problem, tmp_path):
    with pytest.raises(RequestError, match=problem):
        prepare(names, tmp_path / "out", PrepareOptions())


def test_empty_files_among_others_are_no_error(tmp_path):
    (tmp_path / "a.fasta").write_bytes(b"")
    (tmp_path / "b.fasta").write_bytes(b">b\nMKV\n")
    assert prepare([str(tmp_path / "a.fasta"), str(tmp_path / "b.fasta")], tmp_path / "out")["records_kept"] == 1


def test_a_file_without_records_among_others_is_refused(tmp_path):
    shutil.copy(DIRTY / "not_fasta.fasta", tmp_path / "a.fasta")
    (tmp_path / "b.fasta").write_bytes(b">b\nMKV\n")
    with pytest.raises(RequestError, match="a.fasta has no FASTA record"):
        prepare([str(tmp_path / "a.fasta"), str(tmp_path / "b.fasta")], tmp_path / "out")


def test_more_files_than_a_process_may_open(tmp_path):
    """A genome collection has thousands of files; a process may have 1,024 of them open."""
    (tmp_path / "in").mkdir()
    for k in range(200):
        (tmp_path / f"in/{k:03d}.fasta").write_text(f">r{k}\nMKV{'ACDEFGHIKL'[k % 10] * (k // 10 + 1)}\n")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, limits[1]))
    try:
        result = prepare([str(tmp_path / "in")], tmp_path / "out", workers=2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert result["records_kept"] == 200 and len(result["sources"]) == 200


def test_an_input_that_vanishes_is_named(tmp_path, monkeypatch):
    (tmp_path / "in.fasta").write_text(">a\nMKV\n")
    found = find([str(tmp_path / "in.fasta")], "fasta")
    (tmp_path / "in.fasta").unlink()
    monkeypatch.setattr("bmoe.data.inputs.find", lambda *_: found)
    with pytest.raises(RequestError, match="in.fasta cannot be read: No such file"):
        prepare([str(tmp_path / "in.fasta")], tmp_path / "out")
