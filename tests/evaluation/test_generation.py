"""Generation: the cache gives the logits of a pass without it, and samples follow the model's distribution."""

import numpy as np
import pytest
import torch

from bmoe.errors import RequestError
from bmoe.evaluation import generation

CPU = torch.device("cpu")


def whole(model, tokens) -> torch.Tensor:
    n = len(tokens)
    with torch.no_grad():
        return model(tokens, torch.arange(n), torch.zeros(n, dtype=torch.long), torch.tensor([0, n]).int(), n, n).logits


@pytest.mark.parametrize("options", [{}, {"kv_heads": 2, "qk_norm": True}, {"moe": None, "bias": True, "norm": "layernorm"}])
def test_cached_logits_equal_those_of_the_whole_sequence(make_recipe, make_model, options):
    model = make_model(make_recipe("decoder", **options))
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(4, 24, (5,), generator=generator)
    new = torch.randint(4, 24, (3, 12), generator=generator)  # three samples
    stream = generation.next_logits(model, prompt.numpy(), 3, 17, CPU)
    got = [next(stream)] + [stream.send(new[:, t]) for t in range(12)]
    for n in range(3):
        expected = whole(model, torch.cat([prompt, new[n]]))
        for t in range(13):
            assert torch.allclose(got[t][n], expected[4 + t], atol=1e-4), (n, t)
    assert "forward" not in vars(model.blocks[0].attention)  # the model is as it was


def test_first_tokens_follow_the_model(make_recipe, make_model, proteins):
    recipe, letters = make_recipe("decoder"), proteins.alphabet
    model = make_model(recipe, scale=3.0)
    start = torch.tensor([letters.cls_id, *letters.encode(b"MK").tolist()])
    chance = whole(model, start)[-1].softmax(-1)
    legal = torch.tensor([s.isalpha() or i == letters.eos_id for i, s in enumerate(letters.symbols)])
    chance = torch.where(legal, chance, 0) / chance[legal].sum()
    new = generation._sample(model, letters, start.numpy(), 4000, 4, 1.0, 0, CPU)[:, 0]
    number = np.bincount(new, minlength=letters.size)
    expected = 4000 * chance.numpy()
    live = expected > 5
    assert ((number[live] - expected[live]) ** 2 / expected[live]).sum() < live.sum() + 4 * np.sqrt(2 * live.sum())
    assert number[~legal.numpy()].sum() == 0


def test_samples_and_their_perplexity(make_recipe, make_model, proteins):
    recipe, letters = make_recipe("decoder"), proteins.alphabet
    model = make_model(recipe, scale=2.0)
    found = generation.evaluate(model, recipe, letters, device=CPU, samples=6, prompt="MKTA", longest=30)
    assert found["n"] == 6 and found["prompt"] == "MKTA"
    total, number = 0.0, 0
    for sample in found["samples"]:
        assert sample["sequence"].startswith("MKTA") and len(sample["sequence"]) == sample["length"] <= 29
        assert sample["ended"] or sample["length"] == 29
        tokens = [letters.cls_id, *letters.encode(sample["sequence"].encode()).tolist()] + [letters.eos_id] * sample["ended"]
        p = whole(model, torch.tensor(tokens)).log_softmax(-1)
        nats = [-p[i, tokens[i + 1]].item() for i in range(4, len(tokens) - 1)]
        assert sample["perplexity"] == pytest.approx(np.exp(np.mean(nats)), rel=1e-4)
        total, number = total + sum(nats), number + len(nats)
    assert found["perplexity"] == pytest.approx(np.exp(total / number), rel=1e-4)
    again = generation.evaluate(model, recipe, letters, device=CPU, samples=6, prompt="MKTA", longest=30)
    assert again == found


def test_a_cold_sample_is_the_most_probable_token(make_recipe, make_model, proteins):
    recipe, letters = make_recipe("decoder"), proteins.alphabet
    model = make_model(recipe)
    found = generation.evaluate(model, recipe, letters, device=CPU, samples=2, temperature=1e-4, longest=8)
    assert found["samples"][0] == found["samples"][1]


def test_top_k_keeps_the_k_likeliest_in_their_proportions():
    """By hand: chances 0.4, 0.3, 0.2, 0.1; the second banned; of the best two of the others 2/3 and 1/3."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    banned = torch.tensor([False, True, False, False])
    assert torch.allclose(generation.chances(logits, banned, 1.0, 2), torch.tensor([[2 / 3, 0, 1 / 3, 0]]))
    assert torch.allclose(generation.chances(logits, banned, 1.0, 9), torch.tensor([[4 / 7, 0, 2 / 7, 1 / 7]]))
    assert torch.allclose(generation.chances(logits, banned, 0.5, None), torch.tensor([[16 / 21, 0, 4 / 21, 1 / 21]]))


def test_requests_that_cannot_be_met(make_recipe, make_model, proteins):
    recipe, letters = make_recipe("decoder"), proteins.alphabet
    model = make_model(recipe)
    wrong = [("letter.*leave it out", {"prompt": "MKJ"}), ("no room", {"prompt": "M" * 200}), ("at least one", {"samples": 0})]
    wrong += [("temperature", {"temperature": value}) for value in (0.0, float("nan"))] + [("top-k", {"top_k": 0})]
    for words, more in wrong:
        with pytest.raises(RequestError, match=words):
            generation.evaluate(model, recipe, letters, device=CPU, **{"samples": 1, **more})
    encoder = make_recipe()
    with pytest.raises(RequestError, match="decoders.*leave --generate out"):
        generation.evaluate(make_model(encoder), encoder, letters, device=CPU, samples=1)


def test_a_model_of_no_numbers_is_refused(make_recipe, make_model, proteins):
    recipe = make_recipe("decoder")
    model = make_model(recipe)
    with torch.no_grad():
        model.embedding.fill_(torch.nan)
    with pytest.raises(RequestError, match="logits that are no numbers"):
        generation.evaluate(model, recipe, proteins.alphabet, device=CPU, samples=1)


def test_the_coldest_draw_is_the_likeliest_letter():
    found = generation.chances(torch.tensor([[1.0, 3.0, 2.0, 9.0]]), torch.tensor([False, False, False, True]), 1e-300, None)
    assert found.tolist() == [[0, 1, 0, 0]]
