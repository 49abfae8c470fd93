"""The report as one file: sections in order, with figures, style and script inside."""

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path

from matplotlib.figure import Figure

from pyro_bdl._version import __version__
from pyro_bdl.report.svg import dark_colors, inline, marker
from pyro_bdl.report.tables import Groups, Looks, key, table
from pyro_bdl.utils.files import atomic_write
from pyro_bdl.utils.tables import Column, Row

_FIGURES = "Figures"
_SMALL = ".summary p { font-size: 1rem; } table { font-size: 0.8rem; } figure { max-width: 30rem; }"


@dataclass(frozen=True)
class Picture:
    """A figure of the report.

    :param figure: drawn as SVG.
    :param caption: one or two sentences below it.
    :param alt: the alternative text for those who cannot see it; the caption if empty.
    :param section: the heading that it stands under; empty for a place before the table.
    """

    figure: Figure
    caption: str
    alt: str = ""
    section: str = _FIGURES


@dataclass(frozen=True)
class Further:
    """A further table of the report.

    :param heading: the heading above it.
    :param rows: one mapping for each line.
    :param columns: the columns; the first names the rows.
    :param note: a paragraph above it.
    """

    heading: str
    rows: Sequence[Row]
    columns: Sequence[Column]
    note: str = ""


def write_report(
    path: str | Path,
    *,
    title: str,
    rows: Sequence[Row],
    columns: Sequence[Column],
    details: Sequence[Column] = (),
    about: str = "",
    summary: Sequence[str] = (),
    ranked: Groups = (),
    looks: Looks | None = None,
    hidden: Sequence[str] = (),
    verdicts: Mapping[str, str] | None = None,
    warnings: Sequence[str] = (),
    figures: Mapping[str, Figure] | Sequence[Picture] = (),
    notes: Sequence[str] = (),
    settings: Mapping[str, object] | None = None,
    further: Sequence[Further] = (),
) -> Path:
    """Write the report and return its path; missing folders are made.

    :param path: the HTML file.
    :param title: heading of the page.
    :param rows: one mapping for each line of the table.
    :param columns: the columns of the table; their ``help`` becomes the key below it.
    :param details: further columns of the table, hidden at first.
    :param about: a line below the heading: the data and the model.
    :param summary: sentences that answer the question, before everything else.
    :param ranked: headings, each with the names of its rows in order; other rows come last.
    :param looks: color and marker of each row by name, from ``plots.styles``.
    :param hidden: the groups of ``columns`` that are hidden at first.
    :param verdicts: posterior to a sentence.
    :param warnings: sentences in a box below the summary.
    :param figures: caption to figure, or pictures with their sections; embedded as SVG.
    :param notes: paragraphs below the table, the most important first.
    :param settings: the settings of the run, listed at the end; a mapping as a value gets a heading
        of its own.
    :param further: more tables, after the first.
    """
    looks = looks or {}
    if isinstance(figures, Mapping):
        pictures = [Picture(figure, caption) for caption, figure in figures.items()]
    else:
        pictures = list(figures)
    drawn = [
        (picture, inline(picture.figure, f"f{i}", picture.alt or picture.caption))
        for i, picture in enumerate(pictures)
    ]
    sections = [
        _summary(summary),
        _warnings(warnings),
        _pictures("", [each for each in drawn if not each[0].section]),
        _table(rows, columns, details, notes, hidden, ranked, looks),
        *(_further(each, looks) for each in further),
        _verdicts(verdicts or {}, looks),
        *(
            _pictures(heading, [each for each in drawn if each[0].section == heading])
            for heading in dict.fromkeys(picture.section for picture in pictures)
            if heading
        ),
        _settings({**(settings or {}), "pyro_bdl": __version__}),
    ]
    page = _part("page.html").format(
        title=escape(title),
        about=f'<p class="about">{escape(about)}</p>' if about else "",
        style=_part("style.css").replace("/* dark colors */", dark_colors()),
        body="\n".join(filter(None, sections)),
        script=_part("script.js"),
    )
    path = Path(path)
    with atomic_write(path) as part:
        part.write_text(page, encoding="utf-8")
    return path


