"""HTML tables: ranked in groups, sortable by their headings, with groups of columns to show."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from pyro_bdl.report.svg import marker
from pyro_bdl.utils.tables import Column, Row

_FURTHER = "further columns"

Groups = Sequence[tuple[str, Sequence[str]]]
Looks = Mapping[str, Mapping[str, Any]]


def table(
    rows: Sequence[Row],
    columns: Sequence[Column],
    *,
    label: str,
    further: Sequence[Column] = (),
    hidden: Sequence[str] = (),
    ranked: Groups = (),
    looks: Looks | None = None,
    sortable: bool = True,
) -> str:
    """A table that scrolls sideways below its first column; cells hold unrounded numbers.

    Each heading is a button that sorts by it. If the columns have groups, there is a button for
    each that shows or hides it.

    :param label: the label of the scrolling region for screen readers.
    :param hidden: the groups of columns that are hidden at first.
    :param further: columns after ``columns``, hidden at first and shown by one button.
    :param ranked: headings, each with the names of its rows in order; other rows come last.
    :param looks: color and marker of rows, by the text of their first cell.
    :param sortable: whether there are buttons, which need the script of the page.
    """
    buttons = [column.group for column in columns] + [_FURTHER] * len(further)
    names = [name for name in dict.fromkeys(buttons) if name]
    columns = [*columns, *further]
    above = ""
    if any(column.group for column in columns):
        heads, start = "", 0
        for name, count in _runs(columns, buttons):
            heads += (
                f'<th colspan="{count}" scope="colgroup"{_group(buttons[start])}>'
                f"{escape(name)}</th>"
                if name
                else f'<td colspan="{count}"{_group(buttons[start])}></td>'
            )
            start += count
        above = f'<tr class="groups">{heads}</tr>'
    titles = "".join(
        f'<th scope="col"{_class(column)}{_group(button)} title="{escape(column.help)}">'
        f"{_title(column, i, sortable)}</th>"
        for i, (column, button) in enumerate(zip(columns, buttons, strict=True))
    )
    choice = ""
    if sortable and (ranked or len(names) > 1):
        choice = _choice(names, [*hidden, _FURTHER], bool(ranked))
    bodies = "".join(
        _body(heading, members, list(zip(columns, buttons, strict=True)), looks or {})
        for heading, members in _ranked(rows, columns[0].key, ranked)
    )
    return (
        f'<div class="table">{choice}<div class="frame">'
        f'<div class="scroll" role="region" aria-label="{escape(label)}" tabindex="0"><table>'
        f"<thead>{above}<tr>{titles}</tr></thead>{bodies}</table></div></div></div>"
    )


def key(columns: Sequence[Column]) -> str:
    """The key to the columns; empty if no column has a help text."""
    terms = "".join(
        f"<dt>{escape(column.title)}</dt><dd>{escape(column.help)}</dd>"
        for column in columns
        if column.help
    )
    return f"<dl>{terms}</dl>" if terms else ""


def _runs(columns: Sequence[Column], buttons: Sequence[str]) -> list[tuple[str, int]]:
    """Runs of neighboring columns with the same group and button, with their numbers."""
    runs: list[tuple[str, int]] = []
    before = None
    for column, button in zip(columns, buttons, strict=True):
        if (column.group, button) == before:
            runs[-1] = (column.group, runs[-1][1] + 1)
        else:
            runs.append((column.group, 1))
        before = (column.group, button)
    return runs


def _ranked(
    rows: Sequence[Row], name: str, ranked: Groups
) -> list[tuple[str, list[tuple[int, Row]]]]:
    """The rows under their headings, each with its place in the table."""
    there = {str(row.get(name)): row for row in rows}
    found, place = [], 0
    for heading, names in ranked:
        members = [there.pop(each) for each in names if each in there]
        if members:
            found.append((heading, list(enumerate(members, start=place))))
            place += len(members)
    return [*found, ("", list(enumerate(there.values(), start=place)))] if there else found


def _body(
    heading: str,
    members: Sequence[tuple[int, Row]],
    columns: Sequence[tuple[Column, str]],
    looks: Looks,
) -> str:
    above = ""
    if heading:
        above = (
            f'<tr class="rank"><th colspan="{len(columns)}" scope="rowgroup"><span>'
            f"{escape(heading)}</span></th></tr>"
        )
    lines = "".join(
        f'<tr data-place="{place}">{_cells(row, columns, looks)}</tr>' for place, row in members
    )
    return f"<tbody>{above}{lines}</tbody>"


def _choice(names: Sequence[str], hidden: Sequence[str], ranked: bool) -> str:
    """The buttons above the table; empty without groups of columns."""
    buttons = "".join(
        f'<button type="button" data-shows="{escape(name)}" '
        f'aria-pressed="{"false" if name in hidden else "true"}">{escape(name)}</button>'
        for name in names
    )
    order = '<button type="button" data-ranked disabled>ranked</button>' if ranked else ""
    if not buttons + order:
        return ""
    first = f"<span>Order:</span>{order}" if ranked else ""
    second = f"<span>Columns:</span>{buttons}" if buttons else ""
    return f'<div class="choice" role="group" aria-label="The table">{first}{second}</div>'


def _cells(row: Row, columns: Sequence[tuple[Column, str]], looks: Looks) -> str:
    (name, _), *others = columns
    text = f"{marker(looks.get(str(row.get(name.key))))}{escape(name.cell(row))}"
    cells = [f'<th scope="row"{_class(name)}>{text}</th>']
    for column, button in others:
        value: Any = row.get(column.key)
        is_number = isinstance(value, (int, float)) and math.isfinite(value)
        data = f' data-value="{float(value)!r}"' if is_number else ""
        shown = _error(escape(column.cell(row)))
        cells.append(f"<td{_class(column)}{_group(button)}{data}>{shown}</td>")
    return "".join(cells)


def _title(column: Column, place: int, sortable: bool) -> str:
    title = _unbroken(column.title)
    return f'<button type="button" data-column="{place}">{title}</button>' if sortable else title


def _error(text: str) -> str:
    """The cell with its error in softer ink."""
    value, sign, error = text.partition(" ± ")
    return f'{value}<span class="error">{sign}{error}</span>' if sign else value


def _class(column: Column) -> str:
    return ' class="text"' if column.style == "text" else ""


def _group(name: str) -> str:
    return f' data-group="{escape(name)}"' if name else ""


def _unbroken(title: str) -> str:
    """The title with non-breaking hyphens, for narrow columns."""
    return escape(title.replace("-", "\u2011"))
