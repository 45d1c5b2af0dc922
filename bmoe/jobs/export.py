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
