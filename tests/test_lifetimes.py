"""Nothing of the package keeps a user's data, networks, programs and posteriors once they are gone.

Compiled loops, caches by type or signature, names of parameters and contexts outlive a call.
"""

import gc
import weakref

import pyro
import pytest
import torch
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.guides import AutoLaplaceGGN, AutoMAP, AutoMeanField, AutoSWAG

# a few steps, draws and snapshots
pytestmark = pytest.mark.filterwarnings("ignore::pyro_bdl.errors.BdlWarning")

CHAIN = {"num_warmup": 5, "num_samples": 5, "progress": False}


def trained(model, x, y, family=AutoMeanField, **options):
    guide = family(model)
    bdl.training.train(model, guide, x, y, steps=3, batch_size=4, **options)
    return guide


def laplace(model, x, y, structure):
    guide = AutoLaplaceGGN(model, structure=structure).laplace_approximation((x, y))
    return guide, bdl.LinearizedPredictive(model, guide).moments(x)["y"].mean


def swag(model, x, y):
    guide = AutoSWAG(model).prototype(x, y)
    bdl.training.collect_swag(model, guide, x, y, snapshots=2, learning_rate=1e-4)
    return guide


def refused(model, x, y):
    with pytest.raises(ValueError, match="holds NaN"):
        bdl.training.train(model, AutoMAP(model), x * torch.nan, y, steps=1)


CALLS = {
    "torch": trained,
    "compiled": lambda *data: trained(*data, elbo=bdl.elbo.CompiledELBO()),
    "jax": lambda *data: trained(*data, backend="jax"),
    "held out": lambda *data: trained(*data, held_out=0.3),
    "kron": lambda *data: laplace(*data, "kron"),
    "full": lambda *data: laplace(*data, "full"),
    "swag": swag,
    "predictions": lambda *data: bdl.Predictive(data[0], trained(*data), num_samples=3)(data[1]),
    "comparison": lambda model, x, y: bdl.compare(
        model, {"a": trained(model, x, y)}, x, y, reference=None, num_samples=20, progress=False
    ),
    "chains": lambda *data: bdl.mcmc.sample(*data, kernel="mclmc", **CHAIN),
    "minibatches": lambda model, *data: bdl.mcmc.sgmcmc(
        model, data, kernel=bdl.mcmc.SGLD(step_size=1e-4), batch_size=4, **CHAIN
    ),
    "refusal": refused,
}


def parts_of(result):
    """The result, if it can be watched, and the tensors and guides in it."""
    parts = result if isinstance(result, tuple | list) else [result]
    return [*parts, *(result.values() if isinstance(result, dict) else [])]


@pytest.mark.parametrize("name", CALLS)
def test_what_a_call_got_and_gave_is_freed(name):
    torch.manual_seed(0)
    x, y = torch.randn(12, 2), torch.randn(12)
    network = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    model = bdl.models.Regression(bdl.bayesianize(network), noise=0.3, num_data=12)
    result = CALLS[name](model, x, y)
    watched = {"x": x, "y": y, "model": model, "network": network, "weight": network[0].weight}
    watched |= {f"result {i}": part for i, part in enumerate(parts_of(result))}
    left = {
        key: weakref.ref(value)
        for key, value in watched.items()
        if value is not None and not isinstance(value, dict)
    }
    assert {"x", "model"} <= left.keys()
    watched, result, x, y, model, network = ({}, *[None] * 5)
    gc.collect()
    assert [key for key, value in left.items() if value() is not None] == []
    assert not [key for key in pyro.get_param_store() if "AutoMeanField" in key]
