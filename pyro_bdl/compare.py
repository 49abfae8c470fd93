"""``compare``: posteriors of one program side by side, and how far each is from a reference."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from pyro_bdl import metrics, plots
from pyro_bdl.evaluation import Evaluation, Test, Units, class_labels, evaluate
from pyro_bdl.samples import Samples
from pyro_bdl.table import Column, to_csv, to_text
from pyro_bdl.verdicts import verdict

# Test points at which whole sets of draws are kept, and numbers that these may be in all.
_POINTS = 400
_NUMBERS = 2**24


@dataclass(frozen=True)
class Comparison:
    """What ``compare`` found; print it for the table.

    :param rows: a dict per posterior, and a last one for the reference's two halves against each
        other, the floor of the distances.
    :param columns: what the rows hold, with a sentence on each.
    :param verdicts: posterior -> one sentence computed from its row.
    """

    task: str
    reference: str | None
    rows: tuple[dict[str, Any], ...]
    columns: tuple[Column, ...]
    verdicts: Mapping[str, str]
    evaluations: Mapping[str, Evaluation]
    inputs: tuple[Tensor, ...]
    y: Tensor

    def __str__(self) -> str:
        lines = [to_text(self.rows, self.columns), ""]
        width = max(map(len, self.verdicts))
        lines += [f"{name.ljust(width)}  {text}" for name, text in self.verdicts.items()]
        return "\n".join(lines)

    def to_csv(self, path: str | Path) -> Path:
        """Write the rows as CSV, numbers unrounded."""
        return to_csv(path, self.rows, self.columns)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The rows by posterior."""
        return {
            row["posterior"]: {k: v for k, v in row.items() if k != "posterior"}
            for row in self.rows
        }

    def figures(self, *, units: str = "") -> dict[str, Figure]:
        """Pictures of the comparison, by caption.

        :param units: of the target, for the labels.
        """
        found: dict[str, Figure] = {}
        functions = {name: said.function for name, said in self.evaluations.items()}
        x = self.inputs[0]
        if self.task == "regression":
            drawn = {name: said.predictions for name, said in self.evaluations.items()}
            caption = "Share of test targets inside central intervals of each level"
            found[caption] = plots.calibration(
                drawn, self.y, task=self.task, reference=self.reference
            )
            if x.dim() <= 2 and x[0].numel() == 1:
                found["Mean and 90 % interval of the function"] = plots.predictive_bands(
                    x, functions, reference=self.reference
                )
        else:
            means = {name: said.mean for name, said in self.evaluations.items()}
            labels = class_labels(self.y, next(iter(means.values())))
            found["Share of right answers by confidence"] = plots.calibration(
                means, labels, task=self.task, reference=self.reference
            )
        if self.reference is None or len(functions) < 2:
            return found
        quantity = "prediction" if self.task == "regression" else "probability"
        found[f"Mean and sd of the {quantity} at each test point, against {self.reference}"] = (
            plots.function_space(
                functions, reference=self.reference, quantity=quantity, units=units
            )
        )
        return found | self._cost(units)

    def _cost(self, units: str) -> dict[str, Figure]:
        key = "wasserstein" if self.task == "regression" else "total_variation"
        *rows, floor = self.rows
        known = [row for row in rows if row.get("seconds") and row.get(key) is not None]
        reference = next(row for row in rows if row["posterior"] == self.reference)
        if not known or not reference.get("seconds"):
            return {}
        figure = plots.cost_against_quality(
            {row["posterior"]: row["seconds"] for row in [*known, reference]},
            {row["posterior"]: row[key] for row in known},
            reference=self.reference,
            floor=floor[key],
            units=units if self.task == "regression" else "",
        )
        return {f"Seconds to fit against the distance to {self.reference}": figure}


def compare(
    model: Callable,
    posteriors: Mapping[str, Any],
    *test: Tensor,
    reference: str | None = "nuts",
    num_samples: int = 1000,
    seconds: Mapping[str, float] | None = None,
    elbos: Mapping[str, float | None] | None = None,
    target_scale: float = 1.0,
    target_shift: float = 0.0,
) -> Comparison:
    """Score posteriors of a program on test data, and measure their distance to a reference.

    Distances are in function space: between the draws of the site ``f`` (or the mean of the
    observation, or the class probabilities) at the test inputs.

    :param model: a Pyro program with one observed site, called with ``*test``.
    :param posteriors: name -> guide or ``Samples``.
    :param test: the test inputs and, last, the targets; at least one row.
    :param reference: the posterior that the others are held against, None for none.
    :param num_samples: draws of each guide; of ``Samples`` all are taken.
    :param seconds, elbos: training time and ELBO at temperature 1, by name, where known.
    :param target_scale, target_shift: the target in its own units is y * scale + shift.
    :raises ValueError: for no posteriors, an unknown reference, or test data that do not fit.
    """
    if not posteriors:
        raise ValueError("posteriors is empty: give at least one guide or Samples by name")
    if reference is not None and reference not in posteriors:
        raise ValueError(
            f"reference {reference!r} is not among the posteriors ({', '.join(posteriors)}); "
            "reference=None compares without one"
        )
    if len(test) < 2 or not len(test[-1]):
        raise ValueError("give the test inputs and the test targets, with at least one row")
    if any(len(part) != len(test[-1]) for part in test):
        rows = ", ".join(str(len(part)) for part in test)
        raise ValueError(f"test inputs and targets must have the same number of rows, got {rows}")
    data = Test(tuple(test[:-1]), test[-1])
    kept = _kept_rows(posteriors, data, num_samples)
    units = Units(target_scale, target_shift)
    evaluations = {
        name: evaluate(
            name, model, posterior, data, num_samples=num_samples, kept=kept, units=units
        )
        for name, posterior in posteriors.items()
    }
    task = next(iter(evaluations.values())).task
    times = {
        name: posterior.info["seconds"]
        for name, posterior in posteriors.items()
        if isinstance(posterior, Samples) and "seconds" in posterior.info
    } | dict(seconds or {})
    rows: list[dict[str, Any]] = []
    for name, said in evaluations.items():
        row = {"posterior": name, "seconds": times.get(name), "elbo": (elbos or {}).get(name)}
        row |= said.scores
        if reference is not None and name != reference:
            row |= _distances(task, said.function, evaluations[reference].function)
        rows.append(row)
    floor = None
    if reference is not None:
        said = evaluations[reference]
        floor = {"posterior": f"{reference}, its halves"} | _floor(task, said)
        rows.append(floor)
    verdicts = {
        row["posterior"]: verdict(row, reference=reference, floor=floor, points=data.rows)
        for row in rows
        if row is not floor
    }
    y = data.y[kept] if task == "regression" else data.y
    return Comparison(
        task=task,
        reference=reference,
        rows=tuple(rows),
        columns=_columns(task, reference, rows),
        verdicts=verdicts,
        evaluations=evaluations,
        inputs=tuple(x[kept] for x in data.inputs),
        y=y * target_scale + target_shift if task == "regression" else y,
    )


