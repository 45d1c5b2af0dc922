"""Folders of weights: safetensors, in several files when large, as the Hugging Face hub lays them out."""

import json
import pickle
from argparse import Namespace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bmoe.errors import RequestError

SHARD_BYTES = 4 * 10**9
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def write_weights(weights: dict[str, Tensor], folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write `weights` as model.safetensors, or as numbered shards and their index if they exceed `shard_bytes`."""
    shards: list[dict[str, Tensor]] = [{}]
    room = shard_bytes
    for name, tensor in weights.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor.detach().cpu().contiguous()
        room -= tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / SINGLE, metadata={"format": "pt"})
        return
    where = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in weights.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1) + "\n")


def read_weights(path: Path) -> dict[str, Tensor]:
    """All tensors of a folder (safetensors, in shards or not, or pytorch_model.bin) or of one .pt or .safetensors file.

    Pickles are read without running code from them. Raises RequestError if there is nothing to read.
    """
    if path.is_file():
        return _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
    if (path / INDEX).is_file():
        files = sorted(set(read_json(path / INDEX).get("weight_map", {}).values()))
        missing = [file for file in files if not (path / file).is_file()]
        if missing:
            raise RequestError(f"{path} lacks {missing[0]}, which its {INDEX} names; copy the folder again")
        return {name: tensor for file in files for name, tensor in _read_safetensors(path / file).items()}
    if (path / SINGLE).is_file():
        return _read_safetensors(path / SINGLE)
    pickles = sorted(file for file in path.glob("*") if file.suffix in (".bin", ".pt") and "contact-regression" not in file.name)
    if not pickles and (any(path.glob("*.distcp")) or (path / "checkpoints").is_dir()):
        raise RequestError(f"{path} is a run or a checkpoint of bmoe: write it with `bmoe export {path} --to DIR`, and name that folder")
    if len(pickles) != 1:
        raise RequestError(f"{path} holds no weights: expected {SINGLE}, {INDEX}, or one .bin or .pt file; name a folder that has them")
    return _read_pickle(pickles[0])


def read_json(file: Path) -> dict:
    """The object in a JSON file. RequestError if there is none."""
    try:
        body = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise RequestError(f"{file} cannot be read ({error}); copy the folder again") from None
    if not isinstance(body, dict):
        raise RequestError(f"{file} holds no object of keys and values; copy the folder again")
    return body


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise RequestError(f"{file} cannot be read ({error}); copy the folder again") from None


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        with torch.serialization.safe_globals([Namespace]):  # fair-esm keeps its arguments in one
            body = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        raise RequestError(f"{path} cannot be read as weights alone: it is damaged, or holds objects that are none") from error
    body = body.get("model", body)
    return {name: value for name, value in body.items() if isinstance(value, Tensor)}
