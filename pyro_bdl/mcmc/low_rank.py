"""A metric of the scales of all numbers and the correlations of a few directions, for any kernel.

A kernel moves in the units u of a linear map, adapted in rounds::

    x = T u,    T = S (I + U (Lambda^(1/2) - I) U'),    T T' = S (I + U (Lambda - I) U') S

with S a diagonal, U (P, R) orthonormal, and at most 64 eigenvalues Lambda other than 1. The warm-up
is the kernel's own, several times over; between two of them draws x and gradients g are recorded.
In the density that T makes nearest to a standard Normal in Fisher divergence, draws and gradients
have the same covariance up to their sign. Hence S^2 = sqrt(Var x / Var g) for each number, and in
these units Sigma Cov(g) Sigma = Cov(x), whose solution is the geometric mean of the covariance of
the draws and the inverse of the gradients'.

Source: Seyboldt, Carlson & Carpenter (2026), arXiv 2603.18845. Their directions and eigenvalues are
of the same draws, with a prior that draws the latter to 1; here, of two halves.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from pyro_bdl.mcmc.chains import Plan
from pyro_bdl.mcmc.kernels import Hamiltonian, Kernel
from pyro_bdl.mcmc.run import TRACE, Stage, Transition

MOST = 64  # directions
_LEAST = 2.0  # the eigenvalue, or its inverse, of a direction that is worth its multiplications
_PRIOR_DRAWS = 1e-3  # so many draws of a standard Normal keep the covariances regular
_MOST_DRAWS = 512  # that are decomposed
# The shares of the warm-up: the kernel's own, and three times as often as the draws between them.
_ADAPTING, _MEASURED = 0.2, (0.1, 0.3)

Array: TypeAlias = Any  # of JAX in a chain, of numpy with an axis of chains between two stages


class Map(NamedTuple):
    """T: the scales S (P,), the directions U (P, R), and Lambda^(1/2) - 1 (R,)."""

    scale: Array
    directions: Array
    growth: Array


class State(NamedTuple):
    """One chain: the kernel's state in the units of the map.

    :param recording: 1 in the warm-up, where gradients are recorded, else 0.
    """

    key: Array
    inner: Any
    map: Map
    recording: Array


def identity(size: int) -> Map:
    rank = min(size, MOST)
    return Map(np.ones(size), np.zeros((size, rank)), np.zeros(rank))


def applied(map: Map, u: Any) -> Any:
    """x = T u."""
    return map.scale * (u + map.directions @ (map.growth * (map.directions.T @ u)))


def solved(map: Map, x: Any) -> Any:
    """u = T^-1 x."""
    u = x / map.scale
    return u - map.directions @ (map.growth / (1 + map.growth) * (map.directions.T @ u))


def measured(draws: np.ndarray, gradients: np.ndarray) -> Map:
    """The map of draws and of the gradients of the log density there, both (draws, P).

    Numbers that did not move, or whose gradients did not, have the scale 1. The directions are
    eigenvectors, in the span of draws and gradients, of the first half; their eigenvalues are
    ratios of deviations in the second half, since those of the half that has chosen a direction
    exaggerate it: of few draws of a standard Normal the largest eigenvalue is far above 1.
    """
    every = -(-len(draws) // _MOST_DRAWS)
    x, g = (np.asarray(v[::every], np.float64) for v in (draws, gradients))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scale = np.sqrt(x.std(0) / g.std(0))
    sound = np.isfinite(scale) & (scale > 0)
    scale = np.where(sound, scale, 1.0)
    x, g = np.where(sound, x / scale, 0), np.where(sound, g * scale, 0)
    half = len(x) // 2
    first = [v[:half] - v[:half].mean(0) for v in (x, g)]
    basis = np.linalg.svd(np.concatenate(first), full_matrices=False)[2].T
    total = half + _PRIOR_DRAWS
    own = _PRIOR_DRAWS / total * np.eye(basis.shape[1])
    of_draws, of_gradients = (own + v.T @ v / total for v in (part @ basis for part in first))
    vectors = basis @ np.linalg.eigh(_geometric_mean(of_draws, of_gradients))[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        values = (x[half:] @ vectors).std(0) / (g[half:] @ vectors).std(0)
    log = np.abs(np.log(np.where(np.isfinite(values) & (values > 0), values, 1.0)))
    chosen = np.argsort(-log)[:MOST]
    chosen = chosen[log[chosen] > np.log(_LEAST)]
    result = identity(x.shape[1])
    result.scale[:] = scale
    result.directions[:, : len(chosen)] = vectors[:, chosen]
    result.growth[: len(chosen)] = np.sqrt(values[chosen]) - 1
    return result


def _geometric_mean(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The positive definite solution of X B X = A."""
    root, inverse = _power(b, 0.5), _power(b, -0.5)
    return inverse @ _power(root @ a @ root, 0.5) @ inverse


