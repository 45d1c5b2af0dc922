"""Hugging Face's side of a ratio: the same tokens in every form, the same number of parameters as a Mixtral of ours."""

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from bmoe.errors import RequestError
from bmoe.model.attention import attention
from bmoe.parallel.world import World
from bmoe.profiling import baseline, race
from bmoe.profiling.measure import loader
from bmoe.profiling.synthetic import SyntheticShards

CPU = torch.device("cpu")
transformers = pytest.importorskip("transformers")


@pytest.fixture
def decoder(recipe_of):
    """A recipe whose crops differ in length: some have <cls>, some <eos>, some both."""
    data, training = {"max_length": 200, "tokens_per_batch": 1024}, {"tokens_per_step": 1024}
    return recipe_of(model={"kind": "decoder"}, objective={"kind": "clm"}, data=data, training=training)


def real_ids(feed) -> list[int]:
    """The tokens that a form shows, without its padding."""
    ids, mask, bounds = feed.inputs["input_ids"], feed.inputs.get("attention_mask"), feed.inputs.get("cu_seq_lens_q")
    if bounds is not None:
        return ids[0, : feed.tokens].tolist()
    return (ids if mask is None else ids[mask == 1]).flatten().tolist()


def test_every_form_holds_the_same_tokens(decoder):
    shards, letters = SyntheticShards(decoder), SyntheticShards(decoder).alphabet
    rows = [row for batch in baseline.sequences(decoder, shards, 4) for row in batch]
    tokens = sorted(np.concatenate(rows).tolist())
    residues = sum(token not in (letters.cls_id, letters.eos_id) for token in tokens)
    fill = {}
    for form in baseline.FORMS:
        feeds = baseline.feeds(decoder, shards, form, 4, World(CPU))
        seen = sorted(token for feed in feeds for token in real_ids(feed))
        assert sum(feed.tokens for feed in feeds) == len(seen) and sum(feed.slots for feed in feeds) >= len(seen)
        assert all(feed.slots == feed.inputs["input_ids"].numel() for feed in feeds)
        fill[form] = len(seen) / sum(feed.slots for feed in feeds)
        if form == "padded":  # the same number of sequences in each rectangle, so that some may be left over
            assert len({feed.slots for feed in feeds}) == 1 and set(seen) <= set(tokens) and len(seen) > 0.8 * len(tokens)
        else:
            assert seen == tokens and sum(feed.residues for feed in feeds) == residues
            assert all(feed.slots <= decoder.data.tokens_per_batch for feed in feeds)
    assert fill["padded"] <= fill["bucketed"] and fill["flattened"] > 0.75


def test_ranks_share_the_passes(decoder):
    shards = SyntheticShards(decoder)
    for form in ("bucketed", "flattened"):
        alone = baseline.feeds(decoder, shards, form, 6, World(CPU))
        shared = [baseline.feeds(decoder, shards, form, 2, World(CPU, rank, 3)) for rank in range(3)]
        assert len({len(feeds) for feeds in shared}) == 1
        dealt = [real_ids(feeds[i]) for i in range(len(shared[0])) for feeds in shared]
        assert dealt == [real_ids(feed) for feed in alone][: len(dealt)] and len(alone) - len(dealt) < 3


