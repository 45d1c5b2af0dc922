"""What a user of packed batches relies on: batch mates, order, padding, recomputation and backends change nothing."""

import math

import pytest
import torch
import torch.nn.functional as F

SHAPES = {
    "dense ESM-2": {"ffn": "gelu", "norm": "layernorm", "bias": True, "moe": None},
    "encoder MoE": {},
    "encoder MoE, every option": {
        "norm": "layernorm",
        "bias": True,
        "qk_norm": True,
        "tie_head": False,
        "layers": 3,
        "moe": {"shared_experts": 1, "dense_layers": 1, "score": "sigmoid", "groups": 2, "groups_kept": 1, "top_k": 1},
    },
    "decoder MoE": {"kind": "decoder", "kv_heads": 2, "qk_norm": True},
    "decoder dense, untied": {"kind": "decoder", "moe": None, "tie_head": False, "ffn": "gelu"},
}


def loss_of(output):
    """Not the training loss, but one in which every logit and every statistic counts."""
    weights = torch.linspace(-1, 1, output.logits.numel(), dtype=output.logits.dtype).view_as(output.logits)
    return (output.logits * weights).sum()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_packed_is_alone_is_with_a_tail_in_any_order(shape, build, pack, proteins):
    model = build(**shape).double()
    sequences = proteins(9, 5, 14, 2)
    packed = model(**pack(sequences)).logits.split([9, 5, 14, 2])
    alone = [model(**pack([sequence])).logits for sequence in sequences]
    with_tail = model(**pack(sequences, tail=11)).logits[:30].split([9, 5, 14, 2])
    order = [2, 0, 3, 1]
    shuffled = model(**pack([sequences[i] for i in order])).logits.split([14, 9, 2, 5])
    for i in range(4):
        torch.testing.assert_close(packed[i], alone[i], rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(with_tail[i], alone[i], rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(shuffled[order.index(i)], alone[i], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gradients_of_a_packed_batch_are_the_sum_of_its_sequences_alone(shape, build, pack, proteins):
    model = build(**shape).double()
    sequences = proteins(9, 5, 14)

    def gradients(*batches):
        model.zero_grad()
        for batch in batches:
            output = model(**batch)
            F.cross_entropy(output.logits[: batch["real_tokens"]], batch["tokens_T"][: batch["real_tokens"]], reduction="sum").backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    alone = gradients(*(pack([sequence]) for sequence in sequences))
    for batch in (pack(sequences), pack(sequences, tail=7)):
        for name, gradient in gradients(batch).items():
            torch.testing.assert_close(gradient, alone[name], rtol=1e-9, atol=1e-9, msg=name)


def test_routing_losses_and_counts_ignore_the_tail(build, pack, proteins):
    model = build().double()
    sequences = proteins(9, 5, 14)
    plain, padded = model(**pack(sequences)), model(**pack(sequences, tail=20))
    torch.testing.assert_close(plain[1:], padded[1:])
    assert plain.counts_LE.sum(1).tolist() == [56.0, 56.0]  # 28 tokens x top 2

    def gradient(output):
        return torch.autograd.grad(output.balance_L.sum() + output.z_L.sum(), list(model.parameters()), allow_unused=True)

    for got, want in zip(gradient(padded), gradient(plain), strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_the_tail_takes_no_part_in_attention(build, pack, proteins, monkeypatch):
    """It costs nothing, and may be longer than `max_seqlen`, which bounds what the GPU kernel writes."""
    seen = []

    def record(q_THd, k_TGd, v_TGd, cu_seqlens, *_):
        seen.append(cu_seqlens.tolist())
        return q_THd

    monkeypatch.setattr("bmoe.model.attention.attention", record)
    build()(**pack(proteins(9, 5), tail=500))
    assert seen == [[0, 9, 14, 14]] * 2


def test_decoder_never_sees_the_future(build, pack, proteins):
    model = build(kind="decoder")
    (sequence,) = proteins(20)
    changed = sequence.clone()
    changed[12:] = 7
    before, after = model(**pack([sequence])).logits, model(**pack([changed])).logits
    torch.testing.assert_close(before[:12], after[:12], rtol=0, atol=1e-6)
    assert not torch.allclose(before[12:], after[12:])


def test_encoder_sees_the_future(build, pack, proteins):
    model = build()
    (sequence,) = proteins(20)
    changed = sequence.clone()
    changed[-2] = 7 if sequence[-2] != 7 else 8
    assert not torch.allclose(model(**pack([sequence])).logits[0], model(**pack([changed])).logits[0])


def test_absolute_position_does_not_matter(build, pack, proteins):
    """Rotary attention sees distances only."""
    model = build().double()
    batch = pack(proteins(15))
    moved = batch | {"positions_T": batch["positions_T"] + 500}
    torch.testing.assert_close(model(**batch).logits, model(**moved).logits, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_head_runs_on_selected_rows_only(kind, build, pack, proteins):
    model = build(kind=kind)
    batch, rows = pack(proteins(9, 5, 14), tail=3), torch.tensor([25, 0, 13])
    everything = model(**batch)
    chosen = model(**batch, select_M=rows)
    torch.testing.assert_close(chosen.logits, everything.logits[rows])
    assert model(**batch, select_M=rows[:0]).logits.shape == (0, 33)


def scales(model, batch):
    """What `_embed` multiplied each embedding with."""
    embedded = model._embed(batch["tokens_T"], batch["segments_T"], batch["cu_seqlens"])
    return embedded.norm(dim=1) / model.embedding[batch["tokens_T"]].norm(dim=1)


def test_token_dropout_is_per_sequence_and_counts_the_specials(build, pack):
    """<cls> M M A <eos> has r = 2/5; A <eos> has r = 0: scales 0.88 / 0.6 and 0.88."""
    model = build()
    batch = pack([torch.tensor([0, 32, 32, 5, 2]), torch.tensor([5, 2])], tail=2)
    expected = torch.tensor([0.88 / 0.6, 0, 0, 0.88 / 0.6, 0.88 / 0.6, 0.88, 0.88, 0, 0])
    torch.testing.assert_close(scales(model.eval(), batch), expected)
    torch.testing.assert_close(scales(model.train(), batch), expected)


def test_pads_within_a_sequence_do_not_count(build, pack):
    batch = pack([torch.tensor([0, 32, 5, 2, 1, 1])])
    torch.testing.assert_close(scales(build(), batch)[0], torch.tensor(0.88 / 0.75))


@pytest.mark.parametrize("options", [{"kind": "decoder"}, {"token_dropout": False}])
def test_without_token_dropout_embeddings_are_as_they_are(options, build, pack):
    torch.testing.assert_close(scales(build(**options), pack([torch.tensor([0, 32, 5, 2])])), torch.ones(4))


DIFFICULT = {
    "nothing but <mask>": torch.full((12,), 32),
    "one residue": torch.tensor([5]),
    "one residue over and over": torch.full((12,), 5),
    "one <mask>": torch.tensor([32]),
}


@pytest.mark.parametrize("sequence", DIFFICULT.values(), ids=DIFFICULT)
@pytest.mark.parametrize("kind", ["loop", "grouped"])
def test_difficult_batches_train(sequence, kind, build, pack):
    model = build(backend={"experts": kind})
    output = model(**pack([sequence, sequence], tail=3))
    (F.cross_entropy(output.logits[: 2 * len(sequence)], sequence.repeat(2)) + output.balance_L.sum() + output.z_L.sum()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", ["loop", "grouped"])
def test_a_batch_whose_every_token_prefers_one_expert_trains(kind, build, pack, proteins):
    model = build(backend={"experts": kind}, moe={"top_k": 1})
    for layer in model.moe_layers:
        model.blocks[layer].ffn.router.selection_bias[2] = 100.0
    output = model(**pack(proteins(9, 5)))
    (loss_of(output) + output.balance_L.sum()).backward()
    assert output.counts_LE.tolist() == [[0.0, 0.0, 14.0, 0.0]] * 2
    for layer in model.moe_layers:
        gradient = model.blocks[layer].ffn.experts.gate_up.grad
        assert gradient.isfinite().all() and gradient[2].any() and not gradient[[0, 1, 3]].any()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_weight_moves_in_the_first_step(shape, build, pack, proteins):
    """But for the experts that got no token: theirs are the only ones that stay."""
    model = build(**shape)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    output = model(**pack(proteins(40, 30, 50)))
    (loss_of(output) + output.balance_L.sum() + output.z_L.sum()).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    for name, parameter in model.named_parameters():
        if "experts" in name:
            counts_E = output.counts_LE[model.moe_layers.index(int(name.split(".")[1]))]
            assert [not torch.equal(new, old) for new, old in zip(parameter, before[name], strict=True)] == counts_E.gt(0).tolist(), name
        else:
            assert not torch.equal(parameter, before[name]), name


@pytest.mark.parametrize("mode", ["experts", "full"])
@pytest.mark.parametrize("kind", ["loop", "grouped"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_recomputation_changes_no_bit_and_counts_once(mode, kind, shape, build, pack, proteins):
    def run(recompute):
        model = build(backend={"recompute": recompute, "experts": kind}, **shape)
        calls = []
        for layer in model.moe_layers:
            model.blocks[layer].ffn.router.register_forward_hook(lambda *_: calls.append(1))
        output = model(**pack(proteins(9, 5, 14), tail=3))
        (loss_of(output) + output.balance_L.sum() + output.z_L.sum()).backward()
        assert len(calls) == len(model.moe_layers), "a second routing could choose other experts"
        return output, {name: parameter.grad for name, parameter in model.named_parameters()}

    (output, gradients), (again, recomputed) = run("none"), run(mode)
    assert torch.equal(output.counts_LE, again.counts_LE)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, recomputed[name]), name


def test_recomputation_keeps_less(build, pack, proteins):
    """Bytes saved for the backward pass fall with each mode."""

    def saved(recompute):
        model, seen = build(backend={"recompute": recompute}, layers=4, moe={"expert_width": 96}), {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t):
            output = model(**pack(proteins(100, 60)))
        total = sum(t.untyped_storage().nbytes() for t in seen.values())
        return total, output

    sizes = [saved(mode)[0] for mode in ("none", "experts", "full")]
    assert sizes[0] > 1.2 * sizes[1] > 1.2 * sizes[2]


def test_initial_weights_do_not_depend_on_the_implementation(build):
    first, second, other = build(0), build(0, backend={"experts": "grouped", "recompute": "full"}), build(1)
    assert first.state_dict().keys() == second.state_dict().keys()
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
    assert not torch.equal(first.embedding, other.embedding)


def test_initial_distribution(build):
    model = build(width=256, heads=4, layers=8, moe={"experts": 2, "expert_width": 64})
    model.initialize(3)
    small, block = math.sqrt(2 / (5 * 256)), model.blocks[3]
    for weight, std in (
        (model.embedding, small),
        (block.attention.qkv.weight, small),
        (block.attention.output.weight, small / 4),
        (block.ffn.experts.gate_up[0], small),
        (block.ffn.experts.down[1], small / 4),
        (block.ffn.router.weight, small),
    ):
        weight = weight.detach()
        assert abs(float(weight.std()) / std - 1) < 0.1 and abs(float(weight.mean())) < 0.1 * std
    assert block.ffn_norm.weight.eq(1).all() and model.head.bias.eq(0).all() and block.ffn.router.selection_bias.eq(0).all()
    assert not torch.equal(block.ffn.experts.gate_up[0], block.ffn.experts.gate_up[1])


def test_canonical_names(build):
    """Checkpoints are read by these names; a change of one breaks every checkpoint."""
    model = build(layers=2, bias=True, norm="layernorm", qk_norm=True, tie_head=False, moe={"dense_layers": 1, "shared_experts": 1})
    names = {name.replace("blocks.0.", "dense.").replace("blocks.1.", "moe.") for name in model.state_dict()}
    attention = ("attention_norm", "attention.qkv", "attention.query_norm", "attention.key_norm", "attention.output", "ffn_norm")
    layers = [f"{block}.{name}" for block in ("dense", "moe") for name in attention]
    layers += ["dense.ffn.gate_up", "dense.ffn.down", "moe.ffn.shared.gate_up", "moe.ffn.shared.down"]
    layers += ["final_norm", "head.dense", "head.norm"]
    expected = {f"{layer}.{part}" for layer in layers for part in ("weight", "bias")}
    expected |= {f"moe.ffn.experts.{name}" for name in ("gate_up", "down", "gate_up_bias", "down_bias")}
    expected |= {"moe.ffn.router.weight", "moe.ffn.router.selection_bias"}
    assert names == expected | {"embedding", "rotary.inverse_frequency", "head.bias", "head.decoder.weight"}


def test_bias_update_reaches_each_layer(build):
    model = build(layers=3, moe={"dense_layers": 1})
    assert model.moe_layers == [1, 2]
    model.update_router_bias(torch.tensor([[4.0, 0, 1, 1], [0, 0, 0, 8]]), rate=0.5)
    assert model.blocks[1].ffn.router.selection_bias.tolist() == [-0.5, 0.5, 0.5, 0.5]
    assert model.blocks[2].ffn.router.selection_bias.tolist() == [0.5, 0.5, 0.5, -0.5]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bf16_matrices_with_fp32_norms_biases_and_router(shape, build, pack, proteins):
    """The training set-up on GPUs; near the fp32 model where no expert changed hands."""
    exact, model = build(**shape), build(**shape)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "router" not in name and not name.endswith("_bias"):
            parameter.data = parameter.data.bfloat16()
    batch = pack(proteins(9, 5, 14), tail=2)
    output = model(**batch)
    assert output.logits.dtype == torch.bfloat16 and output.balance_L.dtype == torch.float32
    loss_of(output).backward()
    assert all(p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in model.parameters())
    if model.moe_layers:
        torch.testing.assert_close(output.balance_L, exact(**batch).balance_L, rtol=0.1, atol=0.1)
    else:
        torch.testing.assert_close(output.logits.float(), exact(**batch).logits, rtol=0.1, atol=0.1)


def test_real_tokens_as_a_tensor(build, pack, proteins):
    model, batch = build(), pack(proteins(9, 5), tail=4)
    torch.testing.assert_close(model(**batch), model(**batch | {"real_tokens": torch.tensor(14)}), rtol=0, atol=0)
