"""Tables of measured variants, as deep mutational scans publish them, checked against their wild type.

Reads ProteinGym's columns (`mutant`, `DMS_score`, `DMS_score_bin`) and free ones. A variant is `A24C`: wild-type letter,
number, new letter; several joined by `:` (or `,` `;` `/` `+`) are one variant; `WT`, `_wt` or an empty name is the wild type.
Letters are read without case. A part that changes nothing (`K2K`, `K2=`) is no part of its variant.
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bmoe.errors import RequestError
from bmoe.evaluation.files import numeric, read_table

NAME_COLUMNS = ("mutant", "mutation", "mutations", "mutants", "variant", "variants")
EFFECT_COLUMN = "DMS_score"
STANDARD = "ACDEFGHIKLMNPQRSTVWY"
SINGLE = re.compile(r"^([A-Za-z])(\d{1,9})([A-Za-z])$")
WILD_TYPE = {"wt", "_wt", "wildtype", "wild-type", ""}
TELLING = 5  # variants at so many sites show an offset of the numbering beyond doubt

Sites = tuple[tuple[int, str, str], ...]  # (place from 0 in the wild type, its letter, the new letter)


@dataclass(frozen=True)
class Variants:
    """Variants with their measured effect.

    names: as in the table. sites: what each changes. effect: float64, never nan. positive: a two-class label, bool, with the
    words for it. column: that of the effect. offset: number in the names minus place counted from 1. dropped: reason -> rows.
    """

    names: list[str]
    sites: list[Sites]
    effect: np.ndarray
    positive: np.ndarray
    positive_name: str
    column: str
    offset: int
    dropped: dict[str, int]


def read_variants(path: str | Path, wildtype: str, column: str | None = None, standard: str = STANDARD) -> Variants:
    """The variants of a table. RequestError for a missing column, a name that is no variant, or one that does not fit.

    Rows without an effect, wild-type and synonymous rows, premature stops (`*`) and changes to other letters than `standard`
    (`X` is unknown to some and a stop to others) are dropped and counted. Numbers count from 1 in the
    wild type; if they do not fit there but do at exactly one other offset, that one is used and told.
    """
    names, rows = read_table(path)
    columns = {name: [row[names.index(name)] for row in rows] for name in names}
    key = _name_column(columns, path)
    effect_column = _effect_column(columns, key, column, path)
    for name in (key, effect_column):
        if names.count(name) > 1:
            raise RequestError(f"{path} has {names.count(name)} columns {name!r}; rename all but one")
    effect = numeric(columns[effect_column])
    dropped: Counter[str] = Counter()
    kept, sites = [], []
    for row, text in enumerate(columns[key]):
        parts = [part.removeprefix("p.") for part in re.split(r"[:;,/+\s]+", text.strip())]
        parts = [part for part in parts if not _is_synonymous(part)]
        found = [SINGLE.match(part) for part in parts]
        if text.strip().lower() in WILD_TYPE or not parts:
            dropped["wild type or synonymous"] += 1
        elif any(part.endswith("*") or part.lower().endswith("ter") for part in parts):
            dropped["stop"] += 1
        elif all(found) and any(m[3].upper() not in standard for m in found):
            dropped["change to no standard residue"] += 1
        elif not np.isfinite(effect[row]):
            dropped["no effect"] += 1
        else:
            if not all(found):
                raise RequestError(f"{path}, row {row + 2}: {text!r} is no variant; write A24C, and several as A24C:W286R")
            if len({int(m[2]) for m in found}) < len(found):
                raise RequestError(f"{path}, row {row + 2}: {text!r} names a site twice")
            kept.append(row)
            sites.append([(int(m[2]), m[1].upper(), m[3].upper()) for m in found])
    if not kept:
        without = ", ".join(f"{reason}: {count}" for reason, count in dropped.items())
        raise RequestError(f"{path} has no variant with a number in the column {effect_column!r} that can be scored (dropped: {without})")
    texts = [columns[key][row] for row in kept]
    offset = _offset(sites, texts, wildtype, path)
    placed = [tuple((number - 1 - offset, old, new) for number, old, new in variant) for variant in sites]
    positive, words = _positive(columns, kept, effect[kept], effect_column)
    return Variants(texts, placed, effect[kept], positive, words, effect_column, offset, dict(dropped))


def _is_synonymous(part: str) -> bool:
    match = SINGLE.match(part)
    return part.endswith("=") or (match is not None and match[1].upper() == match[3].upper())


def _name_column(columns: dict[str, list[str]], path: str | Path) -> str:
    for name in columns:
        if name.lower() in NAME_COLUMNS:
            return name
    for name, cells in columns.items():
        if all(all(SINGLE.match(p) for p in re.split(r"[:;,/+\s]+", cell)) for cell in cells[:20] if cell):
            if SINGLE.match(name):
                raise RequestError(f"{path} begins with the variant {name}; put a line of column names above it, like mutant,effect")
            return name
    raise RequestError(f"{path} has no column of variants (like A24C); name it `mutant`. Its columns are {', '.join(columns)}")


def _effect_column(columns: dict[str, list[str]], key: str, wanted: str | None, path: str | Path) -> str:
    able = [name for name, cells in columns.items() if name and name != key and np.isfinite(numeric(cells)).any()]
    if wanted is not None:
        if wanted not in columns:
            raise RequestError(f"{path} has no column {wanted!r}; with numbers there are {', '.join(able) or 'none'}")
        if wanted not in able:
            raise RequestError(f"{path}: the column {wanted!r} has no numbers; with numbers there are {', '.join(able) or 'none'}")
        return wanted
    if EFFECT_COLUMN in able:
        return EFFECT_COLUMN
    if len(able) == 1:
        return able[0]
    if not able:
        raise RequestError(f"{path} has no column of numbers to compare with; its columns are {', '.join(filter(None, columns))}")
    raise RequestError(f"{path}: say which column holds the measured effect with --column; with numbers there are {', '.join(able)}")


def _offset(sites: list[list], texts: list[str], wildtype: str, path: str | Path) -> int:
    """The offset at which every variant's old letter is the wild type's."""
    letters = {}
    for variant, text in zip(sites, texts, strict=True):
        for number, old, _ in variant:
            if letters.setdefault(number, (old, text))[0] != old:
                raise RequestError(f"{path}: {letters[number][1]} and {text} name different wild-type letters at {number}")

    wrong = [n for n in letters if not (1 <= n <= len(wildtype) and wildtype[n - 1] == letters[n][0])]
    if not wrong:
        return 0
    places: dict[str, list[int]] = {}
    for place, letter in enumerate(wildtype):
        places.setdefault(letter, []).append(place)
    fitting = Counter(number - 1 - place for number, (old, _) in letters.items() for place in places.get(old, ()))
    best = sorted(fitting, key=lambda offset: (-fitting[offset], abs(offset)))[:2]
    whole = [offset for offset in best if fitting[offset] == len(letters)]
    if len(whole) == 1 and len(letters) >= TELLING:
        return whole[0]
    number = wrong[0]
    there = f"{wildtype[number - 1]} there" if 1 <= number <= len(wildtype) else f"only {len(wildtype)} residues"
    would = f"; counting {best[0]:+d} {fitting[best[0]]} would" if best and best[0] else ""
    raise RequestError(
        f"{path}: {letters[number][1]} does not fit the wild type, which has {there} ({len(wrong)} of {len(letters)} sites do not fit"
        f"{would}); give the wild type that the numbers count in"
    )


def _positive(columns: dict, kept: list[int], effect: np.ndarray, effect_column: str) -> tuple[np.ndarray, str]:
    """Two classes for the AUC: the effect's own column of 0 and 1 (`DMS_score_bin` of `DMS_score`), else effects above the median."""
    name = f"{effect_column}_bin"
    values = numeric(columns.get(name, []))
    if values.size and np.isin(values[kept], (0.0, 1.0)).all():
        return values[kept] == 1.0, name
    return effect > np.median(effect), f"{effect_column} above its median"
