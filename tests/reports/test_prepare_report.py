"""The page and the terminal summary of a preparation say what the manifest says."""

from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from bmoe.data.prepare import PrepareOptions, prepare
from bmoe.reports import prepare as report
from bmoe.reports import prepare_terminal
from bmoe.reports.composition import SWISSPROT

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


def test_bars_are_proportional():
    assert prepare_terminal.bar(1.0) == "█" * 40 and prepare_terminal.bar(0.5) == "█" * 20
    assert prepare_terminal.bar(1 / 320) == "▏" and prepare_terminal.bar(0) == ""
