"""Reading and writing recipes: YAML with places, overrides, all faults at once, and back."""

import difflib
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from bmoe.recipe.rules import broken_rules
from bmoe.recipe.schema import Recipe, known_keys, section_of

PACKAGE = Path(__file__).parent.parent


class RecipeError(ValueError):
    """A recipe cannot be used. `faults` holds one sentence each, with file:line and section.key."""

    def __init__(self, faults: list[str]):
        self.faults = faults
        super().__init__("\n".join(faults))


class _Loader(yaml.SafeLoader):
    """YAML with numbers as people write them: `4e-4` is a number."""


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would take for a number."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def _plain(node: yaml.Node, path: str, where: str, lines: dict[str, str], faults: list[str]) -> Any:
    """Turn a YAML node into plain Python, noting the place of every key and every duplicate key."""
    if isinstance(node, yaml.MappingNode):
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            full = f"{path}.{key}" if path else key
            place = f"{where}:{key_node.start_mark.line + 1}"
            if key in out:
                faults.append(f"{place}: {full} is given twice; keep one")
            lines[full] = place
            out[key] = _plain(value_node, full, where, lines, faults)
        return out
    if isinstance(node, yaml.SequenceNode):
        return [_plain(child, path, where, lines, faults) for child in node.value]
    return _Loader("").construct_object(node)


def _parse(text: str, where: str, lines: dict[str, str], faults: list[str], path: str = "") -> Any:
    try:
        node = yaml.compose(text, Loader=_Loader)
        return None if node is None else _plain(node, path, where, lines, faults)
    except RecursionError:
        raise RecipeError([f"{where}: an alias in this YAML contains itself; write the value out"]) from None
    except ValueError as error:
        raise RecipeError([f"{where}: a value cannot be read ({error}); put text between quotes"]) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}" if mark else where
        if text.startswith(">"):
            raise RecipeError([f"{where} holds sequences and is no recipe; prepare it first: bmoe prepare {where}"]) from None
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise RecipeError([f"{place}: this is not YAML ({problem}); check indentation, quotes and brackets"]) from None


def _nearest(key: str) -> str:
    """Name the nearest known key: a sibling first, else a key of the same name in another section. Digits are no key: in {a: 0,5} YAML
    sees a key 5."""
    keys = list(known_keys())
    parent, _, leaf = key.rpartition(".")
    if re.fullmatch(r"\d+([eE][-+]?\d+)?", leaf):
        return f"; decimals follow a point and not a comma, as in 0.{leaf}"
    siblings = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == parent}
    close = difflib.get_close_matches(leaf, siblings, 1, 0.6)
    if close:
        return f"; did you mean {siblings[close[0]]}?"
    elsewhere = [k for k in keys if k.rpartition(".")[2] == leaf] or difflib.get_close_matches(key, keys, 1, 0.0)
    return f"; did you mean {elsewhere[0]}?"


def _sentence(error: Any, key: str) -> str:
    """One plain sentence for a pydantic error."""
    kind, context, given = error["type"], error.get("ctx", {}), error["input"]
    shown = f", not {given!r}" if not isinstance(given, dict | list) else ""
    if kind == "extra_forbidden" and key in known_keys():
        return f"{key} is written with a dot; nest it instead: {key.replace('.', ': {', 1)}: …}}"
    if kind == "extra_forbidden":
        return f"{key} is not a key of the recipe{_nearest(key)}"
    words = {
        "int_type": "a whole number",
        "float_type": "a number",
        "float_parsing": "a number",
        "bool_type": "true or false",
        "bool_parsing": "true or false",
        "string_type": "text",
        "string_pattern_mismatch": "a word of letters, digits, `.`, `_` and `-` that begins with a letter or digit",
        "tuple_type": "a list of two numbers",
        "missing": "a list of two numbers",
        "too_long": "a list of two numbers",
        "model_type": "a section (a mapping of keys)",
    }
    if kind in words:
        return f"{key} should be {words[kind]}{shown}"
    if kind == "literal_error":
        number = " or a whole number" if "int" in str(known_keys()[key].annotation) else ""
        return f"{key} should be one of {context['expected']}{number}{shown}"
    if kind == "value_error":
        return f"{key} {context['error']}{shown}"
    return f"{key} {error['msg'].removeprefix('Input ').removeprefix('String ')}{shown}"


def _known_path(location: tuple) -> str:
    """The schema key of a pydantic location: list indices and union members are dropped."""
    keys, path = known_keys(), ""
    for part in location:
        step = f"{path}.{part}" if path else str(part)
        if step not in keys and path in keys and section_of(keys[path].annotation) is None:
            break
        if isinstance(part, str) and (step in keys or part == location[-1]):
            path = step
    return path


def validate(values: dict, lines: dict[str, str] | None = None, where: str = "recipe", faults: list[str] | None = None) -> Recipe:
    """Build a Recipe from plain values. Raises RecipeError with every fault: types, unknown keys and broken rules."""
    lines, faults = lines or {}, list(faults or [])

    def place(key: str) -> str:
        while key and key not in lines:
            key = key.rpartition(".")[0]
        return lines.get(key, where)

    bad: set[str] = set()
    while True:
        try:
            recipe = Recipe.model_validate(values)
            break
        except ValidationError as error:
            known = len(bad)
            for item in error.errors():
                key = _known_path(item["loc"])
                _remove(values, item["loc"])
                if key not in bad:
                    bad.add(key)
                    faults.append(f"{place(key)}: {_sentence(item, key)}")
            if len(bad) == known:
                raise RecipeError(faults) from None
    for key, sentence in broken_rules(recipe):
        misspelt = any(fault.endswith(f"did you mean {key}?") for fault in faults)  # its default stood in
        if not misspelt and not any(name == key or name in sentence for name in bad):
            typed = [where for name, where in lines.items() if where.startswith("--set") and (name == key or name in sentence)]
            faults.append(f"{typed[-1] if typed else place(key)}: {key}: {sentence}")
    if faults:
        raise RecipeError(faults)
    return recipe


