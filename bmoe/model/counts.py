"""Parameters, FLOPs and bytes of a model in closed form, from its recipe section alone.

Legend: T tokens, D width, F feed-forward width, C = 2 F (SwiGLU) or F (GELU), E experts, K top-k, H heads, G key and
value heads, d head dimension, L layers, V vocabulary.

FLOPs are those of matrix products, 2 per multiply-add. Per token and layer, forward:
    attention projections   2 D (H + 2 G) d + 2 D^2
    attention               4 D per (query, key) pair that the mask lets through: n^2 in a sequence of n tokens of an
                            encoder, n (n + 1) / 2 of a decoder
    experts                 K (2 D C + 2 F D): the active ones only; the shared expert and the router (2 D E) besides
    head                    2 D V, and 2 D^2 for the encoder's dense layer, on the rows it runs on
The backward pass is twice the forward pass (gradients of inputs and of weights). Recomputed work is not counted, nor are
embedding, norms and activations: this is the numerator of model FLOPs utilisation (PaLM, Chowdhery et al. 2022).
"""

from typing import NamedTuple

from bmoe.model.layers import default_ffn_width
from bmoe.recipe import ModelSection, MoESection

BF16_PEAK = {  # dense bf16 FLOP/s without sparsity, from NVIDIA's data sheets; the first name found in the device's counts
    "GB300": 2.5e15,
    "GB200": 2.5e15,
    "B300": 2.25e15,
    "B200": 2.25e15,
    "H200 NVL": 835.5e12,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.4e12,
    "H800": 989.4e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
}


class Parameters(NamedTuple):
    """Numbers of parameters by part; a tied head adds no matrix."""

    embedding: int
    attention: int
    dense: int  # feed-forwards of dense layers
    router: int
    experts: int
    shared: int
    norms: int
    head: int
    idle: int  # of `experts`: those that a token does not visit
    wide: int  # norm weights, biases and routers, which stay fp32

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.dense + self.router + self.experts + self.shared + self.norms + self.head

    @property
    def active(self) -> int:
        """Parameters that one token meets: all but the experts it does not visit."""
        return self.total - self.idle

    def bytes(self, matrix_bytes: int = 2) -> int:
        """Of the weights, with matrices in `matrix_bytes` each (2: bf16) and the rest in fp32."""
        return matrix_bytes * (self.total - self.wide) + 4 * self.wide


def parameters(model: ModelSection, vocabulary: int) -> Parameters:
    """Parameters of the model a recipe describes."""
    D, L, bias, moe = model.width, model.layers, model.bias, model.moe
    moe_layers = _moe_layers(model)
    dense_layers = L - moe_layers
    hidden = model.ffn_width or default_ffn_width(model.ffn, D)
    norm = _norm(model, D)
    encoder = model.kind == "encoder"

    attention = _attention_matrices(model)
    attention_bias = attention // D if bias else 0  # one an output: (H + 2 G) d + D
    head_norms = 2 * _norm(model, D // model.heads) if model.qk_norm else 0
    head_bias = (D if bias else 0) + vocabulary if encoder else 0

    experts = moe_layers * moe.experts * _ffn(model, moe.expert_width, bias) if moe else 0
    expert_bias = moe_layers * moe.experts * _ffn_bias(model, moe.expert_width) if moe and bias else 0
    shared_width = moe.shared_experts * moe.expert_width if moe else 0
    shared = moe_layers * _ffn(model, shared_width, bias) if shared_width else 0
    shared_bias = moe_layers * _ffn_bias(model, shared_width) if shared_width and bias else 0
    router = moe_layers * moe.experts * D if moe else 0
    norms = L * (2 * norm + head_norms) + norm + (norm if encoder else 0)
    dense_bias = dense_layers * _ffn_bias(model, hidden) if bias else 0
    return Parameters(
        embedding=vocabulary * D,
        attention=L * (attention + attention_bias),
        dense=dense_layers * _ffn(model, hidden, bias),
        router=router,
        experts=experts,
        shared=shared,
        norms=norms,
        head=(D * D if encoder else 0) + head_bias + (0 if model.tie_head else vocabulary * D),
        idle=experts // moe.experts * (moe.experts - moe.top_k) if moe else 0,
        wide=router + norms + L * attention_bias + expert_bias + shared_bias + dense_bias + head_bias,
    )


def forward_flops(model: ModelSection, vocabulary: int, tokens: float, pairs: float, head_rows: float | None = None) -> float:
    """FLOPs of a forward pass over `tokens` real tokens in sequences whose squared lengths sum to `pairs`.

    `head_rows`: rows the head runs on; all tokens if None.
    """
    D, moe = model.width, model.moe
    moe_layers = _moe_layers(model)
    hidden = model.ffn_width or default_ffn_width(model.ffn, D)
    matrices = model.layers * _attention_matrices(model) + (model.layers - moe_layers) * _ffn(model, hidden, False)
    if moe:
        visited = moe.top_k + moe.shared_experts
        matrices += moe_layers * (visited * _ffn(model, moe.expert_width, False) + moe.experts * D)
    seen = pairs if model.kind == "encoder" else (pairs + tokens) / 2
    head = vocabulary * D + (D * D if model.kind == "encoder" else 0)
    return 2 * matrices * tokens + 4 * D * model.layers * seen + 2 * head * (tokens if head_rows is None else head_rows)


def training_flops(model: ModelSection, vocabulary: int, tokens: float, pairs: float, head_rows: float | None = None) -> float:
    """FLOPs of forward and backward; the arguments of `forward_flops`."""
    return 3 * forward_flops(model, vocabulary, tokens, pairs, head_rows)


def peak_flops(device: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by its name, or None if it is not in the table."""
    return next((peak for name, peak in BF16_PEAK.items() if name in device), None)


def _moe_layers(model: ModelSection) -> int:
    moe: MoESection | None = model.moe
    return model.layers - moe.dense_layers if moe else 0


def _norm(model: ModelSection, width: int) -> int:
    return 2 * width if model.norm == "layernorm" and model.bias else width


def _attention_matrices(model: ModelSection) -> int:
    head_dim, kv_heads = model.width // model.heads, model.kv_heads or model.heads
    return model.width * (model.heads + 2 * kv_heads) * head_dim + model.width**2


def _ffn(model: ModelSection, hidden: int, bias: bool) -> int:
    matrices = model.width * hidden * (3 if model.ffn == "swiglu" else 2)
    return matrices + (_ffn_bias(model, hidden) if bias else 0)


def _ffn_bias(model: ModelSection, hidden: int) -> int:
    return hidden * (2 if model.ffn == "swiglu" else 1) + model.width
