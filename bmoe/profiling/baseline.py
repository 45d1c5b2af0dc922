"""The other side of a ratio: whole training steps of Hugging Face's Mixtral with the recipe's dimensions, beside ours.

Same layers, width, heads, experts, top-k and vocabulary, the same sequences, AdamW (fused and on bf16 weights on CUDA) with
clipping. It is a decoder: causal attention reads half of what an encoder's does. `race` times them in turns.

Baselines
    hf-loop              experts one after the other (transformers' `eager`)
    hf-grouped           `grouped_mm`
    hf-grouped-compiled  the same with each layer compiled: the strongest thing a user has (CUDA only)
Forms of a batch, all one forward pass a step
    flattened  one row of data.tokens_per_batch slots, where positions restart; on a GPU with torch's variable-length flash
               attention, registered as transformers' own flash attention is, elsewhere with a block-diagonal mask
    padded     rectangles as wide as data.max_length, with as many sequences as ours has a step, and the collator's mask
    bucketed   sequences of like length (sorted among those of all measured steps), as many as fill data.tokens_per_batch
Routing is `natural` (what freshly initialised routers choose) or `balanced`: rows dealt to experts in turn.

With several ranks each has batches of its own, and theirs runs under FSDP2.
"""

import inspect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from bmoe.data.loader import build_sampler
from bmoe.data.packing import SEGMENT_MULTIPLE, pack
from bmoe.data.sampler import Position
from bmoe.errors import RequestError
from bmoe.model.router import Routing
from bmoe.parallel.world import World
from bmoe.profiling.race import Counts, Seen, Step, again, allocated, timed_steps
from bmoe.recipe import Recipe

BASELINES = ("hf-loop", "hf-grouped", "hf-grouped-compiled")
FORMS = ("flattened", "padded", "bucketed")  # in this order a compiled layer is one program for the first, one for both others
ROUTINGS = ("natural", "balanced")
WIDTH_MULTIPLE = 64  # of bucketed rectangles: few shapes, aligned rows
NO_TARGET = -100
VARLEN = "bmoe_varlen"
CAUSAL = {"is_causal": True} if "is_causal" in inspect.signature(varlen_attn).parameters else {"window_size": (-1, 0)}
PASS_S = {"cuda": 60.0, "cpu": 10.0}  # a pass of one contestant takes fewer steps rather than more time


# ---------------------------------------------------------------------------------------------------------------------
# What is asked for


class Wanted(NamedTuple):
    """Which baselines, forms of their batches, and routings are measured."""

    baselines: tuple[str, ...]
    forms: tuple[str, ...]
    routings: tuple[str, ...]


def wanted(baseline: str | None, forms: str | None, routing: str | None, device: torch.device) -> Wanted | None:
    """The lists of --baseline, --forms and --routing, or None without a baseline. `hf` stands for all baselines that run on
    `device`. Raises RequestError."""
    if baseline is None:
        if forms or routing:
            raise RequestError(f"{'--forms' if forms else '--routing'} is of a comparison; add --baseline hf")
        return None
    here = BASELINES if device.type == "cuda" else BASELINES[:2]
    names = here if baseline == "hf" else _listed("--baseline", baseline, BASELINES, "hf for all, or ")
    if "hf-grouped-compiled" in names and device.type != "cuda":
        raise RequestError("--baseline hf-grouped-compiled is compiled for GPUs; on the CPU use hf-grouped, hf-loop or hf")
    listed_forms = FORMS if forms is None else _listed("--forms", forms, FORMS)
    return Wanted(names, listed_forms, ROUTINGS[:1] if routing is None else _listed("--routing", routing, ROUTINGS))


def _listed(flag: str, text: str, known: Sequence[str], also: str = "") -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in known:
            raise RequestError(f"{flag} {name or text}: use {also}one or more of {', '.join(known)}, separated by commas")
    return names


# ---------------------------------------------------------------------------------------------------------------------
# Batches


