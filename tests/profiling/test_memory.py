"""Closed-form memory against what a real model, optimizer and backward pass hold."""

import pytest
import torch
import torch.nn.functional as F

from bmoe import recipe as recipes
from bmoe.data.loader import build_batch, build_sampler
from bmoe.data.sampler import Position
from bmoe.profiling import chips, memory
from bmoe.profiling.estimate import expected_load
from bmoe.profiling.memory import GIB, by_category
from bmoe.profiling.synthetic import SyntheticShards
from bmoe.profiling.work import Load
from bmoe.recipe import Recipe


def kept_bytes(model, batch) -> int:
    """Bytes of distinct storages that autograd keeps between forward and backward, parameters and inputs aside."""
    mine = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    mine |= {t.untyped_storage().data_ptr() for t in batch.model_inputs().values() if isinstance(t, torch.Tensor)}
    seen: dict[int, int] = {}
    alive = []

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in mine:
            seen[storage.data_ptr()] = storage.nbytes()
            alive.append(storage)  # else a freed storage's address could come back
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(**batch.model_inputs())
        logits = out.logits.float()
        (F.cross_entropy(logits, batch.picked_M, ignore_index=-100) + out.balance_L.sum() + out.z_L.sum()).backward()
    return sum(seen.values())


SHAPES = {
    "moe": {},
    "shared": {"moe": {"experts": 16, "top_k": 4, "expert_width": 96, "shared_experts": 1}},
    "dense first": {"moe": {"experts": 4, "top_k": 2, "expert_width": 96, "dense_layers": 1}, "qk_norm": True},
    "esm2": {"moe": None, "ffn": "gelu", "norm": "layernorm"},
    "dense": {"moe": None},
}


@pytest.mark.parametrize("recompute", ["none", "experts", "full"])
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_activations_are_what_autograd_keeps(recipe_of, build, shape, kind, recompute):
    recipe = recipe_of(
        data={"max_length": 256, "tokens_per_batch": 2048}, training={"tokens_per_step": 2048}, precision={"kind": kind},
        model={"layers": 3, "width": 128, **SHAPES[shape]}, backend={"experts": "grouped", "compile": False, "recompute": recompute},
    )  # fmt: skip
    subject = build(recipe, torch.device("cpu"))
    shards = SyntheticShards(recipe)
    crops, _ = next(build_sampler(shards, recipe, 0).batches(Position(0, 0), 2048))
    batch = build_batch(shards, crops, recipe, 0)
    load = Load(2048, int(batch.real_tokens), batch.pairs, batch.picked_M.numel())
    predicted = by_category(subject.recipe, 33, load)["activations"] * GIB
    transient = 0.2 if recompute == "full" else 0.06  # of the loss, which counts for more where little is kept
    assert predicted == pytest.approx(kept_bytes(subject.model, batch), rel=transient)


@pytest.mark.parametrize("kind, tokens_per_step", [("fp32", 512), ("bf16", 256), ("bf16", 512)])
def test_static_memory_is_exact(recipe_of, build, kind, tokens_per_step):
    recipe = recipe_of(precision={"kind": kind}, training={"tokens_per_step": tokens_per_step})
    subject = build(recipe, torch.device("cpu"))
    sizes = by_category(subject.recipe, 33, Load(256, 250, 250 * 40.0, 37))

    def held(*groups) -> int:
        return sum(t.numel() * t.element_size() for group in groups for t in group)

    optimizer = subject.optimizer
    assert sizes["weights"] * GIB == pytest.approx(held(subject.model.parameters()))
    assert sizes["optimizer"] * GIB == pytest.approx(held(optimizer.low.values(), optimizer.m.values(), optimizer.v.values()))
    if optimizer.sums:
        wide = sum(4 * p.numel() for p in subject.model.parameters() if p.dtype == torch.float32)
        assert sizes["gradients"] * GIB == pytest.approx(held(optimizer.sums.values()) + wide)
    else:
        assert sizes["gradients"] * GIB == pytest.approx(held(subject.model.parameters()))


