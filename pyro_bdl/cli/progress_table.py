"""The rows of a table, printed one by one as posteriors are finished."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from pyro_bdl.comparison import costs
from pyro_bdl.comparison.compare import compare
from pyro_bdl.comparison.metric import of_task
from pyro_bdl.comparison.scores import TEST_DATA
from pyro_bdl.data.dataset import Dataset
from pyro_bdl.posteriors import Fit
from pyro_bdl.utils.tables import Column

_LEAST_WIDTH = 13  # of a number with its error
_SCORES = ("rmse", "accuracy", "nlpd", "crps", "coverage")
_TASKS = {"count": "regression"}


class ProgressTable:
    """A table that grows by a line for each posterior: time, ELBO and scores on test data.

    :param data: the data, whose test part is scored in its own units.
    :param seed: of the draws, as in ``compare``.
    :param names: the posteriors.
    :param shown: False prints nothing and computes nothing.
    """

    def __init__(self, data: Dataset, seed: int, names: Sequence[str], *, shown: bool) -> None:
        self.data, self.seed, self.shown = data, seed, shown
        self.width = max(map(len, names))
        scores = of_task(TEST_DATA, _TASKS.get(data.task, data.task))
        shown_scores = (metric.column() for metric in scores if metric.key in _SCORES)
        self.columns = [*costs.COLUMNS[1:], *shown_scores]
        self._has_heading = False

    def add(self, model: nn.Module, fit: Fit, *, is_kept: bool) -> None:
        """Score a posterior and print its row.

        :param is_kept: whether the fit was kept from an earlier run, which the row says.
        """
        if not self.shown:
            return
        row = self._scores(model, fit) | fit.costs.row(fit.name, fit.posterior)
        cells = [column.cell(row) for column in self.columns]
        self._print(fit.name, cells, "  kept" if is_kept else "")

    def add_failure(self, name: str, reason: str) -> None:
        """Print the row of a posterior that failed."""
        if self.shown:
            self._print(name, [], f"  {reason}")

    def _scores(self, model: nn.Module, fit: Fit) -> dict[str, Any]:
        data = self.data
        try:
            found = compare(
                model, {fit.name: fit.posterior}, data.x_test, data.y_test,
                reference=None, seed=self.seed, target_scale=data.y_sd, target_shift=data.y_mean,
            )  # fmt: skip
        except Exception:  # the comparison of all posteriors says what is wrong with it
            return {}
        return dict(found.rows[0])

    def _print(self, name: str, cells: Sequence[str], note: str) -> None:
        if not self._has_heading:
            self._has_heading = True
            self._print("", [column.title for column in self.columns], "")
        padded = (
            text.rjust(_width(column)) for text, column in zip(cells, self.columns, strict=False)
        )
        print("  ".join([f"  {name.ljust(self.width)}", *padded]).rstrip() + note, flush=True)


def _width(column: Column) -> int:
    return max(len(column.title), _LEAST_WIDTH if column.error else 8)
