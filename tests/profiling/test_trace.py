"""What a traced step says of the device: busy time counts overlapping kernels once, the host's reads are counted."""

import pytest
import torch

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
