"""The whole command on a small recipe: the fixed keys, consistency of its numbers, and reports for absent hardware."""

import html
import io
import json

import pytest
import torch
from rich.console import Console

from bmoe import recipe as recipes
from bmoe.errors import RequestError
from bmoe.model import counts
from bmoe.precision.machine import Machine
from bmoe.profiling import estimate, profile
from bmoe.profiling.estimate import expected_load
from bmoe.profiling.fit import with_values
from bmoe.profiling.measure import Steps
from bmoe.profiling.render import estimate as show_estimate
from bmoe.profiling.render import report
from bmoe.profiling.run import _whole_step, implementations, reduced
from bmoe.profiling.synthetic import SyntheticShards
from bmoe.profiling.work import Load
from bmoe.recipe import Recipe
from bmoe.reports.profile import parts as sections

CPU = torch.device("cpu")
ARITHMETIC = {"matmul_tflops": 1e-6, "copy_gb_per_s": 1e3}  # ceilings of a machine on which products limit every part that has some
FIXED = {"step_s", "tokens_per_s", "mfu", "parts", "memory", "unmet_conditions", "emulated", "predicted", "ratios"}


def console_text(renderable) -> str:
    out = io.StringIO()
    Console(file=out, width=160, color_system=None).print(renderable)
    return out.getvalue()


def test_a_measured_profile(recipe_of, build, tmp_path):
    recipe = recipe_of()
    trace = tmp_path / "trace.json"
    found = profile(recipe, build, device=CPU, steps=4, trace=str(trace))
    json.dumps(found, allow_nan=False)
    assert set(found) >= FIXED and found["unmet_conditions"] == [] and found["emulated"] == {}
    assert found["step_s_low"] <= found["step_s"] <= found["step_s_high"]
    assert found["mfu"] is None and 0 < found["mfu_of_measured_ceiling"] < 1.5
    parts = found["parts"]
    assert set(parts) >= {"embedding", "norms", "attention", "router", "dispatch", "experts gemm 1", "combine", "head + loss", "optimizer"}
    assert all({"seconds", "tflops", "gb_per_s"} <= set(part) for part in parts.values())
    once = ("optimizer", "data wait")
    whole = sum(p["seconds"] * (1 if name in once else found["batches_per_step"]) for name, p in parts.items())
    assert whole == pytest.approx(found["step_s"], rel=0.02)
    assert found["bottleneck"]["part"] in parts and "." in found["bottleneck"]["key"]
    assert found["measured"]["label"] == "measured whole" and len(found["measured"]["steps"]) == 4
    assert found["tokens_per_s"] == pytest.approx(expected_load(recipe, SyntheticShards(recipe)).real * 2 / found["step_s"], rel=0.05)
    assert json.loads(trace.read_text())["traceEvents"]
    assert found["trace_label"] in " ".join(console_text(report(found)).split()) and found["trace_label"] in html.unescape(
        " ".join(sections(found))
    )


def test_a_precision_this_machine_lacks(recipe_of, build):
    found = profile(recipe_of(), build, device=CPU, precision="mxfp8")
    json.dumps(found, allow_nan=False)
    assert set(found) >= FIXED
    assert len(found["unmet_conditions"]) == 3 and found["step_s"] is None
    assert found["emulated"]["tokens"] <= 2048 and found["emulated"]["gemms"]
    assert set(found["predicted"]) == {"b200", "gb200"}
    for chip in found["predicted"].values():
        assert "predicted" in chip["label"] and chip["step_s"] > 0 and chip["memory"]["peak"] > 0


def test_a_blackwell_whose_fused_kernel_would_not_run_is_emulated_and_predicted(recipe_of, build, monkeypatch):
    """Its experts refuse to run unfused, so a model must not be built."""
    b200 = Machine("NVIDIA B200", (10, 0), (13, 0), (2, 20, 2), None, (13, 8), (1, 29), fused_switch=False)
    monkeypatch.setattr("bmoe.precision.machine.probe", lambda _: b200)
    found = profile(recipe_of(), build, device=CPU, precision="mxfp8")
    (sentence,) = found["unmet_conditions"]
    assert "NVTE_CUTEDSL_FUSED_GROUPED_MLP=1" in sentence and sentence in " ".join(console_text(report(found)).split())
    assert found["step_s"] is None and found["emulated"]["gemms"] and set(found["predicted"]) == {"b200", "gb200"}


