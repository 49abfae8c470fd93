"""Do predicted probabilities come true? Intervals, probability integral transforms, classes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_bdl.diagnostics.rank import quantile_of_sorted, sort
from pyro_bdl.metrics.points import blocks, checked_labels, same_points


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
    same_points(draws, y)
    levels = [level] if isinstance(level, (int, float)) else [float(l) for l in level]
    for l in levels:
        if not 0 <= l <= 1:
            raise ValueError(f"level must lie between 0 and 1, but is {l}")
    if draws.shape[0] < 2:
        raise ValueError("interval_coverage needs at least 2 draws, but draws has 1: draw more")
    inside = torch.zeros(len(levels), dtype=torch.float64, device=draws.device)
    for part, target in blocks(draws, y[None]):
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
    labels = checked_labels(probabilities, y)
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


def adaptive_calibration_error(probabilities: Tensor, y: Tensor, *, bins: int = 15) -> Tensor:
    """Calibration error in bins that hold equally many points, from 0 (best) to 1.

    As :func:`expected_calibration_error`, but the confidences are cut at their own quantiles, so
    that no bin is empty where a network is confident everywhere.

    :param probabilities: ``(N, C)``.
    :param y: ``(N,)``, class indices.
    :param bins: how many, at most N.
    :raises ValueError: where the shapes do not fit, or a label is not in 0 ... C - 1.

    Source: Nguyen & O'Connor (2015), Posterior calibration and exploratory analysis for natural
    language processing models, section 3.1.
    """
    labels = checked_labels(probabilities, y)
    confidence, predicted = probabilities.double().max(-1)
    order = confidence.argsort(stable=True)
    error = ((predicted == labels).double() - confidence)[order]
    parts = error.tensor_split(min(bins, len(error)))
    return torch.stack([part.sum().abs() for part in parts]).sum() / len(error)


def pit(draws: Tensor, y: Tensor) -> Tensor:
    """Probability integral transforms: where each target lies among the draws, from 0 to 1.

    ::

        (#{x_s < y} + u (#{x_s = y} + 1)) / (S + 1),      u ~ Uniform(0, 1)

    which is uniform for every S where draws and target come from one distribution, counts and
    other discrete targets included.

    :param draws: ``(S, N, ...)``, draws of the target (noise included).
    :param y: ``(N, ...)``.
    :returns: float64, of the shape of y.
    :raises ValueError: where the shapes do not fit.

    Source: Czado, Gneiting, Held (2009), Predictive model assessment for count data.
    """
    same_points(draws, y)
    below, ties = [], []
    for part, target in blocks(draws, y[None]):
        below.append((part < target).sum(-1))
        ties.append((part == target).sum(-1))
    lower, equal = torch.cat(below).double(), torch.cat(ties).double()
    values = (lower + torch.rand_like(equal) * (equal + 1)) / (len(draws) + 1)
    return values.reshape(y.shape)


def uniformity(values: Tensor) -> Tensor:
    """Kolmogorov-Smirnov distance of values from the uniform distribution, sup_u |F(u) - u|.

    Of N values that are uniform it is above 1.36 / sqrt(N) with a probability of about 5 %.

    :param values: between 0 and 1, such as :func:`pit`.
    :raises ValueError: where there are none.
    """
    if not values.numel():
        raise ValueError("uniformity needs at least one value")
    ordered = sort(values.detach().double().flatten())
    n = len(ordered)
    above = torch.arange(1, n + 1, dtype=torch.float64, device=ordered.device) / n
    return torch.maximum((above - ordered).max(), (ordered - above + 1 / n).max())
