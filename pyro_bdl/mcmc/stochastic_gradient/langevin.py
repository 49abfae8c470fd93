"""Langevin dynamics: overdamped (SGLD), and underdamped in a symmetric splitting (SGHMC).

SGLD::

    theta' = theta + eps grad log p(theta) + sqrt(2 eps T) xi,    xi ~ Normal(0, I)

For a Normal target with precision L the stationary covariance is T (L - eps L^2 / 2)^-1. It is
exact as eps -> 0, else too large by the factor 1 / (1 - eps L / 2). For eps >= 2 / L the chain
diverges.

Source: Welling & Teh (2011), Bayesian learning via stochastic gradient Langevin dynamics, with
eps for their eps / 2.

SGHMC::

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
``kinetic_temperature`` measures this, and ``SGNHT`` corrects it.

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


class LangevinState(NamedTuple):
    """The positions of the chains.

    :param position: (chains, P).
    """

    position: Tensor


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

    papers: ClassVar[tuple[str, ...]] = (bibliography.SGLD,)
    name: ClassVar[str] = "sgld"

    def init(self, position: Tensor) -> LangevinState:
        return LangevinState(position)

    def update(
        self, state: LangevinState, gradient: Tensor, step_size: float, temperature: float
    ) -> LangevinState:
        position = torch.add(state.position, gradient, alpha=step_size)
        if temperature:
            noise = torch.randn_like(position)
            position.add_(noise, alpha=math.sqrt(2 * step_size * temperature))
        return LangevinState(position)


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
