"""What a traced step says of the device: busy time counts overlapping kernels once, the host's reads are counted."""

import gzip
import json
from itertools import pairwise

import pytest
import torch

from bmoe.profiling.fit import with_values
from bmoe.profiling.ranges import POINT, TRACKS, with_ranges
from bmoe.profiling.synthetic import SyntheticShards
from bmoe.profiling.trace import idle, kind_of, traced, union

CPU = torch.device("cpu")


def test_kernels_that_overlap_count_once():
    assert union([(5, 8), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 8)]
    kernels = [("a", 0.0, 100.0), ("b", 50.0, 150.0), ("c", 400.0, 500.0), ("d", 505.0, 600.0)]
    found = idle(kernels, step_s=500e-6)
    assert found["gpu_busy_s"] == pytest.approx(345e-6) and found["gpu_busy_share"] == pytest.approx(0.69)
    assert found["idle_s"] == pytest.approx(155e-6)
    assert found["idle_gaps"]["over_10_us"] == 1  # 5 us is the time between two launches of a full queue
    assert found["idle_gaps"]["longest"] == [{"seconds": pytest.approx(250e-6), "after": "b", "before": "c"}]


def test_a_device_is_never_more_than_busy():
    found = idle([("a", 0.0, 100.0)], step_s=90e-6)
    assert found["gpu_busy_share"] == 1.0 and found["idle_s"] == 0.0


@pytest.mark.parametrize(
    "kernel, kind",
    [
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Flash_fwd_params)", "attention"),
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_TNT", "other products"),
        ("void cutlass::device_kernel<at::cuda::detail::GroupProblemShape<cute::tuple<int>>>", "experts' products"),
        ("_adamw_kernel", "optimizer"),
        ("_adamw_squares_kernel", "optimizer"),
        ("_route_weight_kernel", "routing, rows of experts"),
        ("_turn_kernel", "attention"),
        ("_norm_backward_kernel", "other passes"),
        ("void at::native::lpnorm_cleanup<float>", "optimizer"),
        ("triton_poi_fused_add_mul_silu_3", "fused passes"),
        ("_spread_kernel", "routing, rows of experts"),
        ("_rows_kernel", "rounding"),
        ("_weight_kernel", "rounding"),
        ("_row_scales_kernel", "rounding"),
        ("Memcpy HtoD (Pinned -> Device)", "copies, fills"),
        ("void at::native::vectorized_elementwise_kernel<4>", "other passes"),
    ],
)
def test_kernels_are_told_apart_by_their_names(kernel, kind):
    assert kind_of(kernel) == kind


def test_reads_by_the_host_are_counted(recipe_of, build):
    recipe = recipe_of(backend={"experts": "loop"})
    subject, shards = build(recipe, CPU), SyntheticShards(recipe)
    plain = traced(subject, shards, CPU, 1.0)
    assert "kernels_per_step" not in plain and len(plain["operators"]) == 10

    def read(_module, _inputs, output):
        float(output.detach().sum())

    handle = subject.model.final_norm.register_forward_hook(read)
    assert traced(subject, shards, CPU, 1.0)["host_reads_per_step"] == plain["host_reads_per_step"] + 2  # one a batch
    handle.remove()


def own_tracks(events):
    return sorted((e for e in events if e.get("pid") == TRACKS and e["ph"] == "X"), key=lambda e: e["ts"])


