"""Marks: every part is named, time is neither lost nor counted twice, and the model is left as it was."""

import pytest
import torch

from bmoe.profiling import measure
from bmoe.profiling.synthetic import SyntheticShards
from bmoe.profiling.timeline import Timeline, attached

CPU = torch.device("cpu")


def marked_step(subject, shards):
    timeline = Timeline(CPU)
    with measure.loader(subject, shards, CPU) as loader:
        batches = loader.next().batches
    with attached(subject.model, timeline):
        measure.training_step(subject, batches, CPU, timeline)
    return timeline


@pytest.mark.parametrize("experts", ["loop", "grouped"])
def test_every_part_has_a_forward_and_a_backward(recipe_of, build, experts):
    recipe = recipe_of(
        model={"layers": 3, "moe": {"experts": 4, "expert_width": 32, "shared_experts": 1, "dense_layers": 1}}, backend={"experts": experts}
    )
    timeline = marked_step(build(recipe, CPU), SyntheticShards(recipe))
    seconds = timeline.seconds()
    parts = {"embedding", "norms", "attention", "router", "dispatch", "experts gemm 1", "experts activation", "experts gemm 2", "combine",
             "shared expert", "ffn", "head + loss"}  # fmt: skip
    assert {key for key in seconds} == {(p, phase) for p in parts for phase in ("forward", "backward")} | {("optimizer", "forward")}
    assert all(value >= 0 for value in seconds.values())


def test_parts_add_up_to_the_whole(recipe_of, build):
    recipe = recipe_of()
    timeline = marked_step(build(recipe, CPU), SyntheticShards(recipe))
    gaps = sum(b[1] - a[1] for a, b in zip(timeline.marks, timeline.marks[1:], strict=False) if a[0] is None)
    whole = timeline.marks[-1][1] - timeline.marks[0][1]
    assert sum(timeline.seconds().values()) + gaps == pytest.approx(whole)


def test_time_goes_where_the_work_is(recipe_of, build):
    """Wider experts take a larger share, forward and backward."""
    shares = []
    for width in (32, 2048):
        recipe = recipe_of(model={"moe": {"experts": 4, "expert_width": width}}, backend={"experts": "grouped"})
        subject, shards = build(recipe, CPU), SyntheticShards(recipe)
        runs = [marked_step(subject, shards).seconds() for _ in range(5)]
        seconds = {key: min(run[key] for run in runs) for key in runs[0]}  # a busy machine disturbs some runs
        share = {
            phase: sum(s for (part, p), s in seconds.items() if p == phase and "gemm" in part)
            / sum(s for (part, p), s in seconds.items() if p == phase and part != "optimizer")
            for phase in ("forward", "backward")
        }
        shares.append(share)
    for phase in ("forward", "backward"):
        assert shares[1][phase] > 2 * shares[0][phase]


@pytest.mark.parametrize("emulate", [False, True])
def test_marks_change_no_gradient_and_leave_nothing_behind(recipe_of, build, emulate):
    from bmoe.precision.emulate import emulate as apply

    recipe = recipe_of(precision={"kind": "mxfp8" if emulate else "fp32", "emulate": emulate}, backend={"experts": "grouped"})
    subject, shards = build(recipe, CPU), SyntheticShards(recipe)
    if emulate and not hasattr(subject.model.blocks[0].ffn.experts.matmul, "kind"):
        apply(subject.model, recipe.precision)
    experts = subject.model.blocks[0].ffn.experts
    had, before = "matmul" in vars(experts), experts.matmul
    with measure.loader(subject, shards, CPU) as loader:
        batch = loader.next().batches[0]
    gradients = []
    for marks in (False, True):
        subject.model.zero_grad(set_to_none=True)
        for sums in subject.optimizer.sums.values():
            sums.zero_()
        if marks:
            with attached(subject.model, Timeline(CPU)) as _:
                measure.backward(subject, batch, batch.targets, 1.0)
        else:
            measure.backward(subject, batch, batch.targets, 1.0)
        gradients.append([subject.optimizer.gradient(name).clone() for name in subject.optimizer.parameters])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)
    assert ("matmul" in vars(experts)) == had and experts.matmul is before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in subject.model.modules())
