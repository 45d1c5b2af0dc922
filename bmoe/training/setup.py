"""From a recipe to a model and optimizer on this machine: `auto` values resolved, weights filled, dtypes set.

On a GPU, and wherever precision is below fp32, matrices are bf16 and the optimizer keeps their fp32 masters; norms, biases
and the router stay fp32.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bmoe.data.alphabet import Alphabet
from bmoe.errors import RequestError
from bmoe.model.experts.auto import choose
from bmoe.model.transformer import Transformer, Vocabulary, initial_value
from bmoe.parallel import shard
from bmoe.parallel.dispatch import ExpertParallel, why_torch_exchanges
from bmoe.parallel.world import World
from bmoe.recipe import Recipe
from bmoe.training.optimizer import AdamW, is_matrix


def resolve(recipe: Recipe, world: World) -> tuple[Recipe, dict[str, str]]:
    """Replace every `auto` by what runs here. Returns the recipe and section.key -> reason. Raises RequestError."""
    reasons: dict[str, str] = {}
    cuda = world.device.type == "cuda"
    low = recipe.precision.kind != "fp32"
    parallel, backend = recipe.parallel, recipe.backend
    if low and recipe.precision.kind != "bf16" and not recipe.precision.emulate and not cuda:
        raise RequestError(
            f"precision.kind: {recipe.precision.kind} needs an NVIDIA GPU, and this run is on the CPU; "
            "set precision.kind=bf16, or precision.emulate=true to study convergence"
        )
    shard: int | str = parallel.data_shard
    if shard == "auto":
        shard, left = divmod(world.size, parallel.data_replicate * parallel.expert)
        if left or shard == 0:
            raise RequestError(
                f"parallel: data_replicate x expert = {parallel.data_replicate} x {parallel.expert} does not divide the "
                f"{world.size} ranks of this run"
            )
        reasons["parallel.data_shard"] = f"auto: {world.size} ranks / (data_replicate x expert)"
    needed = parallel.data_replicate * shard * parallel.expert
    if needed != world.size:
        raise RequestError(
            f"parallel: data_replicate x data_shard x expert = {needed}, and this run has {world.size} ranks; set data_shard: auto"
        )
    check_step(recipe, world.size)
    experts, compiled = backend.experts, backend.compile
    if experts == "auto":
        experts, reason = "loop", "the model has no experts"
        if recipe.model.moe:
            model, moe, precision = recipe.model, recipe.model.moe, recipe.precision
            experts, reason = choose(
                world.device, precision.kind, model.width, moe.expert_width, moe.experts, model.ffn, model.bias, precision.emulate
            )
        reasons["backend.experts"] = f"auto: {reason}"
    attention, reason = choose_attention(recipe, world.device)
    if reason:
        reasons["backend.attention"] = f"auto: {reason}"
    if compiled == "auto":
        compiled = cuda
        reasons["backend.compile"] = "auto: pays on GPUs" if cuda else "auto: compiling costs more than it saves on CPUs"
    if parallel.expert > 1:
        reasons["parallel.expert"] = why_torch_exchanges(world.device, low)
    graphs, hindrance = backend.graphs, why_no_graphs(recipe, world, experts, attention, shard)
    if graphs == "auto":
        graphs = hindrance is None
        reasons["backend.graphs"] = f"auto: {hindrance or 'nothing in a step waits for the device'}"
    elif graphs and hindrance:
        raise RequestError(f"backend.graphs: true cannot be had, because {hindrance}; set it to auto or false")
    values = {
        "parallel": parallel.model_copy(update={"data_shard": shard}),
        "backend": backend.model_copy(update={"experts": experts, "attention": attention, "compile": compiled, "graphs": graphs}),
    }
    return recipe.model_copy(update=values), reasons


def check_step(recipe: Recipe, ranks: int) -> None:
    """Raise RequestError if `ranks` cannot share a step's batches; it names the least step not below the recipe's that they can."""
    step, slots = recipe.training.tokens_per_step, recipe.data.tokens_per_batch * ranks
    if step % slots:
        raise RequestError(
            f"training.tokens_per_step: {step} is not a multiple of data.tokens_per_batch x ranks = {recipe.data.tokens_per_batch} x "
            f"{ranks}; change one of the three, e.g. --set training.tokens_per_step={-(-step // slots) * slots}"
        )


def choose_attention(recipe: Recipe, device: torch.device) -> tuple[str, str | None]:
    """(`backend.attention` as it will run, why `auto` means that). Raises RequestError where it cannot run."""
    asked, model = recipe.backend.attention, recipe.model
    packed = device.type == "cuda" and recipe.precision.kind != "fp32"
    if asked == "sdpa":
        return asked, None
    if not packed:
        if asked == "auto":
            return "sdpa", "flash needs a GPU and bf16"
        raise RequestError(f"backend.attention: {asked} needs a GPU and bf16; use sdpa or auto")
    if asked == "varlen":
        return asked, None
    from bmoe.kernels.flash import why_not  # imported here: it needs triton

    hindrance = "it knows no model.qk_norm" if model.qk_norm else why_not(device, torch.bfloat16, model.width // model.heads)
    if asked == "flash" and hindrance:
        raise RequestError(f"backend.attention: flash cannot run, because {hindrance}; use varlen or auto")
    if asked == "auto" and hindrance is None and torch.cuda.get_device_capability(device)[0] != 9:
        hindrance = "it was tested on Hopper only (backend.attention: flash takes it all the same)"
    if hindrance:
        return "varlen", f"torch's flash attention of packed sequences, not flash-attn-4: {hindrance}"
    return "flash", "the kernels of flash-attn-4 for packed sequences"


def why_no_graphs(recipe: Recipe, world: World, experts: str, attention: str, shards: int) -> str | None:
    """Why steps cannot be replayed as CUDA graphs, or None; `experts`, `attention` and `shards` (data_shard) as resolved."""
    if world.device.type != "cuda":
        return "CUDA graphs need a GPU"
    if recipe.parallel.expert > 1:
        return "ranks that share experts exchange numbers of rows through the host"
    if shards > 1:
        return f"FSDP2 gathers weights anew in every step; parallel.data_replicate: {world.size} keeps a copy on each GPU, if it has room"
    if recipe.model.moe and experts not in ("triton", "grouped"):
        return f"experts by {experts} read the loads of the experts on the host"
    if recipe.model.moe and (recipe.model.width % 8 or recipe.model.moe.expert_width % 8):
        return "experts whose widths are no multiples of 8 read their loads on the host"
    if recipe.precision.kind == "fp32":
        return "grouped products in fp32 read the loads of the experts on the host"
    if attention == "sdpa":
        return "attention by sdpa reads the lengths of the sequences on the host"
    if recipe.precision.statistics_every:
        return "precision.statistics_every looks at tensors in the middle of a step"
    return None


def vocabulary(letters: Alphabet) -> Vocabulary:
    """What the model knows of an alphabet."""
    return Vocabulary(letters.size, letters.pad_id, letters.mask_id)


def stays_wide(name: str, parameter: Tensor) -> bool:
    """Whether a parameter stays fp32 in a bf16 model: norm weights, biases and the router."""
    return not is_matrix(name, parameter) or ".router." in name


def lives_whole(name: str, parameter: Tensor) -> bool:
    """Whether a parameter stays whole on every rank: vectors and the router. The experts' biases go where their experts go."""
    return parameter.ndim < 2 or ".router." in name


