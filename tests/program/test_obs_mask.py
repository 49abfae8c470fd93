"""Programs with ``pyro.sample(..., obs=y, obs_mask=seen)``."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from torch.distributions import MultivariateNormal

import pyro_bdl as bdl
from pyro_bdl import importance
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.evidence import log_marginal_likelihood
from pyro_bdl.program.program import Program

N, NOISE, FILLER = 30, 0.4, 9.0
DTYPE = torch.float64


def _data(missing=10):
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, N, dtype=DTYPE)
    seen = torch.ones(N, dtype=torch.bool)
    seen[torch.randperm(N)[:missing]] = False
    y = 0.7 * x + NOISE * torch.randn(N, dtype=DTYPE)
    return x, seen, torch.where(seen, y, torch.tensor(FILLER, dtype=DTYPE))


def _one(value=1.0):
    return torch.tensor(value, dtype=DTYPE)


def linear(x, seen, y=None):
    w = pyro.sample("w", dist.Normal(_one(0.0), _one()))
    with pyro.plate("n", len(x)):
        return pyro.sample("y", dist.Normal(w * x, NOISE), obs=y, obs_mask=seen)


def masked(x, seen, y=None):
    """The same without a statement for what was not observed."""
    w = pyro.sample("w", dist.Normal(_one(0.0), _one()))
    with pyro.plate("n", len(x)):
        return pyro.sample("y", dist.Normal(w * x, NOISE).mask(seen), obs=y)


def _exact(x, seen, y):
    """log p(y), and mean and variance of w given y."""
    x, y = x[seen], y[seen]
    cov = torch.outer(x, x) + NOISE**2 * torch.eye(len(x), dtype=DTYPE)
    precision = 1 + x.square().sum() / NOISE**2
    evidence = MultivariateNormal(torch.zeros_like(x), cov).log_prob(y)
    return float(evidence), float((x @ y) / NOISE**2 / precision), float(1 / precision)


def _guide(family, data):
    guide = family(linear)
    bdl.training.train(linear, guide, *data, steps=300, learning_rate=0.1, progress=False)
    return guide


@pytest.mark.parametrize("missing", [0, 25])
def test_evidence_bound_and_number_of_parameters_are_those_of_the_data(missing):
    data = _data(missing)
    evidence, mean, variance = _exact(*data)
    posterior = _guide(bdl.guides.AutoLaplaceGGN, data).laplace_approximation(data)
    assert log_marginal_likelihood(posterior).item() == pytest.approx(evidence, abs=1e-3)
    assert posterior.effective_parameters().item() == pytest.approx(1 - variance, rel=1e-6)
    guide = _guide(bdl.guides.AutoMeanField, data)
    elbo, error = bdl.training.estimate_elbo(linear, guide, *data, with_error=True, progress=False)
    assert error < 0.05
    assert evidence - 0.02 - 4 * error < elbo < evidence + 4 * error
    assert guide.median()["w"].item() == pytest.approx(mean, abs=0.03)
    assert importance.ratios(linear, guide, *data).pareto_k < 0.7


def test_chains_are_of_the_parameters_alone():
    data = _data()
    _, mean, variance = _exact(*data)
    samples = bdl.mcmc.sample(
        linear, *data, num_samples=400, num_warmup=200, num_chains=2, progress=False
    )
    assert list(samples.latents) == ["w"]
    draws = samples.latents["w"]
    assert draws.mean().item() == pytest.approx(mean, abs=0.02)
    assert draws.var().item() == pytest.approx(variance, rel=0.3)


def test_predictions_at_new_inputs_are_drawn_for_every_row():
    data = _data()
    draws = {"w": 0.7 + 0.1 * torch.randn(4000, dtype=DTYPE)}
    x_new = _one(1.0).expand(3)
    for seen in (torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)):
        predictive = bdl.Predictive(linear, bdl.Samples({"w": draws["w"][None]}))
        found = predictive(x_new, seen)["y"]
        assert found.shape == (4000, 3)
        assert found.mean(0).tolist() == pytest.approx([0.7] * 3, abs=0.03)
        variance = NOISE**2 + draws["w"].var().item()
        assert found.var(0).tolist() == pytest.approx([variance] * 3, rel=0.1)
    # at the data, what was not observed is drawn, and what was is not
    found = bdl.Predictive(linear, bdl.Samples({"w": draws["w"][None]}))(*data)["y"]
    x, seen, y = data
    assert torch.equal(found[:, seen], y[seen].expand(4000, -1))
    assert (found[:, ~seen].mean(0) - 0.7 * x[~seen]).abs().max() < 0.05


def test_draws_of_other_samplers_lose_what_was_not_observed():
    data = _data()
    w = 0.7 + 0.1 * torch.randn(1, 200, dtype=DTYPE)
    theirs = bdl.Samples({"w": w, "y_unobserved": torch.randn(1, 200, N, dtype=DTYPE)})
    ours = bdl.Samples({"w": w})
    as_dict = {name: value[0] for name, value in theirs.latents.items()}
    expected = bdl.evaluate(linear, ours, *data, progress=False).scores["nlpd"]
    for posterior in (theirs, as_dict):
        scores = bdl.evaluate(linear, posterior, *data, progress=False).scores
        assert scores["nlpd"] == pytest.approx(expected)
    x_new, seen = _one(1.0).expand(3), torch.ones(3, dtype=torch.bool)
    assert bdl.Predictive(linear, theirs)(x_new, seen)["y"].shape == (200, 3)


def test_scores_are_those_of_a_mask():
    data = _data()
    draws = bdl.Samples({"w": 0.7 + 0.1 * torch.randn(1, 400, dtype=DTYPE)})
    options = {"train": data, "progress": False}
    found = bdl.evaluate(linear, draws, *data, **options)
    expected = bdl.evaluate(masked, draws, *data, **options)
    for key in ("nlpd", "rmse", "nlpd_normal", "expected_nll", "temperature"):
        assert found.scores[key] == pytest.approx(expected.scores[key]), key
    torch.testing.assert_close(found.loo.pointwise, expected.loo.pointwise)
    assert found.seen == expected.seen == (20, N)


def test_a_guide_of_pyro_is_scored_too():
    data = _data()
    guide = AutoNormal(linear)
    guide(*data)
    found = bdl.evaluate(linear, guide, *data, num_samples=100, progress=False)
    assert found.seen == (20, N) and math.isfinite(found.scores["rmse"])


@pytest.mark.parametrize(
    "likelihood",
    [
        lambda f: dist.Poisson(f.exp()),
        lambda f: dist.LogNormal(f, 0.3),
        lambda f: dist.Bernoulli(logits=f),
        lambda f: dist.Categorical(logits=torch.stack([f, -f], -1)),
        lambda f: dist.Normal(f[:, None].expand(-1, 2), 0.3).to_event(1),
    ],
    ids=["Poisson", "LogNormal", "Bernoulli", "Categorical", "to_event"],
)
def test_the_density_is_that_of_the_data_that_were_seen(likelihood):
    x, seen, _ = _data()
    y = likelihood(0.7 * x).sample()

    def model(x, seen, y=None):
        w = pyro.sample("w", dist.Normal(_one(0.0), _one()))
        with pyro.plate("n", len(x)):
            pyro.sample("y", likelihood(w * x), obs=y, obs_mask=seen)

    program = Program(model, x, seen, y)
    assert list(program.latents) == ["w"]
    w = _one(0.3)
    expected = dist.Normal(0.0, 1.0).log_prob(w) + likelihood(w * x).log_prob(y)[seen].sum()
    torch.testing.assert_close(program.log_joint({"w": w}), expected)
    found = bdl.evaluate(
        model, bdl.Samples({"w": w.expand(1, 2)}), x, seen, y, progress=False
    ).scores["nlpd"]
    assert found == pytest.approx(float(-likelihood(w * x).log_prob(y)[seen].mean()), rel=1e-6)


# Missing inputs are latents, since the targets depend on them


def missing_inputs(x, seen, y):
    w = pyro.sample("w", dist.Normal(_one(0.0), _one()))
    with pyro.plate("n", len(y)):
        x = pyro.sample("x", dist.Normal(_one(0.0), _one()), obs=x, obs_mask=seen)
        pyro.sample("y", dist.Normal(w * x, NOISE), obs=y)


def two_outputs(x, seen, y):
    w = pyro.sample("w", dist.Normal(_one(0.0), _one()))
    with pyro.plate("n", len(x)):
        pyro.sample("a", dist.Normal(w * x, NOISE), obs=y, obs_mask=seen)
        pyro.sample("b", dist.Normal(w * x.square(), NOISE), obs=y, obs_mask=~seen)


def test_a_missing_input_is_a_latent_and_an_output_is_none():
    x, seen, y = _data()
    assert list(Program(missing_inputs, x, seen, y).latents) == ["w", "x_unobserved"]
    assert list(Program(two_outputs, x, seen, y).latents) == ["w"]


def masked_latents(x, seen, y):
    w = pyro.sample("w", dist.Normal(_one(0.0), _one()))
    with pyro.plate("n", len(y)):
        u = pyro.sample("u", dist.Normal(_one(0.0), _one()).mask(seen))
        pyro.sample("y", dist.Normal(w * x + u, NOISE), obs=y)


def test_numbers_without_a_density_have_neither_evidence_nor_bound():
    x, seen, y = _data()
    guide = bdl.guides.AutoMeanField(masked_latents).prototype(x, ~seen, y)
    with pytest.raises(UnsupportedProgramError, match=r"20 of the 30 numbers .* 'u'"):
        bdl.training.estimate_elbo(masked_latents, guide, x, ~seen, y, progress=False)
    with pytest.raises(UnsupportedProgramError, match="no ratio"):
        importance.ratios(masked_latents, guide, x, ~seen, y)
    guide = bdl.guides.AutoLaplaceGGN(masked_latents).prototype(x, ~seen, y)
    with pytest.warns(bdl.errors.BdlWarning):
        posterior = guide.laplace_approximation((x, ~seen, y))
    with pytest.raises(UnsupportedProgramError, match="no evidence"):
        log_marginal_likelihood(posterior)


def noisy_inputs(x, seen, y):
    """Inputs of N(0, 1), and targets that are these with noise."""
    with pyro.plate("n", len(y)):
        x = pyro.sample("x", dist.Normal(_one(0.0), _one()), obs=x, obs_mask=seen)
        pyro.sample("y", dist.Normal(x, NOISE), obs=y)


def test_missing_inputs_have_an_evidence():
    """p(y_n) is N(0, 1 + s^2) where x_n is missing, and p(x_n) p(y_n | x_n) where it was seen."""
    x, seen, y = _data()
    scale = _one(1.0 + NOISE**2).sqrt()
    known = dist.Normal(0.0, 1.0).log_prob(x) + dist.Normal(x, NOISE).log_prob(y)
    expected = known[seen].sum() + dist.Normal(0.0, scale).log_prob(y)[~seen].sum()
    guide = bdl.guides.AutoLaplaceGGN(noisy_inputs, structure="full").prototype(x, seen, y)
    mean = torch.where(seen, 0.0, y / scale.square())
    guide.loc.data.copy_(mean)
    posterior = guide.laplace_approximation((x, seen, y))
    torch.testing.assert_close(log_marginal_likelihood(posterior).detach(), expected)
    torch.testing.assert_close(posterior.variances()[seen], torch.ones_like(y[seen]))


def test_chains_draw_from_the_prior_where_an_input_was_seen():
    x, seen, y = _data()
    draws = bdl.mcmc.sample(
        noisy_inputs, x, seen, y, num_warmup=200, num_samples=500, progress=False
    )
    values = draws.latents["x_unobserved"][0]
    variance = torch.where(seen, 1.0, NOISE**2 / (1.0 + NOISE**2))
    error = values.var(0) / variance - 1.0
    assert error.abs().max() < 0.5  # about four errors of a variance of independent draws
    assert draws.stats["num_steps"].max() < 64


@pytest.mark.filterwarnings("ignore:Found vars in model but not guide")
def test_a_bound_of_pyro_is_warned_of():
    """It adds E log p(y_unobserved | w), which is no part of the bound; ours does not."""
    data = _data()
    guide = bdl.guides.AutoMeanField(linear).prototype(*data)
    with pytest.warns(bdl.errors.BdlWarning, match="count the density of 'y_unobserved'"):
        Trace_ELBO().loss(linear, guide, *data)
    guide = bdl.guides.AutoMeanField(linear)
    with warnings.catch_warnings():
        warnings.simplefilter("error", bdl.errors.BdlWarning)
        bdl.elbo.TemperedTrace_ELBO().loss(linear, guide, *data)
