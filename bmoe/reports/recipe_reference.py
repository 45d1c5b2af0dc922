"""docs/recipe.md, generated from the schema: `python -m bmoe.reports.recipe_reference > docs/recipe.md`."""

import re
import sys
from collections.abc import Iterator
from typing import get_args

import yaml
from pydantic_core import PydanticUndefined

from bmoe.recipe import Recipe, Section, section_of

INTRO = """# Recipe reference

Every command reads the same recipe, a YAML file. This one, saved as `mine.yaml`, trains a small encoder on shards in `data/my_proteins`
(`bmoe train mine.yaml`); everything else has its default:

```yaml
name: mine
data: {path: data/my_proteins, tokens_per_batch: 8192}
model: {layers: 6, width: 320, heads: 20, moe: {experts: 8, top_k: 2, expert_width: 448}}
optimizer: {lr: 1e-3}
schedule: {warmup_steps: 100}
training: {steps: 1000, tokens_per_step: 65536, validate_every: 200}
```

The recipes that ship with bmoe, in `recipes/`, are larger examples with comments. `bmoe train RECIPE --dry-run` checks a recipe and shows
it whole. This page is generated from the schema; a test keeps it current.

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
            words.append(word + _range(field))
            break
    if type(None) in get_args(field.annotation):
        words.append("`null`")
    return ", ".join(words)


def _range(field) -> str:
    """The bounds of a number, as ` from 0 to 1` or ` above 0, to 1`; empty where there are none."""
    bounds = {name: getattr(mark, name) for mark in _marks(field) for name in ("ge", "gt", "le", "lt") if hasattr(mark, name)}
    words = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}
    between = " " if {"ge", "le"} <= bounds.keys() else ", "
    return (" " + between.join(f"{words[name]} {bounds[name]:g}" for name in words if name in bounds)).rstrip()


def _marks(field) -> Iterator[object]:
    """What annotates a field's type, at any depth of it."""
    yield from getattr(field, "metadata", ())
    for part in get_args(getattr(field, "annotation", field)):
        yield from _marks(part)
        for mark in getattr(part, "__metadata__", ()):
            yield from _marks(mark)


if __name__ == "__main__":
    sys.stdout.write(reference())
