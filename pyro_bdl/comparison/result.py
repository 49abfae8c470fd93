"""The result of a comparison: its table in several forms, and its figures."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pyro_bdl.comparison.captions import CAPTIONS
from pyro_bdl.comparison.evaluation import Evaluation
from pyro_bdl.comparison.judge import Ranking, answer
from pyro_bdl.utils.tables import Column, groups, to_csv, to_text

# matplotlib and pandas take long to import, and are imported when they are needed.
if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["CAPTIONS", "Comparison", "is_known"]

_WIDTH = 100
_LEAST_WIDTH = 40  # of a verdict, also beside long names


@dataclass(frozen=True)
class Comparison:
    """Result of ``compare``; print it for the answer, the table and the verdicts.

    :param task: ``"regression"`` or ``"classification"``.
    :param reference: name of the reference, or None.
    :param rows: a dict for each posterior: the reference, then the others as they are ranked, and
        a last one that compares two halves of the reference, the floor of the distances.
    :param columns: the columns of the table, each with a help text.
    :param verdicts: posterior to a sentence computed from its row.
    :param evaluations: posterior to its draws at the kept test points.
    :param inputs: the kept test points.
    :param y: their targets; for a regression in the target's own units.
    :param details: further columns, shown by ``to_text(details=True)`` and in the files.
    :param warnings: reasons not to trust the reference; empty if there are none.
    :param ranking: the posteriors in order of their distance to the reference, in groups; without a
        reference in order of their NLPD.
    :param notes: sentences on numbers of the table that must be read with care.
    :param places: the rows of the test data that the kept points are, counted from 0.
    """

    task: str
    reference: str | None
    rows: tuple[dict[str, Any], ...]
    columns: tuple[Column, ...]
    verdicts: Mapping[str, str]
    evaluations: Mapping[str, Evaluation] = field(repr=False)
    inputs: tuple[Any, ...] = field(repr=False)
    y: Tensor = field(repr=False)
    details: tuple[Column, ...] = ()
    warnings: tuple[str, ...] = ()
    ranking: Ranking = field(repr=False, default_factory=Ranking)
    notes: tuple[str, ...] = ()
    places: tuple[int, ...] = field(repr=False, default=())

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        against = f", reference {self.reference!r}" if self.reference is not None else ""
        return (
            f"<Comparison of {len(self.evaluations)} posteriors at {len(self.y)} test points, "
            f"{self.task}{against}; print it for the table>"
        )

    def with_failures(self, reasons: Mapping[str, str]) -> "Comparison":
        """The same table with a row for each posterior that is not there, whose verdict says why.

        :param reasons: name to reason.
        """
        added = [{"posterior": name} for name in reasons]
        floor = [row for row in self.rows if row["posterior"] not in self.evaluations]
        rows = [row for row in self.rows if row["posterior"] in self.evaluations]
        verdicts = {**self.verdicts, **reasons}
        return replace(self, rows=(*rows, *added, *floor), verdicts=verdicts)

    @property
    def summary(self) -> str:
        """The answer in two or three sentences, as far as the errors of the numbers bear it out."""
        return answer(self.ranking, self.warnings)

    def to_frame(self) -> "pd.DataFrame":
        """The rows with all their numbers, indexed by posterior, as they are ranked."""
        import pandas as pd

        return pd.DataFrame(self.rows).set_index("posterior")

    def to_text(self, width: int | None = _WIDTH, *, details: bool = False) -> str:
        """Summary, warnings, table, verdicts and notes.

        :param width: the largest number of characters in a line. Wider groups of columns are
            printed below each other, and sentences are wrapped; None for one wide table.
        :param details: show the columns of ``details`` too.
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
        columns = [*self.columns, *(self.details if details else ())]
        blocks = [to_text(self.rows, block) for block in self._blocks(columns, width)]

        def wrapped(texts: Sequence[str]) -> list[str]:
            return [textwrap.fill(text, width or 10**6, break_on_hyphens=False) for text in texts]

        above = [self.summary] if self.summary else []
        above += [f"Warning: {text}" for text in self.warnings]
        parts = [*wrapped(above), *blocks, "\n".join(verdicts), *wrapped(self.notes)]
        return "\n\n".join(parts)

    def report(
        self,
        path: str | Path,
        *,
        figures: "Mapping[str, Figure] | None" = None,
        title: str = "Posteriors compared",
        about: str = "",
        notes: Sequence[str] = (),
        settings: Mapping[str, object] | None = None,
        points: Mapping[str, str] | None = None,
    ) -> Path:
        """Write one self-contained HTML file: the answer, figures, the table; return its path.

        :param path: the HTML file; missing folders are made.
        :param figures: those of ``figures(...)``, called with names and units of the data; by
            default without them.
        :param title: heading of the page.
        :param about: a line on the data and the model.
        :param notes: paragraphs below the table, such as units.
        :param settings: what it takes to make the comparison again, shown at the end; a mapping as
            a value gets a heading of its own.
        :param points: the inputs of the test points that figures show, by their names.
        """
        from pyro_bdl.comparison.page import write_page

        drawn = self.figures() if figures is None else figures
        return write_page(
            self, path, drawn, title=title, about=about, notes=notes, settings=settings,
            points=points,
        )  # fmt: skip

    def _repr_html_(self) -> str:
        """The answer, the ranked table and the picture of cost against distance, for notebooks."""
        from pyro_bdl.comparison.page import fragment

        return fragment(self)

    def _blocks(self, columns: Sequence[Column], width: int | None) -> list[list[Column]]:
        name, rest = columns[0], list(columns[1:])

        def fits(block: list[Column]) -> bool:
            lines = to_text(self.rows, block).splitlines()
            return width is None or max(map(len, lines)) <= width

        blocks = [[name]]
        for _, count in groups(rest):
            group, rest = rest[:count], rest[count:]
            # A group is split only if it is too wide by itself.
            for part in [group] if fits([name, *group]) else [[column] for column in group]:
                if len(blocks[-1]) == 1 or fits([*blocks[-1], *part]):
                    blocks[-1] += part
                else:
                    blocks.append([name, *part])
        return blocks

    def to_csv(self, path: str | Path) -> Path:
        """Write all columns, details, errors and verdicts with unrounded numbers; return the
        path."""
        rows = [{**row, "verdict": self.verdicts.get(row["posterior"])} for row in self.rows]
        columns = []
        for column in (*self.columns, *self.details):
            columns.append(column)
            if column.error:
                columns.append(Column(column.error, column.error))
        return to_csv(path, rows, [*columns, Column("verdict", "verdict", style="text")])

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The rows and verdicts by posterior, in JSON types; None for missing numbers."""
        return {
            row["posterior"]: {
                key: value if is_known(value) else None
                for key, value in row.items()
                if key != "posterior"
            }
            | {"verdict": self.verdicts.get(row["posterior"])}
            for row in self.rows
        }

    def figures(
        self,
        *,
        target: str = "target",
        units: str = "",
        features: Sequence[str] = (),
        train: tuple[Tensor, Tensor] | None = None,
        posteriors: Mapping[str, Any] | None = None,
        points: Sequence[str] = (),
        scales: Mapping[str, float] | None = None,
    ) -> "dict[str, Figure]":
        """Figures of the comparison, by names that can be used for files; see :data:`CAPTIONS`.

        :param target: name of the target, for labels.
        :param units: units of the target, for labels.
        :param features: names of the inputs, for labels.
        :param train: training inputs and targets in the units of ``inputs`` and ``y``; shown if
            there are one or two inputs.
        :param posteriors: the compared posteriors, to show their latents too: hyperparameters,
            chains and layers.
        :param points: names of the kept test points; by default "point 17".
        :param scales: site to a factor that brings its values to the target's units, for a noise
            that the program sees in other units.
        """
        from pyro_bdl.comparison.figures import figures

        return figures(
            self, target=target, units=units, features=features, train=train,
            posteriors=posteriors, points=points, scales=scales or {},
        )  # fmt: skip

    def shown_points(self) -> list[int]:
        """The places, among the kept test points, of those that figures show one by one."""
        from pyro_bdl.comparison.figures import shown_points

        return shown_points(self)

    def to_json(self) -> dict[str, Any]:
        """All numbers and words in JSON types: the summary, the ranking, rows and columns."""
        return {
            "task": self.task,
            "reference": self.reference,
            "summary": self.summary,
            "warnings": list(self.warnings),
            "ranking": {
                "by": self.ranking.by,
                "criteria": self.ranking.criteria,
                "rows": [
                    {key: value if is_known(value) else None for key, value in vars(row).items()}
                    for row in self.ranking.rows
                ],
            },
            "columns": [
                {name: getattr(column, name) for name in ("key", "title", "group", "help")}
                for column in (*self.columns, *self.details)
            ],
            "posteriors": self.to_dict(),
        }


def is_known(value: object) -> bool:
    """Return whether a cell holds a value other than None and NaN."""
    return value is not None and not (isinstance(value, float) and math.isnan(value))
