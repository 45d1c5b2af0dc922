"""The emulation report: the error of E4M3 is what its mantissa gives, bf16's is smaller by its own."""

import pytest
import torch

from bmoe.profiling import numerics
from bmoe.profiling.synthetic import SyntheticShards

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["mxfp8", "fp8_block", "fp8_current"])
def test_errors_are_those_of_the_formats(recipe_of, kind):
    recipe = recipe_of(precision={"kind": kind}, model={"layers": 3})
    found = numerics.emulated(recipe, SyntheticShards(recipe), CPU, tflops=1.0)
    assert found["layers"] == 1 and found["of_layers"] == 3 and found["tokens"] <= 256
    for gemm in ("experts gemm 1", "experts gemm 2"):
        for product in ("fprop", "dgrad", "wgrad"):
            # Rounding to 4 significant bits gives a relative error of about 2^-4 / sqrt(3) / sqrt(2) = 0.026 an input, and a
            # product has two; gradients in E5M2 have one bit less. bf16 has 8 bits: 16 times smaller.
            assert 0.02 < found["gemms"][gemm][product] < 0.08
            assert found["gemms"][gemm][product] / found["gemms_bf16"][gemm][product] > 8
    assert all(value > 0 for name, value in found["gradients"].items() if "experts" in name)
    assert abs(found["loss_difference"]) < 0.05
    assert "not measured" in found["label"]


def test_dense_models_round_every_linear_layer(recipe_of):
    recipe = recipe_of(precision={"kind": "mxfp8"}, model={"moe": None})
    found = numerics.emulated(recipe, SyntheticShards(recipe), CPU, tflops=1.0)
    assert set(found["modules"]) == {f"blocks.0.{n}" for n in ("attention.qkv", "attention.output", "ffn.gate_up", "ffn.down")}
    assert found["gemms"] == {} and found["gradients"]


def test_what_has_no_emulation_says_so(recipe_of):
    recipe = recipe_of(precision={"kind": "fp8_delayed"})
    assert "not emulated" in numerics.emulated(recipe, SyntheticShards(recipe), CPU, 1.0)["label"]


def test_slow_machines_compare_fewer_tokens(recipe_of):
    recipe = recipe_of(model={"width": 1280, "heads": 20, "moe": {"expert_width": 3584}}, data={"tokens_per_batch": 16384},
                       training={"tokens_per_step": 32768})  # fmt: skip
    slow, fast = (numerics.affordable_tokens(recipe, tflops) for tflops in (0.03, 500.0))
    assert slow < fast == numerics.MOST_TOKENS and slow >= numerics.FEWEST_TOKENS
