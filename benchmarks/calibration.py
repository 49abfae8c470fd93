"""Posteriors before and after calibration on held-out rows: coverage, width and NLPD.

A quarter of the training rows of each UCI split, and of the digits of scikit-learn, is held out. Of
numbers: 90 % intervals of the posterior, with the variance times one temperature, and MAPIE's
conformal ones, of one width and in proportion to the posterior's sd. Of classes: log loss before,
with a temperature and with isotonic maps, and MAPIE's 95 % sets.
"""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import parse_sizes, parser, read_rows, show, write_rows
from mapie.classification import SplitConformalClassifier
from mapie.conformity_scores import ResidualNormalisedScore
from mapie.regression import SplitConformalRegressor
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_digits
from sklearn.frozen import FrozenEstimator
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from uci import Split

import pyro_bdl as bdl

POSTERIORS = ("map", "mean-field", "ensemble", "laplace")
Row = dict[str, Any]


class Sd(RegressorMixin, BaseEstimator):
    """The predictive sd of a fitted regressor, as the scale of conformal residuals."""

    is_fitted = True

    def __init__(self, network: Any = None) -> None:
        self.network = network

    def fit(self, x: Any, y: Any) -> "Sd":
        return self

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def predict(self, x: Any) -> np.ndarray:
        return self.network.predict(x, return_std=True)[1]


def of_numbers(posterior: str, split: Split, seed: int, steps: int) -> Row:
    """Coverage and width, in sds of the target, of four 90 % intervals; NLPD of two Normals."""
    x, x_held, y, y_held = train_test_split(
        split.x.numpy(), split.y.numpy(), test_size=0.25, random_state=seed
    )
    x_test, y_test = split.x_test.numpy(), split.y_test.numpy()
    network = bdl.sklearn.BayesianRegressor(
        posterior, hidden=(50,), activation="relu", steps=steps, random_state=seed
    ).fit(x, y)
    held = network.scaler_.transform(x_held), (y_held - network.mean_) / network.sd_
    tensors = (torch.from_numpy(part).double() for part in held)
    scaling = bdl.calibration.temperature_scaling(network.model_, network.posterior_, *tensors)
    mean, sd = network.predict(x_test, return_std=True)
    row: Row = {"T": scaling.value}
    for name, factor in {"own": 1.0, "scaled": scaling.value}.items():
        variance = factor * sd**2
        residual = y_test - mean
        row[f"nlpd {name}"] = np.mean(np.log(2 * np.pi * variance) + residual**2 / variance) / 2
        row |= interval(name, mean - 1.645 * variance**0.5, mean + 1.645 * variance**0.5, y_test)
    scores = {"conformal": "absolute", "by sd": ResidualNormalisedScore(Sd(network), prefit=True)}
    for name, score in scores.items():
        wrapped = SplitConformalRegressor(network, 0.9, score, prefit=True)
        _, ends = wrapped.conformalize(x_held, y_held).predict_interval(x_test)
        row |= interval(name, *ends[:, :, 0].T, y_test)
    return row


def interval(name: str, low: np.ndarray, high: np.ndarray, y: np.ndarray) -> Row:
    """Share of the targets inside, and the mean width."""
    return {f"in {name}": np.mean((low <= y) & (y <= high)), f"width {name}": np.mean(high - low)}


def of_classes(posterior: str, seed: int, steps: int) -> Row:
    """Log loss before and after two maps, and conformal sets, of digits."""
    x, x_test, y, y_test = train_test_split(
        *load_digits(return_X_y=True), train_size=400, random_state=seed
    )
    x, x_held, y, y_held = train_test_split(x, y, test_size=0.5, random_state=seed)
    network = bdl.sklearn.BayesianClassifier(
        posterior, hidden=(50,), activation="relu", steps=steps, random_state=seed
    ).fit(x, y)
    row: Row = {"nll own": log_loss(y_test, network.predict_proba(x_test))}
    for method in ("temperature", "isotonic"):
        scaled = CalibratedClassifierCV(FrozenEstimator(network), method=method).fit(x_held, y_held)
        row[f"nll {method}"] = log_loss(y_test, scaled.predict_proba(x_test))
    wrapped = SplitConformalClassifier(network, 0.95, prefit=True).conformalize(x_held, y_held)
    members = wrapped.predict_set(x_test)[1][:, :, 0]
    inside = members[np.arange(len(y_test)), y_test]
    right = network.score(x_test, y_test)
    return row | {"accuracy": right, "in set": inside.mean(), "size": members.sum(1).mean()}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--data", type=Path, default=Path("uci"), help="the folder of UCI sets")
    options.add_argument("--sets", nargs="+", default=["boston", "concrete", "energy"])
    options.add_argument("--posteriors", nargs="+", default=list(POSTERIORS))
    options.add_argument("--rows", type=Path, help="a file of finished rows, to go on from")
    sizes = {"splits": (5, 1, "of each set"), "steps": (1000, 50, "of training")}
    given = parse_sizes(options, sizes)  # type: ignore[arg-type]
    torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore")
    rows = read_rows(given.rows)
    for number in range(given.splits):
        for name in (*given.sets, "digits"):
            for posterior in given.posteriors:
                key = {"set": name, "posterior": posterior, "split": number}
                if any(key.items() <= row.items() for row in rows):
                    continue
                if name == "digits":
                    row = of_classes(posterior, number, given.steps)
                else:
                    split = Split(given.data, "standard", name, number)
                    row = of_numbers(posterior, split, number, given.steps)
                rows.append(key | {k: float(v) for k, v in row.items()})
                write_rows(given.rows, rows[-1:])
    results: dict[str, Any] = {}
    for name in (*given.sets, "digits"):
        for posterior in given.posteriors:
            some = [r for r in rows if (r["set"], r["posterior"]) == (name, posterior)]
            means = {k: float(np.mean([r[k] for r in some])) for k in some[0] if k not in key}
            text = "  ".join(f"{k} {value:.3g}" for k, value in means.items())
            results[f"{name}, {posterior}"] = means if given.json else text
    show("Calibration on held-out rows", results, given.json)


if __name__ == "__main__":
    main()
