"""The report of a training run, RUN/report.html, from what the run left in its folder.

Reads metrics.jsonl, recipe.yaml and, if it is there, evaluation.json (`{"results": {...}}` with the results of `bmoe eval`).
"""

import json
import math
from pathlib import Path

from bmoe import __version__
from bmoe.errors import RequestError
from bmoe.recipe import Recipe, load
from bmoe.reports import perplexity as perplexity_parts
from bmoe.reports.page import details, grid, number, page, section, table, tiles
from bmoe.reports.plots import Series, heat_map, line_plot
from bmoe.reports.quantisation import quantisation_section

COLUMNS = 40  # of the heat maps over steps


def write_training_report(run_dir: Path) -> Path:
    """Write RUN/report.html and return its path. RequestError if the folder has no metrics."""
    run_dir = Path(run_dir)
    records = _records(run_dir / "metrics.jsonl")
    recipe_file = run_dir / "recipe.yaml"
    recipe = load(recipe_file)
    evaluation = run_dir / "evaluation.json"
    results = json.loads(evaluation.read_text())["results"] if evaluation.is_file() else {}
    out = run_dir / "report.html"
    partial = out.with_suffix(".partial")
    partial.write_text(_render(records, recipe, recipe_file.read_text(), results), encoding="utf-8")
    partial.replace(out)
    return out


