"""Whether a recipe fits a GPU, the largest batch that does, and what to change if none does; from the closed form."""

from bmoe.profiling.chips import Chip
from bmoe.profiling.memory import by_category
from bmoe.profiling.work import Load
from bmoe.recipe import Recipe

RESERVE = 0.94  # share of a GPU's memory that tensors can use: the rest is the context, libraries and fragmentation
MOST_GPUS = 4096


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
    """The recipe's `tokens_per_batch` and it doubled and halved, as long as a sequence fits and the step divides; ascending."""
    tokens = recipe.data.tokens_per_batch
    while tokens % 2 == 0 and tokens > max(1024, recipe.data.max_length):
        tokens //= 2
    found = []
    while tokens * world <= recipe.training.tokens_per_step:
        if recipe.training.tokens_per_step % (tokens * world) == 0:
            found.append(tokens)
        tokens *= 2
    return found


def largest_batch(recipe: Recipe, vocabulary: int, load: Load, world: int, chip: Chip) -> int:
    """Largest `data.tokens_per_batch` of `_batches` that fits one GPU; 0 if none does."""

    def good(tokens: int) -> bool:
        return fits(_peak(with_values(recipe, "data", tokens_per_batch=tokens), vocabulary, load, world, chip), chip)

    return max((tokens for tokens in _batches(recipe, world) if good(tokens)), default=0)


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
        found.append(f"set data.tokens_per_batch: {largest}, the largest that fits ({needs:.0f} GiB)")
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
