"""TensorBoard and Weights & Biases beside metrics.jsonl, for those who keep their runs there (extra `track`)."""

import importlib
import uuid
from pathlib import Path
from types import ModuleType

from bmoe.errors import RequestError
from bmoe.recipe import Recipe, to_dict


class Trackers:
    """An observer that hands records on to `view`, and on the first rank to the trackers that the recipe names.

    done: steps behind the checkpoint that the run goes on from. Use as a context manager. Raises RequestError if the recipe
    names a tracker that is not installed.
    """

    def __init__(self, recipe: Recipe, run: Path, view, first_rank: bool, done: int):
        self.view, self.board, self.wandb = view, None, None
        if first_rank and recipe.logging.tensorboard:
            board = _module("torch.utils.tensorboard", "logging.tensorboard")
            self.board = board.SummaryWriter(str(run / "tensorboard"), purge_step=done + 1)
        if first_rank and recipe.logging.wandb:
            wandb = _module("wandb", "logging.wandb")
            identity = run / "wandb.id"
            if not identity.is_file():
                identity.write_text(uuid.uuid4().hex)
            self.wandb = wandb.init(
                project=recipe.logging.wandb,
                name=recipe.name,
                id=identity.read_text(),
                dir=str(run),
                config=to_dict(recipe),
                resume="allow",
            )

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, *_: object) -> None:
        if self.board:
            self.board.close()
        if self.wandb:
            self.wandb.finish()

    def record(self, record: dict) -> None:
        self.view.record(record)
        values = scalars(record)
        if self.board:
            for name, value in values.items():
                self.board.add_scalar(name, value, record["step"])
        if self.wandb:
            self.wandb.log(values, step=record["step"])

    def note(self, text: str) -> None:
        self.view.note(text)


def scalars(record: dict) -> dict[str, float]:
    """The numbers of a record, per-layer arrays as name/layer."""
    flat: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, list):
            flat |= {f"{name}/{layer}": x for layer, x in enumerate(value) if x is not None}
        elif isinstance(value, int | float) and name != "step":
            flat[name] = value
    return flat


def _module(name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise RequestError(f"{key} needs a package that is not installed: pip install 'bmoe[track]', or switch it off") from None
