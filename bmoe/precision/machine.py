"""What of a machine decides which precisions it runs: a plain description, and the probe that fills it in.

Conditions are judged on the description (`conditions.unmet`), so they can be stated and tested for any machine.
"""

import importlib.metadata
import os
import platform
import sys
from dataclasses import dataclass

import torch

FUSED_SWITCH = "NVTE_CUTEDSL_FUSED_GROUPED_MLP"
"""Transformer Engine reads it once, at its import, to decide whether mxfp8 may run fused; the probe sets it where nobody did."""


@dataclass(frozen=True)
class Machine:
    """One device and the software around it; None where a thing is absent."""

    device: str  # as the driver names it, or the CPU's architecture
    capability: tuple[int, int] | None = None  # CUDA compute capability
    cuda: tuple[int, int] | None = None  # version torch was built for
    te: tuple[int, ...] | None = None  # version of Transformer Engine that imports
    te_problem: str | None = None  # why it does not, in one line
    cublas_lt: tuple[int, int] | None = None  # version that Transformer Engine sees
    cudnn_frontend: tuple[int, ...] | None = None
    fused_switch: bool = False  # NVTE_CUTEDSL_FUSED_GROUPED_MLP was set when Transformer Engine was imported
    quack: tuple[int, ...] | None = None  # version of quack-kernels


def version_of(text: str) -> tuple[int, ...]:
    """(2, 20, 2) of "2.20.2+cu13": the leading numbers of a version."""
    numbers = []
    for part in text.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _installed(package: str) -> tuple[int, ...] | None:
    try:
        return version_of(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return None


def _transformer_engine() -> tuple[tuple[int, ...] | None, str | None, tuple[int, int] | None]:
    """(version, problem, cuBLASLt version); a broken installation raises any of these, and the reason is for the user."""
    if "transformer_engine" not in sys.modules:
        os.environ.setdefault(FUSED_SWITCH, "1")
    try:
        import transformer_engine.pytorch  # noqa: F401
        import transformer_engine_torch
    except ModuleNotFoundError as error:
        return None, f"{error.name} is not installed", None
    except (ImportError, OSError, AssertionError, RuntimeError) as error:
        return None, str(error).strip().splitlines()[0], None
    lt = transformer_engine_torch.get_cublasLt_version()
    return version_of(importlib.metadata.version("transformer-engine-torch")), None, (lt // 10000, lt // 100 % 100)


def probe(device: torch.device) -> Machine:
    """Describe the machine and the given device of it."""
    if device.type != "cuda":
        te = _installed("transformer-engine")
        problem = "it runs on NVIDIA GPUs only" if te else "transformer_engine is not installed"
        return Machine(platform.processor() or platform.machine(), te_problem=problem)
    te, problem, cublas_lt = _transformer_engine()
    return Machine(
        device=torch.cuda.get_device_name(device),
        capability=torch.cuda.get_device_capability(device),
        cuda=version_of(torch.version.cuda)[:2] if torch.version.cuda else None,
        te=te,
        te_problem=problem,
        cublas_lt=cublas_lt,
        cudnn_frontend=_installed("nvidia-cudnn-frontend"),
        quack=_installed("quack-kernels"),
        fused_switch=int(os.environ.get(FUSED_SWITCH, "0")) > 0,
    )
