"""Whether a recipe fits a GPU, the largest batch that does, and what to change if none does; from the closed form."""

import math

from bmoe.profiling.chips import Chip
from bmoe.profiling.memory import by_category
from bmoe.profiling.work import Load
from bmoe.recipe import Recipe

RESERVE = 0.94  # share of a GPU's memory that tensors can use: the rest is the context, libraries and fragmentation
MOST_GPUS = 4096
QUANTUM = 128  # slots; smaller differences of a batch are none worth choosing


def fits(peak_gib: float, chip: Chip) -> bool:
    """Whether a peak fits one GPU of `chip`."""
    return peak_gib <= chip.memory_gib * RESERVE


def scaled(load: Load, tokens: int) -> Load:
    """The same mixture of sequences in another number of slots."""
    share = tokens / load.tokens
    return Load(tokens, int(load.real * share), load.pairs * share, max(1, int(load.targets * share)))


def with_values(recipe: Recipe, section: str, **values) -> Recipe:
    """The recipe with other values in one section."""
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=values)})


def _peak(recipe: Recipe, vocabulary: int, load: Load, world: int, chip: Chip) -> float:
    """GiB of one GPU with the recipe's own batch size; `load` is of any."""
    return by_category(recipe, vocabulary, scaled(load, recipe.data.tokens_per_batch), world, chip)["peak"]


def _batches(recipe: Recipe, world: int) -> list[int]:
    """Every `tokens_per_batch` of which a step has a whole number on each rank and that a sequence fits, if it is a multiple of
    `QUANTUM`, or of what the recipe's shares with that; ascending, from 1,024 or the recipe's on."""
    own, longest = recipe.data.tokens_per_batch, recipe.data.max_length
    least, quantum = max(longest, min(own, 1024)), math.gcd(own, QUANTUM)
    share, rest = divmod(recipe.training.tokens_per_step, world)
    if rest:
        return []
    return sorted(share // n for n in range(1, share // least + 1) if share % n == 0 and share // n % quantum == 0)


def largest_batch(recipe: Recipe, vocabulary: int, load: Load, world: int, chip: Chip) -> int:
    """Largest `data.tokens_per_batch` of `_batches` that fits one GPU; 0 if none does."""

    def good(tokens: int) -> bool:
        return fits(_peak(with_values(recipe, "data", tokens_per_batch=tokens), vocabulary, load, world, chip), chip)

    return max((tokens for tokens in _batches(recipe, world) if good(tokens)), default=0)


def with_another_step(recipe: Recipe, vocabulary: int, load: Load, world: int, chip: Chip) -> dict[str, int] | None:
    """The largest `tokens_per_batch` that fits one GPU if `tokens_per_step` may change, to the nearest multiple of it, which comes
    with it; None if that is not a tenth more than `largest_batch`. In steps of 1,024 slots, and at most a whole step."""
    per_step = recipe.training.tokens_per_step

    def good(tokens: int) -> bool:
        several = 2 * tokens * world  # batches, which keep their gradients in sums: a single one takes less
        changed = with_values(with_values(recipe, "data", tokens_per_batch=tokens), "training", tokens_per_step=several)
        return fits(_peak(changed, vocabulary, load, world, chip), chip)

    low, high = 0, per_step // world // 1024
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if good(1024 * middle) else (low, middle - 1)
    tokens = 1024 * low
    if tokens < recipe.data.max_length or tokens < 1.1 * largest_batch(recipe, vocabulary, load, world, chip):
        return None
    return {"tokens_per_batch": tokens, "tokens_per_step": tokens * world * max(1, round(per_step / (tokens * world)))}


def copy_peak(recipe: Recipe, vocabulary: int, load: Load, world: int, chip: Chip) -> float | None:
    """GiB of one of `world` GPUs that all have a copy of the model, if that fits with a tenth to spare and the recipe shards the
    model instead; else None. With copies a step is replayed as CUDA graphs."""
    parallel = recipe.parallel
    if world == 1 or parallel.data_replicate == world:
        return None
    peak = _peak(with_values(recipe, "parallel", data_replicate=world, data_shard=1, expert=1), vocabulary, load, world, chip)
    return peak if fits(peak / 0.9, chip) else None


def advice(recipe: Recipe, vocabulary: int, load: Load, world: int, chip: Chip) -> list[str]:
    """What to change if a recipe does not fit one GPU of `chip`: every single change that makes it fit, with the peak that
    it leaves; if there is none, the fewest GPUs that fit with all of them. [] if the recipe fits."""
    room = chip.memory_gib * RESERVE

    def peak(changed: Recipe, gpus: int = world) -> float:
        return _peak(changed, vocabulary, load, gpus, chip)

    if peak(recipe) <= room:
        return []
    found = []
    stronger = {"none": ("experts", "full"), "experts": ("full",), "full": ()}[recipe.backend.recompute]
    for recompute in stronger:
        needs = peak(with_values(recipe, "backend", recompute=recompute))
        if needs <= room:
            found.append(f"set backend.recompute: {recompute} ({needs:.0f} GiB)")
            break
    largest = largest_batch(recipe, vocabulary, load, world, chip)
    if largest:
        needs = peak(with_values(recipe, "data", tokens_per_batch=largest))
        found.append(f"set data.tokens_per_batch: {largest}, the largest that fits and divides training.tokens_per_step ({needs:.0f} GiB)")
    if other := with_another_step(recipe, vocabulary, load, world, chip):
        batch, step = other["tokens_per_batch"], other["tokens_per_step"]
        needs = peak(with_values(with_values(recipe, "data", tokens_per_batch=batch), "training", tokens_per_step=step))
        found.append(f"set data.tokens_per_batch: {batch} and training.tokens_per_step: {step} ({needs:.0f} GiB)")
    half = with_values(recipe, "optimizer", state_dtype="bf16")
    if recipe.optimizer.state_dtype == "fp32" and peak(half) <= room:
        found.append(f"set optimizer.state_dtype: bf16 ({peak(half):.0f} GiB)")
    gpus = _fewest(recipe, peak, room, world)
    if gpus:
        found.append(f"use {gpus} GPUs ({peak(recipe, gpus):.0f} GiB each)")
    return found or _everything(recipe, peak, room, world)


def _fewest(recipe: Recipe, peak, room: float, world: int) -> int:
    """The smallest doubling of `world` on which a recipe fits; 0 if there is none."""
    gpus, slots = 2 * world, recipe.data.tokens_per_batch
    while gpus <= MOST_GPUS and recipe.training.tokens_per_step % (slots * gpus) == 0:
        if peak(recipe, gpus) <= room:
            return gpus
        gpus *= 2
    return 0


def _everything(recipe: Recipe, peak, room: float, world: int) -> list[str]:
    """All changes that save memory, together, and the fewest GPUs on which they suffice."""
    smallest = min(_batches(recipe, world), default=recipe.data.tokens_per_batch)
    changed = with_values(
        with_values(with_values(recipe, "backend", recompute="full"), "data", tokens_per_batch=smallest), "optimizer", state_dtype="bf16"
    )
    settings = f"set backend.recompute: full, data.tokens_per_batch: {smallest} and optimizer.state_dtype: bf16 together"
    if peak(changed) <= room:
        return [f"{settings} ({peak(changed):.0f} GiB)"]
    gpus = _fewest(changed, peak, room, world)
    if gpus:
        return [f"{settings}, on {gpus} GPUs ({peak(changed, gpus):.0f} GiB each)"]
    return [f"no batch size, recomputation or number of GPUs makes it fit ({peak(changed):.0f} GiB at least): make the model smaller"]
