"""What this device reaches at best, measured in the same run as the profile: a large matrix product and a large copy; and its memory."""

import os
import time
from collections.abc import Callable

import torch

SIZES = {"cuda": (8192, 2**29), "cpu": (1024, 2**25)}  # side of the product, elements of the copy


def available_gib(device: torch.device) -> float:
    """Memory of the device that nothing uses now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / 2**30
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def _best(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Shortest seconds of one call."""
    call()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize(device)
            times.append(start.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
    return min(times)


def eight_bits(device: torch.device) -> float:
    """TFLOP/s of a large E4M3 product with one scale per tensor, on a GPU that has it (compute capability 8.9 or more)."""
    side = SIZES[device.type][0]
    a = torch.randn(side, side, device=device).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    return 2 * side**3 / _best(lambda: torch._scaled_mm(a, a.t(), one, one, out_dtype=torch.bfloat16), device, 10) / 1e12


def measure(device: torch.device, dtype: torch.dtype) -> dict[str, float | str]:
    """{matmul_tflops, copy_gb_per_s, what}: best of a few repeats; the copy counts bytes read plus bytes written."""
    side, elements = SIZES[device.type]
    a = torch.randn(side, side, device=device, dtype=torch.float32).to(dtype)
    out = torch.empty_like(a)
    product = _best(lambda: torch.mm(a, a, out=out), device, 10 if device.type == "cuda" else 3)
    source = torch.ones(elements, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy = _best(lambda: target.copy_(source), device, 10 if device.type == "cuda" else 3)
    name = str(dtype).removeprefix("torch.")
    return {
        "matmul_tflops": 2 * side**3 / product / 1e12,
        "copy_gb_per_s": 2 * source.numel() * source.element_size() / copy / 1e9,
        "what": f"{side} x {side} x {side} product in {name}; copy of {source.numel() * 2 / 2**20:.0f} MiB",
    }
