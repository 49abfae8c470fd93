"""The step size by the acceptance probability, where that probability is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from pyro_bdl.mcmc.microcanonical import tuning
from pyro_bdl.mcmc.microcanonical.integrator import PhasePoint


@pytest.mark.parametrize("target", [0.65, 0.9])
@pytest.mark.parametrize("factor", [0.01, 1.0, 20.0])
def test_the_acceptance_of_the_kept_step_size_is_the_target(target, factor):
    """Energy changes Normal(s^2 / 2, s^2) with s = h^2, so that E min(1, exp(-change)) is
    2 Phi(-s / 2): after 100 iterations the mean over 500 chains is within 0.02 of the target."""
    right = np.sqrt(-2 * norm.ppf(target / 2))
    size = jnp.full(500, factor * right)

    def iteration(i, carry):
        control, size, key = carry
        key, own = jax.random.split(key)
        s = size**2
        change = s**2 / 2 + s * jax.random.normal(own, size.shape)
        accept = jnp.exp(jnp.minimum(-change, 0))
        return *tuning.by_acceptance(control, accept, target, jnp.inf), key

    start = tuning.no_acceptances(size), size, jax.random.PRNGKey(0)
    control, _, _ = jax.lax.fori_loop(0, 100, iteration, start)
    reached = 2 * norm.cdf(-np.exp(2 * np.asarray(control.mean, np.float64)) / 2)
    assert abs(reached.mean() - target) < 0.02
    assert reached.std() < 0.06


def test_the_kept_step_size_is_the_mean_of_those_that_meet_the_energy_variance():
    """Energy errors Normal(0, (h / right)^6 target), whose variance is the target at h = right."""
    right, target = 0.3, 5e-4

    def iteration(i, carry):
        control, size, key = carry
        key, own = jax.random.split(key)
        change = (size / right) ** 3 * target**0.5 * jax.random.normal(own, size.shape)
        return *tuning.by_energy(control, size, jnp.abs(change), size > 0, target), key

    size = jnp.full(200, 3.0)
    start = tuning.no_errors(size), size, jax.random.PRNGKey(0)
    control, last, _ = jax.lax.fori_loop(0, 400, iteration, start)
    kept, last = np.exp(np.asarray(control.mean)) / right, np.asarray(last) / right
    assert np.abs(np.log(kept)).max() < 0.25 and abs(kept.mean() - 1) < 0.1
    assert kept.std() < 0.8 * last.std()
    assert (control.count == 400).all()


def test_phases_add_up_to_the_warmup():
    assert tuning.phases(100, (0.2, 0.2, 0.3)) == (20, 20, 30, 30)
    assert tuning.phases(0, (0.2, 0.2)) == (0, 0, 0)
    assert tuning.phases(2, (0.2, 0.2)) == (1, 0, 1)  # else no step size would be found


def test_the_metric_of_two_draws_of_a_gaussian_is_exact():
    """The gradient of an independent Normal is -(x - m) / sd^2, so that Var x / Var g = sd^4
    whatever the draws are; the weights of Welford's update are those of the average."""
    sd = np.array([0.01, 1.0, 30.0])
    draws = np.random.default_rng(0).normal(size=(2, 3))
    with jax.enable_x64(True):
        moments = tuning.no_moments(jnp.asarray(sd))
        for draw, weight in zip(draws, (0.5, 2.0), strict=True):
            point = PhasePoint(jnp.asarray(draw), jnp.ones(3), jnp.zeros(()), -draw / sd**2)
            moments = tuning.updated(moments, point, jnp.asarray(weight))
    mean = np.average(draws, axis=0, weights=(0.5, 2.0))
    assert np.allclose(
        moments.squares[0], 0.5 * (draws[0] - mean) ** 2 + 2 * (draws[1] - mean) ** 2
    )
    one_chain = jax.tree.map(lambda v: np.asarray(v)[None], moments)
    tuned = tuning.metric(one_chain, tuning.Tuned(np.ones(1), np.ones(1), np.ones((1, 3))))
    assert np.allclose(tuned.root, sd)
    assert np.allclose(tuned.step_size, 1 / 30) and np.allclose(tuned.length, np.sqrt(3))


def test_an_error_far_from_the_bulk_is_relative_to_the_growth_of_the_density():
    error = tuning.error_of(jnp.float32(-30.0), jnp.float32(-9e3), jnp.float32(-3e3), 100)
    assert error == pytest.approx(30 / 60, rel=1e-3)
    error = tuning.error_of(jnp.float32(-30.0), jnp.float32(-3e3), jnp.float32(-9e3), 100)
    assert error == pytest.approx(30, rel=1e-3)
