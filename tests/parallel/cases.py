"""What the ranks of a test world run; `train(0, 1, ...)` without a world is the one process that all are compared with."""

import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.fsdp import FSDPModule

from bmoe import recipe as recipes
from bmoe.data.alphabet import alphabet
from bmoe.data.loader import TrainingLoader
from bmoe.data.sampler import Position
from bmoe.errors import RequestError, RunError
from bmoe.jobs.layouts import layouts
from bmoe.model.experts import build_experts
from bmoe.parallel import dispatch, shard
from bmoe.parallel import world as world_module
from bmoe.parallel.launch import on_first
from bmoe.parallel.mesh import build_mesh
from bmoe.parallel.world import World
from bmoe.training import checkpoint, setup, state
from bmoe.training.guards import check_replicas, data_checksum
from bmoe.training.loop import Trainer
from bmoe.training.optimizer import AdamW, local
from bmoe.training.step import Stepper
from bmoe.training.stopping import Limits, Stopping

torch.set_num_threads(1)  # as many as the ranks have
world_module.LARGE = 1000  # so that both ways of summing gradients are taken
SLOTS, EXPERTS = 96, 8


class Proteins:
    """Random proteins in memory, for what training needs of Shards."""

    clusters = None

    def __init__(self, number: int = 400, seed: int = 0):
        self.alphabet = alphabet("protein")
        draw = np.random.default_rng(seed)
        self.lengths = draw.integers(3, 60, number)
        self._ids = [draw.choice(self.alphabet.residues, n).astype(np.uint8) for n in self.lengths]

    def __len__(self) -> int:
        return len(self._ids)

    def sequence(self, index: int) -> np.ndarray:
        return self._ids[index]

    def soft_mask(self, index: int) -> None:
        return None


