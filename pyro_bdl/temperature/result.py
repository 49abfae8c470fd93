"""The result of a sweep over temperatures: its table and its figures."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyro_bdl.guides.base import Guide
from pyro_bdl.utils.tables import Column, to_csv, to_text

# matplotlib and pandas take long to import, and are imported when they are needed.
if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

COLUMNS = (
    Column("neurons", "N", help="Number of hidden neurons."),
    Column("eta", "eta", help="Temperature, the weight of the KL."),
    Column("tau", "tau", help="eta N / p for p data, the temperature per neuron and datum."),
    Column("rmse", "RMSE", group="test data", help="Root mean square error of the mean."),
    Column("accuracy", "accuracy", group="test data", style="percent", help="Share predicted."),
    Column(
        "nlpd",
        "NLPD",
        group="test data",
        help="Negative log predictive density per datum, in nats.",
    ),
    Column(
        "expected_nll",
        "mean NLL",
        group="test data",
        help="E_q[NLL]: that of a single draw, in nats.",
    ),
    Column(
        "ece",
        "ECE",
        group="test data",
        style="percent",
        help="Expected calibration error, 15 bins.",
    ),
    Column(
        "confidence",
        "confidence",
        group="test data",
        style="percent",
        help="Mean probability of the predicted class.",
    ),
    Column("coverage", "in 90 %", group="test data", style="percent", help="Coverage at 90 %."),
    Column(
        "ood_entropy",
        "OOD entropy",
        help="Mean predictive entropy at inputs from elsewhere, in nats.",
    ),
    Column("auroc", "AUROC", help="How well the uncertainty separates inputs from elsewhere."),
    Column("kl", "KL", help="KL(q || p(w)), in nats."),
    Column("kl_per_neuron", "KL/N", help="The same per hidden neuron."),
    Column("likelihood", "E log p / p", help="E_q[log p(y | w)] per training datum, in nats."),
)
_SHOWN = ("accuracy", "rmse", "nlpd", "expected_nll", "ece", "confidence", "ood_entropy")


@dataclass(frozen=True)
class Sweep:
    """Result of :func:`pyro_bdl.temperature.sweep`; print it for the table.

    :param task: ``"regression"`` or ``"classification"``.
    :param num_data: p, the number of training data.
    :param rows: a dict for each width and temperature.
    :param guides: the trained guides, by number of neurons and temperature eta.
    """

    task: str
    num_data: int
    rows: tuple[dict[str, Any], ...]
    guides: Mapping[tuple[int, float], Guide] = field(repr=False)

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int | None = 100) -> str:
        """The table as text.

        :param width: the largest number of characters in a line; columns that do not fit are left
            out, the last ones first. None for all columns.
        """
        columns = self.columns
        while width is not None and len(columns) > 3:
            lines = to_text(self.rows, columns).splitlines()
            if max(map(len, lines)) <= width:
                break
            columns = columns[:-1]
        return to_text(self.rows, columns)

    @property
    def columns(self) -> list[Column]:
        """The columns with values in this sweep."""
        return [column for column in COLUMNS if any(column.key in row for row in self.rows)]

    def to_frame(self) -> "pd.DataFrame":
        """The table as a data frame, a row for each width and temperature."""
        names = [column.key for column in self.columns]
        import pandas as pd

        return pd.DataFrame(list(self.rows))[names]

    def to_csv(self, path: str | Path) -> Path:
        """Write the table with unrounded numbers; return the path."""
        return to_csv(path, self.rows, self.columns)

    def best_tau(self) -> float:
        """The temperature per neuron and datum with the lowest NLPD at the widest network."""
        widest = max(row["neurons"] for row in self.rows)
        of_widest = [row for row in self.rows if row["neurons"] == widest]
        return min(of_widest, key=lambda row: row["nlpd"])["tau"]

    def figures(self, tau: float | None = None) -> "dict[str, Figure]":
        """Scores and KL against the temperature, by names that can be used for files.

        ``"scores"`` and ``"kl"`` are against eta; ``"scores_by_tau"`` is against tau = eta N / p,
        where the curves of wide networks coincide.

        :param tau: eta = tau p / N is marked for each width; by default ``best_tau()``.
        """
        from pyro_bdl.plots.temperature import temperature_curves

        tau = self.best_tau() if tau is None else tau
        titles = {column.key: column.title for column in self.columns}
        scores = {titles[key]: self._curves(key) for key in _SHOWN if key in titles}
        by_tau = {titles[key]: self._curves(key, "tau") for key in _SHOWN if key in titles}
        kl = {titles[key]: self._curves(key) for key in ("kl", "kl_per_neuron", "likelihood")}
        marks = {name: tau * self.num_data / count for name, count in self._names().items()}
        return {
            "scores": temperature_curves(scores, marks=marks),
            "kl": temperature_curves(kl, marks=marks, logarithmic=("KL", "KL/N")),
            "scores_by_tau": temperature_curves(by_tau, label="tau = eta N / p", line=None),
        }

    def _names(self) -> dict[str, int]:
        counts = sorted({row["neurons"] for row in self.rows})
        return {f"N = {count}": count for count in counts}

    def _curves(self, key: str, over: str = "eta") -> dict[str, tuple[list[float], list[float]]]:
        curves = {}
        for name, count in self._names().items():
            rows = sorted((r for r in self.rows if r["neurons"] == count), key=lambda r: r["eta"])
            curves[name] = [r[over] for r in rows], [r[key] for r in rows]
        return curves
