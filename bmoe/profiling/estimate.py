"""What a recipe would take on machines that are not here: its mean batch, predicted steps, memory, and what to change."""

from pathlib import Path

from bmoe.data.loader import build_sampler
from bmoe.data.sampler import Position
from bmoe.data.shards import MANIFEST, Shards
from bmoe.precision import conditions
from bmoe.profiling import chips, fit, memory, predict, validation
from bmoe.profiling.bottleneck import bottleneck
from bmoe.profiling.fit import with_values
from bmoe.profiling.synthetic import SyntheticShards
from bmoe.profiling.work import Load, scores_share
from bmoe.recipe import Recipe

SLOWER = 1.1
"""Of a predicted step: above the model's median errors (6 and 11 %), and it does not know what replaying a step saves the host."""


def open_data(recipe: Recipe) -> tuple[object, str]:
    """The recipe's training split if it is prepared, else synthetic sequences; and which, in words."""
    folder = Path(recipe.data.path)
    if (folder / MANIFEST).is_file():
        return Shards(folder, "train"), f"training split of {folder}"
    return SyntheticShards(recipe), "synthetic: random residues with the lengths of UniRef90, as data.path has no shards"


def expected_load(recipe: Recipe, shards) -> Load:
    """The mean packed batch of the recipe, from its first batches' lengths."""
    slots, real, pairs, batches = recipe.data.tokens_per_batch, 0, 0.0, 4
    stream = build_sampler(shards, recipe, recipe.seed).batches(Position(0, 0), slots)
    for _ in range(batches):
        crops, _ = next(stream)
        real += int(crops.slots.sum())
        pairs += float((crops.slots.astype(float) ** 2).sum())
    mean = real // batches
    targets = int(mean * recipe.objective.mask_fraction) if recipe.objective.kind == "mlm" else mean
    return Load(slots, mean, pairs / batches, max(1, targets))


def predictions(recipe: Recipe, shards, device_name: str, world: int = 1, only: str | None = None) -> dict[str, dict]:
    """Chip -> predicted step and memory, for every chip (or `only`) that would run it (`lacks`).

    An emulated precision runs everywhere: its products at the speed of bf16, its rounding passes not counted, which the label says.
    `model_error` is None there and in fp32: no such time was held against the model; `model_error_label` says it in words.
    """
    load, vocabulary, found = expected_load(recipe, shards), shards.alphabet.size, {}
    known = None if recipe.precision.emulate else validation.known_error(recipe.precision.kind)
    for chip in [chips.find(only)] if only else chips.CHIPS.values():
        if lacks(recipe, chip):
            continue
        result = predict.step(_as_computed(recipe, chip), vocabulary, load, chip, world) | {"precision": recipe.precision.kind}
        if recipe.precision.emulate:
            result["label"] += "; the passes that emulate rounding are not counted"
        sizes = memory.by_category(recipe, vocabulary, load, world, chip)
        bf16 = predict.step(with_values(recipe, "precision", kind="bf16"), vocabulary, load, chip, world)["step_s"]
        found[chip.name] = result | {
            "memory": sizes,
            "fits": fit.fits(sizes["peak"], chip),
            "speedup_over_bf16": bf16 / result["step_s"],
            "this_machine": chips.of_device(device_name) is chip,
            "model_error": known,
            "model_error_label": validation.in_words(known, recipe.precision.kind),
            "bottleneck": bottleneck(_whole(result), result["batches_per_step"], scores_share(recipe.model, load)),
        }
    return found


def advised_copy_peak(recipe: Recipe, vocabulary: int, load: Load, world: int, chip: chips.Chip) -> float | None:
    """`fit.copy_peak`, but None where steps with copies, whose gradients travel whole, are predicted slower beyond the model's error."""
    peak = fit.copy_peak(recipe, vocabulary, load, world, chip)
    if peak is None:
        return None
    copies = with_values(recipe, "parallel", data_replicate=world, data_shard=1, expert=1)
    shared, copied = (predict.step(_as_computed(layout, chip), vocabulary, load, chip, world)["step_s"] for layout in (recipe, copies))
    return peak if copied <= SLOWER * shared else None


def _as_computed(recipe: Recipe, chip: chips.Chip) -> Recipe:
    """The recipe in the precision of its arithmetic: an emulated one multiplies in bf16, by its own experts."""
    if not recipe.precision.emulate:
        return recipe
    return with_values(memory.on_a_gpu(recipe, chip), "precision", kind="bf16", emulate=False)


def lacks(recipe: Recipe, chip: chips.Chip) -> list[str]:
    """Why a chip has no prediction for the recipe's precision, and what to do, one sentence each: the model or the hardware does
    not have it. [] if it would run there."""
    kind = recipe.precision.kind
    needs = conditions.NEEDS.get(kind)
    if recipe.precision.emulate or not needs:
        return []
    found = conditions.model_unmet(kind, recipe.model)
    if not needs.lowest <= chip.capability < needs.below:
        able = [other.name for other in chips.CHIPS.values() if needs.lowest <= other.capability < needs.below]
        here = f"{chip.name} has no {kind} (compute capability {conditions.dotted(chip.capability)}; it needs {needs.chip})"
        found.append(f"{here}: use {' or '.join(able)}, or another precision.kind")
    return found


def _whole(step: dict) -> dict[str, dict]:
    """The parts of a predicted step with its optimizer and the communication that nothing hides."""
    others = {"optimizer": step["optimizer_s"], "communication": step["exposed_s"]}
    return step["parts"] | {name: {"seconds": value} for name, value in others.items() if value > 0}


def estimate(recipe: Recipe, world: int = 1, chip: str | None = None) -> dict:
    """What `train --dry-run` says of memory and speed: per rank, from shapes, for `chip` or every known one.

    `auto` in the recipe's backend is taken as it becomes on those GPUs, whatever machine this runs on.
    """
    shards, source = open_data(recipe)
    load, vocabulary = expected_load(recipe, shards), shards.alphabet.size
    predicted = predictions(recipe, shards, "", world, chip)
    shown = chip or next(iter(predicted), next(iter(chips.CHIPS)))
    sizes = memory.by_category(recipe, vocabulary, load, world, chips.find(shown))
    for name, entry in predicted.items():
        entry["largest_tokens_per_batch"] = fit.largest_batch(recipe, vocabulary, load, world, chips.find(name))
        entry["with_another_step"] = fit.with_another_step(recipe, vocabulary, load, world, chips.find(name))
        entry["copy_peak_gib"] = advised_copy_peak(recipe, vocabulary, load, world, chips.find(name))
        entry["advice"] = fit.advice(recipe, vocabulary, load, world, chips.find(name))
    asked = [chips.find(chip)] if chip else list(chips.CHIPS.values())
    return {
        "world": world, "memory": sizes, "memory_on": shown, "predicted": predicted, "data": source,
        "label": "predicted from shapes, not measured",
        "lacking": list(dict.fromkeys(sentence for one in asked for sentence in lacks(recipe, one))),
    }  # fmt: skip
