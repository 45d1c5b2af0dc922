"""A model that `bmoe` trained, for Hugging Face transformers (5.10 or later) and without bmoe.

`bmoe export` copies this file beside the weights; load the folder with `trust_remote_code=True`:

    AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)   (an encoder; AutoModelForCausalLM for a decoder)

A pre-norm transformer with rotary positions and, in some or all layers, Mixture-of-Experts feed-forwards. Every option
stands in `config.model`, the model section of the recipe. Inputs are padded batches [B, L] with an attention mask on
either side. Legend: B sequences, L positions, T = B x L tokens, D width, H heads, G key and value heads, E experts, K top-k.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput, MaskedLMOutput

NORM_EPS = 1e-5
TRAINING_MASK_SHARE = 0.15 * 0.8
MODEL = {
    "kind": "encoder", "layers": 2, "width": 64, "heads": 4, "kv_heads": None, "norm": "rmsnorm", "ffn": "swiglu", "ffn_width": 128,
    "bias": False, "qk_norm": False, "rope_base": 10000.0, "token_dropout": True, "tie_head": True, "moe": None,
}  # fmt: skip


class BmoeConfig(PretrainedConfig):
    """`model`: the recipe's model section. `alphabet`: protein, dna or dna-bpe:N."""

    model_type = "bmoe"

    def __init__(self, model=None, alphabet="protein", vocab_size=33, pad_token_id=1, mask_token_id=32, **kwargs):
        self.model = dict(model or MODEL)
        self.alphabet, self.vocab_size, self.mask_token_id = alphabet, vocab_size, mask_token_id
        self.hidden_size, self.num_hidden_layers = self.model["width"], self.model["layers"]
        self.num_attention_heads = self.model["heads"]
        self.use_cache = False
        kwargs["tie_word_embeddings"] = False  # a tied head has no matrix of its own
        kwargs["use_cache"] = False
        super().__init__(pad_token_id=pad_token_id, **kwargs)


class Norm(nn.Module):
    def __init__(self, model, width):
        super().__init__()
        self.rms = model["norm"] == "rmsnorm"
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if model["bias"] and not self.rms else None

    def forward(self, x):
        wide, weight = _wide(x), _wide(self.weight)
        if self.rms:
            return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS) * weight).to(x.dtype)
        bias = None if self.bias is None else _wide(self.bias)
        return F.layer_norm(wide, weight.shape, weight, bias, NORM_EPS).to(x.dtype)


class FeedForward(nn.Module):
    def __init__(self, model, hidden):
        super().__init__()
        self.gelu = model["ffn"] == "gelu"
        self.gate_up = nn.Linear(model["width"], hidden if self.gelu else 2 * hidden, bias=model["bias"])
        self.down = nn.Linear(hidden, model["width"], bias=model["bias"])

    def forward(self, x):
        return self.down(_activate(self.gate_up(x), self.gelu))


class Router(nn.Module):
    """Scores in fp32; the bias moves the choice and not the weights."""

    def __init__(self, model):
        super().__init__()
        self.moe = model["moe"]
        self.weight = nn.Parameter(torch.zeros(self.moe["experts"], model["width"]))
        self.register_buffer("selection_bias", torch.zeros(self.moe["experts"]))

    def forward(self, x):
        logits = F.linear(_wide(x), _wide(self.weight))
        softmax, groups = self.moe["score"] == "softmax", self.moe["groups"]
        scores = logits.softmax(-1) if softmax else logits.sigmoid()
        selection = scores + self.selection_bias
        if groups:
            members = selection.unflatten(1, (groups, -1))
            worth = members.topk(1 if softmax else min(2, members.shape[-1]), dim=-1).values.sum(-1)
            kept = torch.zeros_like(worth, dtype=torch.bool).scatter(1, worth.topk(self.moe["groups_kept"], dim=-1).indices, True)
            selection = members.masked_fill(~kept[:, :, None], float("-inf")).flatten(1)
        experts = selection.topk(self.moe["top_k"], dim=-1).indices
        weights = scores.gather(1, experts)
        if self.moe["normalize_weights"]:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
        return experts, weights