def notebook_report(
    *,
    rows: Sequence[Row],
    columns: Sequence[Column],
    summary: Sequence[str] = (),
    ranked: Groups = (),
    looks: Looks | None = None,
    warnings: Sequence[str] = (),
    figures: Sequence[Picture] = (),
) -> str:
    """The same design in short, as HTML for the page of a notebook; see :func:`write_report`.

    Styles hold inside it only. It needs no script: its headings do not sort.
    """
    style = _part("style.css").replace("/* dark colors */", dark_colors())
    body = re.sub(r"(?<![\w-])body(?=\s*\{)", ":scope", style).replace(":root", ":scope")
    drawn = [
        (each, inline(each.figure, _key(rows, i), each.alt or each.caption))
        for i, each in enumerate(figures)
    ]
    shown = table(rows, columns, label="Table", ranked=ranked, looks=looks, sortable=False)
    parts = [_summary(summary), _warnings(warnings), shown, _pictures("", drawn)]
    return (
        '<div class="pyro-bdl" style="max-width: 64rem">'
        f"<style>@scope (.pyro-bdl) {{ {body} {_SMALL} }}</style>{''.join(parts)}</div>"
    )


def _key(rows: Sequence[Row], place: int) -> str:
    """A prefix of ids that differs between the tables of one notebook."""
    return f"n{zlib.crc32(repr(rows).encode()):x}-{place}"


def _part(name: str) -> str:
    return resources.files("pyro_bdl.report").joinpath(name).read_text(encoding="utf-8")


def _paragraphs(texts: Sequence[str]) -> str:
    return "".join(f"<p>{escape(text)}</p>" for text in texts)


def _summary(sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    return f'<section class="summary" aria-label="Summary">{_paragraphs(sentences)}</section>'


def _warnings(warnings: Sequence[str]) -> str:
    if not warnings:
        return ""
    return f'<section class="warning"><h2>Warning</h2>{_paragraphs(warnings)}</section>'


def _verdicts(verdicts: Mapping[str, str], looks: Looks) -> str:
    if not verdicts:
        return ""
    items = "".join(
        f"<div><dt>{marker(looks.get(name))}{escape(name)}</dt><dd>{escape(text)}</dd></div>"
        for name, text in verdicts.items()
    )
    return f'<section><h2>One by one</h2><dl class="verdicts">{items}</dl></section>'


def _settings(settings: Mapping[str, object]) -> str:
    """The list of settings: the plain ones first, then those with a heading."""
    plain = {name: value for name, value in settings.items() if not isinstance(value, Mapping)}
    headed = {name: value for name, value in settings.items() if isinstance(value, Mapping)}
    text = "".join(
        f"<div><h3>{escape(name)}</h3>{_terms(values)}</div>" for name, values in headed.items()
    )
    return (
        f'<section><h2>Settings</h2><div class="settings">{text}<div>{_terms(plain)}</div></div>'
        "</section>"
    )


def _terms(terms: Mapping[str, object]) -> str:
    items = "".join(
        f"<dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd>"
        for name, value in terms.items()
    )
    return f"<dl>{items}</dl>"


def _table(
    rows: Sequence[Row],
    columns: Sequence[Column],
    details: Sequence[Column],
    notes: Sequence[str],
    hidden: Sequence[str],
    ranked: Groups,
    looks: Looks,
) -> str:
    shown = table(
        rows, columns, label="Table", further=details, hidden=hidden, ranked=ranked, looks=looks
    )
    explained = key([*columns, *details])
    if explained:
        shown += f"<details><summary>What the columns mean</summary>{explained}</details>"
    return f"<section><h2>Table</h2>{shown}{_paragraphs(notes)}</section>"


def _further(each: Further, looks: Looks) -> str:
    shown = table(each.rows, each.columns, label=each.heading, looks=looks)
    note = _paragraphs([each.note] if each.note else [])
    return f"<section><h2>{escape(each.heading)}</h2>{note}{shown}</section>"


def _pictures(heading: str, drawn: Sequence[tuple[Picture, str]]) -> str:
    if not drawn:
        return ""
    items = "".join(
        f"<figure>{svg}<figcaption>{escape(picture.caption)}</figcaption></figure>"
        for picture, svg in drawn
    )
    above = f"<h2>{escape(heading)}</h2>" if heading else ""
    kind = "figures" if heading else "figures first"
    return f'<section>{above}<div class="{kind}">{items}</div></section>'
