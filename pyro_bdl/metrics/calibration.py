"""Calibration: intervals, probability integral transforms and class probabilities."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.diagnostics.rank import sort
from pyro_bdl.metrics.blocks import blocks, checked_labels, in_order, nan_where, same_points
from pyro_bdl.utils.precision import double, double_device
from pyro_bdl.utils.validation import real_number, whole_number


def interval_coverage(
    draws: Tensor, y: Tensor, *, level: float | Sequence[float] = 0.9, pointwise: bool = False
) -> Tensor:
    """Share of the targets inside the central interval of the draws; it equals the level if
    calibrated.

    The rank of a target among S draws is one of S + 1 numbers, or a range of them if draws equal
    the target. The target counts with the share of this range that lies in the interval at level
    l::

        [ #{x_s < y}, #{x_s <= y} + 1 ] / (S + 1)    in    [ (1 - l) / 2, (1 + l) / 2 ]

    For continuous targets and many draws this is the interval between two quantiles. If draws and
    target come from one distribution, the expectation is l for every S. This also holds for counts,
    for which no interval of whole numbers holds exactly 90 %.

    :param draws: ``(S, N, ...)``, draws of the target (noise included).
    :param y: ``(N, ...)``.
    :param level: one level or several, each between 0 and 1.
    :param pointwise: return the share with which each target counts, with the shape of y, in place
        of the mean.
    :returns: a scalar, or one number for each level.
    :raises ValueError: if the shapes do not fit, for a single draw or a level outside 0 ... 1.

    Source: the intervals of the non-randomized probability integral transform, Czado, Gneiting,
    Held (2009), Predictive model assessment for count data, section 2.1.
    """
    same_points(draws, y)
    is_one = not isinstance(level, Sequence) or isinstance(level, str)
    given: Any = [level] if is_one else level
    levels = [real_number(l, "level", "[0, 1]") for l in given]
    if draws.shape[0] < 2:
        raise ValueError("interval_coverage needs at least 2 draws, but draws has 1: draw more")
    start, stop = _stretches(draws, y)
    inside = [_inside(start, stop, l).reshape(y.shape) for l in levels]
    shares = inside if pointwise else [share.mean() for share in inside]
    return shares[0] if is_one else torch.stack(shares)


def coverage_range(draws: Tensor, *, level: float = 0.9, probability: float = 0.95) -> Tensor:
    """Range of the coverage of correct predictions, with a given probability.

    Targets that follow from one function are not independent: if the function is off, it is off at
    many points. Each draw in turn therefore takes the role of the targets, and its coverage by the
    other draws is computed. The range is given by quantiles of these S coverages, whose mean is the
    level.

    :param draws: ``(S, N, ...)``, draws of the target (noise included); each draw comes from one
        function at all points.
    :param level: level of the interval, between 0 and 1.
    :param probability: probability that a coverage lies within the range.
    :returns: ``(2,)``, the lower and the upper end; they are noisy for few draws.
    :raises ValueError: for fewer than 2 draws, or a level or probability outside 0 ... 1.

    Source: a posterior predictive check of the coverage, Gelman, Meng & Stern (1996), section 2.
    """
    if draws.shape[0] < 2:
        raise ValueError("coverage_range needs at least 2 draws, but draws has 1: draw more")
    for name, value in (("level", level), ("probability", probability)):
        real_number(value, name, "[0, 1]")
    size, points = draws.shape[0], draws[0].numel()
    total = torch.zeros(size, dtype=torch.float64, device=double_device(draws.device))
    for (part,) in blocks(draws):
        ordered = sort(part)
        start = double(torch.searchsorted(ordered, part)) / size
        stop = double(torch.searchsorted(ordered, part, right=True)) / size
        total += _inside(start, stop, level).sum(0)
    ends = total.new_tensor([(1 - probability) / 2, (1 + probability) / 2])
    return (total / points).quantile(ends)


def reliability(
    probabilities: Tensor, y: Tensor, *, bins: int = 15
) -> tuple[Tensor, Tensor, Tensor]:
    """Confidence and accuracy of the predicted class, in bins of the confidence with equal width.

    :param probabilities: ``(N, C)``.
    :param y: ``(N,)``, class indices.
    :param bins: number of bins between 0 and 1; bin i holds (i / bins, (i + 1) / bins].
    :returns: mean confidence, accuracy and share of the points of each bin, ``(bins,)`` each; the
        first two are NaN for an empty bin.
    :raises ValueError: if the shapes do not fit, there is no point or no bin, or a label is not in
        0 ... C - 1.

    Source: Guo et al. (2017), On calibration of modern neural networks, section 2.
    """
    bins = whole_number(bins, "bins")
    labels = checked_labels(probabilities, y)
    confidence, predicted = double(probabilities).max(-1)
    index = _bin_of(confidence, bins)
    right = double(predicted == labels)
    sums = confidence.new_zeros(3, bins)
    sums.index_add_(1, index, torch.stack([confidence, right, torch.ones_like(right)]))
    return sums[0] / sums[2], sums[1] / sums[2], sums[2] / labels.numel()


def _bin_of(confidence: Tensor, bins: int) -> Tensor:
    return ((confidence * bins).ceil().long() - 1).clamp(0, bins - 1)


def mean_confidence(probabilities: Tensor, *, pointwise: bool = False) -> Tensor:
    """Mean probability of the predicted class, 1/N sum_n max_c p_nc, from 1/C to 1.

    It equals the accuracy if the probabilities are calibrated; a posterior that ignores the data
    has 1/C.

    :param probabilities: ``(N, C)``.
    :param pointwise: return the confidence of each point, ``(N,)``, in place of the mean.

    Source: Guo et al. (2017), On calibration of modern neural networks, section 2.
    """
    confidence = double(probabilities).amax(-1)
    return confidence if pointwise else confidence.mean()


def expected_calibration_error(
    probabilities: Tensor, y: Tensor, *, bins: int = 15, pointwise: bool = False
) -> Tensor:
    """Expected calibration error, sum_b share_b |accuracy_b - confidence_b|, from 0 (best) to 1.

    Example::

        >>> probabilities = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6]])
        >>> classes = torch.tensor([0, 1, 1])
        >>> bdl.metrics.expected_calibration_error(probabilities, classes)
        tensor(0.4000, dtype=torch.float64)

    :param probabilities: ``(N, C)``.
    :param y: ``(N,)``, class indices.
    :param bins: see :func:`reliability`.
    :param pointwise: return what each point adds, ``(N,)``, in place of the mean: correct less
        confidence, with the sign that their sum has in the point's bin.
    :raises ValueError: as :func:`reliability`.

    Source: Guo et al. (2017), On calibration of modern neural networks, eq. 3.
    """
    confidence, right, share = reliability(probabilities, y, bins=bins)
    if not pointwise:
        return ((right - confidence).abs() * share)[share > 0].sum()
    surest, predicted = double(probabilities).max(-1)
    signs = (right - confidence).sign()[_bin_of(surest, bins)]
    return signs * (double(predicted == checked_labels(probabilities, y)) - surest)


def calibration_error_by_chance(probabilities: Tensor, *, bins: int = 15) -> float:
    """The expected calibration error that calibrated probabilities have by chance, of N points::

        1/N sum_b sqrt(2 / pi  sum_{n in b} c_n (1 - c_n)),      c_n = max_c p_nc

    the mean of the absolute value of a Normal with a bin's variance, summed over the bins.

    Arguments and errors are those of :func:`expected_calibration_error`.
    """
    bins = whole_number(bins, "bins")
    surest = double(probabilities).amax(-1)
    variances = surest.new_zeros(bins).index_add_(0, _bin_of(surest, bins), surest * (1 - surest))
    return float((2 / math.pi * variances).sqrt().sum() / len(surest))


def adaptive_calibration_error(probabilities: Tensor, y: Tensor, *, bins: int = 15) -> Tensor:
    """Calibration error in bins with equally many points, from 0 (best) to 1.

    Like :func:`expected_calibration_error`, but the bins end at quantiles of the confidences, so
    that no bin is empty if a network is confident everywhere. Points of equal confidence count with
    their mean error, whatever their order.

    :param probabilities: ``(N, C)``.
    :param y: ``(N,)``, class indices.
    :param bins: the number of bins, at most N.
    :raises ValueError: as :func:`reliability`.

    Source: Nguyen & O'Connor (2015), Posterior calibration and exploratory analysis for natural
    language processing models, section 3.1.
    """
    bins = whole_number(bins, "bins")
    labels = checked_labels(probabilities, y)
    confidence, predicted = double(probabilities).max(-1)
    error = in_order(double(predicted == labels) - confidence, confidence)
    parts = error.tensor_split(min(bins, len(error)))
    return torch.stack([part.sum().abs() for part in parts]).sum() / len(error)


def pit(
    draws: Tensor, y: Tensor, *, upper: Tensor | None = None, log_weights: Tensor | None = None
) -> Tensor:
    """Probability integral transforms: the position of each target among the draws, from 0 to 1.

    ::

        (#{x_s < y} + u (#{x_s = y} + 1)) / (S + 1),      u ~ Uniform(0, 1)

    It is uniform for every S if draws and target come from one distribution, including counts and
    other discrete targets, and censored ones.

    :param draws: ``(S, N, ...)``, draws of the target (noise included).
    :param y: ``(N, ...)``.
    :param upper: as y, of targets known to lie between y and it: infinity where y is
        right-censored, y where it was seen; y of left-censored ones is -infinity.
    :param log_weights: log of S weights that sum to 1, as draws: of PSIS without y_n
        (``psis(-log p(y_n | w_s))``) they give the transforms of leave-one-out.
    :returns: float64, with the shape of y.
    :raises ValueError: if the shapes do not fit.

    Source: Czado, Gneiting, Held (2009), Predictive model assessment for count data.
    """
    same_points(draws, y)
    start, stop = _stretches(draws, y, upper, log_weights)
    at = torch.rand(start.shape, dtype=start.dtype, device="cpu").to(start)  # on every device alike
    return (start + at * (stop - start)).reshape(y.shape)


def uniformity(values: Tensor) -> Tensor:
    """Kolmogorov-Smirnov distance of values from the uniform distribution, sup_u |F(u) - u|.

    For N uniform values it is above 1.36 / sqrt(N) with a probability of about 5 %.

    :param values: numbers between 0 and 1, such as the results of :func:`pit`.
    :raises ValueError: if there are no values.

    Source: Kolmogorov (1933); the 5 % point of the asymptotic distribution is 1.36.
    """
    if not values.numel():
        raise ValueError("uniformity needs at least one value")
    ordered = sort(double(values.detach()).flatten())
    n = len(ordered)
    above = torch.arange(1, n + 1, dtype=ordered.dtype, device=ordered.device) / n
    return torch.maximum((above - ordered).max(), (ordered - above + 1 / n).max())


def uniformity_by_chance(count: int) -> float:
    """The mean Kolmogorov-Smirnov distance of N uniform values, about sqrt(pi / 2) ln 2 / sqrt(N).

    Source: the mean of Kolmogorov's distribution; Marsaglia, Tsang & Wang (2003), Evaluating
    Kolmogorov's distribution.
    """
    return math.sqrt(math.pi / 2 / count) * math.log(2)


def _inside(start: Tensor, stop: Tensor, level: float) -> Tensor:
    """The share of each range [start, stop] that lies in the central interval."""
    inside = stop.clamp_max((1 + level) / 2) - start.clamp_min((1 - level) / 2)
    return inside.clamp_min(0) / (stop - start)


def _stretches(
    draws: Tensor, y: Tensor, upper: Tensor | None = None, log_weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Start and end of the range of each target's rank among the draws, from 0 to 1."""
    below, up_to = [], []
    size, end = len(draws), y if upper is None else upper
    some = [draws, y[None], end[None], *([] if log_weights is None else [log_weights])]
    for part, target, last, *weights in blocks(*some):
        counts = size * double(weights[0]).exp() if weights else 1
        missing = part.isnan().any(-1) | target.isnan()[:, 0] | last.isnan()[:, 0]
        below.append(nan_where(missing, double(((part < target) * counts).sum(-1))))
        up_to.append(nan_where(missing, double(((part <= last) * counts).sum(-1))))
    return torch.cat(below) / (size + 1), (torch.cat(up_to) + 1) / (size + 1)
