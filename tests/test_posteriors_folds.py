"""Posteriors fitted to several data sets at once."""

import pytest
import torch

from pyro_bdl import Samples, bayesianize, models, posteriors, priors
from pyro_bdl.posteriors import Options, Problem
from pyro_bdl.training import put_off

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


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
@pytest.mark.parametrize("name", ["map", "subnetwork", "laplace-evidence"])
def test_they_are_the_separate_fits(name, monkeypatch):
    """Trained at once, also in rounds at prior scales that differ between the data sets."""
    problems = [problem(10, seed) for seed in range(2)]
    alone = [posteriors.fit(name, each, OPTIONS) for each in problems]
    monkeypatch.delattr(put_off, "train")
    together = posteriors.fit_together(name, problems, OPTIONS)
    for one, fit in zip(alone, together, strict=True):
        torch.testing.assert_close(fit.posterior.location(), one.posterior.location())
        assert fit.name == name and fit.seconds > 0 and fit.settings == one.settings
        assert fit.log_evidence == pytest.approx(one.log_evidence)
    assert len({str(fit.settings) for fit in together}) == 1 + (name == "laplace-evidence")


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
