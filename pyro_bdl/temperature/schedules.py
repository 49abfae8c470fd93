"""Schedules of the temperature over training steps: callables ``step -> temperature``."""

import math
from collections.abc import Callable

from pyro_bdl.utils.validation import check_temperature

Schedule = Callable[[int], float]


def constant(value: float) -> Schedule:
    """The same temperature at every step."""
    check_temperature(value)
    return lambda step: value


def _ramp(start: float, stop: float, steps: int, shape: Callable[[float], float]) -> Schedule:
    check_temperature(start, "start")
    check_temperature(stop, "stop")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    return lambda step: start + (stop - start) * shape(min(step / steps, 1.0))


def linear(start: float, stop: float, steps: int) -> Schedule:
    """A straight line from ``start`` to ``stop`` over ``steps`` steps, then ``stop``."""
    return _ramp(start, stop, steps, lambda t: t)


def cosine(start: float, stop: float, steps: int) -> Schedule:
    """Half a cosine from ``start`` to ``stop`` over ``steps`` steps, then ``stop``."""
    return _ramp(start, stop, steps, lambda t: 0.5 * (1.0 - math.cos(math.pi * t)))


def cyclical(start: float, stop: float, period: int, ramp: float = 0.5) -> Schedule:
    """Schedule with, in each ``period``, a straight line from ``start`` to ``stop``, then ``stop``
    (Fu et al. 2019).

    :param ramp: the fraction of a period after which ``stop`` is reached, in (0, 1].
    """
    if not 0 < ramp <= 1:
        raise ValueError(f"ramp must lie in (0, 1], got {ramp}")
    if period < 1:
        raise ValueError(f"period must be at least 1, got {period}")
    check_temperature(start, "start")
    check_temperature(stop, "stop")
    return lambda step: start + (stop - start) * min((step % period) / (ramp * period), 1.0)
