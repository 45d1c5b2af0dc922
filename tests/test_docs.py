"""Pages that are generated, or that name files and commands, stay true."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer

from bmoe import cli
from bmoe.jobs.common import load_recipe
from bmoe.reports.recipe_reference import reference

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), *(DOCS.parent / name for name in ("README.md", "CHANGELOG.md"))]


def test_recipe_reference_is_current():
    text = (DOCS / "recipe.md").read_text()
    assert text == reference(), "run: python -m bmoe.reports.recipe_reference > docs/recipe.md"


def test_examples_of_the_recipe_reference_are_recipes(tmp_path):
    (example,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "recipe.md").read_text(), re.DOTALL)
    (tmp_path / "mine.yaml").write_text(example)
    recipe, _ = load_recipe(str(tmp_path / "mine.yaml"), [])
    assert recipe.name == "mine" and recipe.optimizer.lr == 1e-3


def test_the_reference_says_the_bounds_of_numbers():
    rows = {line.split("`")[1]: line for line in reference().splitlines() if line.startswith("| `")}
    for key, values in {
        "top_k": "whole number from 1",
        "jitter": "number from 0, below 1",
        "mask_fraction": "number above 0, to 1",
        "statistics_every": "whole number from 1, `null`",
        "betas": "two numbers from 0, below 1",
        "data_shard": "`auto`, whole number from 1",
    }.items():
        assert f"| {values} |" in rows[key], rows[key]


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = (re.sub(r"[^\w\- ]", "", title.lower()) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {title.strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]*(?:#[^)\s]*)?)\)", page.read_text()):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        there = page.parent / file if file else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_code_have_flags_that_exist(page):
    """Every `bmoe ...` line of a code block names a command and flags of it; `\\` goes on with a line."""
    commands = typer.main.get_command(cli.app).commands
    known = {name: {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)} for name, command in commands.items()}
    for block in re.findall(r"```(?:bash|sh)?\n(.*?)```", page.read_text(), re.DOTALL):
        for name, rest in re.findall(r"\bbmoe ([a-z]+)\b([^\n#|;]*)", block.replace("\\\n", " ")):
            assert name in known, name
            assert set(re.findall(r"(?<!\S)--[a-z][a-z-]*", rest)) <= known[name] | {"--help"}, rest


def test_commands_of_the_multi_gpu_page_are_what_bmoe_takes(tmp_path, monkeypatch):
    """The page's script, run by bash with the command line printed in the place of each run; flags parse, recipes load, and
    steps divide among the ranks."""
    blocks = re.findall(r"```bash\n(.*?)```", (DOCS / "benchmarks-multi-gpu.md").read_text(), re.DOTALL)
    stand_ins = "nvidia-smi() { seq 8; }\ntimeout() { shift 2; printf '%s\\n' \"$*\"; }\n"
    ran = subprocess.run(["bash", "-euc", stand_ins + "".join(blocks)], cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = ran.stdout.splitlines()
    assert len(lines) == 1 + 2 + 8 + 6 + 4 + 2 + 3
    monkeypatch.chdir(DOCS.parent)
    commands = typer.main.get_command(cli.app).commands
    for line in lines:
        name, *arguments = shlex.split(line)
        given = commands[name].make_context(name, arguments, resilient_parsing=False).params
        if given.get("compare"):
            continue
        recipe, _ = load_recipe(given["recipe"], given["set_"])
        assert recipe.training.tokens_per_step % (recipe.data.tokens_per_batch * given["gpus"]) == 0, line
        assert recipe.model.moe.experts % recipe.parallel.expert == 0 == given["gpus"] % recipe.parallel.expert, line


def test_the_script_of_the_benchmarks_trains_to_the_perplexity_of_their_page():
    script = (DOCS.parent / "benchmarks" / "one_gpu.sh").read_text()
    (goal,) = re.findall(r"time_to_perplexity\.py both (--perplexity [\d.]+)", (DOCS / "benchmarks.md").read_text())
    assert re.search(rf'time_to_perplexity\.py "\$shards/both" {re.escape(goal)} ', script)
