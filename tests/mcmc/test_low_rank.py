"""The metric of scales and a few correlations: its equations, and chains on known posteriors."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_bdl as bdl
from pyro_bdl.mcmc import HMC, MAMS, MCLMC, NUTS, low_rank

SIZE = 20
QUICK = {"num_warmup": 300, "num_samples": 300, "num_chains": 2, "progress": False}


def covariance(values):
    """Principal axes in random directions, and other scales."""
    generator = np.random.default_rng(0)
    axes, _ = np.linalg.qr(generator.normal(size=(len(values), len(values))))
    scales = np.geomspace(1e-2, 10, len(values))
    return scales[:, None] * ((axes * values) @ axes.T) * scales


SHARP = covariance(np.r_[1e-4, 1e-3, np.ones(SIZE - 4), 1e2, 1e3])


def correlated(y):
    scale = torch.from_numpy(np.linalg.cholesky(SHARP))
    w = pyro.sample("w", dist.MultivariateNormal(torch.ones(SIZE).double(), scale_tril=scale))
    pyro.sample("y", dist.Normal(w.sum() * 0, 1.0), obs=y)


def drawn(kernel, **options):
    return bdl.mcmc.sample(
        correlated, torch.zeros(()).double(), kernel=kernel, init="prior", **QUICK | options
    )


def matrix(map):
    return np.stack([low_rank.applied(map, unit) for unit in np.eye(len(map.scale))], 1)


def test_the_map_of_a_normal_is_its_covariance():
    """g = -Sigma^-1 x for each draw, so that the directions are exact."""
    generator = np.random.default_rng(1)
    draws = generator.multivariate_normal(np.ones(SIZE), SHARP, size=100)
    gradients = -np.linalg.solve(SHARP, (draws - 1).T).T
    map = low_rank.measured(draws, gradients)
    root = matrix(map)
    whitened = np.linalg.inv(root) @ SHARP @ np.linalg.inv(root).T
    values = np.linalg.eigvalsh(whitened)
    assert values[0] > 0.45 and values[-1] < 2.2  # a direction within a factor 2 is left alone
    assert low_rank.solved(map, root @ draws[0]) == pytest.approx(draws[0])


def test_numbers_that_do_not_move_have_the_scale_one():
    draws = np.c_[np.random.default_rng(0).normal(size=(50, 2)), np.zeros(50)]
    map = low_rank.measured(draws, -draws)
    assert map.scale[2] == 1 and np.isfinite(matrix(map)).all()


KERNELS = {
    "nuts": (NUTS(low_rank=True, max_tree_depth=8), "parallel"),
    # 2 pi, the default, is a whole period of a standard Normal
    "hmc": (HMC(low_rank=True, trajectory_length=1.5), "parallel"),
    "mclmc": (MCLMC(low_rank=True), "vectorized"),
    "mams": (MAMS(low_rank=True), "parallel"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_chains_have_the_exact_moments(name):
    kernel, method = KERNELS[name]
    samples = drawn(kernel, chain_method=method)
    w = samples.latents["w"]
    root = torch.from_numpy(np.linalg.cholesky(SHARP))
    whitened = torch.linalg.solve_triangular(root, (w - 1)[..., None], upper=False)[..., 0]
    for values, exact, bias in ((whitened, 0.0, 0.0), (whitened.square(), 1.0, 0.03)):
        error = bdl.diagnostics.mcse(values)
        assert ((values.mean((0, 1)) - exact).abs() < 4.5 * error + bias).all()
    if name == "nuts":  # the deviations along the principal axes have the ratio 3000
        assert float(samples.stats["num_steps"].float().mean()) < 20
        assert samples.info["options"]["low_rank"] is True
        assert 0.7 < float(samples.stats["accept_prob"].mean()) < 0.95


@pytest.mark.filterwarnings("ignore::pyro_bdl.errors.BdlWarning")
@pytest.mark.parametrize("warmup", [0, 13])
def test_short_warmups_and_checkpoints(warmup, tmp_path):
    options = {"num_warmup": warmup, "num_samples": 5}
    kernel = MCLMC(low_rank=True, thinning=2, step_size=None if warmup else 1e-4)
    whole = drawn(kernel, **options | {"num_samples": 8}).latents["w"]
    drawn(kernel, checkpoint=tmp_path, **options)
    resumed = drawn(kernel, checkpoint=tmp_path, **options | {"num_samples": 8}).latents["w"]
    assert torch.equal(whole, resumed)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: NUTS(low_rank=True, inverse_mass=torch.ones(3)), "low_rank=True .* inverse_mass"),
        (lambda: NUTS(low_rank=True, dense_mass=True), "low_rank=True .* dense_mass"),
        (lambda: drawn(NUTS(low_rank=True), backend="pyro"), "low_rank"),
    ],
)
def test_refusals(make, words):
    with pytest.raises(ValueError, match=words):
        make()
