"""Distributions as tensors: made again, on an unbounded scale, and a network's logits."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_bdl import bayesianize, models
from pyro_bdl.curvature.linear_outputs import recorded_output
from pyro_bdl.distributions.censored import Censored
from pyro_bdl.distributions.parameters import (
    is_known,
    parameters_of,
    rebuilt,
    unconstrained_parameters,
    with_unconstrained,
)
from pyro_bdl.distributions.targets import OrderedLogistic
from pyro_bdl.program import Program

ones, two = torch.ones(4), torch.full((4,), 2.0)
LOG_2 = torch.full((4, 2), 2.0).log()
tril = torch.tensor([[0.5, 0.0], [0.2, 0.3]])

KNOWN = {
    "Normal": (dist.Normal(ones, two), {"loc": ones, "scale": two.log()}),
    "LogNormal": (dist.LogNormal(ones, two), {"loc": ones, "scale": two.log()}),
    "Laplace": (dist.Laplace(ones, two), {"loc": ones, "scale": two.log()}),
    "Cauchy": (dist.Cauchy(ones, two), {"loc": ones, "scale": two.log()}),
    "Gumbel": (dist.Gumbel(ones, two), {"loc": ones, "scale": two.log()}),
    "StudentT": (
        dist.StudentT(3 * ones, ones, two),
        {"df": (3 * ones).log(), "loc": ones, "scale": two.log()},
    ),
    "Gamma": (
        dist.Gamma(two, 3 * ones),
        {"concentration": two.log(), "rate": (3 * ones).log()},
    ),
    "Beta": (
        dist.Beta(two, 3 * ones),
        {"concentration1": two.log(), "concentration0": (3 * ones).log()},
    ),
    "Exponential": (dist.Exponential(two), {"rate": two.log()}),
    "HalfNormal": (dist.HalfNormal(two), {"scale": two.log()}),
    "Poisson": (dist.Poisson(two), {"rate": two.log()}),
    "Bernoulli of logits": (dist.Bernoulli(logits=two), {"logits": two}),
    "Bernoulli": (dist.Bernoulli(two / 8), {"logits": torch.logit(two / 8)}),
    "Categorical": (dist.Categorical(torch.ones(4, 2)), {"logits": torch.full((4, 2), 0.5).log()}),
    "OneHotCategorical": (
        dist.OneHotCategorical(torch.ones(4, 2)),
        {"logits": torch.full((4, 2), 0.5).log()},
    ),
    "Binomial": (dist.Binomial(two, logits=ones), {"total_count": two, "logits": ones}),
    "NegativeBinomial": (
        dist.NegativeBinomial(two, logits=ones),
        {"total_count": two.log(), "logits": ones},
    ),
    "MultivariateNormal": (
        dist.MultivariateNormal(torch.ones(4, 2), scale_tril=tril),
        {"loc": torch.ones(4, 2)},
    ),
    "Weibull": (dist.Weibull(two, 3 * ones), {"concentration": (3 * ones).log()}),
    "VonMises": (dist.VonMises(ones, two), {"loc": ones, "concentration": two.log()}),
    "Geometric": (dist.Geometric(two / 8), {"logits": torch.logit(two / 8)}),
    "GammaPoisson": (dist.GammaPoisson(two, 3 * ones), {"rate": (3 * ones).log()}),
    "AsymmetricLaplace": (dist.AsymmetricLaplace(ones, two, 3 * ones), {"loc": ones}),
    "BetaBinomial": (dist.BetaBinomial(two, ones, 5), {"total_count": 5 * ones}),
    "Dirichlet": (dist.Dirichlet(torch.full((4, 2), 2.0)), {"concentration": LOG_2}),
    "Multinomial": (dist.Multinomial(5, logits=LOG_2), {"logits": LOG_2.log_softmax(-1)}),
    "DirichletMultinomial": (
        dist.DirichletMultinomial(torch.full((4, 2), 2.0), 5),
        {"concentration": LOG_2, "total_count": 5 * ones},
    ),
    "OrderedLogistic": (
        dist.OrderedLogistic(ones, torch.tensor([-1.0, 1.0])),
        {"predictor": ones, "cutpoints": torch.tensor([-1.0, math.log(2.0)]).expand(4, 2)},
    ),
    "OrderedLogistic of ours": (
        OrderedLogistic(ones, torch.tensor([-1.0, 1.0])),
        {"predictor": ones, "cutpoints": torch.tensor([-1.0, math.log(2.0)]).expand(4, 2)},
    ),
    "Censored": (
        Censored("weibull", ones, two, torch.arange(4), 1e6 * ones),
        {"loc": ones, "scale": two.log(), "status": torch.arange(4), "upper": 1e6 * ones},
    ),
    "ZeroInflatedPoisson": (
        dist.ZeroInflatedPoisson(two, gate=two / 8),
        {"gate_logits": torch.logit(two / 8), "base_dist.rate": two.log()},
    ),
    "LowRankMultivariateNormal": (
        dist.LowRankMultivariateNormal(LOG_2, torch.ones(4, 2, 1), torch.full((4, 2), 2.0)),
        {"loc": LOG_2, "cov_factor": torch.ones(4, 2, 1), "cov_diag": LOG_2},
    ),
    "MixtureSameFamily": (
        dist.MixtureSameFamily(
            dist.Categorical(torch.ones(4, 2)),
            dist.Normal(torch.ones(4, 2), torch.full((4, 2), 2.0)),
        ),
        {
            "mixture_distribution.logits": torch.full((4, 2), 0.5).log(),
            "component_distribution.scale": LOG_2,
        },
    ),
    "TransformedDistribution": (
        dist.TransformedDistribution(
            dist.Normal(ones, two),
            [dist.transforms.AffineTransform(ones, two), dist.transforms.SigmoidTransform()],
        ),
        {"base_dist.scale": two.log(), "transforms.0.loc": ones, "transforms.0.scale": two.log()},
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_there_and_back(name):
    """From natural and from unconstrained parameters, also of several draws; and from any reals."""
    base, expected = KNOWN[name]
    value = base.sample()
    for wrapped in (base, base.to_event(1), base.mask(torch.arange(4) > 1)):
        assert is_known(wrapped)
        natural = unconstrained_parameters(wrapped)
        for key, part in expected.items():
            torch.testing.assert_close(natural[key], part)
        density = wrapped.log_prob(value)
        torch.testing.assert_close(with_unconstrained(wrapped, natural).log_prob(value), density)
        more = {key: v.expand(5, *v.shape) for key, v in natural.items()}
        again = with_unconstrained(wrapped, more)
        assert again.batch_shape == (5, *wrapped.batch_shape)
        torch.testing.assert_close(again.log_prob(value), density.expand(5, *density.shape))
    tensors = {name: v.expand(6, *v.shape) for name, v in parameters_of(wrapped).items()}
    again = rebuilt(wrapped, tensors)
    assert again.sample().shape == (6, *base.shape())  # without the mask
    torch.testing.assert_close(again.log_prob(value)[0], base.log_prob(value))
    moved = {key: part - 1.5 for key, part in natural.items()}
    if "total_count" in moved and name != "NegativeBinomial":
        moved["total_count"] = base.total_count
    assert torch.isfinite(with_unconstrained(base, moved).log_prob(value)).all()


class Shifted(dist.Normal):
    """Its constructor takes more than it says in ``arg_constraints``."""

    def __init__(self, loc, scale, shift=0.0, validate_args=None):
        self.shift = shift
        super().__init__(loc, scale, validate_args=validate_args)


@pytest.mark.parametrize(
    "unknown",
    [
        Shifted(ones, two),
        dist.Delta(ones),
        dist.TransformedDistribution(dist.Normal(ones, two), [dist.transforms.PowerTransform(two)]),
        dist.MixtureSameFamily(
            dist.Categorical(torch.ones(4, 2)),
            dist.Normal(torch.ones(4, 2), 1.0).mask(torch.tensor([True, False])),
        ),
    ],
    ids=lambda unknown: type(unknown).__name__,
)
def test_what_tensors_alone_do_not_make_is_not_known(unknown):
    assert not is_known(unknown) and not is_known(unknown.to_event(1))


def test_certain_probabilities_are_finite():
    for p in (torch.tensor([0.0, 1.0]), torch.tensor([[0.0, 1.0]])):
        kind = dist.Bernoulli if p.dim() == 1 else dist.Categorical
        assert torch.isfinite(unconstrained_parameters(kind(probs=p))["logits"]).all()


def test_the_networks_own_logits_are_found():
    x = torch.randn(5, 3)
    model = models.Classification(bayesianize(nn.Linear(3, 3)))
    program = Program(model, x, torch.arange(5) % 3)
    run = program.run(program.initial)
    y = run.observed["y"].distribution
    given = unconstrained_parameters(run.observed["y"].distribution, recorded_output(run, "y"))[
        "logits"
    ]
    assert given is run.deterministic["f"]
    plain = unconstrained_parameters(y)["logits"]
    torch.testing.assert_close(plain, given.log_softmax(-1))
    probs = dist.OneHotCategorical(logits=run.deterministic["f"])
    found = unconstrained_parameters(probs, recorded_output(run, "y"))["logits"]
    assert found is run.deterministic["f"]


def test_outputs_of_something_else_are_not_taken():
    bnn = bayesianize(nn.Linear(3, 3))

    def model(x, y=None):
        outputs = bnn(x)
        pyro.deterministic("f", outputs.square())
        with pyro.plate("data", len(x)), poutine.scale(scale=1.0):
            pyro.sample("y", dist.Categorical(logits=outputs), obs=y)

    program = Program(model, torch.randn(5, 3), torch.arange(5) % 3)
    run = program.run(program.initial)
    y = run.observed["y"].distribution
    found = unconstrained_parameters(y, recorded_output(run, "y"))["logits"]
    torch.testing.assert_close(found, y.logits)
