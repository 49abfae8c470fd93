"""The registry, and that each posterior in it fits a small problem and can be repeated."""

import pytest
import torch

from pyro_bdl import Samples, bayesianize, models, posteriors, priors
from pyro_bdl.posteriors import Options, Problem, Result

OPTIONS = Options(steps=30, chains=2, warmup=20, draws=20, max_tree_depth=4)


@pytest.fixture
def problem():
    x = torch.linspace(-1, 1, 12)[:, None]
    model = models.Regression(bayesianize(torch.nn.Linear(1, 1), priors.Normal(1.0)), num_data=12)
    return Problem(model, x, x[:, 0] + 0.1 * torch.randn(12))


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(posteriors, "_registry", dict(posteriors._registry))


@pytest.mark.parametrize("entry", posteriors.entries(), ids=lambda entry: entry.name)
def test_each_fits_and_can_be_repeated(entry, problem):
    torch.manual_seed(1)
    first = posteriors.fit(entry.name, problem, OPTIONS)
    torch.manual_seed(2)
    again = posteriors.fit(entry.name, problem, OPTIONS)
    assert first.name == entry.name and first.seconds > 0 and not first.interrupted
    assert entry.title and entry.description
    if isinstance(first.posterior, Samples):
        pairs = zip(first.posterior.latents.values(), again.posterior.latents.values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        assert first.elbo is None
    else:
        assert torch.equal(first.posterior.loc, again.posterior.loc)
        assert first.settings["steps"] == 30
        assert first.elbo == again.elbo
        assert (first.elbo is None) == (entry.name == "map")


def test_tempering_narrows_the_posterior(problem):
    options = Options(steps=400)
    plain = posteriors.fit("mean-field", problem, options)
    tempered = posteriors.fit("mean-field-tempered", problem, options)
    assert tempered.settings["temperature"] == 0.1
    assert (tempered.posterior.scale < plain.posterior.scale).all()
    assert tempered.elbo < plain.elbo


def test_one_function_adds_a_posterior(registry, problem):
    @posteriors.register("mine", title="mine", description="what a user adds")
    def _mine(problem, options, progress):
        return Result(f"{options.seed} {progress} {len(problem.x)}", {"a": 1}, interrupted=True)

    found = posteriors.fit("mine", problem, Options(seed=7))
    assert (found.posterior, found.settings, found.interrupted) == ("7 False 12", {"a": 1}, True)
    assert posteriors.entries()[-1].name == "mine"
    with pytest.raises(ValueError, match="'mine' is registered already"):
        posteriors.register("mine", title="", description="")


def test_unknown_name_is_told_what_there_is(problem):
    with pytest.raises(ValueError, match=r"'nutz' \(there are map, .*did you mean 'nuts'"):
        posteriors.fit("nutz", problem)
