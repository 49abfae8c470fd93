"""``mams``: the Metropolis-adjusted microcanonical sampler, exact at every step size.

An iteration draws a momentum uniform on the sphere, follows the integrator for N steps, and accepts
the end with probability ``min(1, exp(-energy change))``. The integrator is reversible, and the
energy contains the logarithm of its change of volume, so that the positions' density is p. The
number of steps is random, so that no trajectory closes on itself::

    N = ceil(2 r L / h),    r ~ Uniform(0, 1), the same r for all chains

Source: Robnik, Cohn-Gordon & Seljak (2025), Metropolis adjusted microcanonical Hamiltonian Monte
Carlo, arXiv 2503.01707.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pyro_bdl.mcmc.chains import Plan
from pyro_bdl.mcmc.kernels import MAMS
from pyro_bdl.mcmc.microcanonical import integrator, tuning
from pyro_bdl.mcmc.microcanonical.chain import Microcanonical, State, diverges, tree_where
from pyro_bdl.mcmc.microcanonical.tuning import AcceptanceControl, Array, Tuned

# L grows to this share of the autocorrelation length; sqrt(P) is right for independent numbers.
_SHARE = 0.3
# The largest h / sqrt(P). On many standard Normals nothing is accepted from 2 on, and effective
# draws per gradient fall from here; there the acceptance stays above a low target.
_LONGEST = 1.8
# The keys of the chains are those of split, which folds in the numbers of the chains.
_LENGTHS = 2**32 - 1
_EARLY = 64  # the mean number of steps at most, before the metric is known


class Trajectories(NamedTuple):
    """The key of the trajectories' lengths, the same for all chains, and the largest L / h."""

    key: Array
    limit: Array


class Adjusted(Microcanonical):
    """The sampler; an iteration is a trajectory. Its own part of the state: ``Trajectories``."""

    phases = (("", 0.15), ("metric", 0.2), ("metric", 0.25), ("length", 0.15), ("settle", 0.25))

    def __init__(self, log_density: Any, kernel: MAMS, plan: Plan, size: int) -> None:
        super().__init__(log_density, kernel, plan, size)
        self.most, self.target = kernel.max_steps, kernel.target_accept

    def own(self, start: jax.Array) -> Trajectories:
        key = jax.random.fold_in(jax.random.PRNGKey(self.plan.seed), _LENGTHS)
        early = min(_EARLY, self.most) if self.plan.num_warmup else self.most
        return Trajectories(key, jnp.asarray(early, start.dtype))

    def own_after_metric(self, own: Trajectories) -> Trajectories:
        return own._replace(limit=np.full_like(own.limit, self.most))

    def control(self, step_size: Array) -> AcceptanceControl:
        return tuning.no_acceptances(step_size)

    def length(self, tuned: Tuned, tau: np.ndarray) -> np.ndarray:
        return tuned.length * np.maximum(_SHARE * tau, 1)

    def step(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        key, direction, coin = jax.random.split(state.key, 3)
        lengths, share = jax.random.split(state.own.key)
        tuned = state.tuned
        mean = jnp.minimum(tuned.length / tuned.step_size, state.own.limit)
        steps = jnp.ceil(2 * jax.random.uniform(share, dtype=mean.dtype) * mean).astype(jnp.int32)
        steps = jnp.clip(steps, 1, 2 * self.most)
        momentum = integrator.random_direction(direction, state.point.position)
        start = state.point._replace(momentum=momentum)

        def forward(i: Any, carry: Any) -> Any:
            point, total = carry
            point, change = integrator.step(self.density, self.root(tuned), point, tuned.step_size)
            return point, total + change

        end, change = jax.lax.fori_loop(0, steps, forward, (start, jnp.zeros_like(mean)))
        sound = jnp.isfinite(change) & jnp.isfinite(end.gradient).all()
        accept = jnp.where(sound, jnp.exp(jnp.minimum(-change, 0)), 0)
        taken = jax.random.uniform(coin, dtype=accept.dtype) < accept
        point = tree_where(taken, end, start)
        control, step_size = tree_where(
            state.adapting > 0,
            tuning.by_acceptance(state.control, accept, self.target, _LONGEST * self.size**0.5),
            (state.control, tuned.step_size),
        )
        state = state._replace(
            key=key,
            point=point,
            tuned=tuned._replace(step_size=step_size),
            control=control,
            moments=tuning.updated(state.moments, point, jnp.ones_like(mean)),
            own=state.own._replace(key=lengths),
        )
        return state, self.draw(
            state, point.position[self.numbers], num_steps=steps * integrator.GRADIENTS,
            accept_prob=accept, diverging=~sound | diverges(change),
        )  # fmt: skip
