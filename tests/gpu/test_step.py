"""CUDA graphs of training steps: the same numbers as eager steps, no waiting for the device, whatever the batches' lengths."""

import pytest
import torch

from bmoe import recipe as recipes
from bmoe.data.alphabet import alphabet
from bmoe.data.loader import TrainingLoader
from bmoe.data.sampler import Position
from bmoe.jobs.train import build
from bmoe.kernels.fp8_gemm import why_not
from bmoe.parallel.world import World
from bmoe.recipe import OptimizerSection
from bmoe.training import setup
from bmoe.training.graphs import WARM_UP, Inputs
from bmoe.training.optimizer import AdamW
from bmoe.training.step import Stepper
from tests_fakes import RealLengths

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def stepper(graphs: bool, batches: int, compiled: bool = False, kind: str = "bf16", **model) -> Stepper:
    moe = {"experts": 8, "top_k": 2, "expert_width": 256, "bias_update": 0.001, **model.pop("moe", {})}
    recipe = recipes.validate(
        {
            "data": {"max_length": 512, "tokens_per_batch": 4096},
            "model": {"layers": 2, "width": 256, "heads": 4, "moe": moe, **model},
            "precision": {"kind": kind},
            "backend": {"graphs": graphs, "compile": compiled},
            "training": {"steps": 100, "tokens_per_step": 4096 * batches},
        }
    )
    world = World(torch.device("cuda", 0))
    resolved, _ = setup.resolve(recipe, world)
    return Stepper(resolved, *build(resolved, alphabet("protein"), world), world.device)


def run(subject: Stepper, steps: int, sync_free_from: int | None = None, rate: float = 1e-5) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    subject.model.train()
    jitter = subject.recipe.model.moe.jitter > 0
    with TrainingLoader(RealLengths(400), subject.recipe, Position(0, 0), pin=True) as loader:
        for step in range(steps):
            batches = loader.next().batches
            totals = torch.tensor([sum(b.targets for b in batches), sum(int(b.real_tokens) for b in batches), 0, 0])
            torch.cuda.set_sync_debug_mode("error" if sync_free_from is not None and step >= sync_free_from else "default")
            try:
                sums = None
                for number, batch in enumerate(batches):
                    part = subject.backward(batch, totals, step * 8 + number if jitter else None)
                    sums = part if sums is None else sums + part
                norm = subject.update(rate)
                subject.model.update_router_bias(sums.counts_LE, 0.001)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            losses.append(float(sums.loss))
            norms.append(float(norm))
    return losses, norms


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("moe", [{}, {"jitter": 0.01}], ids=["plain", "jitter"])
@pytest.mark.parametrize("batches", [1, 3])
def test_replayed_steps_equal_eager_ones(batches, moe, compiled):
    if compiled and moe:
        pytest.skip("one compiled case is enough")
    subjects = [stepper(graphs, batches, compiled, moe=moe) for graphs in (False, True)]
    start = {name: subjects[0].optimizer.master(name).clone() for name in subjects[0].optimizer.parameters}
    eager, replayed = (run(subject, 10) for subject in subjects)
    assert replayed[0] == pytest.approx(eager[0], rel=2e-3)  # bf16, and attention's backward adds in any order
    assert replayed[1] == pytest.approx(eager[1], rel=2e-2)
    moved, difference = 0.0, 0.0
    for name, before in start.items():
        first, second = (subject.optimizer.master(name).double() for subject in subjects)
        moved += float((first - before).square().sum())
        difference += float((first - second).square().sum())
    assert moved > 0 and difference < 0.2 * moved, (moved, difference)  # AdamW's first steps go by the sign of the least gradient


@pytest.mark.parametrize("compiled", [False, True])
def test_weights_held_in_fp8_follow_every_update(compiled):
    """Three batches a step: replayed and eager steps with weights quantised once a step, and eager ones that quantise in every
    pass, go the same way. At this rate stale weights would be seen at the second step."""
    if why_not(torch.device("cuda"), torch.bfloat16, 256, 256):
        pytest.skip("no FP8 products here")
    replayed, held, plain = (stepper(graphs, 3, compiled, "fp8_row") for graphs in (True, False, False))
    assert len(replayed.holders) == len(held.holders) == 2
    plain.holders = []
    expected = run(plain, 8, rate=1e-3)
    for subject in (held, replayed):
        losses, norms = run(subject, 8, rate=1e-3)
        assert losses == pytest.approx(expected[0], rel=5e-3) and norms == pytest.approx(expected[1], rel=0.1)
    assert replayed.graphs.update_graph is not None and expected[0][-1] < 0.97 * expected[0][0]


