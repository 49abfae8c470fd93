"""The report as one file, or its first part for a notebook: values for ``template.html``."""

import itertools
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup
from matplotlib.figure import Figure

from pyro_bdl.app.report.svg import dark_colors, inline, marker
from pyro_bdl.utils.files import atomic_write
from pyro_bdl.utils.tables import Column, Row
from pyro_bdl.version import __version__

Groups = Sequence[tuple[str, Sequence[str]]]
Looks = Mapping[str, Mapping[str, Any]]
_FIGURES, _FURTHER = "Figures", "further columns"


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


class Table:
    """A table as the template writes it.

    It scrolls sideways below its first column. Cells hold unrounded numbers, by which the buttons
    of the headings sort; other buttons show or hide groups of columns.

    :param label: its heading.
    :param rows: one mapping for each line.
    :param columns: the columns, whose ``help`` becomes the key below; the first names the rows.
    :param details: columns after ``columns``, hidden at first and shown by one button.
    :param hidden: the groups of columns that are hidden at first.
    :param ranked: headings, each with the names of its rows in order; other rows come last.
    :param note: a paragraph above a further table.
    """

    def __init__(
        self,
        label: str,
        rows: Sequence[Row],
        columns: Sequence[Column],
        *,
        details: Sequence[Column] = (),
        hidden: Sequence[str] = (),
        ranked: Groups = (),
        note: str = "",
    ) -> None:
        self.label, self.note, self.is_ranked = label, note, bool(ranked)
        self.rows = list(rows)
        self.columns = [(each, each.group) for each in columns]
        self.columns += [(each, _FURTHER) for each in details]
        runs = itertools.groupby(self.columns, lambda pair: (pair[0].group, pair[1]))
        grouped = any(column.group for column, _ in self.columns)
        self.headings = [(*names, len(list(run))) for names, run in runs] if grouped else []
        names = [name for name in dict.fromkeys(button for _, button in self.columns) if name]
        self.buttons = [(n, "false" if n in (*hidden, _FURTHER) else "true") for n in names]
        self.key = {each.title: each.help for each, _ in self.columns if each.help}
        self.bodies = _bodies(rows, columns[0].key, ranked)


def _bodies(
    rows: Sequence[Row], name: str, ranked: Groups
) -> list[tuple[str, list[tuple[int, Row]]]]:
    """The rows under their headings, each with its place in the table."""
    left = {str(row.get(name)): row for row in rows}
    places = itertools.count()
    bodies = []
    for heading, names in [*ranked, ("", list(left))]:
        members = [(next(places), left.pop(each)) for each in names if each in left]
        if members:
            bodies.append((heading, members))
    return bodies


def write_report(
    path: str | Path, table: Table, *, pictures: Sequence[Picture] = (), **texts: Any
) -> Path:
    """Write the report and return its path; missing folders are made.

    :param path: the HTML file.
    :param table: the first table.
    :param pictures: with their sections; embedded as SVG.
    :param texts: ``title`` of the page; ``about``, a line below it on the data and the model;
        ``summary``, the answer before everything else; ``warnings`` in a box below it; ``looks``,
        color and marker of each row by name, from ``plots.styles``; ``verdicts``, row to sentence;
        ``notes``, paragraphs below the table; ``further``, more tables; ``settings`` of the run,
        listed at the end, where a mapping as a value gets a heading of its own.
    """
    settings = {**(texts.pop("settings", None) or {}), "pyro_bdl": __version__}
    script = Markup(_part("script.js"))
    text = _rendered(
        page=True, table=table, sections=_sections(pictures, "f"), settings=settings,
        style=_style(), script=script, **texts,
    )  # fmt: skip
    path = Path(path)
    with atomic_write(path) as part:
        part.write_text(text, encoding="utf-8")
    return path


def notebook_report(table: Table, *, pictures: Sequence[Picture] = (), **texts: Any) -> str:
    """The same design in short, as HTML for the page of a notebook; see :func:`write_report`.

    Styles hold inside it only. It needs no script: its headings do not sort.
    """
    style = re.sub(r"(?<![\w-])body(?=\s*\{)", ":scope", _style()).replace(":root", ":scope")
    key = f"n{zlib.crc32(repr(table.bodies).encode()):x}-"
    return _rendered(
        page=False, table=table, sections=_sections(pictures, key), style=Markup(style), **texts
    )


def _sections(
    pictures: Sequence[Picture], key: str
) -> list[tuple[str, list[tuple[Picture, Markup]]]]:
    """Pictures by the heading that they stand under, those before the table first.

    :param key: a prefix of ids that no other table of one notebook has.
    """
    sections: dict[str, list[tuple[Picture, Markup]]] = {}
    for place, each in enumerate(pictures):
        svg = inline(each.figure, f"{key}{place}", each.alt or each.caption)
        sections.setdefault(each.section, []).append((each, Markup(svg)))
    return list(sections.items())


def _rendered(**values: Any) -> str:
    environment = Environment(autoescape=True, trim_blocks=True)
    environment.tests["finite"] = lambda value: (
        isinstance(value, (int, float)) and math.isfinite(value)
    )
    template = environment.from_string(_part("template.html"))
    values = {"looks": {}, "settings": {}} | values
    return template.render(marker=lambda look: Markup(marker(look)), **values)


def _style() -> str:
    return Markup(_part("style.css").replace("/* dark colors */", dark_colors()))


def _part(name: str) -> str:
    return resources.files("pyro_bdl.app.report").joinpath(name).read_text(encoding="utf-8")
