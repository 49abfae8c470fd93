"""``mams``: the Metropolis-adjusted microcanonical sampler, exact at every step size.

An iteration draws a momentum uniform on the sphere, follows the integrator for N steps, and accepts
the end with probability ``min(1, exp(-energy change))``. The integrator is reversible, and the
energy contains the logarithm of its change of volume, so that the positions' density is p. The
number of steps is random, so that no trajectory closes on itself::

    N = ceil(2 r L / h),    r ~ Uniform(0, 1), the same r for all chains

Source: Robnik, Cohn-Gordon & Seljak (2025), Metropolis adjusted microcanonical Hamiltonian Monte
Carlo, arXiv 2503.01707.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pyro_bdl.mcmc.chains import Plan
from pyro_bdl.mcmc.kernels import MAMS
from pyro_bdl.mcmc.microcanonical import integrator, starting, tuning
from pyro_bdl.mcmc.microcanonical.integrator import PhasePoint
from pyro_bdl.mcmc.microcanonical.starting import at_start, diverges, each_chain
from pyro_bdl.mcmc.microcanonical.tuning import AcceptanceControl, Array, Moments, Tuned
from pyro_bdl.mcmc.run import TRACE, Stage, Transition

# L grows to this share of the autocorrelation length; sqrt(P) is right for independent numbers.
_SHARE = 0.3
# Shares of the warm-up: phase 1, the two windows of phase 2, the trace that finds L. The rest
# settles h.
_PHASES = (0.15, 0.2, 0.25, 0.15)
# The largest h / sqrt(P). On many standard Normals nothing is accepted from 2 on, and effective
# draws per gradient fall from here; there the acceptance stays above a low target.
_LONGEST = 1.8
# The keys of the chains are those of split, which folds in the numbers of the chains.
_LENGTHS = 2**32 - 1
_EARLY = 64  # the mean number of steps at most, before the metric is known


class AdjustedState(NamedTuple):
    """One chain.

    :param lengths: the key of the trajectories' lengths, the same for all chains.
    :param adapting: 1 while the step size is adapted, else 0; ``limit``: the largest L / h.
    :param trace: some numbers of the position, (1, numbers).
    """

    key: Array
    lengths: Array
    point: PhasePoint
    tuned: Tuned
    adapting: Array
    limit: Array
    control: AcceptanceControl
    moments: Moments
    trace: Array
    accept: Array
    steps: Array
    diverged: Array


def transition(
    log_density: Callable[[jax.Array], jax.Array], kernel: MAMS, plan: Plan, size: int
) -> Transition:
    """The sampler; an iteration is a trajectory."""
    density = jax.value_and_grad(log_density)
    numbers = tuning.traced_numbers(size)
    most, target = kernel.max_steps, kernel.target_accept

    def init(key: jax.Array, start: jax.Array) -> AdjustedState:
        key, point, tuned = at_start(density, kernel, key, start)
        zero = jnp.zeros((), start.dtype)
        adapting = 1.0 if kernel.step_size is None else 0.0
        early = min(_EARLY, most) if plan.num_warmup else most
        return AdjustedState(
            key,
            jax.random.fold_in(jax.random.PRNGKey(plan.seed), _LENGTHS),
            point,
            tuned,
            zero + adapting,
            zero + early,
            tuning.no_acceptances(tuned.step_size),
            tuning.no_moments(start),
            start[numbers][None],
            zero,
            jnp.zeros((), jnp.int32),
            zero > 0,
        )

    def iteration(state: AdjustedState) -> AdjustedState:
        key, direction, coin = jax.random.split(state.key, 3)
        lengths, share = jax.random.split(state.lengths)
        tuned = state.tuned
        mean = jnp.minimum(tuned.length / tuned.step_size, state.limit)
        steps = jnp.ceil(2 * jax.random.uniform(share, dtype=mean.dtype) * mean).astype(jnp.int32)
        steps = jnp.clip(steps, 1, 2 * most)
        momentum = integrator.random_direction(direction, state.point.position)
        start = state.point._replace(momentum=momentum)

        def forward(i: Any, carry: Any) -> Any:
            point, total = carry
            point, change = integrator.step(
                density, lambda v: tuning.multiply(tuned.root, v), point, tuned.step_size
            )
            return point, total + change

        end, change = jax.lax.fori_loop(0, steps, forward, (start, jnp.zeros_like(mean)))
        sound = jnp.isfinite(change) & jnp.isfinite(end.gradient).all()
        accept = jnp.where(sound, jnp.exp(jnp.minimum(-change, 0)), 0)
        taken = jax.random.uniform(coin, dtype=accept.dtype) < accept
        point = jax.tree.map(lambda new, old: jnp.where(taken, new, old), end, start)
        control, step_size = jax.tree.map(
            lambda new, old: jnp.where(state.adapting > 0, new, old),
            tuning.by_acceptance(state.control, accept, target, _LONGEST * size**0.5),
            (state.control, tuned.step_size),
        )
        return AdjustedState(
            key,
            lengths,
            point,
            tuned._replace(step_size=step_size),
            state.adapting,
            state.limit,
            control,
            tuning.updated(state.moments, point, jnp.ones_like(mean)),
            point.position[numbers][None],
            accept,
            steps,
            ~sound | diverges(change),
        )

    def draw(state: AdjustedState) -> dict[str, jax.Array]:
        return {
            "vector": state.point.position,
            "potential_energy": -state.point.log_density,
            "num_steps": state.steps * integrator.GRADIENTS,
            "accept_prob": state.accept,
            "step_size": state.tuned.step_size,
            "momentum_length": state.tuned.length,
            "diverging": state.diverged,
            TRACE: state.trace,
        }

    def step(state: AdjustedState) -> AdjustedState:
        return (jax.vmap(iteration) if state.point.position.ndim == 2 else iteration)(state)

    return Transition(each_chain(init), step, draw, _warmup(kernel, plan.num_warmup))


def _warmup(kernel: MAMS, num_warmup: int) -> tuple[Stage, ...]:
    first, early, late, traced, last = tuning.phases(num_warmup, _PHASES)
    if num_warmup == 0:
        return ()

    def averaged(state: AdjustedState) -> Tuned:
        if kernel.step_size is not None:
            return state.tuned
        return state.tuned._replace(step_size=np.exp(state.control.mean))

    def restarted(state: AdjustedState, tuned: Tuned) -> AdjustedState:
        return state._replace(tuned=tuned, control=tuning.no_acceptances(tuned.step_size))

    def forget(state: AdjustedState, trace: Any = None) -> AdjustedState:
        moments = jax.tree.map(np.zeros_like, state.moments)
        return restarted(state, averaged(state))._replace(moments=moments)

    def measured(state: AdjustedState, trace: Any) -> AdjustedState:
        tuned = starting.measured(kernel, state.moments, averaged(state))
        limit = np.full_like(state.limit, kernel.max_steps)
        return restarted(forget(state), tuned)._replace(limit=limit)

    def lengthened(state: AdjustedState, trace: Any) -> AdjustedState:
        tuned = averaged(state)
        longer = tuned.length * _SHARE * starting.correlated_steps(state, trace)
        length = np.where(np.isfinite(longer), np.maximum(longer, tuned.length), tuned.length)
        return restarted(state, tuned._replace(length=length))

    def settled(state: AdjustedState, trace: Any) -> AdjustedState:
        return state._replace(tuned=averaged(state), adapting=np.zeros_like(state.adapting))

    return (
        Stage(first, forget),
        *(Stage(count, measured) for count in (early, late) if count),
        *([Stage(traced, lengthened, traced=True)] if traced else []),
        Stage(last, settled),
    )
