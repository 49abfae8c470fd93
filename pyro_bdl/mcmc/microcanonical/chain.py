"""The state of a microcanonical chain, and the warm-up that both samplers share.

The warm-up has three phases, as in Robnik & Seljak (2024), arXiv 2303.18221, section 5:

1. The step size h follows the energy error (``mclmc``) or the acceptance probability (``mams``),
   while the chain finds the bulk of the posterior.
2. The same, and the variances of all numbers and of their gradients are measured in two windows.
   After each they give the metric, see ``tuning.metric``, and L = sqrt(P) in its units.
3. L is set to a multiple of the autocorrelation length that the chain has with these. ``mams``
   adapts its step size after this, since the acceptance of a trajectory depends on its length.

At the end of each stage the step size is the mean of its logarithm, and its adaptation starts anew.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pyro_bdl.mcmc.chains import Plan
from pyro_bdl.mcmc.kernels import Kernel
from pyro_bdl.mcmc.microcanonical import integrator, tuning
from pyro_bdl.mcmc.microcanonical.integrator import PhasePoint
from pyro_bdl.mcmc.microcanonical.tuning import Array, Moments, Tuned
from pyro_bdl.mcmc.run import TRACE, Stage, Transition

LARGEST_CHANGE = 1000.0  # nats of energy in a step or trajectory, as in NUTS


class State(NamedTuple):
    """One chain.

    :param adapting: 1 while the step size is adapted, else 0.
    :param control: averages of the adaptation; ``moments``: of the points.
    :param own: what the sampler stores besides.
    """

    key: Array
    point: PhasePoint
    tuned: Tuned
    adapting: Array
    control: Any
    moments: Moments
    own: Any


class Microcanonical(ABC):
    """A microcanonical sampler as a ``Transition``.

    :cvar phases: the stages of the warm-up with their shares of it; the last one takes the rest. At
        the end of "metric" the metric is measured, at that of "length" L, and at that of "settle"
        the adaptation ends.
    :raises ValueError: for fewer than two numbers, whose momentum could not turn.
    """

    phases: ClassVar[tuple[tuple[str, float], ...]]

    def __init__(
        self, log_density: Callable[[jax.Array], jax.Array], kernel: Kernel, plan: Plan, size: int
    ) -> None:
        if size < 2:
            raise ValueError(
                "the microcanonical samplers need a posterior of at least two numbers, since the "
                "momentum's direction is all that moves: use kernel='nuts'"
            )
        self.density, self.plan, self.size = jax.value_and_grad(log_density), plan, size
        self.fixed_size, self.metric = kernel.step_size, kernel.inverse_mass
        self.numbers = tuning.traced_numbers(size)

    @abstractmethod
    def own(self, start: jax.Array) -> Any:
        """The sampler's own part of the state, before the metric is measured."""

    def own_after_metric(self, own: Any) -> Any:
        return own

    @abstractmethod
    def control(self, step_size: Array) -> Any:
        """The memory of the adaptation before its first step."""

    @abstractmethod
    def length(self, tuned: Tuned, tau: np.ndarray) -> np.ndarray:
        """L for an autocorrelation time in steps of the trace."""

    @abstractmethod
    def step(self, state: State) -> tuple[State, dict[str, jax.Array]]:
        """One iteration."""

    def transition(self) -> Transition:
        return Transition(self.init, self.step, self.warmup())

    def init(self, key: jax.Array, start: jax.Array) -> State:
        key, first = jax.random.split(key)
        value, gradient = self.density(start)
        root = np.ones(self.size) if self.metric is None else tuning.root_of(self.metric)
        zero = jnp.zeros((), start.dtype)
        step_size = zero + (self.fixed_size or 0.05 * math.sqrt(self.size))
        adapts = self.fixed_size is None and self.plan.num_warmup > 0
        return State(
            key,
            PhasePoint(start, integrator.random_direction(first, start), value, gradient),
            Tuned(step_size, zero + math.sqrt(self.size), jnp.asarray(root, start.dtype)),
            zero + adapts,
            self.control(step_size),
            tuning.no_moments(start),
            self.own(start),
        )

    def root(self, tuned: Tuned) -> Callable[[jax.Array], jax.Array]:
        return partial(tuning.multiply, tuned.root)

    def draw(self, state: State, trace: jax.Array, **stats: jax.Array) -> dict[str, jax.Array]:
        return {
            "vector": state.point.position,
            "potential_energy": -state.point.log_density,
            "step_size": state.tuned.step_size,
            "momentum_length": state.tuned.length,
            TRACE: trace,
            **stats,
        }

    def warmup(self) -> tuple[Stage, ...]:
        if self.plan.num_warmup == 0:
            return ()
        purposes, shares = zip(*self.phases, strict=True)
        counts = tuning.phases(self.plan.num_warmup, shares[:-1])
        return tuple(
            Stage(count, partial(self._finish, purpose), traced=purpose == "length")
            for purpose, count in zip(purposes, counts, strict=True)
            if count or purpose == "settle"
        )

    def _finish(self, purpose: str, state: State, trace: Any) -> State:
        """The state after a stage; arrays of numpy with an axis of chains."""
        tuned, own = state.tuned._replace(step_size=np.exp(state.control.mean)), state.own
        if purpose == "metric":
            own = self.own_after_metric(own)
            if self.metric is None:
                tuned = tuning.metric(state.moments, tuned)
        if purpose == "length":
            tau = tuning.autocorrelation_time(trace.reshape(len(trace), -1, trace.shape[-1]))
            length = self.length(tuned, tau)
            tuned = tuned._replace(length=np.where(np.isfinite(length), length, tuned.length))
        if self.fixed_size is not None:
            tuned = tuned._replace(step_size=state.tuned.step_size)
        return state._replace(
            tuned=tuned,
            adapting=state.adapting * (purpose != "settle"),
            control=self.control(tuned.step_size),
            moments=jax.tree.map(np.zeros_like, state.moments),
            own=own,
        )


def diverges(change: jax.Array) -> jax.Array:
    """Return whether an energy change says that the integrator failed."""
    return ~(jnp.abs(change) <= LARGEST_CHANGE)


def tree_where(condition: jax.Array, new: Any, old: Any) -> Any:
    """The arrays of one of two trees."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
