"""`bmoe profile` on a GPU: it times what training takes, agrees with itself, and its closed-form memory is near the allocator's peak."""

import gc
import json
import time

import pytest
import torch

from bmoe.parallel.world import World
from bmoe.profiling import compare, measure, open_data, profile
from bmoe.recipe import Recipe

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def recipe(**sections) -> Recipe:
    values = {
        "name": "gpu", "data": {"path": "/nonexistent", "tokens_per_batch": 16384},
        "model": {"layers": 6, "width": 1024, "heads": 16, "moe": {"experts": 8, "top_k": 2, "expert_width": 2816}},
        "training": {"tokens_per_step": 32768},
    }  # fmt: skip
    return Recipe.model_validate(values | sections)


def run(r: Recipe, **options) -> dict:
    from bmoe.jobs.profile import build

    gc.collect()
    torch.cuda.empty_cache()
    return profile(r, build, device=DEVICE, stepping=stepping, **options)


def stepping(subject):
    from bmoe.jobs.stepping import step_of

    return step_of(subject, World(DEVICE))


def test_a_measured_profile(tmp_path):
    found = run(recipe(), steps=8, trace=str(tmp_path / "trace.json"))
    json.dumps(found, allow_nan=False)
    assert found["unmet_conditions"] == [] and found["measured"]["label"] == "measured whole"
    assert found["kernels_per_step"] > 50 and 0 < found["gpu_busy_share"] <= 1
    assert 0 < found["mfu"] < 1 and 0 < found["mfu_of_measured_ceiling"] < 1
    assert found["ceilings"]["matmul_tflops"] > 100 and found["ceilings"]["copy_gb_per_s"] > 500
    assert {"attention", "router", "optimizer", "head + loss"} <= set(found["parts"])
    assert found["syncs_per_step"] == 0 and found["replayed"]
    assert found["gpu_busy_s"] + found["idle_s"] >= found["measured"]["step_s"] * 0.99
    assert sum(kind["seconds"] for kind in found["kernels"].values()) == pytest.approx(found["gpu_busy_s"], rel=0.1)
    assert "other passes" in found["kernels"] and "experts' products" in found["kernels"]
    print({name: round(part["seconds"] * 1e3, 2) for name, part in found["parts"].items()}, found["step_s"])
    print({name: chip.get("error") for name, chip in found["predicted"].items()})


@pytest.mark.parametrize("kind", ["bf16", "fp8_current"])
@pytest.mark.parametrize("recompute", ["none", "experts", "full"])
def test_memory_is_near_the_closed_form(recompute, kind):
    if kind != "bf16":
        pytest.importorskip("transformer_engine.pytorch", exc_type=ImportError)
    found = run(recipe(backend={"recompute": recompute}), precision=kind, steps=3)["memory"]
    print(recompute, kind, {name: round(size, 2) for name, size in found.items() if isinstance(size, float)}, found["measured"])
    assert found["peak"] == pytest.approx(found["measured_peak"], rel=0.1)


def test_two_profiles_agree_within_their_own_noise():
    step = compare(*(run(recipe(), steps=12) for _ in range(2)))["step"]
    print(step)
    assert not step["changed"]


def test_timing_costs_less_than_3_percent_of_the_steps_it_measures():
    from bmoe.jobs.profile import build

    subject = build(recipe(), DEVICE)
    shards, take, steps = open_data(subject.recipe)[0], stepping(subject), 10
    measure.whole_steps(subject, shards, DEVICE, 5, 1, take=take)
    bare, timed = [], []
    for _ in range(4):
        with measure.loader(subject, shards, DEVICE) as stream:
            take(stream.next().batches)
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(steps):
                take(stream.next().batches)
            torch.cuda.synchronize()
            bare.append((time.perf_counter() - began) / steps)
        timed.append(sum(measure.whole_steps(subject, shards, DEVICE, 1, steps, take=take).seconds) / steps)
    print(f"step: bare {min(bare) * 1e3:.2f} ms, timed {min(timed) * 1e3:.2f} ms")
    assert min(timed) < 1.03 * min(bare)


def test_mxfp8_is_reported_where_it_does_not_run():
    if torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("this GPU may run it")
    found = run(recipe(), precision="mxfp8")
    assert found["step_s"] is None and any(s.startswith("Chip:") for s in found["unmet_conditions"])
    assert found["emulated"]["tokens"] > 1000 and set(found["predicted"]) == {"b200", "gb200"}


@pytest.mark.parametrize("kind", ["mxfp8", "fp8_block", "fp8_current"])
def test_emulation_costs_at_most_twice_bf16(kind):
    """Whole steps as training takes them: both replayed."""
    plain, emulated = (run(recipe(precision=section), steps=8) for section in ({"kind": "bf16"}, {"kind": kind, "emulate": True}))
    bf16, rounded = plain["step_s"], emulated["step_s"]
    print(f"step: bf16 {bf16 * 1e3:.1f} ms, emulated {kind} {rounded * 1e3:.1f} ms: {rounded / bf16:.2f} times")
    assert plain["replayed"] and emulated["replayed"]
    assert rounded < 2 * bf16


def test_beside_hugging_face():
    """Every baseline and form runs, compiled ones with both routings from one program, and each has a peak of its own."""
    pytest.importorskip("transformers")
    from bmoe.jobs.profile import build
    from bmoe.jobs.stepping import step_of
    from bmoe.parallel.world import World

    model = {"kind": "decoder", "layers": 4, "width": 512, "heads": 8, "moe": {"experts": 8, "top_k": 2, "expert_width": 768}}
    small = recipe(
        model=model, objective={"kind": "clm"}, data={"path": "/nonexistent", "max_length": 1024, "tokens_per_batch": 8192},
        training={"tokens_per_step": 8192},
    )  # fmt: skip
    device = torch.device("cuda", 0)
    stepping = {"stepping": lambda subject: step_of(subject, World(device))}
    found = profile(small, build, device=device, baseline="hf", routing="natural,balanced", steps=4, **stepping)
    json.dumps(found, allow_nan=False)
    assert len(found["ratios"]) == 3 * 3 * 2 and len(found["baseline"]) == 2 + 18
    for name, row in found["baseline"].items():
        print(name, {key: row[key] for key in ("step_s", "residues_per_s", "fill", "peak_memory_gib")})
        assert row["residues_per_s"] > 0 and 0.1 < row["peak_memory_gib"] < 60
    for routing in ("natural", "balanced"):
        rates = {form: found["baseline"][f"hf-grouped-compiled {form} {routing}"]["residues_per_s"] for form in ("padded", "flattened")}
        assert rates["flattened"] > rates["padded"]  # two thirds of the padded slots are padding
