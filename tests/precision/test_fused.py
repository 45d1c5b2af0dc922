"""The Triton copies equal the plain-torch quantisers bit for bit, under Triton's interpreter."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

CHECK = """
import warnings
import torch
from bmoe.precision import block, fused, mxfp8

warnings.simplefilter("ignore", RuntimeWarning)  # an overflow to infinity is one of the cases

def same(a, b):
    return torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0)) and torch.equal(a.isnan(), b.isnan())

g = torch.Generator().manual_seed(0)
# The interpreter writes wrong bfloat16 subnormals, so that dtype stays above them here; tests/gpu has them.
for dtype, low in ((torch.float32, -38), (torch.bfloat16, -25)):
    for M, K in ((64, 128), (70, 200), (1, 32), (130, 300)):
        x = (torch.randn(M, K, generator=g) * torch.logspace(low, 30, K)).to(dtype)
        x[0, 0], x[-1, 1], x[:, K // 2] = torch.inf, torch.nan, 0.0
        for kind, quantiser in (("mxfp8", mxfp8), ("fp8_block", block)):
            along, down = fused.copies(x, kind)
            assert same(along, quantiser.quantize_dequantize(x, -1)), (dtype, M, K, kind)
            assert same(down, quantiser.quantize_dequantize(x, -2)), (dtype, M, K, kind)
        assert same(fused.squares(x), block.quantize_dequantize(x, None))
    sizes = [0, 23, 0, 64, 1, 42]
    ends = torch.tensor(sizes).cumsum(0).int()
    x = torch.randn(130, 160, generator=g).to(dtype)
    parts = x.split(sizes)
    for kind, quantiser in (("mxfp8", mxfp8), ("fp8_block", block)):
        none, down = fused.copies(x, kind, ends, rows=False)
        assert none.numel() == 0
        assert same(down, torch.cat([quantiser.quantize_dequantize(p, -2) for p in parts]))
    assert same(fused.squares(x, ends), torch.cat([block.quantize_dequantize(p, None) for p in parts]))

maxima = torch.arange(0x7F80).to(torch.int16).view(torch.bfloat16)[::16]
x = maxima[64:, None].expand(-1, 32).contiguous()
assert same(fused.copies(x, "mxfp8", columns=False)[0], mxfp8.quantize_dequantize(x))
assert same(fused.copies(x, "fp8_block", columns=False)[0], block.quantize_dequantize(x))
print("equal")
"""


def test_triton_equals_torch_bit_for_bit():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True)
    assert run.stdout.strip() == "equal", run.stderr
