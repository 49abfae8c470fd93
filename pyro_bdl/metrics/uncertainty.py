"""Aleatoric and epistemic uncertainty, and how well uncertainty separates new inputs from known
ones."""

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_bdl.diagnostics.rank import average_ranks, ordered


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
    p = probabilities.detach().double()
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
    spread = (mean - mean[0]).detach().double().var(0, correction=0)
    return Uncertainty(noise.detach().double().mean(0), spread)


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
    known, new = score.detach().double().flatten(), other.detach().double().flatten()
    if not len(known) or not len(new):
        raise ValueError("auroc needs at least one score of each kind")
    both = torch.cat([known, new])
    if both.isnan().any():
        return both.new_tensor(torch.nan)
    ranks = average_ranks(ordered(both[None]))[0, len(known) :]
    least = len(new) * (len(new) + 1) / 2
    return (ranks.sum() - least) / (len(known) * len(new))


def _entropy(p: Tensor) -> Tensor:
    return -torch.xlogy(p, p).sum(-1)
