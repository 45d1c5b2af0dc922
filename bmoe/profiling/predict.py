"""Step time from a roofline: each part takes the longer of its arithmetic and its traffic, plus its launches.

time(part) = max(FLOP / (peak x efficiency), bytes / (bandwidth x efficiency)) + kernels x launch

Assumptions, all named in the result: the efficiencies below are fractions of the published peaks, taken from the kernels of
whole steps on one H200 in bf16; on Hopper the fused experts' products gather and activate inside, elsewhere passes of
their own do; low precision speeds up the experts' products alone (all of them in Transformer Engine, two thirds under fp8_row,
whose weight gradients are bf16) and adds the passes that round rows and weights; nothing
overlaps but communication, of which `overlap` hides behind arithmetic. No Blackwell GPU was at hand: numbers for B200 and
GB200 are this model at their published peaks, not measurements.
"""

from dataclasses import asdict, dataclass

from bmoe.parallel.traffic import Sizes, gathered_bytes, gathered_parameters, traffic
from bmoe.profiling.chips import Chip
from bmoe.profiling.memory import HOPPER, in_no_unit, on_a_gpu
from bmoe.profiling.work import FLASH_BACKWARD, Load, Part, Work, batch_parts, layout, model_flops, parameters, scores
from bmoe.recipe import Recipe

LOW = ("fp8_row", "fp8_current", "fp8_block", "fp8_delayed", "mxfp8", "nvfp4")


@dataclass(frozen=True)
class Efficiency:
    """Achieved fractions of published peaks, and the seconds that a kernel costs at least.

    Measured inside replayed steps on an H200 (bf16, sequences of 1,024 tokens; three decoders: A, 12 layers of D 1024 with 8
    experts of F 2816; B, 8 layers of D 1280 with 64 of F 768; C, 4 layers of D 2048 with 8 of F 5632): dense products 0.74 (A)
    and 0.73 (B); fused experts' products 0.64 (A), 0.58 (B) and 0.66 to 0.70 (C), of which the middle one; flash-attn-4 0.27 and
    0.27, torch's varlen attention 0.18 forward and backward, both with heads of 64; AdamW with the norm 0.81 and 0.84 of the
    bandwidth; 0.07 and 0.05 of a step between its kernels. A copy alone reaches 0.89. Attention of narrower heads takes as long
    as that of 64, since its exponentials do (not measured). `row_gemm`: two of fp8_row's products ran at 1,398 TFLOP/s where
    those of bf16 ran at 738 (kernels of a replayed layer of D 2048, F 5632, 8 experts): 1.89 times the rate of `grouped`. No
    speed-up of a layer or a step went into it: `validation.gains` holds it against five.
    """

    gemm: float = 0.73
    grouped: float = 0.64
    attention_flash: float = 0.27
    attention_varlen: float = 0.18
    memory: float = 0.75
    optimizer: float = 0.82
    idle: float = 0.06
    row_gemm: float = 0.61  # our own FP8 products
    low_gemm: float = 0.45  # Transformer Engine's experts in 8 (and 4) bits: their gain over bf16 is far from that of the peaks
    kernel_s: float = 3e-6
    te_layer_s: float = 6.9e-3  # Transformer Engine's 8-bit experts on Hopper, launched by the host expert by expert (cuBLASLt
    te_expert_s: float = 0.6e-3  # below 13.5): a layer takes at least the first, and the second for each expert besides
    link: float = 0.8
    overlap: float = 0.7


EFFICIENCY = Efficiency()
GUESSED = ("low_gemm", "link", "overlap")  # never measured: no run of ours had several GPUs, or Transformer Engine's FP8 at its best
ROUNDING = 6.0  # bytes an element: read for the maximum, read again, written along rows and down columns
ROW_ROUNDING = 3.0  # the same for rows under fp8_row: read and written once


def _seconds(work: Work, rate: float, chip: Chip, e: Efficiency) -> float:
    return max(work.flops / rate, work.bytes / (chip.bandwidth * e.memory)) + work.kernels * e.kernel_s


