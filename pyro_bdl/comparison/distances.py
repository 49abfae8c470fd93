"""Distances of a posterior from the reference, with Monte Carlo errors and the reference's own
floor.

A metric names its inputs by ``of``. Each input is a pair, of the posterior and of the reference:

=================  ==============================================================================
``"function"``     draws of the function ``(S, N, ...)``; of classes their probabilities
``"few draws"``    at most 500 of them, for metrics that use all pairs of draws
``"scaled"``       the few draws, divided by the median distance between two of the reference's;
                   not known where that is zero
``"moments"``      of a regression mean and variance of the target given the draw,
                   ``(S, N, ..., 2)``
``"evaluations"``  the two evaluations, for a metric without a Monte Carlo error
=================  ==============================================================================
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from pyro_bdl import importance, metrics
from pyro_bdl.comparison.evaluate import Evaluation
from pyro_bdl.comparison.metric import Metric, evenly, measure, of_task
from pyro_bdl.metrics.distances import wasserstein1_by_chance
from pyro_bdl.utils.tables import Column

# The largest number of draws of which all pairs are used, and for the fit of a k-hat.
_MOST_PAIRED, _MOST_TAIL = 500, 1000
# The largest number of test points for Monte Carlo errors, which compute each distance ten times.
_MOST_POINTS = 100
_MOST_GROUPS = 10  # of the jackknife that gives these errors
_LEAST_TAIL, _HIGH_K = 25, 0.7
_LEAST_POINTS = 5  # in a region
BY_CHANCE = 2.5  # Monte Carlo errors by which the distances of equal posteriors may differ
_KL = (
    "KL divergence from the reference's predictive distribution, in nats per test point; of "
    "numbers between the Normals with their means and variances."
)


Numbers = dict[str, float]
Pair = tuple[Any, Any]


def sd_of_draws(draws: Tensor) -> Tensor:
    """The sd at each test point; zero if it is only rounding."""
    sd = (draws - draws[0]).double().std(0, correction=0)
    rounding = 4 * torch.finfo(draws.dtype).eps * draws.abs().max()
    return torch.where(sd <= rounding, 0.0, sd)  # NaN stays


def sd_ratio(a: Tensor, b: Tensor) -> Tensor:
    """The mean sd over the test points, divided by the reference's."""
    return sd_of_draws(a).mean() / sd_of_draws(b).mean()


def _mean_shift(a: Tensor, b: Tensor) -> Tensor | float:
    """The difference of the means in sds of the reference."""
    spread = sd_of_draws(b).square().mean().sqrt()
    return metrics.mean_error(a, b) / spread if spread > 0 else torch.nan


def _moments_kl(a: Tensor, b: Tensor) -> Tensor:
    """KL divergence of the Normals with the mean and variance of the predictions."""
    p, q = (metrics.variance_parts(*draws.unbind(-1)).total for draws in (a, b))
    return metrics.gaussian_kl(a[..., 0].double().mean(0), p, b[..., 0].double().mean(0), q)


def _share_of_high_khat(evaluation: Evaluation, reference: Evaluation) -> Tensor | float:
    """Share of the test points at which the k-hat of the function is above 0.7."""
    ours = evenly(evaluation.function, evaluation.chains, _MOST_TAIL)
    theirs = evenly(reference.function, reference.chains, _MOST_TAIL)
    spread = sd_of_draws(theirs) > 0
    if len(ours) < _LEAST_TAIL or len(theirs) < 2 or not spread.any():
        return torch.nan
    k = importance.function_khat(ours[:, spread], theirs[:, spread])
    collapsed = sd_of_draws(ours)[spread] == 0  # up to rounding
    return ((k > _HIGH_K) | collapsed).double().mean()