def make_recipe(layout: tuple[int, int, int], batches: int = 4, **sections) -> recipes.Recipe:
    """layout: (data_replicate, data_shard, expert). batches: per step, over all ranks."""
    replicas, shards, expert = layout
    values: dict[str, Any] = {
        "data": {"max_length": 48, "tokens_per_batch": SLOTS},
        "model": {
            "layers": 2,
            "width": 32,
            "heads": 4,
            "norm": "layernorm",
            "bias": True,
            "moe": {
                "experts": EXPERTS,
                "top_k": 2,
                "expert_width": 24,
                "shared_experts": 1,
                "bias_update": 0.01,
                "balance_loss": 0.05,
                "z_loss": 0.01,
            },
        },
        "precision": {"kind": "fp32"},
        "backend": {"experts": "loop"},
        "parallel": {"data_replicate": replicas, "data_shard": shards, "expert": expert},
        "optimizer": {"clip_norm": 0.05, "lr": 0.01},
        "schedule": {"warmup_steps": 0},
        "training": {"steps": 10, "tokens_per_step": SLOTS * batches, "validation_tokens": 512},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return recipes.validate(values)


def build(rank: int, size: int, recipe: recipes.Recipe, dtype: torch.dtype = torch.float64):
    """(world, model, optimizer) as training builds them, in `dtype`."""
    world = World(torch.device("cpu"), rank, size)
    recipe, _ = setup.resolve(recipe, world)
    world = world.arrange(recipe.parallel)
    model = setup.build_model(recipe, alphabet("protein"), world.device).to(dtype)
    starve(model)
    setup.distribute(model, recipe, world)
    return world, model, setup.build_optimizer(model, recipe, world)


def initial(rank: int, size: int, layout: tuple[int, int, int]) -> dict[str, np.ndarray]:
    """All tensors of a new model; with several ranks it is built on the meta device."""
    recipe, world = make_recipe(layout), World(torch.device("cpu"), rank, size)
    recipe, _ = setup.resolve(recipe, world)
    world = world.arrange(recipe.parallel)
    model = setup.build_model(recipe, alphabet("protein"), torch.device("meta" if size > 1 else "cpu"))
    setup.distribute(model, recipe, world)
    return whole(state.model_tensors(model))


def starve(model) -> None:
    """Experts 0, 1 (one whole rank of four) and 5 get no token."""
    for index in model.moe_layers:
        model.blocks[index].ffn.router.selection_bias[[0, 1, 5]] = -100.0


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Whole copies of (sharded) tensors; numpy knows no bf16."""
    found = {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for name, t in tensors.items()}
    return {name: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for name, t in found.items()}


def gradients(model, optimizer: AdamW) -> dict[str, np.ndarray]:
    return whole({name: state.canonical(model, name, optimizer.gradient(name)) for name in optimizer.parameters})


def units(rank: int, size: int, layout: tuple[int, int, int], **sections) -> tuple[list[str], dict[str, tuple[str, bool]]]:
    """Names of the modules that are units of FSDP2; of each matrix its dtype between steps, and whether it has a split master."""
    _, model, optimizer = build(rank, size, make_recipe(layout, **sections), torch.float32)
    found = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    return found, {name: (str(p.dtype), name in optimizer.low) for name, p in optimizer.parameters.items() if not setup.stays_wide(name, p)}


def holders(rank: int, size: int, layout: tuple[int, int, int], **sections) -> int:
    """Of a stand-in for experts that hold their weights: how many do, in a step of several batches a rank."""
    recipe = make_recipe(layout, 4, **sections)
    world, model, optimizer = build(rank, size, recipe, torch.float32)
    experts = type(model.blocks[0].ffn.experts)
    experts.hold = lambda self: None
    try:
        return len(Stepper(recipe, model, optimizer, world.device).holders)
    finally:
        del experts.hold


class _Quiet:
    def record(self, record: dict) -> None: ...
    def note(self, text: str) -> None: ...


def make_trainer(folder, recipe, shards, model, optimizer, world, progress=None) -> Trainer:
    return Trainer(recipe, folder, shards, model, optimizer, world, progress or state.Progress(), _Quiet(), dict, lambda *_: None)


def train(
    rank: int,
    size: int,
    layout=(1, 1, 1),
    batches: int = 4,
    dtype: str = "float64",
    steps: int = 3,
    sabotage: str = "",
    stay_gathered: bool = True,
    compiled: str = "",
    **sections,
) -> dict:
    """Losses and norms of `steps` steps, the first step's gradients (before clipping), and all state after the last."""
    recipe = make_recipe(layout, batches, **sections)
    world, model, optimizer = build(rank, size, recipe, getattr(torch, dtype))
    trainer = make_trainer(Path("unused"), recipe, Proteins(), model, optimizer, world)
    trainer.stay_gathered = stay_gathered
    if compiled:
        setup.compile_blocks(model, recipe, backend=compiled)
    undo = break_on_purpose(sabotage, model, optimizer)
    first: dict = {}
    norm_of = optimizer.global_norm

    def spy() -> torch.Tensor:
        if not first:
            first.update(gradients(model, optimizer))
        return norm_of()

    optimizer.global_norm = spy
    losses, norms = [], []
    loader = TrainingLoader(trainer.shards, recipe, Position(0, 0), rank, size)
    with loader:
        for step in range(1, steps + 1):
            sums, norm, _ = trainer._step(loader.next().batches, 0.01, step, Stopping(Limits(), world))
            flat = world.sum(torch.stack([sums.loss.double(), sums.balance_L.sum().double(), sums.z_L.sum().double()]))
            losses.append(flat.numpy().copy())
            norms.append(float(norm))
    undo()
    return {
        "losses": np.array(losses),
        "norms": np.array(norms),
        "gradients": first,
        "state": whole(state.all_tensors(model, optimizer)),
    }


def break_on_purpose(how: str, model, optimizer: AdamW):
    """Faults that the comparison must see. Returns what mends them."""
    if how == "expert gradient twice":
        kept = optimizer.gradient
        optimizer.gradient = lambda name: kept(name) * (2.0 if ".experts." in name else 1.0)
        return lambda: None
    if how == "gradients averaged":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(2.0)
        return lambda: None
    if how == "copies not summed":
        optimizer.sum_whole = None
        return lambda: None
    if how == "norm over own shards":
        optimizer.reduce = lambda x: x
        return lambda: None
    if how == "unshifted expert index":  # every rank holds the first experts
        for name, p in model.named_parameters():
            if ".experts." in name:
                dist.broadcast(local(p.data), src=0)
        return lambda: None
    if how == "experts in the wrong order":
        kept = dispatch._experts_of_rows
        dispatch._experts_of_rows = lambda counts, rows: kept(counts, rows).flip(0)
        return lambda: setattr(dispatch, "_experts_of_rows", kept)
    assert not how
    return lambda: None


def drift(rank: int, size: int, layout: tuple[int, int, int], what: str, culprit: int = 1) -> str:
    """What the check of replicas says after one rank changed one number."""
    world, model, optimizer = build(rank, size, make_recipe(layout), torch.float32)
    position = (0, 7)
    if rank == culprit and what == "whole":
        model.blocks[0].ffn.router.weight.data[0, 0] += 1e-7
    if rank == culprit and what == "part":
        local(model.blocks[1].ffn.experts.down.data)[0, 0, 0] *= 1.0 + 1e-6
    if rank == culprit and what == "position":
        position = (0, 8)
    shards = Proteins()
    if rank == culprit and what == "data":
        shards.sequence(7)[-1] ^= 1
    try:
        check_replicas(model, optimizer, 5, position, data_checksum(shards, position), world)
    except RunError as error:
        return str(error)
    return "all agree"


def interrupted(rank: int, size: int, layout: tuple[int, int, int], folder: str) -> tuple[int, int]:
    """Rank 1 alone is sent SIGTERM during step 3. Returns the last step and the signal that each rank believes in."""
    recipe, limits = make_recipe(layout, logging={"every": 1}), Limits()
    world, model, optimizer = build(rank, size, recipe, torch.float32)
    trainer = make_trainer(Path(folder), recipe, Proteins(), model, optimizer, world)
    step_of = trainer._step

    def step(batches, lr, number, stopping):
        result = step_of(batches, lr, number, stopping)
        if rank == 1 and number == 3:
            limits.take(signal.SIGTERM)
        return result

    trainer._step = step
    outcome = trainer.run(limits)
    return outcome.step, int(outcome.signal)


def one_bad_rank(rank: int, size: int, layout: tuple[int, int, int]) -> tuple[int, list[float], bool]:
    """What a block of rank 1 computes is NaN in step 2 of 3. (steps skipped, norms, whether step 2 left the weights alone)."""
    recipe = make_recipe(layout)
    world, model, optimizer = build(rank, size, recipe, torch.float32)
    trainer = make_trainer(Path("unused"), recipe, Proteins(), model, optimizer, world)
    poisoned, norms, left_alone = [False], [], False
    model.final_norm.register_forward_hook(lambda module, inputs, output: output * (torch.nan if poisoned[0] else 1.0))
    with TrainingLoader(trainer.shards, recipe, Position(0, 0), rank, size) as loader:
        for step in (1, 2, 3):
            poisoned[0] = rank == 1 and step == 2
            before = whole(state.all_tensors(model, optimizer))
            norms.append(float(trainer._step(loader.next().batches, 0.01, step, Stopping(Limits(), world))[1]))
            after = whole(state.all_tensors(model, optimizer))
            same = all(np.array_equal(before[name], after[name]) for name in before if "optimizer.skipped" not in name)
            left_alone |= same and step == 2
            assert same == (step == 2)
    return int(optimizer.skipped), norms, left_alone


def broken_save(rank: int, size: int, folder: str, culprit: int, background: bool) -> tuple[str, bool]:
    """What a rank says of a save that failed on one by an error that no file system makes; whether it left a checkpoint."""
    name = "_check_files" if culprit == 0 else "digest"
    kept = getattr(checkpoint, name)

    def broken(*arguments):
        raise EOFError("Ran out of input")

    writer = checkpoint.Checkpoints(Path(folder), 1, background, rank)
    if rank == culprit:
        setattr(checkpoint, name, broken)
    try:
        writer.save(1, [("model.w", torch.zeros(3))], {})
        writer.wait()
    except RunError as error:
        return str(error), checkpoint.newest_whole(Path(folder) / "checkpoints") is not None
    finally:
        setattr(checkpoint, name, kept)
    return "", True


def decide(rank: int, size: int) -> tuple[str, str]:
    world = World(torch.device("cpu"), rank, size)

    def refuse():
        raise RequestError(f"{rank} refused")

    try:
        on_first(world, refuse)
    except RequestError as error:
        return on_first(world, lambda: f"{rank} decided"), str(error)
    return "", ""


def count_traffic(rank: int, size: int, layout: tuple[int, int, int], stay_gathered: bool) -> dict[str, float]:
    """Bytes that this rank sends in one step by ring algorithms, counted at torch.distributed's functions, and rows routed."""
    recipe = make_recipe(layout, batches=8)
    world, model, optimizer = build(rank, size, recipe, torch.float32)
    trainer = make_trainer(Path("unused"), recipe, Proteins(), model, optimizer, world)
    trainer.stay_gathered = stay_gathered
    sent = {"gather": 0.0, "scatter": 0.0, "reduce": 0.0, "rows": 0.0, "routed": 0.0}
    inside: list[str] = []

    def counting(kind: str, function):
        def call(*arguments, **options):
            if not inside:
                tensors = [a for a in (*arguments, *options.values()) if isinstance(a, torch.Tensor)]
                group = options.get("group")
                ranks = dist.get_world_size(group)
                largest = max(t.numel() * t.element_size() for t in tensors)
                if kind == "rows":
                    going = arguments[3] if len(arguments) > 3 else None  # None: the exchange of counts
                    if going:
                        away = sum(going) - going[dist.get_rank(group)]
                        row = arguments[1][:1].numel() * arguments[1].element_size()
                        sent["rows"] += away * row
                        sent["routed"] += sum(going) * (arguments[1].ndim == 2)
                elif any(t.is_floating_point() for t in tensors):
                    sent[kind] += largest * (ranks - 1) / ranks * (2 if kind == "reduce" else 1)
            inside.append(kind)
            try:
                return function(*arguments, **options)
            finally:
                inside.pop()

        return call

    names = {
        "all_gather_into_tensor": "gather",
        "all_gather_single": "gather",
        "reduce_scatter_tensor": "scatter",
        "reduce_scatter_single": "scatter",
        "all_reduce": "reduce",
        "all_to_all_single": "rows",
    }
    kept = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
    for name, function in kept.items():
        setattr(dist, name, counting(names[name], function))
    try:
        with TrainingLoader(trainer.shards, recipe, Position(0, 0), rank, size) as loader:
            trainer._step(loader.next().batches, 0.01, 1, Stopping(Limits(), world))
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)
    names_of = {"dense": 0, "experts": 0, "whole": 0}
    plain = setup.build_model(recipe, alphabet("protein"), torch.device("cpu"))
    for name, p in plain.named_parameters():
        names_of["experts" if ".experts." in name else "whole" if setup.lives_whole(name, p) else "dense"] += p.numel()
    return sent | names_of


