"""One self-contained HTML file: a sortable table, figures, notes and settings.

The file needs no network and refuses to use one (a content security policy says so). It follows
the reader's light or dark theme, scrolls its table sideways on a phone and prints in light colours.
"""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from pyro_bdl._version import __version__
from pyro_bdl.table import Column, Row, groups


def write_report(
    path: str | Path,
    *,
    title: str,
    rows: Sequence[Row],
    columns: Sequence[Column],
    figures: Mapping[str, Figure] | None = None,
    notes: Sequence[str] = (),
    settings: Mapping[str, object] | None = None,
) -> Path:
    """Write the report and return its path; missing folders are made.

    :param path: the HTML file.
    :param title: heading of the page.
    :param rows: one mapping for each line of the table.
    :param columns: what the table shows; their ``help`` becomes the key below it.
    :param figures: caption to figure; embedded as SVG.
    :param notes: paragraphs above the table, the most important first.
    :param settings: what the run was made with, listed at the end.
    """
    sections = [
        "".join(f"<p>{escape(note)}</p>" for note in notes),
        _table(rows, columns),
        _key(columns),
        _figures(figures or {}),
        _settings(settings or {}),
    ]
    page = _PAGE.format(
        title=escape(title), style=_STYLE, body="\n".join(filter(None, sections)), script=_SCRIPT
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    above = ""
    if any(column.group for column in columns):
        cells = (
            f'<th colspan="{count}" scope="colgroup">{escape(name)}</th>'
            if name
            else f'<td colspan="{count}"></td>'
            for name, count in groups(columns)
        )
        above = f'<tr class="groups">{"".join(cells)}</tr>'
    heads = "".join(
        f'<th scope="col"{_class(column)}><button type="button" data-column="{i}" '
        f'title="{escape(column.help)}">{_unbroken(column.title)}</button></th>'
        for i, column in enumerate(columns)
    )
    lines = "".join(
        f"<tr>{''.join(_cell(row, column, i) for i, column in enumerate(columns))}</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><thead>{above}<tr>{heads}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _cell(row: Row, column: Column, place: int) -> str:
    text = escape(column.cell(row))
    value: Any = row.get(column.key)
    if place == 0:
        return f'<th scope="row"{_class(column)}>{text}</th>'
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    data = f' data-value="{float(value)!r}"' if is_number else ""
    return f"<td{_class(column)}{data}>{text}</td>"


def _class(column: Column) -> str:
    return ' class="text"' if column.style == "text" else ""


def _unbroken(title: str) -> str:
    """With hyphens at which a narrow column does not break the line."""
    return escape(title.replace("-", "\u2011"))


def _key(columns: Sequence[Column]) -> str:
    terms = "".join(
        f"<dt>{escape(column.title)}</dt><dd>{escape(column.help)}</dd>"
        for column in columns
        if column.help
    )
    return f"<details><summary>What the columns mean</summary><dl>{terms}</dl></details>" * bool(
        terms
    )


def _figures(figures: Mapping[str, Figure]) -> str:
    items = "".join(
        f'<figure><img alt="{escape(caption)}" src="{_svg(figure)}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
        for caption, figure in figures.items()
    )
    return f'<section class="figures">{items}</section>' if items else ""


def _svg(figure: Figure) -> str:
    """The figure as a data URI, the same bytes for the same figure."""
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "pyro_bdl"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"


def _settings(settings: Mapping[str, object]) -> str:
    terms = "".join(
        f"<dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd>"
        for name, value in {**settings, "pyro_bdl": __version__}.items()
    )
    return f'<section><h2>Settings</h2><dl class="settings">{terms}</dl></section>'


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; \
style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{body}
</main>
<script>{script}</script>
</body>
</html>
"""

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2127; --soft: #5b636e; --line: #d9dde2;
  --page: #ffffff; --band: #f4f6f8; --accent: #0062a3; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --soft: #a3abb5; --line: #3a4048; --page: #16191d; --band: #20242a;
    --accent: #7cc0f4; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0.5rem 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; }
p { max-width: 44rem; margin: 0.5rem 0; }
.scroll { overflow-x: auto; margin: 1.25rem 0 0.5rem; }
table { border-collapse: separate; border-spacing: 0; font-variant-numeric: tabular-nums;
  font-size: 0.875rem; }
th, td { padding: 0.4rem 0.6rem; text-align: right; border-bottom: 1px solid var(--line);
  vertical-align: bottom; }
th.text, td.text { text-align: left; }
tbody th { font-weight: 600; white-space: nowrap; }
tbody td { white-space: nowrap; }
tr > :first-child { position: sticky; left: 0; background: var(--page); z-index: 1; }
tbody tr:nth-child(even) > * { background: var(--band); }
thead th { font-weight: 600; color: var(--soft); }
.groups th { text-align: center; border-bottom: 2px solid var(--line); font-size: 0.8rem; }
.groups td { border-bottom: 0; }
th button { font: inherit; color: inherit; background: none; border: 0; padding: 0;
  text-align: inherit; cursor: pointer; }
th button:hover, th button:focus-visible { color: var(--accent); text-decoration: underline; }
th button::after { content: ""; }
th[aria-sort] button { color: var(--accent); }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
summary { cursor: pointer; color: var(--accent); font-size: 0.9rem; }
dl { display: grid; grid-template-columns: minmax(6rem, max-content) 1fr; gap: 0.3rem 1rem;
  font-size: 0.9rem; margin: 0.75rem 0; max-width: 50rem; }
dt { font-weight: 600; }
dd { margin: 0; color: var(--soft); overflow-wrap: anywhere; }
@media screen and (max-width: 40rem) {
  tbody th { white-space: normal; min-width: 6.5rem; max-width: 9rem; } }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
  gap: 1.5rem; align-items: start; margin: 2rem 0; }
figure { margin: 0; }
figure img { display: block; width: 100%; max-width: 34rem; height: auto; background: #ffffff;
  border: 1px solid var(--line); border-radius: 6px; }
figcaption { color: var(--soft); font-size: 0.9rem; margin-top: 0.4rem; max-width: 34rem; }
@media print {
  :root { color-scheme: light; }
  @page { margin: 12mm; }
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  .scroll { overflow: visible; }
  table, .groups th { font-size: 6.5pt; }
  table { width: 100%; }
  th, td { padding: 2pt 3pt; }
  tbody th { white-space: normal; }
  th button::after { content: none !important; }
  figure, tr { break-inside: avoid; }
  .figures { grid-template-columns: 1fr 1fr; }
  summary { display: none; }
  details::details-content { content-visibility: visible; }
}
"""

_SCRIPT = """
"use strict";
const table = document.querySelector("table");
const compare = (a, b, column, sign) => {
  const [x, y] = [a.cells[column], b.cells[column]];
  const [p, q] = [Number(x.dataset.value ?? NaN), Number(y.dataset.value ?? NaN)];
  if (column > 0 && !(isNaN(p) && isNaN(q)))
    return isNaN(p) ? 1 : isNaN(q) ? -1 : sign * (p - q);
  return sign * x.textContent.localeCompare(y.textContent, undefined, {numeric: true});
};
for (const button of table.querySelectorAll("button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement;
    const ascending = head.getAttribute("aria-sort") !== "ascending";
    table.querySelectorAll("[aria-sort]").forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const body = table.tBodies[0];
    const rows = [...body.rows].sort(
      (a, b) => compare(a, b, Number(button.dataset.column), ascending ? 1 : -1));
    body.append(...rows);
  });
}
"""
