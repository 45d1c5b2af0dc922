"""What is shown names its unit, its label and the next step, on wide and narrow terminals."""

import io

import pytest
import torch
from rich.console import Console

from bmoe import recipe as recipes
from bmoe.profiling import compare, estimate, profile, render
from bmoe.profiling.estimate import SLOWER, expected_load
from bmoe.profiling.fit import with_values
from bmoe.profiling.synthetic import SyntheticShards


def text(renderable, width=160) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(renderable)
    return " ".join(out.getvalue().split())  # a narrow terminal breaks lines anywhere


@pytest.mark.parametrize("width", [80, 160])
def test_a_measured_profile(compared, width):
    shown = text(render.report(compared), width)
    for needed in ("experts gemm 1", "tokens/s", "First bottleneck", "MFU", "measured whole", "Implementations", "grouped"):
        assert needed in shown
    assert compared["bottleneck"]["key"] in shown
    same = text(render.comparison(compare(compared, compared)), width)
    assert "no change beyond noise" in same and "+0.0%" in same and "have no noise bounds" in same
    once = {**compared, "measured": {**compared["measured"], "steps": [1.0]}}
    assert "noise not known" in text(render.comparison(compare(once, compared)), width)


def test_a_missing_precision(recipe_of, build, tmp_path):
    trace = tmp_path / "trace.json"
    shown = text(render.report(profile(recipe_of(), build, device=torch.device("cpu"), precision="mxfp8", trace=str(trace))))
    assert not trace.exists() and "Left out, as no step of it runs here: --trace." in shown
    for needed in ("does not run on this machine", "Chip: mxfp8", "emulated bit for bit", "predicted by a roofline", "b200",
                   "input gradient", "no Blackwell was at hand"):  # fmt: skip
        assert needed in shown


def test_an_estimate_that_does_not_fit_says_what_to_change(recipe_of):
    recipe = recipe_of(model={"layers": 24, "width": 1280, "heads": 20, "moe": {"expert_width": 3584}}, precision={"kind": "bf16"},
                       data={"tokens_per_batch": 131072, "max_length": 1024}, training={"tokens_per_step": 2097152})  # fmt: skip
    shown = text(render.estimate(estimate(recipe, world=8, chip="h100")))
    assert "does not fit h100" in shown and "data.tokens_per_batch" in shown and "backend.recompute" in shown


def test_memory_is_that_of_the_chips_predicted_below(recipe_of):
    """Where a GPU has the room, weights stay gathered, so the same recipe takes more of it: no chip's row may show another's peak."""
    recipe = recipe_of(model={"layers": 24, "width": 1280, "heads": 20, "moe": {"expert_width": 3584}}, precision={"kind": "bf16"},
                       data={"tokens_per_batch": 32768, "max_length": 1024}, training={"tokens_per_step": 2097152})  # fmt: skip
    found = estimate(recipe, world=8)
    assert found["memory"] == found["predicted"][found["memory_on"]]["memory"]
    table = text(render.estimate(found)).split("Predicted")[0]
    for name, chip in found["predicted"].items():
        assert name in table and render.number(chip["memory"]["peak"]) in table


def test_copies_are_advised_where_they_are_not_predicted_slower():
    """A copy of the flagship fits an H200; among 64 its gradients take longer to sum than all else, among 8 they hide."""
    flagship = recipes.load(recipes.find("esm2_moe")[0])
    for world, advised in ((8, True), (64, False)):
        found = estimate(flagship, world, "h200")
        shown = text(render.estimate(found))
        assert ("a copy of the model on each h200" in shown) is advised
        copies = estimate(with_values(flagship, "parallel", data_replicate=world), world, "h200")["predicted"]["h200"]
        assert copies["fits"] and (copies["step_s"] <= SLOWER * found["predicted"]["h200"]["step_s"]) is advised
        assert f"first bottleneck on h200: {found['predicted']['h200']['bottleneck']['part']}" in shown


