"""Schedules of the step size: callables ``step -> eps``, with steps counted from 0."""

import math
from dataclasses import dataclass

from pyro_bdl.mcmc.kernels import positive
from pyro_bdl.utils.validation import whole_number


@dataclass(frozen=True)
class Polynomial:
    """eps_t = scale (offset + t)^-power, which falls to zero (Welling & Teh 2011, section 2).

    :param scale: positive; the first step is scale offset^-power.
    :param offset: positive; the number of steps before the step size falls noticeably.
    :param power: in (0.5, 1], so that the sum of the step sizes diverges and the sum of their
        squares converges.
    :raises ValueError: for a number outside its range.
    """

    scale: float
    offset: float = 1.0
    power: float = 0.55

    def __post_init__(self) -> None:
        positive(self.scale, "scale")
        positive(self.offset, "offset")
        if not 0.5 < self.power <= 1:
            raise ValueError(f"power must lie in (0.5, 1], got {self.power}")

    def __call__(self, step: int) -> float:
        return self.scale * (self.offset + step) ** -self.power


@dataclass(frozen=True)
class Cyclical:
    """eps_t = (peak / 2) (cos(pi (t mod period) / period) + 1): from the peak to about zero in each
    period, so that a chain visits several modes (Zhang et al. 2020, equation 1).

    While ``explores(t)`` is true a chain moves without noise and keeps no draws; it samples in the
    rest of each period.

    :param peak: positive, the first step size of each period.
    :param period: the number of steps of a period, at least 1.
    :param exploration: the share of a period in which the chain explores, in [0, 1).
    :raises ValueError: for a number outside its range.
    """

    peak: float
    period: int
    exploration: float = 0.5

    def __post_init__(self) -> None:
        positive(self.peak, "peak")
        whole_number(self.period, "period")
        if not 0 <= self.exploration < 1:
            raise ValueError(f"exploration must lie in [0, 1), got {self.exploration}")
        if self.explores(self.period - 1):
            raise ValueError(
                f"exploration={self.exploration} leaves no step of a period of {self.period} to "
                "sample in: lower it, or make the period longer"
            )

    def __call__(self, step: int) -> float:
        return self.peak / 2 * (math.cos(math.pi * self._progress(step)) + 1)

    def explores(self, step: int) -> bool:
        return self._progress(step) < self.exploration

    def _progress(self, step: int) -> float:
        return (step % self.period) / self.period