@pytest.mark.parametrize("batches", [1, 3])
def test_a_replayed_step_never_waits(batches):
    subject = stepper(True, batches, compiled=True)
    run(subject, 8, sync_free_from=4)
    assert subject.graphs.update_graph is not None


@pytest.mark.parametrize("batches", [1, 2, 3, 4])
def test_what_changes_from_step_to_step_reaches_a_replay(batches):
    """The count of steps, the learning rate and the key of the noise are read anew in every replay."""
    subject = stepper(True, batches, moe={"jitter": 0.1})
    run(subject, 12)  # a batch with more segments than any before starts a recording anew: leave it behind
    assert subject.graphs.update_graph is not None and int(subject.optimizer.attempted) == 12
    with TrainingLoader(RealLengths(400), subject.recipe, Position(0, 0), pin=True) as loader:
        step = loader.next().batches
    totals = torch.tensor([sum(b.targets for b in step), sum(int(b.real_tokens) for b in step), 0, 0])

    def moved_at(rate: float) -> bool:
        before = {name: subject.optimizer.master(name).clone() for name in subject.optimizer.parameters}
        for number, batch in enumerate(step):
            subject.backward(batch, totals, number)
        subject.update(rate)
        return any(not torch.equal(subject.optimizer.master(name), value) for name, value in before.items())

    assert not moved_at(0.0)
    losses = [[float(subject.backward(batch, totals, key).loss) for batch in step] for key in (1, 1, 2)]
    subject.update(0.0)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0] != pytest.approx(losses[2], rel=1e-5)
    assert moved_at(1e-3) and int(subject.optimizer.attempted) == 15


def test_an_eager_update_between_replays_changes_nothing_for_them():
    """Profiles take steps outside of the recording; the next replay must update with its own gradients again."""
    subject = stepper(True, 1)
    run(subject, 8)
    assert subject.graphs.update_graph is not None
    with TrainingLoader(RealLengths(400), subject.recipe, Position(0, 0), pin=True) as loader:
        batch = loader.next().batches[0]
    totals = torch.tensor([batch.targets, int(batch.real_tokens), 0, 0])
    subject.backward(batch, totals)
    before = float(subject.update(0.0))
    plain = Stepper(subject.recipe, subject.model, subject.optimizer, subject.device)
    plain.graphs = None
    plain.backward(batch, totals)
    plain.update(0.0)
    blocks = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(8)]  # where the eager gradients were
    subject.backward(batch, totals)
    assert float(subject.update(0.0)) == pytest.approx(before, rel=1e-3) and len(blocks) == 8


def test_a_batch_with_more_segments_is_recorded_anew():
    subject, eager = stepper(True, 1), stepper(False, 1)
    with TrainingLoader(RealLengths(400), subject.recipe, Position(0, 0), pin=True) as loader:
        batches = [loader.next().batches[0] for _ in range(WARM_UP + 2)]
    long = batches[0]
    wide = type(long)(**{**vars(long), "cu_seqlens": torch.cat([long.cu_seqlens, long.cu_seqlens[-1:].expand(640)])})
    for batch in (*batches, wide, *batches):
        totals = torch.tensor([batch.targets, int(batch.real_tokens), 0, 0])
        losses = [float(s.backward(batch, totals).loss) for s in (subject, eager)]
        norms = [float(s.update(1e-5)) for s in (subject, eager)]
        assert losses[0] == pytest.approx(losses[1], rel=2e-3) and norms[0] == pytest.approx(norms[1], rel=5e-2)
    assert subject.graphs.inputs.tensors["cu_seqlens"].numel() >= wide.cu_seqlens.numel()
    assert subject.graphs.batch_graph is not None


def test_a_non_finite_gradient_is_skipped_in_a_replay():
    subject = stepper(True, 1)
    with TrainingLoader(RealLengths(400), subject.recipe, Position(0, 0), pin=True) as loader:
        batches = [loader.next().batches[0] for _ in range(6)]
    for batch in batches:
        totals = torch.tensor([batch.targets, int(batch.real_tokens), 0, 0])
        subject.backward(batch, totals)
        subject.update(1e-3)
    before = {name: p.detach().clone() for name, p in subject.model.named_parameters()}
    with torch.no_grad():
        norm_weight = subject.model.final_norm.weight
        norm_weight[0] = torch.nan
    subject.backward(batches[0], totals)
    subject.update(1e-3)
    assert int(subject.optimizer.skipped) == 1
    for name, p in subject.model.named_parameters():
        assert name == "final_norm.weight" or torch.equal(p, before[name]), name