def _fused(name: str, part: Part, rows: float) -> Part:
    """A part of the experts as the fused kernels run it: rows are gathered, activated and weighted inside the products, so
    of dispatch remain the sort (12 bytes a row) and, backward, the sum of each token's rows."""
    if name == "dispatch":
        return part._replace(forward=Work(0, 12 * rows, 4))
    return part._replace(forward=Work(), backward=Work()) if name == "experts activation" else part


def _attention(recipe: Recipe, work: Work, core: float, chip: Chip, e: Efficiency) -> float:
    """Projections at GEMM efficiency, softmax(q k) v at its own."""
    projections = work._replace(flops=work.flops - core)
    share = e.attention_flash if recipe.backend.attention == "flash" else e.attention_varlen
    narrow = min(1.0, recipe.model.width / recipe.model.heads / 64)
    return _seconds(projections, chip.bf16 * e.gemm, chip, e) + core / (chip.bf16 * share * narrow)


def part_seconds(recipe: Recipe, vocabulary: int, load: Load, chip: Chip, e: Efficiency = EFFICIENCY) -> dict[str, dict[str, float]]:
    """Part -> {forward_s, backward_s, seconds} of one batch on one GPU of `chip`, without communication."""
    recipe = on_a_gpu(recipe, chip)
    model, kind = recipe.model, recipe.precision.kind
    fp32 = kind == "fp32"
    rows = load.real * model.moe.top_k * (model.layers - model.moe.dense_layers) if model.moe else 0.0
    found = {}
    core = scores(model, load) * model.layers
    peak = chip.bf16 / 16 if fp32 else chip.bf16  # fp32 without tensor cores: 67 TFLOP/s on Hopper, 1/15 of bf16
    for name, part in batch_parts(model, vocabulary, load, 4 if fp32 else 2).items():
        part = _fused(name, part, rows) if recipe.backend.experts == "triton" and chip.capability[0] == HOPPER else part
        times = []
        for work, backward in ((part.forward, False), (part.backward, True)):
            if part.matrix == "attention" and not fp32:
                times.append(_attention(recipe, work, core * (FLASH_BACKWARD if backward else 1.0), chip, e))
            elif part.matrix == "grouped" and kind in LOW:
                times.append(_low_gemm(recipe, load, name, work, backward, chip, e))
            else:
                rate = peak * (e.grouped if part.matrix == "grouped" else e.gemm)
                times.append(_seconds(work, rate, chip, e))
        times = [seconds / (1 - e.idle) for seconds in times]
        found[name] = {"forward_s": times[0], "backward_s": times[1], "seconds": sum(times)}
    if kind in LOW and recipe.backend.experts == "te" and chip.capability[0] == HOPPER:
        _wait_for_host(found, recipe, e)
    recomputed = {"none": (), "experts": ("dispatch", "experts gemm 1", "experts activation", "experts gemm 2")}
    again = recomputed.get(recipe.backend.recompute, tuple(n for n in found if n not in ("embedding", "router", "head + loss")))
    for name in again:
        if name in found:
            found[name]["backward_s"] += found[name]["forward_s"]
            found[name]["seconds"] += found[name]["forward_s"]
    return found


def _wait_for_host(found: dict[str, dict[str, float]], recipe: Recipe, e: Efficiency) -> None:
    """Stretch the experts' parts to what the host takes to launch them, where that is longer; in place."""
    moe = recipe.model.moe
    least = (recipe.model.layers - moe.dense_layers) * (e.te_layer_s + e.te_expert_s * moe.experts)
    mine = [part for name, part in found.items() if name.startswith("experts ") or name in ("dispatch", "combine")]
    longer = max(1.0, least / sum(part["seconds"] for part in mine))
    for part in mine:
        part.update({key: seconds * longer for key, seconds in part.items()})


