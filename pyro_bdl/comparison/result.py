"""The result of a comparison: its table in several forms, and its figures."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from pyro_bdl.comparison.evaluation import Evaluation
from pyro_bdl.comparison.figures import CAPTIONS, figures
from pyro_bdl.utils.tables import Column, groups, to_csv, to_text

__all__ = ["CAPTIONS", "Comparison", "is_known"]

_WIDTH = 100
_LEAST_WIDTH = 40  # of a verdict, however long the names


@dataclass(frozen=True)
class Comparison:
    """Result of ``compare``; print it for the table and the verdicts.

    :param task: ``"regression"`` or ``"classification"``.
    :param reference: name of the reference, or None.
    :param rows: a dict for each posterior, and a last one for the reference's two halves against
        each other, the floor of the distances.
    :param columns: of the table, with a sentence on each.
    :param verdicts: posterior to one sentence computed from its row.
    :param evaluations: posterior to its draws at the test points that were kept.
    :param inputs: these test points.
    :param y: their targets, those of a regression in their own units.
    :param details: further columns, which ``to_text(details=True)`` and the files have too.
    :param warnings: why the reference cannot be trusted; empty where nothing speaks against it.
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

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int | None = _WIDTH, *, details: bool = False) -> str:
        """Table, verdicts and warnings.

        :param width: groups of columns, or the columns of a wide one, stand below each other where
            they are wider than so many characters, and sentences go on in the next line; None for
            one wide table.
        :param details: with the columns of ``details``.
        """
        longest = max(map(len, self.verdicts)) + 2
        verdicts = [
            textwrap.fill(
                text,
                10**6 if width is None else max(width, longest + _LEAST_WIDTH),
                initial_indent=name.ljust(longest),
                subsequent_indent=" " * longest,
            )
            for name, text in self.verdicts.items()
        ]
        columns = [*self.columns, *(self.details if details else ())]
        blocks = [to_text(self.rows, block) for block in self._blocks(columns, width)]
        warned = [textwrap.fill(f"Warning: {text}", width or 10**6) for text in self.warnings]
        return "\n\n".join([*blocks, "\n".join(verdicts), *warned])

    def _blocks(self, columns: Sequence[Column], width: int | None) -> list[list[Column]]:
        name, rest = columns[0], list(columns[1:])

        def fits(block: list[Column]) -> bool:
            lines = to_text(self.rows, block).splitlines()
            return width is None or max(map(len, lines)) <= width

        blocks = [[name]]
        for _, count in groups(rest):
            group, rest = rest[:count], rest[count:]
            # A group stays together, unless it is too wide by itself.
            for part in [group] if fits([name, *group]) else [[column] for column in group]:
                if len(blocks[-1]) == 1 or fits([*blocks[-1], *part]):
                    blocks[-1] += part
                else:
                    blocks.append([name, *part])
        return blocks

    def to_csv(self, path: str | Path) -> Path:
        """Write all columns, details, errors and verdicts, numbers unrounded; return the path."""
        rows = [{**row, "verdict": self.verdicts.get(row["posterior"])} for row in self.rows]
        columns = []
        for column in (*self.columns, *self.details):
            columns.append(column)
            if column.error:
                columns.append(Column(column.error, column.error))
        return to_csv(path, rows, [*columns, Column("verdict", "verdict", style="text")])

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The rows and verdicts by posterior, in types that JSON knows; None for no number."""
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
    ) -> dict[str, Figure]:
        """Pictures of the comparison, by a name that suits a file; see :data:`CAPTIONS`.

        :param target: what the target is, for labels.
        :param units: of the target, for labels.
        :param features: names of the inputs, for labels.
        :param train: training inputs and targets, in the units of ``inputs`` and ``y``, to show
            where there are one or two inputs.
        :param posteriors: those that were compared, to show their latents too: hyperparameters,
            chains and layers.
        """
        return figures(
            self, target=target, units=units, features=features, train=train, posteriors=posteriors
        )


def is_known(value: object) -> bool:
    """True where a cell holds something: neither None nor NaN."""
    return value is not None and not (isinstance(value, float) and math.isnan(value))
