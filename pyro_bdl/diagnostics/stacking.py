"""Weights of several posteriors by their predictions of data that they have not seen."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.diagnostics.loo import standard_error
from pyro_bdl.utils.jackknife import jackknife_error, number_of_groups, without_each
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.validation import require, require_tensors

_TOLERANCE = 1e-6  # nats of a datum


@dataclass(frozen=True)
class Stacking:
    """Result of ``stacking_weights``.

    :param weights: posterior -> weight; they sum to 1.
    :param weights_se: posterior -> standard error of its weight over data, by leaving out one group
        of ten after the other; NaN for fewer than 20 data.
    :param elpd: sum over the N data of log sum_k w_k p_k(y_n | the others), in nats; as the weights
        are fitted to these data, it is too high, by up to half a nat for each free weight.
    :param se: its standard error over the data, sqrt(N var(pointwise)).
    :param pointwise: float64 ``(N,)``.
    """

    weights: Mapping[str, float]
    weights_se: Mapping[str, float]
    elpd: float
    se: float
    pointwise: Tensor

    def __repr__(self) -> str:
        parts = (f"{k} {w:.2f} (se {self.weights_se[k]:.2f})" for k, w in self.weights.items())
        return f"{', '.join(parts)}; elpd {self.elpd:.2f} (se {self.se:.2f})"


def stacking_weights(scores: Mapping[str, Any]) -> Stacking:
    """Weights with which the predictive densities of several posteriors predict best together.

    They maximize a concave function on the simplex, to 1e-6 nats of a datum::

        sum_n log sum_k w_k p_k(y_n | the others)

    A draw of the stacked predictions is one of posterior k, drawn with probability w_k. Unlike a
    ranking by elpd the weights are shared by posteriors that are good at different data, and two
    equal ones share theirs in any way.

    :param scores: posterior -> its LOO or cross-validation with ``pointwise``, or such a tensor of
        log densities ``(N,)``, in nats, all of the same data in the same order.
    :raises ValueError: for no posterior, other numbers of data, or values that are not finite.

    Source: Yao, Vehtari, Simpson, Gelman (2018), Using stacking to average Bayesian predictive
    distributions, equation 4.
    """
    require(scores, Mapping, "scores must be a dict from posteriors to their LOO")
    rows = {name: getattr(one, "pointwise", one) for name, one in scores.items()}
    require_tensors(**rows)
    rows = {name: double(values.detach()).cpu().flatten() for name, values in rows.items()}
    if len(sizes := {len(values) for values in rows.values()}) != 1 or sizes == {0}:
        raise ValueError(
            "stacking needs the log densities of the same data by one or several posteriors, got "
            f"{', '.join(f'{len(values)} of {name}' for name, values in rows.items()) or 'none'}"
        )
    for name, values in rows.items():
        if not values.isfinite().all():
            raise ValueError(f"the pointwise log densities of {name!r} are not all finite")
    log_p = torch.stack(list(rows.values()), 1)
    weights = _maximum(log_p)
    errors = torch.full_like(weights, math.nan)
    if groups := number_of_groups(len(log_p)):
        errors = jackknife_error(
            torch.stack([_maximum(some) for some in without_each(log_p, groups)])
        )
    pointwise = (log_p + weights.log()).logsumexp(1)
    return Stacking(
        weights=dict(zip(rows, weights.tolist(), strict=True)),
        weights_se=dict(zip(rows, errors.tolist(), strict=True)),
        elpd=float(pointwise.sum()),
        se=standard_error(pointwise),
        pointwise=pointwise,
    )


def _maximum(log_p: Tensor) -> Tensor:
    """The weights ``(K,)`` of log densities ``(N, K)``.

    With the gradient g_k = mean_n p_nk / sum_j w_j p_nj, max_k g_k - 1 bounds what is missing of
    the maximum, in nats of a datum, since the function is concave.
    """
    p = (log_p - log_p.amax(1, keepdim=True)).exp()
    weights = torch.full_like(p[0], 1 / len(p[0]))

    def negative(w: Any) -> tuple[float, Any]:
        mixed = p @ torch.from_numpy(w)
        return -float(mixed.log().mean()), -(p / mixed[:, None]).mean(0).numpy()

    from scipy.optimize import minimize  # takes long to load

    found = minimize(
        negative, weights.numpy(), jac=True, method="SLSQP", bounds=[(1e-12, 1)] * len(weights),
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: w**0},
        options={"ftol": 1e-13, "maxiter": 1000},
    )  # fmt: skip
    weights = torch.from_numpy(found.x).clamp_min(1e-12)
    weights = weights / weights.sum()
    while True:  # steps of expectation maximization, which rise, to where the bound holds
        gradient = (p / (p @ weights)[:, None]).mean(0)
        if not gradient.max() - 1 > _TOLERANCE:
            return weights.where(weights > 1e-9, 0.0) / weights[weights > 1e-9].sum()
        weights = weights * gradient
