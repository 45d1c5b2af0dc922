"""Brings the tables of docs/scaling.md up to date with `bmoe.profiling.estimate`:  python docs/scaling/table.py"""

import re
from pathlib import Path

from bmoe import profiling
from bmoe import recipe as recipes

RECIPE = Path(__file__).parent / "protein_moe_16b.yaml"
TOKENS = 1e12
# GPUs, (data_replicate, data_shard, expert), tokens_per_step, tokens_per_batch
RUNS = [
    (8, (1, 1, 8), 2**22, 2**14), (64, (1, 8, 8), 2**22, 2**14), (64, (8, 1, 8), 2**22, 2**14), (512, (8, 8, 8), 2**23, 2**14),
    (512, (64, 1, 8), 2**23, 2**14), (4096, (64, 8, 8), 2**26, 2**14), (4096, (64, 8, 8), 2**24, 2**12),
]
COLUMNS = ["GPUs", "replicate x shard x expert", "tokens a step", "batch", "batches a rank", "memory, GiB", "step, s", "all-to-all, s",
           "weights and gradients, s", "MFU", "M tokens/s", "days for 1e12"]


def row(world: int, layout: tuple[int, int, int], per_step: int, per_batch: int, chip: str) -> str:
    """One line of a table."""
    overrides = [f"parallel.data_replicate={layout[0]}", f"parallel.data_shard={layout[1]}", f"parallel.expert={layout[2]}",
                 f"training.tokens_per_step={per_step}", f"data.tokens_per_batch={per_batch}"]
    recipe = recipes.load(RECIPE, overrides)
    found = profiling.estimate(recipe, world, chip)["predicted"][chip]
    sent = found["communication"]
    days = TOKENS / found["tokens_per_s"] / 86_400
    memory = f"{found['memory']['peak']:.0f}" + ("" if found["fits"] else ", does not fit")
    return (
        f"| {world:,} | {' x '.join(map(str, layout))} | {per_step / 2**20:.0f} Mi | {per_batch:,} | {found['batches_per_step']} "
        f"| {memory} | {found['step_s']:.2f} | {sent['all_to_all_s']:.2f} | {sent['parameter_s']:.2f} "
        f"| {100 * found['mfu']:.0f} % | {found['tokens_per_s'] / 1e6:.2f} | {days:.2f} |"
    )


def table(chip: str) -> str:
    return "\n".join([f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS), *(row(*run, chip) for run in RUNS)])


if __name__ == "__main__":
    page = RECIPE.parent.parent / "scaling.md"
    tables = iter([table(chip) for chip in ("h100", "b200", "gb200")])  # in the order of the page
    page.write_text(re.sub(r"(?m)^\| GPUs (?:.*\n)(?:\|.*\n)+", lambda _: next(tables) + "\n", page.read_text()))
