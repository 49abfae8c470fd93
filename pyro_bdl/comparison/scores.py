"""Scores of one posterior: the metrics on test data, and the predictions that they use.

A metric names its inputs by ``of``:

======================  =========================================================================
``"mean"``              the mean prediction ``(N, ...)`` and the targets; of classes the mean
                        probabilities ``(N, C)`` and the class numbers ``(N,)``
``"draws"``             draws of the target ``(S, N, ...)``, noise included, and the targets
``"density"``           log p(y_n | draw) ``(S, N)`` and the number of rows
``"moments"``           mean and variance of the predictions of a Normal observation, ``(N, ...)``
                        each, and the targets
``"pit"``               the probability integral transforms ``(N, ...)``
``"coverage range"``    both ends of the range of the coverage at 90 %
``"uncertainty"``       the parts of the uncertainty, an ``Uncertainty``
``"ood"``               the ``Uncertainty`` at test inputs and at inputs from elsewhere
======================  =========================================================================

``"draws"`` and ``"density"`` are computed for one batch of test data at a time, since they need
much memory: their metrics are means over the test points (``over_points``). Numbers are in the
target's units.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyro_bdl import metrics
from pyro_bdl.comparison.held_out import Observation, PredictiveDraws, Test, Units
from pyro_bdl.comparison.metric import Metric, PointScores, measure, measure_points, of_task
from pyro_bdl.errors import UnusableDrawsError
from pyro_bdl.utils.tables import listed

Scores = dict[str, Any]


# Below this many effective draws the density of a mixture says more about their number.
FEW_DRAWS = 10
_MANY_POINTS = 0.1


def _nlpd(density: Tensor, rows: int) -> Tensor:
    """NLPD of each row; a joint density of all rows is divided by their number."""
    found = metrics.negative_log_predictive_density(density, pointwise=True)
    return found / rows if density.shape[1] == 1 else found


def _expected_nll(density: Tensor, rows: int) -> Tensor:
    """E_q[NLL] of each row; a joint density of all rows is divided by their number."""
    found = metrics.expected_negative_log_likelihood(density, pointwise=True)
    return found / rows if density.shape[1] == 1 else found


def _rests_on_few(density: Tensor, rows: int) -> Tensor:
    return (metrics.effective_draws(density) < FEW_DRAWS).double()


def _coverage(key: str, percent: int) -> Metric:
    return Metric(
        key,
        f"in {percent} %",
        f"Share of the targets inside the central {percent} % interval; less is overconfident.",
        partial(metrics.interval_coverage, level=percent / 100, pointwise=True),
        of="draws",
        task="regression",
        style="percent",
        over_points="mean",
    )


TEST_DATA = (
    Metric(
        "rmse",
        "RMSE",
        "Root mean square error of the mean, in units of the target.",
        metrics.squared_error,
        of="mean",
        task="regression",
        over_points="root",
    ),
    Metric(
        "accuracy",
        "accuracy",
        "Share of the classes predicted correctly.",
        partial(metrics.accuracy, pointwise=True),
        of="mean",
        task="classification",
        style="percent",
        over_points="mean",
    ),
    Metric(
        "nlpd",
        "NLPD",
        "Negative log predictive density per datum, in nats; smaller is better.",
        _nlpd,
        of="density",
        over_points="mean",
    ),
    Metric(
        "nlpd_normal",
        "NLPD, Normal",
        "Negative log density of the targets under the Normal with the predictive mean and "
        "variance, in nats. It does not depend on the number of draws, as the density of their "
        "mixture does where the noise is much smaller than the function's sd.",
        metrics.gaussian_nlpd,
        of="moments",
        task="regression",
        over_points="mean",
    ),
    Metric(
        "crps",
        "CRPS",
        "Continuous ranked probability score, in units of the target; smaller is better.",
        partial(metrics.crps, pointwise=True),
        of="draws",
        task="regression",
        over_points="mean",
    ),
    _coverage("coverage", 90),
    Metric(
        "brier",
        "Brier",
        "Squared error of the class probabilities, from 0 (best) to 2.",
        partial(metrics.brier, pointwise=True),
        of="mean",
        task="classification",
        over_points="mean",
    ),
    Metric(
        "ece",
        "ECE",
        "Expected calibration error, in 15 bins: how far confidence is from accuracy.",
        metrics.expected_calibration_error,
        of="mean",
        task="classification",
        style="percent",
    ),
)
CALIBRATION = (
    Metric(
        "nlpd_few",
        "NLPD by few",
        f"Share of the test points at which NLPD rests on fewer than {FEW_DRAWS} effective draws.",
        _rests_on_few,
        of="density",
        style="percent",
        over_points="mean",
    ),
    _coverage("coverage_50", 50),
    Metric(
        "coverage_from",
        "90 % from",
        "The coverage of the 90 % interval is less than this with probability 2.5 % if the "
        "targets follow from one of the posterior's functions, and then the interval is correct.",
        lambda low, high: low,
        of="coverage range",
        task="regression",
        style="percent",
    ),
    Metric(
        "coverage_to",
        "90 % to",
        "Likewise, the coverage is more than this with probability 2.5 %.",
        lambda low, high: high,
        of="coverage range",
        task="regression",
        style="percent",
    ),
    _coverage("coverage_95", 95),
    Metric(
        "pit",
        "PIT",
        "Kolmogorov-Smirnov distance of the probability integral transforms from uniform; for "
        "a calibrated posterior and N independent targets it is above 1.36 / sqrt(N) with "
        "probability 5 %.",
        metrics.uniformity,
        of="pit",
        task="regression",
    ),
    Metric(
        "ace",
        "adaptive ECE",
        "Calibration error in 15 bins that hold equally many test points.",
        metrics.adaptive_calibration_error,
        of="mean",
        task="classification",
        style="percent",
    ),
    Metric(
        "confidence",
        "confidence",
        "Mean probability of the predicted class; the accuracy if calibrated.",
        lambda probabilities, y: metrics.mean_confidence(probabilities, pointwise=True),
        of="mean",
        task="classification",
        style="percent",
        over_points="mean",
    ),
    Metric(
        "expected_nll",
        "mean NLL",
        "Negative log likelihood per datum of a single draw, averaged over the draws, in nats; "
        "NLPD is that of their mean, and never larger.",
        _expected_nll,
        of="density",
        over_points="mean",
    ),
)
UNCERTAINTY = (
    Metric(
        "aleatoric",
        "aleatoric",
        "The sd of the noise, root mean square over the test points, in units of the target.",
        lambda parts: parts.aleatoric.mean().sqrt(),
        of="uncertainty",
        task="regression",
    ),
    Metric(
        "aleatoric",
        "aleatoric",
        "Mean entropy of the classes given the weights, in nats.",
        lambda parts: parts.aleatoric.mean(),
        of="uncertainty",
        task="classification",
    ),
    Metric(
        "epistemic",
        "epistemic",
        "The sd of the mean prediction over the posterior, root mean square over the test "
        "points, in units of the target. The squares of both terms sum to the variance.",
        lambda parts: parts.epistemic.mean().sqrt(),
        of="uncertainty",
        task="regression",
    ),
    Metric(
        "epistemic",
        "epistemic",
        "Mutual information of class and weights, in nats; both terms sum to the entropy.",
        lambda parts: parts.epistemic.mean(),
        of="uncertainty",
        task="classification",
    ),
    Metric(
        "ood_entropy",
        "OOD entropy",
        "Mean entropy of the predictive class distribution at out-of-distribution inputs, in nats.",
        lambda here, there: there.total.mean(),
        of="ood",
        task="classification",
    ),
    Metric(
        "auroc",
        "AUROC",
        "Probability that the predictive uncertainty is higher at an out-of-distribution input "
        "than at a test input; 0.5 means no separation.",
        lambda here, there: metrics.auroc(here.total, there.total),
        of="ood",
    ),
    Metric(
        "auroc_epistemic",
        "epist. AUROC",
        "The same with the epistemic uncertainty.",
        lambda here, there: metrics.auroc(here.epistemic, there.epistemic),
        of="ood",
    ),
)
SCORES = (*TEST_DATA, *CALIBRATION, *UNCERTAINTY)


@dataclass(frozen=True)
class Predictions:
    """Predictions for some rows of the test data, in the target's units.

    :param mean: ``(N, ...)``, the mean prediction; for classes ``(N, C)``, the mean probabilities.
    :param y: the targets, with the shape of the mean; for classes ``(N,)``, class indices; None
        where classes and other numbers stand in one mean, whose scores are then left out.
    :param rows: the number of rows of the test data.
    :param density: ``(S, N)``, log p(y_n | draw); ``(S, 1)`` for a joint distribution of all rows.
    :param draws: ``(S, N, ...)``, draws of the target, including noise; None for classes.
    :param variance: the predictive variance, with the shape of the mean, for Normal observations.
    """

    mean: Tensor
    y: Tensor | None
    rows: int
    density: Tensor | None = None
    draws: Tensor | None = None
    variance: Tensor | None = None

    def inputs(self) -> dict[str, tuple[Any, ...]]:
        """The inputs of metrics that are computed for one batch of test data at a time."""
        found: dict[str, tuple[Any, ...]] = {}
        if self.variance is not None:
            found["moments"] = (self.mean, self.variance, self.y)
        if self.density is not None:
            found["density"] = (self.density, self.rows)
        if self.draws is not None:
            found["draws"] = (self.draws, self.y)
        return found


def score(
    task: str, parts: Iterable[Predictions]
) -> tuple[Tensor, Tensor | None, Scores, dict[str, PointScores]]:
    """Scores of predictions for batches of the test data.

    :returns: the mean predictions, the probability integral transforms (for a regression with
        draws, else None), the scores and their errors by key, and the scores that are means over
        the test points with the points' influences.
    """
    means, targets, places = [], [], []
    values: dict[str, list[Tensor]] = {}
    for part in parts:
        for key, found in measure_points(SCORES, task, part.inputs()).items():
            values.setdefault(key, []).append(found)
        if part.draws is not None and part.y is not None:
            places.append(metrics.pit(part.draws, part.y))
        means.append(part.mean)
        targets += [] if part.y is None else [part.y]
    mean = torch.cat(means)
    inputs: dict[str, tuple[Any, ...]] = {"mean": (mean, torch.cat(targets))} if targets else {}
    pit = torch.cat(places) if places else None
    if pit is not None:
        inputs["pit"] = (pit,)
    of_points = {key: torch.cat(found) for key, found in values.items()}
    of_points |= measure_points(SCORES, task, inputs)
    points = {
        metric.key: PointScores.of(metric, of_points[metric.key])
        for metric in of_task(SCORES, task)
        if metric.key in of_points
    }
    scores: Scores = {key: found.number for key, found in points.items()}
    scores |= {f"{key}_se": found.error for key, found in points.items()}
    return mean, pit, scores | measure(SCORES, task, inputs), points


def predictions(
    predictive: Any, observation: Observation, parts: Iterable[Test], units: Units
) -> Iterator[Predictions]:
    """Yield the predictions of a posterior for one batch of test data after another.

    :param predictive: a ``Predictive`` or an object with the same methods.
    :param parts: the test data in batches that limit memory.
    :param units: units of the target; ignored for classes.
    """
    site = observation.site
    for part in parts:
        if observation.is_class:
            mean = predictive.mean(*part.asked())[site]
            check_draws("class probabilities", ~mean.isfinite())
            mean = observation.probabilities(mean).mean(0)
            density = log_likelihood(predictive, site, part)
            yield Predictions(mean, class_labels(part.y, mean), part.rows, density)
            continue
        moments = predictive.draw_moments(*part.asked())[site]
        mean, variance = moments.mean.mean(0), None
        if observation.mixed:
            density = log_likelihood(predictive, site, part)
            yield Predictions(mean, None, part.rows, density)
            continue
        if observation.kind == "Normal":
            variance = metrics.variance_parts(*moments).total.reshape(mean.shape) * units.scale**2
        y = _fitting(part.y, mean)
        density = units.density(log_likelihood(predictive, site, part), y)
        draws = predictive(*part.asked())[site]
        check_draws("predictions", draws.isnan())
        yield Predictions(
            units.of(mean), units.of(y), part.rows, density, units.of(draws), variance
        )


def known_predictions(
    draws: PredictiveDraws, y: Tensor, units: Units, *, normal: bool = False
) -> Predictions:
    """Predictions of a regression from ``PredictiveDraws``, as far as they are given.

    :param normal: whether the observation is Normal, so that its moments are scored too.
    """
    known = draws.function if draws.targets is None else draws.targets
    mean = known.mean(0)
    y = _fitting(y, mean)
    density = None
    if draws.log_likelihood is not None:
        density = units.density(draws.log_likelihood.flatten(1), y)
    targets = None if draws.targets is None else units.of(draws.targets)
    variance = targets.double().var(0) if normal and targets is not None else None
    return Predictions(units.of(mean), units.of(y), len(y), density, targets, variance)


def known_class_predictions(probabilities: Tensor, y: Tensor) -> Predictions:
    """Predictions of a classification from draws of the probabilities ``(S, N, C)``."""
    mean = probabilities.mean(0)
    labels = class_labels(y, mean)
    of_labels = probabilities.double().gather(-1, labels.expand(len(probabilities), -1)[..., None])
    return Predictions(mean, labels, len(labels), of_labels[..., 0].log())


def few_draws(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of the posteriors whose NLPD rests on few draws at more than a tenth of the points.

    :param rows: the rows of the table.
    """
    return [
        row["posterior"]
        for row in rows
        if (row.get("nlpd_few") or 0.0) > _MANY_POINTS and "nlpd_normal" in row
    ]


