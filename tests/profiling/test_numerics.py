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
    assert found["layers"] == found["of_layers"] == 3 and found["tokens"] <= 256 and len(found["gemms_by_layer"]) == 3
    assert found["gemms"]["experts gemm 1"]["fprop"] == pytest.approx(
        sum(layer["experts gemm 1"]["fprop"] for layer in found["gemms_by_layer"]) / 3
    )
    for gemm in ("experts gemm 1", "experts gemm 2"):
        for product in ("fprop", "dgrad", "wgrad"):
            # Rounding to 4 significant bits gives a relative error of about 2^-4 / sqrt(3) / sqrt(2) = 0.026 an input, and a
            # product has two; gradients in E5M2 have one bit less. bf16 has 8 bits: 16 times smaller.
            assert 0.02 < found["gemms"][gemm][product] < 0.08
            assert found["gemms"][gemm][product] / found["gemms_bf16"][gemm][product] > 8
    assert all(value > 0 for name, value in found["gradients"].items() if "experts" in name)
    assert abs(found["loss_difference"]) < 0.05
    assert "not measured" in found["label"]


def test_errors_of_four_bits(recipe_of):
    """9.5 % of an input rounded to nearest, 13.3 % of one rounded stochastically (tests/precision/test_nvfp4.py), so 13.5 % of fprop
    and 16.4 % of dgrad, if values are normal; rotated rows, of which masked tokens have most of the gradient, lose less."""
    recipe = recipe_of(precision={"kind": "nvfp4"})
    found = numerics.emulated(recipe, SyntheticShards(recipe), CPU, tflops=1.0)
    for gemm in found["gemms"].values():
        assert 0.1 < gemm["fprop"] < 0.2 and gemm["fprop"] < gemm["dgrad"] < 0.25 and 0.08 < gemm["wgrad"] < 0.25


def test_dense_models_round_every_linear_layer(recipe_of):
    recipe = recipe_of(precision={"kind": "mxfp8"}, model={"moe": None})
    found = numerics.emulated(recipe, SyntheticShards(recipe), CPU, tflops=1.0)
    linears = ("attention.qkv", "attention.output", "ffn.gate_up", "ffn.down")
    assert set(found["modules"]) == {f"blocks.{layer}.{name}" for layer in (0, 1) for name in linears}
    assert found["gemms"] == {} and found["gradients"]


def test_what_has_no_emulation_says_so(recipe_of):
    recipe = recipe_of(precision={"kind": "fp8_delayed"})
    assert "not emulated" in numerics.emulated(recipe, SyntheticShards(recipe), CPU, 1.0)["label"]


def test_machines_compare_what_they_afford(recipe_of):
    recipe = recipe_of(model={"width": 1280, "heads": 20, "layers": 24, "moe": {"expert_width": 3584, "experts": 8}},
                       data={"tokens_per_batch": 16384}, training={"tokens_per_step": 32768})  # fmt: skip
    (slow, one), (fast, all_layers) = (numerics.affordable(recipe, tflops, 1000.0) for tflops in (0.03, 500.0))
    assert numerics.FEWEST_TOKENS <= slow < fast == numerics.MOST_TOKENS and one == 1 and all_layers == 24
    layer_gib = 4 * 4 * (3 * 1280 * 8 * 3584 + 4 * 1280**2) / 2**30  # four fp32 copies of a layer
    assert numerics.affordable(recipe, 500.0, 2 * 5.5 * layer_gib) == (numerics.MOST_TOKENS, 5)
    assert numerics.affordable(recipe, 500.0, 0.1)[1] == 1


def test_fewer_layers_than_the_recipe_all_have_experts(recipe_of, monkeypatch):
    monkeypatch.setattr(numerics, "affordable", lambda *_: (256, 1))
    recipe = recipe_of(precision={"kind": "mxfp8"}, model={"layers": 3, "moe": {"dense_layers": 1}})
    found = numerics.emulated(recipe, SyntheticShards(recipe), CPU, tflops=1.0)
    assert found["layers"] == 1 and found["modules"] == ["blocks.0.ffn.experts"] and "1 of 3 layers" in found["label"]


def test_layers_that_the_recipe_keeps_are_not_rounded(recipe_of):
    kept = {"kind": "mxfp8", "high_precision_layers": {"first": 1, "last": 1}}
    recipe = recipe_of(precision=kept, model={"layers": 3})
    found = numerics.emulated(recipe, SyntheticShards(recipe), CPU, tflops=1.0)
    assert found["modules"] == ["blocks.1.ffn.experts"]


def test_gradients_over_layers():
    found = numerics.over_layers({"embedding": 0.1, "blocks.0.a.weight": 0.2, "blocks.11.a.weight": 0.4})
    assert found["embedding"] == {"mean": 0.1, "worst": 0.1, "layer": None}
    assert found["blocks.*.a.weight"] == {"mean": pytest.approx(0.3), "worst": 0.4, "layer": 12}
