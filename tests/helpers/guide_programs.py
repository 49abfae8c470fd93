"""A small network, a program of every support, and steps of SVI."""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from torch import nn

from pyro_bdl import bayesianize, models
from pyro_bdl.elbo import TemperedTrace_ELBO, TemperedTraceMeanField_ELBO

ELBOS = [Trace_ELBO, TraceMeanField_ELBO, TemperedTrace_ELBO, TemperedTraceMeanField_ELBO]
X = torch.linspace(-1, 1, 12).reshape(6, 2)
Y = torch.tensor([0.1, -0.4, 0.3, 0.9, 0.2, -0.1])


def small_net(dtype=torch.float32):
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).to(dtype)


def regression(dtype=torch.float32, **kwargs):
    kwargs.setdefault("noise", dist.HalfNormal(1.0))
    return models.Regression(bayesianize(small_net(dtype)), **kwargs)


def constrained(x=None, y=None):
    s = pyro.sample("positive", dist.HalfNormal(torch.tensor([1.0, 2.0])).to_event(1))
    u = pyro.sample("unit", dist.Beta(2.0, torch.tensor(3.0)))
    p = pyro.sample("simplex", dist.Dirichlet(torch.ones(3)))
    chol = pyro.sample("chol", dist.LKJCholesky(2, torch.tensor(1.0)))
    with pyro.plate("rows", 4):
        z = pyro.sample("z", dist.LogNormal(0.0, torch.tensor(1.0)))
    mean = s.sum() + u + p[0] + chol[1, 0] + z.sum()
    pyro.sample("y", dist.Normal(mean, 1.0), obs=torch.tensor(2.0))


SHAPES = {
    "positive": (2,),
    "unit": (),
    "simplex": (3,),
    "chol": (2, 2),
    "z": (4,),
}


def losses_of(guide, model, elbo, steps=20, lr=0.05, x=X, y=Y):
    svi = SVI(model, guide, pyro.optim.Adam({"lr": lr}), elbo)
    return [svi.step(x, y) for _ in range(steps)]


# Saving, loading, copying


def trained(kind, model, steps=5):
    guide = kind(model)
    losses_of(guide, model, TemperedTrace_ELBO(), steps)
    return guide


def same_medians(a, b):
    return all(torch.equal(b.median()[name], value) for name, value in a.median().items())
