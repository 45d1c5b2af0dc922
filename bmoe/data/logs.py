"""The logs of the parts of a job array as one: places are those of the whole input, and of each reason the first NOTES lines stay.

A part does not read what stands before it, so it counts the lines of a file from where it begins. Its manifest has what is needed to
put that right, under `lines`: `inside`, the number among the inputs of the file within which it begins (null: it begins with a file),
and `last`, the number of the file in which it ends and how many of its lines it read (null: it read nothing).
"""

from collections import Counter
from pathlib import Path

from bmoe.data.inputs import readable
from bmoe.data.ledger import LOG, PART_BEGINS
from bmoe.data.summary import NOTES


def join(parts: list[tuple[Path, dict]], duplicates: int, out: Path) -> None:
    """Write the logs of all parts (folder and manifest, in order) to `out`. duplicates: number of sequences that two parts hold."""
    written, noted, before = Counter(), Counter(duplicate=duplicates), {}
    with out.open("w", encoding="utf-8", newline="\n") as file:
        for directory, manifest in parts:
            inside, last = manifest["lines"]["inside"], manifest["lines"]["last"]
            name, shift = ("", 0) if inside is None else (readable(manifest["inputs"][inside]["name"]), before.get(inside, 0))
            for line in (directory / LOG).read_text("utf-8").split("\n")[:-1]:  # not splitlines: identifiers may have U+2028
                if "\t" not in line:  # a total, at the end
                    reason, _, number = line[2:].rpartition(": ")
                    noted[reason] += int(number)
                    continue
                reason = line.split("\t")[1]
                written[reason] += 1
                if reason != PART_BEGINS and written[reason] <= NOTES:
                    file.write(_shifted(line, name, shift) + "\n")
            if last is not None:
                before[last[0]] = last[1] + (shift if last[0] == inside else 0)
        file.writelines(f"# {reason}: {number}\n" for reason, number in sorted(noted.items()) if number)


def _shifted(line: str, name: str, by: int) -> str:
    """A line `name:number:identifier...` with a larger number; another line as it is."""
    number, _, rest = line.removeprefix(f"{name}:").partition(":")
    return f"{name}:{int(number) + by}:{rest}" if by and line.startswith(f"{name}:") and number.isdecimal() else line
