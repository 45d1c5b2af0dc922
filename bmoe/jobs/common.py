"""What several commands share: the recipe argument, the device, the data, the --json file."""

import glob
import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from bmoe import __version__, console
from bmoe import recipe as recipes
from bmoe.data.options import PrepareOptions
from bmoe.data.prepare import prepare
from bmoe.data.shards import MANIFEST, Shards, read_manifest
from bmoe.errors import RequestError
from bmoe.files import whole
from bmoe.parallel import launch
from bmoe.recipe import Recipe
from bmoe.reports import prepare as page
from bmoe.training.metrics import finite

OWN = ("recipe.yaml", "metrics.jsonl", "evaluation.json", MANIFEST)  # names of files that commands go on from


def load_recipe(path: str, overrides: list[str]) -> tuple[Recipe, Path]:
    """The recipe of a RECIPE argument with its overrides, and its file; says when a shipped one is taken."""
    file, shipped = recipes.find(path)
    here = launch.place()
    first = (here is None or here.rank == 0) and not launch.is_launched()  # the process that launched this one has said it
    if first and shipped and Path(path) != file:
        console.note(f"{path} is no file here: taking the recipe of that name that ships with bmoe")
    return recipes.load(file, overrides), file


def choose_device(device: str | None, gpus: int | None) -> tuple[torch.device, str]:
    """The device and a line that says which and why. Raises RequestError for GPUs that are not here."""
    visible, count = torch.cuda.device_count(), torch.get_num_threads()
    threads = "1 thread" if count == 1 else f"{count} threads"
    if device not in (None, "cpu", "cuda"):
        raise RequestError(f"--device {device}: use cpu or cuda")
    if device == "cpu":
        return torch.device("cpu"), f"running on the CPU ({threads})"
    if gpus is not None and gpus > visible:
        have = f"shows {visible} GPUs; use --gpus {visible}" if visible else "has no CUDA GPU that torch sees; check driver and torch build"
        raise RequestError(f"--gpus {gpus}: this machine {have}, or use --device cpu")
    if device == "cuda" and not visible:
        raise RequestError("--device cuda: this machine has no CUDA GPU that torch sees; use --device cpu")
    if visible:
        return torch.device("cuda", 0), f"running on {torch.cuda.get_device_name(0)}"
    return torch.device("cpu"), f"no GPU here: running on the CPU ({threads})"


def write_json(file: str | None, command: str, recipe: Recipe | None, results: dict) -> None:
    """The --json file of a command."""
    if file is None:
        return
    body = {"command": command, "version": __version__, "recipe": recipes.to_dict(recipe) if recipe else None, "results": results}
    with whole(file) as partial:
        partial.write_text(json.dumps(finite(body), indent=1, allow_nan=False, default=str) + "\n")


def check_target(flag: str, file: str | None) -> None:
    """Refuse, before any work, a file that could not be written after it, beside its place and renamed. Raises RequestError."""
    if file is None:
        return
    path = Path(file)
    folder = path.resolve().parent
    if not folder.is_dir():
        raise RequestError(f"{flag} {file}: there is no folder {folder}; make it first")
    needed = [path] * path.exists() + [folder] * (path.is_file() or not path.exists())
    if path.is_dir() or not all(os.access(place, os.W_OK) for place in needed):
        raise RequestError(f"{flag} {file}: cannot be written; choose another file")


def check_targets(targets: dict[str, str | None], read: Iterable[str | None] = ()) -> None:
    """`check_target` of every flag's file; none may be what the command reads, another's file, or one that bmoe goes on from.

    Raises RequestError.
    """
    taken = {Path(file).resolve(): f"{file} is read by this command" for file in read if file}
    for flag, file in targets.items():
        if file is None:
            continue
        check_target(flag, file)
        path = Path(file).resolve()
        in_run = any(folder.name == "checkpoints" and (folder.parent / "recipe.yaml").is_file() for folder in path.parents)
        if path.is_file() and (in_run or path.name in OWN):
            raise RequestError(f"{flag} {file}: this file belongs to a run or to prepared data; choose another file")
        if path in taken and (path.is_file() or not path.exists()):  # a device may be named twice
            raise RequestError(f"{flag} {file}: {taken[path]}; choose another file")
        taken[path] = f"{flag} writes it"


def shard_folder(recipe: Recipe) -> Path:
    """The folder of shards of a recipe, prepared or not."""
    return Path(recipe.data.path)


def ensure_data(recipe: Recipe) -> Path:
    """The folder of shards of a recipe; prepares `data.fasta` into it, or goes on with that, if it has none. Raises RequestError."""
    folder = shard_folder(recipe)
    options = PrepareOptions(alphabet=recipe.data.alphabet, **recipe.data.prepare.model_dump())
    if (folder / MANIFEST).is_file():
        if recipe.data.fasta:
            check_prepared(recipe, folder, options)
        return folder
    if folder.is_file():
        raise RequestError(f"data.path: {folder} is a file: run `bmoe prepare {folder}`, and name the folder that it says")
    if recipe.data.fasta is None:
        raise RequestError(
            f"data.path: {folder} has no prepared sequences; run `bmoe prepare FILE.fasta --out {folder}`, or set data.fasta"
        )
    fasta = recipe.data.fasta
    if not (os.path.exists(fasta) or glob.glob(fasta, recursive=True)):
        raise RequestError(
            f"data.fasta: {fasta} does not exist; in a recipe it is relative to the recipe's file, in --set to the working directory"
        )
    console.note(f"preparing {fasta} into {folder}")
    with console.PreparationView() as view:
        page.write(folder, prepare([fasta], folder, options, resume=True, progress=view.update))
    return folder


def check_prepared(recipe: Recipe, folder: Path, options: PrepareOptions) -> None:
    """Refuse shards that were prepared from another file than `data.fasta` or with other options than `data.prepare`."""
    manifest = read_manifest(folder)
    there = manifest["options"]
    keys = [f"data.prepare.{key}" for key, value in options.as_dict().items() if key in there and there[key] != value and key != "alphabet"]
    names = [Path(source["name"]).name for source in manifest.get("inputs", [])]
    if names and names != [Path(recipe.data.fasta).name]:
        keys.insert(0, f"data.fasta (it was {', '.join(names[:3])})")
    if keys:
        raise RequestError(
            f"data.path: {folder} was prepared with other {', '.join(keys)}; use another data.path, or data.fasta=null to take it as it is"
        )


def open_split(recipe: Recipe, folder: Path, split: str) -> Shards:
    """One split of the recipe's data. Raises RequestError if the alphabet differs or the split is empty."""
    shards = Shards(folder, split)
    if shards.alphabet.name != recipe.data.alphabet:
        raise RequestError(f"data.alphabet: the recipe says {recipe.data.alphabet}, and {folder} was prepared as {shards.alphabet.name}")
    if len(shards) == 0:
        cure = "more input or a smaller --valid-fraction" if split == "train" else f"a larger --{split}-fraction"
        raise RequestError(f"{folder} has no sequence in its {split} split; prepare it again with {cure}")
    return shards