def _low_gemm(recipe: Recipe, load: Load, name: str, work: Work, backward: bool, chip: Chip, e: Efficiency) -> float:
    """Seconds of one of the experts' products, forward or backward, in 8 or 4 bits, with the passes that round its inputs."""
    if recipe.precision.kind == "fp8_row":
        return _row_gemm(recipe, load, name, work, backward, chip, e)
    model, moe = recipe.model, recipe.model.moe
    rows, first = load.real * moe.top_k, name == "experts gemm 1"
    outside = first != backward  # x and the gradient of y, of width D; inside are a and the gradient of h
    rounded = rows * (model.width if outside else moe.expert_width * (2 if first else 1))
    if not backward:
        rounded += moe.experts * model.width * moe.expert_width * (2 if first else 1)
    layers = model.layers - moe.dense_layers
    passes = Work(0.0, ROUNDING * rounded * layers, 2.0 * layers)
    rate, share = (chip.fp4, 4) if recipe.precision.kind == "nvfp4" else (chip.fp8, 2)
    return _seconds(work._replace(bytes=work.bytes / share), rate * e.low_gemm, chip, e) + _seconds(passes, chip.bf16, chip, e)


def _row_gemm(recipe: Recipe, load: Load, name: str, work: Work, backward: bool, chip: Chip, e: Efficiency) -> float:
    """The same under fp8_row, from the tensors that its kernels read and write (model/experts/fp8.py).

    Forward products and data gradients are in 8 bits; what they write does not hide behind their arithmetic. Weight gradients,
    half of the backward pass, are those of bf16. Weights count as rounded in every batch, which is so in a step's first. Tokens
    are rounded before they are routed, where there are fewer of them. The activation's backward is a pass of its own, which in
    bf16 is part of a product: da and h read, dh written in bf16 and in 8 bits, the weighted activation written.
    """
    model, moe = recipe.model, recipe.model.moe
    T, D, F, N = load.tokens, model.width, moe.expert_width, load.real * moe.top_k
    weight = moe.experts * D * F
    written, passes = {
        ("experts gemm 1", False): (6 * N * F, ROW_ROUNDING * T * D + ROUNDING * 2 * weight),  # h and a
        ("experts gemm 2", False): (2 * N * D, ROW_ROUNDING * N * F + ROUNDING * weight),
        ("experts gemm 2", True): (2 * N * F, ROW_ROUNDING * T * D + 14 * N * F),
        ("experts gemm 1", True): (2 * N * D, 0),
    }[name, backward]
    layers = model.layers - moe.dense_layers
    half = work.times(0.5) if backward else work
    seconds = _seconds(half._replace(bytes=0.0), chip.fp8 * e.row_gemm, chip, e)
    seconds += _seconds(Work(0.0, float(written + passes) * layers, 2.0 * layers), chip.bf16, chip, e)
    return seconds + (_seconds(half, chip.bf16 * e.grouped, chip, e) if backward else 0.0)


def accumulates(recipe: Recipe, world: int) -> bool:
    """Whether gradients are summed in fp32, over the batches of a step or over copies of the model (`training.setup`)."""
    split = layout(recipe.parallel, world)
    return batches_per_rank(recipe, world) > 1 or (world > 1 and split.shard * split.expert == 1)


def optimizer_work(recipe: Recipe, vocabulary: int, world: int = 1) -> Work:
    """One optimizer step of one of `world` GPUs: the norm reads the gradients, the update reads them again and the state.

    With fp32 moments a bf16 weight with its split master moves 2 (norm) + 26 bytes (kernels/adamw.py), an fp32 weight 4 + 28.
    Gradients that accumulate are fp32 sums, which the update clears: 36 bytes for either. 8 bytes less with bf16 moments.
    """
    p, split = parameters(recipe.model, vocabulary), layout(recipe.parallel, world)
    here = sum(p) / (split.shard * split.expert)
    narrow = 0.0 if recipe.precision.kind == "fp32" else in_no_unit(p, split)
    gradient = 12 * here if accumulates(recipe, world) else 4 * narrow + 8 * (here - narrow)
    moments = 8 if recipe.optimizer.state_dtype == "fp32" else 4
    return Work(0, gradient + (8 + 2 * moments) * here, 4 * recipe.model.layers)


def accumulation_work(recipe: Recipe, vocabulary: int) -> Work:
    """Adding one batch's bf16 gradients to their fp32 sums: read 2 + 4, write 4 bytes a parameter."""
    p = parameters(recipe.model, vocabulary)
    return Work(0, (p.dense + p.experts) * 10.0, 8 * recipe.model.layers)


