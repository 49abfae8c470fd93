"""Aleatoric and epistemic uncertainty, and how well uncertainty separates new inputs from known
ones."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_bdl.diagnostics.rank import average_ranks, ordered
from pyro_bdl.metrics.blocks import check_probabilities, in_order, same_shape
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.validation import require_tensors


class Uncertainty(NamedTuple):
    """The two components of the uncertainty at each test point, ``(N, ...)`` each, whose sum is the
    total.

    :param aleatoric: uncertainty of the data, which more data do not reduce.
    :param epistemic: uncertainty of the function: the disagreement of the posterior's draws.
    """

    aleatoric: Tensor
    epistemic: Tensor

    @property
    def total(self) -> Tensor:
        """The uncertainty of the predictive distribution."""
        return self.aleatoric + self.epistemic


def entropy_parts(probabilities: Tensor) -> Uncertainty:
    """Aleatoric and epistemic entropy of a predictive class distribution, in nats.

    ::

        H[E p]  =  E H[p]  +  I(y; w),      expectations over the posterior's draws

    E H[p] is the aleatoric entropy; I(y; w), the mutual information of class and weights, is the
    epistemic one.

    :param probabilities: ``(S, N, C)``, draws of class probabilities.

    Source: Houlsby et al. (2011), Bayesian active learning for classification; Depeweg et al.
    (2018), Decomposition of uncertainty in Bayesian deep learning, section 3.
    """
    check_probabilities(probabilities)
    p = double(probabilities.detach())
    aleatoric = _entropy(p).mean(0)
    # Rounding must not make the mutual information of a point mass negative.
    return Uncertainty(aleatoric, (_entropy(p.mean(0)) - aleatoric).clamp_min(0))


def variance_parts(mean: Tensor, noise: Tensor) -> Uncertainty:
    """Aleatoric and epistemic variance of a predictive distribution of numbers, in squared units of
    y.

    ::

        Var[y]  =  E Var[y | w]  +  Var E[y | w]

    :param mean: ``(S, N, ...)``, E[y | w_s].
    :param noise: ``(S, N, ...)``, Var[y | w_s].

    Source: the law of total variance; Depeweg et al. (2018), Decomposition of uncertainty in
    Bayesian deep learning, section 3.
    """
    same_shape("mean", mean, "noise", noise)
    spread = double((mean - mean[0]).detach()).var(0, correction=0)
    return Uncertainty(double(noise.detach()).mean(0), spread)


def auroc(score: Tensor, other: Tensor) -> Tensor:
    """Area under the ROC curve, P(s < s') + P(s = s') / 2, of a score that should be higher for
    ``other``.

    One half means that the score does not separate the two sets, 1 that it separates them
    completely. NaN if a score is NaN.

    :param score: ``(N, ...)``, scores s at known inputs.
    :param other: ``(M, ...)``, scores s' at the other inputs.
    :raises ValueError: if one of them is empty.

    Source: Hanley & McNeil (1982), The meaning and use of the area under a ROC curve.
    """
    below = _right(score, other)[1]
    return below.sum() / (len(below) * score.numel())


def placements(score: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The share of the other set that each score is on the right side of, ties by half; the mean of
    either set's is the AUROC, and their variances over the sizes add up to its variance.

    Arguments and errors are those of ``auroc``.

    :returns: P(s < s') of each s, ``(N,)`` (all numbers of ``score``), and of each s', ``(M,)``.

    Source: DeLong, DeLong & Clarke-Pearson (1988), Comparing the areas under two or more correlated
    receiver operating characteristic curves.
    """
    above, below = _right(score, other)
    return above / len(below), below / len(above)


