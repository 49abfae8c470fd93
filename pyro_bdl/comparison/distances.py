"""Distances of a posterior from the reference, with Monte Carlo errors and the reference's own
floor. Few draws make distances too large, by what the errors hold too.

A metric names its inputs by ``of``. Each input is a pair, of the posterior and of the reference:

=================  ==============================================================================
``"function"``     draws of the function ``(S, N, ...)``; of classes their probabilities
``"few draws"``    at most 500 of them, for metrics that use all pairs of draws
``"points"``       W1 and the square of W2 at each test point, ``(N, ...)``: no pair
``"scaled"``       the few draws, divided by the median distance between two of the reference's;
                   not known where that is zero
``"moments"``      of a regression mean and variance of the target given the draw,
                   ``(S, N, ..., 2)``
=================  ==============================================================================
"""

import itertools
import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_bdl import metrics
from pyro_bdl.comparison.columns import listed
from pyro_bdl.comparison.evaluate import Evaluation
from pyro_bdl.comparison.metric import (
    CLASSES,
    NUMBERS,
    Metric,
    error_of_share,
    evenly,
    measure,
    metric,
    metrics_of,
    of_task,
)
from pyro_bdl.comparison.setting import REGIONS
from pyro_bdl.metrics.distances import wasserstein1_by_chance, wasserstein_at_points
from pyro_bdl.metrics.joint import median_distance
from pyro_bdl.utils.jackknife import ERRORS, enlarged, monte_carlo_error, number_of_groups
from pyro_bdl.utils.precision import double

_MOST_PAIRED = 500  # draws, of which all pairs are used
# The largest number of test points for Monte Carlo errors, which compute each distance ten times.
_MOST_POINTS = 100
_HIGH_K = 0.7
_LEAST_POINTS = 5  # in a region
EQUIVALENT, NEAR = 0.25, 0.5  # of the distance of a point: the bands of "alike" and "usable"
BY_CHANCE = 2.5  # Monte Carlo errors by which the distances of equal posteriors may differ
_ERRORS_AT_POINTS = 3.0  # at single points, of which some of many are off by two errors by chance

Numbers = dict[str, Any]
Pair = tuple[Any, Any]
GROUP = "distance to {reference}"
distance = partial(metric, group=GROUP, error=True)

# -------------------------------------------------------------------------------------- metrics


@distance("W1", "points")
def wasserstein(w1: Tensor, square: Tensor) -> Tensor:
    """Wasserstein-1 distance of the function's distributions over the posterior, averaged over the
    test points (and classes), in units of the target or of a probability, with its Monte Carlo
    error, which holds what few draws add to a distance. The last row compares two halves of the
    reference's draws, which sampling alone sets apart."""
    return w1.mean()


@distance("mean", "function", task=NUMBERS)
def mean_error(a: Tensor, b: Tensor) -> Tensor:
    """Difference of the function's means, root mean square over the test points, in units of the
    target, with its Monte Carlo error."""
    return metrics.mean_error(a, b)


@distance("agree", "function", task=CLASSES, style="percent")
def agreement(a: Tensor, b: Tensor) -> Tensor:
    """Share of the test points at which the same class is the most probable, with its error over
    the points and over the draws. The last row compares two halves of the reference's draws, which
    sampling alone sets apart."""
    return metrics.agreement(a, b)


@distance("TV", "function", task=CLASSES)
def total_variation(a: Tensor, b: Tensor) -> Tensor:
    """Total variation distance of the predicted distributions, from 0 (equal) to 1, with its Monte
    Carlo error."""
    return metrics.total_variation(a, b)


@distance("sd", "function")
def sd_error(a: Tensor, b: Tensor) -> Tensor:
    """Difference of the function's standard deviations (sds) over the posterior, root mean square
    over the test points, in units of the target or of a probability, with its Monte Carlo error."""
    return metrics.sd_error(a, b)


@distance("sd ratio", "function")
def sd_ratio(a: Tensor, b: Tensor) -> Tensor:
    """The function's standard deviation (sd), averaged over the test points, divided by the
    reference's, with its Monte Carlo error; less than 1 is overconfident about the function."""
    spread = sd_of_draws(b).mean()
    return sd_of_draws(a).mean() / torch.where(spread > 0, spread, torch.nan)


@distance("W2", "points", detail=True)
def wasserstein2(w1: Tensor, square: Tensor) -> Tensor:
    """Wasserstein-2 distance of the function's distributions, root mean square over the test
    points, in the function's units."""
    return square.mean().sqrt()


