"""Calls of the package by name, for what is true of each (``tests/test_process_state.py``)."""

import math
import tempfile
import types
from pathlib import Path

import pyro
import torch
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.curvature.structures import STRUCTURES
from pyro_bdl.utils.trees import tree_leaves

X = torch.linspace(-1, 1, 24).reshape(12, 2)
Y = X.sum(1).sin()
DRAWS = torch.randn(2, 50, 3, generator=torch.Generator().manual_seed(0))


class Noisy(nn.Module):
    """A network that computes otherwise in training mode, and fails once its runs are used up."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(2, 3), nn.BatchNorm1d(3)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(3, 1)
        self.runs, self.limit = 0, math.inf

    def forward(self, x):
        self.runs += 1
        if self.runs > self.limit:
            raise RuntimeError("midway")
        return self.last(self.drop(self.norm(self.first(x)).tanh()))


class _Slots:
    __slots__ = ("inner",)


class Case:
    """A regression in training mode, and posteriors of it.

    :param hidden: the program is a function, and holds the module where no search would find it.
    """

    def __init__(self, hidden=False, device="cpu"):
        torch.manual_seed(0)
        net = Noisy()
        with torch.no_grad():
            net(3 * X + 1)  # running statistics of their own
        prior = bdl.priors.ByName({"norm.*": None, "*": bdl.priors.Normal(1.0)})
        self.module = bdl.models.Regression(bdl.bayesianize(net, prior), noise=10.0).to(device)
        self.x, self.y = self.data = X.to(device), Y.to(device)
        self.network = self.module.network.network
        held = _Slots()
        held.inner = types.SimpleNamespace(model=self.module)
        self.model = (lambda x, y=None: held.inner.model(x, y)) if hidden else self.module
        self.guide = bdl.guides.AutoMeanField(self.model).prototype(*self.data)
        self.map = bdl.guides.AutoLaplaceGGN(self.model).prototype(*self.data)
        self.posterior = self.map.laplace_approximation(self.data, structure="full")
        draws = self.guide.sample_latents(9)
        self.samples = bdl.Samples({name: value.detach()[None] for name, value in draws.items()})


def _linearized(case):
    predictive = bdl.LinearizedPredictive(case.model, case.posterior, 3)
    return [
        *predictive(case.x).values(),
        predictive.parameter_moments(case.x)["y"].variance["loc"],
        *predictive.joint_parameter_covariance(case.x)["y"],
        predictive.log_density(*case.data)["y"],
    ]


def _loaded(case):
    with tempfile.TemporaryDirectory() as folder:
        guide = bdl.load_posterior(case.guide.save(Path(folder) / "posterior"), case.model)
        return guide.location()


def _sampled(case, **options):
    options = {"num_warmup": 3, "num_samples": 3, "progress": False, **options}
    return bdl.mcmc.sample(case.model, *case.data, **options).latents


def _trained(case, **options):
    """By the guide's parameters alone, since those of a function are not known."""
    guide = bdl.guides.AutoMAP(case.model).prototype(*case.data)
    options |= {"optimizer": torch.optim.Adam(guide.parameters(), lr=0.01), "progress": False}
    return bdl.training.train(case.model, guide, *case.data, **options).losses


def _fitted(x, y):
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    model = bdl.models.Regression(bdl.bayesianize(net), noise=0.3)
    return model, bdl.guides.AutoMeanField(model).prototype(x, y)


# name -> a function of a case, whose results are tensors or arrays
CALLS = {
    "check": lambda case: bdl.Program(case.model, *case.data).check() or (),
    "predict": lambda case: bdl.Predictive(case.model, case.guide, 3)(case.x),
    "draws": lambda case: bdl.Predictive(case.model, case.samples)(case.x)["f"],
    "prior": lambda case: bdl.prior_predictive(case.model, case.x, num_samples=4)["f"],
    "linearized": _linearized,
    **{
        name: lambda case, name=name: case.map.laplace_approximation(
            (case.x[:6], case.y[:6]), structure=name
        ).update((case.x[6:], case.y[6:])).variances()
        for name in STRUCTURES
        if name not in {"diag", "ekfac"}  # which make the same calls as "kron"
    },
    "hessian": lambda case: case.map.laplace_approximation(
        case.data, structure="full", curvature="hessian"
    ).variances(),
    "last layer": lambda case: case.map.laplace_approximation(
        case.data, subset="last-layer"
    ).variances(),
    "refresh": lambda case: case.posterior.refresh() or case.posterior.variances(),
    "evidence": lambda case: bdl.evidence.log_marginal_likelihood(case.posterior),
    "evaluate": lambda case: bdl.evaluate(case.model, case.guide, *case.data).scores["nlpd"],
    "compare": lambda case: bdl.compare(
        case.model, {"a": case.guide, "b": case.posterior}, *case.data, reference=None,
        num_samples=20,
    ).table["nlpd"].to_numpy(),
    "freeze": lambda case: bdl.freeze(case.model, case.guide, case.x[:2], draws=3)(case.x)[0],
    "arviz": lambda case: bdl.to_arviz(
        case.model, case.guide, *case.data, num_samples=4
    )["log_likelihood"]["y"].values,
    "sample": _sampled,
    "sample by pyro": lambda case: _sampled(case, backend="pyro"),
    "sgmcmc": lambda case: bdl.mcmc.sgmcmc(
        case.model, case.data, kernel=bdl.mcmc.SGHMC(step_size=1e-3), num_warmup=3, num_samples=3,
        progress=False,
    ).latents,
    "ratios": lambda case: bdl.importance.ratios(
        case.model, case.guide, *case.data, num_samples=30
    ).log_ratios,
    "simulate": lambda case: bdl.calibration.simulation_based_calibration(
        case.model, lambda model, *data: case.samples, *case.data, num_simulations=10, num_draws=9,
        quantities=lambda draw: {"bias": draw["last.bias"]}, progress=False,
    ).ranks,
    "train": lambda case: _trained(case, steps=2),
    "held out": lambda case: _trained(
        case, steps=6, held_out=bdl.training.HeldOut(0.25, check_every=2)
    ),
    "load_posterior": _loaded,
    "convergence": lambda case: bdl.diagnostics.convergence(DRAWS),
    "k_fold": lambda case: bdl.k_fold(
        _fitted, X, Y, folds=2, num_samples=5, progress=False
    ).pointwise,
    "fit_each": lambda case: bdl.training.fit_each(
        lambda _: _fitted(X, Y), [0], progress=False
    )[0][1].location(),
    "sklearn": lambda case: bdl.sklearn.BayesianRegressor(
        "map", steps=2, hidden=(2,), random_state=0
    ).fit(X, Y).predict(X),
}  # fmt: skip
# Calls with a seed of their own; the others draw from the caller's generators, as torch's own do
SEEDED = {
    "prior", "evidence", "evaluate", "compare", "arviz", "sample", "sample by pyro", "sgmcmc",
    "ratios", "simulate", "convergence",
}  # fmt: skip
TRAINING = {"train", "held out"}
OF_THE_PROGRAM = [n for n in CALLS if n not in {"convergence", "k_fold", "fit_each", "sklearn"}]


def results(name, case):
    """The numbers of a call, from the same random state."""
    pyro.clear_param_store()
    pyro.set_rng_seed(1)
    return [torch.as_tensor(leaf).detach() for leaf in tree_leaves(CALLS[name](case))]