def _kept_rows(posteriors: Mapping[str, Any], test: Test, num_samples: int) -> Tensor:
    most = max(
        q.num_chains * q.num_draws if isinstance(q, Samples) else num_samples
        for q in posteriors.values()
    )
    count = min(test.rows, _POINTS, max(1, _NUMBERS // most))
    return (torch.arange(count, device=test.y.device) * test.rows) // count


def _distances(task: str, draws: Tensor, reference: Tensor) -> dict[str, float]:
    """How far two sets of draws (S, N, ...) of a function are from each other."""
    ours, theirs = _sd(draws), _sd(reference)
    shift = draws.mean(0) - reference.mean(0)
    found = {
        "mean_error": metrics.mean_error(draws, reference).item(),
        "sd_error": metrics.sd_error(draws, reference).item(),
        "sd_ratio": (ours.mean() / theirs.mean()).item(),
        "mean_shift": (shift.square().mean() / theirs.square().mean()).sqrt().item(),
    }
    if task == "regression":
        return found | {"wasserstein": metrics.wasserstein1(draws, reference).item()}
    return found | {
        "agreement": metrics.agreement(draws, reference).item(),
        "total_variation": metrics.total_variation(draws, reference).item(),
    }


def _sd(draws: Tensor) -> Tensor:
    return draws.std(0, correction=0)


def _floor(task: str, said: Evaluation) -> dict[str, float]:
    """The distances between two halves of the reference's own draws."""
    found: dict[str, float] = {}

    def measure(a: Tensor, b: Tensor) -> Tensor:
        found.update(_distances(task, a, b))
        return a.new_tensor(0.0)

    if len(said.function) >= 2:
        metrics.split_half(said.function, measure, chains=said.chains)
    return found


def _columns(task: str, reference: str | None, rows: list[dict[str, Any]]) -> tuple[Column, ...]:
    fit, test = "training", "test data"
    columns = [
        Column("posterior", "posterior", style="text"),
        Column("seconds", "seconds", fit, "wall-clock seconds of the fit"),
        Column("elbo", "ELBO", fit, "bound on the log evidence at temperature 1, nats", digits=4),
    ]
    if task == "regression":
        columns += [
            Column("rmse", "RMSE", test, "root mean square error, in units of the target"),
            Column("nlpd", "NLPD", test, "negative log predictive density per datum, nats"),
            Column(
                "crps", "CRPS", test, "continuous ranked probability score, in units of the target"
            ),
            Column(
                "coverage", "90% cov.", test, "share of targets in the 90 % interval", "percent"
            ),
        ]
    else:
        columns += [
            Column("accuracy", "accuracy", test, "share of right answers", "percent"),
            Column("nlpd", "NLPD", test, "negative log predictive density per datum, nats"),
            Column("brier", "Brier", test, "squared error of the class probabilities"),
            Column("ece", "ECE", test, "expected calibration error, 15 bins"),
        ]
    if reference is not None:
        group = f"distance to {reference}"
        columns += [
            Column("mean_error", "mean", group, "root mean square difference of the means of f"),
            Column("sd_error", "sd", group, "root mean square difference of the sds of f"),
        ]
        if task == "regression":
            text = "Wasserstein-1 distance of f, averaged over test points, in units of the target"
            columns.append(Column("wasserstein", "W1", group, text))
        else:
            columns += [
                Column(
                    "agreement",
                    "agree",
                    group,
                    "share of points with the same top class",
                    "percent",
                ),
                Column("total_variation", "TV", group, "total variation of the mean probabilities"),
            ]
        columns.append(
            Column("sd_ratio", "sd ratio", group, "mean sd of f, relative to the reference")
        )
    if any("divergences" in row for row in rows):
        group = "convergence, f"
        columns += [
            Column("rhat", "R-hat", group, "largest rank-normalised split R-hat of f", digits=4),
            Column("ess_min", "min ESS", group, "smallest bulk effective sample size of f"),
            Column("divergences", "div.", group, "divergent transitions after warm-up"),
        ]
    return tuple(columns)