@distance("energy", "few draws", detail=True)
def energy(a: Tensor, b: Tensor, groups: int | None = None) -> Tensor:
    """Energy distance of the joint distributions of the function at all test points, unbiased, in
    the function's units; for equal distributions it can be negative by chance."""
    return metrics.energy_distance(a, b, groups)


@distance("MMD²", "scaled", detail=True)
def mmd(a: Tensor, b: Tensor, groups: int | None = None) -> Tensor:
    """Squared maximum mean discrepancy of the joint distributions of the function at all test
    points, unbiased; the Gaussian kernel has the width of the reference's median distance."""
    return metrics.mmd(a, b, groups, length_scale=1.0)


@distance("KL", "moments", task=NUMBERS, detail=True)
def kl(a: Tensor, b: Tensor) -> Tensor:
    """KL divergence from the reference's predictive distribution, in nats per test point, between
    the Normals with their means and variances."""
    p, q = (metrics.variance_parts(*draws.unbind(-1)).total for draws in (a, b))
    return metrics.gaussian_kl(double(a[..., 0]).mean(0), p, double(b[..., 0]).mean(0), q)


@distance("KL", "function", task=CLASSES, key="kl", detail=True)
def kl_of_classes(a: Tensor, b: Tensor) -> Tensor:
    """KL divergence from the reference's predictive distribution, in nats per test point."""
    return metrics.categorical_kl(a, b)


@distance("", "function")
def mean_shift(a: Tensor, b: Tensor) -> Tensor | float:
    """The difference of the means in sds of the reference, as the draws show it."""
    spread = sd_of_draws(b).square().mean().sqrt()
    return metrics.mean_error(a, b) / spread if spread > 0 else torch.nan


@distance("", "function", task=CLASSES, key="mean_error")
def error_of_probabilities(a: Tensor, b: Tensor) -> Tensor:
    """As ``mean_error``, without a column."""
    return metrics.mean_error(a, b)


@metric("latent W1", "", group=GROUP, error=True)
def latent_w1() -> None:
    """Wasserstein-1 distance of the named latent that is worst, in sds of the reference's, with its
    Monte Carlo error. A point at the reference's mean has 0.8 if it is Normal."""


@metric("of", "", group=GROUP, style="text")
def latent() -> None:
    """The named latent that is the farthest from the reference's, against a point's distance."""


@metric("off", "", group=GROUP, error=True)
def latent_off() -> None:
    """Distance of a named latent that is held at a point from the reference's mean, in sds of the
    reference's, with its Monte Carlo error; of the farthest one. A point is no distribution, and
    decides no group."""


@metric("at a point", "", group=GROUP, style="text")
def latent_point() -> None:
    """The named latents that are held at a point, the farthest first."""


@metric("k > 0.7", "", group=GROUP, detail=True, style="percent")
def khat_high() -> None:
    """Share of the test points at which k of the function against the reference's is above 0.7,
    with three Monte Carlo errors to spare: its sd is less than about half, and importance weights
    could not mend it."""


@metric("resolved", "", group=GROUP, detail=True)
def resolution() -> None:
    """W1 that the draws resolve: up to there an equal posterior may be by chance, with 2.5 Monte
    Carlo errors."""


@metric("far at", "", group=GROUP, detail=True, style="percent")
def far_at() -> None:
    """Share of the test points at which W1 is more than half of the distance of a point at the
    reference's mean there, with three Monte Carlo errors to spare."""


@metric("", "", group=GROUP)
def not_alike_at() -> None:
    """Share of the test points at which W1, as the draws show it, is more than a quarter of the
    distance of a point at the reference's mean there."""


@metric("", "", group=GROUP)
def not_usable_at() -> None:
    """Share of the test points at which W1, as the draws show it, is more than half of the distance
    of a point at the reference's mean there."""


ALL_DISTANCES = metrics_of(globals())
REGIONAL = tuple(
    Metric(
        f"sd_ratio_{region}", region, f"sd ratio at the test inputs {where}.", sd_ratio.function,
        of="", group="sd ratio to {reference}", detail=True, error=True,
    )
    for region, where in REGIONS.items()
)  # fmt: skip


def sd_of_draws(draws: Tensor) -> Tensor:
    """The sd at each test point; zero if it is only rounding of the numbers there."""
    centered = double(draws - draws[0])
    deviations = centered - centered.mean(0)
    sd = torch.linalg.vector_norm(deviations, dim=0) / len(draws) ** 0.5  # faster than ``std``
    return torch.where(sd <= _rounding(draws), 0.0, sd)  # NaN stays


