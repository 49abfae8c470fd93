"""Everything that a fit makes survives ``pickle``, ``joblib`` and ``copy.deepcopy``."""

import copy
import pickle
import warnings

import joblib
import numpy as np
import pytest
import torch
from torch import nn

import pyro_bdl as bdl
from pyro_bdl import posteriors, temperature
from pyro_bdl.priors import Normal

X = torch.linspace(-1.0, 1.0, 12, dtype=torch.float64)[:, None]
Y = X[:, 0].sin()
FEW = {"num_warmup": 4, "num_samples": 4, "num_chains": 2}


def joblibbed(value, folder):
    joblib.dump(value, folder / "value.joblib")
    return joblib.load(folder / "value.joblib")


COPIES = {
    "pickle": lambda value, folder: pickle.loads(pickle.dumps(value)),
    "joblib": joblibbed,
    "deepcopy": lambda value, folder: copy.deepcopy(value),
}


@pytest.fixture(params=COPIES)
def copied(request, tmp_path):
    return lambda value: COPIES[request.param](value, tmp_path)


def regression():
    net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    return bdl.models.Regression(bdl.bayesianize(net, Normal(1.0)), noise=0.3, num_data=12)


def predictions(model, posterior):
    torch.manual_seed(5)
    return bdl.Predictive(model, posterior, num_samples=4)(X)


CHAINS = {
    "nuts": lambda model: bdl.mcmc.sample(model, X, Y, **FEW),
    "hmc": lambda model: bdl.mcmc.sample(model, X, Y, kernel="hmc", **FEW),
    "mclmc": lambda model: bdl.mcmc.sample(model, X, Y, kernel="mclmc", **FEW),
    "mams": lambda model: bdl.mcmc.sample(model, X, Y, kernel="mams", **FEW),
    "pyro": lambda model: bdl.mcmc.sample(model, X, Y, backend="pyro", **FEW),
    "sgld": lambda model: bdl.mcmc.sgmcmc(
        model, (X, Y), kernel=bdl.mcmc.SGLD(step_size=bdl.mcmc.Polynomial(1e-4)), **FEW
    ),
}

SLOW = {"nuts", "hmc", "mams"}  # by the code of "mclmc"


@pytest.mark.parametrize(
    "kernel", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CHAINS]
)
def test_draws(kernel, tmp_path):
    model = regression()
    with warnings.catch_warnings(action="ignore"):
        samples = CHAINS[kernel](model)
    for kind, copied in COPIES.items():
        again = copied(samples, tmp_path)
        assert again.info == samples.info and again.stats.keys() == samples.stats.keys()
        expected = predictions(model, samples)
        assert all(torch.equal(v, expected[n]) for n, v in predictions(model, again).items())
        if kind == "deepcopy" and samples.resume is not None:
            assert again.extend(2).num_draws == 6
        else:
            with pytest.raises(ValueError, match="do not know the end"):
                again.extend(2)
        other = regression()  # its file is the original's
        loaded = bdl.load_posterior(again.save(tmp_path / "samples"), other)
        torch.testing.assert_close(predictions(other, loaded)["f"], expected["f"])


SCHEDULES = {
    "number": 0.5,
    "linear": temperature.linear(0.1, 1.0, 50),
    "cosine": temperature.cosine(0.1, 1.0, 50),
    "cyclical": temperature.cyclical(0.1, 1.0, 50, 0.3),
}
ELBOS = {
    "sampled": lambda t: bdl.elbo.TemperedTrace_ELBO(t, sticking_the_landing=True),
    "mean-field": lambda t: bdl.elbo.TemperedTraceMeanField_ELBO(t, num_particles=2),
    "local": lambda t: bdl.elbo.TemperedTraceMeanField_ELBO(
        t, estimator="local_reparameterization"
    ),
    "flipout": lambda t: bdl.elbo.TemperedTraceMeanField_ELBO(t, estimator="flipout"),
    "cold": lambda t: bdl.elbo.TemperedTrace_ELBO(cold_temperature=t),
    "compiled": bdl.elbo.CompiledELBO,
    "limit": bdl.elbo.MeanFieldLimit,
}


PAIRS = [("sampled", name) for name in SCHEDULES] + [(name, "linear") for name in ELBOS]


@pytest.mark.parametrize("elbo, schedule", PAIRS)
def test_bounds_and_schedules(elbo, schedule, copied):
    """A copy goes on at the same step, with another program or the same one."""
    model = regression()
    guide = bdl.guides.AutoMeanField(model).prototype(X, Y)
    bound = ELBOS[elbo](SCHEDULES[schedule])
    for _ in range(3):
        bound.take_step(model, guide, X, Y)
    again = copied(bound)
    assert again.step == 3 and again.temperature == bound.temperature
    assert [again.schedule(t) for t in range(120)] == [bound.schedule(t) for t in range(120)]
    losses = []
    for one in (bound, again):
        torch.manual_seed(2)
        losses.append(float(one.take_step(model, guide, X, Y).loss))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


OPTIONS = {"chains": 2, "warmup": 5, "draws": 5, "max_tree_depth": 3, "rounds": 2, "snapshots": 3,
           "settling": 20}  # fmt: skip


QUICK = {"laplace-evidence", "last-layer", "mean-field", "dropout"}  # the first learn a prior
ALL = [
    pytest.param(entry.name, marks=() if entry.name in QUICK else pytest.mark.slow)
    for entry in posteriors.entries()
]


@pytest.mark.parametrize("name", ALL)
def test_estimators(name, tmp_path):
    x, y = X.numpy(), Y.numpy()
    with warnings.catch_warnings(action="ignore"):
        fitted = bdl.sklearn.BayesianRegressor(
            name, hidden=(3,), steps=20, options=OPTIONS, random_state=0
        ).fit(x, y)
        for copied in COPIES.values():
            again = copied(copied(fitted, tmp_path), tmp_path)
            np.testing.assert_allclose(again.predict(x), fitted.predict(x), rtol=1e-10)
            sd, expected = (one.predict(x, return_std=True)[1] for one in (again, fitted))
            np.testing.assert_allclose(sd, expected, rtol=1e-10)
