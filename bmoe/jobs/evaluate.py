"""`bmoe eval`: what trained models know, on held-out data and on the user's tables, structures and sequences."""

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from bmoe import console
from bmoe import recipe as recipes
from bmoe.data.alphabet import Alphabet, alphabet
from bmoe.errors import RequestError
from bmoe.evaluation import (
    baselines,
    contacts,
    embeddings,
    generation,
    groups,
    mutations,
    pairs,
    perplexity,
    probe,
    pseudo,
    routing,
    specialisation,
)
from bmoe.evaluation.perplexity import Perplexity
from bmoe.jobs.common import open_split, shard_folder
from bmoe.model.transformer import Transformer
from bmoe.parallel.world import World
from bmoe.precision.emulate import emulate
from bmoe.recipe import Recipe
from bmoe.training import checkpoint, setup, state


def load_model(path: str, device: torch.device, data: str | None = None) -> tuple[Transformer, Recipe, Alphabet]:
    """The fp32 model of a run or checkpoint folder, the recipe as it runs here, the alphabet. Raises RequestError."""
    found = checkpoint.find(Path(path))
    saved = found.parent.parent / "recipe.yaml"
    if not saved.is_file():
        raise RequestError(f"{saved} is missing: a checkpoint is read with the recipe of its run; keep it in RUN/checkpoints")
    recipe = recipes.load(saved)
    backend = recipe.backend.model_copy(
        update={"experts": "auto", "attention": "auto", "compile": False, "recompute": "none", "graphs": "auto"}
    )
    parallel = recipe.parallel.model_copy(update={"data_replicate": 1, "data_shard": 1, "expert": 1})
    changes: dict = {"backend": backend, "parallel": parallel}
    low = recipe.precision.kind not in ("fp32", "bf16") and not recipe.precision.emulate
    if low and device.type == "cpu":
        console.note(f"{recipe.precision.kind} does not run on the CPU: evaluating in bf16")
        changes["precision"] = recipe.precision.model_copy(update={"kind": "bf16"})
    if data:
        changes["data"] = recipe.data.model_copy(update={"path": data})
    recipe, _ = setup.resolve(recipe.model_copy(update=changes), World(device))
    letters = alphabet(recipe.data.alphabet, shard_folder(recipe))
    model = setup.build_model(recipe, letters, device)
    checkpoint.load(found, state.model_tensors(model))
    if broken := next((name for name, p in model.named_parameters() if not torch.isfinite(p).all()), None):
        raise RequestError(f"{found}: {broken} has values that are no numbers; name an earlier checkpoint of the run")
    return model.eval(), recipe, letters


class Wanted(NamedTuple):
    """What to evaluate besides the perplexity of a split; None or False leaves a part out."""

    by: str | None = None
    pseudo: bool = False
    mutations: str | None = None
    wildtype: str | None = None
    column: str | None = None
    methods: tuple[str, ...] = ()
    scores: str | None = None
    structures: str | None = None
    probe: str | None = None
    routing: bool = False
    embed: str | None = None
    out: str | None = None
    mode: str | None = None
    layer: int | None = None
    generate: int | None = None
    prompt: str = ""
    temperature: float | None = None
    top_k: int | None = None

    def check(self) -> None:
        """Raises RequestError for flags that do not go together."""
        if (self.mutations is None) != (self.wildtype is None):
            raise RequestError("--mutations CSV and --wildtype FASTA go together")
        if self.column and self.mutations is None:
            raise RequestError("--column names a column of the table of --mutations, which is missing")
        if self.scores and self.mutations is None:
            raise RequestError("--scores FILE.csv takes the scores of --mutations, which is missing")
        if self.methods and self.mutations is None:
            raise RequestError("--method scores the variants of --mutations, which is missing")
        for method in self.methods:
            if method not in mutations.METHODS:
                raise RequestError(f"--method {method}: there are {', '.join(mutations.METHODS)}")
        if (self.embed is None) != (self.out is None):
            raise RequestError("--embed FASTA and --out FILE.safetensors go together")
        if self.embed is None and (self.mode is not None or self.layer is not None):
            raise RequestError("--mode and --layer say which states --embed FASTA writes, which is missing")
        if self.mode is not None and self.mode not in embeddings.MODES:
            raise RequestError(f"--mode {self.mode}: embeddings are by {' or '.join(embeddings.MODES)}")
        if self.prompt and self.generate is None:
            raise RequestError("--prompt begins the sequences of --generate N, which is missing")
        if self.generate is None and (self.temperature is not None or self.top_k is not None):
            raise RequestError("--temperature and --top-k are for --generate N, which is missing")

    @property
    def needs_split(self) -> bool:
        """Whether the run's data is read: always, unless only sequences of other files are asked about."""
        elsewhere = (self.mutations, self.structures, self.probe, self.embed, self.generate)
        return self.routing or self.pseudo or bool(self.by) or not any(elsewhere)


