"""Underdamped Langevin dynamics: SGHMC in a symmetric splitting.

    dtheta = p dt,    dp = grad log p(theta) dt - gamma p dt + sqrt(2 gamma T) dW

A step has length h = sqrt(eps), so that eps multiplies the gradient like a learning rate. The
friction f per step is defined by exp(-gamma h) = 1 - f; SGD's momentum is 1 - f. The momentum is
forgotten after about 1 / f steps, over which the chain moves by about h / f standard deviations of
a number with unit curvature: f near h = sqrt(eps) is critical damping there. A step is::

    p      <- p + h grad log p(theta)
    theta  <- theta + (h / 2) p
    p      <- (1 - f) p + sqrt((1 - (1 - f)^2) T) xi,    xi ~ Normal(0, I)
    theta  <- theta + (h / 2) p

Friction and noise are those of the exact Ornstein-Uhlenbeck step. Each full kick combines the
second half kick of one step with the first half kick of the next, which has the same gradient. The
positions theta are therefore those of the BAOAB splitting. Its stationary density in theta is exact
for a Normal target with precision L at every eps < 4 / L, and correct to second order in h
otherwise. Minibatch noise heats the momentum to about T (1 + h var(grad) / (2 gamma T));
``kinetic_temperature`` measures this, and ``thermostat.py`` corrects it.

Sources: Chen, Fox & Guestrin (2014), Stochastic gradient Hamiltonian Monte Carlo, equation 15, with
eps for their eta and f for their alpha; Leimkuhler & Matthews (2013), Rational construction of
stochastic numerical methods for molecular sampling (BAOAB).
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pyro_bdl.mcmc.stochastic_gradient.kernels import StochasticKernel
from pyro_bdl.utils import bibliography


class HamiltonianState(NamedTuple):
    """The state of the chains.

    :param position: theta, (chains, P).
    :param momentum: p, (chains, P), with variance T.
    """

    position: Tensor
    momentum: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class SGHMC(StochasticKernel):
    """Underdamped Langevin dynamics (Chen et al. 2014).

    :param friction: the share of the momentum that is lost in a step, in (0, 1].
    :param step_size: see ``SGLD``, also for ``thinning``, ``temperature`` and ``adapt_step_size``.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.SGHMC,)
    name: ClassVar[str] = "sghmc"
    friction: float = 0.02

    def init(self, position: Tensor) -> HamiltonianState:
        momentum = math.sqrt(self.temperature) * torch.randn_like(position)
        return HamiltonianState(position, momentum)

    def update(
        self, state: HamiltonianState, gradient: Tensor, step_size: float, temperature: float
    ) -> HamiltonianState:
        length, kept = math.sqrt(step_size), 1 - self.friction
        momentum = torch.add(state.momentum, gradient, alpha=length)
        position = torch.add(state.position, momentum, alpha=length / 2)
        momentum.mul_(kept)
        if temperature:
            noise = torch.randn_like(momentum)
            momentum.add_(noise, alpha=math.sqrt((1 - kept**2) * temperature))
        position.add_(momentum, alpha=length / 2)
        return HamiltonianState(position, momentum)

    def statistics(self, state: Any, gradient: Tensor, step_size: float) -> dict[str, Tensor]:
        return {"kinetic_temperature": kinetic_temperature(state.momentum, gradient, step_size)}


def kinetic_temperature(momentum: Tensor, gradient: Tensor, step_size: float) -> Tensor:
    """p'p / P (chains,) of the momentum after half of its kick; the mean is about T."""
    return torch.add(momentum, gradient, alpha=math.sqrt(step_size) / 2).square().mean(-1)
