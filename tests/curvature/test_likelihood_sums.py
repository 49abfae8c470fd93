"""Factors of the data count in every batch, those of the latents once."""

from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_bdl.curvature.prior import FactorStatements
from pyro_bdl.program import record


def model(x, y):
    with pyro.plate("inputs", 2):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.factor("of_weights", -w.square())
    pyro.factor("of_all", -w.sum().square())
    with pyro.plate("data", len(x)):
        pyro.factor("of_data", -(x @ w).square())
        pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


@pytest.mark.parametrize(("rank", "earlier"), [(None, False), (0, False), (1, False), (None, True)])
def test_what_counts_in_a_batch(rank, earlier):
    ranks = None if rank is None else SimpleNamespace(number=rank)
    statements = FactorStatements(ranks, earlier=earlier)
    run = record(model, {"w": torch.ones(2)}, (torch.ones(3, 2), torch.zeros(3)))
    of_latents = [] if rank == 1 or earlier else ["of_weights", "of_all"]
    for expected in ([*of_latents, "of_data"], ["of_data"]):
        statements.read(run, ())
        assert [name for name, site in run.factors.items() if site in statements.new] == expected
