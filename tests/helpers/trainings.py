"""A small regression, guides of each kind of noise, and trainings by JAX beside those by torch."""

import pyro
import pyro.distributions as dist
import torch
from guides.conftest import TRAINED
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.training import train

FAMILIES = {family.__name__: family for family in TRAINED} | {
    "AutoMCDropout": lambda model: bdl.guides.AutoMCDropout(model, p=0.3, sites="all"),
    "Gaussian dropout": lambda model: bdl.guides.AutoMCDropout(
        model, p=0.3, sites="all", noise=bdl.guides.GaussianNoise()
    ),
    "learned rates": lambda model: bdl.guides.AutoMCDropout(
        model, p=0.3, sites="all", learn_p=True,
        noise=bdl.guides.BernoulliNoise(temperature=lambda step: 0.05 + 0.02 * step),
    ),
}  # fmt: skip


def data(rows=40):
    x = torch.linspace(-1.0, 1.0, rows)[:, None]
    return x, torch.sin(3 * x[:, 0]) + 0.1 * torch.cos(40 * x[:, 0])


def network(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 5), *layers, nn.Tanh(), nn.Linear(5, 1))


def program(net=None, noise=0.3):
    bnn = bdl.bayesianize(network() if net is None else net)
    return bdl.models.Regression(bnn, noise=noise, num_data=40)


def learned_scales():
    noise = pyro.nn.PyroParam(torch.tensor(0.5), dist.constraints.positive)
    bnn = bdl.bayesianize(network(), prior=bdl.priors.Normal(1.0))
    return bdl.models.Regression(bnn, noise=noise, num_data=40)


def run(backend, model, guide, *args, seed=3, **options):
    """The losses, and all numbers of program and guide after the training."""
    pyro.set_rng_seed(seed)
    record = train(model, guide, *args, backend=backend, **options)
    modules = [m for m in (model, guide) if isinstance(m, nn.Module)]
    numbers = [v.clone() for m in modules for v in m.state_dict().values() if torch.is_tensor(v)]
    return record, numbers


def check_same_trajectory(made, args, *, steps=30, rtol=1e-9, **options):
    """Train by both backends, and compare losses and numbers.

    :param made: makes ``(model, guide, options)``; the options may hold an optimizer.
    """
    records = []
    for backend in ("torch", "jax"):
        model, guide, own = made()
        records.append(run(backend, model, guide, *args, steps=steps, **own, **options))
    (ours, numbers), (theirs, others) = records
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=rtol, atol=rtol)
    torch.testing.assert_close(numbers, others, rtol=rtol, atol=rtol)
    return ours, theirs


def optimized(optimizer, **options):
    """A MAP guide whose parameters an optimizer of torch trains."""

    def made():
        model = program()
        guide = bdl.guides.AutoMAP(model).prototype(*data())
        return model, guide, {"optimizer": optimizer(guide.parameters(), **options)}

    return made


OPTIMIZERS = {
    "Adam": optimized(torch.optim.Adam, lr=0.03, betas=(0.8, 0.99), eps=1e-3),
    "Adam with decay": optimized(torch.optim.Adam, lr=0.03, weight_decay=0.2),
    "AdamW": optimized(torch.optim.AdamW, lr=0.03, weight_decay=0.2),
    "SGD": optimized(torch.optim.SGD, lr=1e-3, weight_decay=0.2),
    "momentum": optimized(torch.optim.SGD, lr=1e-4, momentum=0.9),
    "Nesterov": optimized(torch.optim.SGD, lr=1e-4, momentum=0.9, nesterov=True),
}


def of_program(make):
    def made():
        model = make()
        return model, bdl.guides.AutoMAP(model), {}

    return made


def with_guide(guide, net=None):
    def made():
        model = program(net() if net else None)
        return model, guide(model), {}

    return made
