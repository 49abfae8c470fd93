"""Step size, metric and decoherence length of the microcanonical samplers."""

import math
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from scipy.fft import next_fast_len

from pyro_bdl.mcmc.microcanonical.integrator import PhasePoint

MOST_TRACED = 256  # numbers whose autocorrelation is measured
_MEMORY = 150.0  # steps over which the energy error is averaged
_TRUST = 1.5
_SMALLER = 0.8
_LARGER = 1.02
_LARGEST_FALL = -2.0  # of log h


Array: TypeAlias = Any  # of JAX in a chain, of numpy with an axis of chains between two stages


class Tuned(NamedTuple):
    """The settings of a chain.

    :param step_size: h.
    :param length: L, over which the momentum turns.
    :param root: M^(1/2), a diagonal (P,) or a symmetric matrix (P, P).
    """

    step_size: Array
    length: Array
    root: Array


class Moments(NamedTuple):
    """Weighted running mean and sum of squared deviations of positions and gradients, (2, P)."""

    weight: Array
    mean: Array
    squares: Array


def multiply(root: jax.Array, vector: jax.Array) -> jax.Array:
    """M^(1/2) times a vector."""
    return root * vector if root.ndim == 1 else root @ vector


def no_moments(position: jax.Array) -> Moments:
    zeros = jnp.zeros((2, len(position)), position.dtype)
    return Moments(jnp.zeros((), position.dtype), zeros, zeros)


def updated(moments: Moments, point: PhasePoint, weight: jax.Array) -> Moments:
    """Add a point; Welford's update, which does not cancel."""
    both = jnp.stack([point.position, point.gradient])
    total = moments.weight + weight
    off = both - moments.mean
    mean = moments.mean + jnp.where(total > 0, weight / jnp.where(total > 0, total, 1), 0) * off
    return Moments(total, mean, moments.squares + weight * off * (both - mean))


# Step size by the energy error ----------------------------------------------------------------


class EnergyControl(NamedTuple):
    """The adaptation's memory: the sum of weights, the step size that their average asks for, the
    largest one that is safe, the number of steps, and the weighted mean of log h."""

    weight: Array
    best: Array
    largest: Array
    count: Array
    mean: Array


def no_errors(size: Array) -> EnergyControl:
    """The memory before the first step, which is of this size."""
    zero = jnp.zeros_like(size)
    return EnergyControl(zero, zero + 1, zero + np.inf, zero, jnp.log(size))


def error_of(change: jax.Array, before: jax.Array, after: jax.Array, size: int) -> jax.Array:
    """The size of a step's energy change, as the step size must follow it.

    Without the part that may be rounding, which no smaller step takes away. Where log p grows by
    more than P nats in a step, the chain is far from the bulk, where steps change it by less than
    sqrt(P). The error then counts relative to the growth, so that large steps lead to the bulk.

    :param before: log p at the step's start; ``after``: at its end.
    """
    rounding = 4 * jnp.finfo(before.dtype).eps * jnp.abs(before)
    far = jnp.maximum((after - before) / size, 1)
    return jnp.maximum(jnp.abs(change) - rounding, 0) / far


def by_energy(
    control: EnergyControl, size: jax.Array, change: jax.Array, sound: jax.Array, target: float
) -> tuple[EnergyControl, jax.Array]:
    """The step size at which the energy variance per dimension is ``target``.

    The variance grows with h^6. Recent steps of any size h_i therefore estimate its factor::

        h = (sum w_i xi_i h_i^-6 / sum w_i)^(-1/6),    xi_i = (energy change)^2 / (P target)

    with weights w_i that fall where xi_i is far from 1, and fade over 150 steps.

    :param change: the energy's change in a step of size ``size``, see ``error_of``, divided by
        sqrt(P).
    :param sound: whether the step succeeded; if not, larger steps are not tried for a while.
    """
    fade = (_MEMORY - 1) / (_MEMORY + 1)
    xi = jnp.where(sound, change**2 / target, 1) + 1e-8
    weight = jnp.exp(-0.5 * (jnp.log(xi) / (6 * _TRUST)) ** 2)
    weights = fade * control.weight + weight
    mean = (fade * control.weight * (size / control.best) ** 6 + weight * xi) / weights
    best = size * mean ** (-1 / 6)
    largest = control.largest * _LARGER
    followed = control._replace(weight=weights, best=best, largest=largest)
    refused = control._replace(largest=jnp.minimum(control.largest, _SMALLER * size))
    control = jax.tree.map(lambda new, old: jnp.where(sound, new, old), followed, refused)
    size = jnp.minimum(jnp.where(sound, best, _SMALLER * size), control.largest)
    count = control.count + 1
    mean = control.mean + _recent(count) * (jnp.log(size) - control.mean)
    return control._replace(count=count, mean=mean), size


def _recent(count: jax.Array) -> jax.Array:
    """The weight of the latest number in a mean whose weights grow with the fourth power."""
    return jnp.minimum(5 / (count + 4), 1)


# Step size by the acceptance probability ------------------------------------------------------


