"""Tables of results: rows as dicts, columns described once, written as text."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, object]

MISSING = "–"


@dataclass(frozen=True)
class Column:
    """One column of a table.

    :param key: the key of its values in the rows.
    :param title: a short heading.
    :param group: a heading that it shares with neighboring columns.
    :param help: one sentence on the meaning and the units of the numbers.
    :param style: ``"number"``, ``"percent"`` or ``"text"``.
    :param digits: significant digits of a number.
    :param error: the key of the standard errors in the rows, if there are any.
    """

    key: str
    title: str
    group: str = ""
    help: str = ""
    style: str = "number"
    digits: int = 3
    error: str = ""

    def cell(self, row: Row) -> str:
        """The row's value as text; a dash for None, NaN or a missing value."""
        value: Any = row.get(self.key)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return MISSING
        if self.style == "text" or isinstance(value, str):
            return str(value)
        error: Any = row.get(self.error) if self.error else None
        if error is None or not math.isfinite(error):
            return f"{100 * value:.1f} %" if self.style == "percent" else number(value, self.digits)
        if self.style == "percent":
            return f"{with_error(100 * value, 100 * error)} %"
        return with_error(value, error, self.digits)


def number(value: float, digits: int = 3) -> str:
    """A number as text, rounded to significant digits; no exponent between 0.0001 and a million."""
    if not math.isfinite(value):
        return str(float(value))
    if float(value).is_integer() and abs(value) < 1e6:
        return str(int(value))
    size = abs(value)
    if size >= 1e6 or size < 1e-4:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(size)))
    return f"{value:.{decimals}f}"


def with_error(value: float, error: float, digits: int = 3) -> str:
    """A number and its standard error, "value ± error", with digits that follow the error.

    The error has two digits if they are at most 35, else one; the value ends at the same place.
    Where the error is zero, the value has ``digits`` significant digits.

    Source: the rounding rules of the Particle Data Group (2022), Review of particle physics,
    section 5.3.
    """
    if not error > 0 or not math.isfinite(value):
        return f"{number(value, digits)} ± {number(error, 2)}"
    place = math.floor(math.log10(error))
    decimals = -place if round(error / 10.0 ** (place - 1)) > 35 else 1 - place
    if decimals > 6 or abs(value) >= 1e6:
        return f"{number(value, digits)} ± {number(error, 2)}"
    value, error = round(value, decimals), round(error, decimals)
    shown = max(0, decimals)
    return f"{value + 0.0:.{shown}f} ± {error:.{shown}f}"


def listed(names: Iterable[str], most: int | None = None) -> str:
    """Names as text: "a, b and c"; beyond ``most + 1`` names "a, b and 4 others"."""
    names = list(names)
    if most is not None and len(names) > most + 1:
        names = [*names[:most], f"{len(names) - most} others"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def to_text(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """The table as aligned text: groups, titles, a rule, and one line for each row."""
    cells = [[column.cell(row) for column in columns] for row in rows]
    widths = [
        max(len(column.title), *(len(line[i]) for line in cells), 0)
        for i, column in enumerate(columns)
    ]
    start = 0
    for title, count in groups(columns):
        start += count
        lacking = len(title) + 2 - sum(widths[start - count : start]) - 2 * (count - 1)
        widths[start - 1] += max(0, lacking) if title else 0
    first = columns[0].style == "text"

    def line(texts: Sequence[str]) -> str:
        return "  ".join(
            text.ljust(width) if i == 0 and first else text.rjust(width)
            for i, (text, width) in enumerate(zip(texts, widths, strict=True))
        ).rstrip()

    lines = [line([column.title for column in columns]), "  ".join("-" * w for w in widths)]
    if any(column.group for column in columns):
        lines.insert(0, _group_line(columns, widths))
    return "\n".join([*lines, *map(line, cells)])


def groups(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """Runs of neighboring columns with the same group, each with its number of columns."""
    runs: list[tuple[str, int]] = []
    for column in columns:
        if runs and runs[-1][0] == column.group:
            runs[-1] = (column.group, runs[-1][1] + 1)
        else:
            runs.append((column.group, 1))
    return runs


def _group_line(columns: Sequence[Column], widths: Sequence[int]) -> str:
    line, start = "", 0
    for title, count in groups(columns):
        width = sum(widths[start : start + count]) + 2 * (count - 1)
        line += (f" {title} ".center(width, "-") if title else " " * width) + "  "
        start += count
    return line.rstrip()
