"""The compiled ELBO gives the losses and gradients of the plain one, step by step, and says where
it cannot."""

import copy
import math
import random
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import nn

from pyro_bdl import bayesianize, models, priors, temperature
from pyro_bdl.elbo import CompiledELBO, TemperedTrace_ELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides import (
    AutoEnsemble,
    AutoLaplaceGGN,
    AutoLastLayer,
    AutoLowRank,
    AutoMAP,
    AutoMatrixNormal,
    AutoMCDropout,
    AutoMeanField,
    AutoSWAG,
)
from pyro_bdl.handlers import local_reparameterization, temper
from pyro_bdl.optim import IVON, GaussNewton_ELBO, InSVI

X = torch.linspace(-1, 1, 12).reshape(6, 2)
Y = torch.tensor([0.1, -0.4, 0.3, 0.9, 0.2, -0.1])
GUIDES = [
    AutoMAP,
    AutoMeanField,
    AutoLowRank,
    AutoMatrixNormal,
    AutoLaplaceGGN,
    AutoLastLayer,
    AutoSWAG,
    AutoMCDropout,
    AutoEnsemble,
    AutoNormal,
    AutoDelta,
]
OPTIONS = {
    "mean field": {},
    "tempered": {"temperature": 0.1},
    "schedule": {"temperature": temperature.linear(0.1, 1.0, 5)},
    "cold": {"cold_temperature": 0.3},
    "particles": {"num_particles": 3},
    "sampled KL": {"bound": TemperedTrace_ELBO},
    "sticking": {"bound": TemperedTrace_ELBO, "sticking_the_landing": True},
}
ESTIMATORS = ["local_reparameterization", "flipout"]


@pytest.fixture(autouse=True)
def _no_warnings():
    """What runs uncompiled must be expected by the test."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=BdlWarning, message="CompiledELBO")
        yield


def _net(dtype=torch.float32):
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).to(dtype)


def _model(net=None, **kwargs):
    kwargs.setdefault("noise", dist.HalfNormal(1.0))
    return models.Regression(bayesianize(_net() if net is None else net), **kwargs)


def _plain(options):
    options = dict(options)
    return options.pop("bound", TemperedTraceMeanField_ELBO)(**options)


class Record(list):
    """What a training run did: (loss, expected log likelihood, KL, temperature) of each step, and
    the parameters and buffers at its end."""

    def __init__(self, make, elbo, batches, *, kind=AutoMeanField, optimiser=None, between=None):
        super().__init__()
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        self.model = make()
        self.guide = kind(self.model)
        optimiser = optimiser or (lambda guide: pyro.optim.Adam({"lr": 0.05}))
        self.guide(*batches[0])
        pyro.set_rng_seed(2)
        svi = SVI(self.model, self.guide, optimiser(self.guide), elbo)
        for number, batch in enumerate(batches):
            if between is not None:
                between(number, self.model, self.guide)
            loss = svi.step(*batch)
            self.append(
                (loss, elbo.expected_log_likelihood.item(), elbo.kl.item(), elbo.temperature)
            )
        self.step = elbo.step
        self.state = {
            **{name: p.detach().clone() for name, p in pyro.get_param_store().named_parameters()},
            **{n: b.clone() for n, b in getattr(self.model, "named_buffers", dict)()},
        }
        self.next = torch.rand(())  # the random numbers go on alike


def _same(options, batches, *, make=_model, rtol=2e-5, replays=None, **how):
    """Train plainly and compiled; the steps are the same, and all but two are replays."""
    plain = Record(make, _plain(options), batches, **how)
    elbo = CompiledELBO(**options)
    ours = Record(make, elbo, batches, **how)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(plain), rtol=rtol, atol=1e-4)
    assert ours.step == plain.step == len(batches)
    for (_, a), (_, b) in zip(ours.state.items(), plain.state.items(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert ours.next == plain.next
    assert elbo.num_replays == (len(batches) - 2 if replays is None else replays)
    return elbo, ours


# The same steps as the plain ELBO


@pytest.mark.parametrize("kind", GUIDES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_guide_and_bound(kind, options):
    elbo, _ = _same(options, [(X, Y)] * 6, kind=kind)
    assert elbo.num_traces == 1


@pytest.mark.parametrize("kind", [AutoMeanField, AutoNormal], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("num_particles", [1, 2])
def test_estimators(kind, estimator, num_particles):
    _same({"estimator": estimator, "num_particles": num_particles}, [(X, Y)] * 5, kind=kind)