class Experts(nn.Module):
    def __init__(self, model):
        super().__init__()
        E, D, hidden = model["moe"]["experts"], model["width"], model["moe"]["expert_width"]
        self.gelu = model["ffn"] == "gelu"
        inner = hidden if self.gelu else 2 * hidden
        self.gate_up = nn.Parameter(torch.zeros(E, inner, D))
        self.down = nn.Parameter(torch.zeros(E, D, hidden))
        self.gate_up_bias = nn.Parameter(torch.zeros(E, inner)) if model["bias"] else None
        self.down_bias = nn.Parameter(torch.zeros(E, D)) if model["bias"] else None

    def forward(self, x, experts, weights):
        out = torch.zeros_like(_wide(x))
        for expert in range(self.gate_up.shape[0]):
            token, slot = torch.where(experts == expert)
            bias = (None, None) if self.down_bias is None else (self.gate_up_bias[expert], self.down_bias[expert])
            y = F.linear(_activate(F.linear(x[token], self.gate_up[expert], bias[0]), self.gelu), self.down[expert], bias[1])
            out.index_add_(0, token, _wide(y) * weights[token, slot][:, None].to(out.dtype))
        return out.to(x.dtype)


class MoE(nn.Module):
    def __init__(self, model):
        super().__init__()
        shared = model["moe"]["shared_experts"] * model["moe"]["expert_width"]
        self.router, self.experts = Router(model), Experts(model)
        self.shared = FeedForward(model, shared) if shared else None

    def forward(self, x):
        flat = x.flatten(0, 1)
        y = self.experts(flat, *self.router(flat)).view_as(x)
        return y if self.shared is None else y + self.shared(x)


class Attention(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.heads, self.kv_heads = model["heads"], model["kv_heads"] or model["heads"]
        self.head_dim = model["width"] // self.heads
        self.qkv = nn.Linear(model["width"], (self.heads + 2 * self.kv_heads) * self.head_dim, bias=model["bias"])
        self.query_norm = Norm(model, self.head_dim) if model["qk_norm"] else nn.Identity()
        self.key_norm = Norm(model, self.head_dim) if model["qk_norm"] else nn.Identity()
        self.output = nn.Linear(model["width"], model["width"], bias=model["bias"])

    def forward(self, x, cos, sin, allowed, want_maps):
        B, L, _ = x.shape
        parts = self.qkv(x).view(B, L, -1, self.head_dim).transpose(1, 2).split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k, v = _rotate(self.query_norm(parts[0]), cos, sin), _rotate(self.key_norm(parts[1]), cos, sin), parts[2]
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, dim=1) for y in (k, v))
        maps = None
        if want_maps:
            scores = (q @ k.transpose(2, 3) / self.head_dim**0.5).masked_fill(~allowed, torch.finfo(q.dtype).min)
            maps = scores.softmax(-1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed) if maps is None else maps @ v
        return self.output(out.transpose(1, 2).flatten(2)), maps


class Block(nn.Module):
    def __init__(self, model, layer):
        super().__init__()
        moe = model["moe"]
        self.attention_norm, self.attention = Norm(model, model["width"]), Attention(model)
        self.ffn_norm = Norm(model, model["width"])
        self.ffn = MoE(model) if moe and layer >= moe["dense_layers"] else FeedForward(model, _dense_width(model))

    def forward(self, x, cos, sin, allowed, want_maps):
        attended, maps = self.attention(self.attention_norm(x), cos, sin, allowed, want_maps)
        x = x + attended
        return x + self.ffn(self.ffn_norm(x)), maps


class Rotary(nn.Module):
    def __init__(self, model):
        super().__init__()
        head_dim = model["width"] // model["heads"]
        self.register_buffer("inverse_frequency", 1.0 / model["rope_base"] ** (torch.arange(0, head_dim, 2).float() / head_dim))

    def forward(self, positions):
        angles = positions[:, None, :, None].to(self.inverse_frequency.dtype) * self.inverse_frequency
        return angles.cos(), angles.sin()


class Head(nn.Module):
    def __init__(self, config):
        super().__init__()
        model, D = config.model, config.model["width"]
        encoder = model["kind"] == "encoder"
        self.dense = nn.Linear(D, D, bias=model["bias"]) if encoder else None
        self.norm = Norm(model, D) if encoder else None
        self.bias = nn.Parameter(torch.zeros(config.vocab_size)) if encoder else None
        self.decoder = None if model["tie_head"] else nn.Linear(D, config.vocab_size, bias=False)

    def forward(self, x, embedding):
        if self.dense is not None:
            x = self.norm(F.gelu(self.dense(x)))
        return F.linear(x, embedding if self.decoder is None else self.decoder.weight, self.bias)


