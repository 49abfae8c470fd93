"""``mclmc``: microcanonical Langevin Monte Carlo, unadjusted.

Each step of the integrator is followed by a partial refreshment of the momentum. There is no
Metropolis step: the error of the step size stays in the draws, as a bias. It is controlled by the
variance of the energy error per dimension, ``E[(energy change)^2] / P``, whose target is an
argument and whose reached value is the statistic ``energy_variance``. For a Normal target the bias
of the variances, relative and squared, is about as large as this number (Robnik & Seljak 2024,
section 4).

One step size cannot suit kinks, necks and tips as well as the bulk. A step whose energy error is
above five deviations of the target is taken in parts, see ``integrator.divided_step``.

Source: Robnik & Seljak (2024), Fluctuation without dissipation, arXiv 2303.18221.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pyro_bdl.mcmc.chains import Plan
from pyro_bdl.mcmc.kernels import MCLMC
from pyro_bdl.mcmc.microcanonical import integrator, tuning
from pyro_bdl.mcmc.microcanonical.chain import LARGEST_CHANGE, Microcanonical, State, tree_where
from pyro_bdl.mcmc.microcanonical.tuning import Array, EnergyControl, Tuned

_SHARE = 0.4  # of the autocorrelation length that is L
# An energy error above so many of the deviations that are asked for is large: the step is taken in
# parts, and the step size sees this much of the error, so that rare kinks do not make it small.
_LARGE = 5.0


class Langevin(Microcanonical):
    """The sampler; an iteration is ``kernel.thinning`` steps.

    Its own part of the state is the part with which the next step begins, see
    ``integrator.divided_step``.
    """

    phases = (("", 0.2), ("metric", 0.15), ("metric", 0.2), ("settle", 0.1), ("length", 0.35))

    def __init__(self, log_density: Any, kernel: MCLMC, plan: Plan, size: int) -> None:
        super().__init__(log_density, kernel, plan, size)
        self.steps, self.target = kernel.thinning, kernel.energy_variance
        self.large = min(_LARGE * (size * self.target) ** 0.5, LARGEST_CHANGE)

    def own(self, start: jax.Array) -> jax.Array:
        return jnp.asarray(integrator.WHOLE, jnp.int32)

    def control(self, step_size: Array) -> EnergyControl:
        return tuning.no_errors(step_size)

    def length(self, tuned: Tuned, tau: np.ndarray) -> np.ndarray:
        return _SHARE * tuned.step_size * tau

    def step(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        key, own = jax.random.split(state.key)
        position = state.point.position
        shape = self.steps, *position.shape
        noise = jax.random.normal(own, shape, position.dtype)  # at once: faster
        state, (trace, squares, lost, gradients) = jax.lax.scan(
            self._one, state._replace(key=key), noise
        )
        return state, self.draw(
            state, trace, num_steps=gradients.sum(dtype=jnp.int32),
            energy_variance=squares.mean(), diverging=lost.any(),
        )  # fmt: skip

    def _one(self, state: State, noise: jax.Array) -> Any:
        """One step of the integrator, and a partial refreshment of the momentum."""
        point, tuned = state.point, state.tuned
        moved, change, error, part, lost, gradients = integrator.divided_step(
            self.density, self.root(tuned), point, tuned.step_size,
            partial(tuning.error_of, size=self.size), self.large, LARGEST_CHANGE, state.own,
        )  # fmt: skip
        share = tuned.step_size / tuned.length
        turned = moved._replace(momentum=integrator.refreshed(noise, moved.momentum, share))
        point = tree_where(lost, point._replace(momentum=-point.momentum), turned)
        change = jnp.where(lost, 0, change) / jnp.sqrt(self.size)
        error = jnp.minimum(error, self.large) / jnp.sqrt(self.size)
        control, step_size = tree_where(
            state.adapting > 0,
            tuning.by_energy(state.control, tuned.step_size, error, ~lost, self.target),
            (state.control, tuned.step_size),
        )
        state = state._replace(
            point=point,
            tuned=tuned._replace(step_size=step_size),
            control=control,
            moments=tuning.updated(state.moments, point, jnp.where(lost, 0, tuned.step_size)),
            own=part,
        )
        return state, (point.position[self.numbers], change**2, lost, gradients)
