"""The model: a pre-norm transformer over packed sequences, encoder (bidirectional) or decoder (causal).

Legend: T tokens, M rows the head runs on, D width, V vocabulary, L layers, E experts, S sequences.

With ffn: gelu, norm: layernorm, bias: true and moe: null the encoder is ESM-2 (Lin et al. 2023), weight for weight; with
rmsnorm, swiglu and experts the decoder is Mixtral (Jiang et al. 2024). The names of the parameters and buffers here are the canonical names
in checkpoints. The model knows nothing of data, devices or parallelism: those are applied from outside.
"""

import hashlib
import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bmoe.model.attention import Attention, Rotary
from bmoe.model.layers import FeedForward, Layout, Linear, Norm, default_ffn_width, wide
from bmoe.model.moe import MoE
from bmoe.model.router import layer_key
from bmoe.recipe import BackendSection, ModelSection, PrecisionSection

TRAINING_MASK_SHARE = 0.15 * 0.8  # ESM-2's share of `<mask>` in training, to which token dropout scales


class Vocabulary(NamedTuple):
    """What the model knows of an alphabet."""

    size: int
    pad_id: int
    mask_id: int


class Output(NamedTuple):
    logits: Tensor  # [T or M, V] in the model's dtype
    balance_L: Tensor  # fp32 [MoE layers], differentiable
    z_L: Tensor  # fp32 [MoE layers], differentiable
    counts_LE: Tensor  # fp32 [MoE layers, E], real tokens on each expert


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)). Returns the residual stream and the routing's balance, z and counts
    (an empty tuple for a dense layer).

    `recompute` names what the backward pass computes again: nothing, the experts, or everything but the routing.
    """

    def __init__(self, model: ModelSection, backend: BackendSection, layer: int, precision: str = "bf16"):
        super().__init__()
        self.recompute = backend.recompute
        self.attention_norm = Norm(model.norm, model.width, model.bias, fused=True)
        self.attention = Attention(
            model.width,
            model.heads,
            model.kv_heads or model.heads,
            causal=model.kind == "decoder",
            bias=model.bias,
            qk_norm=model.norm if model.qk_norm else None,
            kind=backend.attention,
        )
        self.ffn_norm = Norm(model.norm, model.width, model.bias, fused=True)
        self.is_moe = model.moe is not None and layer >= model.moe.dense_layers
        if self.is_moe:
            self.ffn = MoE(model, backend, precision)
        else:
            hidden = model.ffn_width or default_ffn_width(model.ffn, model.width)
            self.ffn = FeedForward(model.ffn, model.width, hidden, model.bias)

    def forward(self, x_TD: Tensor, layout: Layout) -> tuple[Tensor, tuple[Tensor, ...]]:
        everything = self.recompute == "full"
        x_TD, h_TD = _run(self._attend, everything, x_TD, layout)
        if not self.is_moe:
            return x_TD + _run(self.ffn, everything, h_TD), ()
        routing = self.ffn.route(h_TD, layout)
        routed = (routing.x_TD, routing.experts_TK, routing.weights_TK)
        if self.recompute == "none":
            x_TD = self.ffn(*routed, x_TD)
        else:  # a residual among the inputs would be kept for the recomputation
            x_TD = x_TD + _run(self.ffn, True, *routed)
        return x_TD, (routing.balance, routing.z, routing.counts_E)

    def _attend(self, x_TD: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        x_TD, h_TD = self.attention_norm(x_TD, through=True)
        return self.ffn_norm(x_TD, self.attention(h_TD, layout))


def _run(function, recompute: bool, *inputs):
    if recompute:
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return function(*inputs)


class Head(nn.Module):
    """Logits over the vocabulary. The encoder's is ESM-2's: dense, GELU, norm, decoder, output bias; the decoder's is one
    matrix. A tied head has no matrix of its own and gets the embedding's."""

    def __init__(self, model: ModelSection, vocabulary: int):
        super().__init__()
        encoder = model.kind == "encoder"
        self.dense = Linear(model.width, model.width, bias=model.bias) if encoder else None
        self.norm = Norm(model.norm, model.width, model.bias) if encoder else None
        self.bias = nn.Parameter(torch.empty(vocabulary)) if encoder else None
        self.decoder = None if model.tie_head else Linear(model.width, vocabulary, bias=False)

    def forward(self, x_MD: Tensor, embedding_VD: Tensor) -> Tensor:
        if self.dense is not None:
            x_MD = self.norm(F.gelu(self.dense(x_MD)))
        weight_VD = embedding_VD if self.decoder is None else self.decoder.weight
        return F.linear(x_MD, weight_VD, None if self.bias is None else self.bias.to(x_MD.dtype))