class EverythingToEveryone:
    """A transport by all-gather and reduce-scatter: every rank gets every token once, with ids of its own experts only."""

    def __init__(self, experts: int, group: dist.ProcessGroup):
        self.group, self.here = group, experts // group.size()

    def depart(self, x_TD, experts_TK, weights_TK):
        ids = funcol.all_gather_tensor(experts_TK, 0, self.group) - self.group.rank() * self.here
        ids = torch.where((ids >= 0) & (ids < self.here), ids, self.here)
        return gather_rows(x_TD, 0, self.group), ids, gather_rows(weights_TK, 0, self.group)

    def arrive(self, journey):
        return journey

    def bring_back(self, out_MD, journey):
        return funcol.reduce_scatter_tensor_autograd(out_MD, "sum", 0, self.group)


def gather_rows(x, dim, group):
    return funcol.all_gather_tensor_autograd(x, dim, group)


def travel_order(rank: int, size: int) -> tuple[list[str], list[str]]:
    """What happens in which order in a layer with a shared expert, forward and backward."""
    mesh, told = build_mesh("cpu", 1, 1, size), []

    class Told(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            told.append("shared expert")
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            told.append("shared expert")
            return grad * 2

    layer = torch.nn.Module()
    layer.router, layer.experts, layer.shared = None, build_experts("loop", 2 * size, 8, 8), Told.apply
    with torch.no_grad():
        for p in layer.experts.parameters():
            p.fill_(0.1)
    parallel = shard.expert_parallel(layer, mesh)
    kept = dist.all_to_all_single, dispatch.wait
    names = {"forward": ("rows leave", "rows arrive"), "backward": ("gradients leave", "gradients arrive")}
    way, started = "forward", {}

    def start(out, rows, *arguments, **options):
        work = kept[0](out, rows, *arguments, **options)
        if rows.ndim == 2 and rows.is_floating_point():
            started[work] = way
            told.append(names[way][0])
        return work

    def wait(work, collective):
        if work in started:
            told.append(names[started[work]][1])
        kept[1](work, collective)

    dist.all_to_all_single, dispatch.wait = start, wait
    try:
        x = torch.ones(4, 8, requires_grad=True)
        y = parallel(x, torch.tensor([[0], [1], [size], [2 * size - 1]]), torch.ones(4, 1))
        forward, way = told[:3], "backward"
        told.clear()
        y.sum().backward()
    finally:
        dist.all_to_all_single, dispatch.wait = kept
    backward = told[told.index("gradients arrive") + 1 :]  # those of what comes back are first
    return forward, backward


def programs_of_experts(rank: int, size: int, row_counts: list[int]) -> list[list[tuple[str, ...]]]:
    """Of compiled grouped experts behind a dispatch: each program's inputs by their shapes, sizes that vary as `rows`."""
    found = []

    def backend(graph, _):
        values = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        shapes = [x.shape for x in values if isinstance(x, torch.Tensor)]
        found.append([tuple(n if isinstance(n, int) else "rows" for n in shape) for shape in shapes])
        return graph.forward

    layer = torch.nn.Module()
    layer.router, layer.experts, layer.shared = None, build_experts("grouped", 4 * size, 16, 8), None
    parallel = shard.expert_parallel(layer, build_mesh("cpu", 1, 1, size))
    parallel.experts.bfloat16().compile(backend=backend)
    for rows in row_counts:
        x_TD, weights_TK = torch.ones(rows, 16, dtype=torch.bfloat16, requires_grad=True), torch.ones(rows, 2)
        parallel(x_TD, torch.arange(2 * rows).view(rows, 2) % (4 * size), weights_TK).sum().backward()
    return found


def extremes(rank: int, size: int, routing: str, transport: str = "") -> list[float]:
    """Relative differences of an expert-parallel layer from all experts on one rank: output, dx, dweights, dgate_up, ddown."""
    mesh = build_mesh("cpu", 1, 1, size)
    tokens, k, experts, width = 11, 3, 4 * size, 16
    draw = torch.Generator().manual_seed(0)
    whole_layer = build_experts("loop", experts, width, 8).double()
    with torch.no_grad():
        for p in whole_layer.parameters():
            p.copy_(torch.randn(p.shape, generator=draw, dtype=torch.float64))
    chosen = [torch.rand(tokens, experts, generator=draw).topk(k).indices for _ in range(size)]
    if routing == "one expert":
        chosen = [torch.full((tokens, k), experts - 1) for _ in range(size)]
    if routing == "no real token on rank 0":
        chosen[0] = torch.full((tokens, k), experts)
    if routing == "tails":
        for ids in chosen:
            ids[7:] = experts
    x, weights = [torch.randn(size, *shape, generator=draw, dtype=torch.float64) for shape in ((tokens, width), (tokens, k))]
    gain = torch.randn(size, tokens, width, generator=draw, dtype=torch.float64)

    mine = [t[rank].clone().requires_grad_() for t in (x, weights)]
    part = build_experts("loop", experts, width, 8).double()
    part.load_state_dict(whole_layer.state_dict())
    layer = torch.nn.Module()
    layer.router, layer.experts, layer.shared = None, part, None
    parallel = shard.expert_parallel(layer, mesh)
    if transport:
        parallel.transport = EverythingToEveryone(experts, mesh.expert_group)
    y = parallel(mine[0], chosen[rank], mine[1])
    (y * gain[rank]).sum().backward()

    inputs = [t.clone().requires_grad_() for t in (x, weights)]
    outputs = torch.stack([whole_layer(a, ids, w) for a, ids, w in zip(inputs[0], chosen, inputs[1], strict=True)])
    (outputs * gain).sum().backward()
    here = slice(rank * 4, rank * 4 + 4)
    pairs = [
        (y, outputs[rank]),
        (mine[0].grad, inputs[0].grad[rank]),
        (mine[1].grad, inputs[1].grad[rank]),
        (part.gate_up.grad, whole_layer.gate_up.grad[here]),
        (part.down.grad, whole_layer.down.grad[here]),
    ]
    return [float((a - b).norm() / b.norm().clamp(min=1e-300)) if bool((a != b).any()) else 0.0 for a, b in pairs]


def all_layouts(rank: int, size: int, fault: str = "none") -> dict:
    """`bmoe profile --layouts` in this world, on random proteins, with a fault put in on purpose."""
    recipe, world = make_recipe((1, size, 1), batches=size, optimizer={"lr": 1e-3}), World(torch.device("cpu"), rank, size)
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"path": "/nonexistent"})})
    kept = AdamW.global_norm, state.load
    if fault == "a norm over own shards":
        AdamW.global_norm = lambda self: sum(self.gradient(name).square().sum() for name in self.parameters).sqrt()
    if fault == "a checkpoint that is not loaded":
        state.load = lambda *_: None
    try:
        return layouts(recipe, world)
    except RunError as error:
        return {"refused": str(error)}
    finally:
        AdamW.global_norm, state.load = kept


def sharded_mixtral(rank: int, size: int) -> float:
    """Largest difference of the logits of Hugging Face's model under FSDP2 from those of one process with the same weights."""
    from bmoe.profiling import baseline, race
    from bmoe.profiling.synthetic import SyntheticShards

    recipe = make_recipe((1, size, 1), batches=size)
    shards, world = SyntheticShards(recipe), World(torch.device("cpu"), rank, size)
    theirs = baseline.HuggingFace("hf-loop", recipe, shards, ("flattened",), race.Counts(1, 2), world, None)
    theirs.steps("flattened", first=True)
    alone = baseline.mixtral(recipe, shards.alphabet.size, "hf-loop", world.device)
    alone.load_state_dict({name: p.full_tensor() for name, p in theirs.model.named_parameters()})
    kept = ("input_ids", "position_ids")
    inputs = {name: value for name, value in theirs.feeds["flattened"][0].inputs.items() if name in kept}
    with torch.no_grad():
        found, wanted = (model(**inputs).logits for model in (theirs.model, alone))
    assert wanted.std() > 0.01
    return float((found - wanted).abs().max() / wanted.std())