def build_model(recipe: Recipe, letters: Alphabet, device: torch.device) -> Transformer:
    """A resolved recipe's model on `device`, fp32, filled from the seed; on the meta device `distribute` fills it."""
    with device:
        model = Transformer(recipe.model, vocabulary(letters), recipe.backend, recipe.precision)
    if device.type != "meta":
        model.initialize(recipe.seed)
    return model


def distribute(model: Transformer, recipe: Recipe, world: World) -> None:
    """Spread a fp32 model over the ranks of `world` (with a mesh), in place; nothing for one process. Collective.

    A model that was built on the meta device is filled from the seed on the way, a block at a time: no rank needs memory
    for all of it. The values are those of one process.
    """
    if world.size == 1:
        return
    empty = any(p.is_meta for p in model.parameters())
    shard.apply(model, world, recipe, lives_whole, lambda name, shape: initial_value(name, shape, recipe.model, recipe.seed))
    if empty:
        model.rotary.initialize()
        for index in model.moe_layers:
            model.blocks[index].ffn.router.selection_bias.zero_()


def to_compute_dtype(model: nn.Module) -> dict[str, Tensor]:
    """Make matrices bf16 in place, but those in units of FSDP2, which rounds them itself; see `stays_wide`. Returns what they
    were, by name."""
    before = {name: p.data for name, p in model.named_parameters() if not stays_wide(name, p) and not isinstance(p, DTensor)}
    for name, value in before.items():
        model.get_parameter(name).data = value.to(torch.bfloat16)
    return before


def compile_blocks(model: Transformer, recipe: Recipe, **options) -> None:
    """Compile the blocks of a model in place; `options` are torch.compile's.

    A dispatch of expert parallelism divides its block's program, because the host reads how many rows come. What lies between
    is compiled by itself: the shared expert, and experts that are more than one operator, for any number of rows.
    """
    for block in model.blocks:
        block.compile(**options)
        if isinstance(block.ffn, ExpertParallel):
            inner = [block.ffn.shared] if block.ffn.shared is not None else []
            inner += [block.ffn.experts] if recipe.backend.experts == "grouped" else []
            for module in inner:
                module.compile(**options)


def build_optimizer(model: nn.Module, recipe: Recipe, world: World) -> AdamW:
    """The optimizer of a fp32 model; rounds the model's matrices to bf16 if the precision says so."""
    masters = None if recipe.precision.kind == "fp32" else to_compute_dtype(model)
    per_rank = recipe.training.tokens_per_step // (recipe.data.tokens_per_batch * world.size)
    parts, several = shard.parts(model), world.size > 1
    accumulate = per_rank > 1 or (several and not parts)
    sum_whole = world.sum_all if several else None
    return AdamW(model.named_parameters(), recipe.optimizer, accumulate, masters, parts, world.sum_shards, sum_whole)
