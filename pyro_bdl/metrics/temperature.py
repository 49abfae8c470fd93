"""Temperature scaling: p(y)^(1 / T), normalized, at the T of the best likelihood.

Of classes it is q_c = p_c^(1 / T) / sum_k p_k^(1 / T), of a Normal the Normal with T times the
variance.
"""

import numpy as np
import torch
from torch import Tensor

from pyro_bdl.metrics.blocks import checked_labels
from pyro_bdl.metrics.scores import gaussian_nlpd, squared_error
from pyro_bdl.utils.precision import double, double_device

_COLDEST, _HOTTEST = 0.01, 100.0  # of classes, whose likelihood may have no maximum
_LEAST = -1e6  # nats, of a class whose probability is zero


def tempered(probabilities: Tensor, temperature: float) -> Tensor:
    """Class probabilities ``(..., C)`` to the power 1 / T, normalized; in float64."""
    return (double(probabilities).log().clamp_min(_LEAST) / temperature).softmax(-1)


def best_temperature(mean: Tensor, variance: Tensor | None, y: Tensor) -> tuple[float, float]:
    """The T that maximizes the likelihood of the targets, and its standard error.

    Of numbers it is T = mean_n (y_n - m_n)^2 / v_n. Of classes, with b = 1 / T and logits l, it is
    the root of mean_n E_q[l_n] - l_ny in b, which rises, between 0.01 and 100. The error is that of
    an M-estimator, which does not assume that the model is true (White 1982). Both are NaN for
    predictions that are not all finite, and so is the error of one datum, and at both ends, where
    the likelihood has no maximum; predictions that are all uniform have none either, and T = 1.

    :param mean: ``(N, ...)``, the predictive means, or the log probabilities of classes ``(N, C)``.
    :param variance: ``(N, ...)``, the predictive variances; None for classes.
    :param y: ``(N, ...)``, the targets.

    Source: Guo et al. (2017), On calibration of modern neural networks, section 4.2.
    """
    if variance is not None:
        ratios = (squared_error(mean, y) / double(variance)).reshape(len(y), -1).mean(1)
        return float(ratios.mean()), _sd(ratios) / len(y) ** 0.5
    logs = double(mean).clamp_min(_LEAST)
    observed = logs.gather(1, checked_labels(mean.exp(), y)[:, None])[:, 0]

    def slopes(inverse: float) -> Tensor:
        return ((inverse * logs).softmax(1) * logs).sum(1) - observed

    def slope(inverse: float) -> float:
        return float(slopes(inverse).mean())

    from scipy.optimize import brentq  # takes long to load

    low, high = 1 / _HOTTEST, 1 / _COLDEST
    if not logs.isfinite().all():
        return float("nan"), float("nan")
    if slope(low) == 0 == slope(high):
        return 1.0, float("nan")
    if slope(low) >= 0 or slope(high) <= 0:
        return 1 / (low if slope(low) >= 0 else high), float("nan")
    inverse = float(brentq(slope, low, high, xtol=1e-12))
    q, psi = (inverse * logs).softmax(1), slopes(inverse)
    information = ((q * logs.square()).sum(1) - (psi + observed).square()).mean()
    return 1 / inverse, float(_sd(psi) / information) / inverse**2 / len(y) ** 0.5


def _sd(values: Tensor) -> float:
    """The sd over the data; NaN of a single one."""
    return float(values.std()) if len(values) > 1 else float("nan")


def calibrated_nlpd(mean: Tensor, variance: Tensor | None, y: Tensor) -> Tensor:
    """Negative log density of each target after temperature scaling, ``(N, ...)``, in nats.

    T is fitted to one half of the points and used for the other, and the other way round. The
    halves are random, the same for every posterior. Arguments are those of ``best_temperature``.

    Source: Ashukha et al. (2020), Pitfalls of in-domain uncertainty estimation and ensembling in
    deep learning, section 3.
    """
    mean, y = (value.to(double_device(value.device)) for value in (mean, y))
    variance = None if variance is None else double(variance)
    order = torch.as_tensor(np.random.default_rng(0).permutation(len(y)), device=y.device)
    halves = order.tensor_split(2)
    parts = []
    for fitted, scored in (halves, halves[::-1]):
        rows = [None if part is None else part[fitted] for part in (mean, variance, y)]
        temperature, _ = best_temperature(*rows)  # type: ignore[arg-type]
        if variance is None:
            logs = double(mean[scored]).clamp_min(_LEAST) / temperature
            parts.append(-logs.log_softmax(1).gather(1, y[scored].long()[:, None])[:, 0])
        else:
            parts.append(gaussian_nlpd(mean[scored], temperature * variance[scored], y[scored]))
    return torch.cat(parts[::-1])[order.argsort()]
