"""Overdamped Langevin dynamics (SGLD).

    theta' = theta + eps grad log p(theta) + sqrt(2 eps T) xi,    xi ~ Normal(0, I)

For a Normal target with precision L the stationary covariance is T (L - eps L^2 / 2)^-1. It is
exact as eps -> 0, else too large by the factor 1 / (1 - eps L / 2). For eps >= 2 / L the chain
diverges.

Source: Welling & Teh (2011), Bayesian learning via stochastic gradient Langevin dynamics, with
eps for their eps / 2.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

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