def test_sharding_divides_and_recomputation_lowers(recipe_of):
    recipe = recipe_of(model={"layers": 24, "width": 1280, "heads": 20, "moe": {"expert_width": 3584}}, precision={"kind": "bf16"},
                       data={"tokens_per_batch": 16384, "max_length": 1024}, training={"tokens_per_step": 2097152})  # fmt: skip
    load = Load(16384, 16200, 16200 * 450.0, 2430)
    one, eight = (by_category(recipe, 33, load, world) for world in (1, 8))
    state = [sizes["weights"] + sizes["optimizer"] for sizes in (one, eight)]  # 2 + 2 + 8 bytes, and 4 + 8 on several ranks
    assert state[1] == pytest.approx(state[0] / 8, rel=2e-3)  # vectors and routers are whole on each
    assert eight["activations"] == one["activations"]
    peaks = []
    for recompute in ("none", "experts", "full"):
        backend = recipe.backend.model_copy(update={"recompute": recompute})
        peaks.append(by_category(recipe.model_copy(update={"backend": backend}), 33, load)["activations"])
    assert peaks[0] > peaks[1] > peaks[2]


def test_auto_counts_as_what_it_becomes_on_a_gpu(recipe_of):
    def resolved(**sections):
        backend = memory.on_a_gpu(recipe_of(**sections)).backend
        return backend.experts, backend.attention, backend.compile

    assert resolved(precision={"kind": "bf16"}) == ("triton", "varlen", True)
    assert resolved(precision={"kind": "fp8_current"}) == ("te", "varlen", True)
    assert resolved(precision={"kind": "fp8_row"}) == ("triton", "varlen", True)
    assert resolved(precision={"kind": "mxfp8", "emulate": True}) == ("grouped", "varlen", True)
    assert resolved(precision={"kind": "bf16"}, model={"ffn": "gelu"}) == ("grouped", "varlen", True)
    assert resolved(precision={"kind": "fp32"}) == ("grouped", "sdpa", True)
    assert resolved(precision={"kind": "bf16"}, backend={"experts": "loop", "compile": False}) == ("loop", "varlen", False)
    wide = recipe_of(precision={"kind": "bf16"}, model={"width": 128, "heads": 2})
    taken = {name: memory.on_a_gpu(wide, chips.CHIPS[name]).backend.attention for name in ("h100", "b200")}
    assert taken == {"h100": "flash", "b200": "varlen"}, "flash-attn-4 was compared with float64 on Hopper only"


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("recompute", ["none", "experts", "full"])
def test_fp8_row_keeps_a_byte_for_each_weight_of_the_experts(recipe_of, recompute, batches):
    """The transposed copies; with recomputation they are made again, one layer at a time. Both copies are held where a step has
    several batches."""
    model = {"layers": 5, "width": 256, "heads": 4, "moe": {"experts": 4, "top_k": 2, "expert_width": 1024}}
    load = Load(1024, 1000, 1e5, 150)

    def sizes(kind):
        recipe = recipe_of(model=model, precision={"kind": kind}, backend={"recompute": recompute}, data={"tokens_per_batch": 1024})
        training = recipe.training.model_copy(update={"tokens_per_step": 1024 * batches})
        return by_category(recipe.model_copy(update={"training": training}), 33, load)

    bf16, low = sizes("bf16"), sizes("fp8_row")
    layer = 4 * 3 * 256 * 1024
    held, kept, copies = (0, 5 * layer, layer) if recompute == "none" else (0, 0, 2 * layer)
    if batches > 1:
        held, kept, copies = 10 * layer, 0, 0
    assert (low["weights"] - bf16["weights"]) * GIB == pytest.approx(held)
    assert (low["activations"] - bf16["activations"]) * GIB == pytest.approx(kept)
    assert (low["workspace"] - bf16["workspace"]) * GIB == pytest.approx(copies)


SIXTEEN, FLASH = "esm2_moe data.tokens_per_batch=16384", "backend.attention=flash"
ESM2_MOE_8M = {"layers": 6, "width": 320, "heads": 20, "moe": {"experts": 8, "top_k": 2, "expert_width": 448}}
SMALL_EXPERTS = {"experts": 64, "top_k": 8, "expert_width": 768}
PROTEINS = Load(65536, 65257, 31_300_000.0, 9788)
DECODERS = Load(16384, 16384, 16 * 1024.0**2, 16368)


