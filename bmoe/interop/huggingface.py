"""Folders that Hugging Face transformers loads, written from a model and read back.

A decoder that is a Mixtral becomes a `MixtralForCausalLM` folder. Every other model becomes a folder with a modelling
file of its own (`hub/modeling_bmoe.py`), loaded with `trust_remote_code` and without bmoe. Both hold safetensors,
config.json, tokenizer.json and a README.md. Reading takes these two and dense ESM-2 (`EsmForMaskedLM`, or a fair-esm .pt file).
"""

import json
import shutil
import tempfile
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from bmoe.data.alphabet import Alphabet
from bmoe.errors import RequestError, RunError
from bmoe.interop.esm2 import from_esm2, is_esm2
from bmoe.interop.files import read_json, read_weights, write_weights
from bmoe.interop.mixtral import from_mixtral, mixtral_config, to_mixtral, why_not
from bmoe.interop.tokenizer import write_tokenizer
from bmoe.model.transformer import Transformer, Vocabulary
from bmoe.recipe import BackendSection, ModelSection, Recipe

MODELLING_FILE = Path(__file__).parent / "hub" / "modeling_bmoe.py"
TOLERANCE = 1e-4  # largest difference of fp32 logits that `verify` accepts
AUTO = {"encoder": ("AutoModelForMaskedLM", "BmoeForMaskedLM"), "decoder": ("AutoModelForCausalLM", "BmoeForCausalLM")}


