"""The samplers that ``sgmcmc`` knows by name."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from pyro_bdl.mcmc.stochastic_gradient.samplers import (
    hamiltonian,
    langevin,
    microcanonical,
    preconditioned,
    thermostat,
)


class Method(NamedTuple):
    """The update rule of a sampler.

    :param init: position (chains, P) -> state.
    :param update: (state, gradient, step size, temperature=, options) -> state.
    :param statistics: (state, gradient, step size) -> name -> (chains,).
    :param settle: maps the state after the first half of the warm-up to the state for the rest.
    """

    init: Callable[..., Any]
    update: Callable[..., Any]
    statistics: Callable[..., dict[str, Tensor]] | None = None
    settle: Callable[[Any], Any] | None = None

    def begin(self, position: Tensor, temperature: float) -> Any:
        """The initial state at a position; a momentum is drawn at the temperature."""
        takes = inspect.signature(self.init).parameters
        heat = {"temperature": temperature} if "temperature" in takes else {}
        return self.init(position, **heat)

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the update's options except the temperature."""
        parameters = inspect.signature(self.update).parameters.values()
        named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        return tuple(name for name in named if name != "temperature")


METHODS = {
    "sgld": Method(langevin.init, langevin.update),
    "psgld": Method(preconditioned.init, preconditioned.update, settle=preconditioned.settle),
    "sghmc": Method(hamiltonian.init, hamiltonian.update, hamiltonian.statistics),
    "sgnht": Method(
        thermostat.init, thermostat.update, thermostat.statistics, settle=thermostat.settle
    ),
    "smile": Method(microcanonical.init, microcanonical.update),
}
