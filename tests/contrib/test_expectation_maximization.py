"""Expectation maximization (Dempster, Laird and Rubin 1977) against other implementations."""

import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from sklearn.mixture import GaussianMixture
from torch import nn
from torch.distributions import constraints
from torch.nn.functional import one_hot

from pyro_bdl import bayesianize, priors
from pyro_bdl.errors import BdlWarning, UnsupportedProgramError
from pyro_bdl.evidence import em
from pyro_bdl.program.program import Program

STARTS = torch.tensor([[-1.0, 0.5], [1.5, -0.5], [0.0, 2.0]], dtype=torch.float64)


@pytest.fixture(autouse=True)
def clean_store():
    pyro.clear_param_store()
    yield
    pyro.clear_param_store()


@pytest.fixture
def points():
    noise = torch.randn(60, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return noise + STARTS.repeat_interleave(20, 0) * 1.7


def simplex(name, size):
    weights = torch.full((size,), 1.0 / size, dtype=torch.float64)
    return pyro.param(name, weights, constraint=constraints.simplex)


def positive(name, *shape):
    start = torch.ones(shape, dtype=torch.float64)
    return pyro.param(name, start, constraint=constraints.positive)


def gaussian_mixture(y, argument="covariance_matrix"):
    kind = constraints.lower_cholesky if argument == "scale_tril" else constraints.positive_definite
    eye = torch.eye(2, dtype=torch.float64).expand(3, 2, 2).contiguous()
    mu, matrix = pyro.param("mu", STARTS.clone), pyro.param(argument, eye, constraint=kind)
    with pyro.plate("n", len(y)):
        z = pyro.sample("z", dist.Categorical(simplex("weights", 3)))
        pyro.sample("y", dist.MultivariateNormal(mu[z], **{argument: matrix[z]}), obs=y)


@pytest.mark.parametrize("argument", ["covariance_matrix", "scale_tril", "precision_matrix"])
def test_a_gaussian_mixture_takes_the_steps_of_scikit_learn(points, argument):
    found = em(gaussian_mixture, points, argument, rounds=6, tolerance=0.0)
    other, path = None, []
    for rounds in range(1, 7):
        other = GaussianMixture(
            3, max_iter=rounds, tol=0.0, reg_covar=0.0, weights_init=np.ones(3) / 3,
            means_init=STARTS.numpy(), precisions_init=np.stack([np.eye(2)] * 3),
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it has not converged
            path.append(other.fit(points.numpy()).score(points.numpy()) * len(points))
    np.testing.assert_allclose(found.log_likelihood[1:], path, rtol=1e-10)
    np.testing.assert_allclose(
        found.responsibilities["z"], other.predict_proba(points.numpy()), atol=1e-10
    )
    np.testing.assert_allclose(found.parameters["mu"], other.means_, atol=1e-10)
    matrix = found.parameters[argument]
    matrix = {"scale_tril": lambda m: m @ m.mT, "precision_matrix": torch.linalg.inv}.get(
        argument, torch.clone
    )(matrix)
    np.testing.assert_allclose(matrix, other.covariances_, atol=1e-10)


def test_two_normals_by_hand(points):
    """pi = mean_n r_n, mu_k = sum r y / sum r, sigma_k^2 = sum r (y - mu_k)^2 / sum r."""
    y = points[:40, 0]

    def model(y):
        pi = pyro.param(
            "pi", torch.tensor(0.4, dtype=y.dtype), constraint=constraints.unit_interval
        )
        mu, sigma = pyro.param("mu", lambda: y.new_tensor([-1.0, 1.0])), positive("sigma", 2)
        with pyro.plate("n", len(y)):
            z = pyro.sample("z", dist.Bernoulli(pi)).long()
            pyro.sample("y", dist.Normal(mu[z], sigma[z]), obs=y)

    found = em(model, y, rounds=1)
    joint = torch.stack(
        [
            0.6 * dist.Normal(-1.0, 1.0).log_prob(y).exp(),
            0.4 * dist.Normal(1.0, 1.0).log_prob(y).exp(),
        ]
    )
    r = joint / joint.sum(0)
    mu = (r * y).sum(1) / r.sum(1)
    sigma = ((r * (y - mu[:, None]).square()).sum(1) / r.sum(1)).sqrt()
    torch.testing.assert_close(found.parameters["pi"], r[1].mean())
    torch.testing.assert_close(found.parameters["mu"], mu)
    torch.testing.assert_close(found.parameters["sigma"], sigma)
    torch.testing.assert_close(found.log_likelihood[0], joint.sum(0).log().sum())


def test_a_hidden_markov_model_takes_the_steps_of_baum_and_welch(points):
    y = points[::4, 0]
    start = torch.tensor([[0.7, 0.3], [0.4, 0.6]], dtype=y.dtype)

    def model(y):
        transitions = pyro.param("A", start.clone, constraint=constraints.simplex)
        mu, sigma = pyro.param("mu", lambda: y.new_tensor([-1.0, 1.0])), positive("sigma", 2)
        z = None
        for t in pyro.markov(range(len(y))):
            weights = simplex("pi", 2) if z is None else transitions[z]
            z = pyro.sample(f"z_{t}", dist.Categorical(weights))
            pyro.sample(f"y_{t}", dist.Normal(mu[z], sigma[z]), obs=y[t])

    found = em(model, y, rounds=1)
    densities = dist.Normal(y.new_tensor([-1.0, 1.0]), 1.0).log_prob(y[:, None]).exp()
    forward = [0.5 * densities[0]]
    for density in densities[1:]:
        forward.append((forward[-1] @ start) * density)
    backward = [torch.ones(2, dtype=y.dtype)]
    for density in densities[1:].flip(0):
        backward.insert(0, start @ (density * backward[0]))
    total = forward[-1].sum()
    single = torch.stack([a * b / total for a, b in zip(forward, backward, strict=True)])
    pairs = sum(
        forward[t][:, None] * start * densities[t + 1] * backward[t + 1] / total
        for t in range(len(y) - 1)
    )
    torch.testing.assert_close(found.parameters["A"], pairs / pairs.sum(1, keepdim=True))
    torch.testing.assert_close(found.parameters["pi"], single[0])
    torch.testing.assert_close(found.parameters["mu"], (single * y[:, None]).sum(0) / single.sum(0))
    torch.testing.assert_close(found.log_likelihood[0], total.log())


PROBABILITIES = torch.tensor([0.3, 0.6], dtype=torch.float64)


def probabilities():
    return pyro.param("p", PROBABILITIES.clone, constraint=constraints.unit_interval)


COUNTS = torch.tensor([0.0, 1, 0, 2, 7, 9, 6, 8, 1, 10], dtype=torch.float64)
FAMILIES = {
    "lognormal": lambda z, y: dist.LogNormal(
        pyro.param("mu", lambda: y.new_tensor([0.0, 1.0]))[z], positive("s", 2)[z]
    ),
    "shared scale": lambda z, y: dist.Normal(
        pyro.param("mu", lambda: y.new_tensor([0.0, 5.0]))[z], positive("s")
    ),
    "poisson": lambda z, y: dist.Poisson((positive("rate", 2) * 1.0)[z]),
    "exponential": lambda z, y: dist.Exponential(positive("rate", 2)[z]),
    "gamma": lambda z, y: dist.Gamma(2.0, positive("rate", 2)[z]),
    "geometric": lambda z, y: dist.Geometric(probabilities()[z]),
    "binomial": lambda z, y: dist.Binomial(12, probabilities()[z]),
    "categorical": lambda z, y: dist.Categorical(
        pyro.param(
            "p", lambda: torch.linspace(1, 2, 22, dtype=y.dtype).reshape(2, 11).softmax(-1),
            constraint=constraints.simplex,
        )[z]
    ),
    "logits": lambda z, y: dist.Bernoulli(
        logits=pyro.param("l", lambda: y.new_tensor([0.5, -1.0]))[z]
    ),
    # no closed form: one parameter in two arguments
    "tied": lambda z, y: dist.Normal(positive("m", 2)[z] + 3.0 * z, positive("m", 2)[z]),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_the_end_is_a_stationary_point(family):
    """d log p(y | theta) / d theta = 0, and no round lowers log p."""
    values = {"logits": COUNTS.clamp(max=1.0)}.get(family, COUNTS)
    values = values + 0.5 if family in ("lognormal", "exponential", "gamma") else values

    def model(y):
        with pyro.plate("n", len(y)):
            z = pyro.sample("z", dist.Categorical(y.new_tensor([0.4, 0.6])))
            pyro.sample("y", FAMILIES[family](z, y), obs=y)

    if family == "poisson":
        pyro.param("rate", values.new_tensor([1.0, 5.0]), constraint=constraints.positive)
    found = em(model, values, rounds=400, tolerance=1e-13)
    assert (found.log_likelihood.diff() > -1e-9).all() and found.converged
    total = Program(model, values).log_joint({})
    leaves = [p for _, p in pyro.get_param_store().named_parameters()]
    for gradient in torch.autograd.grad(total, leaves):
        assert gradient.abs().max() < 1e-4


def shared_mean(y):
    """The mean of several covariances: their weights in it are not those of a plain mean."""
    mu = pyro.param("mu", lambda: y.new_zeros(2))
    sigma = torch.stack([torch.eye(2), torch.diag(torch.tensor([9.0, 0.2]))]).to(y)
    with pyro.plate("n", len(y)):
        z = pyro.sample("z", dist.Categorical(y.new_tensor([0.4, 0.6])))
        pyro.sample("y", dist.MultivariateNormal(mu, covariance_matrix=sigma[z]), obs=y)


def two_families(y):
    """A parameter of a Normal and of a Bernoulli."""
    p = pyro.param("p", PROBABILITIES.clone, constraint=constraints.unit_interval)
    with pyro.plate("n", len(y)):
        z = pyro.sample("z", dist.Categorical(y.new_tensor([0.4, 0.6])))
        pyro.sample("a", dist.Normal(p[z], 0.5), obs=y[:, 0])
        pyro.sample("b", dist.Bernoulli(p[z]), obs=(y[:, 1] > 0).to(y))


def offset_by_a_covariate(y):
    """A mean of offsets that add up to zero: a plain mean under equal weights, such as the first
    ones, and under no others."""
    t = pyro.param("t", lambda: y.new_zeros(()))
    s = pyro.param("s", lambda: y.new_ones(()), constraint=constraints.positive)
    offset = y[:, 1] - y[:, 1].mean()
    with pyro.plate("n", len(y)):
        z = pyro.sample("z", dist.Categorical(y.new_tensor([0.4, 0.6])))
        pyro.sample("y", dist.Normal(t + offset, torch.stack([s / s, s])[z]), obs=y[:, 0])


@pytest.mark.parametrize("model", [shared_mean, two_families, offset_by_a_covariate])
def test_forms_that_do_not_hold_are_not_taken(points, model):
    """d log p(y | theta) / d theta = 0 where a weighted mean is not the maximum."""
    em(model, points, rounds=300, tolerance=1e-13)
    total = Program(model, points).log_joint({})
    leaves = [p for _, p in pyro.get_param_store().named_parameters()]
    for gradient in torch.autograd.grad(total, leaves):
        assert gradient.abs().max() < 1e-4


def test_masked_rows_do_not_count(points):
    rows = torch.arange(len(points)) % 3 > 0

    def masked(y):
        with pyro.poutine.mask(mask=rows):
            gaussian_mixture(y)

    found = em(masked, points, rounds=3)
    pyro.clear_param_store()
    other = em(gaussian_mixture, points[rows], rounds=3)
    torch.testing.assert_close(found.parameters, other.parameters)
    torch.testing.assert_close(found.log_likelihood, other.log_likelihood)


def test_continuous_latents_go_to_their_mode(points):
    """mu_k = sum r y / (sum r + 1 / s^2) for mu_k ~ Normal(0, s^2) and unit noise."""
    y, start = points[:, 0], points.new_tensor([-1.0, 1.0])

    def model(y):
        with pyro.plate("k", 2):
            mu = pyro.sample("mu", dist.Normal(y.new_zeros(()), 2.0))
        with pyro.plate("n", len(y)):
            z = pyro.sample("z", dist.Categorical(y.new_tensor([0.4, 0.6])))
            pyro.sample("y", dist.Normal(mu[z], 1.0), obs=y)

    found = em(model, y, rounds=1, init_loc_fn=lambda site: start)
    joint = y.new_tensor([0.4, 0.6]) * dist.Normal(start, 1.0).log_prob(y[:, None]).exp()
    r = joint / joint.sum(1, keepdim=True)
    expected = (r * y[:, None]).sum(0) / (r.sum(0) + 0.25)
    torch.testing.assert_close(found.latents["mu"], expected, atol=1e-5, rtol=1e-5)


def test_a_mixture_of_networks():
    """f_z(x) of one network with two outputs; the noise and the weights have closed forms."""
    torch.manual_seed(0)
    x = torch.linspace(-2.0, 2.0, 40)[:, None]
    truth = torch.arange(40) % 2
    y = torch.where(truth == 1, x[:, 0].sin() + 2.0, -x[:, 0] - 1.0) + 0.05 * torch.randn(40)
    net = bayesianize(
        nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 2)), priors.Normal(2.0)
    )

    def model(x, y=None):
        f = net(x)
        sigma = pyro.param("sigma", torch.ones(()), constraint=constraints.positive)
        weights = pyro.param("weights", torch.ones(2) / 2, constraint=constraints.simplex)
        with pyro.plate("n", len(x)) as rows:
            z = pyro.sample("z", dist.Categorical(weights))
            pyro.sample("y", dist.Normal(f[rows, z], sigma), obs=y)

    found = em(model, x, y, rounds=12)
    assert (found.log_likelihood.diff() >= -1e-3).all()
    chosen = one_hot(found.responsibilities["z"].argmax(-1), 2).double()
    agreement = (chosen.T @ one_hot(truth, 2).double()) / 20
    assert agreement.max(1).values.min() > 0.9
    assert found.parameters["sigma"] < 0.3


def test_a_program_that_changes_is_said(points):
    draws = iter(range(100))

    def model(y):
        mu = pyro.param("mu", y.new_zeros(2)) + next(draws)
        with pyro.plate("n", len(y)):
            z = pyro.sample("z", dist.Categorical(y.new_tensor([0.5, 0.5])))
            pyro.sample("y", dist.Normal(mu[z], 1.0), obs=y)

    with pytest.warns(BdlWarning, match="lowered the log likelihood"):
        found = em(model, points[:, 0], steps=1)
    assert not found.converged


def plain(y):
    pyro.sample("y", dist.Normal(pyro.param("mu", y.new_zeros(())), 1.0).expand([60]), obs=y)


def without_parameters(y):
    z = pyro.sample("z", dist.Bernoulli(0.5))
    pyro.sample("y", dist.Normal(z + 0.0 * y, 1.0).to_event(1), obs=y)


def learned_prior(y):
    mu = pyro.sample("mu", dist.Normal(y.new_zeros(()), positive("s")))
    z = pyro.sample("z", dist.Bernoulli(0.5))
    pyro.sample("y", dist.Normal(mu * z + 0.0 * y, 1.0).to_event(1), obs=y)


def subsampled(y):
    mu = pyro.param("mu", y.new_zeros(2))
    with pyro.plate("n", len(y), subsample_size=10) as rows:
        z = pyro.sample("z", dist.Bernoulli(y.new_tensor(0.5)))
        pyro.sample("y", dist.Normal(mu[z.long()], 1.0), obs=y[rows])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (plain, "no discrete latent site"),
        (without_parameters, "no parameter to maximize over"),
        (learned_prior, "the parameter 's' is of the prior of the latent 'mu'"),
        (subsampled, "'y' stands in a subsampled plate"),
    ],
)
def test_programs_that_it_does_not_take(points, model, message):
    with pytest.raises(UnsupportedProgramError, match=message):
        em(model, points[:, 0])