def _rounding(draws: Tensor) -> Tensor:
    """The rounding of numbers at each test point, whose sizes differ between points."""
    return 4 * torch.finfo(draws.dtype).eps * double(draws.abs().amax(0))


# ----------------------------------------------------------------------------------- of a pair


def distances(evaluation: Evaluation, reference: Evaluation) -> Numbers:
    """All distances of a posterior from the reference, by key, and their errors as ``key_se``."""
    inputs, groups = _inputs(evaluation, reference), groups_of(evaluation, reference)
    known = {**inputs, "points": wasserstein_at_points(*inputs["function"])}
    numbers = measure(ALL_DISTANCES, evaluation.task, known)
    with_error = [m for m in of_task(ALL_DISTANCES, evaluation.task) if m.error]
    added: Numbers = {}
    for name, pair in inputs.items():
        errors, more = _errors([m for m in with_error if m.of == name], pair, groups)
        numbers, added = numbers | errors, added | more
    errors, more = _shares(*inputs["function"], groups)
    numbers, added = numbers | errors, added | more
    spread = numbers["wasserstein_se"]  # what groups go by: more draws lower the distance itself
    numbers |= {"wasserstein_spread": numbers["wasserstein"], "wasserstein_spread_se": spread}
    resolution = resolved(evaluation, reference, spread)
    seen = numbers.get("mean_shift", math.nan)
    shift = _without_noise(seen, evaluation, reference)
    # of these two the noise is known, and the jackknife finds it with ten groups only
    chance, w1 = resolution - BY_CHANCE * spread, numbers["wasserstein"]
    left = w1 * math.sqrt(max(0.0, 1 - (chance / w1) ** 2)) if w1 > 0 else 0.0
    added["wasserstein"] = max(added["wasserstein"], w1 - left)
    added["mean_error"] = numbers["mean_error"] * (1 - shift / seen) if seen > 0 else 0.0
    # what is taken off is as uncertain as it is large: a mean that agrees must do so with it too
    added["mean_shift"] = seen - shift
    numbers["mean_shift"] = shift
    for key, more in added.items():
        numbers[f"{key}_se"] = math.hypot(numbers.get(f"{key}_se", math.nan), more)
    if (share := numbers.get("agreement")) is not None:
        error = math.hypot(
            numbers["agreement_se"], error_of_share(share, evaluation.function.shape[1])
        )
        numbers["agreement_se"] = error
    numbers |= worst_latent(evaluation, reference)
    return numbers | {"resolution": resolution}


def _shares(a: Tensor, b: Tensor, groups: int) -> tuple[Numbers, Numbers]:
    """Shares of the points at which the posterior leaves the bands of the groups, or k = 1 - r^2 of
    its sd ratio r is high: an average over the points may hide some where it fails. Also the errors
    of the means over the points, and what few draws add, of the same sorted draws.

    Noise of the draws makes distances larger, so that a share of 0 is one with any draws.
    """

    a, b = at_some_points(a), at_some_points(b)
    means = [m for m in ALL_DISTANCES if m.of == "points"]

    def at_points(a: Tensor, b: Tensor) -> Tensor:
        found = wasserstein_at_points(a, b)
        both = found[0], (sd_of_draws(a) / sd_of_draws(b)).nan_to_num(1.0)
        parts = [value.reshape(len(value), -1).mean(1) for value in both]
        return torch.cat([*parts, torch.stack([m.function(*found) for m in means])])

    count, few = b.shape[1], (1.0, max(1, groups - 1))
    distances, ratios, _ = at_points(a, b).split([count, count, len(means)])
    every, more = monte_carlo_error(at_points, a, b, groups=groups)
    errors, of_ratios = (every[: 2 * count] * enlarged(_ERRORS_AT_POINTS, few)).split(count)
    of_means, more_of_means = (
        (value[2 * count :] * enlarged(ERRORS, few)).tolist() for value in (every, more)
    )
    whole = {f"{m.key}_se": error for m, error in zip(means, of_means, strict=True)}
    added = {m.key: value for m, value in zip(means, more_of_means, strict=True)}
    points = at_points(double(b).mean(0, keepdim=True), b)[:count]
    points = points + _rounding(b).reshape(count, -1).mean(1)
    beyond = {
        "not_alike_at": distances > EQUIVALENT * points,
        "not_usable_at": distances > NEAR * points,
        "far_at": distances - _ERRORS_AT_POINTS * errors > NEAR * points,
        "khat_high": 1 - (ratios + _ERRORS_AT_POINTS * of_ratios) ** 2 > _HIGH_K,
    }
    if errors.isnan().any():
        return whole | dict.fromkeys(beyond, math.nan), added
    return whole | {key: float(double(there).mean()) for key, there in beyond.items()}, added


