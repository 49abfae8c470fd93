"""Cases of several processes: Laplace approximations and what is built on them."""

import functools

import torch
from helpers.rank_cases import N, case, data, network, parameters, program

import pyro_bdl as bdl
from pyro_bdl.distributed import Shard, broadcast
from pyro_bdl.elbo import TemperedTrace_ELBO
from pyro_bdl.evidence import log_marginal_likelihood, maximize
from pyro_bdl.guides import (
    AutoEnsemble,
    AutoLaplaceGGN,
    AutoLastLayer,
    AutoMAP,
    AutoSubnetwork,
    selectors,
)

STRUCTURES = {
    "full": {"structure": "full"},
    "kron": {"structure": "kron"},
    "ekfac": {"structure": "ekfac"},
    "diag": {"structure": "diag"},
    "low_rank": {"structure": bdl.curvature.LowRank(6)},
    "hessian": {"structure": "full", "curvature": "hessian"},
    "empirical": {"structure": "kron", "curvature": "empirical-fisher"},
}


def shard(rank, size):
    batch = data(rank, size)
    if size == 1:
        return batch
    parts = [part.split(5) for part in batch]
    return Shard(list(zip(*parts, strict=True)))


def facts(posterior):
    """Numbers that depend on all of a posterior."""
    precision, p = posterior.precision, posterior.subset.size
    where = posterior.location()
    directions = torch.linspace(-1.0, 1.0, 3 * p, dtype=torch.float64).view(3, p).sin().to(where)
    return [
        precision.logdet().detach(),
        precision.variances(),
        precision.quadratic(directions),
        posterior.location(),
        posterior.log_likelihood,
        posterior.squares,
        float(posterior.num_data),
        log_marginal_likelihood(posterior).detach(),
    ]


@functools.cache
def maximum():
    """The result of a single process with all data."""
    model = program()
    guide = AutoMAP(model).prototype(*data(0, 1))
    optimizer = torch.optim.LBFGS([guide.loc], max_iter=500, line_search_fn="strong_wolfe")
    objective = TemperedTrace_ELBO()(model, guide)

    def closure():
        optimizer.zero_grad()
        loss = objective(*data(0, 1))
        loss.backward()
        return loss

    optimizer.step(closure)
    return guide.loc.detach()


def laplace(name):
    def run(rank, size):
        model = program(seed=rank)
        guide = AutoLaplaceGGN(model, **STRUCTURES[name]).prototype(*data(rank, size))
        if rank == 0:
            guide.loc.data.copy_(maximum())
        broadcast(model, guide)
        posterior = guide.laplace_approximation(shard(rank, size))
        found = facts(posterior)
        if name == "hessian":  # which would not be positive elsewhere
            return found
        found += facts(posterior.update(shard(rank, size)))
        exact = name == "full"  # others find the linearized model's optimum to a tolerance
        return [*found, *maximize(posterior, steps=5, linearized=exact).history]

    run.__name__ = f"laplace_{name}"
    return case(run)


for name in STRUCTURES:
    laplace(name)


@case
def last_layer(rank, size):
    """Classes, whose mode takes passes over the data; and rates in closed form."""
    x, y = data(rank, size)
    classes = (y > 0).long() + (y > 0.5).long()
    found = []
    for model, target in (
        (program(), y),
        (bdl.models.Classification(bdl.bayesianize(network(outputs=3), bdl.priors.Normal(1.0)),
                                   num_data=N), classes),
    ):  # fmt: skip
        guide = AutoLastLayer(model).prototype(x, target)
        batch = (x, target)
        found += facts(guide.laplace_approximation(Shard(batch) if size > 1 else batch))
    return found


@case
def built_on_laplace(rank, size):
    """Subnetworks chosen by Laplace, members of an ensemble, hyperparameters in training."""
    found = []
    torch.manual_seed(0)
    model = program()
    guide = AutoSubnetwork(model, select=selectors.LargestVariance(), size=6)
    guide.prototype(*data(rank, size)).loc.data.copy_(maximum())
    found += facts(guide.laplace_approximation(shard(rank, size)))
    model = program()
    ensemble = AutoEnsemble(model, size=2).prototype(*data(rank, size))
    for member in ensemble.laplace_approximation(shard(rank, size)).members:
        found += facts(member)
    guide = AutoLaplaceGGN(model).prototype(*data(rank, size))
    guide.loc.data.copy_(maximum())
    posterior = guide.laplace_approximation(shard(rank, size))
    maximize(posterior, steps=10)
    return [*found, *facts(posterior), *parameters(model)]


@case
def few_rows_of_many_inputs(rank, size):
    """Kronecker factors of 60 inputs from 23 rows, which are vectors on each rank."""
    x, y = data(rank, size)
    x = torch.cat([x, torch.outer(x[:, 0], torch.linspace(-1.0, 1.0, 57, dtype=x.dtype)).sin()], 1)
    found = []
    for structure in ("kron", "ekfac"):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(60, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        model = bdl.models.Regression(bdl.bayesianize(net.double()), noise=0.4, num_data=N)
        guide = AutoLaplaceGGN(model, structure=structure).prototype(x, y)
        posterior = guide.laplace_approximation(Shard((x, y)) if size > 1 else (x, y))
        found += facts(posterior)
    return found
