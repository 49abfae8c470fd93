"""Posteriors fitted to several data sets, such as folds."""

import pytest
import torch

from pyro_bdl import Samples, bayesianize, models, posteriors, priors
from pyro_bdl.posteriors import Options, Problem

OPTIONS = Options(
    steps=10, chains=2, warmup=5, draws=4, max_tree_depth=3, rounds=2, snapshots=4, settling=20
)


def problem(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 1, generator=generator)
    torch.manual_seed(0)
    network = bayesianize(torch.nn.Linear(1, 1), priors.Normal(1.0))
    y = x[:, 0] + 0.1 * torch.randn(rows, generator=generator)
    return Problem(models.Regression(network, num_data=rows), x, y)


def test_each_data_set_has_its_own_fit():
    problems = [problem(10, seed) for seed in range(2)]
    fits = posteriors.fit_together("map", problems, OPTIONS)
    for one, fit in zip(problems, fits, strict=True):
        alone = posteriors.fit("map", one, OPTIONS)
        assert torch.equal(fit.posterior.location(), alone.posterior.location())
        assert fit.name == "map" and fit.seconds > 0 and fit.settings == alone.settings


def test_an_interrupt_ends_all_fits(monkeypatch):
    """Not only that of the first data set."""
    began = []

    def interrupted(model, x, *rest, **settings):
        began.append(len(x))
        samples = Samples({"w": torch.zeros(1, 2, 1)})
        samples.info["interrupted"] = True
        return samples

    monkeypatch.setattr("pyro_bdl.mcmc.sample", interrupted)
    with pytest.raises(KeyboardInterrupt):
        posteriors.fit_together("nuts", [problem(10, 0), problem(11, 1)], OPTIONS)
    assert began == [10]
