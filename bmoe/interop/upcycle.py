"""Initial weights from a folder, and upcycling: a dense model becomes a Mixture-of-Experts that computes the same.

Legend: D width, F dense feed-forward width, E experts, K top-k, g = F / expert_width pieces of the feed-forward.

- Copies (sparse upcycling, Komatsuzaki et al. 2023): with expert_width = F every expert is the dense feed-forward. Weights
  that sum to 1 over the chosen experts give back its output, whatever the router chooses.
- Granularity split (He et al. 2024, "Upcycling large language models into Mixture of Experts"): with expert_width = F / g
  the hidden units are dealt to g pieces, expert e holds piece e mod g. The g experts of a group start with one router row,
  so that the top K (a multiple of g) always are whole groups; a group's weight w is spread over its g pieces as w / g
  each, which a factor g on the pieces' `down` makes up for.

Chosen weights sum to 1 if they are normalised, or if the scores are a softmax and every expert is chosen. A shared expert
starts with down = 0. The first `dense_layers` layers stay as they are. Router rows: the seed's initial values, which `balance`
may change.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from bmoe.errors import RequestError
from bmoe.interop.huggingface import load_pretrained
from bmoe.model.layers import default_ffn_width
from bmoe.model.transformer import initial_value
from bmoe.recipe import ModelSection


def initial_weights(
    directory: str | Path,
    model: ModelSection,
    vocabulary: int,
    seed: int,
    balance: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda weights: {},
) -> dict[str, Tensor]:
    """Canonical weights for `model` from a folder: as they are, or upcycled if the folder is dense and `model` is not.

    `balance` gets upcycled weights and gives those of the routers anew. Raises RequestError that names every key in which the
    folder's model differs.
    """
    weights, keys = load_pretrained(directory)
    source = ModelSection(**keys)
    if weights["embedding"].shape[0] != vocabulary:
        raise RequestError(
            f"model.init_from: {directory} has {weights['embedding'].shape[0]} tokens and the alphabet {vocabulary}; the alphabets differ"
        )
    upcycling = source.moe is None and model.moe is not None
    differing = _differences(source, model, upcycling)
    if differing:
        raise RequestError(f"model.init_from: {directory} differs from the recipe in {', '.join(differing)}")
    if model.init_noise and not upcycling:
        raise RequestError(
            f"model.init_noise: {directory} has experts already, and noise is for those made from a dense model; leave it out"
        )
    if not upcycling:
        return weights
    weights = upcycle(weights, model, seed, model.init_noise)
    return weights | balance(weights)


def upcycle(weights: dict[str, Tensor], model: ModelSection, seed: int, noise: float = 0.0) -> dict[str, Tensor]:
    """Weights of the MoE `model` from those of its dense twin.

    `noise`: standard deviation of what is added to each expert's matrices, as a share of their own; 0 computes exactly
    the dense function. Raises RequestError where no router could preserve the function.
    """
    moe, dense_width = model.moe, weights["blocks.0.ffn.down.weight"].shape[1]
    pieces = dense_width // moe.expert_width
    if pieces * moe.expert_width != dense_width:
        raise RequestError(f"model.moe.expert_width: {moe.expert_width} does not divide the dense feed-forward's width {dense_width}")
    if moe.experts % pieces or moe.top_k % pieces:
        raise RequestError(
            f"model.moe: the dense feed-forward splits into {pieces} experts of width {moe.expert_width}; experts = {moe.experts} and "
            f"top_k = {moe.top_k} must be multiples of {pieces}"
        )
    if not moe.normalize_weights and not (moe.score == "softmax" and moe.top_k == moe.experts):
        raise RequestError("model.moe.normalize_weights: upcycling keeps the dense function only with normalised weights; set it to true")
    if pieces > 1 and moe.groups is not None:
        raise RequestError("model.moe.groups: group-limited routing may tear a split feed-forward apart; set it to null")

    out = {name: tensor for name, tensor in weights.items() if ".ffn." not in name}
    generator = torch.Generator().manual_seed(seed)
    for n in range(model.layers):
        prefix = f"blocks.{n}.ffn."
        dense = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
        if n < moe.dense_layers:
            out |= {prefix + name: tensor for name, tensor in dense.items()}
            continue
        for name, tensor in _experts(dense, model, pieces).items():
            if noise and tensor.ndim == 3:
                tensor = tensor + noise * tensor.std() * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
            out[f"{prefix}experts.{name}"] = tensor
        out |= _router(prefix, model, pieces, seed)
        if moe.shared_experts:
            out |= _shared(prefix, model, seed, dense["down.weight"].dtype)
    return out


def _experts(dense: dict[str, Tensor], model: ModelSection, pieces: int) -> dict[str, Tensor]:
    """gate_up [E, 2F/g or F/g, D], down [E, D, F/g] and their biases."""
    copies = model.moe.experts // pieces
    branches = 2 if model.ffn == "swiglu" else 1  # gate and up are dealt alike

    def deal(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (branches, pieces, -1)).transpose(0, 1).flatten(1, 2)

    def repeat(parts: Tensor) -> Tensor:
        return parts.repeat(copies, *[1] * (parts.ndim - 1))

    down = dense["down.weight"].unflatten(1, (pieces, -1)).transpose(0, 1) * pieces
    out = {"gate_up": repeat(deal(dense["gate_up.weight"])), "down": repeat(down)}
    if model.bias:
        out["gate_up_bias"] = repeat(deal(dense["gate_up.bias"]))
        out["down_bias"] = dense["down.bias"].repeat(model.moe.experts, 1)  # weights that sum to 1 keep it
    return out


def _router(prefix: str, model: ModelSection, pieces: int, seed: int) -> dict[str, Tensor]:
    name = f"{prefix}router.weight"
    groups = initial_value(name, torch.Size((model.moe.experts // pieces, model.width)), model, seed)
    bias = torch.zeros(model.moe.experts)
    return {name: groups.repeat_interleave(pieces, dim=0), f"{prefix}router.selection_bias": bias}


def _shared(prefix: str, model: ModelSection, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    hidden = model.moe.shared_experts * model.moe.expert_width
    inner = 2 * hidden if model.ffn == "swiglu" else hidden
    name = f"{prefix}shared.gate_up.weight"
    out = {
        name: initial_value(name, torch.Size((inner, model.width)), model, seed).to(dtype),
        f"{prefix}shared.down.weight": torch.zeros(model.width, hidden, dtype=dtype),
    }
    if model.bias:
        out |= {f"{prefix}shared.gate_up.bias": torch.zeros(inner), f"{prefix}shared.down.bias": torch.zeros(model.width)}
    return out


def _differences(source: ModelSection, model: ModelSection, upcycling: bool) -> list[str]:
    """Keys whose values differ and change the shape or the meaning of weights."""

    def facts(section: ModelSection) -> dict:
        values = section.model_dump(exclude={"init_from", "init_noise", "moe"})
        values["kv_heads"] = section.kv_heads or section.heads
        values["ffn_width"] = section.ffn_width or default_ffn_width(section.ffn, section.width)
        if model.moe and model.moe.dense_layers == 0:
            del values["ffn_width"]
        if section.kind == "decoder":
            del values["token_dropout"]
        if not upcycling:
            moe = section.moe.model_dump(exclude={"balance_loss", "z_loss", "bias_update", "jitter"}) if section.moe else {}
            values |= {f"moe.{key}": value for key, value in moe.items()}
        return values

    ours, theirs = facts(model), facts(source)
    keys = sorted(ours.keys() | theirs.keys())
    return [f"model.{key} ({theirs.get(key)} there, {ours.get(key)} here)" for key in keys if ours.get(key) != theirs.get(key)]