def export(model: Transformer, recipe: Recipe, directory: str | Path, alphabet: Alphabet) -> dict:
    """Write `model` to a new folder. Returns {directory, architecture, own_code, parameters, bytes}.

    Weights keep their dtypes, so that reading them back is exact. Raises RequestError if the folder exists and is not
    empty, or cannot be written.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise RequestError(f"{directory} exists and is not empty; choose another folder for --to")
    weights, section = model.state_dict(), model.section
    reason = why_not(section, weights)
    if reason is None:
        tensors, config = to_mixtral(weights, section), mixtral_config(section, alphabet.size, recipe.data.max_length)
    else:
        tensors = {name if name.startswith("head.") else f"bmoe.{name}": tensor for name, tensor in weights.items()}
        config = own_config(section, alphabet)
    config |= {
        "dtype": str(weights["embedding"].dtype).removeprefix("torch."),
        "pad_token_id": alphabet.pad_id,
        "bos_token_id": alphabet.cls_id,
        "eos_token_id": alphabet.eos_id,
    }
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.") as temporary:
            folder = Path(temporary) / "folder"
            folder.mkdir()
            write_weights(tensors, folder)
            write_tokenizer(alphabet, folder, recipe.data.max_length, closed=section.kind == "encoder")
            (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
            (folder / "README.md").write_text(_card(recipe, section, reason))
            if reason is not None:
                shutil.copyfile(MODELLING_FILE, folder / MODELLING_FILE.name)
            if directory.exists():
                directory.rmdir()
            folder.rename(directory)
    except OSError as error:
        raise RequestError(f"{directory} cannot be written ({error.strerror}); choose another folder for --to") from error
    return {
        "directory": str(directory),
        "architecture": config["architectures"][0],
        "own_code": reason is not None,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": sum(file.stat().st_size for file in directory.iterdir()),
    }


def own_config(section: ModelSection, alphabet: Alphabet) -> dict:
    """config.json of a folder with its own modelling file."""
    auto, name = AUTO[section.kind]
    classes = {"AutoConfig": "BmoeConfig", "AutoModel": "BmoeModel", auto: name}
    return {
        "architectures": [name],
        "model_type": "bmoe",
        "auto_map": {key: f"{MODELLING_FILE.stem}.{value}" for key, value in classes.items()},
        "alphabet": alphabet.name,
        "vocab_size": alphabet.size,
        "mask_token_id": alphabet.mask_id,
        "model": section.model_dump(exclude={"init_from", "init_noise"}),
    }


def load_pretrained(directory: str | Path) -> tuple[dict[str, Tensor], dict]:
    """Canonical weights and the keys of the model section that a folder holds, in their stored dtypes.

    Reads what `export` wrote, Mixtral folders, `EsmForMaskedLM` folders and fair-esm .pt files. Raises RequestError for
    anything else.
    """
    path = Path(directory)
    if not path.exists():
        raise RequestError(f"model.init_from: {path} does not exist; name a folder that bmoe export wrote, or one with ESM-2's weights")
    config = _read_config(path)
    kind = config.get("model_type")
    if kind not in (None, "bmoe", "mixtral", "esm"):
        raise RequestError(f"{path / 'config.json'}: model_type {kind} is unknown here; bmoe reads bmoe, mixtral and esm folders")
    weights = read_weights(path)
    if kind == "bmoe":
        canonical, section = {name.removeprefix("bmoe."): tensor for name, tensor in weights.items()}, config.get("model")
    elif kind == "mixtral":
        try:
            canonical, section = from_mixtral(weights, config)
        except KeyError as error:
            raise RequestError(f"{path} lacks {error.args[0]}, which a Mixtral folder has; copy the folder again") from None
    else:
        if not is_esm2(set(weights)):
            raise RequestError(f"{path} has no config.json and is no ESM-2 checkpoint; give the folder that `bmoe export` wrote")
        if kind == "esm":
            _check_esm(path, config)
        tied = config.get("tie_word_embeddings", True) if kind == "esm" else None
        canonical, section = from_esm2(weights, config.get("num_attention_heads"), tied)
        section |= {"token_dropout": config.get("token_dropout", True)}
    _check_whole(path, canonical, section)
    return canonical, section


def verify(directory: str | Path, sequences: int = 8, seed: int = 0) -> dict:
    """Load a folder with transformers and with bmoe, in fp32, and compare logits on random sequences, alone and padded.

    Returns {architecture, sequences, tokens, max_difference, tolerance}. Raises RunError if they differ by more than
    the tolerance, RequestError without transformers.
    """
    try:
        import transformers
    except ImportError as error:
        raise RequestError("--verify needs transformers: install bmoe[hf]") from error
    directory = Path(directory)
    config = _read_config(directory)
    weights, keys = load_pretrained(directory)
    section = ModelSection(**keys)
    vocabulary = Vocabulary(config["vocab_size"], config["pad_token_id"], config.get("mask_token_id", -1))
    model = Transformer(section, vocabulary, BackendSection(experts="loop", attention="sdpa"))
    model.load_state_dict(weights)
    transformers.utils.logging.disable_progress_bar()  # of loading: lines of their own on a terminal
    auto = getattr(transformers, AUTO[section.kind][0])
    own_code = config["model_type"] == "bmoe"
    other = auto.from_pretrained(directory, trust_remote_code=own_code, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=own_code)

    generator = torch.Generator().manual_seed(seed)
    letters = sorted(i for text, i in tokenizer.get_vocab().items() if text.isalpha())
    texts = []
    for length in torch.randint(5, 100, (sequences,), generator=generator).tolist():
        ids = torch.randint(len(letters), (length,), generator=generator).tolist()
        texts.append("".join(tokenizer.convert_ids_to_tokens([letters[i] for i in ids])))
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        theirs = other(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        rows = [tokens[mask] for tokens, mask in zip(batch["input_ids"], real, strict=True)]
        ours = model.float().eval()(**pack(rows)).logits
        alone = torch.cat([other(input_ids=row[None], attention_mask=torch.ones_like(row[None])).logits[0] for row in rows])
    difference = max(float((ours - theirs[real]).abs().max()), float((ours - alone).abs().max()))
    if not difference <= TOLERANCE:
        raise RunError(f"{directory}: transformers and bmoe disagree on logits by {difference:.1e}, more than {TOLERANCE:.0e}")
    return {
        "architecture": config["architectures"][0],
        "sequences": sequences,
        "tokens": int(real.sum()),
        "max_difference": difference,
        "tolerance": TOLERANCE,
    }


def pack(rows: list[Tensor]) -> dict:
    """Inputs of `Transformer.forward` for sequences of token ids, one after the other."""
    lengths = torch.tensor([len(row) for row in rows])
    ends = lengths.cumsum(0)
    return {
        "tokens_T": torch.cat(rows),
        "positions_T": torch.cat([torch.arange(n) for n in lengths]),
        "segments_T": torch.repeat_interleave(torch.arange(len(rows)), lengths),
        "cu_seqlens": torch.cat((torch.zeros(1, dtype=ends.dtype), ends)).to(torch.int32),
        "max_seqlen": int(lengths.max()),
        "real_tokens": int(ends[-1]),
    }


def _read_config(path: Path) -> dict:
    file = path / "config.json"
    return read_json(file) if path.is_dir() and file.is_file() else {}


def _check_whole(path: Path, weights: dict[str, Tensor], section: dict | None) -> None:
    """RequestError unless `section` describes a model, and `weights` are all of its tensors, in their shapes."""
    try:
        model = ModelSection.model_validate(section)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["model", *map(str, first["loc"])])
        raise RequestError(f"{path / 'config.json'}: {where}: {first['msg'].lower()}; was it written by another version?") from None
    rows = len(weights["embedding"]) if "embedding" in weights else 0
    with torch.device("meta"):
        expected = Transformer(model, Vocabulary(rows, 0, 0), BackendSection(experts="loop")).state_dict()
    for name in [*expected, *weights]:
        wanted, found = (tuple(there[name].shape) if name in there else None for there in (expected, weights))
        if wanted != found:
            raise RequestError(f"{path}: the tensor {name} has the shape {found}, and its config.json says {wanted}; copy the folder again")


def _check_esm(path: Path, config: dict) -> None:
    """RequestError if an `esm` config asks for more than ESM-2 has."""
    wanted = {"position_embedding_type": "rotary", "emb_layer_norm_before": False, "layer_norm_eps": 1e-5, "is_decoder": False}
    for key, value in wanted.items():
        found = config.get(key, value)
        if found != value and not (value is False and found is None):
            raise RequestError(f"{path / 'config.json'}: {key} is {found}, and ESM-2 has {value}; only ESM-2 checkpoints can be read")


def _card(recipe: Recipe, section: ModelSection, reason: str | None) -> str:
    auto, trust = AUTO[section.kind][0], ", trust_remote_code=True" if reason else ""
    return f"""---
library_name: transformers
---
# {recipe.name}

{section.kind.capitalize()} of {section.layers} layers x {section.width}, alphabet `{recipe.data.alphabet}`, trained with bmoe.

```python
from transformers import {auto}, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(folder{trust})
model = {auto}.from_pretrained(folder{trust})
```
"""