@pytest.mark.parametrize("form", [*baseline.FORMS, "flash"])
def test_no_form_lets_sequences_see_each_other(decoder, form, monkeypatch):
    """The logits of a sequence are those it has alone, also through the variable-length interface (the kernel needs a GPU;
    here it is its definition), and no target crosses from one sequence to the next."""

    def varlen(q, k, v, bounds, _, longest, __, **options):
        assert options in ({"window_size": (-1, 0)}, {"is_causal": True})
        return attention(q, k, v, bounds, longest, causal=True, kind="sdpa")

    monkeypatch.setattr(baseline, "varlen_attn", varlen)
    model = baseline.mixtral(decoder, 33, "hf-loop", CPU).eval()
    rows = [np.arange(5, 5 + n) % 20 + 4 for n in (90, 17, 30)]
    rectangles = {"padded": [baseline._rectangle(rows, 200)]}
    rectangles["bucketed"] = [baseline._rectangle(group, width) for group, width in baseline._buckets(rows, 200, 200)]
    inputs = rectangles.get(form) or [baseline._flat(rows, 150, 200)]
    if form == "flash":
        model.config._attn_implementation = baseline.VARLEN
    plain, found = baseline.mixtral(decoder, 33, "hf-loop", CPU).eval(), []
    with torch.no_grad():
        alone = {row.size: plain(input_ids=torch.from_numpy(row)[None]).logits[0] for row in rows}
        for part in inputs:
            kept = {k: v for k, v in part.items() if form == "flash" or k not in ("cu_seq_lens_q", "max_length_q")}
            logits = model(**kept).logits
            if form in rectangles:
                lengths = (part["labels"] != baseline.NO_TARGET).sum(1).tolist()
                found += [logits[i, :n] for i, n in enumerate(lengths)]
            else:
                found += [logits[0, start : start + row.size] for row, start in zip(rows, (0, 90, 107), strict=True)]
                assert part["labels"][0, [0, 90, 107]].eq(baseline.NO_TARGET).all() and part["labels"][0, 137:].eq(baseline.NO_TARGET).all()
    assert len(found) == 3
    for logits in found:
        assert torch.allclose(logits, alone[logits.shape[0]], atol=1e-5)


def loads_of_theirs(model, feed) -> torch.Tensor:
    counts = []
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda _, inputs: counts.append(inputs[1].flatten().bincount(minlength=4)))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(**{k: v for k, v in feed.inputs.items() if k not in ("cu_seq_lens_q", "max_length_q")})
    for hook in hooks:
        hook.remove()
    return torch.stack(counts)


def test_balanced_routing_loads_every_expert_alike(decoder, build):
    shards, forced = SyntheticShards(decoder), baseline.Forced(CPU)
    subject, theirs = build(decoder, CPU), baseline.mixtral(decoder, 33, "hf-grouped", CPU)
    forced.install(subject.model)
    forced.install(theirs)
    with loader(subject, shards, CPU) as stream:
        (batch,) = stream.next().batches
    feed = baseline.feeds(decoder, shards, "flattened", 1, World(CPU))[0]
    natural, loads = subject.model(**batch.model_inputs()).counts_LE, loads_of_theirs(theirs, feed)
    forced.on.fill_(True)
    balanced, dealt = subject.model(**batch.model_inputs()).counts_LE, loads_of_theirs(theirs, feed)
    rows = int(batch.real_tokens) * decoder.model.moe.top_k
    assert balanced.sum(1).tolist() == natural.sum(1).tolist() == [rows, rows]
    assert (balanced - rows / 4).abs().max() < 1 < (natural - rows / 4).abs().max()
    assert (dealt - feed.slots * 2 / 4).abs().max() < 1 < (loads - feed.slots * 2 / 4).abs().max()


@pytest.mark.no_cover
def test_compiled_layers_follow_the_switch(decoder, build):
    """Compiled while it is off, and not compiled again."""
    shards, forced = SyntheticShards(decoder), baseline.Forced(CPU)
    with loader(build(decoder, CPU), shards, CPU) as stream:
        (batch,) = stream.next().batches
    feed = baseline.feeds(decoder, shards, "padded", 1, World(CPU))[0]
    ours, theirs = [build(decoder, CPU).model for _ in range(2)], [baseline.mixtral(decoder, 33, "hf-grouped", CPU) for _ in range(2)]
    for model in (*ours, *theirs):
        forced.install(model)
    programs = CompileCounter()
    for block in ours[1].blocks:
        block.compile(backend=programs)
    for index, layer in enumerate(theirs[1].model.layers):
        theirs[1].model.layers[index] = torch.compile(layer, backend=programs)
    seen, compiled = [], []
    for on in (False, True, False):
        forced.on.fill_(on)
        with torch.no_grad():
            logits = [[m(**batch.model_inputs()).logits for m in ours], [m(**feed.inputs).logits for m in theirs]]
        seen.append(logits)
        compiled.append(programs.frame_count)
        for plain, fast in logits:
            assert torch.allclose(plain, fast, atol=1e-5)
    assert all(not torch.allclose(off[0], on[0], atol=1e-3) for off, on in zip(*seen[:2], strict=True))
    assert compiled[0] == compiled[1] == compiled[2] > 0


