"""Other formats through Biopython: the same sequences as FASTA, and one sentence for files that are broken."""

import io
import random

import pytest
from Bio import SeqIO
from Bio.Seq import Seq
from Bio.SeqRecord import SeqRecord

from bmoe.data.prepare import PrepareOptions, prepare
from bmoe.data.shards import Shards
from bmoe.errors import RequestError

SWISSPROT = """ID   TEST{k}_HUMAN             Reviewed;          {n} AA.
AC   P{k:05d};
DT   01-JAN-1998, integrated into UniProtKB/Swiss-Prot.
DT   01-JAN-1998, sequence version 1.
DT   01-JAN-2020, entry version 1.
DE   RecName: Full=Test protein {k};
OS   Homo sapiens (Human).
OC   Eukaryota; Metazoa.
OX   NCBI_TaxID=9606;
SQ   SEQUENCE   {n} AA;  1000 MW;  0000000000000000 CRC64;
     {sequence}
//
"""


def sequences(letters: str, count: int = 6) -> list[str]:
    draw = random.Random(0)
    return ["".join(draw.choices(letters, k=draw.randrange(20, 200))) for _ in range(count)]


def written(format: str, found: list[str]) -> str:
    if format == "swissprot":
        return "".join(SWISSPROT.format(k=k, n=len(s), sequence=s) for k, s in enumerate(found))
    records = [SeqRecord(Seq(s), id=f"r{k}", name=f"r{k}", description=f"record {k}") for k, s in enumerate(found)]
    for record in records:
        record.annotations["molecule_type"] = "DNA"
        record.letter_annotations["phred_quality"] = [30] * len(record)
    text = io.StringIO()
    SeqIO.write(records, text, format)
    return text.getvalue()


@pytest.mark.parametrize("format", ["genbank", "embl", "fastq", "swissprot"])
@pytest.mark.parametrize("workers", [1, 2])
def test_other_formats_give_the_same_sequences(format, workers, tmp_path):
    alphabet = "protein" if format == "swissprot" else "dna"
    found = sequences("ACDEFGHIKLMNPQRSTVWY" if alphabet == "protein" else "ACGT")
    (tmp_path / "in.txt").write_text(written(format, found))
    result = prepare([str(tmp_path / "in.txt")], tmp_path / "out", PrepareOptions(alphabet, format, valid_fraction=0), workers=workers)
    shards = Shards(tmp_path / "out", "train")
    assert [shards.alphabet.decode(shards.sequence(i)) for i in range(len(shards))] == found
    assert result["records_read"] == len(found)
    names = [shards.header(i).split()[0] for i in range(len(shards))]
    assert names == [f"P{k:05d}" if format == "swissprot" else f"r{k}" if format == "fastq" else names[k] for k in range(len(found))]


@pytest.mark.parametrize("format", ["genbank", "embl", "fastq", "swissprot"])
def test_broken_files_end_in_one_sentence(format, tmp_path):
    """Random damage is either read or refused, nothing else."""
    whole = written(format, sequences("ACGT", 4))
    alphabet = "protein" if format == "swissprot" else "dna"
    draw = random.Random(1)
    refused = 0
    for number in range(25):
        data = bytearray(whole.encode())
        for _ in range(3):
            place = draw.randrange(len(data))
            if draw.random() < 0.5:
                del data[place : place + draw.randrange(40)]
            else:
                data[place : place + 1] = bytes([draw.randrange(256)])
        (tmp_path / "in.txt").write_bytes(data)
        try:
            prepare([str(tmp_path / "in.txt")], tmp_path / f"out{number}", PrepareOptions(alphabet, format, valid_fraction=0))
        except RequestError as error:
            assert "in.txt" in str(error) and "\n" not in str(error)
            refused += 1
    if format == "fastq":
        assert refused


@pytest.mark.parametrize("format", ["genbank", "embl", "swissprot", "fastq"])
def test_a_file_of_another_format_is_refused(format, tmp_path):
    (tmp_path / "in.txt").write_text("this is a letter to my aunt\n")
    with pytest.raises(RequestError, match=r"in\.txt"):
        prepare([str(tmp_path / "in.txt")], tmp_path / "out", PrepareOptions("dna", format))


@pytest.mark.parametrize(
    "text, format, advice",
    [
        (">a\nMKV\n", "genbank", "begins like fasta, so try --format fasta"),
        ("@a\nACGT\n+\nIIII\n", "fasta", "begins like fastq, so try --format fastq"),
        ("LOCUS       X  10 bp\n", "swissprot", "begins like genbank"),
        ("ID   X\n", "fasta", "begins like embl or swissprot, so try --format embl"),
        ("nothing\n", "embl", "mend it, or leave it out of the inputs"),
        ("nothing\n", "fasta", "mend it, or leave it out of the inputs"),
    ],
)
def test_an_input_of_another_format_is_named_with_what_to_do(text, format, advice, tmp_path):
    (tmp_path / "good.fasta").write_text(">g\nMKVA\n")
    (tmp_path / "in.txt").write_text(text)
    names = [str(tmp_path / "good.fasta")] if format == "fasta" else []
    with pytest.raises(RequestError, match=f"in.txt (has no|is no).*{advice}"):
        prepare([*names, str(tmp_path / "in.txt")], tmp_path / "out", PrepareOptions(format=format))
    assert not (tmp_path / "out").exists()
