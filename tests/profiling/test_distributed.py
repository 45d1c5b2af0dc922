"""`bmoe profile --procs 2`: bytes against the closed form, times and overlap from spans, both sides on equal tokens, layouts."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml

from bmoe import cli
from bmoe.parallel.world import World
from bmoe.profiling import chips, distributed, predict, render_ranks
from bmoe.profiling.estimate import expected_load
from bmoe.profiling.race import Step, timed_steps
from bmoe.profiling.synthetic import SyntheticShards
from bmoe.recipe import Recipe, to_dict

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def recipe():
    return Recipe.model_validate(
        {
            "name": "small",
            "data": {"path": "/nonexistent", "max_length": 64, "tokens_per_batch": 256},
            "model": {"kind": "decoder", "layers": 2, "width": 64, "heads": 4, "moe": {"experts": 4, "top_k": 2, "expert_width": 32}},
            "objective": {"kind": "clm"},
            "precision": {"kind": "fp32"},
            "training": {"steps": 10, "tokens_per_step": 512},
        }
    )


@pytest.fixture(scope="module")
def two_ranks(recipe, tmp_path_factory):
    """The results of `bmoe profile --procs 2` as a process of its own, which starts the ranks."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("ranks")
    file, source = folder / "results.json", folder / "small.yaml"
    source.write_text(yaml.safe_dump(to_dict(recipe)))
    flags = "--device cpu --procs 2 --set parallel.expert=2 --baseline hf-grouped --forms flattened --routing natural,balanced"
    command = [sys.executable, "-c", "from bmoe.cli import main; main()", "profile", str(source), "--json", str(file), *flags.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*command, "--steps", "2", "--warmup", "1"], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "beside hugging face" in done.stdout.lower(), done.stderr
    return json.loads(file.read_text())["results"]


def test_bytes_are_those_of_the_closed_form(two_ranks, recipe):
    shards = SyntheticShards(recipe)
    parallel = recipe.parallel.model_copy(update={"expert": 2})
    spread = recipe.model_copy(update={"parallel": parallel})
    want = predict.communication(spread, shards.alphabet.size, expected_load(recipe, shards), 2, chips.find("h100"))
    sent = dict(two_ranks["communication"]["sent_bytes"])
    rows = sent.pop("all_to_all")
    assert sum(sent.values()) == pytest.approx(want["parameter_bytes"], rel=0.1)  # parts of equal size are padded
    assert 0.6 < rows / want["all_to_all_bytes"] < 1.4  # routing is not uniform
    assert rows == two_ranks["all_to_all"]["bytes"]


def test_times_of_a_step_on_two_ranks(two_ranks):
    assert two_ranks["ranks"] == 2 and two_ranks["layout"] == {"data_replicate": 1, "data_shard": 1, "expert": 2}
    assert two_ranks["steps"] == 2 and two_ranks["warmup_steps"] == 1
    assert two_ranks["residues_per_s_per_rank"] * 2 == pytest.approx(two_ranks["residues_per_s"])
    assert two_ranks["tokens_per_s"] == pytest.approx(two_ranks["tokens_per_step"] / two_ranks["step_s"])
    found, rows = two_ranks["communication"], two_ranks["all_to_all"]
    assert 0 < found["share"] < 1 and 0 <= found["hidden_share"] < 1
    assert rows["gb_per_s"] == pytest.approx(rows["bytes"] / rows["wire_s"] / 1e9)
    assert rows["of_link"] == pytest.approx(rows["gb_per_s"] / rows["link_gb_per_s"])
    assert sum(found["wire_s"].values()) < 3 * two_ranks["step_s_high"]


def test_both_sides_see_equal_tokens(two_ranks):
    rows = two_ranks["baseline"]
    assert set(rows) == {
        f"{name} {routing}" for name in ("bmoe-grouped packed", "hf-grouped flattened") for routing in ("natural", "balanced")
    }
    assert (
        len({row["tokens_per_step"] for row in rows.values()}) == 1 and 256 < rows["hf-grouped flattened natural"]["tokens_per_step"] <= 512
    )
    for routing in ("natural", "balanced"):
        ours, theirs = (rows[f"{name} {routing}"]["residues_per_s"] for name in ("bmoe-grouped packed", "hf-grouped flattened"))
        assert two_ranks["ratios"][f"hf-grouped flattened {routing}"] == pytest.approx(ours / theirs)


def test_one_rank_is_a_world_too(recipe, tmp_path, capsys):
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(to_dict(recipe)))
    flags = ["--device", "cpu", "--procs", "1", "--steps", "2", "--json", str(tmp_path / "a.json")]
    assert cli.run(["profile", str(tmp_path / "small.yaml"), *flags]) == 0
    results = json.loads((tmp_path / "a.json").read_text())["results"]
    assert results["ranks"] == 1 and results["communication"] is None and results["residues_per_s"] > 0
    assert {chip["world"] for chip in results["predicted"].values()} == {1}
    assert "residues/s" in capsys.readouterr().out
    assert cli.run(["profile", str(tmp_path / "small.yaml"), *flags[:4], "--layouts"]) == 0
    assert "1 x 1" in capsys.readouterr().out


