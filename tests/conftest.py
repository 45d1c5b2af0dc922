"""What holds for all tests: one thread each, since their models are tiny and several processes share the cores. Without a
GPU those marked `gpu` are skipped, and Triton kernels are interpreted, out of sight of coverage, whose tracing doubles their time."""

import functools
import importlib.util
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported; child processes inherit it

import pytest
import torch
from hypothesis import settings

settings.register_profile("bmoe", deadline=None)  # machines are shared, and a slow draw is no fault
settings.load_profile("bmoe")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported, by whichever test module comes first


def untraced(run):
    """`run` without the trace function of this thread."""

    @functools.wraps(run)
    def wrapped(*args, **kwargs):
        trace = sys.gettrace()
        sys.settrace(None)
        try:
            return run(*args, **kwargs)
        finally:
            sys.settrace(trace)
            (lambda: None)()  # coverage's tracer takes its place back at a call, and has to before this frame returns

    return wrapped


if sys.gettrace() and not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    from triton.runtime.interpreter import GridExecutor

    GridExecutor.__call__ = untraced(GridExecutor.__call__)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
