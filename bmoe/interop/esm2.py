"""ESM-2's two published namings and the canonical one.

| canonical | Hugging Face `EsmForMaskedLM` | fair-esm |
|---|---|---|
| embedding | esm.embeddings.word_embeddings.weight | embed_tokens.weight |
| blocks.N.attention_norm | esm.encoder.layer.N.attention.LayerNorm | layers.N.self_attn_layer_norm |
| blocks.N.attention.qkv (rows: query, key, value) | ...attention.self.{query,key,value} | layers.N.self_attn.{q,k,v}_proj |
| blocks.N.attention.output | ...attention.output.dense | layers.N.self_attn.out_proj |
| blocks.N.ffn_norm | ...LayerNorm | layers.N.final_layer_norm |
| blocks.N.ffn.gate_up, .down | ...intermediate.dense, ...output.dense | layers.N.fc1, .fc2 |
| final_norm | esm.encoder.emb_layer_norm_after | emb_layer_norm_after |
| head.dense, .norm, .bias | lm_head.dense, .layer_norm, .bias | the same |
| head.decoder.weight, if it is not the embedding | lm_head.decoder.weight | lm_head.weight |

transformers 5 writes LayerNorm.gamma and .beta for .weight and .bias; both are read. Stored rotary frequencies are kept. The contact head
is left out, and so are the position embeddings and the pooler that some folders of Hugging Face hold beside rotary positions and do
not use. Any other tensor, as ESM-1b has them in either naming, is refused.
"""

import re

import torch
from torch import Tensor

from bmoe.errors import RequestError

HUGGING_FACE = {
    "embedding": "esm.embeddings.word_embeddings.weight",
    "final_norm": "esm.encoder.emb_layer_norm_after",
    "layer": "esm.encoder.layer.{n}.",
    "attention_norm": "attention.LayerNorm",
    "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.output": "attention.output.dense",
    "ffn_norm": "LayerNorm",
    "ffn.gate_up": "intermediate.dense",
    "ffn.down": "output.dense",
    "frequencies": r"rotary_embeddings\.inv_freq$",
    "head": "lm_head.decoder.weight",
    "unused": r"esm\.(contact_head|pooler|embeddings\.position_(embeddings|ids))|lm_head\.decoder\.bias$",
}
FAIR = {
    "embedding": "embed_tokens.weight",
    "final_norm": "emb_layer_norm_after",
    "layer": "layers.{n}.",
    "attention_norm": "self_attn_layer_norm",
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.output": "self_attn.out_proj",
    "ffn_norm": "final_layer_norm",
    "ffn.gate_up": "fc1",
    "ffn.down": "fc2",
    "frequencies": r"rot_emb\.inv_freq$",
    "head": "lm_head.weight",
    "unused": "contact_head",
}
HEADS = {(6, 320): 20, (12, 480): 20, (30, 640): 20, (33, 1280): 20, (36, 2560): 40, (48, 5120): 40}  # published (layers, width)


def is_esm2(names: set[str]) -> bool:
    """Whether these are the names of an ESM-2 checkpoint in one of the two namings."""
    return HUGGING_FACE["embedding"] in names or any(name.endswith(FAIR["embedding"]) for name in names)


def from_esm2(weights: dict[str, Tensor], heads: int | None = None, tied: bool | None = None) -> tuple[dict[str, Tensor], dict]:
    """Canonical weights and the model section of a dense ESM-2 checkpoint in either naming.

    `heads` is needed for shapes other than the six published ones without stored frequencies. `tied`: whether the head reads the
    embedding; None: unless there is another matrix for it. Raises RequestError for a missing tensor, or one that ESM-2 does not have.
    """
    weights = {_usual(name): value for name, value in weights.items()}
    naming = HUGGING_FACE if HUGGING_FACE["embedding"] in weights else FAIR
    taken = {naming["head"]}

    def take(name: str) -> Tensor:
        if name not in weights:
            raise RequestError(f"this ESM-2 checkpoint has no tensor {name}; is the file whole?")
        taken.add(name)
        return weights[name]

    embedding = take(naming["embedding"])
    pattern = re.escape(naming["layer"]).replace(r"\{n\}", r"(\d+)")
    layers = 1 + max(int(match[1]) for match in (re.match(pattern, name) for name in weights) if match)
    width = embedding.shape[1]
    stored = [value for name, value in weights.items() if re.search(naming["frequencies"], name)]
    heads = heads or (width // (2 * stored[0].numel()) if stored else HEADS.get((layers, width)))
    if heads is None:
        raise RequestError(f"{layers} layers of width {width} are no published ESM-2 shape, and the checkpoint does not say how many heads")

    out = {"embedding": embedding}
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, width // heads, 2).float() / (width // heads))
    out["rotary.inverse_frequency"] = stored[0].float() if stored else frequencies
    for part in ("weight", "bias"):
        for n in range(layers):
            layer, block = naming["layer"].format(n=n), f"blocks.{n}."
            out[f"{block}attention.qkv.{part}"] = torch.cat([take(f"{layer}{name}.{part}") for name in naming["qkv"]])
            for name in ("attention_norm", "attention.output", "ffn_norm", "ffn.gate_up", "ffn.down"):
                out[f"{block}{name}.{part}"] = take(f"{layer}{naming[name]}.{part}")
        out[f"final_norm.{part}"] = take(f"{naming['final_norm']}.{part}")
        out[f"head.dense.{part}"] = take(f"lm_head.dense.{part}")
        out[f"head.norm.{part}"] = take(f"lm_head.layer_norm.{part}")
    out["head.bias"] = take("lm_head.bias")
    if tied is None:
        tied = naming["head"] not in weights or torch.equal(weights[naming["head"]], embedding)
    if not tied:
        out["head.decoder.weight"] = take(naming["head"])
    left_out = f"{naming['frequencies']}|{naming['unused']}"
    if foreign := [name for name in weights if name not in taken and not re.search(left_out, name)]:
        raise RequestError(f"this checkpoint has the tensor {foreign[0]}, which ESM-2 does not have (ESM-1b may); only ESM-2 can be read")
    section = {
        "kind": "encoder", "layers": layers, "width": width, "heads": heads, "kv_heads": None, "norm": "layernorm", "ffn": "gelu",
        "ffn_width": out["blocks.0.ffn.down.weight"].shape[1], "bias": True, "qk_norm": False, "rope_base": 10000.0,
        "token_dropout": True, "tie_head": tied, "moe": None,
    }  # fmt: skip
    return out, section


def _usual(name: str) -> str:
    """A name without fair-esm's prefixes, and with the usual names of LayerNorm's two parameters."""
    name = re.sub(r"^encoder\.(sentence_encoder\.)?", "", name)
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
