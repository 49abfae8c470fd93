"""Leave-one-out of large data from a part of them, by the difference estimator."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_bdl.diagnostics.loo import LOO


@dataclass(frozen=True)
class SubsampledLOO:
    """elpd_loo of N observations, of which m were left out.

    :param elpd: the estimate of the sum over all N, in nats.
    :param se: standard error of ``elpd`` over observations, sqrt(N var(pointwise)), estimated.
    :param subsampling_se: standard error from leaving out m observations only; 0 for m = N.
    :param p_loo: effective number of parameters, the sum of log p(y_n | all) minus ``elpd``.
    :param left_out: PSIS-LOO of the m observations.
    :param approximation: float64 ``(N,)``, log p(y_n | all data).
    :param rows: ``(m,)``, the places of the m observations among the N.
    """

    elpd: float
    se: float
    subsampling_se: float
    p_loo: float
    left_out: LOO
    approximation: Tensor
    rows: Tensor

    @property
    def pointwise(self) -> Tensor:
        """log p(y_n | the others) of the m observations."""
        return self.left_out.pointwise

    @property
    def pareto_k(self) -> Tensor:
        """k-hat of the m observations."""
        return self.left_out.pareto_k

    @property
    def num_bad(self) -> int:
        """How many of the m observations have a k-hat above ``good_k``."""
        return self.left_out.num_bad

    @property
    def total_se(self) -> float:
        """Both standard errors together."""
        return math.hypot(self.se, self.subsampling_se)

    def __str__(self) -> str:
        return (
            f"elpd_loo {self.elpd:.2f} (se {self.se:.2f}, by subsampling "
            f"{self.subsampling_se:.2f}), p_loo {self.p_loo:.2f}; {len(self.rows)} of "
            f"{len(self.approximation)} observations; "
            f"k-hat above {self.left_out.good_k:.2f}: {self.num_bad}"
        )


def subsampled_loo(left_out: LOO, approximation: Tensor, rows: Tensor) -> SubsampledLOO:
    """elpd_loo of all observations from some, drawn at random without replacement.

    log p(y_n | all data), which needs no smoothing, is known of all observations and corrected by
    what leaving out changes in the sample; see :func:`difference_estimate`.

    :param left_out: PSIS-LOO of m observations.
    :param approximation: ``(N,)``, log p(y_n | all data) of all observations.
    :param rows: ``(m,)``, places of the m observations among the N.
    """
    approximation = approximation.detach().double()
    elpd, subsampling, over_data = difference_estimate(left_out.pointwise, approximation, rows)
    return SubsampledLOO(
        elpd=elpd,
        se=over_data,
        subsampling_se=subsampling,
        p_loo=float(approximation.sum()) - elpd,
        left_out=left_out,
        approximation=approximation,
        rows=rows,
    )


def difference_estimate(
    values: Tensor, approximation: Tensor, rows: Tensor
) -> tuple[float, float, float]:
    """The sum of N values of which m are known, all of them being known approximately.

    With values v, approximations a, and e_j = v_j - a_j in the sample S::

        T = sum_n a_n + N / m sum_{j in S} e_j
        var(T) = N^2 (1 - m / N) var_S(e) / m

    Both are unbiased. The variance of the values over all data is estimated likewise, from
    v^2 - a^2 and T^2 - var(T).

    :param values: ``(m,)``, v in the sample.
    :param approximation: ``(N,)``, a.
    :param rows: ``(m,)``, the sample, drawn without replacement.
    :returns: T, its standard error from sampling, and sqrt(N var(v)), the standard error over data.

    Source: Magnusson, Vehtari, Jonasson, Andersen (2020), Leave-one-out cross-validation for
    Bayesian model comparison in large data, eqs. 7 to 9.
    """
    v, a = values.double().flatten(), approximation.double().flatten()
    near = a[rows.to(a.device)]
    n, m = len(a), len(v)
    total = a.sum() + n * (v - near).mean()
    variance = torch.zeros_like(total)
    if m > 1:
        variance = n**2 * (1 - m / n) * (v - near).var() / m
    squares = a.square().sum() + n * (v.square() - near.square()).mean()
    spread = (squares - (total.square() - variance) / n).clamp_min(0)  # the sum of squares
    over_data = (n * spread / max(1, n - 1)).sqrt()
    return float(total), float(variance.sqrt()), float(over_data)
