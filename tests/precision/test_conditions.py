"""Conditions of each precision, stated for machines that are not here."""

import os
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from bmoe.precision import conditions
from bmoe.precision import machine as machine_module
from bmoe.precision.conditions import unmet
from bmoe.precision.machine import FUSED_SWITCH, Machine, probe, version_of
from bmoe.recipe import ModelSection

CPU = Machine("x86_64", te_problem="transformer_engine is not installed")
H200 = Machine("NVIDIA H200", (9, 0), (13, 0), (2, 20, 2), None, (13, 1), (1, 20), True, quack=(0, 6, 5))
B200 = Machine("NVIDIA B200", (10, 0), (13, 0), (2, 20, 2), None, (13, 8), (1, 29), fused_switch=True)
RTX5090 = Machine("NVIDIA GeForce RTX 5090", (12, 0), (13, 0), (2, 20, 2), None, (13, 8))
A100 = Machine("NVIDIA A100", (8, 0), (12, 8), (2, 20, 2), None, (12, 8))
FLAGSHIP = ModelSection()


@pytest.mark.parametrize(
    "kind, runs_on",
    [
        ("fp32", {"cpu", "a100", "h200", "b200", "rtx"}),
        ("bf16", {"cpu", "a100", "h200", "b200", "rtx"}),
        ("fp8_current", {"h200", "b200", "rtx"}),
        ("fp8_delayed", {"h200", "b200", "rtx"}),
        ("fp8_block", {"b200", "rtx"}),
        ("mxfp8", {"b200"}),
        ("fp8_row", {"h200"}),
        ("nvfp4", set()),
    ],
)
def test_where_each_precision_runs(kind, runs_on):
    machines = {"cpu": CPU, "a100": A100, "h200": H200, "b200": B200, "rtx": RTX5090}
    assert {name for name, machine in machines.items() if not unmet(kind, machine, FLAGSHIP)} == runs_on


def test_mxfp8_on_hopper_names_the_chip_and_what_of_the_fused_kernel_is_too_old():
    chip, frontend = unmet("mxfp8", H200, FLAGSHIP)
    assert "NVIDIA H200 has 9.0" in chip and "10.0 to below 11.0" in chip
    assert "1.23" in frontend and "1.20" in frontend


def test_four_bits_are_emulated_only_and_blackwell_has_the_rest():
    (sentence,) = unmet("nvfp4", B200, FLAGSHIP)
    assert sentence.startswith("Kernels") and "precision.emulate" in sentence
    assert [s.split(":")[0] for s in unmet("nvfp4", RTX5090, FLAGSHIP)] == ["Chip", "Kernels"]


def test_row_wise_fp8_needs_our_kernels_and_not_transformer_engine():
    bare = Machine("NVIDIA H200", (9, 0), (13, 0), te_problem="transformer_engine is not installed")
    (sentence,) = unmet("fp8_row", bare, FLAGSHIP)
    assert "quack-kernels" in sentence and "bmoe[fused]" in sentence


def test_a_laptop_misses_chip_cuda_and_transformer_engine():
    topics = [sentence.split(":")[0] for sentence in unmet("mxfp8", CPU, FLAGSHIP)]
    assert topics == ["Chip", "CUDA", "Transformer Engine"]


def test_dimensions_must_be_whole_blocks():
    model = ModelSection(width=1264, heads=4, moe={"expert_width": 3592})
    found = unmet("mxfp8", B200, model)
    assert len(found) == 2 and "1264" in found[0] and "3592" in found[1] and all("multiple of 64" in s for s in found)
    assert len(unmet("mxfp8", B200, ModelSection(moe={"expert_width": 3616}))) == 1  # a multiple of 32
    assert len(unmet("fp8_current", B200, model)) == 1  # 1264 is a multiple of 16
    assert not unmet("bf16", B200, model)


def test_only_swiglu_without_bias():
    found = unmet("mxfp8", B200, ModelSection(ffn="gelu", bias=True))
    assert [sentence.split(":")[0] for sentence in found] == ["Feed-forward"] * 2


def test_a_model_without_experts_has_nothing_to_multiply_in_it():
    found = unmet("mxfp8", B200, ModelSection(moe=None, ffn="gelu", bias=True, width=1264, heads=4))
    assert [sentence.split(":")[0] for sentence in found] == ["Model", "Dimensions"]  # no word on the form of experts that are not there
    assert not unmet("bf16", B200, ModelSection(moe=None))


def test_block_scaling_on_hopper_needs_a_newer_cublas():
    (sentence,) = unmet("fp8_block", H200, FLAGSHIP)
    assert "13.6" in sentence
    newer = Machine("NVIDIA H200", (9, 0), (13, 0), (2, 20, 2), None, (13, 8))
    assert not unmet("fp8_block", newer, FLAGSHIP)


@pytest.mark.parametrize(
    "lacking, said",
    [
        ({"fused_switch": False}, FUSED_SWITCH + "=1"),
        ({"cudnn_frontend": (1, 22)}, "is 1.22"),
        ({"cudnn_frontend": None}, "is not installed"),
        ({"capability": (11, 0)}, "10.0 to below 11.0"),
    ],
)
def test_mxfp8_needs_its_fused_grouped_mlp(lacking, said):
    """`is_supported` of Transformer Engine 2.20's ops/fused/grouped_mlp.py: the switch, a major capability of 10, cuDNN's kernels."""
    assert not unmet("mxfp8", B200, FLAGSHIP)
    (sentence,) = unmet("mxfp8", replace(B200, **lacking), FLAGSHIP)
    assert said in sentence


@pytest.mark.parametrize("given, imported, after", [(None, False, "1"), ("0", False, "0"), (None, True, None)])
def test_the_switch_is_set_before_transformer_engine_is_imported(monkeypatch, given, imported, after):
    """What the environment says stands; after an import it would say what is not so."""
    monkeypatch.setenv(FUSED_SWITCH, given or "")
    if given is None:
        monkeypatch.delenv(FUSED_SWITCH)
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    if imported:
        monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    machine_module._transformer_engine()
    assert os.environ.get(FUSED_SWITCH) == after


def test_every_condition_is_one_sentence():
    for machine in (CPU, H200, A100, RTX5090):
        for kind in conditions.NEEDS:
            for sentence in unmet(kind, machine, ModelSection(width=40, heads=2, ffn="gelu", bias=True)):
                assert sentence.endswith(".") and "\n" not in sentence and sentence.count(". ") == 0


def test_probe_of_a_cpu():
    machine = probe(torch.device("cpu"))
    assert machine.capability is None and machine.device and machine.te_problem


def test_versions():
    assert version_of("2.20.2+cu13") == (2, 20, 2)
    assert version_of("1.29.0rc1") == (1, 29, 0)
    assert version_of("13.0") == (13, 0)
