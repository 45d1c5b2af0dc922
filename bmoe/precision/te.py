"""The Transformer Engine recipe of each precision, and the context that runs a forward pass under it.

MXFP8 and block scaling use E4M3 in both directions: the block scales give gradients the range they need, and the fused
grouped MLP accepts nothing else. Per-tensor scaling uses E4M3 forward and E5M2 backward (`HYBRID`).
"""

from contextlib import AbstractContextManager, nullcontext

KINDS = ("fp8_current", "fp8_block", "fp8_delayed", "mxfp8")


def te_recipe(kind: str):
    """A `transformer_engine.common.recipe.Recipe` for a kind of KINDS. Needs Transformer Engine."""
    from transformer_engine.common import recipe

    if kind == "mxfp8":
        return recipe.MXFP8BlockScaling(fp8_format=recipe.Format.E4M3)
    if kind == "fp8_block":
        return recipe.Float8BlockScaling(fp8_format=recipe.Format.E4M3)
    if kind == "fp8_current":
        return recipe.Float8CurrentScaling(fp8_format=recipe.Format.HYBRID)
    if kind == "fp8_delayed":
        return recipe.DelayedScaling(fp8_format=recipe.Format.HYBRID)
    raise ValueError(f"{kind} is no Transformer Engine precision")


def autocast(kind: str) -> AbstractContextManager:
    """Context of a forward pass in `kind`; it does nothing for fp32 and bf16."""
    if kind not in KINDS:
        return nullcontext()
    import transformer_engine.pytorch as te

    return te.autocast(enabled=True, recipe=te_recipe(kind))
