"""Comparing two profiles: noise is not a change, a real change is, and files that are no profiles are refused."""

import json

import pytest

from bmoe.errors import RequestError
from bmoe.profiling.compare import compare, load


def results(step, spread=0.01, **more):
    return {"step_s": step, "step_s_low": step * (1 - spread), "step_s_high": step * (1 + spread), "tokens_per_s": 1000 / step,
            "parts": {"attention": {"seconds": step / 2}, "optimizer": {"seconds": step / 10}}, "device": "cpu", **more}  # fmt: skip


def test_noise_is_no_change():
    assert not compare(results(1.0, 0.05), results(1.04, 0.05))["step"]["changed"]
    assert not compare(results(1.0, 0.0), results(1.01, 0.0))["step"]["changed"]  # below what a quiet machine repeats


def test_a_change_beyond_both_ranges_is_one():
    step = compare(results(1.0), results(0.8))["step"]
    assert step["changed"] and step["ratio"] == pytest.approx(0.8) and step["low"] < 0.8 < step["high"] < 1
    assert compare(results(0.8), results(1.0))["step"]["changed"]


@pytest.mark.parametrize("steps, known", [([1.0], False), ([1.0, 1.01], False), ([1.0, 1.0, 1.01], True)])
def test_too_few_steps_have_no_noise_to_compare_with(steps, known):
    few, many = results(1.0, 0.0, measured={"steps": steps}), results(1.2, 0.0, steps=10)  # of one device, and of ranks
    for a, b in ((few, many), (many, few)):
        assert compare(a, b)["step"]["changed"] is (True if known else None)


def test_parts_and_differences_are_listed():
    a, b = results(1.0), results(2.0, device="NVIDIA H200")
    del b["parts"]["optimizer"]
    both = compare(a, b)
    assert both["parts"] == {"attention": {"a": 0.5, "b": 1.0, "ratio": 2.0}}
    assert both["differing"] == {"device": {"a": "cpu", "b": "NVIDIA H200"}}
    assert both["tokens_per_s"]["ratio"] == pytest.approx(0.5)


def test_values_of_the_recipes_that_differ_are_named(tmp_path):
    files = []
    for layers, name in ((2, "a"), (4, "b")):
        recipe = {"name": name, "seed": 0, "model": {"layers": layers, "moe": {"experts": 8}}}
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps({"command": "profile", "recipe": recipe, "results": results(1.0)}))
    assert compare(*map(load, files))["differing"] == {"model.layers": {"a": 2, "b": 4}}


def test_scaling_is_the_rate_of_a_rank():
    alone, eight = results(1.0, ranks=1, tokens_per_s=1000), results(1.0, ranks=8, tokens_per_s=6000)
    assert compare(alone, eight)["scaling"] == {"a": 1, "b": 8, "efficiency": pytest.approx(0.75)}
    assert compare(results(1.0), results(2.0))["scaling"] == {"a": 1, "b": 1, "efficiency": None}  # the same ranks scale nothing


@pytest.mark.parametrize(
    "body, said",
    [
        ({"command": "profile", "results": compare(results(1.0), results(2.0))}, "this is the comparison of two profiles, no profile"),
        ({"command": "profile", "results": {"agree": True, "layouts": []}}, "this is the check of --layouts"),
        ({"command": "profile", "results": {"parts": {}}}, "this profile has no step_s"),
        ({"command": "train", "results": {"step_s": 1.0}}, "written by `bmoe train`"),
        ({"model": "of another program"}, "not written by bmoe"),
        ({"command": "profile", "results": [1.0]}, "this profile has no step_s"),
        ([results(1.0)], "not written by bmoe"),
    ],
)
def test_a_file_that_is_no_profile_is_called_what_it_is(tmp_path, body, said):
    file = tmp_path / "some.json"
    file.write_text(json.dumps(body))
    with pytest.raises(RequestError, match=f"some.json: .*{said}.*; pass two files that `bmoe profile RECIPE --json FILE` wrote"):
        load(file)


def test_only_files_of_a_measured_profile(tmp_path):
    good = tmp_path / "good.json"
    good.write_text(json.dumps({"command": "profile", "results": results(1.0)}))
    assert load(good)["step_s"] == 1.0
    for name, text in {"text.json": "hello", "train.json": json.dumps({"command": "train", "results": {}})}.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(RequestError, match=name):
            load(tmp_path / name)
    with pytest.raises(RequestError, match="absent.json"):
        load(tmp_path / "absent.json")
    with pytest.raises(RequestError, match="second file lacks parts, step_s_high"):
        compare(results(1.0), {"step_s": 1.0, "step_s_low": 0.9, "tokens_per_s": 10.0})
    with pytest.raises(RequestError, match="second file has no measured step"):
        compare(results(1.0), {"step_s": None})
