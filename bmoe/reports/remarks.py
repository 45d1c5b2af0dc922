"""What a reader must know beside the numbers of `bmoe eval`: the same sentences on the page and on a terminal."""

from bmoe.reports.page import number


def mutations(found: dict) -> list[str]:
    """What of the table was left out or counted otherwise, and why a correlation may be missing."""
    remarks = [f"{number(count)} row{'s' * (count != 1)} dropped: {reason}." for reason, count in found["dropped"].items()]
    if found.get("repeated"):
        remarks.append(f"Rows that measure a variant again: {number(found['repeated'])}; the intervals are over variants.")
    if found["offset"]:
        remarks.append(f"Numbers in the table count {found['offset']} further than the wild type given.")
    if found["multiple"]:
        remarks.append(f"{number(found['multiple'])} variants have several mutations.")
    if len({effect for effect, _ in found["points"]}) == 1:
        remarks.append("All measured effects are equal: there is nothing to rank, so that no correlation is given.")
    if found.get("longer_than_trained"):
        remarks.append("The wild type is longer than the model was trained for: each variant is scored in a window around its sites.")
    return remarks


def contacts(found: dict) -> list[str]:
    """Whether residues are missing, and whether the model sees lengths here that it never saw in training."""
    broken, long = found.get("with_breaks", 0), found.get("longer_than_trained", 0)
    remarks = [f"{number(broken)} of the chains lack residues inside: their parts count as neighbours in the sequence."] if broken else []
    return remarks + ([f"{number(long)} of the chains are longer than the model was trained for."] if long else [])


def probe(found: dict) -> list[str]:
    """Whether sequences were cut."""
    long = found.get("longer_than_trained", 0)
    return [f"{number(long)} sequences are longer than the model was trained for: only their beginnings are used."] if long else []
