"""Microcanonical Langevin dynamics on minibatches, as in SMILE.

    dtheta = sqrt(P) u dt,    du = sqrt(P) / (P - 1) (I - u u') grad log p(theta) dt + noise

with directions u of length 1. A gradient turns the direction, however large it is: no step moves a
chain by more than sqrt(eps P T), and no chain diverges. A step size that is too large shows
in ``configurational_temperature`` instead. A step has length h = sqrt(eps), so that eps multiplies
the gradient like a learning rate, and the friction f is that of "sghmc"::

    u      <- u turned by grad log p(theta) for a time h
    theta  <- theta + (h / 2) sqrt(P T) u
    u      <- ((1 - f) u + sqrt((1 - (1 - f)^2) / P) xi) / |...|,    xi ~ Normal(0, I)
    theta  <- theta + (h / 2) sqrt(P T) u

The turn is the exact flow at a constant force, see ``mcmc/microcanonical/integrator.py``. With all
data the stationary density is correct to second order in h. Noise of the gradients that is alike in
all directions turns the direction as the friction's does; other noise distorts the posterior, by a
share that falls with h. A metric that makes the noise alike is the paper's remedy, and is not here.

Source: Sommer, Diao, Robnik, Seljak & Rügamer (2026), Can microcanonical Langevin dynamics leverage
mini-batch gradient noise?, arXiv 2602.06500. Its integrator takes two gradients a step, this one
takes one.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from pyro_bdl.mcmc.stochastic_gradient.kernels import StochasticKernel
from pyro_bdl.utils import bibliography


class MicrocanonicalState(NamedTuple):
    """The state of the chains.

    :param position: theta, (chains, P).
    :param direction: u, (chains, P), of length 1.
    """

    position: Tensor
    direction: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class SMILE(StochasticKernel):
    """Microcanonical Langevin dynamics (Sommer et al. 2026).

    :param friction: the share of the direction that is lost in a step, in (0, 1].
    :param step_size: see ``SGLD``, also for ``thinning``, ``temperature`` and ``adapt_step_size``.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.SMILE,)
    name: ClassVar[str] = "smile"
    friction: float = 0.02

    def init(self, position: Tensor) -> MicrocanonicalState:
        """Start in random directions.

        :raises ValueError: for fewer than two numbers, whose momentum could not turn.
        """
        if position.shape[-1] < 2:
            raise ValueError("SMILE needs at least two numbers to draw: use SGHMC")
        return MicrocanonicalState(position, _unit(torch.randn_like(position)))

    def update(
        self, state: MicrocanonicalState, gradient: Tensor, step_size: float, temperature: float
    ) -> MicrocanonicalState:
        if not temperature > 0:
            raise ValueError("SMILE has no steps without noise: use a schedule that never explores")
        size = gradient.shape[-1]
        length, kept = math.sqrt(step_size), 1 - self.friction
        half = length / 2 * math.sqrt(size * temperature)
        time = length * math.sqrt(size / temperature)
        direction = turned(state.direction, gradient, time)
        position = torch.add(state.position, direction, alpha=half)
        noise = torch.randn_like(direction)
        direction = _unit(kept * direction + math.sqrt((1 - kept**2) / size) * noise)
        return MicrocanonicalState(position.add_(direction, alpha=half), direction)


def turned(direction: Tensor, force: Tensor, time: float) -> Tensor:
    """u' = (u + e (sinh d + c (cosh d - 1))) / |...| with e the force's direction,
    d = time |force| / (P - 1) and c = e'u; all terms times 2 exp(-d), which does not overflow."""
    size = force.norm(dim=-1, keepdim=True)
    e = force / size.clamp(min=torch.finfo(size.dtype).tiny)
    c = (e * direction).sum(-1, keepdim=True)
    fading = torch.exp(-time * size / (force.shape[-1] - 1))
    return _unit(e * (1 - fading) * (1 + fading + c * (1 - fading)) + 2 * fading * direction)


def _unit(vector: Tensor) -> Tensor:
    return vector / vector.norm(dim=-1, keepdim=True)
