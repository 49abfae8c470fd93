"""The table of a comparison: its numbers, columns and words, as a DataFrame and as text."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_bdl.comparison import judge
from pyro_bdl.comparison.columns import Column, to_text
from pyro_bdl.comparison.costs import COSTS, sensitivity_notes
from pyro_bdl.comparison.distances import (
    ALL_DISTANCES,
    REGIONAL,
    distance_of_point,
    distances,
    floor,
    latent_distances,
    sd_ratios,
)
from pyro_bdl.comparison.evaluate import Evaluation, of_runs
from pyro_bdl.comparison.judge import Judgment, Row
from pyro_bdl.comparison.leave_one_out import LEFT_OUT, elpd_difference, withheld_notes
from pyro_bdl.comparison.metric import mean_of_runs, of_task
from pyro_bdl.comparison.scores import (
    SCORES,
    TEST_DATA,
    data_notes,
    differences,
)
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.progress import progress_bar
from pyro_bdl.utils.trees import equal_trees

# matplotlib and pandas take long to import, and are imported when they are needed.
if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_WIDTH = 100
_LEAST_WIDTH = 40  # of a verdict, also beside long names
_GROUPS = (
    "",
    "costs",
    "parameters that the data determine",
    TEST_DATA,
    "calibration",
    "uncertainty",
    f"{TEST_DATA}, difference to {{reference}}",
    "distance to {reference}",
    "sd ratio to {reference}",
    "leave one out",
    "Markov chains",
)
BASELINE = "baseline"  # the group of rows that are not judged
NAME = Column("posterior", "posterior", style="text")


@dataclass(frozen=True)
class Comparison:
    """Result of ``compare``; print it for the answer, the table and the verdicts.

    :param table: a row for each posterior, the reference first, then the others as they are ranked,
        and a last one that compares two halves of the reference, the floor of the distances; all
        numbers, standard errors under ``key_se``, groups and verdicts. ``table.attrs`` holds
        ``"columns"`` and ``"details"``: the shown and the further columns, ``Column`` with title,
        group, help and key of the error each, and ``"point"``, the W1 of a point at the reference's
        mean, a scale for the others. Where masks leave out test targets, ``"seen"`` holds how many
        were seen, and of how many.
    :param reference: name of the reference, or None.
    :param evaluations: posterior to its evaluation; of several runs the draws of the first.
    :param judgments: posterior to its group and findings, in the order of the table.
    :param summary: each posterior in its group, with the number that put it there.
    :param warnings: reasons not to trust the reference; empty if there are none.
    :param notes: sentences on numbers of the table that must be read with care.
    :param left_out: posterior that is not there to the reason.
    :param baselines: row that is no posterior of the program, and not judged, to its words.
    """

    table: "pd.DataFrame"
    reference: str | None
    evaluations: Mapping[str, Evaluation] = field(repr=False)
    judgments: Mapping[str, Judgment]
    summary: str = ""
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    baselines: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        against = f", reference {self.reference!r}" if self.reference is not None else ""
        return (
            f"<Comparison of {len(self.evaluations)} posteriors at {len(self.y)} test points, "
            f"{self.task}{against}; print it for the table>"
        )

    @property
    def first(self) -> Evaluation:
        """The evaluation of the reference, or of the first posterior."""
        return self.evaluations[self.reference or next(iter(self.evaluations))]

    @property
    def task(self) -> str:
        """``"regression"`` or ``"classification"``."""
        return self.first.task

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The stored test points, at most 1000."""
        return self.first.inputs

    @property
    def y(self) -> Tensor:
        """Their targets; for a regression in the target's own units."""
        return self.first.y

    @property
    def verdicts(self) -> dict[str, str]:
        """Posterior to a sentence computed from its numbers."""
        verdicts = {name: judgment.verdict for name, judgment in self.judgments.items()}
        return {**verdicts, **self.baselines, **self.left_out}

    @property
    def latents(self) -> "pd.DataFrame":
        """A row for each posterior and number of a named latent, in the posteriors' order: ``mean``
        and ``sd`` of its draws, and beside the reference ``w1``, W1 in sds of the reference's, with
        its Monte Carlo error ``w1_se``; of a latent that is held at a point instead its distance
        from the reference's mean, ``off`` and ``off_se``. Of chains also the columns of
        ``diagnostics.prior_sensitivity`` on the training data."""
        import pandas as pd

        rows: dict[tuple[str, str], dict[str, float]] = {}
        reference = None if self.reference is None else self.evaluations[self.reference]
        for name in self.judgments:
            evaluation = self.evaluations[name]
            if evaluation.latents is None:
                continue
            draws = double(evaluation.latents)
            moments = zip(draws.mean(0).tolist(), draws.std(0).tolist(), strict=True)
            for latent, (mean, sd) in zip(evaluation.latent_names, moments, strict=True):
                rows[name, latent] = {"mean": mean, "sd": sd}
                rows[name, latent] |= evaluation.sensitivity.get(latent, {})
            found = None if reference is None else latent_distances(evaluation, reference)
            if found is not None and name != self.reference:
                numbers = found.distances.tolist(), found.errors.tolist()
                for latent, apart, error in zip(found.names, *numbers, strict=True):
                    key = "off" if latent in evaluation.at_points else "w1"
                    rows[name, latent] |= {key: apart, f"{key}_se": error}
        table = pd.DataFrame.from_dict(rows, orient="index")
        return table if table.empty else table.rename_axis(["posterior", "latent"])

    def to_text(self, width: int | None = _WIDTH, *, details: bool = False) -> str:
        """Summary, warnings, table, verdicts and notes.

        :param width: the largest number of characters in a line. Columns beyond it
            are printed below, and sentences are wrapped; None for one wide table.
        :param details: show the further columns too.
        """
        longest = max(map(len, self.verdicts)) + 2
        verdicts = [
            textwrap.fill(
                text,
                10**6 if width is None else max(width, longest + _LEAST_WIDTH),
                initial_indent=name.ljust(longest),
                subsequent_indent=" " * longest,
                break_on_hyphens=False,
            )
            for name, text in self.verdicts.items()
        ]
        columns = [*self.table.attrs["columns"], *(self.table.attrs["details"] if details else ())]
        table = to_text(list(self.numbers().values()), [NAME, *columns], width)
        above = [self.summary] if self.summary else []
        above += [f"Warning: {text}" for text in self.warnings]
        above, notes = (
            [textwrap.fill(text, width or 10**6, break_on_hyphens=False) for text in texts]
            for texts in (above, self.notes)
        )
        return "\n\n".join([*above, table, "\n".join(verdicts), *notes])

    def numbers(self) -> dict[str, dict[str, Any]]:
        """The rows of the table by name, each a dict of what is known, with its ``posterior``."""
        return {
            name: {"posterior": name, **row.dropna().to_dict()}
            for name, row in self.table.iterrows()
        }

    def report(self, path: str | Path, *, title: str = "", **options: Any) -> Path:
        """Write one self-contained HTML file: the answer, figures, the table; return its path.

        :param path: the HTML file; missing folders are made.
        :param title: its heading.
        :param options: see ``pyro_bdl.comparison.report.page.write_page``.
        """
        return self._page().write_page(self, path, title=title, **options)

    def figures(self, **options: Any) -> "dict[str, Figure]":
        """Figures of the comparison, by names that can be used for files.

        :param options: see ``pyro_bdl.comparison.report.figures.figures``.
        """
        return self._page().figures(self, **options)

    def _repr_html_(self) -> str:
        """The answer, the ranked table and the picture of cost against distance, for notebooks."""
        return self._page().fragment(self)

    def _page(self) -> Any:
        """The module that draws and writes, which comes after this one."""
        from pyro_bdl.comparison.report import page

        return page


