"""Guides trained at once on data of their own are those trained one after another."""

import pyro.distributions as dist
import pytest
import torch

from pyro_bdl import bayesianize, models, priors
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides import AutoMAP, AutoMeanField
from pyro_bdl.training import train
from pyro_bdl.training.parallel_guides import OnOwnData


def program(rows, noise=None):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    noise = dist.HalfNormal(1.0) if noise is None else noise
    return models.Regression(bayesianize(net, priors.FanIn(1.0)), noise=noise, num_data=rows)


def data_of(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2, generator=generator)
    return x, x[:, 0].sin() + 0.1 * torch.randn(rows, generator=generator)


def test_points_are_those_of_separate_trainings():
    data = [data_of(12, seed) for seed in range(3)]
    alone, starts = [], []
    for x, y in data:
        for kept in (alone, starts):
            model = program(12)
            kept.append(AutoMAP(model).prototype(x, y))
        train(alone[-1].program_model, alone[-1], x, y, steps=25)
    together = OnOwnData([g.program_model for g in starts], starts, data)
    losses = together.train(steps=25, progress=False)
    assert losses.shape == (25, 3)
    for place, guide in enumerate(starts):
        together.put(place, guide)
        torch.testing.assert_close(guide.location(), alone[place].location(), rtol=1e-9, atol=1e-9)


def test_a_larger_data_set_counts_with_all_its_rows():
    """Linear in one weight with equal data: what is left out in a step does not matter."""
    x, y = torch.ones(6, 2), torch.full((6,), 2.0)
    data = [(x, y), (x[:5], y[:5])]

    def fitted(kind):
        guides = []
        for part, targets in data:
            model = program(len(part), noise=0.5)
            guides.append(kind(model).prototype(part, targets))
        return guides

    separate = fitted(AutoMAP)
    for guide, (part, targets) in zip(separate, data, strict=True):
        train(guide.program_model, guide, part, targets, steps=25)
    joint = fitted(AutoMAP)
    together = OnOwnData([g.program_model for g in joint], joint, data)
    together.train(steps=25, progress=False)
    for place, guide in enumerate(joint):
        together.put(place, guide)
        torch.testing.assert_close(guide.location(), separate[place].location())
    assert not torch.allclose(joint[0].location(), joint[1].location())


def test_draws_temper_and_losses_that_are_not_finite_are_named():
    data = [data_of(8, seed) for seed in range(2)]
    guides = [AutoMeanField(program(8)).prototype(*part) for part in data]
    together = OnOwnData([g.program_model for g in guides], guides, data)
    losses = together.train(
        steps=5, temperature=0.1, num_particles=2, estimator="local_reparameterization",
        progress=False,
    )  # fmt: skip
    assert losses.isfinite().all()
    data[1] = (data[1][0], data[1][1] * torch.nan)
    with pytest.raises(ValueError, match="data set 1"):
        OnOwnData([g.program_model for g in guides], guides, data).train(steps=2, progress=False)


def test_parameters_of_the_program_are_not_shared_in_silence():
    from pyro.nn import PyroParam

    model = program(8, noise=PyroParam(torch.tensor(0.5), dist.constraints.positive))
    x, y = data_of(8, 0)
    with pytest.raises(UnsupportedProgramError, match="parameters of its own"):
        OnOwnData([model], [AutoMAP(model).prototype(x, y)], [(x, y)])