@pytest.mark.parametrize("world, expert", [(1, 1), (4, 1), (4, 4)])
def test_bytes_between_ranks_are_said(recipe_of, world, expert):
    """By hand: 2 layers, 2 batches, each token to 2 experts, of which 3/4 are elsewhere; 64 bf16 values and a weight in fp32 there
    and back, forward and backward."""
    recipe = recipe_of(parallel={"expert": expert}, precision={"kind": "bf16"}, training={"tokens_per_step": 512 * world})
    shown = text(render.estimate(estimate(recipe, world, "h200")))
    assert ("each h200 sends" in shown) is (world > 1) and ("all-to-all" in shown) is (expert > 1)
    if expert > 1:
        rows = 2 * expected_load(recipe, SyntheticShards(recipe)).real
        assert f"and {2 * 2 * rows * 0.75 * (4 * 64 * 2 + 2 * 4) / 1e9:,.3g} GB of experts' rows" in shown


def test_what_was_never_measured_has_no_error(recipe_of):
    for section, known in (({"kind": "fp32"}, False), ({"kind": "mxfp8", "emulate": True}, False), ({"kind": "bf16"}, True)):
        shown = text(render.estimate(estimate(recipe_of(precision=section), chip="h200")))
        assert ("error: not known" in shown) is not known and ("on one h200 " in shown) is known


def test_a_chip_without_the_precision_is_said(recipe_of):
    recipe = recipe_of(precision={"kind": "mxfp8"})
    alone = estimate(recipe, chip="h100")
    assert alone["predicted"] == {} and len(alone["lacking"]) == 1
    shown = text(render.estimate(alone))
    assert "h100 has no mxfp8" in shown and "use b200 or gb200" in shown and "Memory of one of 1 GPUs" in shown
    both = text(render.estimate(estimate(recipe)))
    assert "fits b200" in both and "h200 has no mxfp8" in both
    assert estimate(recipe_of(precision={"kind": "bf16"}))["lacking"] == []


def test_an_emulated_precision_runs_on_every_chip_at_the_speed_of_bf16(recipe_of):
    emulated = estimate(recipe_of(precision={"kind": "mxfp8", "emulate": True}))
    plain = estimate(recipe_of(precision={"kind": "bf16"}, backend={"experts": "grouped"}))
    assert emulated["lacking"] == [] and set(emulated["predicted"]) == {"h100", "h200", "b200", "gb200"}
    for name, chip in emulated["predicted"].items():
        assert chip["precision"] == "mxfp8" and chip["step_s"] == plain["predicted"][name]["step_s"]
        assert "emulate rounding are not counted" in chip["label"]


@pytest.mark.parametrize("value, shown", [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4e-5, "40 us"), (None, "-"), (5000.0, "5,000 s")])
def test_times_are_read_in_their_unit(value, shown):
    assert render.seconds(value) == shown


def test_a_comparison_without_the_strongest_baseline_says_so():
    row = {"step_s": 1.0, "step_s_low": 0.9, "step_s_high": 1.1, "residues_per_s": 10.0, "fill": 1.0, "peak_memory_gib": None, "label": ""}
    names = ["bmoe-grouped packed natural", "hf-grouped padded natural"]
    on_cpu = {"baseline": dict.fromkeys(names, row), "ratios": {}}
    on_gpu = {"baseline": dict.fromkeys([*names, "hf-grouped-compiled padded natural"], row), "ratios": {}}
    assert "was not measured here" in text(render.baseline_table(on_cpu))
    assert "was not measured here" not in text(render.baseline_table(on_gpu))


def test_the_spread_of_one_pass_is_not_one():
    row = {"step_s": 0.1, "fill": 1.0, "residues_per_s": 1e4, "peak_memory_gib": 1.0}
    for low, high, said in ((0.1, 0.1, "one pass"), (0.09, 0.12, "90 ms to 120 ms")):
        shown = text(
            render.baseline_table({"baseline": {"hf-loop padded natural": row | {"step_s_low": low, "step_s_high": high}}, "ratios": {}})
        )
        assert said in shown
