"""The evaluation report: every part, one model or several, and the same numbers on a terminal."""

import io
from html import escape
from html.parser import HTMLParser

import pytest
from rich.console import Console

from bmoe.errors import RunError
from bmoe.reports import comparison, remarks
from bmoe.reports.evaluation import named, paired_rows, write_evaluation_report
from bmoe.reports.terminal_evaluation import evaluation_tables


class Headings(HTMLParser):
    """Headings and titles of figures; tags close in order; nothing is loaded."""

    def __init__(self):
        super().__init__()
        self.open, self.found = [], []

    def handle_starttag(self, tag, attributes):
        assert tag not in ("script", "link", "iframe", "img") and not {"src", "href"} & {name for name, _ in attributes}
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("h1", "h2", "h3", "b"):
            self.found.append(data)


def read(path) -> tuple[str, list[str]]:
    text, parser = path.read_text(encoding="utf-8"), Headings()
    parser.feed(text)
    assert not parser.open
    return text, parser.found


SECTIONS = ["Held-out sequences", "Mutations", "Contacts", "Secondary structure", "Routing", "Embeddings", "Generated sequences"]


def test_one_model_with_everything(tmp_path, make_results):
    text, titles = read(write_evaluation_report(make_results(), tmp_path / "r.html"))
    assert titles[0] == "Evaluation of a" and [t for t in titles if t in SECTIONS] == SECTIONS
    assert {"Measured effect and score", "1A8O_A:A, 66 residues", "Accuracy by layer, 3 states", "Expert and residue",
            "Experts of layer 4 by secondary structure", "Load of each expert"} <= set(titles)  # fmt: skip
    for words in (
        "without learning 18.12",
        "Homo sapiens",
        "BLOSUM62, without a model",
        "0.3000 (0.2700 to 0.3300)",
        "17.90",
        "3 rows dropped: no effect",
        "count 23 further",
        "42 chains",
        "2 of the chains are longer",
        "A ratio to the baseline of 1 or more",
    ):
        assert words in text


def test_parts_that_were_not_asked_for_have_no_section(tmp_path, make_results):
    results = {
        key: value for key, value in make_results().items() if key not in ("mutations", "contacts", "probe", "embeddings", "generation")
    }
    results["routing"] = {"layers": results["routing"]["layers"]}
    _, titles = read(write_evaluation_report(results, tmp_path / "r.html"))
    assert [t for t in titles if t in SECTIONS] == ["Held-out sequences", "Routing"]
    assert not any(t.startswith("Expert and") for t in titles)


def test_several_models_side_by_side(tmp_path, make_results):
    runs = [make_results("runs/moe", 0.05), make_results("runs/dense")]
    difference = {"difference": -0.0432, "low": -0.0512, "high": -0.0311}
    runs[1]["compared"] = {
        "to": "runs/moe", "schemes": {"mask": {"ratio": 1.0123, "low": 1.004, "high": 1.02}}, "differences": {"probe": difference},
    }  # fmt: skip
    text, titles = read(write_evaluation_report(runs, tmp_path / "r.html"))
    assert titles[:2] == ["Comparison of moe, dense", "Side by side"]
    assert "1.012 (1.004 to 1.020)" in text and "secondary structure, accuracy: difference" in text
    assert "-0.0432 (-0.0512 to -0.0311)" in text
    assert [row[:2] for row in paired_rows(named(runs))] == [["dense", "moe"]] * 2  # by the names that the other tables have
    assert titles.count("Contacts") == 2 and "contacts, long range P@L" in titles
    assert "0.3500 (0.3200 to 0.3800) *" in text and "0.3000 (0.2700 to 0.3300) *" not in text


@pytest.mark.parametrize(("inputs", "row", "words"), [
    ({"mask": "a", "8010": "c"}, "perplexity, training scheme",
     "Perplexity, training scheme: no best is marked, because the models were shown different shares of <mask>"),
    ({"mask": "b", "8010": "c"}, "perplexity, fully masked",
     "Perplexity, fully masked: no best is marked, because the models were evaluated on different targets."),
])  # fmt: skip
def test_perplexities_of_different_inputs_have_no_best(inputs, row, words, tmp_path, make_results):
    runs = [make_results("runs/a") | {"inputs": {"mask": "a", "8010": "b"}}, make_results("runs/b") | {"inputs": inputs}]
    runs[1] |= {"perplexity_8010": 9.0, "perplexity_mask": 9.0}
    text = read(write_evaluation_report(runs, tmp_path / "r.html"))[0]
    cells = text.split(f"<td>{row}</td>")[1].split("</tr>")[0]
    assert "9" in cells and "*" not in cells and escape(words) in text
    console = Console(file=io.StringIO(), width=200, no_color=True)
    console.print(evaluation_tables(runs))
    assert words in console.file.getvalue()
    runs[1]["inputs"] = runs[0]["inputs"]
    text = read(write_evaluation_report(runs, tmp_path / "r.html"))[0]
    assert "*" in text.split(f"<td>{row}</td>")[1].split("</tr>")[0] and "no best" not in text