def _records(path: Path) -> list[dict]:
    """Whole lines of metrics.jsonl; a kill may have left the last one unfinished."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error.strerror}); name the folder of a run") from None
    records = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    if not records:
        raise RequestError(f"{path} holds no logged step yet, so there is nothing to report")
    return records


def _render(records: list[dict], recipe: Recipe, recipe_text: str, results: dict) -> str:
    last = records[-1]
    steps = [r["step"] for r in records]
    model, moe = recipe.model, recipe.model.moe
    experts = f"{moe.experts} experts, {moe.top_k} per token" if moe else "dense"
    subtitle = (
        f"{model.kind} of {model.layers} layers x {model.width}, {experts}; step {number(last['step'])} of "
        f"{number(recipe.training.steps)}; bmoe {__version__}"
    )
    parts = [
        tiles(_key_numbers(records, recipe, results)),
        section("Learning", grid(*_learning(records, steps)), text=_learning_text(recipe)),
        perplexity_parts.sections(results),
        _expert_section(records, results) if moe else "",
        quantisation_section(records),
        section("Speed and stability", grid(*_speed(records, steps))),
        section("Numbers", _validations(records), details("All logged steps", _all_steps(records)), details("Recipe", recipe_text)),
    ]
    return page(f"Training of {recipe.name}", subtitle, parts)


EXPERTS_TEXT = (
    "Every token is sent to a few experts of each layer. An even load uses the whole model: the busiest expert then has little "
    "more than the mean, and no expert is without tokens."
)


def _expert_section(records: list[dict], results: dict) -> str:
    layers = results.get("routing", {}).get("layers", [])
    figures = grid(*_experts(records), perplexity_parts.load_figure(layers))
    return section("Experts", figures, perplexity_parts.load_table(layers), text=EXPERTS_TEXT)


def _learning_text(recipe: Recipe) -> str:
    if recipe.objective.kind == "clm":
        return (
            "Perplexity is the number of equally likely tokens the model is left with for the next one; lower is better. "
            "The baseline knows only how frequent each token is."
        )
    return (
        "Perplexity is the number of equally likely residues the model is left with for a hidden one; lower is better. "
        "Under the training scheme some hidden residues are shown as they are or replaced, so its number is lower; judge the model by "
        "the fully masked one. Each baseline knows only how frequent each residue is, and its scheme."
    )


def _key_numbers(records: list[dict], recipe: Recipe, results: dict) -> list[tuple[str, str]]:
    last = records[-1]
    valid = next((r for r in reversed(records) if "valid_loss" in r), {})
    ending = "" if recipe.objective.kind == "clm" else "_mask"
    items = []
    if valid:
        perplexity, baseline = valid[f"valid_perplexity{ending}"], valid[f"valid_baseline{ending}"]
        scheme = "fully masked" if ending else "next token"
        items.append((number(perplexity), f"validation perplexity, {scheme} (baseline {number(baseline)})"))
        low, high = results.get(f"ratio{ending}_low"), results.get(f"ratio{ending}_high")
        span = f", 95 % interval {number(low)} to {number(high)}" if low is not None and math.isfinite(low) else ""
        items.append((number(results.get(f"ratio{ending}", perplexity / baseline)), f"of the baseline{span}"))
    items.append((number(round(last["tokens"])), "tokens seen"))
    items.append((number(round(_median([r["residues_per_s"] for r in records]))), "residues per second (median)"))
    if last.get("mfu") is not None:
        known = [r["mfu"] for r in records if r.get("mfu") is not None]
        items.append((f"{100 * _median(known):.1f} %", "model FLOPs utilisation (median)"))
    items.append((f"{last['peak_memory_gib']:.2f} GiB", "peak memory"))
    if last["skipped_steps"]:
        items.append((number(last["skipped_steps"]), "steps skipped, gradient not finite"))
    return items


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def _learning(records: list[dict], steps: list[int]) -> list[str]:
    valid = [r for r in records if "valid_loss" in r]
    at = [r["step"] for r in valid]
    clm = bool(valid) and "valid_perplexity" in valid[0]
    training = "" if clm else "_8010"
    curves = [Series("training", steps, [r["loss"] for r in records], colour=4)]
    if valid:
        baseline = [math.log(r[f"valid_baseline{training}"]) for r in valid]
        curves.append(Series("validation", at, [r["valid_loss"] for r in valid], colour=0))
        curves.append(_level("baseline", steps, at, baseline, 1))
    figures = [line_plot("Loss", curves, "step", "nats per target", "Cross entropy of the training scheme.")]
    titles = {"": "Perplexity of the next token", "_mask": "Perplexity, fully masked", "_8010": "Perplexity, training scheme"}
    for name, title in titles.items():
        values = [r.get(f"valid_perplexity{name}") for r in valid]
        if any(v is not None for v in values):
            level = _level("baseline", steps, at, [r[f"valid_baseline{name}"] for r in valid], 1)
            figures.append(line_plot(title, [Series("validation", at, values, colour=0), level], "step", "perplexity"))
    return figures


def _level(name: str, steps: list[int], at: list[int], values: list[float], colour: int) -> Series:
    """The last value over all steps: baselines do not change."""
    return Series(name, [steps[0], max(steps[-1], at[-1])], [values[-1], values[-1]], dashed=True, colour=colour)


def _experts(records: list[dict]) -> list[str]:
    chosen = records[:: -(-len(records) // COLUMNS)]
    layers = [i for i, value in enumerate(records[-1]["load_max_over_mean"]) if value is not None]
    rows, columns = [str(i + 1) for i in layers], [number(r["step"]) for r in chosen]
    busiest = [[r["load_max_over_mean"][i] for r in chosen] for i in layers]
    entropy = [[r["load_entropy"][i] for r in chosen] for i in layers]
    steps = [r["step"] for r in records]
    losses = [Series("balance loss", steps, [_mean(r["balance_loss"]) for r in records])]
    z_losses = [Series("z-loss", steps, [_mean(r["z_loss"]) for r in records], colour=1)]
    dead = [Series("dead experts", steps, [sum(v for v in r["dead_experts"] if v is not None) for r in records], colour=5)]
    return [
        heat_map("Busiest expert over the mean", busiest, rows, columns, "step", "layer", "1 is an even load.", low=1.0),
        heat_map("Evenness of the load", entropy, rows, columns, "step", "layer", "Entropy of the load over its maximum; 1 is even.",
                 high=1.0),
        line_plot("Balance loss", losses, "step", "mean over layers", "1 is an even load."),
        line_plot("Router z-loss", z_losses, "step", "mean over layers"),
        line_plot("Experts without a token", dead, "step", "experts in all layers", zero=True),
    ]  # fmt: skip


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _speed(records: list[dict], steps: list[int]) -> list[str]:
    def plot(title: str, key: str, y_label: str, colour: int, zero: bool = True) -> str:
        return line_plot(title, [Series(title, steps, [r.get(key) for r in records], colour=colour)], "step", y_label, zero=zero)

    return [
        plot("Throughput", "residues_per_s", "residues per second", 0),
        plot("Model FLOPs utilisation", "mfu", "share of the peak", 2),
        plot("Gradient norm", "grad_norm", "norm before clipping", 3, zero=False),
        plot("Learning rate", "lr", "learning rate", 2),
    ]


def _validations(records: list[dict]) -> str:
    valid = [r for r in records if "valid_loss" in r]
    if not valid:
        return ""
    names = [key for key in valid[-1] if key.startswith("valid_")]
    head = ["step", "training loss", *(n.removeprefix("valid_").replace("_", " ") for n in names)]
    return table(head, [[r["step"], r["loss"], *(r.get(n) for n in names)] for r in valid])


def _all_steps(records: list[dict]) -> str:
    """Tab-separated scalars of every logged step."""
    names = [key for key, value in records[-1].items() if not isinstance(value, list)]
    lines = ["\t".join(names)]
    lines += ["\t".join(f"{v:.6g}" if isinstance(v := r.get(n), float) else str("" if v is None else v) for n in names) for r in records]
    return "\n".join(lines)