def _remove(values: dict, location: tuple) -> None:
    """Drop a faulty key so that the rest can still be checked (its default stands in)."""
    for depth, part in enumerate(location):
        deeper = location[depth + 1] if depth + 1 < len(location) else None
        if not isinstance(values, dict) or part not in values:
            return
        if deeper is None or not isinstance(values[part], dict) or deeper not in values[part]:
            values.pop(part)
            return
        values = values[part]


def load(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Read a recipe file and apply `section.key=value` overrides.

    `data.fasta` becomes absolute: in the file it is relative to the file, in an override to the working directory. Raises
    RecipeError with all faults at once.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError([f"{path}: cannot read the recipe ({error.strerror}); check the path"]) from None
    except UnicodeDecodeError:
        raise RecipeError([f"{path}: the recipe is not UTF-8 text; is it the right file?"]) from None
    lines: dict[str, str] = {}
    faults: list[str] = []
    values = _parse(text, str(path), lines, faults)
    if values is None and not faults:
        raise RecipeError([f"{path}: the recipe is empty; begin with name: and see docs/recipe.md"])
    if not isinstance(values, dict):
        raise RecipeError([f"{path}:1: a recipe is a mapping of sections; see docs/recipe.md"])
    if isinstance(values.get("data"), dict) and isinstance(values["data"].get("fasta"), str):
        values["data"]["fasta"] = str((path.parent / values["data"]["fasta"]).resolve())
    for override in overrides:
        _override(values, override, lines, faults)
    data = values.get("data")
    if isinstance(data, dict) and isinstance(data.get("fasta"), str):
        data["fasta"] = str(Path(data["fasta"]).resolve())  # of --set: relative to the working directory
    return validate(values, lines, str(path), faults)


def _override(values: dict, override: str, lines: dict[str, str], faults: list[str]) -> None:
    """Apply one `section.key=value`; the value is YAML."""
    key, equals, text = override.partition("=")
    key, where = key.strip(), f"--set {override}"
    if not equals or not key:
        faults.append(f"{where}: an override is section.key=value")
        return
    *parents, leaf = key.split(".")
    for depth, parent in enumerate(parents):
        lines.setdefault(".".join(parents[: depth + 1]), where)
        if not isinstance(values.get(parent), dict):
            values[parent] = {}
        values = values[parent]
    lines[key] = where
    values[leaf] = _parse(text, where, lines, faults, key)


def shipped_directory() -> Path:
    """The folder of the shipped recipes: inside the installed package, or beside it in a checkout."""
    inside = PACKAGE / "recipes"
    return inside if inside.is_dir() else PACKAGE.parent / "recipes"


def find(path: str | Path) -> tuple[Path, bool]:
    """Resolve a RECIPE argument to (file, taken from the shipped recipes).

    A path that does not exist but whose name is a shipped recipe is taken from the package. Raises RecipeError.
    """
    path = Path(path)
    if path.is_file():
        return path, False
    if path.is_dir():
        raise RecipeError([f"{path} is a folder, not a recipe; name a file, for example {path}/recipe.yaml"])
    name = path.name if path.suffix in (".yaml", ".yml") else f"{path.name}.yaml"
    shipped = shipped_directory() / name
    if shipped.is_file():
        return shipped, True
    names = sorted(p.stem for p in shipped_directory().glob("*.yaml"))
    close = difflib.get_close_matches(path.stem, names, 1)
    hint = f"did you mean {close[0]}?" if close else f"shipped recipes are {', '.join(names)}"
    raise RecipeError([f"{path}: there is no such recipe; {hint}"])


def to_dict(recipe: Recipe) -> dict:
    """Plain values of a recipe, keys as in YAML."""
    return recipe.model_dump(mode="json", by_alias=True)


def dump(recipe: Recipe, reasons: dict[str, str] | None = None) -> str:
    """YAML text of a recipe that `load` reads back equal; `reasons` (section.key -> why) become comments on their lines."""
    out: list[str] = []

    def write(values: dict, prefix: str, indent: int) -> None:
        for key, value in values.items():
            full = prefix + key
            pad = "  " * indent
            if isinstance(value, dict):
                out.append(f"{pad}{key}:")
                write(value, full + ".", indent + 1)
            else:
                text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**6).strip().removesuffix("...").strip()
                why = (reasons or {}).get(full)
                out.append(f"{pad}{key}: {text}" + (f"  # {why}" if why else ""))

    write(to_dict(recipe), "", 0)
    return "\n".join(out) + "\n"


def differences(old: Recipe, new: Recipe) -> list[str]:
    """Keys (section.key) whose values differ between two recipes."""

    def flat(values: dict, prefix: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in values.items():
            found.update(flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
        return found

    a, b = flat(to_dict(old)), flat(to_dict(new))
    return sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))
