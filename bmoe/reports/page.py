"""The one look of all HTML pages: self-contained, no scripts, nothing from outside, light and dark, narrow and wide.

Every function returns HTML text; what comes from outside is escaped here and nowhere else.
"""

import math
from collections.abc import Sequence
from html import escape

STYLE = """
:root{--paper:#fff;--panel:#f6f7f9;--ink:#1d2430;--muted:#5b6472;--line:#d9dde3;
--c0:#1f63b5;--c1:#c05a12;--c2:#2a7f4f;--c3:#8a4fb3;--c4:#7a7f88;--c5:#b0306a}
@media(prefers-color-scheme:dark){:root{--paper:#14171c;--panel:#1c2027;--ink:#e4e7ec;--muted:#9aa3b0;--line:#343b46;
--c0:#6ea8f0;--c1:#ef9a57;--c2:#63c08c;--c3:#c394e6;--c4:#9aa0aa;--c5:#ec7fae}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:1.65rem;line-height:1.2;margin:0 0 .2em;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:2.2em 0 .3em;padding-top:.7em;border-top:1px solid var(--line)}
h3{font-size:1.05rem;margin:1.6em 0 .3em}
p{margin:.3em 0 .8em;max-width:75ch}
.sub{color:var(--muted)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(165px,1fr));gap:10px;margin:18px 0}
.tile{background:var(--panel);border:1px solid var(--line);border-radius:6px;padding:10px 12px}
.tile b{display:block;font-size:1.35rem;font-weight:600;line-height:1.25;font-variant-numeric:tabular-nums}
.tile span{display:block;color:var(--muted);font-size:.85rem;line-height:1.35}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:18px;margin:14px 0}
figure{margin:0;padding:12px 12px 6px;border:1px solid var(--line);border-radius:6px;min-width:0}
figcaption{font-size:.9rem;color:var(--muted);line-height:1.4;margin-bottom:6px}
figcaption b{color:var(--ink);display:block;font-size:1rem}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:.85rem;margin:2px 0 4px}
.legend i{display:inline-block;width:18px;height:0;border-top:3px solid;vertical-align:middle;margin-right:6px}
.legend i.dashed{border-top-style:dashed}
svg{display:block;width:100%;height:auto;max-width:640px;margin:0 auto}
svg text{fill:var(--muted);font:13px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
svg .axis{stroke:var(--line);stroke-width:1;fill:none}
svg .line{fill:none;stroke-width:2;stroke-linejoin:round}
svg .dashed{stroke-dasharray:5 4}
.scroll{overflow-x:auto;margin:10px 0}
table{border-collapse:collapse;font-size:.92rem;font-variant-numeric:tabular-nums}
th,td{padding:4px 12px;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th{font-weight:600;color:var(--muted);vertical-align:bottom}
th:first-child,td:first-child{text-align:left;padding-left:0}
ul{margin:.3em 0 .8em;padding-left:1.2em;max-width:90ch}details{margin:12px 0}summary{cursor:pointer;color:var(--muted)}
pre{background:var(--panel);border:1px solid var(--line);border-radius:6px;padding:12px;overflow-x:auto;font-size:.85rem;line-height:1.4}
.empty{color:var(--muted);font-style:italic}
@media(max-width:520px){main{padding:18px 12px 40px}.tiles{grid-template-columns:repeat(auto-fit,minmax(130px,1fr))}
th,td{padding:4px 8px}th{white-space:normal}svg text{font-size:15px}}
@media print{body{font-size:12px}figure{break-inside:avoid}}
"""


def page(title: str, subtitle: str, parts: Sequence[str]) -> str:
    """A whole document from finished parts."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        f'<h1>{escape(title)}</h1>\n<p class="sub">{escape(subtitle)}</p>\n' + "\n".join(parts) + "\n</main></body></html>\n"
    )


def section(title: str, *parts: str, text: str = "", level: int = 2) -> str:
    """A titled section; `text` explains it in plain words, `level` 3 is one inside another. Empty if no part has content."""
    body = "".join(parts)
    if not body:
        return ""
    lead = f"<p>{escape(text)}</p>" if text else ""
    return f"<section><h{level}>{escape(title)}</h{level}>{lead}{body}</section>"


def tiles(items: Sequence[tuple[str, str]]) -> str:
    """Key numbers: (value, what it is)."""
    body = "".join(f'<div class="tile"><b>{escape(value)}</b><span>{escape(what)}</span></div>' for value, what in items)
    return f'<div class="tiles">{body}</div>'


def grid(*figures: str) -> str:
    """Figures side by side where there is room."""
    body = "".join(figures)
    return f'<div class="grid">{body}</div>' if body else ""


def figure(title: str, svg: str, text: str = "", legend: Sequence[tuple[str, int, bool]] = ()) -> str:
    """A plot with its title, a sentence, and a legend of (name, colour number, dashed)."""
    if not svg:
        return ""
    marks = "".join(
        f'<span><i class="{"dashed" if dashed else ""}" style="border-color:var(--c{colour})"></i>{escape(name)}</span>'
        for name, colour, dashed in legend
    )
    return (
        f"<figure><figcaption><b>{escape(title)}</b>{escape(text)}</figcaption>"
        + (f'<div class="legend">{marks}</div>' if marks else "") + svg + "</figure>"
    )  # fmt: skip


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table that scrolls sideways on narrow screens; numbers are written by `number`."""
    if not rows:
        return ""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(number(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def items(lines: Sequence[str]) -> str:
    """Sentences under each other, which wrap on narrow screens."""
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def details(summary: str, text: str) -> str:
    """Preformatted text behind a click."""
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"


def number(value: object) -> str:
    """A number as people read it: four significant digits, thousands separated, a dash for nothing."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    if not math.isfinite(value):
        return "–" if math.isnan(value) else ("∞" if value > 0 else "-∞")
    if isinstance(value, int) or (value == int(value) and abs(value) >= 1000):
        return f"{int(value):,}"
    if value != 0 and (abs(value) < 1e-4 or abs(value) >= 1e7):
        return f"{value:.2e}"
    digits = max(0, 3 - int(math.floor(math.log10(abs(value))))) if value else 0
    return f"{value:,.{min(digits, 4)}f}"


def with_interval(value: float | None, low: float | None, high: float | None) -> str:
    """`0.953 (0.941 to 0.966)`, or the value alone where there is no interval."""
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return number(value)
    return f"{number(value)} ({number(low)} to {number(high)})"
