"""Variant tables: the columns people have, the numbering people use, and errors that say what to do."""

from pathlib import Path

import numpy as np
import pytest

from bmoe.errors import RequestError
from bmoe.evaluation.variants import read_variants

WILD = "MKTAYIAKQR"


def table(tmp_path, text: str, name: str = "scan.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode("utf-8-sig") if "BOM" in name else text.encode())
    return path


def test_proteingym_columns(tmp_path):
    path = table(tmp_path, "mutant,mutated_sequence,DMS_score,DMS_score_bin\nM1A,AKTAYIAKQR,0.5,1\nK2C:R10W,x,-1.5,0\n", "BOM.csv")
    found = read_variants(path, WILD)
    assert found.names == ["M1A", "K2C:R10W"]
    assert found.sites == [((0, "M", "A"),), ((1, "K", "C"), (9, "R", "W"))]
    assert found.effect.tolist() == [0.5, -1.5] and found.positive.tolist() == [True, False]
    assert found.column == "DMS_score" and found.positive_name == "DMS_score_bin" and found.offset == 0


@pytest.mark.parametrize("text", [
    "variant;effect\nT3S;1\nA4G;2\n", "variant\teffect\nT3S\t1\r\nA4G\t2", "id,what,effect\nx,T3S,1\ny,a4g,2\n",
])  # fmt: skip
def test_free_columns_and_delimiters(tmp_path, text):
    found = read_variants(table(tmp_path, text), WILD, "effect")
    assert found.sites == [((2, "T", "S"),), ((3, "A", "G"),)]
    assert found.positive.tolist() == [False, True] and "median" in found.positive_name


def test_rows_that_are_no_missense_are_dropped_and_counted(tmp_path):
    text = "mutant,y\nWT,0\nT3T,0\nA4a,0\nT3=,0\nT3*,1\nM1A:T3*,1\nT3X,1\nT3b,1\nM1A:T3U,1\np.T3S,1\nA4G,\nA4G,nan\n"
    found = read_variants(table(tmp_path, text), WILD)
    assert found.names == ["p.T3S"]
    assert found.dropped == {"wild type or synonymous": 4, "stop": 2, "change to no standard residue": 3, "no effect": 2}
    bases = read_variants(table(tmp_path, "mutant,y\nA1C,1\nA1N,2\nA1g,3\nA1W,3\n"), "ACGT", None, "ACGT")
    assert bases.names == ["A1C", "A1g"] and bases.dropped == {"change to no standard residue": 2}


def test_a_part_that_changes_nothing_is_ignored(tmp_path):
    found = read_variants(table(tmp_path, "mutant,y\nM1A:K2K,1\nK2=:M1C:t3T,2\nM1G,3\n"), WILD)
    assert found.names == ["M1A:K2K", "K2=:M1C:t3T", "M1G"] and not found.dropped
    assert found.sites == [((0, "M", "A"),), ((0, "M", "C"),), ((0, "M", "G"),)]


@pytest.mark.parametrize(("columns", "positive", "name"), [
    ("DMS_score_bin,fit2_bin", [True, False, False], "fit2_bin"), ("fit2_bin,DMS_score_bin", [False, True, True], "fit2_bin"),
    ("DMS_score_bin,other", [False, False, True], "fit2 above its median"),
])  # fmt: skip
def test_the_classes_are_those_of_the_effect(tmp_path, columns, positive, name):
    rows = "M1A,1,0,1\nM1C,2,1,0\nM1G,3,1,0\n"
    found = read_variants(table(tmp_path, f"mutant,fit2,{columns}\n{rows}"), WILD, "fit2")
    assert found.positive.tolist() == positive and found.positive_name == name


def test_the_numbering_of_a_longer_chain_is_recognised(tmp_path):
    rows = "".join(f"{letter}{place + 24}A,{place}\n" for place, letter in enumerate(WILD) if letter != "A")
    found = read_variants(table(tmp_path, "mutant,y\n" + rows), WILD)
    assert found.offset == 23 and [s[0][0] for s in found.sites] == [i for i, x in enumerate(WILD) if x != "A"]


@pytest.mark.parametrize(("text", "column", "words"), [
    ("mutant,y\nT4S,1\n", None, "T4S does not fit the wild type, which has A there"),
    ("mutant,y\nT30S,1\n", None, "only 10 residues"),
    ("mutant,y\nT3S,1\nA3G,1\n", None, "different wild-type letters at 3"),
    ("mutant,y,z\nT3S,1,2\n", None, "--column; with numbers there are y, z"),
    ("mutant,y\nT3S,1\n", "q", "no column 'q'; with numbers there are y"),
    ("mutant,y,z\nT3S,1,a\n", "z", "has no numbers"),
    ("mutant,y\nThr3Ser,1\n", None, "row 2: 'Thr3Ser' is no variant"),
    ("name,y\nfoo,1\n", None, "no column of variants"),
    ("mutant,y\n", None, "no rows"),
    ("mutant,y\nWT,1\n", None, "no variant with a number"),
    ("mutant,y\nT999999999S,1\n", None, "only 10 residues"),  # far away costs neither memory nor time
    ("mutant,y\nA4G,2\nT99999999999999999999S,1\n", None, "is no variant"),
    ("mutant,y\nT3S:T3A,1\n", None, "row 2: 'T3S:T3A' names a site twice"),
    ("mutant,y,y\nT3S,1,2\n", "y", "2 columns 'y'; rename"),
    ("mutant,y\nT3S,x\n", None, "no column of numbers"),
    ("T3S,1\nA4G,2\n", None, "begins with the variant T3S; put a line of column names above it"),
])  # fmt: skip
def test_errors_say_what_is_wrong(tmp_path, text, column, words):
    with pytest.raises(RequestError, match=words.replace("(", r"\(").replace("?", r"\?")):
        read_variants(table(tmp_path, text), WILD, column)


def test_beta_lactamase_scan_and_the_two_numberings(real_data):
    lines = (real_data / "blat_ecolx_wt.fasta").read_text().splitlines()
    whole = "".join(lines[1:])
    scan = real_data / "BLAT_ECOLX_Ranganathan2015.csv.gz"
    found = read_variants(scan, whole, "2500")
    assert len(found.names) == 4996 and found.offset == 0 and not found.dropped
    assert found.names[0] == "H24C" and found.sites[0] == ((23, "H", "C"),)
    assert found.effect[0] == pytest.approx(-0.418259925)
    mature = read_variants(scan, whole[23:], "2500")  # 263 residues, as in ESM's example
    assert mature.offset == 23 and mature.sites[0] == ((0, "H", "C"),)
    assert np.array_equal(mature.effect, found.effect)
    with pytest.raises(RequestError, match="--column.*2500"):
        read_variants(scan, whole)
