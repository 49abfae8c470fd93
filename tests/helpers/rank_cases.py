"""Data, programs, training and the table of the cases of several processes.

A case is a function of a process's number and of the number of processes.
"""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.nn import PyroParam
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.optim import InSVI

N = 23
DEVICE = "cpu"
ROWS = {(0, 1): slice(None), (0, 2): slice(0, 14), (1, 2): slice(14, None)}
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def data(rank, size):
    """This process's rows of 23: all, the first 14 or the last 9."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    y = x[:, 0].sin() + 0.3 * torch.randn(N, generator=generator, dtype=torch.float64)
    return x[ROWS[rank, size]].to(DEVICE), y[ROWS[rank, size]].to(DEVICE)


def network(seed=0, *, outputs=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def program(num_data=N, **options):
    scale = PyroParam(torch.tensor(1.3, dtype=torch.float64), dist.constraints.positive)
    noise = PyroParam(torch.tensor(0.4, dtype=torch.float64), dist.constraints.positive)
    network_ = bdl.bayesianize(network(**options), bdl.priors.Normal(scale))
    return bdl.models.Regression(network_, noise=noise, num_data=num_data).to(DEVICE)


def parameters(*modules):
    return [p.detach().clone() for module in modules for p in module.parameters()]


def in_svi(model, guide, elbo, batches, optimizer=None):
    if optimizer is None:
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), elbo)
    else:
        svi = InSVI(model, guide, optimizer, elbo, pyro.optim.Adam({"lr": 0.01}))
    return [svi.step(*batch) for batch in batches]


def in_torch(model, guide, elbo, batches):
    guide.prototype(*batches[0])
    objective = elbo(model, guide)
    optimizer = torch.optim.Adam(objective.parameters(), lr=0.05)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = objective(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def failure(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"