@torch.no_grad()
def compare_evaluations(
    evaluations: Mapping[str, Evaluation | Sequence[Evaluation]],
    reference: str | None = None,
    *,
    left_out: Mapping[str, str] | None = None,
    baselines: Mapping[str, tuple[Evaluation, str]] | None = None,
    progress: bool | None = None,
) -> Comparison:
    """Compare posteriors that ``evaluate`` has scored on the same data, also in other processes.

    ::

        guide_scores = bdl.evaluate(model, guide, x, y)  # and .save(path), Evaluation.load(path)
        bdl.compare_evaluations({"vi": guide_scores, "nuts": nuts_scores}, "nuts")

    :param evaluations: name to evaluation, or to a list of those of several runs of one method:
        its numbers are then means over the runs, and their errors hold the runs' differences.
    :param reference: name of the posterior with which the others are compared.
    :param left_out: name to the reason, for posteriors that could not be evaluated.
    :param baselines: name to the evaluation and a word on what it is, for predictions that are no
        posterior of the program: rows with scores, without distances and judgment.
    :param progress: show a bar.
    :raises ValueError: for no evaluation, a reference that is unknown or of several runs,
        evaluations at other test inputs or targets or in other units, or functions of other shapes.
    """
    if not evaluations:
        raise ValueError("evaluations is empty: give at least one by name")
    if reference is not None and reference not in evaluations:
        raise ValueError(
            f"reference {reference!r} is not among the evaluations "
            f"({', '.join(map(repr, evaluations))}): name one of them, or say reference=None"
        )
    runs = {n: [e] if isinstance(e, Evaluation) else list(e) for n, e in evaluations.items()}
    for name, several in runs.items():
        if not several or (name == reference and len(several) > 1):
            raise ValueError(
                f"{name!r} has {len(several)} evaluations: give at least one, and of the reference "
                "one, which the others are compared with"
            )
    one = {name: of_runs(several) for name, several in runs.items()}
    first = one[reference] if reference is not None else next(iter(one.values()))
    rows = {name: Row(evaluation.scores) for name, evaluation in one.items()}
    for name, several in progress_bar(runs.items(), "distances", progress):
        for evaluation in several:
            _check_same(name, evaluation, first)
        if reference is not None and name != reference:
            rows[name] |= mean_of_runs([_beside(evaluation, first) for evaluation in several])
            rows[name] |= differences(one[name], first)
    (point, error), warned = (math.nan, math.nan), []
    if reference is not None:
        point, error = distance_of_point(first)
        warned = judge.doubts(reference, Row(rows[reference], point=point))
    judgments = judge.judge(rows, one, reference, point=point)
    answer = judge.answer(
        rows, judgments, reference, point=(point, error), doubtful=bool(warned), task=first.task
    )
    shown_rows: dict[str, dict[str, Any]] = {
        name: rows[name] | {"group": judgment.group, "verdict": judgment.verdict}
        for name, judgment in judgments.items()
    }
    for name, (baseline, words) in (baselines or {}).items():
        _check_same(name, baseline, first)
        gaps = {} if reference is None else differences(baseline, first)
        shown_rows[name] = {**baseline.scores, **gaps, "group": BASELINE, "verdict": words}
    shown_rows |= {name: {"verdict": reason} for name, reason in (left_out or {}).items()}
    if reference is not None:
        shown_rows[f"{reference}, half to half"] = floor(first)
    heading = f"{reference} (doubtful)" if warned else reference
    table = _frame(shown_rows, first.task, heading, point=point)
    if first.seen is not None:
        table.attrs["seen"] = first.seen
    return Comparison(
        table=table,
        reference=reference,
        evaluations=one,
        judgments=judgments,
        summary=answer,
        warnings=tuple(warned),
        notes=(
            *data_notes(first),
            *withheld_notes({name: rows[name] for name in judgments}),
            *sensitivity_notes({name: one[name] for name in judgments}),
        ),
        left_out=left_out or {},
        baselines={name: words for name, (_, words) in (baselines or {}).items()},
    )