DISTANCES = (
    Metric(
        "mean_error",
        "mean",
        "Difference of the function's means, root mean square over the test points, in units "
        "of the target, with its Monte Carlo error.",
        metrics.mean_error,
        of="function",
        task="regression",
        error=True,
    ),
    Metric(
        "agreement",
        "agree",
        "Share of the test points at which the same class is the most probable, with its "
        "Monte Carlo error. The last row compares two halves of the reference's draws: "
        "better agreement cannot be seen.",
        metrics.agreement,
        of="function",
        task="classification",
        style="percent",
        error=True,
    ),
    Metric(
        "total_variation",
        "TV",
        "Total variation distance of the predicted distributions, from 0 (equal) to 1, with "
        "its Monte Carlo error.",
        metrics.total_variation,
        of="function",
        task="classification",
        error=True,
    ),
    Metric(
        "sd_error",
        "sd",
        "Difference of the function's sds over the posterior, root mean square over the test "
        "points, in units of the target or of a probability, with its Monte Carlo error.",
        metrics.sd_error,
        of="function",
        error=True,
    ),
    Metric(
        "wasserstein",
        "W1",
        "Wasserstein-1 distance of the function's distributions over the posterior, averaged over "
        "the test points (and classes), in units of the target or of a probability, with its Monte "
        "Carlo error. The last row compares two halves of the reference's draws: a smaller "
        "distance is no larger than sampling makes it.",
        metrics.wasserstein1,
        of="function",
        error=True,
    ),
    Metric(
        "sd_ratio",
        "sd ratio",
        "The function's sd, averaged over the test points, divided by the reference's, with its "
        "Monte Carlo error; less than 1 is overconfident about the function.",
        sd_ratio,
        of="function",
        error=True,
    ),
)
FURTHER_DISTANCES = (
    Metric(
        "wasserstein2",
        "W2",
        "Wasserstein-2 distance of the function's distributions, root mean square over the "
        "test points, in the function's units.",
        metrics.wasserstein2,
        of="function",
        error=True,
    ),
    Metric(
        "energy",
        "energy",
        "Energy distance of the joint distributions of the function at all test points, unbiased, "
        "in the function's units; for equal distributions it can be negative by chance.",
        metrics.energy_distance,
        of="few draws",
        error=True,
    ),
    Metric(
        "mmd",
        "MMD²",
        "Squared maximum mean discrepancy of the joint distributions of the function at all test "
        "points, unbiased; the Gaussian kernel has the width of the reference's median distance.",
        lambda a, b: metrics.mmd(a, b, length_scale=1.0),
        of="scaled",
        error=True,
    ),
    Metric("kl", "KL", _KL, _moments_kl, of="moments", task="regression", error=True),
    Metric(
        "kl", "KL", _KL, metrics.categorical_kl, of="function", task="classification", error=True
    ),
    Metric(
        "khat_high",
        "k > 0.7",
        "Share of the test points at which k-hat of the function's distribution against the "
        "reference's is above 0.7: at a common mean the sd is less than about half.",
        _share_of_high_khat,
        of="evaluations",
        style="percent",
    ),
)
# Numbers for verdicts and ``to_dict``, without a column.
UNSHOWN_DISTANCES = (
    Metric("mean_shift", "", "", _mean_shift, of="function", error=True),
    Metric(
        "mean_error", "", "", metrics.mean_error, of="function", task="classification", error=True
    ),
)
ALL_DISTANCES = (*DISTANCES, *FURTHER_DISTANCES, *UNSHOWN_DISTANCES)
RESOLUTION = Column(
    "resolution",
    "resolved",
    help="W1 up to which an equal posterior may be by chance, with 2.5 Monte Carlo errors.",
)
REGION_COLUMNS = (
    Column(
        "sd_ratio_near",
        "near",
        error="sd_ratio_near_se",
        help="sd ratio at the test inputs near training inputs.",
    ),
    Column(
        "sd_ratio_between",
        "between",
        error="sd_ratio_between_se",
        help="sd ratio at the test inputs between training inputs, far from all of them.",
    ),
    Column(
        "sd_ratio_beyond",
        "beyond",
        error="sd_ratio_beyond_se",
        help="sd ratio at the test inputs beyond the training inputs, far from all of them.",
    ),
)


def distances(evaluation: Evaluation, reference: Evaluation) -> Numbers:
    """All distances of a posterior from the reference, by key, and their errors as ``key_se``."""
    inputs = _inputs(evaluation, reference)
    groups = groups_of(evaluation, reference)
    found = measure(ALL_DISTANCES, evaluation.task, inputs)
    found |= _errors(evaluation.task, inputs, groups)
    return found | {"resolution": resolution(evaluation, reference, found["wasserstein_se"])}


