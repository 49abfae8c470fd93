"""Mean-field networks trained and scored at many temperatures, as a table and figures."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import pyro_bdl as bdl
from pyro_bdl.elbo import TemperedTraceMeanField_ELBO
from pyro_bdl.plots import temperature_curves

TITLES = {
    "accuracy": "accuracy",
    "nlpd": "NLPD",
    "expected_nll": "mean NLL",
    "ece": "ECE",
    "confidence": "confidence",
    "ood_entropy": "OOD entropy",
}
KL = {"kl": "KL", "kl_per_neuron": "KL/N", "likelihood": "E log p / p"}
COLUMNS = ["neurons", "eta", "tau", *TITLES, *KL]


@dataclass(frozen=True)
class Sweep:
    """A row for each width and temperature.

    :param frame: neurons N, temperature eta, tau = eta N / p, scores on test data, KL in nats and
        E_q[log p(y | w)] per datum.
    :param num_data: p.
    """

    frame: pd.DataFrame
    num_data: int

    def __str__(self) -> str:
        return self.frame.round(4).to_string(index=False)

    def best_tau(self) -> float:
        """The tau with the lowest NLPD at the widest network."""
        widest = self.frame[self.frame.neurons == self.frame.neurons.max()]
        return float(widest.loc[widest.nlpd.idxmin(), "tau"])

    def figures(self, tau: float | None = None) -> dict[str, Figure]:
        """Scores and KL over eta, and scores over tau; eta = tau p / N is marked."""
        tau = self.best_tau() if tau is None else tau
        marks = {f"N = {n}": tau * self.num_data / n for n in self.frame.neurons.unique()}
        return {
            "scores": temperature_curves(self._curves(TITLES, "eta"), marks=marks),
            "kl": temperature_curves(
                self._curves(KL, "eta"), marks=marks, logarithmic=("KL", "KL/N")
            ),
            "scores_by_tau": temperature_curves(
                self._curves(TITLES, "tau"), label="tau = eta N / p", line=None
            ),
        }

    def save(self, folder: Path, name: str, tau: float | None = None) -> None:
        """Write the table and the figures."""
        self.frame.to_csv(folder / f"{name}.csv", index=False)
        for key, figure in self.figures(tau).items():
            figure.savefig(folder / f"{name}_{key}.png", dpi=150)

    def _curves(self, titles: dict[str, str], over: str) -> dict[str, dict[str, Any]]:
        networks = {f"N = {n}": rows for n, rows in self.frame.groupby("neurons")}
        return {
            title: {n: (rows[over].tolist(), rows[key].tolist()) for n, rows in networks.items()}
            for key, title in titles.items()
        }


def rows_of(
    model: nn.Module,
    neurons: int,
    etas: Iterable[float],
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    *,
    guide: Callable[[nn.Module], Any],
    ood: Tensor,
    num_samples: int,
    estimator: str | None = None,
    **options: Any,
) -> pd.DataFrame:
    """A guide trained and scored at each temperature, always from the same seed.

    :param neurons: N, for the columns per neuron.
    :param estimator: of the ELBO.
    :param options: of ``training.train``.
    """
    rows = []
    for eta in sorted(etas):
        torch.manual_seed(0)
        chosen = guide(model)
        elbo = TemperedTraceMeanField_ELBO(eta, estimator=estimator)
        bdl.training.train(model, chosen, *train, elbo=elbo, **options)
        likelihood, kl = _terms(model, chosen, *train, options["batch_size"])
        scores = bdl.compare(
            model, {"": chosen}, *test, reference=None, ood=ood, num_samples=num_samples
        ).table.iloc[0]
        count = len(train[0])
        row = {"neurons": neurons, "eta": eta, "tau": eta * neurons / count}
        row |= {"kl": kl, "kl_per_neuron": kl / neurons, "likelihood": likelihood / count}
        rows.append(row | {key: scores[key] for key in TITLES})
    return pd.DataFrame(rows)[COLUMNS]


@torch.no_grad()
def _terms(model: nn.Module, guide: Any, x: Tensor, y: Tensor, size: int) -> tuple[float, float]:
    """E_q[log p(y | w)] and KL(q || p) in nats, the first from eight minibatches."""
    elbo, found = TemperedTraceMeanField_ELBO(), []
    for _ in range(8):
        rows = torch.randperm(len(x))[:size]
        elbo.loss(model, guide, x[rows], y[rows])
        found.append(torch.stack([elbo.expected_log_likelihood, elbo.kl]))
    likelihood, kl = torch.stack(found).double().mean(0).tolist()
    return likelihood, kl
