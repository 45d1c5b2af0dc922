"""What holds for all tests: one thread each, since their models are tiny and several processes share the cores. Without a
GPU those marked `gpu` are skipped, and Triton kernels are interpreted."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported; child processes inherit it

import pytest
import torch
from hypothesis import settings

settings.register_profile("bmoe", deadline=None)  # machines are shared, and a slow draw is no fault
settings.load_profile("bmoe")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported, by whichever test module comes first


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
