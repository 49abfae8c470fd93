"""Programs of every observation, Laplace guides of them, and Jacobians by autograd."""

import warnings

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroParam
from torch import nn

from pyro_bdl import bayesianize, models
from pyro_bdl.curvature.linear_outputs import recorded_output
from pyro_bdl.distributions.parameters import unconstrained_parameters
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides import AutoLaplaceGGN
from pyro_bdl.program import Program

N = 6


def net(out=1):
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, out))


class Transposed(nn.Module):
    def forward(self, x):
        return x.mT


def observing(out, distribution, kind=None):
    """A program of its own: ``distribution`` of the network's outputs (N, out)."""
    bnn = bayesianize(net(out))

    def model(x, y=None):
        outputs = bnn(x)
        with pyro.plate("data", len(x)):
            pyro.sample("y", distribution(outputs), obs=y)

    return model


def case(kind):
    """A program over an MLP, with x and y."""
    torch.manual_seed(3)
    x, y = torch.randn(N, 3), torch.randn(N)
    counts, two = torch.arange(N).double(), torch.randn(N, 2)
    F = torch.nn.functional
    softplus = F.softplus
    if kind == "normal":
        return models.Regression(bayesianize(net()), noise=0.4), x, y
    if kind == "several outputs":
        return models.Regression(bayesianize(net(2)), noise=0.4), x, two
    if kind == "learned noise":
        return (
            models.Regression(
                bayesianize(net(2)),
                noise=PyroParam(torch.tensor(0.4), constraint=dist.constraints.positive),
            ),
            x,
            two,
        )
    if kind == "latent noise":
        return models.Regression(bayesianize(net())), x, y
    if kind == "latent noise, several":
        return models.Regression(bayesianize(net(2))), x, two
    if kind == "heteroscedastic":
        return models.HeteroscedasticRegression(bayesianize(net(2))), x, y
    if kind == "student":
        return models.StudentTRegression(bayesianize(net())), x, y
    if kind == "poisson":
        return models.PoissonRegression(bayesianize(net())), x, counts
    if kind == "bernoulli":
        return models.BinaryClassification(bayesianize(net())), x, counts % 2
    if kind == "bernoulli, several":
        return models.BinaryClassification(bayesianize(net(2))), x, (two > 0).double()
    if kind == "categorical":
        return models.Classification(bayesianize(net(3))), x, torch.arange(N) % 3
    if kind == "pixels":  # classes at each position
        conv = nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 3, 3), Transposed())
        bnn = bayesianize(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), *conv))
        return models.Classification(bnn), x, torch.randint(0, 3, (N, 6))
    if kind == "probabilities":
        model = observing(3, lambda f: dist.Categorical(probs=f.softmax(-1)))
        return model, x, torch.arange(N) % 3
    if kind == "one-hot":
        model = observing(3, lambda f: dist.OneHotCategorical(logits=f))
        return model, x, F.one_hot(torch.arange(N) % 3, 3).double()
    if kind == "negative binomial":
        model = observing(
            2, lambda f: dist.NegativeBinomial(softplus(f[:, 0]) + 1.0, logits=f[:, 1])
        )
        return model, x, counts
    if kind == "binomial":
        return observing(1, lambda f: dist.Binomial(7, logits=f[:, 0])), x, counts
    if kind == "gamma":
        model = observing(2, lambda f: dist.Gamma(softplus(f[:, 0]) + 0.5, f[:, 1].exp()))
        return model, x, counts + 0.5
    if kind == "multivariate normal":
        tril = torch.tensor([[0.5, 0.0], [0.2, 0.3]])
        return observing(2, lambda f: dist.MultivariateNormal(f, scale_tril=tril)), x, two
    if kind == "cells in a plate":
        bnn = bayesianize(net(2))

        def model(x, y=None):
            outputs = bnn(x)
            with pyro.plate("outputs", 2, dim=-1), pyro.plate("data", len(x), dim=-2):
                pyro.sample("y", dist.Normal(outputs, 0.4), obs=y)

        return model, x, two
    if kind == "one datum":
        bnn = bayesianize(nn.Linear(3, 1))

        def model(x, y=None):
            pyro.sample("y", dist.Normal(bnn(x[0])[0], 0.4), obs=y)

        return model, x, torch.tensor(0.7)
    assert kind == "two sites"
    bnn = bayesianize(net(4))

    def model(x, y=None, z=None):
        outputs = bnn(x)
        level = pyro.sample("level", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.deterministic("spread", 3.0 * level)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(outputs[:, 0], 0.3), obs=y)
            pyro.sample("z", dist.Categorical(logits=outputs[:, 1:]), obs=z)

    return model, x, y, torch.arange(N) % 3


CONTINUOUS = ["normal", "several outputs", "learned noise", "latent noise", "heteroscedastic"]
KINDS = [
    *CONTINUOUS,
    "latent noise, several",
    "student",
    "poisson",
    "bernoulli",
    "bernoulli, several",
    "categorical",
    "probabilities",
    "one-hot",
    "negative binomial",
    "binomial",
    "gamma",
    "multivariate normal",
    "cells in a plate",
    "one datum",
    "two sites",
]


def approximate(model, args, **options):
    """A Laplace guide somewhere, at no mode."""
    guide = AutoLaplaceGGN(model, **{"structure": "full", **options}).prototype(*args)
    with torch.no_grad():
        guide.loc += 0.1 * torch.randn(len(guide.loc))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        return guide.laplace_approximation([args])


def jacobian(model, guide, args, site):
    """Natural parameters of a site by name, and their Jacobians in u, by autograd."""
    program = Program(model, *args)

    def read(u):
        run = program.run(program.constrain(u)[0])
        return unconstrained_parameters(run.observed[site].distribution, recorded_output(run, site))

    names = list(read(guide.loc))
    values = read(guide.loc)
    found = {
        name: torch.autograd.functional.jacobian(lambda u, n=name: read(u)[n], guide.loc)
        for name in names
    }
    return {name: value.detach() for name, value in values.items()}, found