class BmoePreTrainedModel(PreTrainedModel):
    config_class = BmoeConfig
    base_model_prefix = "bmoe"
    main_input_name = "input_ids"
    _no_split_modules = ["Block"]
    _keep_in_fp32_modules_strict = ["router", "rotary"]
    _supports_sdpa = True

    def _init_weights(self, module):
        std = (2.0 / (5.0 * self.config.model["width"])) ** 0.5
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim > 1 and not name.endswith("bias"):
                nn.init.normal_(parameter, std=std)


class BmoeModel(BmoePreTrainedModel):
    """The stack without the head: last hidden state after the final norm."""

    def __init__(self, config):
        super().__init__(config)
        model = config.model
        self.embedding = nn.Parameter(torch.zeros(config.vocab_size, model["width"]))
        self.rotary = Rotary(model)
        self.blocks = nn.ModuleList(Block(model, layer) for layer in range(model["layers"]))
        self.final_norm = Norm(model, model["width"])
        self.post_init()

    def forward(self, input_ids, attention_mask=None, output_hidden_states=False, output_attentions=False, **_):
        """`hidden_states`: embeddings, then each block's output, the last after the final norm. `attentions`: softmax maps
        [B, H, L, L] of each block."""
        real = input_ids != self.config.pad_token_id if attention_mask is None else attention_mask.bool()
        positions = (real.long().cumsum(1) - 1).clamp(min=0)
        cos, sin = self.rotary(positions)
        allowed = real[:, None, None, :]
        if self.config.model["kind"] == "decoder":
            L = input_ids.shape[1]
            causal = torch.ones(L, L, dtype=torch.bool, device=input_ids.device).tril()
            allowed = (allowed & causal) | torch.eye(L, dtype=torch.bool, device=input_ids.device)  # a pad row needs some key
        x = self._embed(input_ids, real)
        states, maps = [x], []
        for block in self.blocks:
            x, attended = block(x, cos, sin, allowed, output_attentions)
            states.append(x)
            maps.append(attended)
        states[-1] = self.final_norm(x)
        return BaseModelOutput(
            last_hidden_state=states[-1],
            hidden_states=tuple(states) if output_hidden_states else None,
            attentions=tuple(maps) if output_attentions else None,
        )

    def _embed(self, input_ids, real):
        """ESM-2's token dropout: `<mask>` is zero, the rest of a sequence scaled by (1 - 0.12) / (1 - its share of `<mask>`)."""
        model, x = self.config.model, F.embedding(input_ids, self.embedding)
        hidden = ~real | (input_ids == self.config.pad_token_id)
        if model["kind"] == "decoder" or not model["token_dropout"]:
            return x.masked_fill(hidden[:, :, None], 0.0)
        masks = (input_ids == self.config.mask_token_id) & ~hidden
        kept = (~hidden & ~masks).sum(1, keepdim=True)
        seen = kept + masks.sum(1, keepdim=True)
        scale = torch.where(kept > 0, (1.0 - TRAINING_MASK_SHARE) * seen / kept, 1.0).to(_wide(x).dtype)
        return (_wide(x) * scale.masked_fill(hidden | masks, 0.0)[:, :, None]).to(x.dtype)


class BmoeForMaskedLM(BmoePreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.bmoe, self.head = BmoeModel(config), Head(config)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, labels=None, output_hidden_states=False, output_attentions=False, **_):
        """`labels`: the right token at targets, -100 elsewhere."""
        out = self.bmoe(input_ids, attention_mask, output_hidden_states, output_attentions)
        logits = self.head(out.last_hidden_state, self.bmoe.embedding)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=out.hidden_states, attentions=out.attentions)


class BmoeForCausalLM(BmoePreTrainedModel, GenerationMixin):
    """No key-value cache: each generated token reads the whole sequence again."""

    def __init__(self, config):
        super().__init__(config)
        self.bmoe, self.head = BmoeModel(config), Head(config)
        self.post_init()

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **_):
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(self, input_ids, attention_mask=None, labels=None, output_hidden_states=False, output_attentions=False, **_):
        """`labels`: the input itself, -100 where it is no target; shifted here."""
        out = self.bmoe(input_ids, attention_mask, output_hidden_states, output_attentions)
        logits = self.head(out.last_hidden_state, self.bmoe.embedding)
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits, hidden_states=out.hidden_states, attentions=out.attentions)


def _wide(x):
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _dense_width(model):
    width = model["width"]
    return model["ffn_width"] or (4 * width if model["ffn"] == "gelu" else -(-8 * width // 192) * 64)


def _activate(h, gelu):
    if gelu:
        return F.gelu(h)
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


def _rotate(x, cos, sin):
    low, high = _wide(x).chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
