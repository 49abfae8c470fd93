"""Temperatures: schedules over training steps, and the scaling with a network's width.

A schedule is a callable ``step -> temperature``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from pyro_bdl.utils.validation import real_number, whole_number

__all__ = ["cosine", "cyclical", "linear", "overparameterized"]

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class _Ramp:
    """start + (stop - start) s, with s the shape of the share of the steps that are done.

    :param period: after which it begins again; None for never.
    """

    start: float
    stop: float
    steps: float
    shape: Callable[[float], float]
    period: int | None = None

    def __post_init__(self) -> None:
        real_number(self.start, "start")
        real_number(self.stop, "stop")

    def __call__(self, step: int) -> float:
        done = step if self.period is None else step % self.period
        return self.start + (self.stop - self.start) * self.shape(min(done / self.steps, 1.0))


def _straight(share: float) -> float:
    return share


def _half_cosine(share: float) -> float:
    return 0.5 * (1.0 - math.cos(math.pi * share))


def linear(start: float, stop: float, steps: int) -> Schedule:
    """A straight line from ``start`` to ``stop`` over ``steps`` steps, then ``stop``."""
    return _Ramp(start, stop, whole_number(steps, "steps"), _straight)


def cosine(start: float, stop: float, steps: int) -> Schedule:
    """Half a cosine from ``start`` to ``stop`` over ``steps`` steps, then ``stop``."""
    return _Ramp(start, stop, whole_number(steps, "steps"), _half_cosine)


def cyclical(start: float, stop: float, period: int, ramp: float = 0.5) -> Schedule:
    """Schedule with, in each ``period``, a straight line from ``start`` to ``stop``, then ``stop``
    (Fu et al. 2019).

    :param ramp: the fraction of a period after which ``stop`` is reached, in (0, 1].
    """
    ramp, period = real_number(ramp, "ramp", "(0, 1]"), whole_number(period, "period")
    return _Ramp(start, stop, ramp * period, _straight, period)


def overparameterized(tau: float, num_data: int, num_neurons: int) -> float:
    """The temperature eta = tau p / N for p data and N hidden neurons.

    It keeps likelihood and KL in balance as the layer becomes wider, for outputs that are averages
    over N neurons with unit priors, as in the source; try tau from 0.001 to 0.01 there. Under a
    ``FanIn`` prior the formula is a heuristic.

    :param tau: the temperature per neuron and datum.
    :param num_data: p.
    :param num_neurons: N, the outputs of all linear and convolutional layers but the last.
    :raises ValueError: for a tau that is not positive, or numbers below 1.

    Source: Huix et al. (2022), Variational inference of overparameterized Bayesian neural networks.
    """
    tau, num_data = real_number(tau, "tau"), whole_number(num_data, "num_data")
    return tau * num_data / whole_number(num_neurons, "num_neurons")