def resolution(evaluation: Evaluation, reference: Evaluation, error: float) -> float:
    """W1 up to which draws of an equal posterior may be by chance; NaN if it is unknown.

    :param error: the Monte Carlo error of W1.
    """
    sizes = evaluation.effective, reference.effective
    return wasserstein1_by_chance(reference.function, *sizes) + BY_CHANCE * error


def distance_of_point(reference: Evaluation) -> float:
    """W1 of a point at the reference's mean, a scale for the others."""
    mean = reference.function.double().mean(0, keepdim=True)
    return float(metrics.wasserstein1(mean, reference.function))


def groups_of(evaluation: Evaluation, reference: Evaluation) -> int:
    """Groups for Monte Carlo errors, each of at least 4 effective draws; 0 if these are unknown."""
    sizes = evaluation.effective, reference.effective
    return 0 if any(map(math.isnan, sizes)) else int(min(_MOST_GROUPS, *(n / 4 for n in sizes)))


def floor(reference: Evaluation) -> Numbers:
    """The distances between two halves of the reference's own draws."""
    if len(reference.function) < 2:
        return {}
    return distances(*reference.halves())


def _inputs(evaluation: Evaluation, reference: Evaluation) -> dict[str, Pair]:
    pair = evaluation, reference
    found: dict[str, Pair] = {
        "evaluations": pair,
        "function": (evaluation.function, reference.function),
    }
    few = tuple(evenly(side.function, side.chains, _MOST_PAIRED) for side in pair)
    scale = metrics.median_distance(few[1])
    found["few draws"] = few[0], few[1]
    if scale > 0:
        found["scaled"] = few[0].double() / scale, few[1].double() / scale
    if evaluation.expected is not None and reference.expected is not None:
        found["moments"] = _moments(evaluation), _moments(reference)
    return found


def _moments(evaluation: Evaluation) -> Tensor:
    """Mean and variance of the target given the draw, ``(S, N, ..., 2)``."""
    assert evaluation.expected is not None and evaluation.noise is not None
    return torch.stack([evaluation.expected, evaluation.noise], -1)


def _errors(task: str, inputs: dict[str, Pair], groups: int) -> Numbers:
    """The Monte Carlo errors of the metrics that have one."""
    found: Numbers = {}
    chosen = [metric for metric in of_task(ALL_DISTANCES, task) if metric.error]
    for name, (a, b) in inputs.items():
        group = [metric for metric in chosen if metric.of == name]
        if group:
            few = (at_some_points(draws) for draws in (a, b))
            errors = metrics.monte_carlo_error(_joint_function(group), *few, groups=groups).tolist()
            keys = (metric.error_key for metric in group)
            found |= dict(zip(keys, errors, strict=True))
    return found


def at_some_points(draws: Tensor) -> Tensor:
    """Draws ``(S, N, ...)`` at no more test points than Monte Carlo errors need: those of one draw
    at many points are similar."""
    return evenly(draws.movedim(1, 0), 1, _MOST_POINTS).movedim(0, 1)


def _joint_function(group: Iterable[Metric]) -> Callable[[Tensor, Tensor], Tensor]:
    """One function for several metrics of the same inputs: their numbers as a vector."""

    def values(a: Tensor, b: Tensor) -> Tensor:
        numbers = [metric.function(a, b) for metric in group]
        return torch.stack([torch.as_tensor(v, device="cpu").double() for v in numbers])

    return values


def sd_ratios(ours: Evaluation, theirs: Evaluation) -> Numbers:
    """Ratio of the function's mean sds in each region, and its Monte Carlo error, by column.

    :param ours: a posterior.
    :param theirs: the reference.
    :returns: the ratios; regions with fewer than 5 test inputs are left out.
    """
    found: Numbers = {}
    groups = groups_of(ours, theirs)
    for name, mask in theirs.regions.items():
        if int(mask.sum()) >= _LEAST_POINTS:
            a, b = (side.function.detach()[:, mask] for side in (ours, theirs))
            few = at_some_points(a), at_some_points(b)
            error = metrics.monte_carlo_error(sd_ratio, *few, groups=groups)
            found[f"sd_ratio_{name}"] = float(sd_ratio(a, b))
            found[f"sd_ratio_{name}_se"] = float(error)
    return found
