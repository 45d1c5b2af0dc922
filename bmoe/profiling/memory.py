"""Memory of one rank in closed form, by category, before anything runs.

Static: weights, gradients, optimizer. With bf16 weights: 2 bytes each, 2 for the second half of the fp32 master, 2 x 4 for
the moments; gradients are bf16, summed in fp32 if a step has several batches (the bf16 ones then live for one tensor only).
In fp32: 4 + 4 + 8. On several ranks weights are fp32 shards (no second half) and gradients are summed in fp32 shards, but whole
copies, and experts that a rank shares with no other (`parallel.shard`), are as on one GPU; copies sum gradients in fp32 always.
What is gathered for a pass, or for a whole step where that takes at most a quarter of the GPU, is workspace.
Vectors and the router are fp32 always. Activations: what forward keeps for backward, per block. Workspace: what only lives
while one part runs (its gradients, gathered parameters, the loss in fp32, rounded copies), and what cuBLAS keeps for its products.
Eight-bit experts keep their weights' transposed 8-bit copies from forward to backward, a byte a parameter; fp8_row keeps both
copies all the time where a step has several batches (`training.step.Stepper`).

The peak is static plus the larger of two moments: the end of forward (all activations), or the end of backward (all bf16
gradients, one block's activations).

Legend: T token slots, D width, F expert width, C = 2F or F, E experts, K top-k, N = T x K, M rows of the head, V vocabulary.
"""

from bmoe.model.layers import default_ffn_width
from bmoe.parallel.traffic import gathered_bytes, gathered_parameters
from bmoe.profiling.chips import Chip
from bmoe.profiling.work import Layout, Load, Parameters, layout, parameters
from bmoe.recipe import Recipe

GIB = 2**30