def test_a_dense_model_names_no_experts_and_fewer_batches_are_said(recipe_of, build):
    """A step of three batches is timed as one of two."""
    recipe = recipe_of(model={"moe": None}, training={"tokens_per_step": 768})
    found = profile(recipe, build, device=CPU, steps=2)
    assert found["experts"] is None and found["measured"]["batches"] == 2 and found["measured"]["of_batches"] == 3
    assert "but for the batches" in found["measured"]["label"]
    shown = console_text(report(found))
    assert "experts" not in shown.split("Predicted")[0] and "attention: sdpa" in shown


def test_emulated_training_is_measured(recipe_of, build):
    recipe = recipe_of(precision={"kind": "mxfp8", "emulate": True})
    assert profile(recipe, build, device=CPU, steps=2)["step_s"] > 0


def test_implementations_are_compared(compared):
    assert set(compared["experts_compared"]) == {"loop", "grouped"}
    assert compared["ratios"][f"experts {compared['experts']}"] == 1.0


def test_only_what_computes_in_a_precision_is_compared_in_it(recipe_of):
    found = {}
    for kind in ("bf16", "fp32", "fp8_row", "fp8_current", "mxfp8"):
        found[kind] = implementations(recipe_of(precision={"kind": kind}), torch.device("cuda"), True)
    assert found.pop("bf16") == ["loop", "grouped", "triton", "te"] and found.pop("fp32") == ["loop", "grouped"]
    assert found == {"fp8_row": ["triton"], "fp8_current": ["te"], "mxfp8": ["te"]}
    assert implementations(recipe_of(precision={"kind": "mxfp8", "emulate": True}), torch.device("cuda"), True) == ["loop", "grouped"]


def test_eight_bits_of_a_model_without_experts_are_no_measurement(recipe_of, build):
    """On a machine that has the format nothing else would stop it from timing bf16 under another name."""
    found = profile(recipe_of(model={"moe": None}), build, device=CPU, precision="mxfp8")
    assert any("model.moe is null" in sentence for sentence in found["unmet_conditions"])
    assert found["step_s"] is None and found["emulated"]["gradients"] and found["predicted"] == {}
    assert "not predicted, as this model has it on no chip" in console_text(report(found)) and "not predicted" in sections(found)[0]


def test_a_model_whose_dimensions_do_not_fit_the_format_gets_no_time(recipe_of, build):
    """16 divides 80 and 48, 32 does not: FP8 with one scale a tensor would run, MXFP8 would not."""
    model = {"width": 80, "moe": {"experts": 4, "top_k": 2, "expert_width": 48}}
    found = profile(recipe_of(model=model), build, device=CPU, precision="mxfp8")
    assert found["predicted"] == {} and found["step_s"] is None and found["emulated"]["gradients"]
    keys = [key for key in ("model.width", "model.moe.expert_width") if any(key in sentence for sentence in found["unmet_conditions"])]
    assert len(keys) == 2
    eight = {"kind": "fp8_current"}
    assert set(estimate(recipe_of(model=model, precision=eight))["predicted"]) == {"h100", "h200", "b200", "gb200"}
    odd = estimate(recipe_of(model=model | {"width": 72}, precision=eight))
    assert odd["predicted"] == {} and odd["lacking"] == ["Dimensions: fp8_current needs model.width to be a multiple of 16, and it is 72."]
    assert odd["lacking"][0] in " ".join(console_text(show_estimate(odd)).split())


def test_experts_that_do_not_compute_in_the_precision_are_refused(recipe_of):
    from bmoe.jobs.profile import check_experts

    recipe = recipe_of(precision={"kind": "bf16"})
    check_experts(recipe, "fp8_row", "triton")
    check_experts(recipe, "mxfp8", "all")
    for precision, experts, words in [("mxfp8", "grouped", "--experts grouped: backend.experts"), (None, "jax", "use all or one of")]:
        with pytest.raises(RequestError, match=words):
            check_experts(recipe, precision, experts)
    with pytest.raises(RequestError, match="--precision fp8_current: backend.experts"):
        check_experts(recipe_of(precision={"kind": "bf16"}, backend={"experts": "triton"}), "fp8_current", None)


def test_wrong_requests(recipe_of, build):
    with pytest.raises(RequestError, match="model.moe is null"):
        profile(recipe_of(model={"moe": None}), build, device=CPU, experts="all")
    with pytest.raises(RequestError, match="--baseline jax: use hf for all"):
        profile(recipe_of(), build, device=CPU, baseline="jax")


