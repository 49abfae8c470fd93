"""The protocol of the kernels of ``mcmc.sgmcmc``, and schedules of their step size.

A schedule is a callable ``step -> eps``, with steps counted from 0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from pyro_bdl.mcmc.kernels import Options
from pyro_bdl.utils.validation import real_number, whole_number


@dataclass(frozen=True, eq=False, kw_only=True)
class StochasticKernel(Options):
    """The protocol of kernels on gradients of minibatches; ``SGLD`` explains the options.

    A state is a named tuple of tensors whose first, ``position``, are the chains (chains, P).
    ``init`` makes one, ``update`` moves it by one step along ``gradient`` (chains, P), that of the
    log density at ``position``, with torch's noise. With temperature T the stationary density is
    p^(1/T); at T = 0 there is no noise.
    """

    settles: ClassVar[bool] = False  # after the first half of the warm-up
    checks: ClassVar[dict[str, Callable[[Any, str], Any]]] = {
        **Options.checks,
        "step_size": lambda value, name: value if callable(value) else real_number(value, name),
        "temperature": real_number,
        "friction": partial(real_number, interval="(0, 1]"),
    }
    step_size: float | Callable[[int], float]
    thinning: int = 10
    temperature: float = 1.0
    adapt_step_size: bool = False

    def size(self, step: int) -> float:
        if not callable(self.step_size):
            return self.step_size
        return real_number(self.step_size(step), f"step_size at step {step}")

    def explores(self, step: int) -> bool:
        explores = getattr(self.step_size, "explores", None)
        return explores is not None and bool(explores(step))

    def init(self, position: Tensor) -> Any:
        """The state at positions (chains, P)."""
        raise NotImplementedError

    def update(self, state: Any, gradient: Tensor, size: float, temperature: float) -> Any:
        """The state after a step; ``state.position`` are the positions."""
        raise NotImplementedError

    def statistics(self, state: Any, gradient: Tensor, size: float) -> dict[str, Tensor]:
        """Statistics (chains,) of a state, by name."""
        return {}

    def settle(self, state: Any) -> Any:
        """The state for the steps after the first half of the warm-up."""
        return state


# ------------------------------------------------------------------------------------ schedules


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
        real_number(self.scale, "scale")
        real_number(self.offset, "offset")
        real_number(self.power, "power", "(0.5, 1]")

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
        real_number(self.peak, "peak")
        whole_number(self.period, "period")
        real_number(self.exploration, "exploration", "[0, 1)")
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