class LatentDistances(NamedTuple):
    """The distance of each named latent that two posteriors have, in sds b of the reference's.

    :param names: K names.
    :param distances: ``(K,)``, W1 / b; of a point c its distance from the mean, ``|c - m| / b``.
    :param errors: their Monte Carlo errors; NaN where they are unknown.
    :param limits: half of the distance of a point at the reference's mean, over b.
    :param points: bool ``(K,)``, which are held at a point.
    """

    names: tuple[str, ...]
    distances: Tensor
    errors: Tensor
    limits: Tensor
    points: Tensor


def latent_distances(evaluation: Evaluation, reference: Evaluation) -> LatentDistances | None:
    """The distances of the named latents; None if the posteriors have none in common, or only
    constants."""
    sides = evaluation, reference
    if evaluation.latents is None or reference.latents is None:
        return None
    of_reference = {name: k for k, name in enumerate(reference.latent_names)}
    pairs = [(k, of_reference[n]) for k, n in enumerate(evaluation.latent_names)
             if n in of_reference]  # fmt: skip
    sd = sd_of_draws(reference.latents)
    pairs = [(ours, theirs) for ours, theirs in pairs if sd[theirs] > 0]
    if not pairs:
        return None
    ours, theirs = map(list, zip(*pairs, strict=True))
    b = double(reference.latents[:, theirs]) / sd[theirs]
    a = evaluation.latents[:, ours].to(b) / sd[theirs]
    names, groups = tuple(reference.latent_names[k] for k in theirs), groups_of(*sides)
    points = torch.tensor([name in evaluation.at_points for name in names], device=b.device)

    def apart(a: Tensor, b: Tensor) -> Tensor:
        shifts = (a.mean(0) - b.mean(0)).abs() / sd_of_draws(b)
        return torch.where(points, shifts, wasserstein_at_points(a, b)[0])

    errors, _ = monte_carlo_error(apart, a, b, groups=groups)
    errors = errors * enlarged(_ERRORS_AT_POINTS, (1.0, max(1, groups - 1)))
    limits = NEAR * wasserstein_at_points(b.mean(0, keepdim=True), b)[0]
    parts = (value.cpu() for value in (apart(a, b), errors, limits, points))
    return LatentDistances(names, *parts)


def worst_latent(evaluation: Evaluation, reference: Evaluation) -> Numbers:
    """The named latent that is the farthest, its distance, and whether it is beyond half of a
    point's: ``latent_beyond`` as the draws show it, ``latent_far`` with three errors to spare; and
    those that are held at a point."""
    every = latent_distances(evaluation, reference)
    if every is None:
        return {}
    numbers: dict[str, Any] = {}
    if every.points.any():
        held = every.distances.masked_fill(~every.points, -1.0).argsort(descending=True)
        order = held[: int(every.points.sum())].tolist()
        numbers = {
            "latent_point": listed([every.names[k] for k in order], 2),
            "latent_off": float(every.distances[order[0]]),
            "latent_off_se": float(every.errors[order[0]]),
        }
    if every.points.all():
        return numbers
    drawn = ~every.points
    names = tuple(itertools.compress(every.names, drawn.tolist()))
    found = LatentDistances(names, *(value[drawn] for value in every[1:]))
    far = found.distances - _ERRORS_AT_POINTS * found.errors > found.limits
    excess = found.distances / found.limits
    k = int((excess + far * excess.max()).argmax())  # one that is far first
    return numbers | {
        "latent": found.names[k],
        "latent_w1": float(found.distances[k]),
        "latent_w1_se": float(found.errors[k]),
        "latent_limit": float(found.limits[k]),
        "latent_beyond": float((excess > 1).any()),
        "latent_far": float(far.any()),
    }


def _without_noise(shift: float, evaluation: Evaluation, reference: Evaluation) -> float:
    """A root mean square difference of means without what Monte Carlo errors add to it, in sds b of
    the reference::

        sqrt(max(0, d^2 - mean (a_n^2 / S_a + b_n^2 / S_b) / mean b_n^2))

    with the sds a and b, and the effective draws S_a and S_b; NaN if these are unknown.
    """
    squares = [sd_of_draws(side.function).square().mean() for side in (evaluation, reference)]
    noise = squares[0] / evaluation.effective + squares[1].to(squares[0]) / reference.effective
    left = shift**2 - float(noise / squares[1].to(noise))
    return left if math.isnan(left) else math.sqrt(max(0.0, left))


