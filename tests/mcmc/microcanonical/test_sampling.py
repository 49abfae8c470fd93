"""``mclmc`` and ``mams`` against known moments."""

import jax
import jax.numpy as jnp
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_bdl as bdl
from pyro_bdl.errors import BdlWarning
from pyro_bdl.mcmc import MAMS, MCLMC, NUTS, chains
from pyro_bdl.mcmc.chains import Plan
from pyro_bdl.mcmc.microcanonical import tuning
from pyro_bdl.mcmc.microcanonical.adjusted import Adjusted
from pyro_bdl.utils.tensor_file import load_tree

SD = torch.logspace(-2, 1, 6, dtype=torch.float64)


def gaussian(y):
    w = pyro.sample("w", dist.Normal(torch.zeros(6, dtype=torch.float64), SD).to_event(1))
    pyro.sample("y", dist.Normal(w.sum() * 0, 1.0), obs=y)


def three(y):
    """A Gaussian, a banana and a funnel, independent of each other."""
    gaussian(y)
    a = pyro.sample("a", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
    pyro.sample("b", dist.Normal(a**2, 0.5))
    v = pyro.sample("v", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
    pyro.sample("x", dist.Normal(torch.zeros(3).to(v), (v / 2).exp()).to_event(1))


def drawn(model, kernel, **options):
    defaults = {"num_warmup": 300, "num_samples": 1000, "num_chains": 4, "progress": False}
    options = defaults | {"chain_method": "vectorized"} | options
    y = torch.tensor(0.0, dtype=torch.float64)
    return bdl.mcmc.sample(model, y, kernel=kernel, **options)


def assert_expectation(values, exact, bias=0.0):
    """(chains, draws, ...) has the exact mean within 4 Monte Carlo errors and a given bias."""
    error = bdl.diagnostics.mcse(values)
    assert ((values.mean((0, 1)) - exact).abs() < 4 * error + bias).all()


@pytest.mark.parametrize("kernel, bias", [("mclmc", 0.03), ("mams", 0.0)])
def test_moments_of_a_gaussian_a_banana_and_a_funnel(kernel, bias):
    """Deviations from 0.01 to 10; the unadjusted sampler's variances within three percent more."""
    # (b - 1)^2 has a heavy tail, whose Monte Carlo errors are too small in single runs
    runs = [drawn(three, kernel, seed=seed).latents for seed in range(6)]
    latents = {name: torch.cat([run[name] for run in runs]) for name in runs[0]}
    w = latents["w"] / SD
    assert_expectation(w, 0.0)
    assert_expectation(w**2, 1.0, bias)
    assert_expectation(latents["a"] ** 2, 1.0, bias)
    assert_expectation(latents["b"], 1.0, bias)  # E[b] = E[a^2], var[b] = 2 + 1/4
    assert_expectation((latents["b"] - 1) ** 2, 2.25, 3 * bias)
    assert_expectation(latents["v"], 0.0, 2 * bias)
    assert_expectation(latents["v"] ** 2, 1.0, 2 * bias)
    assert_expectation(latents["x"] ** 2 / latents["v"].exp()[..., None], 1.0, 4 * bias)


def test_steps_in_parts_keep_the_energy_variance_where_the_density_is_sharp():
    """A funnel with a neck of exp(-3): with whole steps the energy variance of single chains is 40
    to 80 times its target."""

    def funnel(y):
        v = pyro.sample("v", dist.Normal(torch.zeros((), dtype=torch.float64), 2.0))
        pyro.sample("x", dist.Normal(torch.zeros(5).to(v), (v / 2).exp()).to_event(1))
        pyro.sample("y", dist.Normal(v * 0, 1.0), obs=y)

    samples = drawn(funnel, "mclmc")
    v = samples.latents["v"]
    assert (samples.stats["energy_variance"].mean(1) < 1e-3).all()
    assert_expectation(v, 0.0)
    assert_expectation(v**2, 4.0)
    steps = samples.stats["num_steps"]  # gradients; 40 where no step is divided
    assert (steps >= 40).all() and 40 < steps.double().mean() < 48


def test_chains_turn_back_at_a_wall():
    """Normals cut off at 1.5 have E[w^2] = 1 - 3 phi(1.5) / (2 Phi(1.5) - 1)."""

    def cut(y):
        w = pyro.sample("w", dist.Normal(torch.zeros(4, dtype=torch.float64), 1.0).to_event(1))
        inside = (w.abs() < 1.5).all()
        pyro.factor("wall", torch.where(inside, 0.0, -torch.inf).to(w))
        pyro.sample("y", dist.Normal(w.sum() * 0, 1.0), obs=y)

    with pytest.warns(BdlWarning, match="divergence: .* lower energy_variance"):
        samples = drawn(cut, "mclmc", init={"w": torch.zeros(4, dtype=torch.float64)})
    w = samples.latents["w"]
    assert (w.abs() < 1.5).all() and samples.stats["potential_energy"].isfinite().all()
    assert_expectation(w, 0.0)
    assert_expectation(w**2, 1 - 3 * 0.129518 / 0.866386, 0.02)


def test_a_step_size_far_too_small_is_told():
    with pytest.warns(BdlWarning, match="far smaller than it need be"):
        drawn(gaussian, MCLMC(inverse_mass=SD**2), num_warmup=0, num_samples=5)


def test_the_energy_variance_follows_its_target():
    found = drawn(gaussian, MCLMC(energy_variance=1e-5), num_samples=200).stats
    assert 0.5 < float(found["energy_variance"].mean()) / 1e-5 < 2


def test_step_sizes_stay_where_the_integrator_is_stable():
    """On 100 standard Normals a chain accepts 70 to 80 % at h = 1.8 sqrt(P) and nothing from
    2 sqrt(P) on: a target of 0.65 ended at 0.39 to 0.71."""

    def wide(y):
        w = pyro.sample("w", dist.Normal(torch.zeros(100, dtype=torch.float64), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(w.sum() * 0, 1.0), obs=y)

    samples = drawn(wide, MAMS(target_accept=0.65), num_samples=300)
    assert (samples.stats["accept_prob"].mean(1) > 0.63).all()
    assert (samples.stats["step_size"][:, -1] <= 1.8 * 100**0.5 + 1e-6).all()


def test_a_given_metric_and_step_size_are_used(tmp_path):
    given = {"step_size": 0.3, "inverse_mass": SD**2, "thinning": 3}
    few = {"num_warmup": 0, "num_samples": 5, "init": {"w": torch.zeros(6, dtype=torch.float64)}}
    with pytest.warns(BdlWarning, match="times its target"):
        kernel = MCLMC(energy_variance=1e-20, **given)
        samples = drawn(gaussian, kernel, checkpoint=tmp_path, **few)
    assert (samples.stats["num_steps"] > 6).all() and (samples.stats["num_steps"] > 100).any()
    state = load_tree(tmp_path / chains.STATE, kind=chains.KIND)["state"]
    assert (state[".own"] < 256).all()  # the next step begins with the last part's length
    given |= {
        "step_size": torch.tensor(0.3, dtype=torch.float64),
        "inverse_mass": (SD**2).tolist(),
    }  # the same
    samples = drawn(gaussian, MCLMC(**given), **few)
    assert (samples.stats["step_size"] == 0.3).all()
    assert (samples.stats["num_steps"] == 6).all()
    # three steps of length 0.3 in units of the deviations
    first = (samples.latents["w"][:, 0] / SD).norm(dim=-1)
    assert (first <= 0.9).all() and (first > 0.1).all()


def test_a_covariance_as_metric_is_the_same_as_its_principal_axes():
    """With M = Q D Q', the dynamics are those of the whitened density."""
    covariance = torch.tensor([[2.0, 0.9], [0.9, 1.0]], dtype=torch.float64)
    root = torch.from_numpy(tuning.root_of(covariance.numpy()))
    assert torch.allclose(root @ root, covariance)

    def correlated(y):
        w = pyro.sample("w", dist.MultivariateNormal(torch.zeros(2).to(covariance), covariance))
        pyro.sample("y", dist.Normal(w.sum() * 0, 1.0), obs=y)

    samples = drawn(correlated, MAMS(inverse_mass=covariance), num_warmup=50, num_samples=800)
    w = samples.latents["w"]
    assert_expectation(w[..., 0] * w[..., 1], 0.9)
    assert_expectation(w**2, covariance.diagonal())


def test_autocorrelation_time_of_an_autoregressive_chain():
    """tau = (1 + a) / (1 - a)."""
    generator = np.random.default_rng(0)
    x = np.zeros((1, 20_000, 2))
    for t in range(1, x.shape[1]):
        x[0, t] = np.array([0.8, 0.0]) * x[0, t - 1] + generator.normal(size=2)
    assert tuning.autocorrelation_time(x)[0] == pytest.approx((9 + 1) / 2, rel=0.1)


@pytest.mark.filterwarnings("error")
def test_numbers_that_do_not_move_have_no_autocorrelation_time():
    moving = np.random.default_rng(0).standard_normal((1, 400))
    x = np.stack([np.concatenate([moving, np.zeros((1, 400))]), np.zeros((2, 400))])
    x = x.transpose(0, 2, 1)  # (chains, steps, numbers)
    first, second = tuning.autocorrelation_time(x)
    assert first == tuning.autocorrelation_time(x[:1, :, :1])[0] and np.isnan(second)
    assert np.isnan(tuning.autocorrelation_time(x[:, :1])).all()


def one_number(y):
    w = pyro.sample("w", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
    pyro.sample("y", dist.Normal(w, 1.0), obs=y)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: drawn(one_number, "mclmc"), ValueError, "at least two numbers"),
        (lambda: NUTS(target_accept=1.0), ValueError, "target_accept must lie between"),
        (lambda: NUTS(max_tree_depth=2.5), ValueError, "max_tree_depth must be a whole number"),
        (lambda: NUTS(inverse_mass=torch.zeros(6)), ValueError, "positive variances"),
        (lambda: MCLMC(energy_variance=0.0), ValueError, "energy_variance must be positive"),
        (lambda: MCLMC(energy_variance="small"), TypeError, "must be a number, got 'small'"),
    ],
)
def test_refusals(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_rounding_of_a_large_log_density_does_not_stop_mclmc():
    """The exact posterior of a regression, with sd's of 7e-4, from starts with log p = -4e6 in
    float32, where energy changes are rounding alone and no step is small enough."""
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    slopes = torch.tensor([1.0, -1.0, 0.5, 0.0])

    def regression(y):
        w = pyro.sample("w", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        with pyro.plate("data", 200):
            pyro.sample("y", dist.Normal(x @ w, 0.01), obs=y)

    pyro.set_rng_seed(0)
    samples = bdl.mcmc.sample(
        regression, x @ slopes, kernel="mclmc", num_chains=2, num_warmup=200, num_samples=200,
        init="prior", progress=False,
    )  # fmt: skip
    assert samples.stats["potential_energy"].max() < -700  # both have left their starts, at 4e6
    covariance = torch.linalg.inv(x.T @ x / 0.01**2 + torch.eye(4))
    center = covariance @ x.T @ (x @ slopes) / 0.01**2
    assert_expectation(samples.latents["w"], center, bias=1e-4)
    sd = samples.latents["w"].flatten(0, 1).std(0)
    assert torch.allclose(sd, covariance.diagonal().sqrt(), rtol=0.25)


def test_lengths_and_momenta_of_mams_share_no_random_key():
    """Neither the keys that the chains hold nor those that they draw from are of the lengths."""
    init, step, _ = Adjusted(
        lambda u: -0.5 * (u**2).sum(), MAMS(max_steps=8), Plan(num_warmup=0, num_samples=8), 2
    ).transition()
    state = jax.vmap(init)(jax.random.split(jax.random.PRNGKey(0), 4), jnp.ones((4, 2)))
    of_lengths, of_chains = set(), set()

    def seen(keys, number):
        return {tuple(map(int, key)) for key in np.asarray(jax.random.split(keys, number))}

    for _ in range(8):
        of_lengths |= seen(state.own.key[0], 2)
        of_chains |= set.union(*(seen(key, 3) for key in state.key))
        state, _ = jax.vmap(step)(state)
    assert len(of_lengths) == 16 and len(of_chains) == 96
    assert not of_lengths & of_chains
