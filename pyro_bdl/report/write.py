"""The report as one file: sections in order, with embedded figures, style and script."""

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from pyro_bdl._version import __version__
from pyro_bdl.report.tables import key, table
from pyro_bdl.utils.files import atomic_write
from pyro_bdl.utils.tables import Column, Row


def write_report(
    path: str | Path,
    *,
    title: str,
    rows: Sequence[Row],
    columns: Sequence[Column],
    details: Sequence[Column] = (),
    verdicts: Mapping[str, str] | None = None,
    warnings: Sequence[str] = (),
    figures: Mapping[str, Figure] | None = None,
    notes: Sequence[str] = (),
    settings: Mapping[str, object] | None = None,
) -> Path:
    """Write the report and return its path; missing folders are made.

    :param path: the HTML file.
    :param title: heading of the page.
    :param rows: one mapping for each line of the table.
    :param columns: the columns of the table; their ``help`` becomes the key below it.
    :param details: the columns of a second, folded table, after the first of ``columns``.
    :param verdicts: posterior to a sentence.
    :param warnings: sentences that come before everything else, in a box.
    :param figures: caption to figure; embedded as SVG.
    :param notes: paragraphs above the table, the most important first.
    :param settings: the settings of the run, listed at the end.
    """
    sections = [
        _paragraphs(notes),
        _warnings(warnings),
        _terms("Verdicts", verdicts or {}, "verdicts"),
        _table(rows, columns, details),
        _figures(figures or {}),
        _terms("Settings", {**(settings or {}), "pyro_bdl": __version__}, "settings"),
    ]
    page = _part("page.html").format(
        title=escape(title),
        style=_part("style.css"),
        body="\n".join(filter(None, sections)),
        script=_part("script.js"),
    )
    path = Path(path)
    with atomic_write(path) as part:
        part.write_text(page, encoding="utf-8")
    return path


def _part(name: str) -> str:
    return resources.files("pyro_bdl.report").joinpath(name).read_text(encoding="utf-8")


def _paragraphs(texts: Sequence[str]) -> str:
    return "".join(f"<p>{escape(text)}</p>" for text in texts)


def _warnings(warnings: Sequence[str]) -> str:
    if not warnings:
        return ""
    return f'<section class="warning"><h2>Warning</h2>{_paragraphs(warnings)}</section>'


def _terms(heading: str, terms: Mapping[str, object], kind: str) -> str:
    if not terms:
        return ""
    items = "".join(
        f"<dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd>"
        for name, value in terms.items()
    )
    return f'<section><h2>{heading}</h2><dl class="{kind}">{items}</dl></section>'


def _table(rows: Sequence[Row], columns: Sequence[Column], details: Sequence[Column]) -> str:
    shown = f"<h2>Table</h2>{table(rows, columns, label='Table')}"
    explained = key([*columns, *details])
    if explained:
        shown += f"<details><summary>What the columns mean</summary>{explained}</details>"
    if details:
        more = table(rows, [columns[0], *details], label="More columns")
        shown += f"<details><summary>More columns</summary>{more}</details>"
    return f"<section>{shown}</section>"


def _figures(figures: Mapping[str, Figure]) -> str:
    items = "".join(
        f'<figure><img alt="{escape(caption)}" src="{_svg(figure)}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
        for caption, figure in figures.items()
    )
    if not items:
        return ""
    return f'<section><h2>Figures</h2><div class="figures">{items}</div></section>'


def _svg(figure: Figure) -> str:
    """The figure as a data URI; the same figure gives the same bytes."""
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "pyro_bdl"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"