def communication(recipe: Recipe, vocabulary: int, load: Load, world: int, chip: Chip, e: Efficiency = EFFICIENCY) -> dict:
    """Bytes and seconds that one rank communicates in a step, before overlap: `parallel.traffic` over the links of `chip`.

    Groups of at most `chip.domain` ranks use NVLink (half of its two-way bandwidth), larger ones and replicas the network.
    """
    p, moe = parameters(recipe.model, vocabulary), recipe.model.moe
    replicate, shard, expert = layout(recipe.parallel, world)
    layers = recipe.model.layers - moe.dense_layers if moe else 0
    sizes = Sizes(p.dense, p.experts, p.wide, layers, recipe.model.width, load.real * (moe.top_k if moe else 0))
    low = recipe.precision.kind != "fp32"
    gathered = gathered_parameters(p.dense, p.experts, replicate, shard, expert)
    stays = gathered_bytes(gathered, low) <= chip.memory_gib * 2**30 / 4  # as shard.fits_gathered
    sent = traffic(sizes, replicate, shard, expert, batches_per_rank(recipe, world), low, stays)

    def link(ranks: int) -> float:
        return e.link * (chip.nvlink / 2 if ranks <= chip.domain else chip.network)

    across = link(world)
    return {
        "parameter_bytes": sent.weights + sent.gradients + sent.replicas + sent.whole,
        "all_to_all_bytes": sent.rows,
        "parameter_s": (sent.weights + sent.gradients) / link(shard * expert) + (sent.replicas + sent.whole) / across,
        "all_to_all_s": sent.rows / link(expert),
        "stays_gathered": stays,
    }


def batches_per_rank(recipe: Recipe, world: int) -> int:
    """Batches of one rank in a step."""
    return max(1, recipe.training.tokens_per_step // (recipe.data.tokens_per_batch * world))


def step(recipe: Recipe, vocabulary: int, load: Load, chip: Chip, world: int = 1, e: Efficiency = EFFICIENCY) -> dict:
    """Predicted step of `world` GPUs of `chip`: seconds, tokens per second, MFU, parts, and the assumptions."""
    parts = part_seconds(recipe, vocabulary, load, chip, e)
    compute_s = sum(part["seconds"] for part in parts.values())
    batches = batches_per_rank(recipe, world)
    split = layout(recipe.parallel, world)
    ranks = split.shard * split.expert
    update = optimizer_work(recipe, vocabulary, world)
    optimizer_s = (update.bytes / (chip.bandwidth * e.optimizer) + update.kernels * e.kernel_s) / (1 - e.idle)
    accumulate_s = 0.0
    if accumulates(recipe, world) and recipe.precision.kind != "fp32":
        accumulate_s = _seconds(accumulation_work(recipe, vocabulary).times(1 / ranks), chip.bf16, chip, e)
    comm = communication(recipe, vocabulary, load, world, chip, e) if world > 1 else None
    exposed = 0.0
    if comm:  # weights that travel once a step hide behind one batch only
        beside = compute_s if comm["stays_gathered"] else batches * compute_s
        hidden = min(e.overlap * comm["parameter_s"], beside) if ranks > 1 else 0.0  # copies sum gradients behind the last batch
        exposed = comm["all_to_all_s"] + comm["parameter_s"] - hidden
    step_s = batches * (compute_s + accumulate_s) + exposed + optimizer_s
    batch_s = (step_s - optimizer_s) / batches
    flops = model_flops(recipe.model, vocabulary, load)
    return {
        "chip": chip.name,
        "world": world,
        "precision": recipe.precision.kind,
        "step_s": step_s,
        "batch_s": batch_s,
        "optimizer_s": optimizer_s,
        "exposed_s": exposed,
        "batches_per_step": batches,
        "tokens_per_s": world * batches * load.real / step_s,
        "mfu": batches * flops / step_s / chip.bf16,
        "parts": parts,
        "communication": comm,
        "assumptions": {
            **asdict(e),
            "guessed": list(GUESSED),
            "peaks": chip.source,
            "tokens": load.tokens,
            "real_tokens": load.real,
            "bf16_peak": chip.bf16,
        },
        "label": "predicted by a roofline model, not measured",
    }
