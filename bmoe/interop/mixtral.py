"""A decoder as `MixtralForCausalLM` and back.

| canonical | Mixtral checkpoint |
|---|---|
| embedding | model.embed_tokens.weight |
| blocks.N.attention_norm, .ffn_norm | model.layers.N.input_layernorm, .post_attention_layernorm |
| blocks.N.attention.qkv (rows: query, key, value) | ...self_attn.{q,k,v}_proj |
| blocks.N.attention.output | ...self_attn.o_proj |
| blocks.N.ffn.router.weight | ...block_sparse_moe.gate.weight |
| blocks.N.ffn.experts.gate_up[e] (rows: gate, up), .down[e] | ...block_sparse_moe.experts.e.{w1, w3}, .w2 |
| final_norm, head.decoder.weight | model.norm, lm_head.weight |

Checkpoints hold one tensor per expert and matrix, which every release of transformers reads; its newer in-memory names
with fused experts (`mlp.experts.gate_up_proj`, `down_proj`) are read too.
"""

import torch
from torch import Tensor

from bmoe.errors import RequestError
from bmoe.recipe import ModelSection

NORMS = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


def why_not(model: ModelSection, weights: dict[str, Tensor]) -> str | None:
    """What keeps this model from being a Mixtral, or None if nothing does."""
    moe = model.moe
    if moe is None:
        return "it has no experts"
    wrong = {
        "kind is not decoder": model.kind != "decoder",
        "norm is not rmsnorm": model.norm != "rmsnorm",
        "ffn is not swiglu": model.ffn != "swiglu",
        "it has biases": model.bias,
        "it normalises queries and keys": model.qk_norm,
        "its first layers are dense": moe.dense_layers > 0,
        "it has shared experts": moe.shared_experts > 0,
        "its router's scores are not softmax": moe.score != "softmax",
        "its expert weights are not normalised": not moe.normalize_weights,
        "its routing is group-limited": moe.groups is not None,
        "its router has a selection bias": any(v.any() for k, v in weights.items() if k.endswith("selection_bias")),
    }
    return next((reason for reason, true in wrong.items() if true), None)


def to_mixtral(weights: dict[str, Tensor], model: ModelSection) -> dict[str, Tensor]:
    """Checkpoint tensors of MixtralForCausalLM from canonical ones; no copies."""
    head_dim = model.width // model.heads
    G = model.kv_heads or model.heads
    out = {"model.embed_tokens.weight": weights["embedding"], "model.norm.weight": weights["final_norm.weight"]}
    if not model.tie_head:
        out["lm_head.weight"] = weights["head.decoder.weight"]
    for n in range(model.layers):
        block, layer = f"blocks.{n}.", f"model.layers.{n}."
        for ours, theirs in NORMS.items():
            out[f"{layer}{theirs}.weight"] = weights[f"{block}{ours}.weight"]
        rows = weights[f"{block}attention.qkv.weight"].split((model.width, G * head_dim, G * head_dim))
        for name, tensor in zip("qkv", rows, strict=True):
            out[f"{layer}self_attn.{name}_proj.weight"] = tensor
        out[f"{layer}self_attn.o_proj.weight"] = weights[f"{block}attention.output.weight"]
        out[f"{layer}block_sparse_moe.gate.weight"] = weights[f"{block}ffn.router.weight"]
        pairs = zip(weights[f"{block}ffn.experts.gate_up"], weights[f"{block}ffn.experts.down"], strict=True)
        for expert, (gate_up, down) in enumerate(pairs):
            prefix = f"{layer}block_sparse_moe.experts.{expert}."
            out[f"{prefix}w1.weight"], out[f"{prefix}w3.weight"] = gate_up.chunk(2)
            out[f"{prefix}w2.weight"] = down
    return out


