"""The Triton copies equal the plain-torch quantisers bit for bit, under Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from bmoe.precision import block, fused, mxfp8

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels as they are"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # an overflow to infinity is one of the cases
]

QUANTISERS = {"mxfp8": mxfp8, "fp8_block": block}
# The interpreter writes wrong bfloat16 subnormals, so that dtype stays above them here; tests/gpu has them.
LOWEST = {torch.float32: -38, torch.bfloat16: -25}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0)) and torch.equal(a.isnan(), b.isnan())


@pytest.mark.parametrize("M, K", [(64, 128), (70, 200), (1, 32), (130, 300)])
@pytest.mark.parametrize("dtype", LOWEST)
def test_copies_equal_torch_bit_for_bit(dtype, M, K):
    x = (torch.randn(M, K, generator=torch.Generator().manual_seed(0)) * torch.logspace(LOWEST[dtype], 30, K)).to(dtype)
    x[0, 0], x[-1, 1], x[:, K // 2] = torch.inf, torch.nan, 0.0
    for kind, quantiser in QUANTISERS.items():
        along, down = fused.copies(x, kind)
        assert same(along, quantiser.quantize_dequantize(x, -1)), kind
        assert same(down, quantiser.quantize_dequantize(x, -2)), kind
    assert same(fused.squares(x), block.quantize_dequantize(x, None))


@pytest.mark.parametrize("dtype", LOWEST)
def test_groups_of_rows_are_rounded_alone(dtype):
    sizes = [0, 23, 0, 64, 1, 42]
    ends = torch.tensor(sizes).cumsum(0).int()
    x = torch.randn(130, 160, generator=torch.Generator().manual_seed(0)).to(dtype)
    parts = x.split(sizes)
    for kind, quantiser in QUANTISERS.items():
        none, down = fused.copies(x, kind, ends, rows=False)
        assert none.numel() == 0
        assert same(down, torch.cat([quantiser.quantize_dequantize(p, -2) for p in parts])), kind
    assert same(fused.squares(x, ends), torch.cat([block.quantize_dequantize(p, None) for p in parts]))


@pytest.mark.parametrize("kind", QUANTISERS)
def test_scales_of_maxima_of_all_sizes_equal_torch(kind):
    maxima = torch.arange(0x7F80).to(torch.int16).view(torch.bfloat16)[::16]
    x = maxima[64:, None].expand(-1, 32).contiguous()
    assert same(fused.copies(x, kind, columns=False)[0], QUANTISERS[kind].quantize_dequantize(x))
