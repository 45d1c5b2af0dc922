"""The way of rows to their experts and back: extreme routings, another transport, and the GPU's passes against plain torch."""

import pytest
import torch

from bmoe.parallel import dispatch


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("routing", ["random", "one expert", "no real token on rank 0", "tails"])
def test_a_layer_shared_by_ranks_equals_all_experts_on_one(ranks, size, routing):
    for differences in ranks(size).run("extremes", routing=routing):
        assert max(differences) < 1e-13, differences


@pytest.mark.parametrize("routing", ["random", "no real token on rank 0", "tails"])
def test_another_transport_takes_its_place(ranks, routing):
    """One that sends every token to every rank, once: K ids a row, most of them of no expert there, as DeepEP's rows have."""
    for differences in ranks(2).run("extremes", routing=routing, transport="everything to everyone"):
        assert max(differences) < 1e-13, differences


def test_the_shared_expert_runs_while_rows_travel(ranks):
    for forward, backward in ranks(2).run("travel_order"):
        assert forward == ["rows leave", "shared expert", "rows arrive"]
        assert backward == ["gradients leave", "shared expert", "gradients arrive"]


@pytest.mark.parametrize("routing", ["random", "tails", "nothing"])
def test_the_passes_of_a_gpu_equal_plain_torch(routing):
    """11 tokens with 3 slots each; the last slots without an expert."""
    draw = torch.Generator().manual_seed(0)
    experts_TK, weights_TK = torch.rand(11, 8, generator=draw).topk(3).indices, torch.rand(11, 3, generator=draw)
    experts_TK[{"random": 11, "tails": 6, "nothing": 0}[routing] :] = 8
    plain, fast = (dispatch.Journey(dispatch.sort_slots(experts_TK, weights_TK, 8, kernel), 3, kernel) for kernel in (False, True))
    sent = int((experts_TK < 8).sum())
    assert torch.equal(plain.order.row_N, fast.order.row_N) and plain.order.bounds_E1.tolist() == fast.order.bounds_E1.tolist()
    assert torch.equal(plain.order.weight_N[:sent], fast.order.weight_N[:sent])
    x_TD, rows_SD = torch.randn(11, 64, generator=draw), torch.randn(sent, 64, generator=draw)
    assert torch.equal(plain.spread(x_TD)[:sent], fast.spread(x_TD)[:sent])
    assert torch.allclose(plain.sum_rows(rows_SD), fast.sum_rows(rows_SD), rtol=1e-6, atol=1e-6)
    values_S = torch.randn(sent, generator=draw)
    assert torch.equal(plain.to_slots(values_S), fast.to_slots(values_S))
    assert torch.equal(plain.to_slots(values_S)[experts_TK < 8].sort().values, values_S.sort().values)


def test_rows_know_their_expert():
    counts_We = torch.tensor([[2, 0], [1, 3], [0, 0]])
    assert dispatch._experts_of_rows(counts_We, 6).tolist() == [0, 0, 0, 1, 1, 1]
    assert dispatch._experts_of_rows(torch.tensor([[1, 0, 2]]), 3).tolist() == [0, 2, 2]
    assert dispatch._experts_of_rows(torch.zeros(2, 2, dtype=torch.int32), 0).tolist() == []


def test_the_reason_for_the_transport_names_what_is_missing(monkeypatch):
    assert "gloo" in dispatch.why_torch_exchanges(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    assert "needs NCCL 2.30.4, and this is 2.28.9" in dispatch.why_torch_exchanges(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 4))
    assert "NCCL 2.30.4," not in dispatch.why_torch_exchanges(torch.device("cuda"))
