"""A comparison as an HTML report, and as a short piece of HTML for notebooks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from pyro_bdl import plots
from pyro_bdl.app.figures import CAPTIONS, alternative, cost, figures
from pyro_bdl.app.report import Picture, Table, notebook_report, write_report
from pyro_bdl.comparison import judge
from pyro_bdl.comparison.judge import ALIKE, FAR, REFERENCE, UNDECIDED, USABLE, WORSE
from pyro_bdl.comparison.table import NAME
from pyro_bdl.utils.tables import Column

if TYPE_CHECKING:
    from pyro_bdl.comparison.table import Comparison

__all__ = ["figures", "fragment", "write_page"]

# Above the table stand the first of these and the first other one.
_FIRST, _SECOND = "cost", ("bands", "sd_map", "forest", "calibration")
_MORE = "More figures"
# Groups of columns that are shown from the start, by the beginnings of their names.
_SHOWN = ("test data", "distance to")
_BOUNDS = ("elbo", "log_evidence")
_GROUPS = {
    REFERENCE: "The reference",
    ALIKE: "Alike",
    USABLE: "Usable",
    UNDECIDED: "Undecided: too few draws to say",
    FAR: "Far",
    WORSE: "Worse",
}


def write_page(
    comparison: "Comparison",
    path: str | Path,
    figures: Mapping[str, Figure] | None = None,
    *,
    title: str = "Posteriors compared",
    about: str = "",
    notes: Sequence[str] = (),
    settings: Mapping[str, object] | None = None,
    points: Mapping[str, str] | None = None,
    further: Sequence[Table] = (),
) -> Path:
    """Write the report of a comparison and return its path.

    :param path: the HTML file.
    :param figures: those of ``Comparison.figures``, called with names and units of the data; by
        default without them.
    :param title: heading of the page.
    :param about: a line on the data and the model.
    :param notes: paragraphs below the table, such as units.
    :param settings: see ``report.write_report``.
    :param points: the inputs of the test points that figures show, by their names.
    :param further: more tables, after the first.
    """
    columns = [_placed(column) for column in _columns(comparison)]
    figures = comparison.figures() if figures is None else figures
    criteria = [judge.criteria(comparison.reference)] if comparison.summary else []
    first = [name for name in (_FIRST,) if name in figures]
    first += [name for name in _SECOND if name in figures][:1]
    order = [*first, *(name for name in figures if name not in first)]
    table = Table(
        "Table",
        list(comparison.numbers().values()),
        sorted(columns, key=lambda column: bool(column.group)),
        details=comparison.table.attrs["details"],
        hidden=[c.group for c in columns if c.group and not c.group.startswith(_SHOWN)],
        ranked=_ranked(comparison),
    )
    return write_report(
        path,
        table,
        pictures=[
            _picture(comparison, name, figures[name], "" if name in first else _MORE)
            for name in order
        ],
        title=title,
        about=about,
        verdicts=comparison.verdicts,
        further=further,
        notes=[*notes, *criteria, *comparison.notes],
        settings={**({"Test points in the figures": points} if points else {}), **(settings or {})},
        **_answer(comparison),
    )


def fragment(comparison: "Comparison") -> str:
    """The answer, the ranked table and the first picture, as HTML inside another page."""
    columns = [c for c in _columns(comparison) if not c.group or c.group.startswith(_SHOWN)]
    rows = list(comparison.numbers().values())
    return notebook_report(
        Table("Table", rows, columns, ranked=_ranked(comparison)),
        pictures=[_picture(comparison, *drawn) for drawn in cost(comparison).items()],
        **_answer(comparison),
    )


def _answer(comparison: "Comparison") -> dict[str, Any]:
    looks = plots.styles(comparison.evaluations, comparison.reference)
    return {"summary": comparison.summary, "warnings": comparison.warnings, "looks": looks}


def _picture(comparison: "Comparison", name: str, figure: Figure, section: str = "") -> Picture:
    return Picture(figure, CAPTIONS[name], alternative(name, comparison), section)


def _columns(comparison: "Comparison") -> list[Column]:
    return [NAME, *(c for c in comparison.table.attrs["columns"] if c.key != "group")]


def _ranked(comparison: "Comparison") -> list[tuple[str, list[str]]]:
    """The headings of the table's rows, each with its posteriors in order."""
    members: dict[str, list[str]] = {group: [] for group in _GROUPS}
    for name, judgment in comparison.judgments.items():
        members[judgment.group].append(name)
    found = [(words, members[group]) for group, words in _GROUPS.items()]
    return [*found, ("Not there", list(comparison.left_out))]


def _placed(column: Column) -> Column:
    """The column; bounds in a group of their own, since only some posteriors have them."""
    return replace(column, group="bounds") if column.key in _BOUNDS else column
