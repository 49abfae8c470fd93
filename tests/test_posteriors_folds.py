"""Posteriors fitted to several data sets at once."""

import torch

from pyro_bdl import Samples, bayesianize, models, posteriors, priors
from pyro_bdl.posteriors import Options, Problem

OPTIONS = Options(steps=10, chains=2, warmup=5, draws=4, max_tree_depth=3, snapshots=4, settling=20)


def problem(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 1, generator=generator)
    torch.manual_seed(0)
    network = bayesianize(torch.nn.Linear(1, 1), priors.Normal(1.0))
    y = x[:, 0] + 0.1 * torch.randn(rows, generator=generator)
    return Problem(models.Regression(network, num_data=rows), x, y)


def test_they_are_the_separate_fits():
    problems = [problem(10, seed) for seed in range(3)]
    for name in ("map", "subnetwork"):
        together = posteriors.fit_together(name, problems, OPTIONS)
        for known, fit in zip(problems, together, strict=True):
            alone = posteriors.fit(name, known, OPTIONS)
            torch.testing.assert_close(fit.posterior.location(), alone.posterior.location())
            assert fit.name == name and fit.seconds > 0 and fit.settings == alone.settings


def test_what_is_not_trained_by_svi_alone_is_fitted_one_after_another():
    problems = [problem(10, 0), problem(11, 1)]
    for name in ("swag", "ensemble", "ivon", "last-layer"):  # of several kinds
        fits = posteriors.fit_together(name, problems, OPTIONS)
        assert len(fits) == 2
        assert not torch.equal(fits[0].posterior.location(), fits[1].posterior.location())
    assert all(
        isinstance(fit.posterior, Samples)
        for fit in posteriors.fit_together("sghmc", problems, OPTIONS)
    )