def _beside(evaluation: Evaluation, reference: Evaluation) -> dict[str, Any]:
    """The numbers of a posterior beside the reference, but for its scores."""
    numbers = distances(evaluation, reference) | sd_ratios(evaluation, reference)
    return numbers | elpd_difference(evaluation, reference)


def _check_same(name: str, evaluation: Evaluation, first: Evaluation) -> None:
    """Check that two posteriors were scored on the same data, up to rounding.

    :raises ValueError: for other test inputs, targets or units, or functions of other shapes.
    """
    advice = "evaluate all posteriors with the same test data and units"
    if (evaluation.task, evaluation.rows) != (first.task, first.rows):
        raise ValueError(
            f"posterior {name!r} was evaluated on other data than the first one: {advice}"
        )
    for what, ours, theirs in (
        ("targets (or units)", evaluation.y, first.y),
        ("inputs", evaluation.inputs, first.inputs),
    ):
        if not equal_trees(ours, theirs):
            raise ValueError(
                f"posterior {name!r} was evaluated at other test {what} than the first one: "
                f"{advice}"
            )
    shapes = evaluation.function.shape[1:], first.function.shape[1:]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"the posteriors' functions must have the shape of the reference's at each draw, "
            f"{tuple(shapes[1])}, got {tuple(shapes[0])}"
        )


# ------------------------------------------------------------------------------------- columns


def columns(task: str, reference: str | None) -> tuple[list[Column], list[Column]]:
    """The columns of the table and further ones, in the order of their groups.

    :param task: ``"regression"`` or ``"classification"``.
    :param reference: heading of the reference's columns; None for differences from the best.
    """
    metrics = of_task((*COSTS, *SCORES, *ALL_DISTANCES, *REGIONAL, *LEFT_OUT), task)
    pairs = [(False, judge.COLUMN), *((m.detail, m.column()) for m in metrics if m.title)]
    pairs += [(True, m.difference_column()) for m in metrics if m.group == TEST_DATA]
    pairs.sort(key=lambda pair: _GROUPS.index(pair[1].group))
    whose = reference or "the best"
    first, further = (
        [replace(c, group=c.group.format(reference=whose)) for is_detail, c in pairs
         if is_detail == detail]
        for detail in (False, True)
    )  # fmt: skip
    return first, further


def _frame(
    rows: Mapping[str, Mapping[str, Any]], task: str, reference: str | None, *, point: float,
) -> "pd.DataFrame":  # fmt: skip
    """The rows as a DataFrame whose attributes are the columns that hold a number."""
    import pandas as pd

    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("posterior")
    first, further = columns(task, reference)
    known = set(table.columns[table.notna().any()])
    first, further = ([c for c in part if c.key in known] for part in (first, further))
    order = [key for c in (*first, *further) for key in (c.key, c.error) if key in known]
    rest = [key for key in table.columns if key not in order and key != "verdict"]
    table = table[[*order, *rest, "verdict"]]
    table.attrs = {"columns": tuple(first), "details": tuple(further), "point": point}
    return table
