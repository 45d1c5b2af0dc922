"""Sampling sequences from a decoder, token by token, with the keys and values of the past kept.

All samples grow side by side: each step runs the model on one new token of every sample, and attention looks at that
sample's cache. What a sample is worth is measured afterwards by a pass without the cache.

Legend: N samples, H query heads, G key and value heads, d head dimension, P prompt tokens, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmoe.data.alphabet import Alphabet
from bmoe.errors import RequestError
from bmoe.evaluation.forward import Request, batch_slots, check_numbers, log_probabilities
from bmoe.recipe import Recipe


class Cache:
    """Keys and values of one layer, [N, capacity, G, d] each; `filled` slots hold something."""

    def __init__(self, samples: int, capacity: int):
        self.samples, self.capacity, self.filled = samples, capacity, 0
        self.keys = self.values = torch.empty(0)

    def append(self, k_NtGd: Tensor, v_NtGd: Tensor) -> None:
        """Add t tokens of every sample; the prompt comes as N = 1 and is shared out."""
        count = k_NtGd.shape[1]
        if self.filled == 0:
            shape = (self.samples, self.capacity, *k_NtGd.shape[2:])
            self.keys, self.values = k_NtGd.new_empty(shape), v_NtGd.new_empty(shape)
        self.keys[:, self.filled : self.filled + count] = k_NtGd
        self.values[:, self.filled : self.filled + count] = v_NtGd
        self.filled += count


@contextmanager
def cached(model: nn.Module, caches: list[Cache]) -> Iterator[None]:
    """Inside, a forward pass takes one sample's first tokens (the prompt), then one token of each sample a pass."""
    layers = [block.attention for block in model.blocks]
    for attention, cache in zip(layers, caches, strict=True):
        attention.forward = partial(_attend, attention, cache)
    try:
        yield
    finally:
        for attention in layers:
            del attention.forward  # the class's own is back


def _attend(attention: nn.Module, cache: Cache, x_TD: Tensor, layout) -> Tensor:
    q_THd, k_TGd, v_TGd = attention.project(x_TD, layout)
    first = cache.filled == 0
    cache.append(*((x[None] if first else x[:, None]) for x in (k_TGd, v_TGd)))
    q_NHtd = q_THd.transpose(0, 1)[None] if first else q_THd[:, :, None]
    rows = 1 if first else cache.samples
    repeats = attention.heads // attention.kv_heads
    k_NHtd, v_NHtd = (
        x[:rows, : cache.filled].transpose(1, 2).repeat_interleave(repeats, dim=1) for x in (cache.keys, cache.values)
    )  # fmt: skip
    out_NHtd = F.scaled_dot_product_attention(q_NHtd, k_NHtd, v_NHtd, is_causal=first)
    out_THd = out_NHtd[0].transpose(0, 1) if first else out_NHtd[:, :, 0]
    return attention.output(out_THd.reshape(x_TD.shape[0], -1))


def _inputs(tokens_T: Tensor, position: int, together: bool) -> dict:
    """Arguments of the model for one sample's tokens from `position` on, or for one token each of many samples there."""
    T, device = tokens_T.shape[0], tokens_T.device
    steps = torch.arange(T, device=device)
    if together:
        bounds = torch.tensor([0, T], dtype=torch.int32, device=device)
        return _arguments(tokens_T, position + steps, torch.zeros_like(steps), bounds, T)
    bounds = torch.arange(T + 1, dtype=torch.int32, device=device)
    return _arguments(tokens_T, torch.full_like(steps, position), steps, bounds, 1)


def _arguments(tokens_T: Tensor, positions_T: Tensor, segments_T: Tensor, cu_seqlens: Tensor, longest: int) -> dict:
    return {
        "tokens_T": tokens_T, "positions_T": positions_T, "segments_T": segments_T, "cu_seqlens": cu_seqlens, "max_seqlen": longest,
        "real_tokens": tokens_T.shape[0],
    }  # fmt: skip


@torch.no_grad()
def next_logits(model: nn.Module, prompt: np.ndarray, samples: int, capacity: int, device: torch.device) -> Iterator[Tensor]:
    """A generator of next-token logits, fp32 [samples, V]; send it the chosen tokens int64 [samples] for the next step."""
    caches = [Cache(samples, capacity) for _ in model.blocks]
    with cached(model, caches):
        start = torch.from_numpy(prompt.astype(np.int64)).to(device)
        last = torch.tensor([start.shape[0] - 1], device=device)
        logits_NV = model(**_inputs(start, 0, together=True), select_M=last).logits.float().expand(samples, -1)
    for position in range(start.shape[0], capacity):
        tokens_N = yield logits_NV
        with cached(model, caches):
            logits_NV = model(**_inputs(tokens_N.to(device), position, together=False)).logits.float()
    yield logits_NV


