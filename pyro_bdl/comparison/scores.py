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

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyro_bdl import metrics
from pyro_bdl.comparison.kind import Kind
from pyro_bdl.comparison.metric import Metric, PointScores, measure, measure_points, of_task
from pyro_bdl.comparison.observe import Block
from pyro_bdl.utils.tables import listed

Inputs = dict[str, tuple[Any, ...]]  # of metrics, by ``of``

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
        f"Share of the targets inside the central {percent} % interval, noise included; less is "
        "overconfident about the targets.",
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


class Score:
    """The scores of predictions that come batch by batch.

    :param kind: what the program observes.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._means: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._places: list[Tensor] = []
        self._values: dict[str, list[Tensor]] = {}

    def add(self, block: Block) -> None:
        """Score a batch."""
        inputs: dict[str, tuple[Any, ...]] = {}
        mean, y = block.mean.mean(0), block.y
        if self.kind.is_normal and block.noise is not None:
            variance = metrics.variance_parts(block.mean, block.noise).total
            inputs["moments"] = mean, variance.reshape(mean.shape), y
        elif self.kind.is_normal and block.draws is not None:
            inputs["moments"] = mean, block.draws.double().var(0), y
        if block.log_density is not None:
            inputs["density"] = block.log_density, block.rows
        if block.draws is not None and y is not None:
            inputs["draws"] = block.draws, y
            self._places.append(metrics.pit(block.draws, y))
        for key, found in measure_points(SCORES, self.kind.task, inputs).items():
            self._values.setdefault(key, []).append(found)
        self._means.append(mean)
        self._targets += [] if y is None else [y]

    def mean(self) -> Tensor:
        """The mean predictions."""
        return torch.cat(self._means)

    def pit(self) -> Tensor | None:
        """The probability integral transforms; None without draws of the target."""
        return torch.cat(self._places) if self._places else None

    def points(self) -> dict[str, PointScores]:
        """The scores that are means over the test points."""
        task = self.kind.task
        values = {key: torch.cat(found) for key, found in self._values.items()}
        values |= measure_points(SCORES, task, self._whole())
        return {
            metric.key: PointScores.of(metric, values[metric.key])
            for metric in of_task(SCORES, task)
            if metric.key in values
        }

    def numbers(self, inputs: Inputs) -> dict[str, Any]:
        """All scores and their errors by key.

        :param inputs: inputs of metrics at the kept points.
        """
        points = self.points()
        found: dict[str, Any] = {key: score.number for key, score in points.items()}
        found |= {f"{key}_se": score.error for key, score in points.items()}
        return found | measure(SCORES, self.kind.task, self._whole() | inputs)

    def _whole(self) -> Inputs:
        pit = self.pit()
        found: Inputs = {} if pit is None else {"pit": (pit,)}
        return found | ({"mean": (self.mean(), torch.cat(self._targets))} if self._targets else {})


def differences(evaluation: Any, reference: Any) -> dict[str, float]:
    """The scores minus the reference's at the same test points, as ``key_diff`` and its error."""
    found = {}
    for metric in of_task(TEST_DATA, evaluation.task):
        if metric.key in evaluation.points and metric.key in reference.points:
            key = f"{metric.key}_diff"
            found[key], found[f"{key}_se"] = evaluation.points[metric.key].difference(
                reference.points[metric.key]
            )
    return found


def few_draws(scores: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Names of the posteriors whose NLPD rests on few draws at more than a tenth of the points.

    :param scores: posterior to its numbers.
    """
    return [
        name
        for name, numbers in scores.items()
        if numbers.get("nlpd_few", 0.0) > _MANY_POINTS and "nlpd_normal" in numbers
    ]


def few_draws_note(names: Sequence[str]) -> str:
    """A sentence on an NLPD that says more about the number of draws than about the posterior."""
    return (
        f"NLPD of {listed(names)} rests on fewer than {FEW_DRAWS} draws at many of the test "
        "points, since the noise is much smaller than the function's sd: it then says more about "
        "the number of draws than about the posterior. NLPD, Normal does not: it scores the "
        "predictive mean and variance, and is used in its place."
    )
