"""Users' tables and FASTA files in the states they come in."""

import bz2
import gzip
import lzma

import numpy as np
import pytest

from bmoe.data.alphabet import alphabet
from bmoe.errors import RequestError
from bmoe.evaluation import files


@pytest.mark.parametrize("pack", [lambda b: b, gzip.compress, bz2.compress, lzma.compress])
def test_compression_is_told_by_the_first_bytes(tmp_path, pack):
    (tmp_path / "x.csv").write_bytes(pack("\ufeffa,b\n1,é\n".encode()))
    assert files.read_text(tmp_path / "x.csv") == "a,b\n1,é\n"
    assert files.read_table(tmp_path / "x.csv") == (["a", "b"], [["1", "é"]])


def test_tables(tmp_path):
    (tmp_path / "x.tsv").write_text('a\tb\tc, d\r\n1\t"x\ty"\t3\r\n\r\n4\r\n')
    assert files.read_table(tmp_path / "x.tsv") == (["a", "b", "c, d"], [["1", "x\ty", "3"], ["4", "", ""]])
    assert np.array_equal(files.numeric(["1", "", "x", "-2e3", "nan"]), [1, np.nan, np.nan, -2000, np.nan], equal_nan=True)


def test_decimal_commas_between_semicolons(tmp_path):
    (tmp_path / "x.csv").write_text("mutant;y\nM1A,K2C;-1,5e-2\n")
    assert files.read_table(tmp_path / "x.csv")[1] == [["M1A,K2C", "-1.5e-2"]]


@pytest.mark.parametrize(("data", "words"), [(b"PK\x03\x04" + bytes(9), "save it as CSV"), (b"a,b\n1," + b"1" * 200_000, "no table")])
def test_workbooks_and_endless_cells_are_refused(tmp_path, data, words):
    (tmp_path / "x.csv").write_bytes(data)
    with pytest.raises(RequestError, match=words):
        files.read_table(tmp_path / "x.csv")


def test_fasta(tmp_path):
    (tmp_path / "x.fa").write_text("text before\n> a b\r\nMKta\r\n-yi*\r\n>\nAC J\n")
    letters = alphabet("protein")
    (first, ids), (second, odd) = files.read_fasta(tmp_path / "x.fa", letters)
    assert (first, letters.decode(ids)) == ("a b", "MKTAYI")
    assert (second, letters.decode(odd)) == ("", "AC<unk>")


def test_errors_name_the_file(tmp_path):
    with pytest.raises(RequestError, match="nothing.csv cannot be read"):
        files.read_text(tmp_path / "nothing.csv")
    bits = bytearray(gzip.compress(bytes(range(256)) * 9))
    bits[10] |= 6  # a kind of block that there is not
    for damaged in (bytes(bits), gzip.compress(b"a" * 1000)[:-9], b"\x1f\x8bgarbage", b"\xff\xfe\x00", lzma.compress(b"a" * 99)[:-9]):
        (tmp_path / "x.csv").write_bytes(damaged)
        with pytest.raises(RequestError, match="x.csv is damaged or no text; save it again"):
            files.read_text(tmp_path / "x.csv")