def test_what_is_asked_for():
    assert baseline.wanted("hf", None, None, CPU) == (baseline.BASELINES[:2], baseline.FORMS, ("natural",))
    assert baseline.wanted("hf-loop", "padded,flattened", "balanced, natural", CPU) == (
        ("hf-loop",),
        ("padded", "flattened"),
        ("balanced", "natural"),
    )
    assert baseline.wanted("hf", None, None, torch.device("cuda")).baselines == baseline.BASELINES
    assert baseline.wanted(None, None, None, CPU) is None
    for flags, sentence in (
        (("jax", None, None), "--baseline jax: use hf for all, or one or more of hf-loop, hf-grouped, hf-grouped-compiled"),
        (("hf", "ragged", None), "--forms ragged: use one or more of flattened"),
        (("hf", None, "skewed"), "--routing skewed"),
        ((None, "padded", None), "add --baseline hf"),
        (("hf-grouped-compiled", None, None), "on the CPU use hf-grouped"),
    ):
        with pytest.raises(RequestError, match=sentence):
            baseline.wanted(*flags, CPU)


class Scripted:
    """A contestant that takes as long as it is told, and notes when it ran."""

    def __init__(self, name, forms, seconds, log):
        self.name, self.form_names, self.seconds, self.log, self.resident = name, forms, seconds, log, 0

    def steps(self, form, first):
        self.log.append((self.name, form, first))
        return [race.Step(s, 100, 90, 300 if form == "padded" else 100) for s in self.seconds]


def test_ratios_are_rates_of_residues_and_ours_runs_first():
    log = []
    ours, theirs = Scripted("bmoe-grouped", ("packed",), [0.5, 0.5], log), Scripted("hf-loop", ("padded",), [1.0, 3.0], log)
    lanes = race.race([ours], [theirs], ("natural",), lambda _: None, World(CPU))
    found = race.results_of(lanes, "bmoe-grouped")
    assert found["ratios"] == {"hf-loop padded natural": pytest.approx(4.0)}
    row = found["baseline"]["hf-loop padded natural"]
    assert row["step_s"] == 2.0 and row["residues_per_s"] == 45.0 and row["fill"] == pytest.approx(1 / 3)
    assert log == [(*lane, first) for first in (True, False) for lane in (("bmoe-grouped", "packed"), ("hf-loop", "padded"))]


def test_dense_recipes_have_no_such_baseline(recipe_of):
    with pytest.raises(RequestError, match="Mixture-of-Experts"):
        baseline.mixtral(recipe_of(model={"moe": None}), 33, "hf-loop", CPU)


@pytest.mark.no_cover
def test_compiled_layers_are_few_programs(recipe_of, monkeypatch):
    """One for flattened batches and one, with sizes that vary, for all rectangles: compiling takes longest of a comparison."""
    data, training = {"max_length": 1000, "tokens_per_batch": 2000}, {"tokens_per_step": 2000}  # no rectangle without padding
    recipe = recipe_of(model={"kind": "decoder"}, objective={"kind": "clm"}, data=data, training=training)
    programs, compile_ = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda layer: compile_(layer, backend=programs))
    torch.compiler.reset()
    counts = race.Counts(3, 2)
    theirs = baseline.HuggingFace("hf-grouped-compiled", recipe, SyntheticShards(recipe), baseline.FORMS, counts, World(CPU), None)
    compiled = []
    for form in baseline.FORMS:
        theirs.steps(form, first=True)
        compiled.append(programs.frame_count)
    assert compiled == [1, 2, 2]


def test_one_disturbed_pass_does_not_count():
    """On an H200 a baseline once took 125 ms a step in one of two passes and 77 in the other."""

    class Quiet:
        name, form_names, resident = "hf", ("padded",), 0

    lane = race.Lane(Quiet(), "padded", "natural")
    lane.passes = [[race.Step(seconds, 100.0, 98.0, 100.0)] * 10 for seconds in (0.0766, 0.1251, 0.0768)]
    assert len(lane.passes) == race.PASSES
    row = lane.row()
    assert row["step_s"] == pytest.approx(0.0768) and row["step_s_high"] == pytest.approx(0.1251)
