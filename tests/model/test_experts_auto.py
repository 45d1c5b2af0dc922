"""`auto`: the implementation chosen for each kind of machine, with its reason."""

import pytest
import torch

from bmoe.kernels import fused_gemm
from bmoe.model.experts import auto

GPU = torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))


def test_cpu_takes_grouped():
    assert auto.choose(torch.device("cpu"), "bf16", 128, 128, 8)[0] == "grouped"


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"ffn": "gelu"}, "grouped", "swiglu"),
        ({"bias": True}, "grouped", "biases"),
        ({"precision": "fp32"}, "grouped", "fp32"),
        ({"precision": "fp8_current"}, "te", "Transformer Engine"),
        ({"precision": "fp8_row"}, "triton", "fused kernels"),
        ({"precision": "fp8_current", "emulate": True}, "grouped", "emulated"),
    ],
)
def test_what_the_fused_kernels_cannot_do_goes_elsewhere(hopper, options, kind, said):
    precision = options.pop("precision", "bf16")
    chosen, reason = auto.choose(GPU, precision, 1280, 3584, 8, **options)
    assert chosen == kind and said in reason


def test_hopper_takes_the_fused_gemms_and_cites_the_nearest_measurement(hopper, monkeypatch):
    monkeypatch.setattr(fused_gemm, "why_not", lambda *_: None)
    kind, reason = auto.choose(GPU, "bf16", 1024, 704, 48)
    assert kind == "triton" and "H1280 F768 64 experts k8" in reason


def test_hopper_without_the_library_says_so(hopper, monkeypatch):
    monkeypatch.setattr(fused_gemm.importlib.util, "find_spec", lambda _: None)
    kind, reason = auto.choose(GPU, "bf16", 1280, 3584, 8)
    assert kind == "triton" and "quack-kernels is not installed" in reason


def test_older_gpus_take_grouped(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (8, 0))
    assert auto.choose(GPU, "bf16", 1280, 3584, 8)[0] == "grouped"
