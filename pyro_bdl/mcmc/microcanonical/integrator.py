"""The isokinetic dynamics of a position with a momentum of unit length, and its integrator.

    dx/dt = M^(1/2) u,    du/dt = (I - u u') M^(1/2) grad log p(x) / (P - 1),    |u| = 1

with P numbers in x and M an estimate of their covariance. Along the exact flow
``(P - 1) kappa - log p(x)`` is constant, where kappa is the logarithm of the speed that the unit
momentum leaves out; with momenta uniform on the sphere the positions have density p. The
integrator's error of this energy is what the samplers control.

Each of the two parts is solved exactly, and they are composed symmetrically as in McLachlan's
second-order scheme, which takes two gradients a step::

    B(b h)  A(h / 2)  B((1 - 2 b) h)  A(h / 2)  B(b h),    b = 0.1931833275037836

A moves the position, B the momentum.

Sources: Robnik, De Luca, Silverstein & Seljak (2023), Microcanonical Hamiltonian Monte Carlo, arXiv
2212.08549; Robnik & Seljak (2024), Fluctuation without dissipation: Microcanonical Langevin Monte
Carlo, arXiv 2303.18221; McLachlan (1995), On the numerical integration of ordinary differential
equations by symmetric composition methods.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

GRADIENTS = 2  # per step
_OUTER = 0.1931833275037836
WHOLE = 256  # so many of the shortest parts make a step
_CALM = 8.0  # times smaller errors let the next part be twice as long
_FORCE = 1e10  # the unit in which forces are squared: float32 would overflow at 1e19

ValueAndGradient = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


class PhasePoint(NamedTuple):
    """One chain's position (P,), its unit momentum (P,), and log density and gradient there."""

    position: jax.Array
    momentum: jax.Array
    log_density: jax.Array
    gradient: jax.Array


def unit(vector: jax.Array) -> jax.Array:
    """The vector divided by its length."""
    return vector / jnp.linalg.norm(vector)


def random_direction(key: jax.Array, like: jax.Array) -> jax.Array:
    """A momentum uniform on the unit sphere."""
    return unit(jax.random.normal(key, like.shape, like.dtype))


def turned(momentum: jax.Array, force: jax.Array, time: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Part B: the momentum after a time at constant force, and the change of (P - 1) kappa.

    With e the force's direction, d = time |force| / (P - 1) and c = e'u::

        u' = (u + e (sinh d + c (cosh d - 1))) / (cosh d + c sinh d)
        kappa' - kappa = log(cosh d + c sinh d)

    :param force: M^(1/2) grad log p(x), (P,).
    """
    size = _FORCE * jnp.linalg.norm(force / _FORCE)
    direction = force / jnp.where(size > 0, size, 1)
    rest = len(momentum) - 1
    d = time * size / rest
    cosine = (direction * momentum).sum()  # a dot is slower under vmap
    fading = jnp.exp(-d)  # all terms times 2 exp(-d), so that a large d does not overflow
    along = direction * (1 - fading) * (1 + fading + cosine * (1 - fading))
    after = unit(along + 2 * fading * momentum)
    growth = d + jnp.log1p(-0.5 * (1 - cosine) * (1 - fading**2))
    return after, rest * growth


def step(
    density: ValueAndGradient,
    root: Callable[[jax.Array], jax.Array],
    point: PhasePoint,
    size: jax.Array,
) -> tuple[PhasePoint, jax.Array]:
    """One step, and the energy's change, which is zero for the exact flow.

    :param density: position -> log density and gradient.
    :param root: multiplies a vector by M^(1/2).
    :param size: the step size h, a length in units of M.
    """
    momentum, first = turned(point.momentum, root(point.gradient), _OUTER * size)
    position = point.position + 0.5 * size * root(momentum)
    _, gradient = density(position)
    momentum, second = turned(momentum, root(gradient), (1 - 2 * _OUTER) * size)
    position = position + 0.5 * size * root(momentum)
    value, gradient = density(position)
    momentum, third = turned(momentum, root(gradient), _OUTER * size)
    kinetic = first + second + third
    return PhasePoint(position, momentum, value, gradient), kinetic - value + point.log_density


class Advance(NamedTuple):
    """A step that may have been taken in parts.

    :param change: the energy's change in all.
    :param error: the size of the energy's change in the step as a whole, inf if that was not tried.
    :param part: the length with which to begin the next step, in 1/256 of it.
    :param lost: whether even the shortest part failed; the point is then of no use.
    :param gradients: their number.
    """

    point: PhasePoint
    change: jax.Array
    error: jax.Array
    part: jax.Array
    lost: jax.Array
    gradients: jax.Array


def divided_step(
    density: ValueAndGradient,
    root: Callable[[jax.Array], jax.Array],
    point: PhasePoint,
    size: jax.Array,
    error_of: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    limit: jax.Array,
    most: float,
    part: jax.Array,
) -> Advance:
    """A step over a length ``size``, in parts where the energy's error is large.

    A part whose error is above the limit is taken back and tried with half its length, down to
    1/256 of the step; after one whose error is below an eighth of the limit the next is twice as
    long, since errors grow with the third power. All steps cover the same length, so that draws
    after equally many steps weigh each region as the exact flow does.

    At a kink of a ReLU network the gradient jumps, and one step can change the energy by hundreds
    of nats; where single data have little noise, the density is too sharp for the step size that
    suits the rest.

    :param error_of: the energy's change, log density before and after -> size of the error.
    :param limit: of the error of a part, except the shortest.
    :param most: error above which the shortest part has failed.
    :param part: the first part's length, in 1/256 of the step.
    """

    def attempt(carry: tuple[jax.Array, Advance]) -> Any:
        done, so_far = carry
        at, part = so_far.point, so_far.part
        moved, change = step(density, root, at, size * part / WHOLE)
        error = error_of(change, at.log_density, moved.log_density)
        sound = jnp.isfinite(error) & jnp.isfinite(moved.gradient).all()
        error = jnp.where(sound, error, jnp.inf)
        shortest = part == 1
        taken = (error <= limit) | shortest
        lost = shortest & (error > most)
        done = done + jnp.where(taken, part, 0)
        longer = (_CALM * error <= limit) & (done % (2 * part) == 0)
        so_far = Advance(
            jax.tree.map(lambda new, old: jnp.where(taken, new, old), moved, at),
            so_far.change + jnp.where(taken, change, 0),
            jnp.where(part == WHOLE, error, so_far.error),
            jnp.where(taken, jnp.where(longer, 2 * part, part), part // 2),
            so_far.lost | lost,
            so_far.gradients + GRADIENTS,
        )
        return jnp.where(lost, WHOLE, done), so_far

    zero, none = jnp.zeros_like(size), jnp.zeros((), jnp.int32)
    start = Advance(point, zero, zero + jnp.inf, part, zero > 0, none)
    return jax.lax.while_loop(lambda carry: carry[0] < WHOLE, attempt, (none, start))[1]


def refreshed(noise: jax.Array, momentum: jax.Array, share: jax.Array) -> jax.Array:
    """The momentum after partial refreshment, as in Langevin dynamics.

    :param noise: z, standard Normal (P,).
    :param share: time / L; after a time L the momentum has turned by about one radian::

        u' = (u + nu z) / |u + nu z|,    nu^2 = (exp(2 share) - 1) / P
    """
    return unit(momentum + jnp.sqrt(jnp.expm1(2 * share) / len(momentum)) * noise)
