"""The page of a preparation: what was read, kept and dropped, lengths, composition. Written as DIR/report.html."""

from pathlib import Path

from bmoe.reports.composition import beside_swissprot
from bmoe.reports.page import page, section, table, tiles
from bmoe.reports.plots import bar_chart

REASONS = {
    "empty": "no sequence",
    "too_short": "shorter than --min-length",
    "too_long": "longer than --max-length",
    "invalid": "a letter outside the alphabet (--on-invalid drop)",
    "internal_stop": "a * inside (--internal-stop drop)",
    "duplicate": "the same sequence stood before",
}
COUNTS = {  # of one, of several
    "invalid_letters": ("letter outside the alphabet", "letters outside the alphabet"),
    "internal_stops": ("* inside a sequence", "* inside sequences"),
    "terminal_stops": ("* at the end of a sequence, removed", "* at the end of sequences, removed"),
    "gaps": ("gap (- or .)", "gaps (- and .)"),
    "lower_case": ("letter in lower case", "letters in lower case"),
    "glued_headers": ("header that ends like a sequence", "headers that end like a sequence"),
    "duplicate_identifiers": ("record whose identifier stood before", "records whose identifier stood before"),
    "sequences_with_duplicates": ("sequence that stands more than once", "sequences that stand more than once"),
    "text_lines_before_first_record": ("line of text before a file's first record", "lines of text before a file's first record"),
    "unclustered_records": ("record that the cluster table does not list", "records that the cluster table does not list"),
    "n_run_bases": ("base N in a long run, left out", "bases N in long runs, left out"),
    "split_gap_bases": ("base left out between regions of different splits", "bases left out between regions of different splits"),
    "parts_too_short": ("part of a record shorter than --min-length", "parts of records shorter than --min-length"),
    "parts_duplicate": ("part of a record that stood before", "parts of records that stood before"),
}


def counted(number: int, noun: str) -> str:
    """`1 record`, `2 records`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def found(what: str, number: int) -> str:
    """What a count of the manifest counts, for that number."""
    return COUNTS[what][number != 1] if what in COUNTS else what


def path(directory: str | Path) -> Path:
    """Where the page of a prepared folder is."""
    return Path(directory) / "report.html"


def write(directory: str | Path, results: dict) -> Path:
    """Write the page of the results of `prepare` or `merge`. It says nothing of time, so it is the same for the same data."""
    path(directory).write_text(html(results), encoding="utf-8", errors="replace")  # names of files may be no UTF-8
    return path(directory)


def html(results: dict) -> str:
    """The page as text."""
    splits = results["splits"]
    kept, read = results["records_kept"], results["records_read"]
    key = [
        _tile(read, "record", " read"),
        _tile(kept, "record", " kept"),
        _tile(results["residues"], unit(results)),
        _tile(splits["valid"]["sequences"], "sequence", " held out for validation"),
    ]
    return page(
        "Prepared sequences",
        f"alphabet {results['alphabet']}, from {', '.join(source['name'] for source in results['inputs'][:5])}"
        + (f" and {len(results['inputs']) - 5} more" if len(results["inputs"]) > 5 else ""),
        [
            tiles(key),
            "".join(f"<p><b>{note}</b></p>" for note in empty_splits(results)),
            section(
                "Splits",
                table(["split", "sequences", unit(results) + "s"], [[n, s["sequences"], s["residues"]] for n, s in splits.items()]),
                text="By the hash of each sequence, or of its cluster: equal sequences are on one side.",
            ),
            section(
                "Records dropped",
                table(["why", "records"], [[REASONS.get(k, k), n] for k, n in results["records_dropped"].items()]),
                text="prepare.log has the place of each, the first 10,000 of a reason.",
            ),
            section("Found on the way", table(["what", "number"], [[found(k, n), n] for k, n in results["counts"].items() if n])),
            section("Lengths", lengths(results), quantiles(results)),
            section("Composition", composition(results)),
            section(
                "Inputs", table(["file", "bytes", "SHA-256"], [[s["name"], s["bytes"], s["sha256"]] for s in results["sources"][:200]])
            ),
            section("Options", table(["option", "value"], [[name, str(value)] for name, value in results["options"].items()])),
        ],
    )


def _tile(number: int, noun: str, rest: str = "") -> tuple[str, str]:
    value, _, noun = counted(number, noun).partition(" ")
    return value, noun + rest


def unit(results: dict) -> str:
    """What a stored number stands for."""
    return {"protein": "residue", "dna": "base"}.get(results["alphabet"], "token")


def empty_splits(results: dict) -> list[str]:
    """A sentence for every split that was asked for and got nothing."""
    shares = {"valid": results["options"]["valid_fraction"], "test": results["options"]["test_fraction"]}
    of = counted(results["records_kept"], "record")
    if results["alphabet"] != "protein":  # long records are divided among the splits
        of = counted(sum(split["sequences"] for split in results["splits"].values()), "region")
    if results["records_kept"] and not results["splits"]["train"]["sequences"] and not results.get("part"):
        return [f"The split train is empty: the shares held out leave nothing of {of}; choose smaller ones or more input."]
    return [
        f"The split {name} is empty: a share of {share:g} of {of} is too small; choose a larger --{name}-fraction."
        for name, share in shares.items()
        if share > 0 and not results["splits"][name]["sequences"] and not results.get("part")
    ]


def lengths(results: dict) -> str:
    """Histogram over powers of two."""
    bins = results["lengths"]["histogram"]
    return bar_chart(
        "Sequences by length",
        [str(start) for start, _ in bins],
        [("sequences", [number for _, number in bins])],
        "sequences",
        "Each bar counts lengths from its label to the next.",
    )


def quantiles(results: dict) -> str:
    """Shortest, quantiles, longest, mean."""
    names = {"0": "shortest", "50": "median", "100": "longest"}
    found = results["lengths"]["quantiles"]
    return table([names.get(q, f"{q} %") for q in found] + ["mean"], [[*found.values(), results["lengths"]["mean"]]]) if found else ""


def composition(results: dict) -> str:
    """Letters, beside Swiss-Prot's for proteins."""
    if results["alphabet"] != "protein":
        shares = list(results["composition"].items())[:24]
        return bar_chart("Letters", [letter for letter, _ in shares], [("percent", [100 * share for _, share in shares])], "percent")
    rows = beside_swissprot(results["composition"])
    groups = [("this data", [found for _, found, _ in rows]), ("Swiss-Prot", [other for _, _, other in rows])]
    return bar_chart(
        "Amino acids",
        [letter for letter, _, _ in rows],
        groups,
        "percent of residues",
        "Swiss-Prot as its release statistics give it; a large difference means another kind of data, or a mistake.",
    )
