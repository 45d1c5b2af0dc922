"""The way of rows to their experts and back: extreme routings, another transport, and the GPU's passes against plain torch."""

import importlib.metadata

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


@pytest.mark.no_cover
def test_compiled_experts_are_one_program_for_any_number_of_rows(ranks):
    """In which nothing else varies: with a width and a top-k that do, a step took 1.049 times the plain one, and 1.009 without."""
    for programs in ranks(2).run("programs_of_experts", row_counts=[8, 12, 40]):
        (shapes,) = programs
        assert set(shapes) == {("rows", 16), ("rows", 1), (4, 16, 16), (4, 16, 8)}


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


def test_the_reason_for_the_transport_names_all_that_is_missing(monkeypatch):
    """Transformer Engine 2.20: `_MIN_NCCL_VERSION` of pytorch/ep.py, SM 90 of common/ep/ep_backend.cpp, bf16 rows (`_require_bf16`)."""

    def why(nccl=(2, 30, 4), capability=(9, 0), version="2.20.2", low=True) -> str:
        def installed(name: str) -> str:
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: nccl)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(importlib.metadata, "version", installed)
        return dispatch.why_torch_exchanges(torch.device("cuda"), low)

    assert "gloo" in dispatch.why_torch_exchanges(torch.device("cpu"), True)
    needs = "torch's all-to-all: Transformer Engine's exchange needs "
    assert why() == why(nccl=(2, 31, 0, "beta"), capability=(10, 0)) and "never been run" in why()
    assert why(nccl=(2, 28, 9)) == needs + "NCCL 2.30.4, and this is 2.28.9"
    assert why(capability=(8, 9)) == needs + "compute capability 9.0, and this GPU has 8.9"
    assert why(version="2.9.0") == needs + "Transformer Engine 2.17, and this is 2.9.0"
    assert why(version=None, low=False) == needs + "rows in bf16, and precision.kind is fp32; Transformer Engine, which is not installed"
