"""The longest part of a step is named, with a key that the recipe has."""

import pytest

from bmoe import recipe as recipes
from bmoe.model import counts
from bmoe.profiling.bottleneck import ADVICE, FASTER, FEWER, PROJECTIONS, bottleneck, shares
from bmoe.profiling.estimate import expected_load
from bmoe.profiling.synthetic import SyntheticShards
from bmoe.profiling.work import Load, scores_share
from bmoe.recipe import ModelSection, known_keys


def parts(**seconds):
    return {name.replace("_", " "): {"seconds": value} for name, value in seconds.items()}


def test_parts_of_a_batch_count_once_a_batch_and_the_optimizer_once_a_step():
    found = shares(parts(attention=1.0, optimizer=3.0), batches=4)
    assert found == {"attention": pytest.approx(4 / 7), "optimizer": pytest.approx(3 / 7)}
    assert bottleneck(parts(attention=1.0, optimizer=3.0), 4, 1.0)["part"] == "attention"
    assert bottleneck(parts(attention=1.0, optimizer=3.0), 2, 1.0)["part"] == "optimizer"


def test_every_advice_names_a_key_of_the_recipe():
    keys = known_keys()
    for key, why in [*ADVICE.values(), PROJECTIONS, FASTER, FEWER]:
        assert key in keys and why


def test_experts_near_their_ceiling_ask_for_other_arithmetic():
    experts = {"experts": {"seconds": 1.0, "bound": "arithmetic", "ceiling_share": 0.8}}
    assert bottleneck(experts, 1, 1.0)["key"] == "precision.kind"
    assert bottleneck(experts, 1, 1.0, cpu=True)["key"] == "model.moe.top_k"
    experts["experts"]["ceiling_share"] = 0.3
    assert bottleneck(experts, 1, 1.0)["key"] == "backend.experts"
    experts["experts"] |= {"ceiling_share": 0.8, "bound": "memory"}
    assert bottleneck(experts, 1, 1.0)["key"] == "backend.experts"


def test_a_gpu_that_waits_for_launches_comes_first():
    found = bottleneck(parts(attention=1.0), 1, 1.0, busy=0.4)
    assert found["part"] == "idle" and found["share"] == pytest.approx(0.6) and found["key"] == "data.tokens_per_batch"
    assert bottleneck(parts(attention=1.0), 1, 1.0, busy=0.9)["part"] == "attention"


@pytest.mark.parametrize(
    "name, key",
    [("esm2_moe_tiny", "model.width"), ("esm2_moe", "model.width"), ("genome_mixtral", "data.max_length")],
)
def test_attention_is_moved_by_what_most_of_its_arithmetic_grows_with(name, key):
    """Proteins are shorter than twice the width of these encoders; windows of a genome are four times as long as its decoder is wide."""
    recipe = recipes.load(recipes.find(name)[0])
    share = scores_share(recipe.model, expected_load(recipe, SyntheticShards(recipe)))
    assert bottleneck(parts(attention=1.0), 1, share)["key"] == key


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_the_share_of_scores_is_that_of_the_counted_flops(kind):
    """Of counts.forward_flops what pairs add; flash attention's backward pass is 2.5 times its forward pass, a product's twice."""
    model, load = ModelSection(kind=kind, layers=1, width=256, heads=4, moe=None), Load(4096, 4096, 4096 * 700.0, 0)
    pairs = counts.forward_flops(model, 33, 0.0, load.pairs)
    linear = 2 * 4 * 256**2 * 4096
    assert scores_share(model, load) == pytest.approx(3.5 * pairs / (3.5 * pairs + 3 * linear))
