"""The integrator's parts against their closed forms, and its order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pyro_bdl.mcmc.microcanonical.integrator import (
    WHOLE,
    PhasePoint,
    divided_step,
    refreshed,
    step,
    turned,
    unit,
)


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def numbers(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def test_the_momentum_turns_as_the_differential_equation_says():
    """d u / d t at t = 0, and the semigroup property."""
    momentum, force = unit(numbers(0, 7)), 3 * numbers(1, 7)
    slope = jax.jacfwd(lambda t: turned(momentum, force, t)[0])(0.0)
    expected = (force - momentum * (momentum @ force)) / 6
    assert jnp.allclose(slope, expected, atol=1e-12)
    half, first = turned(momentum, force, 0.35)
    twice, second = turned(half, force, 0.35)
    once, whole = turned(momentum, force, 0.7)
    assert jnp.allclose(twice, once, atol=1e-13)
    assert jnp.allclose(first + second, whole, atol=1e-12)
    assert jnp.allclose(jnp.linalg.norm(once), 1)


def test_the_kinetic_energy_is_the_logarithm_of_the_change_of_volume_on_the_sphere():
    """-(kinetic change) = log |det du'/du| on the tangent space, so that mams is exact."""
    momentum, force = unit(numbers(2, 4)), 2 * numbers(3, 4)
    after, change = turned(momentum, force, 0.8)
    jacobian = jax.jacfwd(lambda u: turned(u / jnp.linalg.norm(u), force, 0.8)[0])(momentum)
    before_basis = jnp.linalg.qr(jnp.c_[momentum, numbers(4, 4, 3)])[0][:, 1:]
    after_basis = jnp.linalg.qr(jnp.c_[after, numbers(5, 4, 3)])[0][:, 1:]
    _, log_volume = jnp.linalg.slogdet(after_basis.T @ jacobian @ before_basis)
    assert jnp.allclose(-change, log_volume, atol=1e-12)


def test_a_strong_force_overflows_nothing():
    """Nor in float32, where the square of the force would."""
    for size, dtype in ((1e8, "float64"), (1e25, "float32")):
        momentum, force = (numbers(i, 3).astype(dtype) for i in (0, 1))
        momentum, change = turned(unit(momentum), size * force, 1.0)
        assert jnp.allclose(momentum, unit(force), atol=1e-6) and jnp.isfinite(change)


def banana(x):
    return -0.5 * x[0] ** 2 - 2 * (x[1] - 0.5 * x[0] ** 2) ** 2 - 0.5 * x[2] ** 2


def moved(size, count, momentum=None, position=None):
    density = jax.value_and_grad(banana)
    root = jnp.array([1.0, 0.7, 2.0])
    position = numbers(6, 3) if position is None else position
    point = PhasePoint(
        position, unit(numbers(7, 3)) if momentum is None else momentum, *density(position)
    )
    total = 0.0
    forward = jax.jit(lambda point: step(density, lambda v: root * v, point, size))
    for _ in range(count):
        point, change = forward(point)
        total += change
    return point, total


def test_the_energy_error_falls_with_the_square_of_the_step_size():
    _, coarse = moved(0.1, 8)
    _, fine = moved(0.05, 16)
    assert 3.3 < abs(coarse / fine) < 4.7


def test_a_trajectory_is_reversible():
    end, change = moved(0.3, 5)
    back, undone = moved(0.3, 5, momentum=-end.momentum, position=end.position)
    assert jnp.allclose(back.position, numbers(6, 3), atol=1e-12)
    assert jnp.allclose(back.momentum, -unit(numbers(7, 3)), atol=1e-12)
    assert jnp.allclose(change, -undone, atol=1e-12)


def divided(density, limit, position=None, size=0.8, part=WHOLE):
    density = jax.value_and_grad(density)
    position = numbers(6, 3) if position is None else position
    point = PhasePoint(position, unit(numbers(7, 3)), *density(position))
    root = jnp.array([1.0, 0.7, 2.0])
    return divided_step(
        density, lambda v: root * v, point, jnp.asarray(size),
        lambda change, before, after: abs(change), limit, 1000.0, jnp.asarray(part),
    )  # fmt: skip


def test_a_step_with_a_small_error_is_whole():
    found = divided(banana, limit=jnp.inf)
    end, change = moved(0.8, 1)
    assert jnp.allclose(found.point.position, end.position) and jnp.allclose(found.change, change)
    assert jnp.isclose(found.error, abs(change), rtol=1e-12, atol=0)
    assert found.gradients == 2 and found.part == WHOLE and not found.lost


def test_a_step_with_a_large_error_is_taken_in_parts_over_the_same_length():
    """All parts are equally long if none is calm enough, and the end is that of so many steps."""
    exact, _ = moved(0.8 / 256, 256)
    found = divided(banana, limit=0.0)
    assert found.gradients == 2 * (8 + 256)
    assert jnp.allclose(found.point.position, exact.position, atol=1e-12)
    found = divided(banana, limit=0.0, part=1)
    assert found.gradients == 2 * 256 and jnp.isinf(found.error)
    found = divided(banana, limit=1e-3)
    assert abs(moved(0.8, 1)[1]) > 1e-3 > abs(found.change) / 10
    assert jnp.allclose(found.point.position, exact.position, atol=2e-2)
    assert 2 < found.gradients < 60


def test_only_the_parts_at_a_kink_are_short():
    """|x| 300 has a kink at 0; the flow is exact in energy to the size of a part there."""

    def kinked(x):
        return -300 * abs(x[0]) - 0.5 * (x**2).sum()

    position = jnp.array([0.05, 0.3, -0.2])
    whole = divided(kinked, jnp.inf, position)
    parts = divided(kinked, 0.5, position)
    assert whole.error > 20 and abs(parts.change) < 5
    assert 2 * 8 < parts.gradients < 256  # all of the shortest: 528


def test_a_step_across_a_wall_is_lost_at_the_wall():
    def walled(x):
        return jnp.where(x[0] < 0, 0.0, -jnp.inf)

    first = float(unit(numbers(7, 3))[0])
    assert first > 0  # towards the wall, at this speed
    start = jnp.array([-0.3 * 0.8 * first, 0.0, 0.0])  # which is 0.3 of a step away
    found = divided(walled, 1.0, start)
    assert found.lost and 0 <= found.point.position[0] < 0.8 * first / 256
    assert 2 * (8 + 2) < found.gradients < 2 * 40
    assert not divided(walled, 1.0, 4 * start).lost  # 1.2 steps away
    found = divided(lambda x: x.sum() * jnp.nan, 1.0)
    assert found.lost and found.gradients == 2 * 9


def test_the_momentum_forgets_its_direction_over_the_length():
    """E[u'u] after time t is about exp(-t / L) in many dimensions."""
    momentum = unit(numbers(8, 4000))
    after = refreshed(numbers(9, 4000), momentum, jnp.asarray(0.5))
    assert abs(after @ momentum - np.exp(-0.5)) < 0.05
    assert jnp.allclose(jnp.linalg.norm(after), 1)
