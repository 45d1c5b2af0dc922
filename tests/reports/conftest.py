"""A run's folder as training leaves it, with made-up but plausible numbers."""

import json
import math

import pytest

from bmoe import recipe as recipes


def records(steps: int = 400, layers: int = 4, dense: int = 1, clm: bool = False) -> list[dict]:
    out = []
    for step in [1, *range(10, steps + 1, 10)]:
        done = step / steps
        loss = 2.88 - 0.25 * (1 - math.exp(-3 * done)) + 0.02 * math.sin(step)
        wave = [None] * dense + [1.0 + 2.5 * math.exp(-4 * done) * (1 + 0.2 * math.sin(step + i)) for i in range(dense, layers)]
        record = {
            "step": step, "loss": loss, "lr": 2e-3 * min(1, step / 50) * (1 - 0.9 * done), "grad_norm": 0.6 + 2 * math.exp(-step / 30),
            "tokens": step * 2000, "residues_per_s": 9000 + 300 * math.cos(step), "tokens_per_s": 9600.0, "step_s": 0.21, "mfu": None,
            "peak_memory_gib": 0.83, "fill": 0.977, "skipped_steps": 0, "load_max_over_mean": wave,
            "load_entropy": [None if w is None else 1 - 0.1 * (w - 1) for w in wave],
            "balance_loss": [None if w is None else 1 + 0.05 * (w - 1) for w in wave],
            "z_loss": [None if w is None else 4 * math.exp(-done) for w in wave],
            "dead_experts": [None if w is None else int(w > 2.5) for w in wave],
        }  # fmt: skip
        if step % 100 == 0:
            names = {"valid_perplexity": math.exp(loss + 0.01), "valid_baseline": 18.1} if clm else {
                "valid_perplexity_8010": math.exp(loss + 0.01), "valid_perplexity_mask": math.exp(loss + 0.16),
                "valid_baseline_8010": 15.18, "valid_baseline_mask": 18.12,
            }  # fmt: skip
            record |= {"valid_loss": loss + 0.01, **names}
        out.append(record)
    return out


def evaluation_results() -> dict:
    bins = [(1, 128, 210, 17.8), (129, 256, 540, 17.4), (257, 512, 830, 17.1), (513, 1024, 330, 17.0), (1025, None, 90, 17.2)]
    return {
        "sequences": 2000, "targets": 121_034, "perplexity_8010": 14.6, "perplexity_8010_low": 14.5, "perplexity_8010_high": 14.72,
        "perplexity_mask": 17.2, "perplexity_mask_low": 17.1, "perplexity_mask_high": 17.31, "baseline_8010": 15.18, "baseline_mask": 18.12,
        "ratio_8010": 0.962, "ratio_8010_low": 0.958, "ratio_8010_high": 0.967, "ratio_mask": 0.949, "ratio_mask_low": 0.943,
        "ratio_mask_high": 0.955,
        "by_length": [
            {"min_length": a, "max_length": b, "sequences": n, "targets": n * 50, "perplexity_8010": p - 2.6, "baseline_8010": 15.2,
             "perplexity_mask": p, "baseline_mask": 18.1}
            for a, b, n, p in bins
        ],
        "by_residue": [
            {"residue": letter, "targets": 9000 - 400 * i, "perplexity_8010": 8 + i, "baseline_8010": 9 + i, "perplexity_mask": 9 + 2 * i,
             "baseline_mask": 10 + 2.2 * i}
            for i, letter in enumerate("LAGVSERTIDPKQNFYMHWC")
        ],
        "routing": {"layers": [
            {"layer": n + 1, "load": [0.125 + 0.05 * math.sin(n * 3 + e) for e in range(8)], "load_max_over_mean": 1.4,
             "load_entropy": 0.98, "dead_experts": 0}
            for n in range(1, 4)
        ]},
    }  # fmt: skip


def interval(value: float) -> dict:
    return {"": value, "_low": value - 0.03, "_high": value + 0.03}


def named(key: str, value: float) -> dict:
    return {key + ending: number for ending, number in interval(value).items()}


def question(labels: list[str], layers: int, experts: int = 8) -> dict:
    entries = []
    for layer in range(layers):
        weight = [[1 + math.sin(layer + e * 2 + c * 3) for c in range(len(labels))] for e in range(experts)]
        shares = [[w / sum(row) for w in row] for row in weight]
        overall = [1 / len(labels)] * len(labels)
        bits = {"bits": 0.2 + 0.1 * layer, "null_mean": 0.01, "null_95": 0.02, "p": 0.0099}
        entries.append({"layer": layer + 2, "shares": shares, "overall": overall, **bits})
    return {"labels": labels, "layers": entries}