def kept_per_block(recipe: Recipe, load: Load, dense: bool, held: bool = False) -> tuple[float, float]:
    """Bytes that one block keeps for the backward pass, and the most that recomputation brings back at one time: the feed-forward's
    or the attention's, one after the other. held: the weights' 8-bit copies are kept already.

    Streams are [T, D]: x, its norm, attention's output; x after attention, its norm h. Compiled blocks recompute casts,
    cleaned copies and activations from their inputs.
    """
    model, b = recipe.model, 4 if recipe.precision.kind == "fp32" else 2
    T, D, moe, backend = load.tokens, model.width, model.moe, recipe.backend
    compiled = backend.compile is True
    qkv = T * (D + 2 * (model.kv_heads or model.heads) * (D // model.heads)) * b
    stream = T * D * b
    attention = 3 * stream + qkv + T * model.heads * 4
    if backend.attention in ("sdpa", "flash"):
        attention += (qkv + stream) / 2  # rotated queries and keys beside the projection, whose values are a view of it
    else:
        attention += stream + (qkv if model.qk_norm else 0)  # the output before its tail is cleaned; inputs of the heads' norms
    widened = model.norm == "layernorm" and b == 2 and not compiled  # it keeps its input in fp32 instead
    normed = T * D * 4 if widened else stream
    attention += normed - stream
    if dense:
        hidden = model.ffn_width or default_ffn_width(model.ffn, D)
        inside, routing, h = _dense_rows(model.ffn, T, hidden, b, compiled), 0.0, stream
    else:
        C = 2 * moe.expert_width if model.ffn == "swiglu" else moe.expert_width
        N, experts = load.real * moe.top_k, backend.experts
        inside = _expert_rows(recipe.precision.kind, experts, N, D, C, moe.expert_width, b, compiled)
        inside += moe.experts * D * (C + moe.expert_width) if low_bits(recipe) and not held else 0
        shared = moe.shared_experts * moe.expert_width
        inside += _dense_rows(model.ffn, T, shared, b, compiled) if shared else 0
        fused = experts == "triton" and moe.groups is None  # the router that reads bf16
        copied = b == 2 and not fused and not compiled
        routing = 3 * T * moe.experts * 4 + 4 * T * moe.top_k * 8 + (T * D * 4 if copied else 0)
        shares_h = experts == "triton" or shared or backend.recompute != "none"
        h = stream if shares_h or not copied else 0
    full = attention + normed + h + routing + inside
    again = {"none": 0.0, "experts": 0.0 if dense else inside, "full": full - 2 * stream - routing}
    back = {"none": 0.0, "experts": again["experts"], "full": max(inside, again["full"] - inside)}
    hanging = 0.0
    if not dense and backend.experts == "te" and backend.recompute != "none":
        hanging = 2 * N * D * b  # rows in and out hang on a node of the graph, where recomputation does not see them
    return full - again[backend.recompute] + hanging, back[backend.recompute]


def _dense_rows(ffn: str, T: int, hidden: int, b: int, compiled: bool) -> float:
    """Bytes that a dense feed-forward keeps: the up projection, the activation's output; eager SwiGLU also its gate's."""
    C = 2 * hidden if ffn == "swiglu" else hidden
    return T * (C + hidden * (1 if compiled or ffn != "swiglu" else 2)) * b


def _expert_rows(kind: str, experts: str, N: float, D: int, C: int, F: int, b: int, compiled: bool) -> float:
    """Bytes that one layer's routed rows keep: triton h alone; te its rows in and out, h, and the inputs of its products, in
    8 or 4 bits where they are rounded; compiled grouped x, h and a; eager x, a, and in fp32 what the activation multiplies (h, and
    C more)."""
    if experts == "triton":
        return N * C * b
    if experts == "te":
        rounded = {"fp32": 0.0, "bf16": 0.0, "nvfp4": 0.57}.get(kind, 1.03)  # bytes an element, scales included
        return N * (2 * D + C) * b + N * ((D + F) * rounded or F * b)
    if experts == "grouped" and compiled:
        return N * (D + C + F) * b
    return N * (D + F) * b + N * (2 * C) * 4


def low_bits(recipe: Recipe) -> bool:
    """Whether the experts' products take inputs of 8 or 4 bits, and do not only emulate them; weights cost a byte then (of 4 bits
    there are two copies)."""
    return recipe.precision.kind not in ("fp32", "bf16") and not recipe.precision.emulate


CUBLAS = 2 * 32 * 2**20
"""Bytes that cuBLAS keeps on Hopper and Blackwell: 32 MiB for each of two threads, the one of forward and the one of backward."""

TE_CUBLAS = 4 * 32 * 2**20
"""The same for Transformer Engine's grouped products, one for each of its streams (`get_cublas_workspace`, TE 2.20)."""

HOPPER = 9  # compute capability of the fused experts and of the attention that `auto` takes


def on_a_gpu(recipe: Recipe, chip: Chip | None = None) -> Recipe:
    """The recipe with `auto` of its backend as it is resolved on `chip` (None: a Hopper GPU), if that has its precision."""
    backend, model, precision = recipe.backend, recipe.model, recipe.precision
    update = {}
    if backend.compile == "auto":
        update["compile"] = True
    if backend.attention == "auto":
        hopper = chip is None or chip.capability[0] == HOPPER
        flash = hopper and not model.qk_norm and model.width // model.heads in (64, 128)  # `training.setup`, flash-attn-4 installed
        update["attention"] = "sdpa" if precision.kind == "fp32" else ("flash" if flash else "varlen")
    if backend.experts == "auto":
        plain = model.ffn == "swiglu" and not model.bias and not precision.emulate
        own = {"bf16": "triton", "fp8_row": "triton", "fp32": "grouped"}
        update["experts"] = own.get(precision.kind, "te") if plain else "grouped"
    return recipe.model_copy(update={"backend": backend.model_copy(update=update)})


def in_no_unit(p: Parameters, split: Layout) -> float:
    """How many of a rank's matrix parameters FSDP2 shards nothing of: bf16 weights with split masters, but in an fp32 recipe."""
    ranks = split.shard * split.expert
    if ranks == 1:
        return p.dense + p.experts
    return 0.0 if split.replicate * split.shard > 1 else p.experts / ranks


def by_category(recipe: Recipe, vocabulary: int, load: Load, world: int = 1, chip: Chip | None = None) -> dict[str, float]:
    """GiB of one rank: weights, gradients, optimizer, activations, workspace, peak. `chip` decides whether units stay gathered.

    `auto` in `recipe.backend` counts as what it becomes on `chip`.
    """
    recipe = on_a_gpu(recipe, chip)
    model = recipe.model
    p = parameters(model, vocabulary)
    replicate, shard, expert = layout(recipe.parallel, world)
    ranks = shard * expert
    low, wide, several = (p.dense + p.experts) / ranks, p.wide, world > 1
    fp32 = recipe.precision.kind == "fp32"
    b = 4 if fp32 else 2
    moments = 8 if recipe.optimizer.state_dtype == "fp32" else 4
    batches = recipe.training.tokens_per_step // (recipe.data.tokens_per_batch * world)
    copies = ranks == 1  # on every rank all, and as on one GPU
    sums = 4 * low if not copies or ((batches > 1 or several) and not fp32) else 0.0
    alone = in_no_unit(p, Layout(replicate, shard, expert))
    held = batches > 1 and recipe.backend.experts == "triton" and low_bits(recipe) and alone > 0
    weights = 4 * (low - alone) + b * alone + 4 * wide + (2 * p.experts / ranks if held else 0.0)
    optimizer = moments * (low + wide) + (0 if fp32 else 2 * alone)

    dense_layers = model.layers if model.moe is None else model.moe.dense_layers
    kinds = {layer < dense_layers for layer in range(model.layers)}
    block = {dense: kept_per_block(recipe, load, dense, held) for dense in kinds}
    stream = load.tokens * model.width * b
    kept = sum(block[layer < dense_layers][0] for layer in range(model.layers)) + stream
    head = load.targets * (vocabulary * (2 * b + 12) + (4 if model.kind == "encoder" else 1) * model.width * b)
    rows = load.real * model.moe.top_k if model.moe else load.tokens
    hidden = model.moe.expert_width if model.moe else (model.ffn_width or default_ffn_width(model.ffn, model.width))
    gates = 2 if model.ffn == "swiglu" else 1
    largest = p.experts / max(1, model.layers - dense_layers) if model.moe else p.dense / model.layers
    own = model.moe and recipe.backend.experts == "triton"
    if own:  # the gradient of h beside the weighted activation, or beside the weights' gradients and that of the rows
        passing = rows * gates * hidden * b + max(rows * hidden * b, largest / expert * b + rows * model.width * b)
    else:
        more = 0 if model.moe is None and recipe.backend.compile is True else 2  # a compiled dense layer passes the gradient of h only
        passing = rows * ((gates + more) * hidden + 2 * model.width) * b + (largest / expert * b if sums else 0.0)
    one_block = max(back for _, back in block.values()) + passing
    gathered = 2 * gathered_parameters(p.dense / model.layers, largest, replicate, shard, expert) * b if several else 0.0
    unit = gathered_parameters(p.dense, p.experts, replicate, shard, expert)
    if several and chip and gathered_bytes(unit, not fp32) <= chip.memory_gib * GIB / 4:
        gathered = unit * (b + (4 if batches > 1 else 0))
    gradients_alive = largest / expert * b if sums else b * low + 4 * wide
    end_of_forward = kept + head
    # Gradients appear while activations go, both about linearly, so the larger end decides.
    end_of_backward = kept / model.layers + gradients_alive
    workspace = one_block + gathered + CUBLAS
    if model.moe and recipe.backend.experts == "te":  # its gradients are stacked into one tensor
        workspace += TE_CUBLAS + largest / expert * b
    elif model.moe and low_bits(recipe) and not held:
        workspace += largest / expert  # the copies that are not kept
    static = weights + optimizer + sums
    gradients = sums + (4 * wide if sums else gradients_alive)
    peak = static + max(end_of_forward, end_of_backward) + workspace
    sizes = {"weights": weights, "gradients": gradients, "optimizer": optimizer, "activations": end_of_forward}
    sizes |= {"workspace": workspace, "peak": peak}
    return {name: size / GIB for name, size in sizes.items()}
