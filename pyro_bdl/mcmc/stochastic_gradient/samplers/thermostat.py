"""The stochastic-gradient Nose-Hoover thermostat (SG-NHT) in a symmetric splitting.

    dtheta = p dt,    dp = grad log p(theta) dt - xi p dt + sqrt(2 A T) dW
    dxi = (p'p / P - T) / Q dt

The friction xi of each chain grows while its kinetic temperature p'p / P exceeds T. It settles at
the value that removes the heat of the injected noise A and of the unknown minibatch noise. A step
has length h = sqrt(eps); z = xi h and a = A h are friction and noise per step. An update is the
kick by the gradient, half a drift, half a step of z, the exact Ornstein-Uhlenbeck step::

    p  <-  e^-z p + sqrt(a T (1 - e^-2z) / z) w,    w ~ Normal(0, I)

and then the other halves of z and of the drift. The kick combines two half kicks, as in
``hamiltonian.py``. The inertia Q does not affect the stationary density in theta. It is 2 h^2 T /
a^2, with which the temperature returns to T without oscillation; a step of z is then (a^2 / 2) (p'p
/ (P T) - 1).

The thermostat is switched on by ``settle``; before that the friction is a. The reason is that a
chain that starts far from the mode is hot at first, and the thermostat would build up a friction
that takes many steps to decay.

Sources: Ding, Fang, Babbush, Chen, Skeel & Neven (2014), Bayesian sampling using stochastic
gradient thermostats, algorithm 2, where Q = 1; Leimkuhler & Shang (2016), Adaptive thermostats for
noisy gradient systems (the splitting BADODAB).
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pyro_bdl.mcmc.stochastic_gradient.kernels import StochasticKernel
from pyro_bdl.mcmc.stochastic_gradient.samplers.hamiltonian import kinetic_temperature
from pyro_bdl.utils import bibliography


class ThermostatState(NamedTuple):
    """The state of the chains.

    :param position: theta, (chains, P).
    :param momentum: p, (chains, P), with variance T.
    :param decay: z, (chains, 1).
    :param steered: whether the thermostat is on.
    """

    position: Tensor
    momentum: Tensor
    decay: Tensor
    steered: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class SGNHT(StochasticKernel):
    """SGHMC whose friction a thermostat finds (Ding et al. 2014), on after the first half of the
    warm-up.

    :param friction: the share of the momentum that is lost in a step before that, in (0, 1).
    :param step_size: see ``SGLD``, also for ``thinning``, ``temperature`` and ``adapt_step_size``.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.SGNHT,)
    name: ClassVar[str] = "sgnht"
    settles: ClassVar[bool] = True
    friction: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.friction == 1:
            raise ValueError("friction must be less than 1 for a thermostat, got 1")

    @property
    def injected(self) -> float:
        """a = -log(1 - f), which balances, without minibatch noise, the loss of the share f of the
        momentum per step."""
        return -math.log1p(-self.friction)

    def init(self, position: Tensor) -> ThermostatState:
        momentum = math.sqrt(self.temperature) * torch.randn_like(position)
        decay = momentum.new_full((*momentum.shape[:-1], 1), self.injected)
        return ThermostatState(position, momentum, decay)

    def update(
        self, state: ThermostatState, gradient: Tensor, step_size: float, temperature: float
    ) -> ThermostatState:
        """Move every chain by one step; at T = 0 the thermostat is off."""
        length, injected = math.sqrt(step_size), self.injected
        momentum = torch.add(state.momentum, gradient, alpha=length)
        position = torch.add(state.position, momentum, alpha=length / 2)
        coupling = injected**2 / 4 if state.steered and temperature else 0.0
        decay = _steered(state.decay, momentum, coupling, temperature)
        momentum = momentum * torch.exp(-decay)
        if temperature:
            variance = 2 * injected * temperature * _mean_decay(2 * decay)
            momentum.addcmul_(variance.sqrt(), torch.randn_like(momentum))
        decay = _steered(decay, momentum, coupling, temperature)
        position.add_(momentum, alpha=length / 2)
        return ThermostatState(position, momentum, decay, state.steered)

    def settle(self, state: ThermostatState) -> ThermostatState:
        """The state with the thermostat on."""
        return state._replace(steered=True)

    def statistics(self, state: Any, gradient: Tensor, step_size: float) -> dict[str, Tensor]:
        """The statistics ``kinetic_temperature`` and ``friction``, the share 1 - e^-z of the
        momentum that is lost per step; (chains,) each."""
        temperature = kinetic_temperature(state.momentum, gradient, step_size)
        lost = -torch.expm1(-state.decay.squeeze(-1))
        return {"kinetic_temperature": temperature, "friction": lost}


def _steered(decay: Tensor, momentum: Tensor, coupling: float, temperature: float) -> Tensor:
    """z after half a step of the thermostat."""
    if not coupling:
        return decay
    hot = momentum.square().mean(-1, keepdim=True) / temperature - 1
    return torch.add(decay, hot, alpha=coupling)


def _mean_decay(decay: Tensor) -> Tensor:
    """(1 - e^-z) / z, the mean of e^-zt over t in (0, 1); 1 at z = 0."""
    zero = decay == 0
    return torch.where(zero, 1.0, -torch.expm1(-decay) / torch.where(zero, 1.0, decay))
