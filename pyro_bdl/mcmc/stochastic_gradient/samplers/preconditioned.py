"""Langevin dynamics with the diagonal preconditioner of RMSprop (pSGLD).

    V' = a V + (1 - a) g^2,    G = 1 / (damping + sqrt(V / mean V))
    theta' = theta + eps G g + sqrt(2 eps G T) xi,    g = grad log p(theta)

V starts as the mean of the first g^2 over the numbers of a chain, which gives plain Langevin
dynamics. V is divided by its mean, so that G does not depend on the units of log p, and eps keeps
its meaning as a typical step.

A G that depends on theta would need the drift Gamma_i = sum_j dG_ij / dtheta_j; without it the
stationary density has an error that grows with 1 - a. Here V is adapted only in the first half of
the warm-up and then fixed (``settle``), so that Gamma is exactly zero. All kept draws come from
Langevin dynamics with a constant preconditioner.

Source: Li, Chen, Carlson & Carin (2016), Preconditioned stochastic gradient Langevin dynamics for
deep neural networks, algorithm 1, with eps for their eps / 2.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from pyro_bdl.mcmc.stochastic_gradient.kernels import StochasticKernel
from pyro_bdl.utils import bibliography


class PreconditionedState(NamedTuple):
    """The state of the chains.

    :param position: (chains, P).
    :param square: V, (chains, P); None before the first step.
    :param adapting: whether V follows the gradients.
    """

    position: Tensor
    square: Tensor | None = None
    adapting: bool = True


@dataclass(frozen=True, eq=False, kw_only=True)
class PSGLD(StochasticKernel):
    """SGLD preconditioned as RMSprop (Li et al. 2016); it adapts in the first half of the warm-up.

    :param averaging: the share of the mean squared gradient that each step keeps, in [0, 1).
    :param damping: positive; the preconditioner is at most 1 / damping.
    :param step_size: see ``SGLD``, also for ``thinning``, ``temperature`` and ``adapt_step_size``.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.PSGLD,)
    name: ClassVar[str] = "psgld"
    settles: ClassVar[bool] = True
    averaging: float = 0.99
    damping: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.averaging < 1:
            raise ValueError(f"averaging must lie in [0, 1), got {self.averaging}")
        if not self.damping > 0:
            raise ValueError(f"damping must be positive, got {self.damping}")

    def init(self, position: Tensor) -> PreconditionedState:
        return PreconditionedState(position)

    def update(
        self, state: PreconditionedState, gradient: Tensor, step_size: float, temperature: float
    ) -> PreconditionedState:
        square = state.square
        if square is None:
            square = gradient.square().mean(-1, keepdim=True).expand_as(gradient)
        if state.adapting:
            square = torch.lerp(gradient.square(), square, self.averaging)
        scale = preconditioner(square, self.damping)
        position = torch.addcmul(state.position, scale, gradient, value=step_size)
        if temperature:
            noise = torch.randn_like(position)
            size = math.sqrt(2 * step_size * temperature)
            position.addcmul_(scale.sqrt(), noise, value=size)
        return PreconditionedState(position, square, state.adapting)

    def settle(self, state: PreconditionedState) -> PreconditionedState:
        """The state with V fixed from now on."""
        return state._replace(adapting=False)


def preconditioner(square: Tensor, damping: float) -> Tensor:
    """G (chains, P) for V; ones if V is all zeros."""
    mean = square.mean(-1, keepdim=True)
    return 1 / (damping + torch.where(mean > 0, square / mean, 1.0).sqrt())
