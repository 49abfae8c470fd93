"""The first state of a chain, and the helpers that both samplers share."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pyro_bdl.mcmc.kernels import Kernel
from pyro_bdl.mcmc.microcanonical import integrator, tuning
from pyro_bdl.mcmc.microcanonical.integrator import PhasePoint, ValueAndGradient
from pyro_bdl.mcmc.microcanonical.tuning import Moments, Tuned

LARGEST_CHANGE = 1000.0  # nats of energy in a step or trajectory, as in NUTS


def at_start(
    density: ValueAndGradient, kernel: Kernel, key: jax.Array, start: jax.Array
) -> tuple[jax.Array, PhasePoint, Tuned]:
    """Key, point and settings of one chain at a position (P,).

    :raises ValueError: for fewer than two numbers, whose momentum could not turn.
    """
    size = len(start)
    if size < 2:
        raise ValueError(
            "the microcanonical samplers need a posterior of at least two numbers, since the "
            "momentum's direction is all that moves: use kernel='nuts'"
        )
    key, first = jax.random.split(key)
    value, gradient = density(start)
    point = PhasePoint(start, integrator.random_direction(first, start), value, gradient)
    if kernel.inverse_mass is None:
        root = jnp.ones_like(start)
    else:
        root = jnp.asarray(tuning.root_of(kernel.inverse_mass), start.dtype)
    step_size = kernel.step_size or 0.05 * math.sqrt(size)
    length = jnp.asarray(math.sqrt(size), start.dtype)
    tuned = Tuned(jnp.asarray(step_size, start.dtype), length, root)
    return key, point, tuned


def diverges(change: jax.Array) -> jax.Array:
    """Return whether an energy change says that the integrator failed."""
    return ~(jnp.abs(change) <= LARGEST_CHANGE)


def measured(kernel: Kernel, moments: Moments, tuned: Tuned) -> Tuned:
    """The settings with the measured metric, unless one was given; a given step size stays."""
    if kernel.inverse_mass is not None:
        return tuned
    metric = tuning.metric(moments, tuned)
    return metric if kernel.step_size is None else metric._replace(step_size=tuned.step_size)


def correlated_steps(state: Any, trace: Any) -> Any:
    """The autocorrelation time (chains,) of a trace (chains, iterations, ..., numbers)."""
    return tuning.autocorrelation_time(trace.reshape(len(state.key), -1, trace.shape[-1]))


def each_chain(init: Callable[[jax.Array, jax.Array], Any]) -> Callable:
    """``init`` of one chain, or of each of several."""

    def whole(keys: jax.Array, starts: jax.Array) -> Any:
        return jax.jit(jax.vmap(init) if starts.ndim == 2 else init)(keys, starts)

    return whole
