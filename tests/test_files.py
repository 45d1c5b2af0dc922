"""Files are whole or not there: what is renamed, what is left when writing fails, and what cannot be renamed."""

import os
from pathlib import Path

import pytest

from bmoe.errors import RequestError
from bmoe.files import whole
from bmoe.jobs.common import check_target, check_targets, write_json
from bmoe.reports.evaluation import write_evaluation_report


def test_a_failure_leaves_the_file_as_it_was(tmp_path):
    (tmp_path / "x").write_text("old")
    with pytest.raises(KeyboardInterrupt), whole(tmp_path / "x") as partial:
        partial.write_text("ne")
        raise KeyboardInterrupt
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("x", "old")]


def test_a_link_stays_one_and_a_pipe_is_written_to_itself(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "x")
    with whole(tmp_path / "link") as partial:
        partial.write_text("new")
    assert (tmp_path / "there" / "x").read_text() == "new" and (tmp_path / "link").is_symlink()
    with whole("/dev/null") as partial:
        assert partial == Path("/dev/null")


@pytest.mark.parametrize("write", [
    lambda file: write_json(str(file), "eval", None, {"perplexity": 12.5}), lambda file: write_evaluation_report({"run": "a"}, file),
], ids=["json", "report"])  # fmt: skip
def test_json_and_report_are_renamed(write, tmp_path):
    """A second name of the old file keeps what was in it."""
    (tmp_path / "x").write_text("old")
    os.link(tmp_path / "x", tmp_path / "other")
    write(tmp_path / "x")
    assert (tmp_path / "other").read_text() == "old" != (tmp_path / "x").read_text()
    assert len(list(tmp_path.iterdir())) == 2


def test_targets_are_refused_before_the_work(tmp_path, monkeypatch):
    check_target("--json", str(tmp_path / "x"))
    check_target("--json", "/dev/null")
    with pytest.raises(RequestError, match="there is no folder"):
        check_target("--json", str(tmp_path / "no" / "x"))
    (tmp_path / "x").touch()
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)  # the file may be written, its folder not
    with pytest.raises(RequestError, match="--json .*x: cannot be written"):
        check_target("--json", str(tmp_path / "x"))


@pytest.mark.parametrize(("targets", "words"), [
    ({"--scores": "m.csv"}, "--scores m.csv: ./m.csv is read by this command"),
    ({"--json": "new.json", "--report": "link/new.json"}, "--report link/new.json: --json writes it"),
    ({"--json": "run/recipe.yaml"}, "belongs to a run"),
    ({"--json": "run/checkpoints/latest"}, "belongs to a run"),
    ({"--json": "data/manifest.json"}, "belongs to a run or to prepared data"),
])  # fmt: skip
def test_targets_are_no_inputs(tmp_path, monkeypatch, targets, words):
    monkeypatch.chdir(tmp_path)
    for name in ("m.csv", "run/recipe.yaml", "run/checkpoints/latest", "data/manifest.json", "checkpoints/found.json"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("here")
    Path("link").symlink_to(".")
    with pytest.raises(RequestError, match=words):
        check_targets(targets, ["./m.csv", None])
    check_targets({"--json": "run/found.json", "--report": "recipe.yaml", "--scores": None}, ["m.csv"])
    check_targets({"--json": "/dev/null", "--report": "/dev/null"})
    check_targets({"--json": "checkpoints/found.json"})  # of a name that users give their folders too