def event(name, start, end, device=torch.autograd.DeviceType.CPU, mark=False):
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), device_type=device, is_user_annotation=mark)


def test_spans_of_kernels():
    on = torch.autograd.DeviceType.CUDA
    events = [
        event("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 0, 10, on),
        event("nccl:all_to_all", 0, 11, on, mark=True),
        event("## optimizer ##", 0, 99, on, mark=True),
        event("ncclDevKernel_AllGather_RING_LL", 20, 30, on),
        event("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 40, 50, on),
        event("ncclDevKernel_AllReduce_Sum_f32_TREE_LL", 60, 70, on),
        event("void cutlass::Kernel", 5, 25, on),
        event("Memcpy DtoD", 0, 99, on),
        event("aten::mm", 0, 99),
    ]
    calls, work = distributed.spans_of(events, cuda=True)
    assert dict(calls) == {"all_to_all": [(0, 10)], "all_gather": [(20, 30)], "reduce_scatter": [(40, 50)], "all_reduce": [(60, 70)]}
    assert work == [(5, 25)]
    calls, work = distributed.spans_of(
        [event("gloo:all_to_all", 3, 9), event("aten::mm", 0, 4), event("c10d::alltoall_base_", 0, 1)], cuda=False
    )
    assert dict(calls) == {"all_to_all": [(3, 9)]} and work == [(0, 4)]


@pytest.mark.parametrize("scatter_s, rows", [(0.0, {"all_gather": "4", "all_reduce, reduce_scatter": "10"}),
                                             (0.5, {"all_gather": "4", "all_reduce": "2", "reduce_scatter": "8"})])  # fmt: skip
def test_gloo_times_both_reductions_as_one(scatter_s, rows):
    """It reports a reduce-scatter as an all-reduce, so a row of its own would have bytes without time, and its seconds another's."""
    wire = {"all_gather": 1.0, "all_reduce": 2.5, "reduce_scatter": scatter_s}
    sent = {"all_gather": 4e6, "all_reduce": 2e6, "reduce_scatter": 8e6}
    table = render_ranks._communication({"sent_bytes": sent, "wire_s": wire, "share": 0.1, "hidden_share": 0.0, "label": ""}).renderables[0]
    names, bytes_ = (list(column.cells) for column in table.columns[:2])
    assert dict(zip(names, bytes_, strict=True)) == rows and "-" not in list(table.columns[3].cells)


def test_overlap_is_the_length_of_the_intersection():
    assert distributed.overlap([(0, 10), (5, 12)], [(11, 20), (2, 3), (2.5, 4)]) == 3
    assert distributed.overlap([(0, 1)], [(1, 2)]) == 0 and distributed.overlap([], [(0, 1)]) == 0


def test_who_waits_inside_a_collective_is_not_on_the_wire():
    assert distributed.wire_seconds([[5e6, 1e6], [1e6, 4e6]]) == 2.0
    assert distributed.wire_seconds([[5e6, 1e6], [3e6]]) == 3.0


def test_a_step_is_as_slow_as_its_slowest_rank():
    """The other rank needs a second more and sees 5 tokens more."""
    world = World(CPU)
    object.__setattr__(world, "max", lambda seconds: seconds + 1)
    object.__setattr__(world, "sum", lambda seen: seen + 5)
    (step,) = timed_steps(lambda _: (10, 9, 20), 1, world)
    assert 1 <= step.seconds < 1.5 and step[1:] == Step(0, 15, 14, 25)[1:]


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("--layouts", "--layouts is of several ranks; add --gpus N"),
        ("--warmup 3", "--warmup is of several ranks"),
        ("--procs 2", "give --device cpu with it"),
        ("--gpus 1 --device cpu", "exclude each other"),
        ("--procs 2 --device cpu --experts all", "with ranks name one"),
        ("--procs 2 --device cpu --report a.html", "with ranks use --json"),
        ("--procs 2 --device cpu --precision fp9", "use one of fp32"),
        ("--procs 2 --device cpu --layouts --baseline hf", "ask for one at a time"),
        ("--procs 1 --device cpu --precision mxfp8", "mxfp8 does not run on this machine"),
        ("--procs 1 --device cpu --layouts --set model.moe=null", "no experts to share"),
    ],
)
def test_wrong_requests(recipe, tmp_path, capsys, flags, sentence):
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(to_dict(recipe)))
    assert cli.run(["profile", str(tmp_path / "small.yaml"), *flags.split()]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
