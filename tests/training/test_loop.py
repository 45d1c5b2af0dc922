"""The step of the training loop against its formula, written out: losses, gradients, statistics, utilisation."""

from pathlib import Path

import numpy as np
import pytest
import torch

from bmoe import recipe as recipes
from bmoe.data.alphabet import alphabet
from bmoe.data.loader import build_batch, build_sampler
from bmoe.data.sampler import Position
from bmoe.jobs.train import utilisation
from bmoe.model import counts
from bmoe.parallel.world import World
from bmoe.training import setup
from bmoe.training.loop import Trainer
from bmoe.training.state import Progress
from bmoe.training.stopping import Limits, Stopping
from tests_fakes import Memory, proteins

BALANCE, Z = 0.3, 0.07


class Silent:
    def record(self, record): ...
    def note(self, text): ...


def make(tmp_path: Path, **moe):
    recipe = recipes.validate({
        "data": {"max_length": 48, "tokens_per_batch": 128},
        "model": {"layers": 3, "width": 16, "heads": 2, "moe": {
            "experts": 4, "top_k": 2, "expert_width": 8, "dense_layers": 1, "balance_loss": BALANCE, "z_loss": Z, **moe}},
        "training": {"tokens_per_step": 256, "steps": 4}, "precision": {"kind": "fp32"}, "optimizer": {"clip_norm": None},
    })  # fmt: skip
    world, shards = World(torch.device("cpu")), Memory(proteins(40, 3, 90))
    recipe, _ = setup.resolve(recipe, world)
    model = setup.build_model(recipe, shards.alphabet, world.device).double()
    optimizer = setup.build_optimizer(model, recipe, world)
    trainer = Trainer(recipe, tmp_path, shards, model, optimizer, world, Progress(), Silent(), dict, lambda *_: None)
    stream = build_sampler(shards, recipe, 0).batches(Position(0, 0), 128)
    batches = [build_batch(shards, next(stream)[0], recipe, 0) for _ in range(2)]
    return trainer, batches


def step_gradients(trainer: Trainer, batches: list, monkeypatch) -> tuple:
    """The sums of a step, and the gradients that reached the optimizer."""
    seen = {}

    def keep(lr):
        seen.update({name: p.grad.clone() for name, p in trainer.model.named_parameters()})
        return torch.zeros(())

    monkeypatch.setattr(trainer.optimizer, "step", keep)
    sums, _, totals = trainer._step(batches, 0.1, 1, Stopping(Limits(), trainer.world))
    return sums, totals, seen


def test_loss_and_gradients_are_the_formula(tmp_path, monkeypatch):
    """sum of CE / targets of the step + sum over batches of (real tokens / all) (cb sum_l balance + cz sum_l z)."""
    trainer, batches = make(tmp_path)
    assert len({int(b.real_tokens) for b in batches}) == 2 and len({b.targets for b in batches}) == 2  # unequal weights
    sums, totals, seen = step_gradients(trainer, batches, monkeypatch)

    model = trainer.model
    model.zero_grad()
    targets = sum(int((b.targets_T >= 0).sum()) for b in batches)
    tokens = sum(int((b.tokens_T != 1).sum()) for b in batches)
    entropy, balance, z, loads = 0.0, 0.0, 0.0, 0.0
    for b in batches:
        inputs = b.model_inputs() | {"select_M": None}
        out = model(**inputs)
        asked = b.targets_T >= 0
        log_p = out.logits[asked].log_softmax(-1)
        entropy = entropy - log_p[torch.arange(len(log_p)), b.targets_T[asked]].sum() / targets
        share = int((b.tokens_T != 1).sum()) / tokens
        balance, z, loads = balance + share * out.balance_L, z + share * out.z_L, loads + out.counts_LE
    (entropy + BALANCE * balance.sum() + Z * z.sum()).backward()

    assert totals.tolist()[:3] == [targets, tokens, sum(b.residues for b in batches)]
    assert sums.loss.item() == pytest.approx(entropy.item(), rel=1e-12)
    assert torch.allclose(sums.balance_L, balance, rtol=1e-12) and torch.allclose(sums.z_L, z, rtol=1e-12)
    assert torch.equal(sums.counts_LE, loads) and int(loads.sum()) == 2 * 2 * tokens  # 2 MoE layers, top 2
    for name, p in model.named_parameters():
        assert torch.allclose(seen[name], p.grad, rtol=1e-10, atol=1e-14), name
    assert all(seen[n].abs().sum() > 0 for n in seen if "router" in n)


