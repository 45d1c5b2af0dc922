"""docs/recipe.md, generated from the schema: `python -m bmoe.reports.recipe_reference > docs/recipe.md`."""

import re
import sys
from typing import get_args

import yaml
from pydantic_core import PydanticUndefined

from bmoe.recipe import Recipe, Section, section_of

INTRO = """# Recipe reference

Every command reads the same recipe. This page is generated from the schema; a test keeps it current.

- A key that is left out has its default. An unknown key is an error that names the nearest known one.
- `--set section.key=value` overrides a value, as often as needed; the value is YAML (`--set model.moe=null`).
- Numbers may be written as people write them: `4e-4`, `1e6`.
- `auto` is resolved when the command starts; `runs/NAME/recipe.yaml` has what was chosen, and why. That file alone repeats
  the run.
- `data.fasta` is relative to the recipe file; `data.path` and `--out` to the working directory.
"""


def reference() -> str:
    """The whole page."""
    return INTRO + "".join(_section(Recipe, ""))


def _section(section: type[Section], path: str) -> list[str]:
    title = f"`{path}`" if path else "Top level"
    doc = (section.__doc__ or "").strip()
    lines = [f"\n## {title}\n\n{doc}\n\n| key | values | default | meaning |\n|---|---|---|---|\n"]
    below: list[str] = []
    for name, field in section.model_fields.items():
        key = field.alias or name
        full = f"{path}.{key}" if path else key
        sub = section_of(field.annotation)
        if sub:
            below += _section(sub, full)
            meaning = field.description or (sub.__doc__ or "").strip().splitlines()[0]
            lines.append(f"| `{key}` | section | see `{full}` | {meaning} |\n")
        else:
            lines.append(f"| `{key}` | {_values(field)} | {_default(field)} | {field.description} |\n")
    return lines + below


def _default(field) -> str:
    value = field.default_factory() if field.default is PydanticUndefined else field.default
    text = yaml.safe_dump(list(value) if isinstance(value, tuple) else value, default_flow_style=True).strip()
    return f"`{text.removesuffix('...').strip()}`"


def _values(field) -> str:
    text = str(field.annotation).replace("typing.", "")
    literal = re.findall(r"Literal\[([^\]]*)\]", text)
    parts = [part.strip().strip("'") for group in literal for part in group.split(",")]
    names = {"True": "true", "False": "false"}
    words = [f"`{names.get(part, part)}`" for part in parts]
    rest = re.sub(r"Literal\[[^\]]*\]", "", text)
    for kind, word in (
        ("tuple", "two numbers"),
        ("int", "whole number"),
        ("float", "number"),
        ("bool", "`true`, `false`"),
        ("str", "text"),
    ):
        if re.search(rf"\b{kind}\b", rest):
            words.append(word)
            break
    if type(None) in get_args(field.annotation):
        words.append("`null`")
    return ", ".join(words)


if __name__ == "__main__":
    sys.stdout.write(reference())
