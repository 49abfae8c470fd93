"""The kernels of ``mcmc.sgmcmc``: the update rules of ``samplers`` with their options."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from pyro_bdl.mcmc.kernels import Options, positive
from pyro_bdl.mcmc.stochastic_gradient.samplers import (
    hamiltonian,
    langevin,
    microcanonical,
    preconditioned,
    thermostat,
)
from pyro_bdl.utils.validation import check_temperature


@dataclass(frozen=True, eq=False, kw_only=True)
class StochasticKernel(Options):
    """What moves chains along gradients of minibatches; ``SGLD`` says what the options are."""

    settles: ClassVar[bool] = False  # after the first half of the warm-up
    checks: ClassVar[dict[str, Callable[[Any, str], Any]]] = {
        **Options.checks,
        "step_size": lambda value, name: value if callable(value) else positive(value, name),
        "temperature": check_temperature,
    }
    step_size: float | Callable[[int], float]
    thinning: int = 10
    temperature: float = 1.0
    adapt_step_size: bool = False

    def size(self, step: int) -> float:
        if not callable(self.step_size):
            return self.step_size
        size = self.step_size(step)
        if not 0 < size < float("inf"):
            raise ValueError(f"step_size must be positive and finite, got {size} at step {step}")
        return size

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


@dataclass(frozen=True, eq=False, kw_only=True)
class SGLD(StochasticKernel):
    """Stochastic-gradient Langevin dynamics (Welling & Teh 2011).

    :param step_size: eps, which multiplies the gradient: a number, or a function of the step from
        0, such as ``mcmc.Polynomial`` or ``mcmc.Cyclical``. Steps for which its method
        ``explores(step)`` is true are made without noise, and no draws are kept there.
    :param thinning: steps between draws; exploring steps do not count.
    :param temperature: T; the stationary density is the posterior's to the power 1/T.
    :param adapt_step_size: halve the step size whenever a chain diverges in the warm-up, and go on
        from where it was sound; ``step_size`` is then the largest one that is tried. The entry
        ``step_size_factor`` of ``Samples.info`` says what is left of it.
    """

    name: ClassVar[str] = "sgld"

    def init(self, position: Tensor) -> Any:
        return langevin.init(position)

    def update(self, state: Any, gradient: Tensor, size: float, temperature: float) -> Any:
        return langevin.update(state, gradient, size, temperature=temperature)


@dataclass(frozen=True, eq=False, kw_only=True)
class PSGLD(StochasticKernel):
    """SGLD preconditioned as RMSprop (Li et al. 2016); it adapts in the first half of the warm-up.

    :param averaging: the share of the mean squared gradient that each step keeps, in [0, 1).
    :param damping: positive; the preconditioner is at most 1 / damping.
    :param step_size: see ``SGLD``, also for ``thinning``, ``temperature`` and ``adapt_step_size``.
    """

    name: ClassVar[str] = "psgld"
    settles: ClassVar[bool] = True
    averaging: float = 0.99
    damping: float = 1e-3

    def init(self, position: Tensor) -> Any:
        return preconditioned.init(position)

    def update(self, state: Any, gradient: Tensor, size: float, temperature: float) -> Any:
        return preconditioned.update(
            state, gradient, size, temperature=temperature, averaging=self.averaging,
            damping=self.damping,
        )  # fmt: skip

    def settle(self, state: Any) -> Any:
        return preconditioned.settle(state)


@dataclass(frozen=True, eq=False, kw_only=True)
class SGHMC(StochasticKernel):
    """Underdamped Langevin dynamics (Chen et al. 2014).

    :param friction: the share of the momentum that is lost in a step, in (0, 1].
    :param step_size: see ``SGLD``, also for ``thinning``, ``temperature`` and ``adapt_step_size``.
    """

    name: ClassVar[str] = "sghmc"
    friction: float = 0.02

    def init(self, position: Tensor) -> Any:
        return hamiltonian.init(position, temperature=self.temperature)

    def update(self, state: Any, gradient: Tensor, size: float, temperature: float) -> Any:
        options = {"temperature": temperature, "friction": self.friction}
        return hamiltonian.update(state, gradient, size, **options)

    def statistics(self, state: Any, gradient: Tensor, size: float) -> dict[str, Tensor]:
        return hamiltonian.statistics(state, gradient, size)


@dataclass(frozen=True, eq=False, kw_only=True)
class SGNHT(StochasticKernel):
    """SGHMC whose friction a thermostat finds (Ding et al. 2014), on after the first half of the
    warm-up.

    :param friction: the share of the momentum that is lost in a step before that, in (0, 1).
    :param step_size: see ``SGLD``, also for ``thinning``, ``temperature`` and ``adapt_step_size``.
    """

    name: ClassVar[str] = "sgnht"
    settles: ClassVar[bool] = True
    friction: float = 0.02

    def init(self, position: Tensor) -> Any:
        return thermostat.init(position, temperature=self.temperature)

    def update(self, state: Any, gradient: Tensor, size: float, temperature: float) -> Any:
        options = {"temperature": temperature, "friction": self.friction}
        return thermostat.update(state, gradient, size, **options)

    def statistics(self, state: Any, gradient: Tensor, size: float) -> dict[str, Tensor]:
        return thermostat.statistics(state, gradient, size)

    def settle(self, state: Any) -> Any:
        return thermostat.settle(state)


@dataclass(frozen=True, eq=False, kw_only=True)
class SMILE(StochasticKernel):
    """Microcanonical Langevin dynamics (Sommer et al. 2026).

    :param friction: the share of the direction that is lost in a step, in (0, 1].
    :param step_size: see ``SGLD``, also for ``thinning``, ``temperature`` and ``adapt_step_size``.
    """

    name: ClassVar[str] = "smile"
    friction: float = 0.02

    def init(self, position: Tensor) -> Any:
        return microcanonical.init(position)

    def update(self, state: Any, gradient: Tensor, size: float, temperature: float) -> Any:
        options = {"temperature": temperature, "friction": self.friction}
        return microcanonical.update(state, gradient, size, **options)