def _power(matrix: np.ndarray, exponent: float) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.maximum(values, np.finfo(float).tiny) ** exponent) @ vectors.T


def transition(
    kernel: Kernel, log_density: Callable[[jax.Array], jax.Array], plan: Plan, size: int
) -> Transition:
    """The kernel with this metric, see ``Kernel.transition``."""
    own_plan = plan._replace(num_warmup=int(_ADAPTING * plan.num_warmup))
    gradient = jax.grad(log_density)
    if isinstance(kernel, Hamiltonian):  # its variances would undo scales that know the gradients
        kernel = replace(kernel, inverse_mass=np.ones(size), low_rank=False)

    def inner(map: Map) -> Transition:
        return kernel.transition(lambda u: log_density(applied(map, u)), own_plan, size)

    def init(key: jax.Array, start: jax.Array) -> State:
        key, own = jax.random.split(key)
        map = jax.tree.map(lambda v: jnp.asarray(v, start.dtype), identity(size))
        recording = jnp.asarray(plan.num_warmup > 0)
        return State(key, inner(map).init(own, start), map, recording)

    def step(state: State) -> tuple[State, dict[str, jax.Array]]:
        moved, draw = inner(state.map).step(state.inner)
        x = applied(state.map, draw["vector"])
        g = jax.lax.cond(state.recording, gradient, jnp.zeros_like, x)
        own = draw.get(TRACE, jnp.zeros(0, x.dtype)).reshape(-1)
        trace = jnp.concatenate([x, g, own])
        return state._replace(inner=moved), draw | {"vector": x, TRACE: trace}

    @jax.jit
    @jax.vmap
    def restarted(state: State, map: Map, x: jax.Array) -> State:
        key, own = jax.random.split(state.key)
        return State(key, inner(map).init(own, solved(map, x)), map, state.recording)

    def remeasured(state: State, trace: np.ndarray) -> State:
        x, g = trace[..., :size], trace[..., size : 2 * size]
        maps = [measured(*pair) for pair in zip(x, g, strict=True)]
        map = Map(*(np.stack(v).astype(x.dtype) for v in zip(*maps, strict=True)))
        return jax.tree.map(np.asarray, restarted(state, map, x[:, -1]))

    def own_stage(stage: Stage) -> Stage:
        own_finish = stage.finish
        if own_finish is None:
            return stage

        def finish(state: State, trace: np.ndarray) -> State:
            own = None
            if stage.traced:
                shape = jax.eval_shape(inner(identity(size)).step, one(state).inner)[1][TRACE].shape
                own = trace[..., 2 * size :].reshape(*trace.shape[:2], *shape)
            return state._replace(inner=own_finish(state.inner, own))

        return Stage(stage.iterations, finish, stage.traced)

    def one(state: State) -> State:
        return jax.tree.map(lambda v: v[0], state)

    def settled(state: State, trace: Any) -> State:
        return state._replace(recording=np.zeros_like(state.recording))

    own = [own_stage(stage) for stage in inner(identity(size)).warmup]
    counts = [int(share * plan.num_warmup) for share in _MEASURED]
    stages = [
        stage for count in counts if count > 1 for stage in [*own, Stage(count, remeasured, True)]
    ]
    rest = plan.num_warmup - sum(s.iterations for s in [*stages, *own])
    return Transition(init, step, (*stages, *own, Stage(rest, settled)))
