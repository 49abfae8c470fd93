"""The structure that "auto" takes."""

import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_bdl import bayesianize, models, priors
from pyro_bdl.curvature import Full, config
from pyro_bdl.curvature.config import chosen_config
from pyro_bdl.curvature.prior import run_at
from pyro_bdl.guides import AutoLaplaceGGN
from pyro_bdl.program.batches import Batches
from pyro_bdl.program.saved import example_rows
from pyro_bdl.program.subset import Subset

pytestmark = pytest.mark.filterwarnings("ignore:the guide is not at a maximum")


def guide_and_data(prior=None, **options):
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))  # 50 weights
    x, y = torch.randn(10, 3), torch.randn(10, 2)  # 20 outputs
    model = models.Regression(bayesianize(net, prior), noise=dist.HalfNormal(1.0))
    return AutoLaplaceGGN(model, structure="auto", **options).prototype(x, y), (x, y)


def chosen(prior=None, data=None, *, subset=None, full_up_to=40, kernel_up_to=4096, **options):
    """The structure for 51 latents, with the limits given."""
    guide, own = guide_and_data(prior, **options)
    subset, batches = Subset(guide.layout, subset), Batches(data or own)
    few = example_rows(guide.program_model, guide.layout, guide.location(), batches.first())
    run, leaves = run_at(guide.program_model, subset, guide.location().detach(), *few)
    limits = {"full_up_to": full_up_to, "kernel_up_to": kernel_up_to}
    return chosen_config(guide.config, run, leaves, subset, few, batches, **limits).structure.name


def test_by_size():
    guide, data = guide_and_data()
    assert guide.laplace_approximation(data).config.structure == Full()
    assert chosen(full_up_to=2000) == "full"
    assert chosen() == "kernel"  # 40 rows: of location and noise
    x, y = torch.randn(30, 3), torch.randn(30, 2)
    assert chosen(data=(x, y)) == "kron"
    assert chosen(data=[(x[:8], y[:8]), (x[8:14], y[8:14])]) == "kron"
    assert chosen(data=[(x[:8], y[:8]), (x[8:12], y[8:12])]) == "kernel"
    assert chosen(curvature="empirical-fisher", data=(x, y)) == "kernel"  # one row a datum
    assert chosen(kernel_up_to=30) == "kron"


def test_by_memory(monkeypatch):
    monkeypatch.setattr(config, "available_memory", lambda device: 100)
    assert chosen(full_up_to=2000) == "kron"


def test_by_prior():
    """Under a hyperprior, the prior precision may be indefinite."""
    assert chosen(priors.Normal(dist.HalfNormal(0.05))) == "kron"


def test_over_parts_of_sites():
    assert chosen(subset=torch.arange(5), full_up_to=4) == "full"


def test_a_hessian_is_full():
    assert chosen(curvature="hessian", full_up_to=4) == "full"


def test_it_is_the_default_and_the_printed_guide_names_it():
    guide, data = guide_and_data()
    posterior = AutoLaplaceGGN(guide.program_model).laplace_approximation(data)
    assert repr(posterior) == "LaplaceGuide(51 latent numbers, 5 sites, structure=Full())"
    kron = guide.laplace_approximation(data, structure="kron", subset="2.*")
    assert repr(kron).endswith("18 with a covariance, structure=Kron(reduce=False))")
