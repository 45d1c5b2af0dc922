"""`bmoe eval`: what a trained model knows, on held-out data."""

from pathlib import Path

import torch
from rich.table import Table

from bmoe import console
from bmoe import recipe as recipes
from bmoe.data.alphabet import Alphabet, alphabet
from bmoe.errors import RequestError
from bmoe.evaluation import perplexity, routing
from bmoe.jobs.common import open_split, shard_folder
from bmoe.model.transformer import Transformer
from bmoe.parallel.world import World
from bmoe.recipe import Recipe
from bmoe.training import checkpoint, setup, state


def load_model(path: str, device: torch.device, data: str | None = None) -> tuple[Transformer, Recipe, Alphabet]:
    """The fp32 model of a run or checkpoint folder, the recipe as it runs here, the alphabet. Raises RequestError."""
    found = checkpoint.find(Path(path))
    saved = found.parent.parent / "recipe.yaml"
    if not saved.is_file():
        raise RequestError(f"{saved} is missing: a checkpoint is read with the recipe of its run; keep it in RUN/checkpoints")
    recipe = recipes.load(saved)
    backend = recipe.backend.model_copy(update={"experts": "auto", "attention": "auto", "compile": False, "recompute": "none"})
    parallel = recipe.parallel.model_copy(update={"data_replicate": 1, "data_shard": 1, "expert": 1})
    changes: dict = {"backend": backend, "parallel": parallel}
    if data:
        changes["data"] = recipe.data.model_copy(update={"path": data})
    recipe, _ = setup.resolve(recipe.model_copy(update=changes), World(device))
    letters = alphabet(recipe.data.alphabet, shard_folder(recipe))
    model = setup.build_model(recipe, letters, device)
    checkpoint.load(found, state.model_tensors(model))
    return model.eval(), recipe, letters


def evaluate(path: str, *, data: str | None, split: str, device: torch.device) -> tuple[dict, Recipe]:
    """The results of one run: perplexities beside their baselines, by length and residue, and expert loads."""
    model, recipe, _ = load_model(path, device, data)
    if recipe.precision.kind != "fp32":
        setup.to_compute_dtype(model)
    shards = open_split(recipe, shard_folder(recipe), split)
    held_out = perplexity.evaluate(model, shards, recipe, device=device)
    results = {"run": path, "split": split, **held_out.results()}
    if held_out.counts_LE is not None:
        results["routing"] = {"layers": routing.summary(held_out.counts_LE, model.moe_layers)}
    return results, recipe


def summary(results: dict) -> Table:
    """The numbers of one run, for people."""
    rows = [("run", results["run"]), ("split", f"{results['split']}: {results['sequences']:,} sequences, {results['targets']:,} targets")]
    for ending, name in (("_mask", "fully masked"), ("_8010", "training scheme"), ("", "next token")):
        if f"perplexity{ending}" in results:
            value, base = results[f"perplexity{ending}"], results[f"baseline{ending}"]
            ratio, low, high = (results[f"ratio{ending}{x}"] for x in ("", "_low", "_high"))
            text = f"{value:.3f}   baseline {base:.3f}   ratio {ratio:.4f} [{low:.4f}, {high:.4f}]   ({name})"
            rows.append((f"perplexity{ending}", text))
    for entry in results["by_length"]:
        last = entry["max_length"] or "…"
        value = entry.get("perplexity_mask", entry.get("perplexity"))
        rows.append((f"{entry['min_length']}-{last} residues", f"{value:.3f}   {entry['sequences']:,} sequences"))
    for layer in results.get("routing", {}).get("layers", []):
        rows.append((
            f"layer {layer['layer']} experts",
            f"max/mean {layer['load_max_over_mean']:.2f}   entropy {layer['load_entropy']:.3f}   dead {layer['dead_experts']}",
        ))
    return console.settings_table("evaluated", rows)
