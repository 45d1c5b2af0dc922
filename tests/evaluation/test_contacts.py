"""Contact features and attention maps against Hugging Face's ESM-2, precision against a naive loop, and a planted signal."""

import gzip
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bmoe.data.alphabet import alphabet
from bmoe.errors import RequestError
from bmoe.evaluation import contacts
from bmoe.evaluation.attention_maps import Maps, _projected, attention_maps, turned
from bmoe.evaluation.contact_features import (
    NEAREST,
    _kernels_run,
    _places,
    features_at,
    from_maps,
    from_projections,
    pair_features,
    pairs_of,
)
from bmoe.evaluation.forward import packed, wrap
from bmoe.evaluation.structures import Chain
from bmoe.interop.esm2 import from_esm2
from bmoe.model.attention import Attention
from bmoe.model.transformer import Transformer, Vocabulary
from bmoe.recipe import BackendSection, ModelSection
from bmoe.training.setup import to_compute_dtype

CPU = torch.device("cpu")
DATA = Path(__file__).parent.parent / "data" / "structures"


def test_features_equal_the_contact_head_of_hugging_face():
    """Random ESM-2 weights and a random regression over all heads: same probabilities, so same maps, order and correction."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.EsmConfig(
        vocab_size=33, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, pad_token_id=1, mask_token_id=32,
        position_embedding_type="rotary", token_dropout=True, emb_layer_norm_before=False, layer_norm_eps=1e-5, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, initializer_range=0.3,
    )  # fmt: skip
    config._attn_implementation = "eager"  # the only one that returns its maps
    theirs = transformers.EsmForMaskedLM(config).eval()
    theirs.esm.contact_head.regression.weight.data.normal_(0, 3.0)
    weights, section = from_esm2(theirs.state_dict(), heads=4)
    model = Transformer(ModelSection.model_validate(section), Vocabulary(33, 1, 32), BackendSection())
    model.load_state_dict(weights, strict=False)
    letters = alphabet("protein")
    sequences = [wrap(letters, letters.encode(s)) for s in (b"MKTAYIAKQRQISFVKSHF", b"MSIQHFRVAL", b"GGGSLLKKEWYC", b"MKV")]
    regression = theirs.esm.contact_head.regression
    seen = []
    for maps in attention_maps(model.eval(), sequences, 30, CPU):
        pairs = [np.indices((size - 2,) * 2).reshape(2, -1) for size in maps.sizes]
        parts = features_at(maps, pairs).split([i.size for i, _ in pairs], dim=1)
        seen += list(zip(maps.numbers, parts, strict=True))
    assert sorted(number for number, _ in seen) == [0, 1, 2, 3] and seen[0][1].data_ptr() != seen[1][1].data_ptr()
    for number, features_AP in seen:
        row = torch.from_numpy(sequences[number])[None]
        inner = row.shape[1] - 2
        ours = torch.sigmoid(regression.weight[0] @ features_AP + regression.bias).view(inner, inner)
        with torch.no_grad():
            expected = theirs.predict_contacts(row, torch.ones_like(row))[0]
        assert ours.std() > 0.01
        assert torch.allclose(ours, expected, atol=1e-5)


def test_maps_of_a_decoder_look_back_only_and_group_their_heads(make_recipe, make_model, proteins):
    model = make_model(make_recipe("decoder", kv_heads=2))
    tokens = wrap(proteins.alphabet, proteins.sequence(0)[:20])
    (found,) = attention_maps(model, [tokens, tokens[:20]], 64, CPU)
    maps = found.values_ACnn
    assert found.numbers == [1, 0] and found.sizes == [20, 22]
    assert maps.shape == (12, 2, 22, 22) and torch.equal(maps.triu(1), torch.zeros_like(maps))
    assert torch.allclose(maps.sum(-1), torch.ones(12, 2, 22), atol=1e-6) and not maps[:, 0, :, 20:].any()
    assert torch.allclose(maps[:, 0, :20, :20], maps[:, 1, :20, :20], atol=1e-6)  # what comes later changes nothing


def test_layers_of_a_long_chain_may_come_one_after_the_other(folder, make_recipe, make_model, monkeypatch):
    model, letters = make_model(make_recipe("encoder")).eval(), alphabet("protein")
    chains = contacts.read_chains(folder)
    tokens = [wrap(letters, letters.encode(chain.sequence.encode())) for chain in chains]
    known = [chain.known() for chain in chains]
    together = pair_features(model, tokens, known, 1024, CPU)
    monkeypatch.setattr("bmoe.evaluation.attention_maps.FORMED", 1)
    seen = [maps.values_ACnn.shape[0] for maps in attention_maps(model, [wrap(letters, letters.encode(b"MKV" * 9))], 1024, CPU)]
    assert seen == [model.blocks[0].attention.heads] * len(model.blocks)
    for alone, whole in zip(pair_features(model, tokens, known, 1024, CPU), together, strict=True):
        assert alone.shape == whole.shape and torch.allclose(alone, whole, atol=1e-7)


@pytest.mark.parametrize(
    "kind, at_once",
    [("encoder", 2**32), ("encoder", 40_000), ("encoder", 1), ("decoder", 2**32)],
    ids=["all", "some", "a layer", "decoder"],
)
def test_kernels_give_the_features_of_the_maps(make_recipe, make_model, proteins, kind, at_once, monkeypatch):
    """Sequences around a tile's length, holes in them, one without pairs; sharp attention; all at once, some sequences, or some layers."""
    pytest.importorskip("triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr("bmoe.evaluation.contact_features.AT_ONCE", at_once)
    model = make_model(make_recipe(kind, **({"kv_heads": 2} if kind == "decoder" else {}))).to(device)
    if device.type == "cuda":
        to_compute_dtype(model)
    for block in model.blocks:
        block.attention.qkv.weight.data *= 3.0
    text = np.concatenate([proteins.sequence(number) for number in range(4)])
    tokens = [wrap(proteins.alphabet, text[begin : begin + n]) for begin, n in ((0, 62), (5, 63), (9, 20), (2, 9), (30, 7))]
    known = [np.random.default_rng(number).random(t.size - 2) < 0.7 for number, t in enumerate(tokens)]
    known[3][:] = False
    pairs = [pairs_of(part) for part in known]
    assert pairs[3][0].size == pairs[4][0].size == 0 < pairs[2][0].size
    found, expected = {}, {}
    for source, into in ((from_projections, found), (from_maps, expected)):
        for numbers, features_AP in source(model, tokens, known, 200, device):
            for number, part in zip(numbers, features_AP.split([pairs[n][0].size for n in numbers], dim=1), strict=True):
                into.setdefault(number, []).append(part)
    assert found.keys() == expected.keys() == set(range(5))
    assert len(found[0]) == (len(model.blocks) if at_once == 1 else 1)
    for number, parts in expected.items():
        torch.testing.assert_close(torch.cat(found[number]), torch.cat(parts), rtol=1e-4, atol=5e-6)
    assert torch.cat(expected[0]).std() > 0.01


@pytest.mark.parametrize(
    "device, dtype, width, runs",
    [("cuda", torch.bfloat16, 256, True), ("cuda", torch.bfloat16, 512, False), ("cuda", torch.float32, 256, False),
     ("cpu", torch.bfloat16, 256, False)],
)  # fmt: skip
def test_kernels_run_where_their_tiles_fit(device, dtype, width, runs):
    layer = Attention(width, 2, 2, False, False, None, "auto").to(dtype)
    assert _kernels_run(layer, torch.device(device)) is runs


@given(st.lists(st.integers(2, 300), min_size=1, max_size=4))
def test_tiles_cover_every_pair_of_a_sequence_once(sizes):
    """Against the pairs of blocks listed one by one."""
    pytest.importorskip("triton")
    from bmoe.kernels.contact_features import BLOCK, tables

    counts = [-(-size // BLOCK) for size in sizes]
    blocks, tiles = tables(np.array(sizes))
    assert blocks.T.tolist() == [[c, i] for c, count in enumerate(counts) for i in range(count)]
    assert tiles.T.tolist() == [[c, i, j] for c, count in enumerate(counts) for i in range(count) for j in range(i, count)]


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=5))
def test_pairs_are_numbered_row_by_row(known):
    """The places the kernels write to, against the pairs listed one by one."""
    known = [np.array(part) for part in known]
    before_T, rank_T, pairs_C = _places(known)
    assert (rank_T >= 0).sum() == sum(part.sum() for part in known)
    begin = place = 0
    for part, count in zip(known, pairs_C, strict=True):
        listed = [(i, j) for i in range(part.size) for j in range(i + NEAREST, part.size) if part[i] and part[j]]
        assert list(zip(*pairs_of(part), strict=True)) == listed and len(listed) == count
        for i, j in listed:
            assert before_T[begin + 1 + i] + rank_T[begin + 1 + j] == place
            place += 1
        begin += part.size + 2


@pytest.mark.parametrize("kind, more", [("encoder", {}), ("decoder", {"kv_heads": 2}), ("encoder", {"qk_norm": True})])
def test_a_pass_whose_queries_and_keys_are_kept_is_the_plain_one(make_recipe, make_model, proteins, kind, more):
    """The kernels and the maps read what this pass leaves, so they would not tell of an error in it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make_model(make_recipe(kind, **more)).to(device)
    if device.type == "cuda":
        to_compute_dtype(model)
    (batch,) = packed([wrap(proteins.alphabet, proteins.sequence(number)[:30]) for number in range(3)], 200, device)
    projected = []
    handle = model.blocks[1].attention.register_forward_pre_hook(lambda layer, arguments: projected.append(layer.project(*arguments)))
    with torch.no_grad():
        plain = model(**batch.inputs).logits.float()
        handle.remove()
        with _projected(model, int(batch.bounds[-1])) as qk_LTad:
            kept = model(**batch.inputs).logits.float()
    wide = {"rtol": 0.02, "atol": 0.02} if device.type == "cuda" else {"rtol": 1e-6, "atol": 1e-6}
    assert plain.std() > 0.01
    torch.testing.assert_close(kept, plain, **wide)
    ((q_THd, k_TGd, _),) = projected
    torch.testing.assert_close(qk_LTad[1], torch.cat([q_THd, k_TGd], dim=1), **wide)


@pytest.mark.parametrize("kv_heads", [None, 2])
def test_queries_and_keys_are_those_of_the_layer(make_recipe, make_model, proteins, kv_heads):
    pytest.importorskip("triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make_model(make_recipe("decoder" if kv_heads else "encoder", **({"kv_heads": kv_heads} if kv_heads else {}))).to(device)
    seen = []

    def compare(layer, arguments):
        qk_Tad = arguments[0].new_empty(arguments[0].shape[0], layer.heads + layer.kv_heads, layer.head_dim)
        v_TGd = turned(layer, *arguments, qk_Tad)
        seen.append(((*qk_Tad.split((layer.heads, layer.kv_heads), dim=1), v_TGd), layer.project(*arguments)))

    model.blocks[1].attention.register_forward_pre_hook(compare)
    (batch,) = packed([wrap(proteins.alphabet, proteins.sequence(number)[:30]) for number in range(3)], 200, device)
    with torch.no_grad():
        model(**batch.inputs)
    ((found, expected),) = seen
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape and theirs.std() > 0.01
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_precision_against_a_naive_loop():
    generator = np.random.default_rng(0)
    n = 60
    i, j = np.triu_indices(n, 6)
    score, contact = generator.random(i.size), generator.random(i.size) < 0.1
    assert contacts.RANGES == {"short": (6, 12), "medium": (12, 24), "long": (24, None)}  # Rao et al. 2021: 6-11, 12-23, 24 and more
    for low, high in contacts.RANGES.values():
        for top in (60, 30, 12):
            ranked = sorted(
                ((s, c) for a, b, s, c in zip(i, j, score, contact, strict=True) if low <= b - a and (high is None or b - a < high)),
                reverse=True,
            )
            naive = sum(c for _, c in ranked[:top]) / min(top, len(ranked))
            assert contacts.precision(i, j, score, contact, (low, high), top) == pytest.approx(naive)
    assert np.isnan(contacts.precision(i, j, score, contact, (100, None), 10))


@pytest.fixture
def folder(tmp_path):
    """Two unrelated real chains."""
    for path in DATA.glob("*.pdb.gz"):
        shutil.copy(path, tmp_path)
    return tmp_path


def test_a_model_that_attends_to_contacts_is_found_out(folder, make_recipe, make_model, monkeypatch):
    """Head 2 of each map holds the true contacts, the others noise: precision near 1, beyond the baseline; shuffled, not."""
    recipe, letters = make_recipe(), alphabet("protein")
    model = make_model(recipe)
    known = {len(c.sequence): c for c in contacts.read_chains(folder)}

    def planted(_model, sequences, _slots, _device):
        for number, tokens in enumerate(sequences):
            n = len(tokens) - 2
            maps = torch.rand(12, 1, n + 2, n + 2, generator=torch.Generator().manual_seed(n))
            maps[2, 0, 1:-1, 1:-1] += 2.0 * torch.from_numpy(known[n].contacts()).float()
            yield Maps([number], [n + 2], maps)

    monkeypatch.setattr("bmoe.evaluation.contact_features.attention_maps", planted)
    found = contacts.evaluate(model, recipe, letters, folder, CPU)
    assert found["chains"] == found["families"] == 2 and found["longer_than_trained"] == 0
    assert found["with_breaks"] == 1  # 1A8O without its selenomethionines
    assert found["long"]["p_at_l5"] > 0.95 > found["long"]["p_at_l5_by_separation"]
    assert {"p_at_l", "p_at_l_low", "p_at_l_high", "p_at_l2", "p_at_l5"} <= found["short"].keys()
    for shown in found["maps"]:
        true = {tuple(p) for p in shown["true"]}
        assert len(shown["predicted"]) == shown["length"] and len(true & {tuple(p) for p in shown["predicted"]}) > 0.5 * len(true)


def test_requests_that_cannot_be_met(folder, make_recipe, make_model):
    recipe = make_recipe()
    with pytest.raises(RequestError, match="proteins"):
        contacts.evaluate(make_model(recipe), recipe, alphabet("dna"), folder, CPU)
    for path in sorted(folder.glob("*.gz"))[1:]:
        path.unlink()
    with pytest.raises(RequestError, match="two families"):
        contacts.evaluate(make_model(recipe), recipe, alphabet("protein"), folder, CPU)


def test_a_chain_of_alpha_carbons_is_named(folder, make_recipe, make_model):
    lines = gzip.open(DATA / "1A8O_A.pdb.gz", "rt").read().splitlines()
    (folder / "trace.pdb").write_text("\n".join([x for x in lines if x[12:16] == " CA "][1:]))
    recipe = make_recipe()
    with pytest.raises(RequestError, match="trace:A has no two residues"):
        contacts.evaluate(make_model(recipe), recipe, alphabet("protein"), folder, CPU)


def test_a_range_without_pairs_has_no_precision_and_no_map(folder, make_recipe, make_model):
    """Of 34 residues the first 20 are seen: no pair is 24 apart, 91 of them at least 6."""
    for path in sorted(folder.glob("*.gz")):
        lines = [x for x in gzip.open(path, "rt").read().splitlines() if x.startswith("ATOM")]
        numbers = list(dict.fromkeys(x[22:27] for x in lines))[:34]
        seen = set(numbers[:20])
        kept = [x for x in lines if x[22:27] in seen or (x[22:27] in numbers and x[12:16] == " CA ")]
        path.with_suffix("").write_text("\n".join(kept))
        path.unlink()
    recipe = make_recipe()
    found = contacts.evaluate(make_model(recipe), recipe, alphabet("protein"), folder, CPU)
    assert found["maps"] == [] and all(np.isnan(value) for value in found["long"].values())
    assert np.isfinite(found["short"]["p_at_l"]) and all(len(c["chain"]) and np.isnan(c["long_p_at_l"]) for c in found["per_chain"])


def test_unknown_residues_are_no_pairs():
    text = gzip.open(DATA / "1A8O_A.pdb.gz", "rt").read()
    assert "CA" in text
    chain = Chain("x", "A" * 20, np.random.default_rng(0).normal(size=(20, 3, 3)) * 5)
    chain.backbone[3, 1] = np.nan
    i, j, contact = contacts.known_pairs(chain)
    assert 3 not in i and 3 not in j and contact.size == i.size and (j - i >= 6).all()


def test_no_relative_of_a_test_chain_is_trained_on(tmp_path, make_recipe, make_model, make_proteins, monkeypatch):
    """Three relatives and four strangers, told apart by their numbers of pairs: each is tested once, by weights of other families."""
    generator = np.random.default_rng(0)
    letters = list("ACDEFGHIKLMNPQRSTVWY")
    base = "".join(generator.choice(letters, 60))
    texts = [base, base + "GA", base + "GAGSG"] + ["".join(generator.choice(letters, n)) for n in (48, 50, 53, 57)]
    chains = [Chain(str(i), text, generator.normal(size=(len(text), 3, 3)) * 6) for i, text in enumerate(texts)]
    owner = {contacts.known_pairs(chain)[0].size: i for i, chain in enumerate(chains)}
    assert len(owner) == 7
    monkeypatch.setattr(contacts, "read_chains", lambda folder: chains)
    fit, probability = contacts.l1.fit, contacts.l1.probability
    trained, tested = [], []

    def fitted(features, *rest):
        trained.append([owner[len(part)] for part in features])
        return fit(features, *rest)

    def judged(features_PA, weights):
        tested.append((owner[len(features_PA)], trained[-1]))
        return probability(features_PA, weights)

    monkeypatch.setattr(contacts.l1, "fit", fitted)
    monkeypatch.setattr(contacts.l1, "probability", judged)
    recipe = make_recipe()
    found = contacts.evaluate(make_model(recipe), recipe, alphabet("protein"), tmp_path, CPU)
    assert found["families"] == 5 and sorted(chain for chain, _ in tested) == list(range(7))
    for chain, others in tested:
        related = {0, 1, 2} if chain < 3 else {chain}
        assert others and not related & set(others)