def test_the_bias_moves_once_a_step_towards_idle_experts(tmp_path, monkeypatch):
    trainer, batches = make(tmp_path, bias_update=0.01)
    sums, _, _ = step_gradients(trainer, batches, monkeypatch)
    for layer, load_E in zip(trainer.model.moe_layers, sums.counts_LE, strict=True):
        bias_E = trainer.model.blocks[layer].ffn.router.selection_bias
        assert torch.allclose(bias_E, 0.01 * torch.sign(load_E.mean() - load_E).to(bias_E))


def test_jitter_keys_differ_between_all_batches_of_a_run(tmp_path):
    trainer, _ = make(tmp_path, jitter=0.1)
    keys = [trainer._jitter_key(step, number) for step in range(50) for number in range(2)]
    assert len(set(keys)) == 100


@pytest.mark.parametrize("name", ["genome_mixtral", "esm2_moe"])
def test_utilisation_counts_flops_once(name, monkeypatch):
    """One sequence of 1,024 tokens in a second, on a device of 1 FLOP/s: the FLOPs themselves, by hand."""
    recipe = recipes.load(recipes.shipped_directory() / f"{name}.yaml")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "test")
    monkeypatch.setattr(counts, "peak_flops", lambda _: 1.0)
    n, m, moe = 1024, recipe.model, recipe.model.moe
    letters = alphabet(recipe.data.alphabet).size
    head_dim, kv = m.width // m.heads, m.kv_heads or m.heads
    seen = n * n if m.kind == "encoder" else n * (n + 1) / 2  # (query, key) pairs
    layer = 2 * n * (2 * m.width**2 + 2 * m.width * kv * head_dim) + 4 * m.width * seen
    layer += 2 * n * (moe.top_k * 3 * m.width * moe.expert_width + moe.experts * m.width)
    rows = 150
    head = 2 * rows * (m.width * letters + (m.width**2 if m.kind == "encoder" else 0))
    found = utilisation(recipe, letters, torch.device("cuda"), 1)([rows, n, n - 2, n * n], 1.0)
    assert found == pytest.approx(3 * (m.layers * layer + head), rel=1e-9)


def test_expert_biases_are_no_matrices():
    recipe = recipes.validate({
        "model": {"layers": 1, "width": 16, "heads": 2, "bias": True, "norm": "layernorm", "ffn": "gelu",
                  "moe": {"experts": 4, "top_k": 2, "expert_width": 8}},
        "data": {"max_length": 48, "tokens_per_batch": 128}, "training": {"tokens_per_step": 128},
    })  # fmt: skip
    world = World(torch.device("cpu"))
    recipe, _ = setup.resolve(recipe, world)
    model = setup.build_model(recipe, alphabet("protein"), world.device)
    optimizer = setup.build_optimizer(model, recipe, world)
    narrow = {name for name, p in model.named_parameters() if p.dtype == torch.bfloat16}
    assert narrow == {name for name, p in model.named_parameters() if p.ndim >= 2 and "bias" not in name and "router" not in name}
    for p in model.parameters():
        p.data.fill_(1.0)
        p.grad = torch.zeros_like(p)
    for name, low in optimizer.low.items():
        low.zero_()
        assert name in narrow
    optimizer.step(0.5)
    decayed = {name for name in optimizer.parameters if not np.isclose(optimizer.master(name).mean().item(), 1.0)}
    assert decayed == narrow | {name for name, _ in model.named_parameters() if "router.weight" in name}
