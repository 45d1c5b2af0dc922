"""The way of rows to their experts and back: extreme routings, and the GPU's passes against plain torch."""

import pytest
import torch

from bmoe.parallel import dispatch


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("routing", ["random", "one expert", "no real token on rank 0", "tails"])
def test_a_layer_shared_by_ranks_equals_all_experts_on_one(ranks, size, routing):
    for differences in ranks(size).run("extremes", routing=routing):
        assert max(differences) < 1e-13, differences


@pytest.mark.parametrize("sent", [0, 17, 33])
def test_the_passes_of_a_gpu_equal_plain_torch(monkeypatch, sent):
    """11 tokens with 3 slots each, of which `sent` have an expert."""
    draw = torch.Generator().manual_seed(sent)
    order_S = torch.randperm(33, generator=draw)[:sent]
    row_N = torch.full((33,), -1, dtype=torch.int32)
    row_N[order_S] = torch.arange(sent, dtype=torch.int32)
    x_TD, rows_SD = torch.randn(11, 64, generator=draw), torch.randn(sent, 64, generator=draw)
    spread, summed = dispatch._spread(x_TD, order_S, row_N, 3), dispatch._sum_rows(rows_SD, row_N, 3)
    assert spread.shape == (sent, 64) and summed.shape == (11, 64)
    monkeypatch.setattr(dispatch, "_has_kernel", lambda x: True)
    assert torch.equal(dispatch._spread(x_TD, order_S, row_N, 3), spread)
    assert torch.allclose(dispatch._sum_rows(rows_SD, row_N, 3), summed, rtol=1e-6, atol=1e-6)


def test_the_reason_for_the_transport_names_what_is_missing(monkeypatch):
    from bmoe.parallel import dispatch

    assert "gloo" in dispatch.why_torch_exchanges(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    assert "needs NCCL 2.30.4, and this is 2.28.9" in dispatch.why_torch_exchanges(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 4))
    assert "NCCL 2.30.4," not in dispatch.why_torch_exchanges(torch.device("cuda"))
