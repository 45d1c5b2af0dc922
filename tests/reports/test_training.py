"""The training report: whole, self-contained, with every number of the run, for every kind of run."""

import json
from html.parser import HTMLParser

import pytest

from bmoe.errors import RequestError
from bmoe.reports.quantisation import quantisation_section
from bmoe.reports.training import write_training_report

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Checker(HTMLParser):
    """Tags close in order; nothing is loaded or run."""

    def __init__(self):
        super().__init__()
        self.open, self.titles = [], []

    def handle_starttag(self, tag, attributes):
        assert tag not in ("script", "link", "iframe", "object", "img")
        for name, value in attributes:
            assert name not in ("src", "href", "srcset") and not name.startswith("on")
            assert "http" not in (value or "") and "url(" not in (value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "b":
            self.titles.append(data)


def check(path) -> tuple[str, list[str]]:
    text = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    assert not checker.open
    assert "nan" not in text.replace("pronan", "").lower().split("<main>")[1]
    return text, checker.titles


@pytest.mark.parametrize("kind", [{}, {"evaluated": False}, {"clm": True, "evaluated": False}, {"dense": True, "evaluated": False}])
def test_report_is_whole_and_self_contained(make_run, kind):
    folder = make_run(**kind)
    out = write_training_report(folder)
    assert out == folder / "report.html"
    text, titles = check(out)
    assert {"Loss", "Throughput", "Gradient norm", "Learning rate"} <= set(titles)
    assert ("Busiest expert over the mean" in titles) == (not kind.get("dense", False))
    assert ("Perplexity of the next token" in titles) == kind.get("clm", False)
    assert ("Perplexity by sequence length" in titles) == kind.get("evaluated", True)
    assert "esm2_moe_tiny" in text and "tokens_per_step" in text


def test_key_numbers_are_those_of_the_last_validation(make_run):
    folder = make_run(evaluated=False)
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    _, titles = check(write_training_report(folder))
    assert f"{last['valid_perplexity_mask']:.2f}" in titles
    assert f"{last['valid_perplexity_mask'] / last['valid_baseline_mask']:.4f}" in titles


def test_the_interval_of_the_evaluation_is_shown_with_its_ratio(make_run):
    text, titles = check(write_training_report(make_run()))
    assert "0.9490" in titles and "95 % interval 0.9430 to 0.9550" in text


def test_unfinished_last_line_is_left_out(make_run):
    folder = make_run()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 410, "lo')
    check(write_training_report(folder))


def test_a_run_of_one_step(make_run):
    folder = make_run(evaluated=False)
    first = (folder / "metrics.jsonl").read_text().splitlines()[0]
    (folder / "metrics.jsonl").write_text(first + "\n")
    check(write_training_report(folder))


def test_no_metrics_is_a_request_error(make_run, tmp_path):
    folder = make_run()
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(RequestError, match="no logged step"):
        write_training_report(folder)
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(RequestError, match="cannot be read"):
        write_training_report(folder)


def rounding(error: float) -> dict:
    entry = {
        "error": [None, error, 2 * error],
        "underflow": [None, 0.01, 0.03],
        "saturation": [None, 0.0, 0.0],
        "scales": [4] + [0] * 5 + [27, 9] + [0] * 8,
    }
    return {name: entry for name in ("input_1", "weight_1", "gradient_1", "input_2", "weight_2", "gradient_2")}


def test_rounding_is_shown_where_it_was_recorded():
    assert quantisation_section([{"step": 1, "loss": 3.0}]) == ""
    shown = quantisation_section([{"step": 1, "quantisation": rounding(0.04)}, {"step": 5}, {"step": 10, "quantisation": rounding(0.026)}])
    for needed in ("gradient, product 2: 3.900 at 10", "gradient, product 2: 6.000 at 1", "after step 10", "2^-32", "2^-16"):
        assert needed in shown, needed  # means over the layers that were rounded
    assert "input, product 1</td><td>3.900</td><td>2.000</td><td>0</td><td>5.200</td><td>3</td>" in shown
    assert "2^-16, weight: 22.50" in shown and "Blocks of zeros: 10.0% of input" in shown and "2^-48" not in shown


def test_a_run_with_rounding_has_the_section(make_run):
    folder = make_run()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[-1]["quantisation"] = rounding(0.03)
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    text, _ = check(write_training_report(folder))
    assert "<h2>Rounding</h2>" in text