@pytest.mark.parametrize(
    "model, precision, load, measured",
    [
        (ESM2_MOE_8M, {"kind": "bf16"}, PROTEINS, 4.187),
        (ESM2_MOE_8M, {"kind": "fp8_current"}, PROTEINS, 6.123),
        (ESM2_MOE_8M, {"kind": "mxfp8", "emulate": True}, PROTEINS, 5.588),
        (ESM2_MOE_8M, {"kind": "fp8_block", "emulate": True}, PROTEINS, 5.598),
        ({**ESM2_MOE_8M, "moe": None, "ffn_width": 896}, {"kind": "bf16"}, PROTEINS, 4.586),
        ({**ESM2_MOE_8M, "moe": None, "ffn_width": 3584}, {"kind": "bf16"}, PROTEINS, 11.268),
        ({"layers": 12, "width": 1024, "heads": 16, "moe": {"experts": 8, "expert_width": 2816}}, {"kind": "bf16"}, DECODERS, 18.40),
        (
            {"layers": 8, "width": 1280, "heads": 20, "moe": {"experts": 64, "top_k": 8, "expert_width": 768}},
            {"kind": "bf16"},
            DECODERS,
            24.80,
        ),
    ],
    ids=["8m", "8m fp8", "8m mxfp8 emulated", "8m fp8_block emulated", "dense 896", "dense 3584", "12 layers", "8 layers 64 experts"],
)
def test_peaks_of_training_on_an_h200(model, precision, load, measured):
    """GiB by torch's allocator over training runs of 2026-12-02, one batch a step, compiled, replayed where it can be."""
    clm = load is DECODERS
    recipe = Recipe.model_validate(
        {
            "model": {**model, "kind": "decoder" if clm else "encoder", "tie_head": not clm}, "precision": precision,
            "objective": {"kind": "clm" if clm else "mlm"}, "data": {"tokens_per_batch": load.tokens},
            "training": {"tokens_per_step": load.tokens},
        }
    )  # fmt: skip
    assert by_category(recipe, 33, load)["peak"] == pytest.approx(measured, rel=0.1)


GRID = {  # settings, precision, batches: GiB with recomputation of nothing, experts, all
    ("esm2_moe_8m", "bf16", 2): (0.899, 0.761, 0.581),
    ("esm2_moe_8m", "fp8_current", 2): (1.278, 1.143, 0.929),
    ("esm2_moe_8m data.tokens_per_batch=65536", "bf16", 1): (4.184, 3.086, 1.489),
    ("esm2_moe_8m data.tokens_per_batch=65536", "fp8_current", 1): (6.126, 5.133, 3.461),
    ("esm2_moe_tiny", "bf16", 2): (0.112, 0.109, 0.104),
    ("esm2_moe_tiny", "fp8_current", 2): (0.245, 0.241, 0.234),
    ("genome_mixtral backend.attention=flash", "bf16", 2): (25.22, 20.409, 18.24),
    ("genome_mixtral backend.attention=flash", "fp8_current", 2): (29.936, 23.66, 21.487),
    ("protein_moe_fine", "bf16", 2): (92.122, 81.788, 71.894),
    ("protein_moe_fine", "fp8_current", 2): (118.95, 99.85, 89.940),
    (f"esm2_moe {FLASH}", "bf16", 2): (83.153, 63.019, 47.951),
    (f"esm2_moe {FLASH}", "fp8_current", 2): (102.374, 76.092, 61.027),
}


@pytest.mark.parametrize(
    "settings, compiled, batches, measured",
    [
        (f"{SIXTEEN} model.layers=6 {FLASH}", True, 1, 13.663),
        (f"{SIXTEEN} model.layers=12 model.width=1024 model.heads=16 model.moe.expert_width=2816 {FLASH}", True, 1, 18.421),
        (f"genome_mixtral model.layers=8 {FLASH}", True, 1, 14.380),
        (f"{SIXTEEN} model.layers=4 model.width=2048 model.heads=32 model.moe.expert_width=5632 {FLASH}", True, 1, 19.905),
        ("protein_moe_fine model.layers=6", True, 1, 17.874),
        *(
            (f"{name} precision.kind={kind} backend.recompute={recompute}", False, batches, measured)
            for (name, kind, batches), peaks in GRID.items()
            for recompute, measured in zip(("none", "experts", "full"), peaks, strict=True)
        ),
    ],
)
def test_peaks_of_recipes_on_an_h200(settings, compiled, batches, measured):
    """GiB by torch's allocator over recorded steps of 2026-12-02 and 03 (benchmarks/profile_accuracy.py), less what earlier cases of the
    same process had left behind."""
    name, *values = settings.split()
    recipe = recipes.load(recipes.find(name)[0], [f"backend.compile={'true' if compiled else 'false'}", *values])
    training = recipe.training.model_copy(update={"tokens_per_step": batches * recipe.data.tokens_per_batch})
    recipe, shards = recipe.model_copy(update={"training": training}), SyntheticShards(recipe)
    if recipe.backend.attention == "auto":
        recipe = recipe.model_copy(update={"backend": recipe.backend.model_copy(update={"attention": "varlen"})})
    assert by_category(recipe, shards.alphabet.size, expected_load(recipe, shards))["peak"] == pytest.approx(measured, rel=0.1)