def evaluate(
    model: nn.Module,
    recipe: Recipe,
    letters: Alphabet,
    *,
    device: torch.device,
    samples: int,
    prompt: str = "",
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    longest: int | None = None,
) -> dict:
    """Sample sequences that begin with `prompt`, until `<eos>` or `longest` tokens (None: `data.max_length`, specials included).

    Only letters and `<eos>` are drawn, from the logits over `temperature`, and with `top_k` from the k most likely of them
    (Fan et al. 2018). Returns perplexity (of the new tokens of all samples under the model as it is), mean_length, ended, and
    the samples with theirs. RequestError for an encoder or a prompt that does not fit.
    """
    if recipe.objective.kind != "clm":
        raise RequestError("only decoders generate, and this model is an encoder: leave --generate out")
    if samples < 1 or not 0 < temperature < float("inf"):
        raise RequestError("--generate needs at least one sample, and --temperature a finite number above 0")
    if top_k is not None and top_k < 1:
        raise RequestError(f"--top-k {top_k}: keep at least the most likely token")
    longest = longest or recipe.data.max_length
    start = np.concatenate([[letters.cls_id], letters.encode(prompt.encode("ascii", "replace")).astype(np.int64) if prompt else []])
    start = start.astype(np.int64)
    if (start == letters.unk_id).any():
        raise RequestError(f"--prompt {prompt!r} has a letter that the alphabet {letters.name} does not have; leave it out")
    if start.size >= longest:
        raise RequestError(f"--prompt has {start.size - 1} tokens and leaves no room in {longest}")
    new_NT = _sample(model, letters, start, samples, longest, temperature, seed, device, top_k)
    found = _summary(model, recipe, letters, start, new_NT, prompt, device)
    return {"temperature": temperature, "top_k": top_k, **found}


def chances(logits_NV: Tensor, banned_V: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """Chance of each token to be drawn, [N, V]: softmax of logits / temperature over the legal ones, or over the k best of them."""
    logits_NV = logits_NV.masked_fill(banned_V, float("-inf")).double()
    logits_NV = (logits_NV - logits_NV.amax(dim=-1, keepdim=True)) / temperature  # the largest is 0, however cold
    if top_k is not None and top_k < logits_NV.shape[1]:
        best_NK = logits_NV.topk(top_k, dim=-1).indices
        logits_NV = torch.full_like(logits_NV, float("-inf")).scatter(1, best_NK, logits_NV.gather(1, best_NK))
    return logits_NV.softmax(dim=-1).float()


def _sample(
    model: nn.Module,
    letters: Alphabet,
    start: np.ndarray,
    samples: int,
    longest: int,
    temperature: float,
    seed: int,
    device: torch.device,
    top_k: int | None = None,
) -> np.ndarray:
    """New tokens, int64 [samples, steps]; what follows an `<eos>` has no meaning."""
    legal = [i for i, symbol in enumerate(letters.symbols) if symbol.isalpha()] + [letters.eos_id]
    banned_V = torch.ones(letters.size, dtype=torch.bool)
    banned_V[legal] = False
    generator = torch.Generator().manual_seed(seed)
    stream = next_logits(model, start, samples, longest, device)
    columns: list[Tensor] = []
    running_N = torch.ones(samples, dtype=torch.bool)
    logits_NV = next(stream)
    for step in range(longest - start.size):
        logits_NV = logits_NV.cpu()
        check_numbers(logits_NV, "logits")
        tokens_N = torch.multinomial(chances(logits_NV, banned_V, temperature, top_k), 1, generator=generator)[:, 0]
        columns.append(tokens_N)
        running_N &= tokens_N != letters.eos_id
        if not running_N.any() or step + 1 == longest - start.size:
            break
        logits_NV = stream.send(tokens_N)
    stream.close()
    return torch.stack(columns, dim=1).numpy()


def _summary(
    model: nn.Module, recipe: Recipe, letters: Alphabet, start: np.ndarray, new_NT: np.ndarray, prompt: str, device: torch.device
) -> dict:
    whole, ended = [], []
    for row in new_NT:
        stop = np.flatnonzero(row == letters.eos_id)
        ended.append(bool(stop.size))
        whole.append(np.concatenate([start, row[: stop[0] + 1] if stop.size else row]))
    sizes = [tokens.size - start.size for tokens in whole]
    requests = (
        Request(tokens[None], np.zeros(size, int), np.arange(start.size - 1, tokens.size - 1), tokens[start.size :])
        for tokens, size in zip(whole, sizes, strict=True)
    )
    nats_M = -log_probabilities(model, requests, batch_slots(recipe, device), device)
    entries = [
        {
            "sequence": letters.decode(tokens[1 : -1 if end else None]), "length": int(tokens.size - 1 - end), "ended": end,
            "perplexity": float(np.exp(values.mean())),
        }
        for tokens, end, values in zip(whole, ended, np.split(nats_M, np.cumsum(sizes)[:-1]), strict=True)
    ]  # fmt: skip
    return {
        "prompt": prompt, "n": len(entries), "perplexity": float(np.exp(nats_M.mean())), "ended": sum(ended),
        "mean_length": float(np.mean([e["length"] for e in entries])), "samples": entries,
    }  # fmt: skip
