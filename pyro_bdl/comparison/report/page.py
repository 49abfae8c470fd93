"""A comparison as an HTML report, and as a short piece of HTML for notebooks."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from pyro_bdl import plots
from pyro_bdl.comparison.columns import Column
from pyro_bdl.comparison.judge import ALIKE, FAR, REFERENCE, UNDECIDED, USABLE, WORSE, criteria
from pyro_bdl.comparison.report import write
from pyro_bdl.comparison.report.figures import CAPTIONS, cost, figures, points
from pyro_bdl.comparison.report.write import Table
from pyro_bdl.comparison.table import NAME
from pyro_bdl.data.dataset import CENSORED, LINKS, Dataset
from pyro_bdl.plots.style import GRAY
from pyro_bdl.utils.files import atomic_write
from pyro_bdl.utils.validation import as_path

if TYPE_CHECKING:
    from pyro_bdl.comparison.table import Comparison

__all__ = ["figures", "fragment", "write_page"]

# Above the table stand the figure of costs, the first other one of these, and the latents that are
# compared.
_FIRST, _SECOND, _LATENTS = "cost", ("bands", "forest", "calibration"), "hyperparameters"
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
    *,
    title: str = "",
    data: Dataset | None = None,
    figures: Mapping[str, Figure] | None = None,
    about: str = "",
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    further: Sequence[Table] = (),
) -> Path:
    """Write the report of a comparison and return its path.

    :param path: the HTML file; missing folders are made.
    :param title: the heading; by default one that names the target of ``data``.
    :param data: the data, for names and units.
    :param figures: those of ``Comparison.figures``; by default those without the posteriors.
    :param about: a line on the data and the model.
    :param settings: of the run, by heading, listed at the end.
    :param further: more tables, after the first.
    """
    path = as_path(path)
    figures = comparison.figures(data=data) if figures is None else figures
    first = [_FIRST, *[name for name in _SECOND if name in figures][:1]]
    if comparison.first.latents is not None:
        first.append(_LATENTS)
    # Bounds have a group of their own, since only some posteriors have them.
    columns = [
        replace(column, group="bounds") if column.key in _BOUNDS else column
        for column in _columns(comparison)
    ]
    usual = "Posteriors compared"
    if data is not None:
        usual = f"Posteriors of a neural network for {data.target_name}"
    text = write.page(
        title=title or usual,
        about=about,
        table=Table(
            "Table",
            list(comparison.numbers().values()),
            sorted(columns, key=lambda column: bool(column.group)),
            details=comparison.table.attrs["details"],
            hidden=[c.group for c in columns if c.group and not c.group.startswith(_SHOWN)],
            ranked=_ranked(comparison),
        ),
        sections={
            "": [(figures[name], CAPTIONS[name]) for name in first if name in figures],
            "More figures": [(f, CAPTIONS[n]) for n, f in figures.items() if n not in first],
        },
        further=further,
        notes=[
            *([units(data)] if data is not None else []),
            *([criteria(comparison.reference)] if comparison.summary else []),
            *comparison.notes,
        ],
        settings={
            "Test points in the figures": _inputs(comparison, data),
            **(settings or {}),
        },
        **_answer(comparison),
    )
    with atomic_write(path) as part:
        part.write_text(text, encoding="utf-8")
    return path


def fragment(comparison: "Comparison") -> str:
    """The answer, the ranked table and the first picture, as HTML inside another page."""
    columns = [c for c in _columns(comparison) if not c.group or c.group.startswith(_SHOWN)]
    rows, drawn = list(comparison.numbers().values()), cost(comparison)
    return write.fragment(
        Table("Table", rows, columns, ranked=_ranked(comparison)),
        [] if drawn is None else [(drawn, CAPTIONS["cost"])],
        key=f"n{zlib.crc32(repr(rows).encode()):x}-",
        **_answer(comparison),
    )


def units(data: Dataset) -> str:
    """The units of the numbers in the table."""
    if data.task == "classification":
        return "NLPD and ELBO are in nats; distances are between class probabilities."
    scores = ["CRPS"] if data.task in CENSORED else ["RMSE", "CRPS"]
    scores = scores if data.task in LINKS else [*scores, "distances"]
    text = f"{', '.join(scores[:-1])} and {scores[-1]}" if scores[1:] else scores[0]
    text += f" {'are' if scores[1:] else 'is'} in units of {data.target_name}; "
    text += f"distances are of the {LINKS[data.task]}; " if data.task in LINKS else ""
    if (data.y_mean, data.y_sd) == (0, 1):
        return f"{text}NLPD and ELBO are in nats."
    return f"{text}NLPD is in nats for them, ELBO in nats for the standardized training targets."


def _answer(comparison: "Comparison") -> dict[str, Any]:
    looks = plots.styles(comparison.evaluations, comparison.reference)
    looks |= {name: {"color": GRAY, "marker": "."} for name in comparison.baselines}
    answer = {"summary": comparison.summary, "warnings": comparison.warnings, "looks": looks}
    return answer | {"verdicts": comparison.verdicts}


def _inputs(comparison: "Comparison", data: Dataset | None) -> dict[str, str]:
    """The inputs of the test points in the figures, by their names."""
    if data is None:
        return {}
    shown = {}
    for title, (row, *_) in points(comparison, data).items():
        inputs = data.point(int(comparison.first.places[row]))["inputs"]
        shown[title] = ", ".join(f"{name} {value:.4g}" for name, value in inputs.items())
    return shown


def _columns(comparison: "Comparison") -> list[Column]:
    return [NAME, *(c for c in comparison.table.attrs["columns"] if c.key != "group")]


def _ranked(comparison: "Comparison") -> list[tuple[str, list[str]]]:
    """The headings of the table's rows, each with its posteriors in order."""
    members: dict[str, list[str]] = {group: [] for group in _GROUPS}
    for name, judgment in comparison.judgments.items():
        members[judgment.group].append(name)
    ranked = [(words, members[group]) for group, words in _GROUPS.items()]
    baselines = "Baselines of other libraries, not judged", list(comparison.baselines)
    return [*ranked, baselines, ("Not there", list(comparison.left_out))]
