"""Runs of chains that another process kills, in a module that it can import."""

import pyro
import pyro.distributions as dist
import torch

from pyro_bdl import mcmc

Y = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
X = torch.linspace(-1, 1, 20, dtype=torch.float64)
TARGETS = 2 * X + torch.cos(9 * X)


def model(y):
    w = pyro.sample("w", dist.Normal(torch.zeros(3, dtype=torch.float64), 1.0).to_event(1))
    s = pyro.sample("s", dist.Gamma(torch.tensor(2.0, dtype=torch.float64), 1.0))
    pyro.sample("y", dist.Normal(w, s).to_event(1), obs=y)


def line(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=torch.float64), 1.0).to_event(1))
    with pyro.plate("data", 20, subsample_size=len(x)):
        pyro.sample("y", dist.Normal(w[0] + w[1] * x, 0.5), obs=y)


def drawn(kernel, num_samples=12, y=Y, **options):
    options = {
        "num_warmup": 20,
        "num_chains": 2,
        "seed": 1,
        "progress": False,
        "init": "uniform",
    } | options
    kernel = mcmc.MCLMC(thinning=2) if kernel == "mclmc" else kernel
    return mcmc.sample(model, y, kernel=kernel, num_samples=num_samples, **options)


def walked(num_samples=12, data=None, **options):
    options = {"num_warmup": 10, "num_chains": 2} | options
    options = {"kernel": mcmc.SGHMC(step_size=1e-3, thinning=2)} | options
    if data is None:
        data = X, TARGETS
        options = {"batch_size": 6} | options
    return mcmc.sgmcmc(line, data, num_samples=num_samples, progress=False, **options)