class Transformer(nn.Module):
    """See the module. Its memory is empty until `initialize` or a checkpoint fills it."""

    def __init__(self, model: ModelSection, vocabulary: Vocabulary, backend: BackendSection, precision: PrecisionSection | None = None):
        super().__init__()
        self.section, self.vocabulary = model, vocabulary
        self.experts = model.moe.experts if model.moe else 0
        self.rotary = Rotary(model.width // model.heads, model.rope_base)
        self.embedding = nn.Parameter(torch.empty(vocabulary.size, model.width))
        self.blocks = nn.ModuleList(Block(model, backend, layer, _kind(precision, layer, model)) for layer in range(model.layers))
        self.final_norm = Norm(model.norm, model.width, model.bias, fused=True)
        self.head = Head(model, vocabulary.size)

    @property
    def moe_layers(self) -> list[int]:
        """Indices of the layers that have experts."""
        return [index for index, block in enumerate(self.blocks) if block.is_moe]

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        segments_T: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        real_tokens: Tensor | int,
        select_M: Tensor | None = None,
        jitter_key: Tensor | int | None = None,
    ) -> Output:
        """Logits of all slots, or of the rows `select_M` (int64 indices), and the routing statistics of the batch.

        tokens_T, positions_T, segments_T: int64; positions restart in each sequence, segments number the sequences.
        cu_seqlens: int32 [S + 1]. Slots from `real_tokens` on are the dummy tail, outside every loss, statistic and expert.
        jitter_key: any number that differs from batch to batch (below 2^32); needed in training if the router has jitter.
        """
        real_tokens = _scalar(real_tokens, tokens_T)
        real_T = torch.arange(tokens_T.shape[0], device=tokens_T.device) < real_tokens
        inside = torch.minimum(cu_seqlens, real_tokens.to(cu_seqlens.dtype))
        key = None if jitter_key is None else _scalar(jitter_key, tokens_T)
        layout = Layout(*self.rotary(positions_T), inside, max_seqlen, real_T, real_tokens, None)

        x_TD = self._embed(tokens_T, segments_T, inside)
        statistics = []
        for layer, block in enumerate(self.blocks):
            x_TD, routed = block(x_TD, layout if key is None else layout._replace(jitter_key=layer_key(key, layer)))
            if routed:
                statistics.append(routed)
        if select_M is not None:
            x_TD = x_TD.index_select(0, select_M)
        logits = self.head(self.final_norm(x_TD), self.embedding)
        if statistics:
            return Output(logits, *(torch.stack(values) for values in zip(*statistics, strict=True)))
        empty = torch.zeros(0, device=tokens_T.device)
        return Output(logits, empty, empty, empty.view(0, self.experts))

    def _embed(self, tokens_T: Tensor, segments_T: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Embeddings; pads are zero. With token dropout `<mask>` is zero too, and a sequence is scaled by
        (1 - 0.12) / (1 - r), r being its share of `<mask>` among all its non-pad tokens; a sequence of nothing but
        `<mask>` has no embedding left to scale, and scale 1."""
        scale_T = self._embedding_scale(tokens_T, segments_T, cu_seqlens)
        table_VD = self.embedding
        if table_VD.is_cuda and table_VD.dtype == torch.bfloat16:
            from bmoe.kernels.embedding import LARGEST, embed  # imported here: it needs triton

            if self.vocabulary.size <= LARGEST:
                return embed(tokens_T, table_VD, scale_T)
        return (wide(F.embedding(tokens_T, table_VD)) * scale_T[:, None]).to(table_VD.dtype)

    def _embedding_scale(self, tokens_T: Tensor, segments_T: Tensor, cu_seqlens: Tensor) -> Tensor:
        dtype = torch.promote_types(self.embedding.dtype, torch.float32)
        pad_T = tokens_T == self.vocabulary.pad_id
        if self.section.kind == "decoder" or not self.section.token_dropout:
            return (~pad_T).to(dtype)
        mask_T = tokens_T == self.vocabulary.mask_id
        masks_S, kept_S = _per_sequence(mask_T, cu_seqlens), _per_sequence(~(mask_T | pad_T), cu_seqlens)
        seen_S = (masks_S + kept_S).to(dtype)
        scale_S = torch.where(kept_S > 0, (1.0 - TRAINING_MASK_SHARE) * seen_S / kept_S, 1.0)
        return scale_S[segments_T].masked_fill(mask_T | pad_T, 0.0)

    def update_router_bias(self, counts_LE: Tensor, rate: float) -> None:
        """The aux-loss-free bias, once per optimizer step, from that whole step's counts over all batches and ranks."""
        for index, counts_E in zip(self.moe_layers, counts_LE, strict=True):
            self.blocks[index].ffn.router.update_bias(counts_E, rate)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Fill all memory from the seed; see `initial_value`. Independent of the experts' implementation and of devices."""
        self.rotary.initialize()
        for index in self.moe_layers:
            self.blocks[index].ffn.router.selection_bias.zero_()
        for name, parameter in self.named_parameters():
            parameter.copy_(initial_value(name, parameter.shape, self.section, seed))


def _kind(precision: PrecisionSection | None, layer: int, model: ModelSection) -> str:
    """The format of a layer's expert GEMMs: the recipe's, but for the layers that it keeps in high precision."""
    if precision is None or precision.emulate or precision.kind == "fp32":
        return "bf16"
    kept = precision.high_precision_layers
    return precision.kind if kept.first <= layer < model.layers - kept.last else "bf16"


def _scalar(value: Tensor | int, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full((), value, dtype=torch.int64, device=like.device)


def _per_sequence(flag_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """How many of each sequence's slots are set, int64 [S]."""
    running = F.pad(flag_T.cumsum(0), (1, 0))
    return running[cu_seqlens.long()].diff()


def initial_value(name: str, shape: torch.Size, model: ModelSection, seed: int) -> Tensor:
    """The fp32 initial value of the parameter `name`, on the CPU; for experts, each expert has a stream of its own.

    Norm weights 1, biases 0. Matrices normal with standard deviation sqrt(2 / (5 D)) ("small init", Nguyen and Salazar
    2019; 0.018 for D = 1280); those that write into the residual stream (attention.output, down) divided by sqrt(2 L), as in GPT-2.
    """
    if name.endswith("bias"):
        return torch.zeros(shape)
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    std = math.sqrt(2.0 / (5.0 * model.width))
    if name.rpartition(".weight")[0].endswith(("attention.output", "down")) or name.endswith("experts.down"):
        std /= math.sqrt(2.0 * model.layers)
    if len(shape) == 3:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # a draw takes one core, 20 s for 10^9 values
            return torch.stack(list(pool.map(lambda expert: _normal(f"{name}.{expert}", shape[1:], std, seed), range(shape[0]))))
    return _normal(name, shape, std, seed)


def _normal(name: str, shape: torch.Size, std: float, seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.empty(shape).normal_(0.0, std, generator=generator)