def test_what_is_too_large_is_reduced_and_scaled_up(recipe_of, build, monkeypatch):
    recipe = recipe_of(data={"tokens_per_batch": 2048}, training={"tokens_per_step": 8192}, model={"layers": 8})
    monkeypatch.setattr("bmoe.profiling.run.SECONDS", 1e-3)
    small = reduced(recipe, SyntheticShards(recipe), CPU, 2, 0.03)
    assert small.data.tokens_per_batch == 1024 and small.model.layers == 1
    found = profile(recipe, build, device=CPU, steps=2)
    assert "prediction, not a measurement" in found["measured"]["label"]
    assert found["measured"]["layers"] == 1 and found["measured"]["of_layers"] == 8
    # Eight layers and twice the tokens, four batches: between 8 and 64 times the reduced step's batch.
    assert 8 < found["step_s"] / (found["measured"]["step_s"] / 2) < 64
    assert found["measured"]["experts"] == found["measured"]["of_experts"] == 4  # of which a token visits two


def test_fewer_experts_are_said_and_only_the_optimizer_and_the_router_count_them(recipe_of, build, monkeypatch):
    recipe = recipe_of(
        data={"tokens_per_batch": 4096}, training={"tokens_per_step": 4096}, model={"layers": 1, "moe": {"experts": 16, "top_k": 2}}
    )
    monkeypatch.setattr("bmoe.profiling.run.SECONDS", 1e-3)
    found = profile(recipe, build, device=CPU, steps=3)
    measured = found["measured"]
    assert (measured["experts"], measured["of_experts"]) == (4, 16) and len(measured["steps"]) == 2
    assert "prediction, not a measurement" in measured["label"]
    assert "1 of 1 layers, 4 of 16 experts, 1,024 of 4,096 slots a batch" in " ".join(console_text(report(found)).split())
    assert "4 of 16 experts" in " ".join(sections(found))
    small = with_values(with_values(recipe, "data", tokens_per_batch=1024), "training", tokens_per_step=1024)
    small = with_values(small, "model", moe=recipe.model.moe.model_copy(update={"experts": 4}))
    times = {name: {"forward_s": 1.0, "backward_s": 0.0, "seconds": 1.0} for name in ("router", "combine", "optimizer")}
    steps = Steps([3.0], 0.0, Load(1024, 1000, 1.0, 1), 1.0, 0.0)
    whole = _whole_step(small, recipe, steps, times, 33, Load(4096, 4000, 1.0, 1), ARITHMETIC)
    assert times["combine"]["seconds"] == pytest.approx(4) and times["router"]["seconds"] == pytest.approx(
        16
    )  # its scores are of every expert
    assert whole["batch_s"] == pytest.approx(20)


def test_a_part_that_memory_limits_grows_by_its_bytes(recipe_of):
    """A router of few experts reads tokens; its products, 16 times as many in the whole recipe, hide behind that."""
    recipe = recipe_of(
        data={"tokens_per_batch": 4096}, training={"tokens_per_step": 4096}, model={"layers": 1, "moe": {"experts": 16, "top_k": 2}}
    )
    small = with_values(with_values(recipe, "data", tokens_per_batch=1024), "training", tokens_per_step=1024)
    small = with_values(small, "model", moe=recipe.model.moe.model_copy(update={"experts": 4}))
    times = {name: {"forward_s": 1.0, "backward_s": 0.0, "seconds": 1.0} for name in ("router", "optimizer")}
    ceiling = {"matmul_tflops": 1e6, "copy_gb_per_s": 1.0}
    _whole_step(small, recipe, Steps([2.0], 0.0, Load(1024, 1000, 1.0, 1), 1.0, 0.0), times, 33, Load(4096, 4000, 1.0, 1), ceiling)
    assert 3.9 < times["router"]["seconds"] < 8


def test_each_part_grows_by_its_own_layers_and_attention_by_its_pairs(recipe_of):
    """Of eight layers, one of them dense, two are measured, one of them dense; and of sequences of 4,000 tokens the first quarter."""
    moe = {"experts": 4, "top_k": 2, "expert_width": 32, "dense_layers": 1}
    recipe = recipe_of(
        model={"layers": 8, "moe": moe}, data={"tokens_per_batch": 4096, "max_length": 4096}, training={"tokens_per_step": 4096}
    )
    small = with_values(with_values(recipe, "model", layers=2), "training", tokens_per_step=1024)
    small = with_values(small, "data", tokens_per_batch=1024, max_length=1024)

    def grown(pairs, whole_pairs):
        names = ("norms", "ffn", "experts gemm 1", "dispatch", "attention", "head + loss", "optimizer")
        times = {name: {"forward_s": 1.0, "backward_s": 0.0, "seconds": 1.0} for name in names}
        _whole_step(
            small,
            recipe,
            Steps([7.0], 0.0, Load(1024, 1000, pairs, 200), 1.0, 0.0),
            times,
            33,
            Load(4096, 4000, whole_pairs, 600),
            ARITHMETIC,
        )
        return {name: time["seconds"] for name, time in times.items()}

    found = grown(1000.0**2, 4000.0**2)
    assert [found[n] for n in ("norms", "ffn", "experts gemm 1", "dispatch")] == pytest.approx([4 * 4, 4, 4 * 7, 4 * 7])
    assert found["head + loss"] == pytest.approx(4)
    total = [counts.parameters(r.model, 33).total for r in (recipe, small)]
    assert found["optimizer"] == pytest.approx(total[0] / total[1], rel=0.02)
    assert grown(0.0, 0.0)["attention"] == 16 < found["attention"] < 64
    assert grown(1e12, 16e12)["attention"] == pytest.approx(64, rel=1e-3)