def test_models_of_the_same_name_are_told_apart(make_results):
    assert list(named([make_results("a/x"), make_results("b/x"), make_results("b/y")])) == ["a/x", "b/x", "y"]


def test_comparison_reads_values_and_intervals(make_results):
    found = {metric.label: values[0] for metric, values in comparison.rows({"a": make_results()})}
    assert found["mutations, Spearman"] == pytest.approx((0.3, 0.27, 0.33))
    assert found["pseudo-perplexity"] == (16.9, 16.7, 17.1)
    metric = next(m for m in comparison.METRICS if m.label == "secondary structure, accuracy")
    other = make_results()
    other["probe"]["majority"] = 0.4
    assert comparison.without_learning({"a": make_results(), "b": make_results()}, metric) == 0.33
    assert comparison.without_learning({"a": make_results(), "b": other}, metric) is None  # judged on other data
    assert found["mutations, AUC"].low is None and "perplexity, next token" not in found
    assert found["secondary structure, 3 states"].value == 0.48


@pytest.mark.parametrize("several", [False, True])
def test_terminal_has_the_same_numbers(make_results, several):
    console = Console(file=io.StringIO(), width=200, no_color=True)
    console.print(evaluation_tables([make_results("runs/a"), make_results("runs/b", 0.1)] if several else make_results()))
    text = console.file.getvalue()
    for words in ("fully masked", "17.20 (17.10 to 17.31)", "Homo sapiens", "masked marginal", "long, 24 or more", "3 states", "next layer",
                  "x.safetensors; 1 longer", "MKTAMKTA", "3 rows dropped: no effect", "count 23 further", "2 variants have several",
                  "2 of the chains are longer"):  # fmt: skip
        assert words in text
    assert ("side by side" in text) == several and ("0.4000 (0.3700 to 0.4300)" in text) == several


@pytest.mark.parametrize(("number", "amount", "ending"), [(1, "1", ""), (1200, "1,200", "s")])
def test_terminal_counts_one_and_many(make_results, number, amount, ending):
    console = Console(file=io.StringIO(), width=200, no_color=True)
    found = make_results() | {"sequences": number, "targets": number}
    found |= {"embeddings": found["embeddings"] | {"sequences": number}, "mutations": found["mutations"] | {"n": number}}
    console.print(evaluation_tables(found))
    shown = console.file.getvalue()
    for words in ("perplexity, {} sequence{}, {} target{}\n", "embeddings of {} sequence{},", "mutations, {} variant{} against"):
        assert words.format(*[amount, ending] * 2) in "\n".join(line.rstrip() for line in shown.splitlines())


def test_remarks_say_why_a_number_is_missing_or_a_sequence_was_cut(make_results):
    found = make_results()
    assert not any("nothing to rank" in remark or "window" in remark for remark in remarks.mutations(found["mutations"]))
    same = found["mutations"] | {"points": [[1.0, 0.1], [1.0, 0.2]], "longer_than_trained": True, "offset": 0, "dropped": {}, "multiple": 0}
    assert remarks.mutations(same | {"repeated": 1})[0] == "Rows that measure a variant again: 1; the intervals are over variants."
    assert [remark.split(":")[0] for remark in remarks.mutations(same)] == [
        "All measured effects are equal", "The wild type is longer than the model was trained for",
    ]  # fmt: skip
    assert remarks.probe(found["probe"]) == [] and remarks.contacts(found["contacts"] | {"longer_than_trained": 0}) == []
    broken = remarks.contacts(found["contacts"] | {"with_breaks": 3})
    assert broken[0] == "3 of the chains lack residues inside: their parts count as neighbours in the sequence." and len(broken) == 2
    assert "only their beginnings" in remarks.probe({"longer_than_trained": 5})[0]


def test_unwritable_output(tmp_path, make_results):
    with pytest.raises(RunError, match="cannot be written"):
        write_evaluation_report(make_results(), tmp_path / "no" / "r.html")
