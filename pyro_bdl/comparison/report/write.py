"""Tables, and the HTML of a report or of its first part for a notebook, from ``template.html``."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment
from markupsafe import Markup
from matplotlib.figure import Figure

from pyro_bdl.comparison.columns import Column, Row
from pyro_bdl.comparison.report.svg import dark_colors, inline, marker

Groups = Sequence[tuple[str, Sequence[str]]]
_FURTHER = "further columns"


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
        self.columns = [(column, column.group) for column in columns]
        self.columns += [(column, _FURTHER) for column in details]
        runs = itertools.groupby(self.columns, lambda pair: (pair[0].group, pair[1]))
        grouped = any(column.group for column, _ in self.columns)
        self.headings = [(*names, len(list(run))) for names, run in runs] if grouped else []
        names = [name for name in dict.fromkeys(button for _, button in self.columns) if name]
        self.buttons = [(n, "false" if n in (*hidden, _FURTHER) else "true") for n in names]
        self.key: dict[str, str] = {}
        for column in (column for column, _ in self.columns if column.help):
            repeated = column.title in self.key  # such as differences of scores
            self.key[f"{column.title}, {column.group}" if repeated else column.title] = column.help
        left = {str(row.get(columns[0].key)): row for row in rows}
        places = itertools.count()
        self.bodies = []
        for heading, members in [*ranked, ("", list(left))]:
            lines = [(next(places), left.pop(name)) for name in members if name in left]
            if lines:
                self.bodies.append((heading, lines))


def page(
    *,
    title: str,
    table: Table,
    sections: Mapping[str, Sequence[tuple[Figure, str]]],
    **values: Any,
) -> str:
    """The report as one HTML file.

    :param title: of the page.
    :param table: the first table.
    :param sections: heading to figures, drawn as SVG, with their captions; those of the heading ""
        stand before the table.
    :param values: ``about``, a line below the title; ``summary``, the answer before everything
        else; ``warnings`` in a box below it; ``looks``, color and marker of each row by name, from
        ``plots.styles``; ``verdicts``, row to sentence; ``notes``, paragraphs below the table;
        ``further``, more tables; ``settings``, listed at the end by heading.
    """
    values |= {"script": Markup(_part("script.js")), "style": Markup(_style())}
    return _rendered(page=True, title=title, table=table, sections=sections, key="f", **values)


def fragment(
    table: Table, figures: Sequence[tuple[Figure, str]], *, key: str, **values: Any
) -> str:
    """The answer, the table and figures in the same design, as HTML for the page of a notebook.

    Styles hold inside it only. It needs no script: its headings do not sort.

    :param key: a prefix of ids that no other one of the notebook has.
    :param values: see :func:`page`.
    """
    style = re.sub(r"(?<![\w-])body(?=\s*\{)", ":scope", _style()).replace(":root", ":scope")
    return _rendered(
        page=False, table=table, sections={"": figures}, key=key, style=Markup(style), **values
    )


def _rendered(
    *, sections: Mapping[str, Sequence[tuple[Figure, str]]], key: str, **values: Any
) -> str:
    environment = Environment(autoescape=True, trim_blocks=True)
    environment.tests["finite"] = lambda value: (
        isinstance(value, (int, float)) and math.isfinite(value)
    )
    count = itertools.count()
    drawn = {
        heading: [
            (Markup(inline(figure, f"{key}{next(count)}", caption)), caption)
            for figure, caption in figures
        ]
        for heading, figures in sections.items()
    }
    return environment.from_string(_part("template.html")).render(
        marker=lambda look: Markup(marker(look)), sections=drawn, **values
    )


def _style() -> str:
    return _part("style.css").replace("/* dark colors */", dark_colors())


def _part(name: str) -> str:
    return resources.files("pyro_bdl.comparison.report").joinpath(name).read_text(encoding="utf-8")
