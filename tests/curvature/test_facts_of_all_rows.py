"""Priors and noise that differ from row to row: read off all rows of the data, never off a few."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import nn as pyro_nn
from pyro.distributions import constraints

from pyro_bdl import evidence
from pyro_bdl.guides import AutoLaplaceGGN, AutoMAP

N = 150  # more than a piece of rows that is run at first
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 2, generator=GENERATOR, dtype=torch.float64)
X[: N // 2] *= 3.0  # the first rows are not like the others
FIRST = torch.arange(N) < N // 2
Y = X @ torch.tensor([1.0, -1.0], dtype=torch.float64)
Y = Y + 0.7 * torch.randn(N, generator=GENERATOR, dtype=torch.float64)


def fixed_prior(s, x):
    return torch.ones(2, dtype=x.dtype)


def prior_of_rows(s, x):
    return s / x.square().mean(0).sqrt()


def prior_of_the_number(s, x):
    return s * torch.ones(2, dtype=x.dtype) / len(x) ** 0.5


def fixed_noise(s, x, first):
    return torch.ones_like(s)


def multiples(s, x, first):
    return s * torch.where(first, 0.5, 2.0)


def one_group(s, x, first):
    return torch.where(first, s, 2.0)


def other_function(s, x, first):
    """A noise with the value and the slope of s at s = 1, but not of s."""
    return torch.where(first, s, (s - 1.0).exp())


class Linear(pyro_nn.PyroModule):
    def __init__(self, prior, noise):
        super().__init__()
        self.prior, self.noise = prior, noise
        self.s = pyro_nn.PyroParam(torch.tensor(1.0).double(), constraints.positive)

    def forward(self, x, first, y=None):
        scale = self.prior(self.s, x)
        w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=x.dtype), scale).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(x @ w, self.noise(self.s, x, first)), obs=y)

    def laws(self):
        """The prior's and the noise's standard deviations, at the present s."""
        return self.prior(self.s, X).detach(), self.noise(self.s, X, FIRST).detach().expand(N)

    def log_evidence(self):
        prior, noise = self.laws()
        covariance = torch.diag(noise.square()) + (X * prior.square()) @ X.mT
        return dist.MultivariateNormal(torch.zeros(N).double(), covariance).log_prob(Y)

    def precision(self):
        prior, noise = self.laws()
        return (X / noise.square()[:, None]).mT @ X + torch.diag(prior.pow(-2))

    def posterior(self, structure="full", data=((X, FIRST, Y),), **options):
        guide = AutoLaplaceGGN(self, structure=structure, **options).prototype(X, FIRST, Y)
        noise = self.laws()[1]
        guide.loc.data = torch.linalg.solve(self.precision(), X.mT @ (Y / noise.square()))
        return guide.laplace_approximation(list(data))


PRIORS = [prior_of_rows, prior_of_the_number]


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("structure", ["full", "diag", "kernel", "kron"])
def test_a_prior_that_is_made_of_the_data(prior, structure):
    model = Linear(prior, fixed_noise)
    posterior = model.posterior(structure)
    expected = model.laws()[0].pow(-2)
    torch.testing.assert_close(posterior.prior_diagonal, expected)
    posterior.refresh()
    torch.testing.assert_close(posterior.prior_diagonal, expected)


@pytest.mark.parametrize("prior", PRIORS)
def test_its_evidence(prior):
    model = Linear(prior, fixed_noise)
    posterior = model.posterior()
    for value in (1.0, 0.3):
        model.s = torch.tensor(value).double()
        found = evidence.log_marginal_likelihood(posterior, linearized=True)
        torch.testing.assert_close(found, model.log_evidence())


@pytest.mark.parametrize("prior", PRIORS)
def test_a_prior_that_differs_between_batches_is_refused(prior):
    data = (X[:50], FIRST[:50], Y[:50]), (X[50:], FIRST[50:], Y[50:])
    with pytest.raises(ValueError, match="the prior of site 'w' depends on the data, and differs"):
        Linear(prior, fixed_noise).posterior(data=data)


@pytest.mark.parametrize("rows", ["alone", "together"])
def test_noise_that_is_a_multiple_of_a_parameter_in_each_row(rows):
    model = Linear(fixed_prior, multiples)
    posterior = model.posterior(rows=rows)
    model.s = torch.tensor(0.3).double()
    found = evidence.log_marginal_likelihood(posterior, linearized=True)
    torch.testing.assert_close(found, model.log_evidence())


@pytest.mark.parametrize("in_batches", [False, True])
@pytest.mark.parametrize("noise", [one_group, other_function])
def test_noise_that_is_one_in_the_first_rows_alone_is_not_followed(noise, in_batches):
    model = Linear(fixed_prior, noise)
    half = N // 2
    parts = ((X[:half], FIRST[:half], Y[:half]), (X[half:], FIRST[half:], Y[half:]))
    posterior = model.posterior(data=parts if in_batches else ((X, FIRST, Y),))
    torch.testing.assert_close(evidence.log_marginal_likelihood(posterior), model.log_evidence())
    assert posterior.hyperparameters() == {}
    with pytest.raises(ValueError, match="cannot tune 's', which the likelihood"):
        evidence.maximize(posterior)
    model.s = torch.tensor(0.3).double()
    with pytest.raises(ValueError, match="'s' of the likelihood has changed since the curvature"):
        evidence.log_marginal_likelihood(posterior)


def test_data_with_another_noise_are_not_added():
    model, half = Linear(fixed_prior, one_group), N // 2
    posterior = model.posterior(data=((X[:half], FIRST[:half], Y[:half]),))
    before = posterior.curvature.matrix.clone()
    with pytest.raises(ValueError, match="the noise of these data depends on"):
        posterior.update((X[half:], FIRST[half:], Y[half:]))
    torch.testing.assert_close(posterior.curvature.matrix, before)


def test_variational_em_learns_the_noise_of_a_group():
    """s^2 is the mean of the squared residuals of its own rows, under a point estimate."""
    model = Linear(fixed_prior, one_group)
    guide = AutoMAP(model)
    options = {"rounds": 3, "steps": 30, "m_steps": 60, "learning_rate": 0.05, "progress": False}
    evidence.variational_em(model, guide, (X, FIRST, Y), **options)
    residuals = (Y - X @ guide.location())[FIRST]
    expected = residuals.square().mean().sqrt()
    torch.testing.assert_close(model.s.detach(), expected, rtol=0.01, atol=0.0)
    assert not torch.isclose(expected, (Y - X @ guide.location()).square().mean().sqrt(), rtol=0.02)


def test_evidence_training_leaves_the_noise_of_a_group_to_the_likelihood():
    model = Linear(fixed_prior, one_group)
    guide = AutoLaplaceGGN(model, structure="full")
    posterior, _ = evidence.train_by_evidence(
        model, guide, X, FIRST, Y, steps=500, rounds=1, learning_rate=0.1
    )
    residuals = (Y - X @ posterior.location())[FIRST]
    expected = residuals.detach().square().mean().sqrt()
    torch.testing.assert_close(model.s.detach(), expected, rtol=0.01, atol=0.0)
