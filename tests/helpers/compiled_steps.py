"""Training runs under the plain and the compiled ELBO, and their comparison."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.guide_programs import small_net
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta, AutoNormal
from torch import nn

from pyro_bdl import bayesianize, models, temperature
from pyro_bdl.elbo import CompiledELBO, TemperedTrace_ELBO, TemperedTraceMeanField_ELBO
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
from pyro_bdl.optim import InSVI

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
SCHEDULE = temperature.linear(0.1, 1.0, 5)
BOUNDS = {
    "cold": {"cold_temperature": 0.3},
    "cold particles": {"cold_temperature": 0.3, "num_particles": 3},
    "sampled": {"bound": TemperedTrace_ELBO, "temperature": SCHEDULE},
    "sticking": {"bound": TemperedTrace_ELBO, "sticking_the_landing": True, "num_particles": 2},
    "local": {"estimator": "local_reparameterization"},
    "local particles": {"estimator": "local_reparameterization", "num_particles": 2},
    "flipout": {"estimator": "flipout", "temperature": SCHEDULE},
}


def regression(net=None, **kwargs):
    kwargs.setdefault("noise", dist.HalfNormal(1.0))
    return models.Regression(bayesianize(small_net() if net is None else net), **kwargs)


def plain_elbo(options):
    options = {n: value for n, value in options.items() if n not in ("backend", "max_graphs")}
    return options.pop("bound", TemperedTraceMeanField_ELBO)(**options)


class Record(list):
    """The record of a training run: (loss, expected log likelihood, KL, temperature) of each step,
    and the parameters and buffers at its end."""

    def __init__(self, make, elbo, batches, *, kind=AutoMeanField, optimizer=None, between=None):
        super().__init__()
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        self.model = make()
        self.guide = kind(self.model)
        optimizer = optimizer or (lambda guide: pyro.optim.Adam({"lr": 0.05}))
        self.guide(*batches[0])
        pyro.set_rng_seed(2)
        adam_or_own = optimizer(self.guide)
        kind = InSVI if isinstance(adam_or_own, torch.optim.Optimizer) else SVI
        svi = kind(self.model, self.guide, adam_or_own, elbo)
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


def num_replays(steps):
    """Of steps that are one kind of evaluation: all but 1, which traces, and 2, 4, 8, ..."""
    return steps - steps.bit_length()


def same_steps(options, batches, *, make=regression, rtol=2e-5, replays=None, **how):
    """Train plainly and compiled; the steps are the same, and the graph runs all that are not
    compared."""
    plain = Record(make, plain_elbo(options), batches, **how)
    elbo = CompiledELBO(**options)
    ours = Record(make, elbo, batches, **how)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(plain), rtol=rtol, atol=1e-4)
    assert ours.step == plain.step == len(batches)
    for (_, a), (_, b) in zip(ours.state.items(), plain.state.items(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert ours.next == plain.next
    assert elbo.num_replays == (num_replays(len(batches)) if replays is None else replays)
    return elbo, ours


# The same steps as the plain ELBO


def _cases(first, second, by_default):
    """All pairs, those outside of ``by_default(a, b)`` marked slow."""
    return [
        pytest.param(a, b, id=f"{a if isinstance(a, int | str) else a.__name__}-{b.__name__}",
                     marks=() if by_default(a, b) else pytest.mark.slow)
        for a in first
        for b in second
    ]  # fmt: skip


def regression_with(*layers):
    return regression(nn.Sequential(nn.Linear(2, 3), *layers, nn.Linear(3, 1)))
