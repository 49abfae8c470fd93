"""Tables of results: rows as dicts, columns described once, written as text."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

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
    :param error: the key of the standard errors in the rows, if there are any; one that is not
        there is unknown.
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
        if not self.error:
            return f"{100 * value:.1f} %" if self.style == "percent" else number(value, self.digits)
        error: Any = row.get(self.error)
        error = math.nan if error is None else error
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
    A number with an error of zero is exact: it has ``digits`` significant digits, and no error. One
    whose error is unknown has "± ?".

    Source: the rounding rules of the Particle Data Group (2022), Review of particle physics,
    section 5.3.
    """
    if error == 0:
        return number(value, digits)
    if not 0 < error < math.inf or not math.isfinite(value):
        of_error = "?" if math.isnan(error) else number(error, 2)
        return f"{number(value, digits)} ± {of_error}"
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


def to_text(rows: Sequence[Row], columns: Sequence[Column], width: int | None = None) -> str:
    """The table as aligned text, in blocks of columns that fit into the width.

    Each block begins with the first column.
    """
    from rich.console import Console  # imported when needed

    first, *rest = columns
    blocks: list[list[Column]] = [[first]]
    console = Console(
        width=10**4, color_system=None, markup=False, emoji=False, highlight=False,
        force_jupyter=False,
    )  # fmt: skip
    for column in rest:
        longer = _table(rows, [*blocks[-1], column])
        if width and console.measure(longer).maximum > width and len(blocks[-1]) > 1:
            blocks.append([first])
        blocks[-1].append(column)
    texts = []
    for block in blocks:
        with console.capture() as text:
            console.print(_table(rows, block))
        texts.append("\n".join(line.rstrip() for line in text.get().splitlines()))
    return "\n\n".join(texts)


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    before = ""
    for column in columns:
        group = "" if column.group == before else column.group
        side: Any = "left" if column is columns[0] and column.style == "text" else "right"
        table.add_column(f"{group}\n{column.title}", justify=side, no_wrap=True)
        before = column.group
    for row in rows:
        table.add_row(*(column.cell(row) for column in columns))
    return table