def mixtral_config(model: ModelSection, vocabulary: int, max_length: int) -> dict:
    """config.json of that checkpoint, without token ids and dtype."""
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": vocabulary,
        "hidden_size": model.width,
        "intermediate_size": model.moe.expert_width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads or model.heads,
        "head_dim": model.width // model.heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": max_length,
        "rope_theta": model.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_base},
        "sliding_window": None,
        "num_local_experts": model.moe.experts,
        "num_experts_per_tok": model.moe.top_k,
        "router_aux_loss_coef": model.moe.balance_loss,
        "router_jitter_noise": model.moe.jitter,
        "output_router_logits": False,
        "tie_word_embeddings": model.tie_head,
    }


def from_mixtral(weights: dict[str, Tensor], config: dict) -> tuple[dict[str, Tensor], dict]:
    """Canonical weights and the model section. Raises RequestError for what the model has no counterpart of."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 1e6))
    if config.get("head_dim") not in (None, width // heads):
        raise RequestError(f"config.json: head_dim {config['head_dim']} is not hidden_size / num_attention_heads = {width // heads}")
    if rope.get("rope_type", "default") != "default":
        raise RequestError(f"config.json: rope_type {rope['rope_type']} is not supported; only default is")
    if config.get("sliding_window") is not None:
        raise RequestError("config.json: sliding-window attention is not supported; only sliding_window null is")
    if abs(config.get("rms_norm_eps", 1e-5) - 1e-5) > 1e-9:
        raise RequestError(f"config.json: rms_norm_eps {config['rms_norm_eps']} is not 1e-5, the only one supported")
    moe = {
        "experts": config["num_local_experts"], "top_k": config["num_experts_per_tok"], "expert_width": config["intermediate_size"],
        "score": "softmax", "normalize_weights": True,
    }  # fmt: skip
    section = {
        "kind": "decoder", "layers": config["num_hidden_layers"], "width": width, "heads": heads,
        "kv_heads": config.get("num_key_value_heads"), "norm": "rmsnorm", "ffn": "swiglu", "bias": False, "qk_norm": False,
        "rope_base": float(theta), "tie_head": bool(config.get("tie_word_embeddings", False)), "moe": moe,
    }  # fmt: skip
    weights = {name.replace(".block_sparse_moe.", ".mlp."): tensor for name, tensor in weights.items()}
    frequencies = 1.0 / float(theta) ** (torch.arange(0, width // heads, 2).float() / (width // heads))
    out = {
        "embedding": weights["model.embed_tokens.weight"],
        "final_norm.weight": weights["model.norm.weight"],
        "rotary.inverse_frequency": frequencies,
    }
    if not section["tie_head"]:
        out["head.decoder.weight"] = weights["lm_head.weight"]
    for n in range(section["layers"]):
        block, layer = f"blocks.{n}.", f"model.layers.{n}."
        for ours, theirs in NORMS.items():
            out[f"{block}{ours}.weight"] = weights[f"{layer}{theirs}.weight"]
        out[f"{block}attention.qkv.weight"] = torch.cat([weights[f"{layer}self_attn.{name}_proj.weight"] for name in "qkv"])
        out[f"{block}attention.output.weight"] = weights[f"{layer}self_attn.o_proj.weight"]
        out[f"{block}ffn.router.weight"] = weights[f"{layer}mlp.gate.weight"].float()
        out[f"{block}ffn.router.selection_bias"] = torch.zeros(moe["experts"])
        out |= _experts(weights, f"{layer}mlp.experts.", f"{block}ffn.experts.", moe["experts"])
    return out, section


def _experts(weights: dict[str, Tensor], theirs: str, ours: str, experts: int) -> dict[str, Tensor]:
    if f"{theirs}gate_up_proj" in weights:
        return {f"{ours}gate_up": weights[f"{theirs}gate_up_proj"], f"{ours}down": weights[f"{theirs}down_proj"]}
    gate_up = [torch.cat((weights[f"{theirs}{e}.w1.weight"], weights[f"{theirs}{e}.w3.weight"])) for e in range(experts)]
    down = [weights[f"{theirs}{e}.w2.weight"] for e in range(experts)]
    return {f"{ours}gate_up": torch.stack(gate_up), f"{ours}down": torch.stack(down)}