def evaluate(paths: list[str], wanted: Wanted, *, data: str | None, split: str, device: torch.device) -> tuple[list[dict], Recipe]:
    """The results of each run, and the recipe of the last. Runs on the same targets are compared with the first, in pairs."""
    wanted.check()
    found = [Path(path).resolve() for path in paths]
    if twice := next((path for path, at in zip(paths, found, strict=True) if found.count(at) > 1), None):
        raise RequestError(f"{twice} is named twice: a model is compared with others; leave one out")
    if len(paths) > 1 and (wanted.embed or wanted.scores):
        raise RequestError("--embed and --scores write one model's file: give one RUN with them")
    results, first = [], None
    intact: set[Path] = set()
    for path in paths:
        model, recipe, letters = load_model(path, device, data)
        if recipe.precision.kind != "fp32":
            setup.to_compute_dtype(model)
        if recipe.precision.emulate:
            emulate(model, recipe.precision)
        found: dict = {"run": path}
        held_out = None
        if wanted.needs_split:
            dense_beside_others = len(paths) > 1 and not model.moe_layers
            if wanted.routing and dense_beside_others:
                console.note(f"{path} is dense: no routing to look at")
            here = wanted._replace(routing=wanted.routing and not dense_beside_others)
            held_out = held_out_results(found, model, recipe, here, split, device, intact)
        other_results(found, model, recipe, letters, wanted, device)
        if first is None:
            first = held_out, found
        else:
            found["compared"] = paired(held_out, found, *first)
        results.append(found)
    return results, recipe


def held_out_results(
    found: dict, model: Transformer, recipe: Recipe, wanted: Wanted, split: str, device: torch.device, intact: set[Path]
) -> Perplexity:
    """Add what is measured on a split of the run's data to `found`. `intact`: folders whose split was hashed already, and this one
    after it."""
    shards = open_split(recipe, shard_folder(recipe), split)
    if (folder := shards.directory.resolve()) not in intact:
        shards.check()
        intact.add(folder)
    held_out = perplexity.evaluate(model, shards, recipe, device=device)
    found |= {"split": split, **held_out.results()}
    ending = "" if recipe.objective.kind == "clm" else "_mask"
    found[f"bigram{ending}"] = baselines.bigram(shards, recipe, recipe.training.validation_tokens)
    if held_out.counts_LE is not None:
        found["routing"] = {"layers": routing.summary(held_out.counts_LE, model.moe_layers)}
    if wanted.by:
        found |= {"by_field": wanted.by, "by_group": groups.by_field(held_out, shards, wanted.by)}
    if wanted.pseudo:
        found["pseudo"] = pseudo.evaluate(model, shards, recipe, device=device, budget=recipe.training.validation_tokens)
    if wanted.routing:
        found["routing"] = specialisation.evaluate(model, shards, recipe, device=device, structures=wanted.probe)
    return held_out


def other_results(found: dict, model: Transformer, recipe: Recipe, letters: Alphabet, wanted: Wanted, device: torch.device) -> None:
    """Add what is measured on files of the user's to `found`."""
    if wanted.mutations and wanted.wildtype:
        chosen = tuple(dict.fromkeys(mutations.METHODS[method] for method in wanted.methods)) or None
        found["mutations"] = mutations.evaluate(
            model, recipe, letters, wanted.mutations, wanted.wildtype, wanted.column, device, chosen, wanted.scores
        )
    if wanted.structures:
        found["contacts"] = contacts.evaluate(model, recipe, letters, wanted.structures, device)
    if wanted.probe:
        found["probe"] = probe.evaluate(model, recipe, letters, wanted.probe, device)
    if wanted.embed and wanted.out:
        found["embeddings"] = embeddings.embed(
            model, recipe, letters, wanted.embed, wanted.out, device, wanted.mode or "residue", wanted.layer
        )
    if wanted.generate:
        found["generation"] = generation.evaluate(
            model,
            recipe,
            letters,
            device=device,
            samples=wanted.generate,
            prompt=wanted.prompt,
            temperature=1.0 if wanted.temperature is None else wanted.temperature,
            top_k=wanted.top_k,
            seed=recipe.seed,
        )


def paired(here: Perplexity | None, found: dict, there: Perplexity | None, other: dict) -> dict:
    """One run beside another: ratios of perplexities on the same targets, and differences of what else was measured on the same
    data; empty where the data differ."""
    schemes = {}
    if here is not None and there is not None:
        with suppress(ValueError):  # other data, or another budget
            schemes = perplexity.compare(here, there)
    return {"to": other["run"], "schemes": schemes, "differences": pairs.differences(found, other)}