class AcceptanceControl(NamedTuple):
    """The adaptation's memory: iterations, sign changes of the error, the last error, log h, and
    its weighted mean."""

    count: Array
    turns: Array
    error: Array
    log_size: Array
    mean: Array


def no_acceptances(size: Array) -> AcceptanceControl:
    zero, log_size = jnp.zeros_like(size), jnp.log(size)
    return AcceptanceControl(zero, zero, zero, log_size, log_size)


def by_acceptance(
    control: AcceptanceControl, probability: jax.Array, target: float, largest: jax.Array
) -> tuple[AcceptanceControl, jax.Array]:
    """The next step size on the way to a mean acceptance probability of ``target``.

    A stochastic approximation with the gain of Kesten (1958), which falls only when the error
    changes its sign, so that a step size far off is left fast::

        log h <- log h + max(-2, (a - t) / (4 t (1 - t) sqrt(1 + m)))

    with a the acceptance probability, t its target, and m sign changes so far. The step size to
    keep has the mean of log h with weights that grow with the fourth power of the iteration.

    Dual averaging (Hoffman & Gelman 2014) has a gain of about 20 / sqrt(i) at iteration i. A single
    trajectory's probability is so noisy that log h then spreads by more than 1, and the probability
    at its mean lies above the target: by 0.1 after 60 iterations for a target of 0.65.

    :param largest: the largest step size. The probability above it may lie below the target.
    """
    count = control.count + 1
    error = (probability - target) / (4 * target * (1 - target))
    turns = control.turns + (error * control.error < 0)
    log_size = control.log_size + jnp.maximum(error / jnp.sqrt(1 + turns), _LARGEST_FALL)
    log_size = jnp.minimum(log_size, jnp.log(largest))
    mean = control.mean + _recent(count) * (log_size - control.mean)
    return AcceptanceControl(count, turns, error, log_size, mean), jnp.exp(log_size)


# The ends of phases ---------------------------------------------------------------------------


def metric(moments: Moments, tuned: Tuned) -> Tuned:
    """The settings with the measured metric; arrays of numpy (chains, ...).

    Of each number, with g its gradient::

        M = sqrt(Var x / Var g)

    which is the variance for independent Normal numbers, and in general the diagonal metric in
    which the density is nearest to a standard Normal in Fisher divergence (Seyboldt, Carlson &
    Carpenter 2026, arXiv 2603.18845). The gradients know the stiff directions after a few draws,
    where the variances of a chain that moves slowly are much too small.

    L is sqrt(P). The step size is converted to the new units at the number whose unit grows most,
    so that it is rather too small.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        root = (moments.squares[:, 0] / moments.squares[:, 1]) ** 0.25
    root = np.where(np.isfinite(root) & (root > 0), root, 1.0)
    size = tuned.step_size * (tuned.root / root).min(-1)
    return Tuned(size, np.full_like(tuned.length, math.sqrt(root.shape[-1])), root)


def autocorrelation_time(trace: np.ndarray) -> np.ndarray:
    """tau (chains,): the number of steps of one independent draw, averaged over the numbers that
    moved; NaN if none did.

    :param trace: positions (chains, steps, numbers).
    """
    count = trace.shape[1]
    centered = (trace - trace.mean(1, keepdims=True)).astype(np.float64)
    padded = next_fast_len(2 * count, real=True)
    spectrum = np.fft.rfft(centered, padded, axis=1)
    covariance = np.fft.irfft(np.abs(spectrum) ** 2, padded, axis=1)[:, :count]
    moved = covariance[:, 0] > 0
    rho = covariance / np.where(moved, covariance[:, 0], 1)[:, None]
    pairs = rho[:, 0 : count - 1 : 2] + rho[:, 1:count:2]
    positive = np.minimum.accumulate(pairs > 0, axis=1)  # Geyer's initial sequence
    pairs = np.minimum.accumulate(np.where(positive, pairs, 0), axis=1)
    tau = np.maximum(2 * pairs.sum(1) - 1, 1.0)
    return np.where(moved, tau, 0).sum(1) / np.where(moved.any(1), moved.sum(1), np.nan)


def traced_numbers(size: int) -> slice:
    """The numbers of a vector (P,) whose autocorrelation is measured, evenly spaced."""
    return slice(0, size, -(-size // MOST_TRACED))


def phases(num_warmup: int, fractions: tuple[float, ...]) -> tuple[int, ...]:
    """The iterations of each phase: the first has at least one, the last takes the rest."""
    counts = [round(fraction * num_warmup) for fraction in fractions]
    counts[0] = max(counts[0], min(num_warmup, 1))
    return *counts, max(num_warmup - sum(counts), 0)


def root_of(inverse_mass: Any) -> np.ndarray:
    """M^(1/2) of a diagonal (P,) or a covariance matrix (P, P)."""
    inverse_mass = np.asarray(inverse_mass)
    if inverse_mass.ndim == 1:
        return np.sqrt(inverse_mass)
    values, vectors = np.linalg.eigh(inverse_mass)
    return (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
