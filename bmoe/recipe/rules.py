"""The rules that tie keys of a recipe together. Hardware is no business of theirs."""

from collections.abc import Iterator

from bmoe.recipe.schema import DataSection, MoESection, Recipe

EMULATED = ("fp8_row", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
"""Formats that precision.emulate knows."""

RULE_BLOCK = 32  # MXFP8 scales blocks of 32 along the contraction, so every GEMM dimension must be a multiple.


def broken_rules(r: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (section.key, sentence) for every cross-field rule that `r` breaks."""
    m, moe, d, p = r.model, r.model.moe, r.data, r.parallel
    if m.width % m.heads:
        yield "model.width", f"{m.width} is not a multiple of model.heads = {m.heads}"
    elif (m.width // m.heads) % 2:
        yield "model.heads", f"head dimension {m.width // m.heads} is odd, and rotary embeddings turn pairs; choose another number"
    if m.kv_heads and m.heads % m.kv_heads:
        yield "model.kv_heads", f"{m.kv_heads} does not divide model.heads = {m.heads}"
    if (r.objective.kind == "mlm") != (m.kind == "encoder"):
        fit = "an encoder" if r.objective.kind == "mlm" else "a decoder"
        yield "objective.kind", f"{r.objective.kind} needs {fit}, and model.kind is {m.kind}"
    if r.objective.mask_token + r.objective.random_token > 1.0 + 1e-9:
        yield "objective.random_token", "mask_token + random_token exceed 1"
    if m.init_noise and not (m.init_from and moe):
        yield "model.init_noise", "needs model.init_from and model.moe: it makes the experts of an upcycled model differ"
    if moe:
        yield from _moe_rules(r, moe)
    elif p.expert > 1:
        yield "parallel.expert", f"{p.expert} ranks cannot share the experts of a dense model (model.moe is null); set it to 1"
    if moe is None and r.backend.recompute == "experts":
        yield "backend.recompute", "`experts` needs a model with experts (model.moe is null); use none or full"
    if d.max_length < 3:
        yield "data.max_length", "needs at least 3 slots: <cls>, one residue, <eos>"
    if d.max_length > d.tokens_per_batch:
        yield "data.max_length", f"{d.max_length} exceeds data.tokens_per_batch = {d.tokens_per_batch}, so a crop would fit no batch"
    known = p.data_replicate * p.expert * (1 if p.data_shard == "auto" else p.data_shard)
    step, slots = r.training.tokens_per_step, d.tokens_per_batch * known
    if step % slots:
        yield (
            "training.tokens_per_step",
            f"{step} is not a multiple of data.tokens_per_batch x the ranks of `parallel` = {d.tokens_per_batch} x {known}; change one of "
            f"the three, e.g. --set training.tokens_per_step={-(-step // slots) * slots}",
        )
    yield from _dna_rules(d)
    if d.prepare.valid_fraction + d.prepare.test_fraction >= 1.0:
        yield "data.prepare.valid_fraction", "valid_fraction + test_fraction leave nothing to train on"
    if d.prepare.max_length and d.prepare.max_length < d.prepare.min_length:
        yield "data.prepare.max_length", f"{d.prepare.max_length} is below data.prepare.min_length = {d.prepare.min_length}"
    kept = r.precision.high_precision_layers
    if kept.first + kept.last > m.layers:
        yield "precision.high_precision_layers", f"first + last = {kept.first + kept.last} exceed model.layers = {m.layers}"
    yield from _precision_rules(r)


def _moe_rules(r: Recipe, moe: MoESection) -> Iterator[tuple[str, str]]:
    if moe.top_k > moe.experts:
        yield "model.moe.top_k", f"{moe.top_k} exceeds model.moe.experts = {moe.experts}"
    if moe.top_k == 1 and moe.normalize_weights:
        yield "model.moe.normalize_weights", "with top_k: 1 the only weight becomes 1 and the router learns nothing; set it to false"
    if moe.dense_layers >= r.model.layers:
        yield "model.moe.dense_layers", f"{moe.dense_layers} leaves no MoE layer of {r.model.layers}; a dense model has model.moe: null"
    if moe.experts % r.parallel.expert:
        yield "parallel.expert", f"{r.parallel.expert} does not divide model.moe.experts = {moe.experts}"
    if (moe.groups is None) != (moe.groups_kept is None):
        yield "model.moe.groups", "groups and groups_kept go together; set both or neither"
    elif moe.groups and moe.groups_kept:
        if moe.experts % moe.groups:
            yield "model.moe.groups", f"{moe.groups} does not divide model.moe.experts = {moe.experts}"
        elif moe.groups_kept > moe.groups:
            yield "model.moe.groups_kept", f"{moe.groups_kept} exceeds model.moe.groups = {moe.groups}"
        elif moe.top_k > moe.experts // moe.groups * moe.groups_kept:
            yield "model.moe.top_k", f"{moe.top_k} exceeds the {moe.experts // moe.groups * moe.groups_kept} experts of the kept groups"
    if r.backend.experts in ("te", "triton") and (r.model.ffn != "swiglu" or r.model.bias):
        yield "backend.experts", f"{r.backend.experts} has SwiGLU experts without bias only; use grouped, or ffn: swiglu and bias: false"


def _dna_rules(d: DataSection) -> Iterator[tuple[str, str]]:
    if d.alphabet == "protein":
        if d.reverse_complement:
            yield "data.reverse_complement", "proteins have no other strand; set it to false"
        if d.soft_mask != "ignore":
            yield "data.soft_mask", "lower case marks repeats in DNA only; use ignore"
        return
    if d.sampling == "cluster":
        yield "data.sampling", "clusters are for proteins; DNA is read by windows, all of them once an epoch: use sequence"
    if d.window_overlap >= d.window:
        yield "data.window_overlap", f"{d.window_overlap} leaves no progress in a window of {d.window}"
    if d.window > d.max_length - 2:
        yield "data.window", f"{d.window} tokens and the two specials exceed data.max_length = {d.max_length}"
    if d.reverse_complement and d.alphabet != "dna":
        yield "data.reverse_complement", "needs the alphabet dna: BPE tokens have no complement"


def _precision_rules(r: Recipe) -> Iterator[tuple[str, str]]:
    p, moe = r.precision, r.model.moe
    low = p.kind not in ("fp32", "bf16")
    if p.emulate and p.kind not in EMULATED:
        yield "precision.emulate", f"{p.kind} has no emulation; use {', '.join(EMULATED[:-1])} or {EMULATED[-1]}, or set it to false"
    if p.emulate_linears and not p.emulate:
        yield "precision.emulate_linears", "it is part of the emulation; set precision.emulate: true or leave this false"
    if p.emulate and moe is None and not p.emulate_linears:
        yield "precision.emulate", "model.moe is null, so there are no experts to round; set precision.emulate_linears: true"
    if p.statistics_every and moe is None:
        yield "precision.statistics_every", "statistics are those of experts, and model.moe is null; leave this null"
    if p.statistics_every and not p.emulate:
        yield "precision.statistics_every", "statistics come from the emulation; set precision.emulate: true or leave this null"
    runs, by = ("triton", "our own kernels") if p.kind == "fp8_row" else ("te", "Transformer Engine")
    if low and not p.emulate and p.kind != "nvfp4" and r.backend.experts not in ("auto", runs):
        yield "backend.experts", f"{p.kind} runs in {by}; use {runs} or auto, or precision.emulate: true"
    if low and p.emulate and r.backend.experts not in ("auto", "loop", "grouped"):
        yield "backend.experts", "the emulation runs in loop and grouped; use one of them or auto"
    if p.kind == "nvfp4" and not p.emulate:
        yield "precision.kind", "nvfp4 is emulated only: it needs Blackwell, and no experts multiply in it; set precision.emulate: true"
    elif low and not p.emulate and moe is None:
        yield "precision.kind", f"{p.kind} is for expert GEMMs, and model.moe is null; use bf16"
    if p.kind == "mxfp8":
        sizes = {"model.width": r.model.width, **({"model.moe.expert_width": moe.expert_width} if moe else {})}
        for key, size in sizes.items():
            if size % RULE_BLOCK:
                yield key, f"{size} is not a multiple of {RULE_BLOCK}, the block of mxfp8"
