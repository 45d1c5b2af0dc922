"""Routers of upcycled models: no expert without tokens on proteins they have not seen, the function kept."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from bmoe import recipe as recipes
from bmoe.data.loader import validation_batches
from bmoe.data.options import PrepareOptions
from bmoe.data.prepare import prepare
from bmoe.data.shards import Shards
from bmoe.interop.balance import balanced_routers, spread
from bmoe.interop.upcycle import upcycle
from bmoe.model.load import load_statistics
from bmoe.model.transformer import Transformer, Vocabulary
from bmoe.recipe import BackendSection, MoESection

PROTEINS = Path(__file__).parent.parent / "data" / "uniprot_500.fasta.gz"
VOCABULARY = Vocabulary(33, 1, 32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A dense ESM-2 of width 32 after 60 steps on real proteins, and batches of others: for the routers, and to judge them."""
    folder = tmp_path_factory.mktemp("proteins")
    prepare([PROTEINS], folder, PrepareOptions(valid_fraction=0.3))
    dense = {"layers": 2, "width": 32, "heads": 4, "norm": "layernorm", "ffn": "gelu", "bias": True, "ffn_width": 64, "moe": None}
    data = {"max_length": 256, "tokens_per_batch": 1024}
    recipe = recipes.validate({"data": data, "model": dense, "training": {"tokens_per_step": 1024}})
    model = Transformer(recipe.model, VOCABULARY, recipe.backend)
    model.initialize(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch in validation_batches(Shards(folder, "train"), recipe, 60 * 1024):
        loss = F.cross_entropy(model(**batch.model_inputs()).logits, batch.picked_M, ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 3.0  # of ln 33 = 3.5 at the start
    batches = [batch.model_inputs() for batch in validation_batches(Shards(folder, "valid"), recipe, 16 * 1024)]
    return model.eval(), recipe.model, batches[:8], batches[8:]


def built(weights, section) -> Transformer:
    model = Transformer(section, VOCABULARY, BackendSection(experts="loop"))
    model.load_state_dict(weights)
    return model.eval()


def loads(model, batches) -> tuple[float, int]:
    """Largest of all layers' busiest expert over the mean, and the experts of all layers that got nothing."""
    with torch.no_grad():
        counts_LE = sum(model(**batch).counts_LE for batch in batches)
    found = [load_statistics(counts_E.numpy()) for counts_E in counts_LE]
    return max(layer["load_max_over_mean"] for layer in found), sum(layer["dead_experts"] for layer in found)


@pytest.mark.parametrize(
    "moe", [{"experts": 32, "top_k": 2, "expert_width": 64}, {"experts": 64, "top_k": 4, "expert_width": 32}], ids=["copies", "split"]
)
def test_no_expert_is_dead_after_upcycling(trained, moe):
    """The seed's routers leave some dead (so that the test can fail); ours none, on other proteins, with loads far more even."""
    dense, section, batches, others = trained
    section = section.model_copy(update={"moe": MoESection(**moe), "ffn_width": None})
    weights = upcycle(dense.state_dict(), section, seed=0)
    routers = balanced_routers(weights, section, VOCABULARY, batches)
    plain, ours = built(weights, section), built(weights | routers, section)
    before, after = loads(plain, others), loads(ours, others)
    assert before[1] > 0 and after[1] == 0 and after[0] < 0.7 * before[0]
    assert loads(ours, batches)[0] < 1.7
    with torch.no_grad():
        expected, logits = dense(**others[0]).logits, ours(**others[0]).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    norms = [(routers[name].norm() / weights[name].norm()).item() for name in routers]
    assert len(norms) == 2 and max(norms) < 2.5  # scores stay nearly even, as at any start


def test_offsets_alone_make_a_shared_mean_harmless():
    """States with a mean of length 6 beside deviations of 1: by the seed's rows two of eight experts take nearly all."""
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(4000, 16, generator=generator, dtype=torch.float64)
    x_TD[:, 0] += 6.0
    rows_ED = torch.randn(8, 16, generator=generator, dtype=torch.float64)

    def load_E(rows):
        return torch.bincount((x_TD @ rows.T).topk(1, dim=-1).indices.flatten(), minlength=8) / 500

    ours = spread(x_TD, rows_ED, 1)
    assert load_E(rows_ED).max() > 2 and load_E(rows_ED).min() < 0.2
    assert 0.9 < load_E(ours).min() and load_E(ours).max() < 1.1
    change_ED = ours - rows_ED  # of rank one: an offset each along one direction
    assert torch.linalg.matrix_rank(change_ED) == 1
    assert torch.equal(spread(x_TD, rows_ED, 8), rows_ED)  # every expert is chosen: nothing to do
