"""The case of what goes wrong on one of several processes, as messages."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.rank_cases import N, case, data, failure, in_svi, parameters, program
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.distributed import DataParallel_ELBO, Shard
from pyro_bdl.elbo import TemperedTraceMeanField_ELBO
from pyro_bdl.evidence import variational_em
from pyro_bdl.guides import AutoLaplaceGGN, AutoMAP, AutoMeanField


def first_step(model, guide, batch):
    elbo = DataParallel_ELBO(TemperedTraceMeanField_ELBO())
    return failure(lambda: in_svi(model, guide, elbo, [batch]))


@case
def failures(rank, size):
    if size == 1:
        return {}
    x, y = data(rank, size)
    found = {}
    model = program()
    guide = AutoMAP(model)
    elbo = DataParallel_ELBO(TemperedTraceMeanField_ELBO(), check_every=2)
    in_svi(model, guide, elbo, [(x, y)] * 2)
    if rank == 1:
        with torch.no_grad():
            guide.loc[3] += 0.5
    found["apart"] = failure(lambda: in_svi(model, guide, elbo, [(x, y)]))
    laplace = AutoLaplaceGGN(program()).prototype(x, y)
    laplace.loc.data += 0.1 * rank
    found["other point"] = failure(lambda: laplace.laplace_approximation(Shard((x, y))))

    bad = x.clone()
    bad[2, 1] = math.nan if rank else 0.0
    model = program()
    guide = AutoMAP(model)
    elbo = DataParallel_ELBO(TemperedTraceMeanField_ELBO())
    in_svi(model, guide, elbo, [(x, y)])
    before = parameters(guide)
    found["nan"] = failure(lambda: in_svi(model, guide, elbo, [(bad, y)]))
    found["kept"] = all(map(torch.equal, before, parameters(guide)))
    found["later step"] = failure(lambda: in_svi(model, guide, elbo, [(x, y[: len(y) - rank])]))
    found["evaluation"] = failure(lambda: elbo.loss(model, guide, x, y[: len(y) - rank]))
    in_svi(model, guide, elbo, [(x, y)])  # which the ranks still do together
    found["kept in step"] = parameters(guide)
    model = program()
    found["first step"] = first_step(model, AutoMAP(model), (x, y[: 9 - rank]))
    wide = nn.Sequential(nn.Linear(3, 4 + rank), nn.Tanh(), nn.Linear(4 + rank, 1)).double()
    model = bdl.models.Regression(bdl.bayesianize(wide), noise=0.4, num_data=N)
    found["other network"] = first_step(model, AutoMAP(model), (x, y))
    model = program(20)
    found["too many"] = first_step(model, AutoMAP(model), (x, y))
    model = program(20 + rank)
    found["other N"] = first_step(model, AutoMAP(model), (x[:2], y[:2]))
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    model = bdl.models.Regression(bdl.bayesianize(layers), noise=0.4, num_data=N)
    found["batch norm"] = first_step(model, AutoMAP(model), (x, y))
    model.eval()
    found["batch norm, evaluation mode"] = first_step(model, AutoMAP(model), (x, y))

    laplace = AutoLaplaceGGN(program()).prototype(x, y)
    batches = [(x, y), (bad, y)]
    found["first batch"] = failure(lambda: laplace.laplace_approximation(Shard(batches[::-1])))
    found["second batch"] = failure(lambda: laplace.laplace_approximation(Shard(batches)))
    nothing = [(x, y)][rank:]
    found["no batch"] = failure(lambda: laplace.laplace_approximation(Shard(nothing)))

    def picks(x, y):
        w = pyro.sample("w", dist.Normal(x.new_zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x), subsample_size=4) as rows:
            pyro.sample("y", dist.Normal(x[rows] @ w, 1.0), obs=y[rows])

    found["picks"] = first_step(picks, AutoMeanField(picks), (x[:9], y[:9]))
    model = program(None)
    found["unknown N"] = first_step(model, AutoMAP(model), (x, y))
    model = program()
    guide = AutoMeanField(model).prototype(x, y)
    found["all data"] = failure(lambda: variational_em(model, guide, Shard((x, y)), rounds=1))
    sampler = torch.utils.data.DistributedSampler(range(N), 2, rank, shuffle=False)
    x, y = (part[list(sampler)] for part in data(0, 1))
    laplace = AutoLaplaceGGN(program()).prototype(x, y)
    with pytest.warns(bdl.errors.BdlWarning) as caught:
        laplace.laplace_approximation(Shard((x, y)))
    found["repeated"] = " ".join(str(warning.message) for warning in caught)
    return found
