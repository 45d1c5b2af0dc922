"""Timed steps: as many as asked, of the step that is given, and their marks cover the time between them."""

import time

import pytest
import torch

from bmoe.profiling import measure
from bmoe.profiling.synthetic import SyntheticShards
from bmoe.profiling.timeline import between

CPU = torch.device("cpu")


def test_the_given_step_is_timed(recipe_of, build):
    recipe = recipe_of(training={"tokens_per_step": 512})
    seen = []

    def take(batches):
        seen.append(len(batches))
        time.sleep(0.02)

    found = measure.whole_steps(build(recipe, CPU), SyntheticShards(recipe), CPU, 2, 5, take=take)
    assert seen == [2] * 7 and len(found.seconds) == 5
    assert all(second >= 0.02 for second in found.seconds) and found.middle < 0.1
    assert found.load.tokens == 256 and found.bounds[0] <= found.middle <= found.bounds[1]


def test_no_step_begins_after_the_limit_but_two_are_taken(recipe_of, build):
    recipe = recipe_of()
    subject, shards = build(recipe, CPU), SyntheticShards(recipe)

    def take(batches):
        time.sleep(0.03)

    assert len(measure.whole_steps(subject, shards, CPU, 1, 20, limit_s=0.0, take=take).seconds) == 2
    assert len(measure.whole_steps(subject, shards, CPU, 0, 20, limit_s=0.1, take=take).seconds) < 8
    assert len(measure.whole_steps(subject, shards, CPU, 0, 1, limit_s=0.0, take=take).seconds) == 1


def test_marks_that_overlap_nothing_add_up():
    a, b, c = 1.0, 2.5, 4.0
    assert between(a, b) + between(b, c) == between(a, c)


def test_what_a_part_achieves_against_its_ceilings(recipe_of):
    recipe = recipe_of(precision={"kind": "bf16"})
    load = measure.Load(256, 250, 250 * 40.0, 37)
    found = {name: {"seconds": 1e-3} for name in ("experts gemm 1", "norms", "optimizer", "data wait")}
    measure.achieved(found, recipe, 33, load, {"matmul_tflops": 1.0, "copy_gb_per_s": 1e6})
    gemm = found["experts gemm 1"]
    assert gemm["flops"] == 3 * 2 * 500 * 64 * 128 * 2  # forward and backward of 500 rows, D 64 to 2 F, in two layers
    assert gemm["bound"] == "arithmetic" and gemm["ceiling_share"] == pytest.approx(gemm["flops"] / 1e12 / 1e-3)
    assert gemm["tflops"] == pytest.approx(gemm["flops"] / 1e-3 / 1e12) and gemm["intensity"] == gemm["flops"] / gemm["bytes"]
    assert found["norms"]["flops"] is None and found["norms"]["bound"] == "memory" and found["data wait"]["bound"] is None
    assert found["optimizer"]["bound"] == "memory" and found["optimizer"]["gb_per_s"] > 0
    measure.achieved(found, recipe, 33, load, {"matmul_tflops": 1e6, "copy_gb_per_s": 1.0})
    assert found["experts gemm 1"]["bound"] == "memory"
    measure.achieved(found, recipe, 33, load, {"matmul_tflops": 1.0, "low_matmul_tflops": 2.0, "copy_gb_per_s": 1e6})
    assert found["experts gemm 1"]["ceiling_share"] == pytest.approx(gemm["flops"] / 2e12 / 1e-3)
    rows = recipe_of(precision={"kind": "fp8_row"})  # its weight gradients, a third, are bf16
    measure.achieved(found, rows, 33, load, {"matmul_tflops": 1.0, "low_matmul_tflops": 2.0, "copy_gb_per_s": 1e6})
    assert found["experts gemm 1"]["ceiling_share"] == pytest.approx(gemm["flops"] * (1 / 3 + 2 / 3 / 2) / 1e12 / 1e-3)


def test_later_steps_widen_the_bounds():
    load = measure.Load(1, 1, 1.0, 1)
    early, late = measure.Steps([1.0] * 5, 0.1, load, 1.0, 0.0), measure.Steps([2.0] * 5, 0.3, load, 1.0, 0.0)
    both = early.and_later(late)
    assert both.bounds == (1.0, 2.0) and both.middle == 1.5 and both.wait_s == pytest.approx(0.2)


def test_fused_experts_have_the_work_of_all_their_stages(recipe_of):
    recipe, load = recipe_of(precision={"kind": "bf16"}), measure.Load(256, 250, 250 * 40.0, 37)
    ceiling = {"matmul_tflops": 1.0, "copy_gb_per_s": 1e6}
    stages = {name: {"seconds": 1.0} for name in ("dispatch", "experts gemm 1", "experts activation", "experts gemm 2", "combine")}
    fused = {name: {"seconds": 1.0} for name in ("experts", "combine")}
    measure.achieved(stages, recipe, 33, load, ceiling)
    measure.achieved(fused, recipe, 33, load, ceiling)
    assert fused["experts"]["bytes"] == sum(stage["bytes"] for stage in stages.values())
    assert fused["combine"]["bytes"] is None and fused["combine"]["ceiling_share"] is None  # what is left of it has no work of its own
