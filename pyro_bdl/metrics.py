"""Scores of predictions, calibration, and distances between posteriors in function space.

``draws`` are draws of a prediction, shape (S, N, ...): S draws at N test points. ``probabilities``
are predictive class probabilities, the mean over the draws, shape (N, C). Every function works on
the device of its tensors, in float64, a block of test points at a time, and returns a scalar
tensor unless it says otherwise.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pyro_bdl.diagnostics.rank import quantile_of_sorted, sort

# Numbers worked on at once; a metric holds a few times that in temporaries.
_BLOCK_NUMBERS = 2**22


# ------------------------------------------------------------------------------------- scores


def rmse(mean: Tensor, y: Tensor) -> Tensor:
    """Root mean square error, sqrt(mean_n (mean_n - y_n)^2).

    :param mean: ``(N, ...)``, the predictive mean, in the units of the target.
    :param y: ``(N, ...)``, the observed targets.
    :raises ValueError: where the shapes differ.
    """
    _same_shape("mean", mean, "y", y)
    return (mean.double() - y.double()).square().mean().sqrt()


def accuracy(probabilities: Tensor, y: Tensor) -> Tensor:
    """Share of test points whose most probable class is the observed one, from 0 to 1.

    :param probabilities: ``(N, C)``.
    :param y: ``(N,)``, class indices.
    :raises ValueError: where the shapes do not fit, or a label is not in 0 ... C - 1.
    """
    labels = _labels(probabilities, y)
    return (probabilities.argmax(-1) == labels).double().mean()


def negative_log_predictive_density(log_likelihood: Tensor) -> Tensor:
    """Mean negative log predictive density, -1/N sum_n log(1/S sum_s p(y_n | w_s)), in nats.

    :param log_likelihood: ``(S, N)``, log p(y_n | w_s) of each test point under each draw.
    :raises ValueError: for other than two axes.

    Source: Gelman, Hwang, Vehtari (2014), Understanding predictive information criteria for
    Bayesian models.
    """
    if log_likelihood.dim() != 2:
        raise ValueError(
            f"log_likelihood must have shape (draws, points), but has shape "
            f"{tuple(log_likelihood.shape)}"
        )
    blocks = [part.double().logsumexp(-1) for (part,) in _blocks(log_likelihood)]
    return math.log(log_likelihood.shape[0]) - torch.cat(blocks).mean()


def crps(draws: Tensor, y: Tensor) -> Tensor:
    """Continuous ranked probability score, mean_n E|X - y_n| - 1/2 E|X - X'|; smaller is better.

    The fair estimate: X and X' are different draws, so its expectation over independent draws is
    the score of the predictive distribution they come from, however few they are::

        1/S sum_s |x_s - y| - 1 / (S (S - 1)) sum_s (2 s - S - 1) x_(s)

    with x_(1) <= ... <= x_(S).

    :param draws: ``(S, N, ...)``, draws of the target (noise included), S at least 2.
    :param y: ``(N, ...)``.
    :returns: a scalar, in the units of the target.
    :raises ValueError: where the shapes do not fit, or there is a single draw.

    Source: Gneiting & Raftery (2007), Strictly proper scoring rules, section 4.2; Ferro (2014),
    Fair scores for ensemble forecasts.
    """
    _same_points(draws, y)
    size = draws.shape[0]
    if size < 2:
        raise ValueError("crps needs at least 2 draws, but draws has 1: draw more")
    weight = torch.arange(1 - size, size, 2, dtype=torch.float64, device=draws.device)
    scores = []
    for part, target in _blocks(draws, y[None]):
        ordered = sort(part.double())
        error = (ordered - target.double()).abs().mean(-1)
        scores.append(error - ordered @ weight / (size * (size - 1)))
    return torch.cat(scores).mean()


def brier(probabilities: Tensor, y: Tensor) -> Tensor:
    """Brier score, 1/N sum_n sum_c (p_nc - [y_n = c])^2, from 0 (best) to 2.

    :param probabilities: ``(N, C)``.
    :param y: ``(N,)``, class indices.
    :raises ValueError: where the shapes do not fit, or a label is not in 0 ... C - 1.

    Source: Brier (1950), Verification of forecasts expressed in terms of probability.
    """
    labels = _labels(probabilities, y)
    observed = torch.nn.functional.one_hot(labels, probabilities.shape[-1])
    return (probabilities.double() - observed).square().sum(-1).mean()


# -------------------------------------------------------------------------------- calibration


def interval_coverage(draws: Tensor, y: Tensor, *, level: float | Sequence[float] = 0.9) -> Tensor:
    """Share of the targets inside the central interval of the draws; calibrated: the level.

    The interval at level l runs from the (1 - l)/2 to the (1 + l)/2 quantile of the draws at each
    point (type 7), ends included.

    :param draws: ``(S, N, ...)``, draws of the target (noise included).
    :param y: ``(N, ...)``.
    :param level: one level or several, each between 0 and 1.
    :returns: a scalar, or one number for each level.
    :raises ValueError: where the shapes do not fit, for a single draw or a level outside 0 ... 1.
    """
    _same_points(draws, y)
    levels = [level] if isinstance(level, (int, float)) else [float(l) for l in level]
    for l in levels:
        if not 0 <= l <= 1:
            raise ValueError(f"level must lie between 0 and 1, but is {l}")
    if draws.shape[0] < 2:
        raise ValueError("interval_coverage needs at least 2 draws, but draws has 1: draw more")
    inside = torch.zeros(len(levels), dtype=torch.float64, device=draws.device)
    for part, target in _blocks(draws, y[None]):
        ordered, target = sort(part.double()), target.double().squeeze(-1)
        for i, l in enumerate(levels):
            low = quantile_of_sorted(ordered, (1 - l) / 2)
            high = quantile_of_sorted(ordered, (1 + l) / 2)
            inside[i] += ((low <= target) & (target <= high)).sum()
    share = inside / y.numel()
    return share[0] if isinstance(level, (int, float)) else share


def reliability(
    probabilities: Tensor, y: Tensor, *, bins: int = 15
) -> tuple[Tensor, Tensor, Tensor]:
    """Confidence and accuracy of the predicted class, in bins of equal width of the confidence.

    :param probabilities: ``(N, C)``.
    :param y: ``(N,)``, class indices.
    :param bins: number of bins between 0 and 1; bin i holds (i / bins, (i + 1) / bins].
    :returns: mean confidence, accuracy and share of the points of each bin, ``(bins,)`` each; the
        first two are NaN for an empty bin.
    :raises ValueError: where the shapes do not fit, or a label is not in 0 ... C - 1.

    Source: Guo et al. (2017), On calibration of modern neural networks, section 2.
    """
    labels = _labels(probabilities, y)
    confidence, predicted = probabilities.double().max(-1)
    index = ((confidence * bins).ceil().long() - 1).clamp(0, bins - 1)
    right = (predicted == labels).double()
    sums = torch.zeros(3, bins, dtype=torch.float64, device=probabilities.device)
    sums.index_add_(1, index, torch.stack([confidence, right, torch.ones_like(right)]))
    return sums[0] / sums[2], sums[1] / sums[2], sums[2] / labels.numel()


def expected_calibration_error(probabilities: Tensor, y: Tensor, *, bins: int = 15) -> Tensor:
    """Expected calibration error, sum_b share_b |accuracy_b - confidence_b|, from 0 (best) to 1.

    :param probabilities: ``(N, C)``.
    :param y: ``(N,)``, class indices.
    :param bins: see :func:`reliability`.
    :raises ValueError: where the shapes do not fit, or a label is not in 0 ... C - 1.

    Source: Guo et al. (2017), On calibration of modern neural networks, eq. 3.
    """
    confidence, right, share = reliability(probabilities, y, bins=bins)
    return ((right - confidence).abs() * share).nansum()


# ---------------------------------------------------------------- distances in function space


def mean_error(a: Tensor, b: Tensor) -> Tensor:
    """Root mean square, over the test points, of the difference of the means of the draws.

    :param a: ``(S1, N, ...)``, draws of a function at the test points.
    :param b: ``(S2, N, ...)``, draws of the reference.
    :returns: a scalar, in the units of the draws.
    :raises ValueError: where the test points differ in shape.
    """
    return _root_mean_square_difference(_mean, a, b)


def sd_error(a: Tensor, b: Tensor) -> Tensor:
    """Root mean square, over the test points, of the difference of the sds of the draws.

    The sd of a single draw is zero: a point estimate.

    :param a: ``(S1, N, ...)``, draws of a function at the test points.
    :param b: ``(S2, N, ...)``, draws of the reference.
    :returns: a scalar, in the units of the draws.
    :raises ValueError: where the test points differ in shape.
    """
    return _root_mean_square_difference(_sd, a, b)


def wasserstein1(a: Tensor, b: Tensor) -> Tensor:
    """Wasserstein-1 distance of the draws at each test point, averaged over the points.

    The area between the two empirical quantile functions, exact for any two sizes::

        W1 = int_0^1 |F_a^-1(u) - F_b^-1(u)| du

    :param a: ``(S1, N, ...)``, draws of a function at the test points.
    :param b: ``(S2, N, ...)``, draws of the reference.
    :returns: a scalar, in the units of the draws.
    :raises ValueError: where the test points differ in shape.

    Source: Villani (2003), Topics in Optimal Transportation, section 2.2.
    """
    _same_functions(a, b)
    m, n = a.shape[0], b.shape[0]
    # Both quantile functions are constant between these places, counted in units of 1 / (m n).
    steps = torch.cat([torch.arange(m + 1) * n, torch.arange(n + 1) * m]).unique().to(a.device)
    start, width = steps[:-1], steps.diff().double() / (m * n)
    distances = []
    for p, q in _double_blocks(a, b):
        gap = sort(p)[:, start // n] - sort(q)[:, start // m]
        distances.append(gap.abs() @ width)
    return torch.cat(distances).mean()


def agreement(a: Tensor, b: Tensor) -> Tensor:
    """Share of the test points at which both posteriors predict the same class, from 0 to 1.

    :param a: ``(S1, N, C)``, draws of class probabilities; their mean over the draws predicts.
    :param b: ``(S2, N, C)``, draws of the reference.
    :raises ValueError: where the test points differ in shape.

    Source: Izmailov et al. (2021), What are Bayesian neural network posteriors really like?
    """
    _same_functions(a, b)
    p, q = _mean_of_draws(a), _mean_of_draws(b)
    return (p.argmax(-1) == q.argmax(-1)).double().mean()


def total_variation(a: Tensor, b: Tensor) -> Tensor:
    """Total variation distance of the predictive distributions, 1/N sum_n 1/2 sum_c |p_nc - q_nc|.

    :param a: ``(S1, N, C)``, draws of class probabilities, averaged over the draws.
    :param b: ``(S2, N, C)``, draws of the reference.
    :returns: a scalar from 0 (equal) to 1.
    :raises ValueError: where the test points differ in shape.

    Source: Izmailov et al. (2021), What are Bayesian neural network posteriors really like?
    """
    _same_functions(a, b)
    return (_mean_of_draws(a) - _mean_of_draws(b)).abs().sum(-1).mean() / 2


def split_half(
    draws: Tensor, distance: Callable[[Tensor, Tensor], Tensor], *, chains: int = 1
) -> Tensor:
    """Distance between two halves of one posterior's draws: what Monte Carlo error alone gives.

    A floor for the distances of other posteriors to this one. It is a high one, since each half
    has half the draws.

    :param draws: ``(S, N, ...)``, chain after chain.
    :param distance: a distance of this module.
    :param chains: see :func:`halves`.
    :raises ValueError: for fewer than 2 draws, or where S is no multiple of ``chains``.
    """
    return distance(*halves(draws, chains=chains))


def halves(draws: Tensor, *, chains: int = 1) -> tuple[Tensor, Tensor]:
    """Two halves of draws: half of the chains and the others, or both ends of a single chain.

    :param draws: ``(S, N, ...)``, chain after chain.
    :param chains: how many chains of equal length the draws are.
    :raises ValueError: for fewer than 2 draws, or where S is no multiple of ``chains``.
    """
    size = draws.shape[0]
    if size < 2:
        raise ValueError("two halves need at least 2 draws, but draws has 1: draw more")
    if chains < 1 or size % chains:
        raise ValueError(f"chains={chains} does not divide the {size} draws")
    middle = size // 2 if chains == 1 else chains // 2 * (size // chains)
    return draws[:middle], draws[middle:]


# ------------------------------------------------------------------------------------ helpers


def _blocks(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """The same block of points of each ``(S, ...)``, as contiguous ``(block, S)``."""
    flat = [t.detach().reshape(t.shape[0], -1) for t in tensors]
    block = max(1, _BLOCK_NUMBERS // sum(t.shape[0] for t in flat))
    for start in range(0, flat[0].shape[1], block):
        yield [t[:, start : start + block].T.contiguous() for t in flat]


def _double_blocks(*tensors: Tensor) -> Iterator[list[Tensor]]:
    for parts in _blocks(*tensors):
        yield [part.double() for part in parts]


def _root_mean_square_difference(
    statistic: Callable[[Tensor], Tensor], a: Tensor, b: Tensor
) -> Tensor:
    """Of a statistic of the draws, over the test points."""
    _same_functions(a, b)
    differences = [statistic(p) - statistic(q) for p, q in _double_blocks(a, b)]
    return torch.cat(differences).square().mean().sqrt()


def _mean(x: Tensor) -> Tensor:
    return x.mean(-1)


def _sd(x: Tensor) -> Tensor:
    return x.std(-1, correction=min(1, x.shape[-1] - 1))


def _mean_of_draws(draws: Tensor) -> Tensor:
    means = torch.cat([_mean(part) for (part,) in _double_blocks(draws)])
    return means.reshape(draws.shape[1:])


def _same_shape(name_a: str, a: Tensor, name_b: str, b: Tensor) -> None:
    if a.shape != b.shape:
        raise ValueError(
            f"{name_a} and {name_b} must have the same shape, but have {tuple(a.shape)} and "
            f"{tuple(b.shape)}"
        )


def _same_points(draws: Tensor, y: Tensor) -> None:
    if draws.shape[1:] != y.shape:
        raise ValueError(
            f"draws must have the shape of y with the draws in front, (S, "
            f"{', '.join(map(str, y.shape))}), but have shape {tuple(draws.shape)}"
        )


def _same_functions(a: Tensor, b: Tensor) -> None:
    if a.dim() < 2 or a.shape[1:] != b.shape[1:]:
        raise ValueError(
            f"a and b must be draws at the same test points, shapes (S1, N, ...) and "
            f"(S2, N, ...), but have shapes {tuple(a.shape)} and {tuple(b.shape)}"
        )


def _labels(probabilities: Tensor, y: Tensor) -> Tensor:
    if probabilities.dim() != 2 or y.shape != probabilities.shape[:1]:
        raise ValueError(
            f"probabilities and y must have shapes (N, C) and (N,), but have "
            f"{tuple(probabilities.shape)} and {tuple(y.shape)}"
        )
    labels, classes = y.long(), probabilities.shape[-1]
    if labels.numel() and not (int(labels.min()) >= 0 and int(labels.max()) < classes):
        raise ValueError(
            f"y must hold class indices from 0 to {classes - 1}, but holds values from "
            f"{int(labels.min())} to {int(labels.max())}"
        )
    return labels
