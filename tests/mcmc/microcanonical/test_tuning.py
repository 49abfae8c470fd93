"""The step size by the acceptance probability, where that probability is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from pyro_bdl.mcmc.microcanonical import tuning


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
        return *tuning.by_acceptance(control, accept, target), key

    start = tuning.no_acceptances(size), size, jax.random.PRNGKey(0)
    control, _, _ = jax.lax.fori_loop(0, 100, iteration, start)
    reached = 2 * norm.cdf(-np.exp(2 * np.asarray(control.mean, np.float64)) / 2)
    assert abs(reached.mean() - target) < 0.02
    assert reached.std() < 0.06


def test_phases_add_up_to_the_warmup():
    assert tuning.phases(100, (0.2, 0.2, 0.3)) == (20, 20, 30, 30)
    assert tuning.phases(1, (0.2, 0.6)) == (0, 1, 0)
