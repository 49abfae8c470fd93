"""``mclmc``: microcanonical Langevin Monte Carlo, unadjusted.

Each step of the integrator is followed by a partial refreshment of the momentum. There is no
Metropolis step: the error of the step size stays in the draws, as a bias. It is controlled by the
variance of the energy error per number, ``E[(energy change)^2] / P``, whose target is an argument
and whose reached value is the statistic ``energy_variance``. For a Normal target the bias of the
variances, relative and squared, is about as large as this number (Robnik & Seljak 2024, section 4).

One step size cannot suit kinks, necks and tips as well as the bulk. A step whose energy error is
above five deviations of the target is taken in parts, see ``integrator.divided_step``.

Source: Robnik & Seljak (2024), Fluctuation without dissipation, arXiv 2303.18221.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pyro_bdl.mcmc.chains import Plan
from pyro_bdl.mcmc.kernels import MCLMC
from pyro_bdl.mcmc.microcanonical import integrator, starting, tuning
from pyro_bdl.mcmc.microcanonical.integrator import PhasePoint
from pyro_bdl.mcmc.microcanonical.starting import LARGEST_CHANGE, at_start, each_chain
from pyro_bdl.mcmc.microcanonical.tuning import Array, EnergyControl, Moments, Tuned
from pyro_bdl.mcmc.run import TRACE, Stage, Transition

_SHARE = 0.4  # of the autocorrelation length that is L
# Shares of the warm-up: phase 1, the two windows of phase 2, the last step size. The rest finds L.
_PHASES = (0.2, 0.15, 0.2, 0.1)
# An energy error above so many of the deviations that are asked for is large: the step is taken in
# parts, and the step size sees this much of the error, so that rare kinks do not make it small.
_LARGE = 5.0


class MicrocanonicalState(NamedTuple):
    """One chain.

    :param part: with which the next step begins, see ``integrator.divided_step``.
    :param adapting: 1 while the step size is adapted, else 0.
    :param control: averages of the adaptation; ``moments``: of the points.
    :param trace: some numbers after each step of the last iteration, (steps, numbers).
    :param variance: mean square of the energy's change per number in the last iteration.
    :param diverged: whether a step of the last iteration was undone.
    :param gradients: their number in the last iteration.
    """

    key: Array
    point: PhasePoint
    part: Array
    tuned: Tuned
    adapting: Array
    control: EnergyControl
    moments: Moments
    trace: Array
    variance: Array
    diverged: Array
    gradients: Array


def transition(
    log_density: Callable[[jax.Array], jax.Array], kernel: MCLMC, plan: Plan, size: int
) -> Transition:
    """The sampler; an iteration is ``kernel.thinning`` steps."""
    density = jax.value_and_grad(log_density)
    numbers = tuning.traced_numbers(size)
    steps = kernel.thinning
    large = min(_LARGE * (size * kernel.energy_variance) ** 0.5, LARGEST_CHANGE)
    adapts = kernel.step_size is None and plan.num_warmup > 0

    def init(key: jax.Array, start: jax.Array) -> MicrocanonicalState:
        key, point, tuned = at_start(density, kernel, key, start)
        zero = jnp.zeros((), start.dtype)
        return MicrocanonicalState(
            key,
            point,
            jnp.asarray(integrator.WHOLE, jnp.int32),
            tuned,
            jnp.asarray(float(adapts), start.dtype),
            tuning.no_errors(zero),
            tuning.no_moments(start),
            jnp.zeros((steps, len(start[numbers])), start.dtype),
            zero,
            zero > 0,
            jnp.zeros((), jnp.int32),
        )

    def step(carry: Any, noise: jax.Array) -> Any:
        point, part, tuned, adapting, control, moments = carry
        moved, change, error, part, lost, gradients = integrator.divided_step(
            density,
            lambda v: tuning.multiply(tuned.root, v),
            point,
            tuned.step_size,
            partial(tuning.error_of, size=size),
            large,
            LARGEST_CHANGE,
            part,
        )
        turned = moved._replace(
            momentum=integrator.refreshed(noise, moved.momentum, tuned.step_size / tuned.length)
        )
        back = point._replace(momentum=-point.momentum)
        point = jax.tree.map(lambda new, old: jnp.where(lost, old, new), turned, back)
        change = jnp.where(lost, 0, change) / jnp.sqrt(size)
        moments = tuning.updated(moments, point, jnp.where(lost, 0, tuned.step_size))
        error = jnp.minimum(error, large) / jnp.sqrt(size)
        found, adapted = tuning.by_energy(
            control, tuned.step_size, error, ~lost, kernel.energy_variance
        )
        control, adapted = jax.tree.map(
            lambda new, old: jnp.where(adapting > 0, new, old),
            (found, adapted),
            (control, tuned.step_size),
        )
        tuned = tuned._replace(step_size=adapted)
        seen = point.position[numbers], change**2, lost, gradients
        return (point, part, tuned, adapting, control, moments), seen

    def iteration(state: MicrocanonicalState) -> MicrocanonicalState:
        key, own = jax.random.split(state.key)
        position = state.point.position
        noise = jax.random.normal(own, (steps, *position.shape), position.dtype)  # at once: faster
        carry = state.point, state.part, state.tuned, state.adapting, state.control, state.moments
        carry, (trace, squares, lost, gradients) = jax.lax.scan(step, carry, noise)
        return MicrocanonicalState(
            key, *carry, trace, squares.mean(), lost.any(), gradients.sum(dtype=jnp.int32)
        )

    def draw(state: MicrocanonicalState) -> dict[str, jax.Array]:
        value = state.point.log_density
        return {
            "vector": state.point.position,
            "potential_energy": -value,
            "num_steps": state.gradients,
            "step_size": state.tuned.step_size,
            "momentum_length": state.tuned.length,
            "energy_variance": state.variance,
            "diverging": state.diverged,
            TRACE: state.trace,
        }

    def whole(state: MicrocanonicalState) -> MicrocanonicalState:
        return (jax.vmap(iteration) if state.point.position.ndim == 2 else iteration)(state)

    return Transition(each_chain(init), whole, draw, _warmup(kernel, plan.num_warmup))


def _warmup(kernel: MCLMC, num_warmup: int) -> tuple[Stage, ...]:
    first, early, late, again, last = tuning.phases(num_warmup, _PHASES)
    if num_warmup == 0:
        return ()

    def forget(state: MicrocanonicalState, trace: Any = None) -> MicrocanonicalState:
        return state._replace(moments=jax.tree.map(np.zeros_like, state.moments))

    def measured(state: MicrocanonicalState, trace: Any) -> MicrocanonicalState:
        if kernel.inverse_mass is not None:
            return forget(state)
        tuned = starting.measured(kernel, state.moments, state.tuned)
        control = tuning.no_errors(np.zeros_like(state.control.weight))
        return forget(state)._replace(tuned=tuned, control=control)

    def settled(state: MicrocanonicalState, trace: Any) -> MicrocanonicalState:
        tuned, control = state.tuned, state.control
        if kernel.step_size is None:
            mean = np.where(control.count > 0, np.exp(control.mean), tuned.step_size)
            tuned = tuned._replace(step_size=mean)
        return state._replace(tuned=tuned, adapting=np.zeros_like(state.adapting))

    def lengthened(state: MicrocanonicalState, trace: Any) -> MicrocanonicalState:
        longer = _SHARE * state.tuned.step_size * starting.correlated_steps(state, trace)
        length = np.where(np.isfinite(longer), longer, state.tuned.length)
        return state._replace(tuned=state.tuned._replace(length=length))

    return (
        Stage(first, forget),
        *(Stage(count, measured) for count in (early, late) if count),
        Stage(again, settled),
        *([Stage(last, lengthened, traced=True)] if last else []),
    )
