"""The other side of a ratio: whole training steps of Hugging Face's Mixtral with the recipe's dimensions.

Same layers, width, heads, experts, top-k and vocabulary, same sequences, same number of real tokens a step, AdamW (fused
on CUDA, bf16 weights there) with clipping. It is a decoder: causal attention reads half of what an encoder's does.

Implementations of the experts: `loop` (transformers' `eager`), `grouped` (`grouped_mm`), `grouped-compiled` (the same with
each layer compiled; CUDA only). Forms of the batch: `padded` (a rectangle as wide as data.max_length), `bucketed`
(rectangles of eight sequences of like length), `flattened` (one row, positions restart). The strongest is the honest one
to be compared with; all are given.
"""

import time
from statistics import median

import numpy as np
import torch
from torch import Tensor

from bmoe.data.loader import build_sampler
from bmoe.data.packing import pack
from bmoe.data.sampler import Position
from bmoe.errors import RequestError
from bmoe.recipe import Recipe

BUCKET = 8
NO_TARGET = -100
Inputs = dict[str, Tensor]


def mixtral(recipe: Recipe, vocabulary: int, implementation: str, device: torch.device):
    """A Mixtral of the recipe's dimensions with random weights. Raises RequestError without transformers or experts."""
    try:
        from transformers import MixtralConfig, MixtralForCausalLM
    except ModuleNotFoundError:
        raise RequestError("--baseline hf needs the package transformers; install bmoe[hf]") from None
    model, moe = recipe.model, recipe.model.moe
    if moe is None:
        raise RequestError("--baseline hf compares Mixture-of-Experts models, and model.moe is null in this recipe")
    config = MixtralConfig(
        vocab_size=vocabulary, hidden_size=model.width, intermediate_size=moe.expert_width, num_hidden_layers=model.layers,
        num_attention_heads=model.heads, num_key_value_heads=model.kv_heads or model.heads, num_local_experts=moe.experts,
        num_experts_per_tok=moe.top_k, max_position_embeddings=recipe.data.max_length, sliding_window=None,
        attn_implementation="sdpa", use_cache=False, output_router_logits=False, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    config._experts_implementation = "eager" if implementation == "loop" else "grouped_mm"
    torch.manual_seed(0)
    built = MixtralForCausalLM(config).to(device).train()
    if device.type == "cuda":
        built = built.bfloat16()
    if implementation == "grouped-compiled":
        for layer in built.model.layers:
            layer.compile()
    return built


def sequences(recipe: Recipe, shards, steps: int) -> list[list[np.ndarray]]:
    """The token ids of the crops of each step's batches, as the recipe's own training sees them."""
    stream = build_sampler(shards, recipe, recipe.seed).batches(Position(0, 0), recipe.data.tokens_per_batch)
    found = []
    for _ in range(steps):
        crops, _ = next(stream)
        packed = pack(shards, crops, recipe.data.tokens_per_batch, recipe.seed)
        ends = np.cumsum(crops.slots)
        found.append([packed.tokens_T[end - size : end] for end, size in zip(ends, crops.slots, strict=True)])
    return found


def _rectangle(rows: list[np.ndarray], width: int) -> Inputs:
    ids = np.zeros((len(rows), width), np.int64)
    mask = np.zeros((len(rows), width), np.int64)
    for i, row in enumerate(rows):
        ids[i, : row.size], mask[i, : row.size] = row, 1
    labels = np.where(mask == 1, ids, NO_TARGET)
    return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask), "labels": torch.from_numpy(labels)}


def form_batches(rows: list[np.ndarray], form: str, max_length: int) -> list[Inputs]:
    """The forward passes of one batch's sequences in a form: padded, bucketed or flattened."""
    if form == "padded":
        return [_rectangle(rows, max_length)]
    if form == "bucketed":
        ordered = sorted(rows, key=len)
        groups = [ordered[i : i + BUCKET] for i in range(0, len(ordered), BUCKET)]
        return [_rectangle(group, max(map(len, group))) for group in groups]
    ids = torch.from_numpy(np.concatenate(rows))[None]
    positions = torch.from_numpy(np.concatenate([np.arange(row.size) for row in rows]))[None]
    return [{"input_ids": ids, "position_ids": positions, "labels": ids}]


def _time(model, optimizer, batches: list[list[Inputs]], device: torch.device, warmup: int) -> list[float]:
    """Seconds of each step after `warmup`; every entry of `batches` is one step."""
    seconds = []
    for number, inputs in enumerate(batches):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for part in inputs:
            model(**{k: v.to(device) for k, v in part.items()}).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= warmup:
            seconds.append(time.perf_counter() - began)
    return seconds


def against(recipe: Recipe, tokens_per_s: float, shards, device: torch.device, steps: int) -> dict:
    """{baseline: {variant: {step_s, tokens_per_s}}, ratios: {variant: ours / theirs}} in real tokens per second.

    `tokens_per_s`: ours, of the same recipe with one batch a step.
    """
    implementations = ["loop", "grouped"] + (["grouped-compiled"] if device.type == "cuda" else [])
    warmup = 3 if device.type == "cuda" else 1
    rows = sequences(recipe, shards, warmup + steps)
    real = sum(sum(map(len, step)) for step in rows[warmup:]) / steps
    baseline, ratios = {}, {}
    for implementation in implementations:
        model = mixtral(recipe, shards.alphabet.size, implementation, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
        for form in ("padded", "bucketed", "flattened"):
            name = f"hf-{implementation} {form}"
            batches = [form_batches(step, form, recipe.data.max_length) for step in rows]
            try:
                taken = median(_time(model, optimizer, batches, device, warmup))
            except torch.cuda.OutOfMemoryError:
                baseline[name] = {"step_s": None, "tokens_per_s": None, "label": "out of memory"}
                optimizer.zero_grad(set_to_none=True)
                continue
            baseline[name] = {"step_s": taken, "tokens_per_s": real / taken}
            ratios[name] = tokens_per_s / (real / taken)
        del model, optimizer
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {"baseline": baseline, "ratios": ratios}