def aupr(score: Tensor, other: Tensor) -> Tensor:
    """Area under the precision-recall curve (average precision) of a score that should be higher
    for ``other``, which are the positives.

    ::

        sum_k (R_k - R_{k-1}) P_k,      over the thresholds from the highest

    A score that does not separate them has the share of ``other`` among all. NaN if a score is NaN.

    :param score: ``(N, ...)``, scores at known inputs.
    :param other: ``(M, ...)``, scores at the other inputs.
    :raises ValueError: if one of them is empty.

    Source: Davis & Goadrich (2006), The relationship between precision-recall and ROC curves; by
    scikit-learn, on the host.
    """
    from sklearn.metrics import average_precision_score

    return _by_labels("aupr", average_precision_score, score, other)


def fpr95(score: Tensor, other: Tensor) -> Tensor:
    """Share of the known inputs at or above the highest threshold that at least 95 % of ``other``
    reach: the false positive rate at a true positive rate of 95 %, smaller is better.

    Arguments and NaN are those of ``aupr``; ``other`` are the positives, as in ``auroc``.

    Source: Liang, Li & Srikant (2018), Enhancing the reliability of out-of-distribution image
    detection, section 4.3, where the known inputs are the positives; by scikit-learn, on the host.
    """
    from sklearn.metrics import roc_curve

    def rate(labels: np.ndarray, scores: np.ndarray) -> float:
        false, true, _ = roc_curve(labels, scores, drop_intermediate=False)
        return false[np.argmax(true >= 0.95)]

    return _by_labels("fpr95", rate, score, other)


def aurc(score: Tensor, error: Tensor) -> Tensor:
    """Area under the risk-coverage curve: the mean error of the k surest points, averaged over k.

    ::

        1/N sum_k 1/k sum_{i <= k} e_(i),      errors in the order of rising scores

    Points of equal scores count with their mean error, as they do on average over all orders. A
    score that says nothing has the mean error. NaN if a score is NaN.

    :param score: ``(N, ...)``, the uncertainty at each point.
    :param error: ``(N, ...)``, the error at each point, such as 0 or 1.
    :raises ValueError: if the shapes differ, or there is no point.

    Source: Geifman, Uziel & El-Yaniv (2019), Bias-reduced uncertainty estimation for deep neural
    classifiers, section 2.
    """
    same_shape("score", score, "error", error)
    if not score.numel():
        raise ValueError("aurc needs at least one point")
    if score.isnan().any():
        return double(score.new_tensor(torch.nan))
    score, error = (double(value.detach()).flatten() for value in (score, error))
    risks = in_order(error, score).cumsum(0)
    return (risks / torch.arange(1, len(risks) + 1, device=risks.device)).mean()


def _both(name: str, score: Tensor, other: Tensor) -> tuple[Tensor, int]:
    """All scores in float64, and how many of them, the first, are at known inputs."""
    require_tensors(score=score, other=other)
    if not score.numel() or not other.numel():
        raise ValueError(f"{name} needs at least one score of each kind")
    return torch.cat([double(part.detach()).flatten() for part in (score, other)]), score.numel()


def _right(score: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the other set each score is on the right side of, ties by half."""
    both, known = _both("auroc", score, other)
    sets = both[:known], both[known:]
    if both.isnan().any():
        return torch.full_like(sets[0], torch.nan), torch.full_like(sets[1], torch.nan)
    # The rank in both sets less that in its own is the number of the others that are below.
    own = torch.cat([average_ranks(ordered(part[None]))[0] for part in sets])
    below = average_ranks(ordered(both[None]))[0] - own
    return len(sets[1]) - below[:known], below[known:]


def _by_labels(name: str, function: Callable, score: Tensor, other: Tensor) -> Tensor:
    """A function of labels, 1 for the other inputs, and of the order of scores, of numpy: scores
    may be infinite."""
    both, known = _both(name, score, other)
    if both.isnan().any():
        return both.new_tensor(torch.nan)
    labels = np.arange(len(both)) >= known
    places = both.unique(return_inverse=True)[1]
    return both.new_tensor(function(labels, places.cpu().numpy()))


def _entropy(p: Tensor) -> Tensor:
    return -torch.xlogy(p, p).sum(-1)