def _errors(chosen: list[Metric], pair: Pair, groups: int) -> tuple[Numbers, Numbers]:
    """The Monte Carlo errors of metrics of the same inputs, and what few draws add, by key."""
    if not chosen:
        return {}, {}

    def values(*of: Any) -> Tensor:
        numbers = [torch.as_tensor(metric.function(*of), device="cpu") for metric in chosen]
        return torch.stack([double(number) for number in numbers], -1)

    errors, added = monte_carlo_error(
        values, *map(at_some_points, pair), groups=groups,
        at_once=chosen[0].of in ("few draws", "scaled"),
    )  # fmt: skip
    errors, added = (
        value * enlarged(ERRORS, (1.0, max(1, groups - 1))) for value in (errors, added)
    )
    keys = [m.key for m in chosen]
    of_keys = {f"{key}_se": error for key, error in zip(keys, errors.tolist(), strict=True)}
    return of_keys, dict(zip(keys, added.tolist(), strict=True))


def at_some_points(draws: Tensor) -> Tensor:
    """Draws ``(S, N, ...)`` at no more test points than Monte Carlo errors need: those of one draw
    at many points are similar."""
    return evenly(draws.movedim(1, 0), 1, _MOST_POINTS).movedim(0, 1)


def _inputs(evaluation: Evaluation, reference: Evaluation) -> dict[str, Pair]:
    pair = evaluation, reference
    few = [evenly(side.function, side.chains, _MOST_PAIRED) for side in pair]
    inputs: dict[str, Pair] = {
        "function": (evaluation.function, reference.function),
        "few draws": (few[0], few[1]),
    }
    scale = median_distance(few[1])
    if scale > 0:
        inputs["scaled"] = double(few[0]) / scale, double(few[1]) / scale
    moments = [
        torch.stack([side.expected, side.noise], -1)
        for side in pair
        if side.expected is not None and side.noise is not None
    ]
    if len(moments) == 2:
        inputs["moments"] = moments[0], moments[1]
    return inputs


def resolved(evaluation: Evaluation, reference: Evaluation, error: float) -> float:
    """W1 up to which draws of an equal posterior may be by chance; NaN if it is unknown.

    :param error: the Monte Carlo error of W1.
    """
    sizes = evaluation.effective, reference.effective
    return wasserstein1_by_chance(reference.function, *sizes) + BY_CHANCE * error


def distance_of_point(reference: Evaluation) -> tuple[float, float]:
    """W1 of a point at the reference's mean, a scale for the others, and its Monte Carlo error."""
    f = reference.function
    if not sd_of_draws(f).any():
        return 0.0, 0.0  # all else is rounding

    def distance(f: Tensor, _: Tensor) -> Tensor:
        return metrics.wasserstein1(double(f).mean(0, keepdim=True), f)

    some, groups = at_some_points(f), groups_of(reference, reference)
    error, _ = monte_carlo_error(distance, some, some, groups=groups)
    return float(distance(f, f)), float(error * enlarged(ERRORS, (1.0, max(1, groups - 1))))


def groups_of(evaluation: Evaluation, reference: Evaluation) -> int:
    """Groups for Monte Carlo errors, each of at least 4 effective draws; 0 if these are unknown."""
    return number_of_groups(evaluation.effective, reference.effective)


def floor(reference: Evaluation) -> Numbers:
    """The distances between two halves of the reference's own draws."""
    return distances(*reference.halves()) if len(reference.function) > 1 else {}


def sd_ratios(ours: Evaluation, theirs: Evaluation) -> Numbers:
    """Ratio of the function's mean sds in each region, and its Monte Carlo error, by column.

    :returns: the ratios; regions with fewer than 5 test inputs are left out.
    """
    ratios: Numbers = {}
    for region, mask in theirs.regions.items():
        if int(mask.sum()) >= _LEAST_POINTS:
            pair = ours.function[:, mask], theirs.function[:, mask]
            ratio = sd_ratio.function(*pair)
            error = _errors([sd_ratio], pair, groups_of(ours, theirs))[0]["sd_ratio_se"]
            ratios |= {f"sd_ratio_{region}": float(ratio), f"sd_ratio_{region}_se": error}
    return ratios