def test_the_parts_are_ranges_of_the_trace(recipe_of, build, tmp_path):
    """One after the other, in the order of the model forward and in reverse backward, and attention's operator lies in its own."""
    recipe = recipe_of(model={"layers": 1}, training={"tokens_per_step": 256}, backend={"experts": "grouped"})
    subject, shards = build(recipe, CPU), SyntheticShards(recipe)
    found = traced(subject, shards, CPU, 1.0, tmp_path / "trace.json.gz")
    with gzip.open(tmp_path / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    spans = own_tracks(events)
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-2 for a, b in pairwise(spans))
    names = [span["name"] for span in spans]
    names = [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]
    forward = ["embedding", "norms", "attention", "norms", "router", "dispatch", "experts gemm 1", "experts activation",
               "experts gemm 2", "combine", "norms", "head + loss"]  # fmt: skip
    assert names[: len(forward)] == [f"{part} forward" for part in forward]
    rest = [name.removesuffix(" backward") for name in names[len(forward) :]]
    assert rest[0] == "head + loss" and rest[-2:] == ["embedding", "optimizer forward"]
    order = ["combine", "experts gemm 2", "experts activation", "experts gemm 1", "dispatch", "attention"]
    assert [part for part in rest if part in order] == order
    calls = [(e["ts"], "backward" in e["name"]) for e in events if "_scaled_dot_product" in e.get("name", "")]
    assert {backward for _, backward in calls} == {False, True}
    for at, backward in calls:
        (inside,) = (span["name"] for span in spans if span["ts"] <= at <= span["ts"] + span["dur"])
        assert inside == ("attention backward" if backward else "attention forward")
    assert not any(POINT in e.get("name", "") for e in events) and "with the model's parts" in found["trace_label"]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in subject.model.modules())


def test_ranges_change_nothing_that_is_counted(recipe_of, build, tmp_path):
    recipe = recipe_of(backend={"experts": "loop"})
    subject, shards = build(recipe, CPU), SyntheticShards(recipe)
    plain, ranged = traced(subject, shards, CPU, 1.0), traced(subject, shards, CPU, 1.0, tmp_path / "trace.json")
    assert ranged["host_reads_per_step"] == plain["host_reads_per_step"] and "trace_label" not in plain
    assert not any("bmoe" in row["name"] or "Announce" in row["name"] for row in ranged["operators"])


@pytest.mark.parametrize("backend", [{"compile": True}, {"graphs": True}])
def test_a_compiled_or_replayed_step_is_traced_as_it_runs(recipe_of, build, tmp_path, backend):
    recipe = recipe_of()
    subject, shards = build(recipe, CPU), SyntheticShards(recipe)
    subject = subject._replace(recipe=with_values(subject.recipe, "backend", **backend))
    found = traced(subject, shards, CPU, 1.0, tmp_path / "trace.json")
    assert own_tracks(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == []
    assert "without the model's parts" in found["trace_label"]


def test_the_ranges_of_a_device_are_those_of_the_kernels_launched_between_two_borders():
    """A kernel belongs to the part that launched it, however late it runs; a copy counts; what no part launched is of none."""

    def point(at, name):
        return {"ph": "X", "cat": "user_annotation", "name": POINT + name, "ts": at, "dur": 0.1, "pid": 1, "tid": 1}

    def launch(at, number, cat="cuda_runtime"):
        return {"ph": "X", "cat": cat, "name": "launch", "ts": at, "dur": 1.0, "pid": 1, "tid": 1, "args": {"correlation": number}}

    def kernel(at, width, number, cat="kernel"):
        return {"ph": "X", "cat": cat, "name": "k", "ts": at, "dur": width, "pid": 0, "tid": 7, "args": {"correlation": number}}

    run = [
        launch(5.0, 9), point(10.0, "router forward"), launch(11.0, 1), launch(12.0, 2, "cuda_driver"), point(20.0, "dispatch forward"),
        launch(21.0, 3), point(30.0, ""), launch(31.0, 4), kernel(6.0, 1.0, 9), kernel(100.0, 5.0, 1), kernel(110.0, 10.0, 2),
        kernel(120.0, 30.0, 3, "gpu_memcpy"), kernel(150.0, 10.0, 4), {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "x"}},
    ]  # fmt: skip
    found = own_tracks(with_ranges(run))
    assert [(e["name"], e["tid"], e["ts"], e["dur"]) for e in found] == [
        ("router forward", 0, 10.0, 10.0),
        ("dispatch forward", 0, 20.0, 10.0),
        ("router forward", 1, 100.0, 20.0),
        ("dispatch forward", 1, 120.0, 30.0),
    ]
    names = {e["args"]["name"] for e in with_ranges(run) if e["ph"] == "M" and e["pid"] == TRACKS}
    assert names == {"parts of the model", "host", "device"}
