"""Advice for a GPU that is too small: each change that it names makes the recipe fit."""

import re

import pytest

from bmoe.profiling import chips, fit
from bmoe.profiling.memory import by_category
from bmoe.profiling.work import Load

H100 = chips.find("h100")


def flagship(recipe_of, tokens=16384, **sections):
    return recipe_of(
        model={"layers": 24, "width": 1280, "heads": 20, "moe": {"expert_width": 3584, **sections.pop("moe", {})}},
        precision={"kind": "bf16"},
        data={"tokens_per_batch": tokens, "max_length": 1024}, training={"tokens_per_step": 2097152}, **sections,
    )  # fmt: skip


def load(tokens):
    return Load(tokens, int(0.99 * tokens), 450.0 * tokens, tokens // 7)


def peak(recipe, world):
    return by_category(recipe, 33, load(recipe.data.tokens_per_batch), world, H100)["peak"]


def changed(recipe, line):
    """The recipe and the number of GPUs that a line of advice asks for."""
    for section, key, value in re.findall(r"(\w+)\.(\w+): (\w+)", line):
        values = {key: int(value) if value.isdigit() else value}
        recipe = recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=values)})
    gpus = re.search(r"(\d+) GPUs", line)
    return recipe, int(gpus.group(1)) if gpus else None


@pytest.mark.parametrize("tokens, world", [(65536, 1), (131072, 1), (131072, 8), (262144, 8)])
def test_every_change_alone_makes_it_fit(recipe_of, tokens, world):
    recipe = flagship(recipe_of, tokens)
    assert not fit.fits(peak(recipe, world), H100)
    lines = fit.advice(recipe, 33, load(tokens), world, H100)
    assert lines
    for line in lines:
        other, gpus = changed(recipe, line)
        assert (other, gpus) != (recipe, None)
        assert fit.fits(peak(other, gpus or world), H100), line
        said = float(re.search(r"\((\d+) GiB", line).group(1))
        assert said == pytest.approx(peak(other, gpus or world), abs=0.6)


def test_the_largest_batch_fits_and_twice_it_does_not(recipe_of):
    recipe = flagship(recipe_of)
    largest = fit.largest_batch(recipe, 33, load(16384), 8, H100)
    for tokens, good in ((largest, True), (2 * largest, False)):
        assert fit.fits(peak(flagship(recipe_of, tokens), 8), H100) is good
    assert fit.largest_batch(flagship(recipe_of, moe={"experts": 64}), 33, load(16384), 1, H100) == 0


def test_batches_between_the_doublings_are_found(recipe_of):
    """A step of 2^k slots has none; one of 3 x 2^k or 5 x 2^k has them, and the largest that fits is one of these."""
    h200, per_step = chips.find("h200"), 15 * 2**17
    recipe = fit.with_values(flagship(recipe_of), "training", tokens_per_step=per_step)
    sizes = [n for n in range(1024, per_step // 8 + 1, 128) if per_step % (8 * n) == 0]
    good = [n for n in sizes if fit.fits(by_category(flagship(recipe_of, n), 33, load(n), 8, h200)["peak"], h200)]
    largest = fit.largest_batch(recipe, 33, load(16384), 8, h200)
    assert largest == max(good) < max(sizes) and largest & (largest - 1) != 0
    longest = fit.with_values(recipe, "data", max_length=5120, tokens_per_batch=5120)
    assert min(fit._batches(longest, 8)) == 5120, "a sequence fits every batch"
    assert fit._batches(fit.with_values(recipe, "training", tokens_per_step=per_step + 1), 8) == []


@pytest.mark.parametrize("chip, world", [("h100", 8), ("b200", 1), ("h200", 8)])
def test_another_step_takes_a_batch_that_fills_the_gpu(recipe_of, chip, world):
    chip, recipe = chips.find(chip), flagship(recipe_of, 32768)
    found = fit.with_another_step(recipe, 33, load(16384), world, chip)
    tokens, step = found["tokens_per_batch"], found["tokens_per_step"]
    assert tokens > 1.1 * fit.largest_batch(recipe, 33, load(16384), world, chip)
    assert step % (tokens * world) == 0 and abs(step / 2097152 - 1) <= tokens * world / step
    for more, good in ((0, True), (1024, False)):
        assert fit.fits(by_category(flagship(recipe_of, tokens + more), 33, load(tokens + more), world, chip)["peak"], chip) is good
    small = recipe_of(data={"tokens_per_batch": 1024}, training={"tokens_per_step": 4096})
    assert fit.with_another_step(small, 33, load(1024), 1, chip) is None, "a whole step is one batch already"


def test_weights_that_fill_a_gpu_ask_for_several(recipe_of):
    recipe = flagship(recipe_of, moe={"experts": 64})  # 21 B parameters: more than one GPU holds at any batch size
    lines = fit.advice(recipe, 33, load(16384), 1, H100)
    assert len(lines) == 1 and "GPUs" in lines[0]
    other, gpus = changed(recipe, lines[0])
    assert fit.fits(peak(other, gpus), H100) and not fit.fits(peak(other, gpus // 2), H100)


def test_what_fits_needs_no_advice(recipe_of):
    assert fit.advice(flagship(recipe_of, 4096), 33, load(4096), 8, H100) == []


def test_what_never_fits_is_said(recipe_of):
    recipe = recipe_of(model={"layers": 400, "width": 8192, "heads": 64, "moe": {"expert_width": 32768, "experts": 64}},
                       data={"tokens_per_batch": 1024}, training={"tokens_per_step": 1024}, precision={"kind": "bf16"})  # fmt: skip
    (line,) = fit.advice(recipe, 33, load(1024), 1, H100)
    assert "make the model smaller" in line


def test_copies_are_proposed_where_they_fit_with_room_to_spare(recipe_of):
    small, large = recipe_of(), flagship(recipe_of, 32768)  # 2.8 B parameters take 45 GiB a copy
    assert fit.copy_peak(small, 33, load(1024), 8, H100) < 1
    assert fit.copy_peak(large, 33, load(32768), 8, H100) is None
    h200 = chips.find("h200")
    proposed = fit.copy_peak(large, 33, load(32768), 8, h200)
    copies = fit.with_values(large, "parallel", data_replicate=8, data_shard=1)
    assert proposed == pytest.approx(by_category(copies, 33, load(32768), 8, h200)["peak"]) and 60 < proposed < 120
    assert fit.copy_peak(copies, 33, load(32768), 8, h200) is None, "it keeps copies already"
    assert fit.copy_peak(large, 33, load(32768), 1, h200) is None, "one GPU shares with nobody"
