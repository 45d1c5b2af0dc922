"""Every layout trains as one process does: losses, gradients, norm, weights and moments, with different data on each rank, some
experts and one whole rank without tokens, shared experts, biases, and clipping active."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from bmoe import recipe as recipes
from bmoe.parallel import shard
from bmoe.parallel.world import World

_spec = importlib.util.spec_from_file_location("cases", Path(__file__).parent / "cases.py")
cases = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cases)

LAYOUTS = [(1, 2, 1), (1, 1, 2), (2, 1, 1), (1, 4, 1), (1, 1, 4), (1, 2, 2), (2, 1, 2), (2, 2, 1)]  # replicas, shards, expert


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """Norm of the difference over the norm."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-300)) if np.linalg.norm(got - want) else 0.0


def worst(got: dict, want: dict) -> tuple[float, str]:
    assert got.keys() == want.keys()
    return max((relative(got[name], want[name]), name) for name in want)


@pytest.fixture(scope="module")
def one():
    """The runs on one process, by arguments."""
    known: dict = {}

    def of(**arguments) -> dict:
        key = repr(sorted(arguments.items()))
        if key not in known:
            known[key] = cases.train(0, 1, **arguments)
        return known[key]

    return of


def test_clipping_is_active_and_experts_starve(one):
    run = one()
    assert (run["norms"] > 2 * 0.05).all()
    for name in ("blocks.0.ffn.experts.gate_up", "blocks.1.ffn.experts.down"):
        gradient = run["gradients"][name]
        assert [bool(np.abs(gradient[e]).sum()) for e in range(8)] == [False, False, True, True, True, False, True, True]


