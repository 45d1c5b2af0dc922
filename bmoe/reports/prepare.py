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
COUNTS = {
    "invalid_letters": "letters outside the alphabet",
    "internal_stops": "* inside sequences",
    "terminal_stops": "* at the end of sequences, removed",
    "gaps": "gaps (- and .)",
    "lower_case": "letters in lower case",
    "glued_headers": "headers that end like a sequence",
    "duplicate_identifiers": "records whose identifier stood before",
    "sequences_with_duplicates": "sequences that stand more than once",
    "text_lines_before_first_record": "lines of text before a file's first record",
    "unclustered_records": "records that the cluster table does not list",
    "n_run_bases": "bases N in long runs, left out",
    "split_gap_bases": "bases left out between regions of different splits",
    "parts_too_short": "parts of records shorter than --min-length",
    "parts_duplicate": "parts of records that stood before",
}


def write(directory: str | Path, results: dict) -> Path:
    """Write DIR/report.html for the results of `prepare` or `merge`. It says nothing of time, so it is the same for the same data."""
    path = Path(directory) / "report.html"
    path.write_text(html(results), encoding="utf-8")
    return path


def html(results: dict) -> str:
    """The page as text."""
    splits = results["splits"]
    kept, read = results["records_kept"], results["records_read"]
    key = [
        (f"{read:,}", "records read"),
        (f"{kept:,}", "records kept"),
        (f"{results['residues']:,}", "tokens" if results["vocabulary"] > 64 else "residues"),
        (f"{splits['valid']['sequences']:,}", "sequences held out for validation"),
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
                table(["split", "sequences", "residues"], [[n, s["sequences"], s["residues"]] for n, s in splits.items()]),
                text="By the hash of each sequence, or of its cluster: equal sequences are on one side.",
            ),
            section(
                "Records dropped",
                table(["why", "records"], [[REASONS.get(k, k), n] for k, n in results["records_dropped"].items()]),
                text="prepare.log has the place of each, the first 10,000 of a reason.",
            ),
            section("Found on the way", table(["what", "number"], [[COUNTS.get(k, k), n] for k, n in results["counts"].items() if n])),
            section("Lengths", lengths(results), quantiles(results)),
            section("Composition", composition(results)),
            section(
                "Inputs", table(["file", "bytes", "SHA-256"], [[s["name"], s["bytes"], s["sha256"]] for s in results["sources"][:200]])
            ),
            section("Options", table(["option", "value"], [[name, str(value)] for name, value in results["options"].items()])),
        ],
    )


def empty_splits(results: dict) -> list[str]:
    """A sentence for every split that was asked for and got nothing."""
    shares = {"valid": results["options"]["valid_fraction"], "test": results["options"]["test_fraction"]}
    return [
        f"The split {name} is empty: a share of {share:g} of {results['records_kept']:,} records is too small; "
        f"choose a larger --{name}-fraction."
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
