"""Hyperparameters under priors of their own: the maximum of log evidence plus log hyperprior."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.optimize import minimize
from torch import nn

from pyro_bdl import bayesianize, models, priors
from pyro_bdl.errors import BdlWarning
from pyro_bdl.evidence import log_marginal_likelihood, maximize
from pyro_bdl.guides import AutoLaplaceGGN


def double(*values):
    return torch.tensor(values, dtype=torch.float64).unbind()


SCALE, NOISE = dist.LogNormal(*double(-1.5, 0.3)), dist.Gamma(*double(20.0, 20.0))


def best(line):
    def negative(t):
        a, s = torch.tensor(t).exp()
        return -(line.exact(a, s) + SCALE.log_prob(a) + NOISE.log_prob(s)).item()

    found = minimize(negative, [0.0, -0.7], tol=1e-10)
    return -found.fun, torch.tensor(found.x).exp().tolist()


def by_hyperpriors():
    prior = priors.Normal(priors.Hyperprior(SCALE, start=0.5))
    return models.Regression(bayesianize(nn.Linear(3, 1), prior), noise=priors.Hyperprior(NOISE))


class ByFactors(models.Regression):
    """The same by statements of the program."""

    def forward(self, x, y=None):
        result = super().forward(x, y)
        pyro.factor("of_scale", SCALE.log_prob(self.network.hyper_prior_scale))
        pyro.factor("of_noise", NOISE.log_prob(self.noise))
        return result


def test_the_exact_maximum(line):
    guide = line.laplace(model=by_hyperpriors(), loc=torch.tensor([3.0, -4.0, 5.0, 1.0]))
    top, (a, s) = best(line)
    found = maximize(guide, steps=40, learning_rate=0.08, linearized=True)
    assert found.log_evidence == pytest.approx(top, abs=2e-3)
    scale, noise = (value.item() for value in found.hyperparameters.values())
    assert (scale, noise) == pytest.approx((a, s), rel=0.03)
    assert found.log_evidence != pytest.approx(float(line.exact(scale, noise)), abs=0.1)


def test_factors_of_the_program_are_hyperpriors_too(line, learn, put):
    bnn = bayesianize(nn.Linear(3, 1), priors.Normal(learn(0.5)))
    guides = [
        line.laplace(model=model) for model in (by_hyperpriors(), ByFactors(bnn, noise=learn(1.0)))
    ]
    found = []
    for guide in guides:
        put(guide, scale=0.6, noise=0.8)
        guide.refresh()
        leaves = [p.leaf for p in guide.read().parameters.values()]
        value = log_marginal_likelihood(guide)
        found.append([value, *torch.autograd.grad(value, leaves)])
        assert maximize(guide, method="fixed-point", steps=2, linearized=False).log_evidence > value
    torch.testing.assert_close(*found)


def test_it_is_no_part_of_the_likelihood(line, recwarn):
    """It counts once, whatever the batches, and no warning says that it is left out."""
    model = by_hyperpriors()
    batches = [(line.x[:5], line.y[:5]), (line.x[5:], line.y[5:])]
    whole, parts = line.laplace(model=model), line.laplace(model=model, data=batches)
    torch.testing.assert_close(log_marginal_likelihood(whole), log_marginal_likelihood(parts))
    warnings.simplefilter("error", BdlWarning)
    AutoLaplaceGGN(model, structure="full").prototype(*line.data)
    assert not [w for w in recwarn if "left out of the curvature" in str(w.message)]


def test_a_scale_under_a_hyperprior_is_no_latent(line):
    prior = priors.learnable(priors.PerLayer(priors.Normal(priors.Hyperprior(SCALE))))
    model = models.Regression(bayesianize(nn.Linear(3, 1), prior), noise=0.5)
    guide = line.laplace(model=model)
    assert guide.subset.sites == ("weight", "bias")
    (value,) = guide.hyperparameters().values()
    assert value.item() == pytest.approx(SCALE.mean.item())
    with pytest.raises(ValueError, match=r"priors\.Normal\(priors\.Hyperprior\(LogNormal"):
        sampled = models.Regression(bayesianize(nn.Linear(3, 1), priors.Normal(SCALE)), noise=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BdlWarning)
            data = line.data
            guide = AutoLaplaceGGN(sampled, structure="full").prototype(*data)
            maximize(guide.laplace_approximation(data))