@pytest.mark.parametrize("batches", [4, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_float64_equals_one_process(ranks, one, layout, batches):
    want = one(batches=batches)
    for got in ranks(int(np.prod(layout))).run("train", layout=layout, batches=batches):
        assert relative(got["losses"], want["losses"]) < 1e-9
        assert relative(got["norms"], want["norms"]) < 1e-9
        assert worst(got["gradients"], want["gradients"])[0] < 1e-9
        assert worst(got["state"], want["state"])[0] < 1e-9


@pytest.mark.parametrize("layout", [(1, 2, 1), (2, 1, 1), (1, 1, 2)])
def test_weights_that_are_freed_after_each_pass_change_nothing(ranks, one, layout):
    want = one(batches=8)
    for got in ranks(2).run("train", layout=layout, batches=8, stay_gathered=False):
        assert relative(got["losses"], want["losses"]) < 1e-9
        assert worst(got["gradients"], want["gradients"])[0] < 1e-9


@pytest.mark.no_cover
def test_compiled_blocks_change_nothing(ranks, one):
    """Also what a dispatch keeps out of its block's program: grouped experts and the shared one, for changing numbers of rows."""
    want = one(backend={"experts": "grouped"})
    for got in ranks(2).run("train", layout=(1, 1, 2), compiled="aot_eager", backend={"experts": "grouped"}):
        assert relative(got["losses"], want["losses"]) < 1e-9 and relative(got["norms"], want["norms"]) < 1e-9
        assert worst(got["gradients"], want["gradients"])[0] < 1e-9


@pytest.mark.parametrize("stay_gathered", [True, False])
@pytest.mark.parametrize("recompute", ["experts", "full"])
@pytest.mark.parametrize("layout", [(1, 2, 1), (1, 1, 2)])
def test_recomputed_activations_change_nothing(ranks, one, layout, recompute, stay_gathered):
    want = one(batches=4)
    backend = {"experts": "grouped", "recompute": recompute}
    for got in ranks(2).run("train", layout=layout, batches=4, stay_gathered=stay_gathered, backend=backend):
        assert relative(got["losses"], want["losses"]) < 1e-9
        assert worst(got["gradients"], want["gradients"])[0] < 1e-9
        assert worst(got["state"], want["state"])[0] < 1e-9


@pytest.mark.parametrize("layout", [(1, 2, 1), (1, 2, 2), (1, 1, 4)])
def test_float32_equals_one_process_to_rounding(ranks, one, layout):
    want = one(dtype="float32", steps=1)
    for got in ranks(int(np.prod(layout))).run("train", layout=layout, dtype="float32", steps=1):
        assert relative(got["losses"], want["losses"]) < 1e-5
        assert relative(got["norms"], want["norms"]) < 1e-5
        assert worst(got["gradients"], want["gradients"])[0] < 1e-5


@pytest.mark.parametrize("batches", [2, 4])
def test_bf16_equals_one_process_to_its_rounding(ranks, one, batches):
    """One batch a rank and several: copies sum their gradients over ranks in fp32 either way."""
    options = {"dtype": "float32", "steps": 1, "precision": {"kind": "bf16"}, "backend": {"experts": "grouped"}, "batches": batches}
    want = one(**options)
    for layout in ((1, 1, 2), (1, 2, 1), (2, 1, 1)):
        for got in ranks(2).run("train", layout=layout, **options):
            assert relative(got["losses"], want["losses"]) < 1e-3
            assert relative(got["norms"], want["norms"]) < 2e-2
            assert worst(got["gradients"], want["gradients"])[0] < 5e-2


def test_only_what_ranks_share_is_in_a_unit(ranks):
    """Experts that one rank alone holds, and all of a model that every rank has a copy of, are not copied by FSDP2 once a step:
    they are bf16 with split masters, as on one GPU."""
    blocks, experts = ["blocks.0", "blocks.1"], ["blocks.0.ffn.experts", "blocks.1.ffn.experts"]
    sections = {"precision": {"kind": "bf16"}, "backend": {"experts": "grouped"}}
    wanted = {(1, 1, 2): ["", *blocks], (1, 2, 1): ["", *blocks], (2, 1, 2): ["", *blocks, *experts], (2, 1, 1): []}
    for layout, want in wanted.items():
        for found, matrices in ranks(int(np.prod(layout))).run("units", layout=layout, **sections):
            assert sorted(found) == sorted(want), layout
            for name, (dtype, split) in matrices.items():
                alone = layout == (2, 1, 1) or (layout == (1, 1, 2) and ".experts." in name)
                assert (dtype, split) == (("torch.bfloat16", True) if alone else ("torch.float32", False)), name
    alone, matrices = cases.units(0, 1, (1, 1, 1), **sections)
    assert not alone and set(matrices.values()) == {("torch.bfloat16", True)}


def test_experts_that_fsdp2_shards_hold_no_weights(ranks):
    """What a validation leaves gathered is not theirs to keep a second copy of."""
    sections = {"precision": {"kind": "bf16"}, "backend": {"experts": "grouped"}}
    for layout, want in {(1, 1, 2): 2, (2, 1, 1): 2, (1, 2, 1): 0}.items():
        assert ranks(2).run("holders", layout=layout, **sections) == [want, want], layout


FAULTS = ["expert gradient twice", "norm over own shards", "unshifted expert index", "experts in the wrong order", "gradients averaged"]


@pytest.mark.parametrize("fault, layout", [*((fault, (1, 1, 2)) for fault in FAULTS), ("copies not summed", (2, 1, 1))])
def test_the_comparison_sees_faults(ranks, one, fault, layout):
    want = one()
    got = ranks(2).run("train", layout=layout, sabotage=fault)[0]
    differences = [
        relative(got["losses"], want["losses"]),
        relative(got["norms"], want["norms"]),
        worst(got["gradients"], want["gradients"])[0],
        worst(got["state"], want["state"])[0],
    ]
    assert max(differences) > 1e-4, differences


@pytest.mark.parametrize("layout", [(1, 1, 4), (2, 2, 1)])
def test_a_model_that_never_was_whole_has_the_values_of_one_process(ranks, layout):
    want = cases.initial(0, 1, (1, 1, 1))
    for got in ranks(4).run("initial", layout=layout):
        assert got.keys() == want.keys()
        for name in want:
            assert np.array_equal(got[name], want[name]), name


def test_weights_stay_gathered_only_where_all_ranks_have_room():
    """Ranks that decided by their own memory would wait for each other for ever."""

    class Smaller(World):
        def max(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.fill_(1.0)  # another rank has no room

    model, recipe, cpu = torch.nn.Linear(2, 2), recipes.validate({}), torch.device("cpu")
    assert shard.fits_gathered(model, recipe, World(cpu)) and not shard.fits_gathered(model, recipe, Smaller(cpu))