def test_experts_that_are_one_part_grow_as_one(recipe_of):
    """An implementation without a first and a second product leaves the time after it to `combine`."""
    recipe = recipe_of(model={"layers": 6})
    times = {name: {"forward_s": 1.0, "backward_s": 0.0, "seconds": 1.0} for name in ("experts", "combine", "optimizer")}
    load = Load(256, 250, 250 * 40.0, 37)
    _whole_step(with_values(recipe, "model", layers=2), recipe, Steps([3.0], 0.0, load, 1.0, 0.0), times, 33, load, ARITHMETIC)
    assert times["experts"]["seconds"] == times["combine"]["seconds"] == 3  # times as many layers


def many_experts(recipe_of, experts, top_k, tokens=16384, **moe):
    model = {"layers": 3, "width": 1280, "heads": 20, "moe": {"experts": experts, "top_k": top_k, "expert_width": 768, **moe}}
    return recipe_of(model=model, data={"tokens_per_batch": tokens, "max_length": 1024}, training={"tokens_per_step": 4 * tokens})


@pytest.mark.parametrize(
    "experts, top_k, tokens, moe, left",
    [
        (64, 8, 16384, {"dense_layers": 1}, 16),  # twice top_k
        (64, 2, 16384, {}, 4),  # a 16th of the tokens, a 16th of the experts
        (64, 2, 4096, {}, 16),  # a quarter of both
        (64, 2, 1024, {}, 64),  # as many tokens as ever
        (6, 2, 16384, {}, 6),  # three would be less than a choice of two
        (12, 1, 16384, {}, 3),  # an odd number has no half
        (64, 4, 16384, {"groups": 8, "groups_kept": 2}, 16),  # eight would leave two in the kept groups
    ],
)
def test_of_many_experts_some_are_measured_on_a_cpu(recipe_of, experts, top_k, tokens, moe, left):
    """Only there, only when fewer tokens and layers do not suffice, and never with more rows an expert than the recipe has."""
    recipe = many_experts(recipe_of, experts, top_k, tokens, **moe)
    small = reduced(recipe, SyntheticShards(recipe), CPU, 10, 0.001)
    assert small.data.tokens_per_batch == 1024 and small.model.layers == 1 + moe.get("dense_layers", 0)
    assert small.model.moe.experts == left
    assert small.data.tokens_per_batch / small.model.moe.experts <= tokens / experts
    Recipe.model_validate(small.model_dump())  # a recipe still


def test_the_shipped_recipes_that_a_cpu_measures_lose_no_expert():
    for name in ("esm2_moe_tiny", "esm2_moe_8m"):
        recipe = recipes.load(recipes.find(name)[0])
        assert reduced(recipe, SyntheticShards(recipe), CPU, 10, 0.1).model.moe == recipe.model.moe


def test_estimate_needs_no_hardware(recipe_of):
    recipe = recipe_of(model={"layers": 24, "width": 1280, "heads": 20, "moe": {"expert_width": 3584}}, precision={"kind": "bf16"},
                       data={"tokens_per_batch": 16384, "max_length": 1024}, training={"tokens_per_step": 2097152})  # fmt: skip
    found = estimate(recipe, world=8, chip="h100")
    assert set(found["predicted"]) == {"h100"} and found["world"] == 8
    entry = found["predicted"]["h100"]
    assert entry["fits"] and entry["advice"] == [] and entry["largest_tokens_per_batch"] >= 16384
    alone = estimate(recipe, world=1, chip="h100")["predicted"]["h100"]
    assert alone["memory"]["peak"] > entry["memory"]["peak"]
    with pytest.raises(RequestError, match="known chips"):
        estimate(recipe, chip="tpu")


def test_synthetic_proteins_have_real_lengths(recipe_of):
    recipe = recipe_of()
    shards = SyntheticShards(recipe)
    assert 240 < float(sorted(shards.lengths)[len(shards) // 2]) < 280  # UniRef90's median in a sample of 10,000: 277
    assert (shards.sequence(3) == SyntheticShards(recipe).sequence(3)).all() and shards.sequence(3).size == shards.lengths[3]