def full_results(run: str = "runs/a", shift: float = 0.0) -> dict:
    """Results with every part of `bmoe eval`."""
    precision = {}
    for key, value in (("p_at_l", 0.1), ("p_at_l2", 0.14), ("p_at_l5", 0.2)):
        precision |= {**named(key, value + shift), f"{key}_by_separation": 0.04}
    curve = [{"layer": i, "valid_accuracy": 0.4 + 0.02 * i, "test_accuracy": 0.4 + 0.02 * i + shift} for i in range(5)]
    states = {**named("accuracy", 0.48 + shift), "classes": 8, "majority": 0.33, "majority_class": "H", "best_layer": 4, "layers": curve}
    spearman = {**named("spearman", 0.3 + shift), "auc": 0.66}
    groups = evaluation_results()["by_length"][:2]
    return {
        **evaluation_results(), "run": run, "split": "valid", "bigram_mask": 17.9,
        "pseudo": {"pseudo_perplexity": 16.9, "low": 16.7, "high": 17.1, "sequences": 30, "residues_asked": 900, "residues": 9000},
        "by_field": "OS", "by_group": [{"group": name, **g} for name, g in zip(("Homo sapiens", "all others"), groups, strict=True)],
        "mutations": {
            **spearman, "n": 300, "method": "masked_marginal", "methods": {"masked_marginal": spearman, "wt_marginal": spearman},
            "blosum62": {**spearman, "auc": 0.61},
            "wildtype": "BLAT_ECOLX", "wildtype_length": 286, "column": "2500", "positive": "2500 above its median", "offset": 23,
            "dropped": {"no effect": 3}, "multiple": 2, "points": [[math.sin(i), math.cos(i * 1.3)] for i in range(300)],
        },
        "contacts": {
            "chains": 42, "families": 19, "residues": 8969, "longer_than_trained": 2, "short": precision, "medium": precision,
            "long": precision,
            "per_chain": [{"chain": "1A8O_A:A", "length": 66, "family": 1, "long_p_at_l": 0.1}],
            "maps": [{"chain": "1A8O_A:A", "length": 66, "long_p_at_l": 0.1, "true": [[1, 9], [3, 30], [5, 60]],
                      "predicted": [[1, 9], [4, 40]]}],
        },
        "probe": {"read": 2000, "repeats": 360, "conflicting": 35, "sequences": 1892, **states,
                  "residues": {"train": 36000, "valid": 9000, "test": 15000}, "three_state": {**states, "classes": 3}},
        "routing": {
            **evaluation_results()["routing"], "tokens": 65536, "residue": question(list("ACDEFGHIKLMNPQRSTVWY"), 3),
            "structure": question(["H", "E", "coil"], 3), "position": question(["1–16", "17–64", "> 64"], 3),
            "next_layer": question([str(e + 1) for e in range(8)], 2),
        },
        "embeddings": {"file": "x.safetensors", "mode": "mean", "layer": 4, "sequences": 3, "width": 128, "residues": 900, "longest": 400,
                       "longer_than_trained": 1},
        "generation": {"prompt": "M", "n": 1, "perplexity": 12.0, "ended": 1, "mean_length": 80.0,
                       "samples": [{"sequence": "MKTA" * 20, "length": 80, "ended": True, "perplexity": 12.0}]},
    }  # fmt: skip


@pytest.fixture
def make_results():
    return full_results


@pytest.fixture
def make_run(tmp_path):
    """make_run(clm=..., evaluated=...) -> the run's folder."""

    def make(clm: bool = False, evaluated: bool = True, dense: bool = False):
        folder = tmp_path / "run"
        folder.mkdir()
        rows = records(clm=clm, dense=4 if dense else 1)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        values = {"name": "esm2_moe_tiny", "model": {"layers": 4, "width": 128, "heads": 4, "kind": "decoder" if clm else "encoder"},
                  "objective": {"kind": "clm" if clm else "mlm"}, "training": {"steps": 400}}  # fmt: skip
        if dense:
            values["model"]["moe"] = None
        (folder / "recipe.yaml").write_text(recipes.dump(recipes.validate(values)))
        if evaluated:
            (folder / "evaluation.json").write_text(json.dumps({"results": evaluation_results()}))
        return folder

    return make
