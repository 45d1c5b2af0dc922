"""Small runs of training for the tests of checkpoints: in this process, or as a program on one or several ranks.

python runs.py FOLDER '{"steps": 6, "layout": [1, 1, 2]}'      trains to `steps`, from the newest checkpoint if there is one
"""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from bmoe.data.alphabet import alphabet
from bmoe.errors import RequestError, RunError
from bmoe.evaluation.perplexity import evaluate
from bmoe.parallel.launch import rank_of, world_from_environment
from bmoe.parallel.world import World
from bmoe.training import checkpoint, setup, state
from bmoe.training.loop import Trainer
from bmoe.training.metrics import MetricsLog
from bmoe.training.stopping import Limits


def load_file(path: Path) -> ModuleType:
    """A module of the tests by its file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cases = load_file(Path(__file__).parent.parent / "parallel" / "cases.py")
TIMES = ("residues_per_s", "tokens_per_s", "step_s", "data_wait_s", "peak_memory_gib", "mfu")


def make_recipe(
    steps: int,
    layout: list[int] | tuple[int, ...] = (1, 1, 1),
    every: int = 2,
    keep: int = 3,
    background: bool = True,
    experts: str = "loop",
    batches: int = 4,
    lr: float = 0.003,
    kind: str = "fp32",
):
    return cases.make_recipe(
        tuple(layout),
        batches,
        backend={"experts": experts},
        training={"steps": steps, "validate_every": 2, "validation_tokens": 256, "tokens_per_step": batches * cases.SLOTS},
        checkpoint={"every": every, "keep": keep, "async": background},
        logging={"every": 1},
        optimizer={"lr": lr, "clip_norm": 1.0},
        model={"norm": "rmsnorm", "bias": False},
        precision={"kind": kind},
    )


class Watcher:
    """An observer that calls `after(record)` and keeps the notes."""

    def __init__(self, after: Callable[[dict], None] = lambda record: None):
        self.record, self.notes = after, []

    def note(self, text: str) -> None:
        self.notes.append(text)


def train(folder: Path, recipe, world: World | None = None, limits: Limits | None = None, observer: Watcher | None = None):
    """Train to `training.steps` or a limit, from the newest checkpoint in `folder` if there is one. Returns (outcome, trainer)."""
    folder.mkdir(parents=True, exist_ok=True)
    world = world or World(torch.device("cpu"))
    recipe, _ = setup.resolve(recipe, world)
    world = world.arrange(recipe.parallel)
    shards, held_out = cases.Proteins(), cases.Proteins(60, seed=1)
    model = setup.build_model(recipe, alphabet("protein"), world.device)
    setup.distribute(model, recipe, world)
    optimizer = setup.build_optimizer(model, recipe, world)
    found = checkpoint.resume_point(folder, world)
    progress = state.load_state(found, model, optimizer) if found else state.Progress()
    if world.rank == 0:
        MetricsLog(folder / "metrics.jsonl").cut_back(progress.step)

    def validate() -> dict:
        return evaluate(model, held_out, recipe, device=world.device, rank=world.rank, world=world.size, reduce=world.sum).metrics()

    trainer = Trainer(recipe, folder, shards, model, optimizer, world, progress, observer or Watcher(), validate, lambda *_: None)
    return trainer.run(limits or Limits()), trainer


def part(rank: int, size: int, folder: str, stop_at: int | None = None, **options) -> int:
    """One rank's part of a run. Returns the step it reached."""
    outcome, _ = train(Path(folder), make_recipe(**options), World(torch.device("cpu"), rank, size), Limits(stop_at))
    return outcome.step


def reload(rank: int, size: int, folder: str, out: str, layout: tuple[int, int, int]) -> float:
    """Load the newest checkpoint of `folder` in another layout, save it into `out`. Returns the held-out loss."""
    world = World(torch.device("cpu"), rank, size)
    recipe, _ = setup.resolve(make_recipe(4, layout), world)
    world = world.arrange(recipe.parallel)
    model = setup.build_model(recipe.model_copy(update={"seed": 5}), alphabet("protein"), world.device)
    setup.distribute(model, recipe, world)
    optimizer = setup.build_optimizer(model, recipe, world)
    progress = state.load_state(checkpoint.resume_point(Path(folder), world), model, optimizer)
    checkpoint.Checkpoints(Path(out), 1, False, rank).save(progress.step, state.each_tensor(model, optimizer), progress.as_meta())
    held_out = cases.Proteins(60, seed=1)
    measured = evaluate(model, held_out, recipe, device=world.device, rank=rank, world=size, reduce=world.sum)
    return measured.metrics()["valid_loss"]


def final_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint, whole."""
    return read_tensors(checkpoint.newest_whole(folder / "checkpoints"))


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    import torch.distributed.checkpoint as dcp

    known = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(facts.size, dtype=facts.properties.dtype) for name, facts in known.items()}
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return tensors


def records(folder: Path) -> list[dict]:
    """metrics.jsonl without what depends on the clock."""
    return [{k: v for k, v in record.items() if k not in TIMES} for record in MetricsLog(folder / "metrics.jsonl").read()]


def main(folder: str, options: str) -> None:
    torch.set_num_threads(1)
    world = world_from_environment("cpu")
    with rank_of(world):
        train(Path(folder), make_recipe(**json.loads(options)), world)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:3])
    except RequestError:
        sys.exit(2)
    except RunError:
        sys.exit(1)
