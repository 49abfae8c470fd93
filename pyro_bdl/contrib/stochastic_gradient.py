"""Rarer kernels of ``mcmc.sgmcmc``: pSGLD, a thermostat (SG-NHT) and microcanonical (SMILE).

PSGLD is Langevin dynamics with the diagonal preconditioner of RMSprop::

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

SGNHT is the stochastic-gradient Nose-Hoover thermostat in a symmetric splitting::

    dtheta = p dt,    dp = grad log p(theta) dt - xi p dt + sqrt(2 A T) dW
    dxi = (p'p / P - T) / Q dt

The friction xi of each chain grows while its kinetic temperature p'p / P exceeds T. It settles at
the value that removes the heat of the injected noise A and of the unknown minibatch noise. A step
has length h = sqrt(eps); z = xi h and a = A h are friction and noise per step. An update is the
kick by the gradient, half a drift, half a step of z, the exact Ornstein-Uhlenbeck step::

    p  <-  e^-z p + sqrt(a T (1 - e^-2z) / z) w,    w ~ Normal(0, I)

and then the other halves of z and of the drift. The kick combines two half kicks, as in ``SGHMC``.
The inertia Q does not affect the stationary density in theta. It is 2 h^2 T / a^2, with which the
temperature returns to T without oscillation; a step of z is then (a^2 / 2) (p'p / (P T) - 1).

The thermostat is switched on by ``settle``; before that the friction is a. The reason is that a
chain that starts far from the mode is hot at first, and the thermostat would build up a friction
that takes many steps to decay.

Sources: Ding, Fang, Babbush, Chen, Skeel & Neven (2014), Bayesian sampling using stochastic
gradient thermostats, algorithm 2, where Q = 1; Leimkuhler & Shang (2016), Adaptive thermostats for
noisy gradient systems (the splitting BADODAB).

SMILE is microcanonical Langevin dynamics on minibatches::

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
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pyro_bdl.mcmc.stochastic_gradient.kernels import StochasticKernel
from pyro_bdl.mcmc.stochastic_gradient.langevin import kinetic_temperature
from pyro_bdl.utils import bibliography
from pyro_bdl.utils.validation import real_number

__all__ = ["PSGLD", "SGNHT", "SMILE"]


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
        real_number(self.averaging, "averaging", "[0, 1)")
        real_number(self.damping, "damping")

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
