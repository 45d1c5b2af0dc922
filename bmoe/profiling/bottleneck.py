"""The first bottleneck of a step, and the recipe key that moves it."""

BUSY = 0.7  # a GPU that computes less of the time than this waits for launches
NEAR = 0.5  # a part that reaches this share of its ceiling gains more from other arithmetic than from other code
ONCE = ("optimizer", "data wait", "communication")  # parts of a step; all others are parts of one batch

ADVICE = {
    "attention": ("data.max_length", "most of its arithmetic is of pairs of tokens, whose number grows with the square of the length"),
    "experts gemm 1": ("backend.experts", "another implementation may get closer to the ceiling; compare with --experts all"),
    "experts gemm 2": ("backend.experts", "another implementation may get closer to the ceiling; compare with --experts all"),
    "experts": ("backend.experts", "another implementation of the experts may be faster; compare with --experts all"),
    "experts activation": ("backend.experts", "an implementation that fuses the activation moves less memory"),
    "dispatch": ("backend.experts", "an implementation that fuses sorting and gathering moves less memory"),
    "combine": ("backend.experts", "an implementation that fuses the sum over experts moves less memory"),
    "router": ("backend.compile", "routing is many small operations, which compilation merges"),
    "norms": ("backend.compile", "norms and residual sums are passes over memory, which compilation merges"),
    "optimizer": ("training.tokens_per_step", "more batches a step share one optimizer update"),
    "data wait": ("data.tokens_per_batch", "the device waits for batches"),
    "head + loss": ("objective.mask_fraction", "the head runs on the masked tokens"),
    "ffn": ("precision.kind", "the feed-forward's products run at the arithmetic peak of their precision"),
    "shared expert": ("model.moe.shared_experts", "the shared expert is applied to every token"),
    "embedding": ("backend.compile", "embedding is a gather and a few elementwise passes"),
    "communication": ("training.tokens_per_step", "more batches a step share one exchange of weights and gradients"),
}
PROJECTIONS = ("model.width", "most of its arithmetic is of its projections, which grow with the square of the width and not with length")
FASTER = ("precision.kind", "these products are near what this device computes in their precision; fewer bits compute faster")
FEWER = ("model.moe.top_k", "these products are near what this CPU computes; a token that visits fewer experts needs less")


def shares(parts: dict[str, dict], batches: int) -> dict[str, float]:
    """Part -> its share of a step of `batches` batches."""
    seconds = {name: part["seconds"] * (1 if name in ONCE else batches) for name, part in parts.items()}
    whole = sum(seconds.values())
    return {name: value / whole for name, value in seconds.items()}


def bottleneck(parts: dict[str, dict], batches: int, scores: float, busy: float | None = None, cpu: bool = False) -> dict:
    """The part that takes longest of a step, the recipe key that moves it, and why.

    `scores`: `work.scores_share`. `busy`: share of the step that the GPU computes, where known. A part of the experts whose
    `ceiling_share` is high asks for other arithmetic instead of another implementation.
    """
    if busy is not None and busy < BUSY:
        why = "the GPU waits for launches; give it more at once"
        return {"part": "idle", "share": 1 - busy, "key": "data.tokens_per_batch", "why": why}
    found = shares(parts, batches)
    name = max(found, key=found.__getitem__)
    key, why = PROJECTIONS if name == "attention" and scores < 0.5 else ADVICE[name]
    if name.startswith("experts") and (parts[name].get("ceiling_share") or 0.0) > NEAR and parts[name].get("bound") == "arithmetic":
        key, why = FEWER if cpu else FASTER
    return {"part": name, "share": found[name], "key": key, "why": why}
