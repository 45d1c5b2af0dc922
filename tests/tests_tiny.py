"""A recipe that the command line trains in a second, from the proteins kept with the tests."""

from pathlib import Path

import yaml

PROTEINS = Path(__file__).parent / "data" / "uniprot_500.fasta.gz"
SECTIONS = {
    "data": {"path": "shards", "fasta": str(PROTEINS), "max_length": 64, "tokens_per_batch": 256, "prepare": {"valid_fraction": 0.1}},
    "model": {"layers": 1, "width": 32, "heads": 2, "moe": {"experts": 4, "top_k": 2, "expert_width": 16}},
    "precision": {"kind": "fp32"},
    "training": {"steps": 4, "tokens_per_step": 256, "validation_tokens": 1024},
    "checkpoint": {"every": 2, "keep": 5},
}


def tiny(**sections: dict) -> str:
    """The recipe as YAML, with keys of its sections replaced or added. It is validated at its last step unless told otherwise."""
    values = {name: SECTIONS.get(name, {}) | sections.get(name, {}) for name in {**SECTIONS, **sections}}
    values["training"].setdefault("validate_every", values["training"]["steps"])
    return yaml.safe_dump({"name": "tiny", **values})
