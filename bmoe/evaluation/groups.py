"""Perplexity by a field of the header lines: by organism, taxon, gene or any other.

Fields are read as UniProt and UniRef write them: `OS=Homo sapiens OX=9606`, `Tax=Bacteria TaxID=2`, NCBI's `[organism=...]`.
"""

import re

import numpy as np

from bmoe.data.shards import Shards
from bmoe.errors import RequestError
from bmoe.evaluation.perplexity import Perplexity

GROUPS = 20
OTHERS = "all others"


def field(header: str | None, name: str) -> str | None:
    """The value of `name=` in a header, up to the next field or the end, of `[name=...]` up to its bracket; None where it has none."""
    inside, outside = r"((?:\[[^\]]*\]|[^\]])*?)(?=\s+\w+=|\]|$)", r"(.*?)(?=\s+\[?\w+=|$)"
    match = re.search(rf"\[{re.escape(name)}={inside}|(?:^|\s){re.escape(name)}={outside}", header or "")
    return (match[1] or match[2] or "").strip() or None if match else None


def by_field(perplexity: Perplexity, shards: Shards, name: str, groups: int = GROUPS) -> list[dict]:
    """One entry per value of the field, the `groups` with most targets by themselves, the rest and sequences without the field
    together. RequestError where no header has it."""
    values = [field(shards.header(int(i)), name) for i in perplexity.sequence_S]
    if all(value is None for value in values):
        known = sorted({k for i in perplexity.sequence_S[:100] for k in re.findall(r"(?:^|[\s\[])(\w+)=", shards.header(int(i)) or "")})
        there = f"fields there are {', '.join(known)}" if known else "the headers have no fields, or were not kept (--keep-headers)"
        raise RequestError(f"--by {name}: no sequence of the split has {name}= in its header; {there}")
    names, group_S = np.unique([value or OTHERS for value in values], return_inverse=True)
    targets = np.bincount(group_S, perplexity.targets_S)
    own = [g for g in np.argsort(-targets, kind="stable") if names[g] != OTHERS][:groups]
    rows = [(str(names[g]), np.flatnonzero(group_S == g)) for g in own]
    rest = np.flatnonzero(~np.isin(group_S, own))
    if rest.size:
        rows.append((OTHERS, rest))
    return [{"group": label, **perplexity.group(members)} for label, members in rows]
