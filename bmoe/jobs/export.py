"""`bmoe export`: a checkpoint as a folder that other tools load."""

from pathlib import Path

import torch

from bmoe.interop import huggingface
from bmoe.jobs.evaluate import load_model


def export(path: str, to: str, check: bool) -> dict:
    """Write the fp32 masters of a run or checkpoint to the folder `to`; with `check`, load it again and compare logits."""
    model, recipe, letters = load_model(path, torch.device("cpu"))
    results = huggingface.export(model, recipe, Path(to), letters)
    if check:
        results["verified"] = huggingface.verify(Path(to))
    return results


def rows(results: dict) -> list[tuple[str, str]]:
    """The results as they are shown: names and values."""
    own_code = "with its modelling file: load it with trust_remote_code=True" if results["own_code"] else "known to transformers"
    shown = [
        ("folder", results["directory"]),
        ("architecture", f"{results['architecture']}, {own_code}"),
        ("parameters", f"{results['parameters']:,}"),
        ("size", f"{results['bytes'] / 1e6:,.1f} MB"),
    ]
    if found := results.get("verified"):
        close = f"logits differ by {found['max_difference']:.1e} at most ({found['tolerance']:.0e} is allowed)"
        shown.append(("verified", f"{close}, {found['sequences']} random sequences of {found['tokens']:,} tokens"))
    return shown