def few_draws_note(names: Sequence[str]) -> str:
    """A sentence on an NLPD that says more about the number of draws than about the posterior."""
    return (
        f"NLPD of {listed(names)} rests on fewer than {FEW_DRAWS} draws at many of the test "
        "points, since the noise is much smaller than the function's sd: it then says more about "
        "the number of draws than about the posterior. NLPD, Normal does not: it scores the "
        "predictive mean and variance, and is used in its place."
    )


def log_likelihood(predictive: Any, site: str, data: Test) -> Tensor:
    """log p(y_n | draw) in nats, ``(S, N)``; ``(S, 1)`` for a joint distribution of all rows.

    :raises UnusableDrawsError: if a value is NaN.
    """
    found = predictive.log_likelihood(*data.given())[site]
    check_draws("log likelihoods", found.isnan())
    return found.reshape(len(found), -1)


def check_draws(name: str, bad: Tensor) -> None:
    """Check that all draws can be used.

    :param name: name of the values, for the message.
    :param bad: bool ``(S, ...)``, true at values that cannot be used.
    :raises UnusableDrawsError: if there is such a value, with the number of such draws.
    """
    draws = bad.reshape(len(bad), -1).any(1).nonzero().flatten().tolist()
    if draws:
        raise UnusableDrawsError(
            f"{len(draws)} of {len(bad)} draws (the first is number {draws[0]}, counted from 0) "
            f"have {name} that are NaN or infinite: leave these draws out, or fit it again"
        )


def class_labels(y: Tensor, probabilities: Tensor) -> Tensor:
    """Targets as one class number for each row of probabilities ``(N, C)``.

    :param y: class numbers or one-hot rows.
    """
    if y.numel() == probabilities.numel() and y.shape[-1:] == probabilities.shape[-1:]:
        y = y.argmax(-1)
    return y.reshape(-1).long()


def _fitting(y: Tensor, mean: Tensor) -> Tensor:
    if y.numel() != mean.numel() or len(y) != len(mean):
        raise ValueError(
            f"y_test has shape {tuple(y.shape)}, but the program predicts {tuple(mean.shape)}"
        )
    return y.reshape(mean.shape)
