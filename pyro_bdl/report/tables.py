"""HTML tables that can be sorted by their headings, and the key to their columns."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from pyro_bdl.utils.tables import Column, Row, groups


def table(rows: Sequence[Row], columns: Sequence[Column], *, label: str) -> str:
    """A table that scrolls sideways; each heading is a button, and cells hold unrounded numbers.

    :param label: the label of the scrolling region for screen readers.
    """
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
        f'<div class="scroll" role="region" aria-label="{escape(label)}" tabindex="0"><table>'
        f"<thead>{above}<tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def key(columns: Sequence[Column]) -> str:
    """The key to the columns; empty if no column has a help text."""
    terms = "".join(
        f"<dt>{escape(column.title)}</dt><dd>{escape(column.help)}</dd>"
        for column in columns
        if column.help
    )
    return f"<dl>{terms}</dl>" if terms else ""


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
    """The title with non-breaking hyphens, for narrow columns."""
    return escape(title.replace("-", "\u2011"))