SIZES = {"embedding": (33, 96), "experts": (4, 128, 257), "router": (8, 96), "norm.weight": (96,), "one": (1, 1), "odd": (3, 5, 7)}


def optimizer(accumulate: bool, clip: float | None) -> AdamW:
    """Six parameters, bf16 but for the router and the norm; the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for name, shape in SIZES.items():
        value = torch.randn(shape, generator=generator)
        parameters.append((name, torch.nn.Parameter((value if name in ("router", "norm.weight") else value.bfloat16()).cuda())))
    return AdamW(parameters, OptimizerSection(clip_norm=clip), accumulate)


def give_gradients(subject: AdamW, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(p.shape, generator=generator).to(p.dtype).cuda() for p in subject.parameters.values()]
    torch.autograd.backward(list(subject.parameters.values()), gradients)


def everything(subject: AdamW) -> dict[str, torch.Tensor]:
    state = {f"{kind} {name}": value for kind in ("low", "m", "v") for name, value in getattr(subject, kind).items()}
    return state | {f"weight {name}": p.detach() for name, p in subject.parameters.items()}


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("batches", [1, 3])
def test_updates_are_the_same_plain_fused_and_replayed(batches, clip):
    """Fused and replayed updates never differ; a plain one has the same moments, and when clipped another last bit of the norm."""
    plain, eager, replayed = (optimizer(batches > 1, clip) for _ in range(3))
    plain.fused = None
    replayed.hold_gradients()
    norms, graph, memory = {}, None, [torch.empty_like(p) for p in replayed.parameters.values()]
    for step in range(6):
        for subject in (plain, eager, replayed):
            for batch in range(batches):
                give_gradients(subject, 10 * step + batch)
            subject.set_rate(1e-3 * (step + 1))
            if subject is replayed:
                if batches == 1:
                    for place, p in zip(memory, subject.parameters.values(), strict=True):
                        place.copy_(p.grad)
                        p.grad = place
                if step == 1:
                    subject.locate()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        norms[subject] = subject.update()
                if step:
                    graph.replay()
                    if batches == 1:
                        subject.clear()
                    continue
            norms[subject] = subject.update()
        assert torch.equal(norms[eager], norms[replayed])
        assert float(norms[plain]) == pytest.approx(float(norms[eager]), rel=1e-6)
        for name, value in everything(eager).items():
            assert torch.equal(value, everything(replayed)[name]), (step, name)
            if clip is None and name[:2] in ("m ", "v "):
                torch.testing.assert_close(everything(plain)[name], value, rtol=1e-5, atol=1e-7)
        for name in eager.parameters:
            torch.testing.assert_close(plain.master(name), eager.master(name), rtol=2e-5, atol=1e-5)
    assert int(replayed.attempted) == 6


@pytest.mark.parametrize("batches", [1, 3])
def test_an_eager_update_never_waits(batches):
    subject = optimizer(batches > 1, 1.0)
    for step in range(4):
        for batch in range(batches):
            give_gradients(subject, 10 * step + batch)
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            subject.step(1e-3)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_inputs_keep_what_a_batch_holds():
    subject = stepper(True, 1)
    with TrainingLoader(RealLengths(400), subject.recipe, Position(0, 0)) as loader:
        batch = loader.next().batches[0]
    totals = torch.tensor([batch.targets, int(batch.real_tokens), 0, 0])
    held = Inputs(batch, totals, 7, torch.device("cuda"))
    held.fill(batch, totals, 7)
    inputs, picked_M, on_device, key = held.arguments()
    n = batch.picked_M.numel()
    assert torch.equal(picked_M[:n].cpu(), batch.picked_M) and bool((picked_M[n:] == -100).all())
    assert torch.equal(inputs["select_M"][:n].cpu(), batch.select_M) and not inputs["select_M"][n:].any()
    m = batch.cu_seqlens.numel()
    assert torch.equal(inputs["cu_seqlens"][:m].cpu(), batch.cu_seqlens) and bool((inputs["cu_seqlens"][m:] == 4096).all())
    assert torch.equal(on_device.cpu(), totals) and int(key) == 7
