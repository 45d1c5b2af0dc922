"""The page and the terminal summary of a preparation say what the manifest says."""

from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from bmoe.data.prepare import PrepareOptions, prepare
from bmoe.reports import prepare as report
from bmoe.reports import prepare_terminal
from bmoe.reports.composition import SWISSPROT, beside_swissprot

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module", params=["protein", "dna"])
def results(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("prepared") / "out"
    if request.param == "protein":
        return prepare([str(DATA / "dirty/odd_residues.fasta"), str(DATA / "uniprot_500.fasta.gz")], out, PrepareOptions(min_length=4))
    return prepare([str(DATA / "dirty/dna_iupac.fasta")], out, PrepareOptions(alphabet="dna"))


def test_swissprot_percentages_add_up():
    assert len(SWISSPROT) == 20 and abs(sum(SWISSPROT.values()) - 100) < 0.2


def test_page_is_whole_and_says_the_counts(results):
    path = report.write(results["directory"], results)
    text = path.read_text()
    HTMLParser().feed(text)
    assert f"{results['records_read']:,}" in text and f"{results['residues']:,}" in text
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org", "")  # nothing from outside
    assert results["sources"][0]["sha256"] in text


def test_an_empty_split_is_said(results):
    said = report.empty_splits(results)
    assert bool(said) == (results["splits"]["valid"]["sequences"] == 0)
    for sentence in said:
        assert "--valid-fraction" in sentence and sentence in report.html(results)


@pytest.mark.parametrize("width", [60, 120])
def test_terminal_summary(results, width):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))
    console.print(prepare_terminal.summary(results))
    text = console.export_text()
    assert f"{results['records_kept']:,}" in text and "median" in text
    assert max(map(len, text.splitlines())) <= width
    assert ("Swiss-Prot" in text) == (results["alphabet"] == "protein")


def shown(results: dict) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))
    console.print(prepare_terminal.summary(results))
    return console.export_text()


def test_speed_is_said_in_its_unit_or_not_at_all(results):
    for rate, said in ((0.0453, "45.3 kB/s"), (312.0, "312 MB/s"), (None, None)):
        text = shown(results | {"seconds": rate and 0.1, "mb_per_s": rate})
        assert f"{said} of text" in text if said else "speed" not in text


def test_one_is_not_many(tmp_path):
    (tmp_path / "in.fasta").write_text(">a\nMK1VA\n")
    results = prepare([str(tmp_path / "in.fasta")], tmp_path / "out")
    text = shown(results) + report.html(results)
    assert "1 record" in text and "1 sequence," in text and "1  letter outside" in text and "share of 0.005 of 1 record is" in text
    assert not {f"1 {noun}s" for noun in ("record", "sequence", "residue")} & {text[k : k + 11].rstrip() for k in range(len(text))}
    assert report.counted(1, "base") == "1 base" and report.counted(1000, "base") == "1,000 bases"


def test_an_empty_split_of_dna_counts_its_regions(tmp_path):
    """One chromosome gives every split, region by region."""
    (tmp_path / "in.fasta").write_text(">c\n" + "ACGTTGCA" * 20_000 + "\n")
    results = prepare([str(tmp_path / "in.fasta")], tmp_path / "out", PrepareOptions(alphabet="dna", valid_fraction=1e-6, dedup=False))
    assert report.empty_splits(results) == [
        "The split valid is empty: a share of 1e-06 of 3 regions is too small; choose a larger --valid-fraction."
    ]


def test_a_dry_run_says_what_the_whole_would_take(tmp_path):
    results = prepare([str(DATA / "uniprot_500.fasta.gz")], tmp_path / "out", dry_run=True)
    text = shown(results)
    assert "dry run: read all of the input" in text and "nothing was written" in text
    assert f"about {results['records_kept']:,} records kept of {results['records_read']:,}" in text and "kB on disk, in " in text
    text = shown(results | {"share_read": 0.04321, "predicted": results["predicted"] | {"bytes": 2.5e10, "seconds": 300.0}})
    assert "read 4.32 % of the input" in text and "25 GB on disk, in 5 min" in text
    assert "the size of standard input is not known" in shown(results | {"share_read": None, "predicted": None})


def test_letters_that_are_equally_frequent_stand_in_their_order():
    assert [letter for letter, _, _ in beside_swissprot({"V": 0.3, "A": 0.3, "M": 0.4})] == list("MAV" + "CDEFGHIKLNPQRSTWY")


def test_bars_are_proportional():
    assert prepare_terminal.bar(1.0) == "█" * 40 and prepare_terminal.bar(0.5) == "█" * 20
    assert prepare_terminal.bar(1 / 320) == "▏" and prepare_terminal.bar(0) == ""