class Feed(NamedTuple):
    """One forward pass, and how many real tokens, residues and slots are in it."""

    inputs: dict[str, Tensor | int]
    tokens: int
    residues: int
    slots: int


def sequences(recipe: Recipe, shards, batches: int) -> list[list[np.ndarray]]:
    """The token ids of the crops of each batch, as the recipe's own training sees them."""
    stream = build_sampler(shards, recipe, recipe.seed).batches(Position(0, 0), recipe.data.tokens_per_batch)
    found = []
    for _ in range(batches):
        crops, _ = next(stream)
        packed = pack(shards, crops, recipe.data.tokens_per_batch, recipe.seed)
        ends = np.cumsum(crops.slots)
        found.append([packed.tokens_T[end - size : end] for end, size in zip(ends, crops.slots, strict=True)])
    return found


def feeds(recipe: Recipe, shards, form: str, steps: int, world: World) -> list[Feed]:
    """This rank's forward passes of about `steps` steps, the same number on every rank."""
    batches = sequences(recipe, shards, steps * world.size)
    slots, longest = recipe.data.tokens_per_batch, recipe.data.max_length
    rows = [row for batch in batches for row in batch]
    if form == "padded":
        count = max(1, len(rows) // len(batches))
        cut = [(group, _rectangle(group, longest)) for group in (rows[i * count : (i + 1) * count] for i in range(len(batches)))]
    elif form == "bucketed":
        cut = [(group, _rectangle(group, width)) for group, width in _buckets(rows, slots, longest)]
    else:
        cut = [(group, _flat(group, slots, longest)) for group in batches]
    if all(inputs["attention_mask"].all() for _, inputs in cut if "attention_mask" in inputs):  # else all have one: one program
        for _, inputs in cut:
            inputs.pop("attention_mask", None)
    special = [shards.alphabet.cls_id, shards.alphabet.eos_id]
    passes = []
    for group, inputs in cut[world.rank :: world.size][: len(cut) // world.size]:
        if world.device.type == "cuda":
            inputs = {k: v.pin_memory() if isinstance(v, Tensor) else v for k, v in inputs.items()}
        residues = sum(int((~np.isin(row, special)).sum()) for row in group)
        passes.append(Feed(inputs, sum(map(len, group)), residues, inputs["input_ids"].numel()))
    return passes


def _buckets(rows: list[np.ndarray], slots: int, longest: int) -> list[tuple[list[np.ndarray], int]]:
    """Sequences of like length, and the width of their rectangle: as many as fit `slots`."""
    found: list[tuple[list[np.ndarray], int]] = []
    group: list[np.ndarray] = []
    for row in sorted(rows, key=len, reverse=True):
        width = min(longest, -(-len(group[0] if group else row) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)
        if group and width * (len(group) + 1) > slots:
            found.append((group, width))
            group = []
        group.append(row)
    width = min(longest, -(-len(group[0]) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)
    return [*found, (group, width)]


def _rectangle(rows: list[np.ndarray], width: int) -> dict[str, Tensor]:
    ids = np.zeros((len(rows), width), np.int64)
    mask = np.zeros((len(rows), width), np.int64)
    for i, row in enumerate(rows):
        ids[i, : row.size], mask[i, : row.size] = row, 1
    labels = np.where(mask == 1, ids, NO_TARGET)
    return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels), "attention_mask": torch.from_numpy(mask)}


def _flat(rows: list[np.ndarray], slots: int, longest: int) -> dict[str, Tensor | int]:
    """One row; what the sequences leave of `slots` is a sequence of its own without targets, so that shapes are static."""
    tail = np.zeros(slots - sum(map(len, rows)), np.int64)
    parts = [*rows, tail] if tail.size else rows
    labels = [np.concatenate([[NO_TARGET], row[1:]]) for row in rows] + [np.full_like(tail, NO_TARGET)]
    ends = np.cumsum([part.size for part in parts])
    bounds = np.full(-(-(ends.size + 1) // SEGMENT_MULTIPLE) * SEGMENT_MULTIPLE, slots, np.int32)
    bounds[0], bounds[1 : ends.size + 1] = 0, ends
    return {
        "input_ids": torch.from_numpy(np.concatenate(parts))[None],
        "position_ids": torch.from_numpy(np.concatenate([np.arange(part.size) for part in parts]))[None],
        "labels": torch.from_numpy(np.concatenate(labels))[None],
        "cu_seq_lens_q": torch.from_numpy(bounds),
        "max_length_q": max(longest, tail.size),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Models


class Forced:
    """Balanced routing by hooks: while `on`, routed row i goes to expert i mod E, with the weight the router gave.

    A switch on the device, so that compiled layers serve both routings. Install before the first forward pass.
    """

    def __init__(self, device: torch.device):
        self.on = torch.zeros((), dtype=torch.bool, device=device)

    def switch(self, routing: str) -> None:
        """Set the routing by its name."""
        self.on.fill_(routing == "balanced")

    def install(self, model: nn.Module) -> None:
        """On our model, or on a Mixtral."""
        if hasattr(model, "blocks"):
            for index in model.moe_layers:
                model.blocks[index].ffn.router.register_forward_hook(self._ours)
        else:
            for layer in model.model.layers:
                layer.mlp.gate.register_forward_hook(self._theirs)

    def _in_turn(self, chosen_TK: Tensor, experts: int) -> Tensor:
        in_turn_TK = torch.arange(chosen_TK.numel(), device=chosen_TK.device).view_as(chosen_TK) % experts
        return torch.where(self.on, in_turn_TK.to(chosen_TK.dtype), chosen_TK)

    def _theirs(self, gate: nn.Module, _: tuple, output: tuple) -> tuple:
        return *output[:2], self._in_turn(output[2], gate.num_experts)

    def _ours(self, router: nn.Module, inputs: tuple, routing: Routing) -> Routing:
        real_T = inputs[1].real_T
        experts_TK = self._in_turn(routing.experts_TK, router.experts)
        experts_TK = torch.where(real_T[:, None], experts_TK, router.experts)
        ids_E = torch.arange(router.experts, device=experts_TK.device)
        dealt_E = (real_T.sum() * router.top_k - 1 - ids_E).div(router.experts, rounding_mode="floor") + 1
        counts_E = torch.where(self.on, dealt_E.to(routing.counts_E.dtype), routing.counts_E)
        return routing._replace(experts_TK=experts_TK, counts_E=counts_E)


def mixtral(recipe: Recipe, vocabulary: int, name: str, device: torch.device) -> nn.Module:
    """A Mixtral of the recipe's dimensions with random weights. Raises RequestError without transformers or experts."""
    try:
        from transformers import AttentionInterface, MixtralConfig, MixtralForCausalLM
    except ModuleNotFoundError:
        raise RequestError("--baseline hf needs the package transformers; install bmoe[hf]") from None
    model, moe = recipe.model, recipe.model.moe
    if moe is None:
        raise RequestError("--baseline hf compares Mixture-of-Experts models, and model.moe is null in this recipe")
    AttentionInterface.register(VARLEN, _varlen)
    config = MixtralConfig(
        vocab_size=vocabulary, hidden_size=model.width, intermediate_size=moe.expert_width, num_hidden_layers=model.layers,
        num_attention_heads=model.heads, num_key_value_heads=model.kv_heads or model.heads, num_local_experts=moe.experts,
        num_experts_per_tok=moe.top_k, max_position_embeddings=recipe.data.max_length, sliding_window=None,
        attn_implementation="sdpa", use_cache=False, output_router_logits=False, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    config._experts_implementation = "eager" if name == "hf-loop" else "grouped_mm"
    torch.manual_seed(0)
    with device:
        return MixtralForCausalLM(config).train()


def _varlen(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor, max_length_q: int, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """torch's variable-length flash attention under the interface of transformers: [1, H, T, d] -> [1, T, H, d]."""
    q_THd, k_TGd, v_TGd = (x[0].transpose(0, 1) for x in (query, key, value))
    repeats = q_THd.shape[1] // k_TGd.shape[1]
    if repeats > 1:
        k_TGd, v_TGd = k_TGd.repeat_interleave(repeats, dim=1), v_TGd.repeat_interleave(repeats, dim=1)
    out_THd = varlen_attn(q_THd, k_TGd, v_TGd, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, **CAUSAL)
    return out_THd[None], None


def spread(model: nn.Module, device: torch.device) -> None:
    """FSDP2 over all ranks, a layer a unit, gradients reduced in their own dtype. A model on the meta device comes to `device`
    with random weights, so that none exists whole. In place."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        part = parameter.data.to_local()
        part.fill_(1.0) if name.endswith("norm.weight") else part.normal_(std=0.02)
    with device:
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)


class HuggingFace:
    """One of BASELINES."""

    def __init__(self, name: str, recipe: Recipe, shards, form_names: tuple[str, ...], counts: Counts, world: World, forced: Forced | None):
        before = allocated(world.device)
        self.name, self.form_names, self.counts, self.world = name, form_names, counts, world
        self.model = mixtral(recipe, shards.alphabet.size, name, world.device if world.size == 1 else torch.device("meta"))
        if world.device.type == "cuda":
            self.model.bfloat16()
        if forced:
            forced.install(self.model)
        layers = self.model.model.layers
        if name == "hf-grouped-compiled":
            for index, layer in enumerate(layers):
                layers[index] = torch.compile(layer)  # as a module of its own: FSDP2's hooks stay outside
        if world.size > 1:
            spread(self.model, world.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=world.device.type == "cuda")
        self.feeds = {form: feeds(recipe, shards, form, counts.steps, world) for form in form_names}
        for parameter in self.model.parameters():  # the moments exist from the start, so that `resident` counts them
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.resident = allocated(world.device) - before

    def steps(self, form: str, first: bool) -> list[Step]:
        device, passes = self.world.device, self.feeds[form]
        flash = form == "flattened" and device.type == "cuda"
        self.model.config._attn_implementation = VARLEN if flash else "sdpa"
        shapes = _spaced(passes, 3)[::-1]  # all kinds, so that all are compiled
        for number in range(self.counts.warmup if first else again(device)):
            self._train(shapes[number % len(shapes)] if number < 2 * len(shapes) else passes[number % len(passes)], flash)
        if first:
            once = timed_steps(lambda _: self._train(passes[0], flash), 1, self.world)[0].seconds
            passes = self.feeds[form] = _spaced(passes, max(1, min(self.counts.steps, int(PASS_S[device.type] / once))))
        return timed_steps(lambda number: self._train(passes[number], flash), len(passes), self.world)

    def _train(self, feed: Feed, flash: bool) -> Seen:
        left_out = () if flash else ("cu_seq_lens_q", "max_length_q")
        inputs = {k: _there(v, self.world.device) for k, v in feed.inputs.items() if k not in left_out}
        self.model(**inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return Seen(feed.tokens, feed.residues, feed.slots)


def _there(value: Tensor | int, device: torch.device) -> Tensor | int:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


def _spaced(items: list, count: int) -> list:
    """`count` of them, evenly spaced, the first and the last included."""
    return [items[i] for i in np.unique(np.linspace(0, len(items) - 1, min(count, len(items))).round().astype(int))]


def others(
    recipe: Recipe, shards, asked: Wanted, counts: Counts, loop: Counts, world: World, forced: Forced | None
) -> list[HuggingFace]:  # fmt: skip
    """The baselines asked for, of a recipe's dimensions; `loop`: the counts of the slowest."""
    return [
        HuggingFace(name, recipe, shards, asked.forms, loop if name == "hf-loop" else counts, world, forced) for name in asked.baselines
    ]
