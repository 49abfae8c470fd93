"""The linearized predictive of mixtures of Laplace approximations."""

import pyro
import pytest
import torch
from torch import nn

import pyro_bdl as bdl
from pyro_bdl import LinearizedPredictive
from pyro_bdl.guides import AutoEnsemble, AutoLaplaceGGN, MixtureGuide

WEIGHTS = [0.25, 0.75]


@pytest.fixture
def mixture(conjugate):
    """Two Gaussians around different points of a linear model, whose predictions are exact."""
    members = []
    for shift in (-0.5, 1.0):
        guide = AutoLaplaceGGN(conjugate.model, structure="full")
        guide.prototype(conjugate.x, conjugate.y)
        guide.loc.data.copy_(conjugate.mean() + shift)
        data = (conjugate.x, conjugate.y)
        with pytest.warns(bdl.errors.BdlWarning, match="not at a maximum"):
            members.append(guide.laplace_approximation(data))
    return MixtureGuide(members, WEIGHTS)


def parts(conjugate):
    """Means (2, N) and the variance (N,) of the members' functions, by hand."""
    covariance = torch.linalg.inv(conjugate.precision())
    variance = (conjugate.design @ covariance * conjugate.design).sum(-1)
    shifts = torch.tensor([-0.5, 1.0], dtype=torch.float64)
    return (conjugate.mean() + shifts[:, None]) @ conjugate.design.mT, variance


def test_moments_and_covariances(conjugate, mixture):
    """The law of total variance over members (Eschenhagen et al. 2021)."""
    predictive = LinearizedPredictive(conjugate.model, mixture)
    assert isinstance(predictive, LinearizedPredictive)
    means, variance = parts(conjugate)
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    mean = weights @ means
    total = variance + weights @ (means - mean).square()
    found = predictive.parameter_moments(conjugate.x)["y"]
    torch.testing.assert_close(found.mean["loc"], mean)
    torch.testing.assert_close(found.variance["loc"], total)
    torch.testing.assert_close(found.predictive_variance, total + 0.25)
    center, joint = predictive.joint_parameter_covariance(conjugate.x)["y"]
    inside = conjugate.design @ torch.linalg.inv(conjugate.precision()) @ conjugate.design.mT
    spread = torch.einsum("k,ki,kj->ij", weights, means - mean, means - mean)
    torch.testing.assert_close(center, mean)
    torch.testing.assert_close(joint, inside + spread)
    torch.testing.assert_close(predictive.parameter_covariance(conjugate.x)["y"][1][:, 0, 0], total)
    of_f = predictive.parameter_moments(conjugate.x, sites=["f"])["f"]
    torch.testing.assert_close(of_f.variance, total)
    found = predictive.joint_covariance(conjugate.x)["y"].covariance[:, 0, :, 0]
    torch.testing.assert_close(found, joint + 0.25 * torch.eye(8).double())


def test_density(conjugate, mixture):
    """sum_k weight_k p_k(y | x) (Eschenhagen et al. 2021)."""
    means, variance = parts(conjugate)
    normal = torch.distributions.Normal(means, (variance + 0.25).sqrt())
    expected = torch.logsumexp(
        normal.log_prob(conjugate.y) + torch.tensor(WEIGHTS).double().log()[:, None], 0
    )
    predictive = LinearizedPredictive(conjugate.model, mixture)
    found = predictive.log_density(conjugate.x, conjugate.y)["y"]
    torch.testing.assert_close(found, expected)


def test_draws(conjugate, mixture):
    predictive = LinearizedPredictive(conjugate.model, mixture, num_samples=4000)
    drawn = predictive(conjugate.x)
    moments = predictive.parameter_moments(conjugate.x)["y"]
    assert drawn["f"].shape == drawn["y"].shape == (4000, 8)
    for name, variance in (("f", moments.variance["loc"]), ("y", moments.predictive_variance)):
        error = (drawn[name].mean(0) - moments.mean["loc"]) / variance.sqrt()
        assert error.abs().max() < 4.5 / 4000**0.5
        torch.testing.assert_close(drawn[name].var(0), variance, rtol=0.15, atol=0)
    drawn = predictive.draw_moments(conjugate.x)["y"].over_draws()
    error = (drawn.mean - moments.mean["loc"]) / drawn.variance.sqrt()
    assert error.abs().max() < 4.5 / 4000**0.5
    torch.testing.assert_close(drawn.variance, moments.predictive_variance, rtol=0.15, atol=0)
    density = predictive.log_likelihood(conjugate.x, conjugate.y)["y"]
    exact = predictive.log_density(conjugate.x, conjugate.y)["y"]
    ratio = (density - exact).exp()
    assert ((ratio.mean(0) - 1.0).abs() < 4.5 * ratio.std(0) / 4000**0.5).all()


def test_a_member_of_weight_zero_says_nothing(conjugate, mixture):
    alone = LinearizedPredictive(conjugate.model, mixture.members[1])
    one = LinearizedPredictive(conjugate.model, MixtureGuide(list(mixture.members), [0.0, 2.0]))
    expected = alone.parameter_moments(conjugate.x)["y"]
    found = one.parameter_moments(conjugate.x)["y"]
    torch.testing.assert_close(found.variance["loc"], expected.variance["loc"])
    assert torch.isfinite(one.log_density(conjugate.x, conjugate.y)["y"]).all()
    assert one(conjugate.x)["f"].shape == (100, 8)


@pytest.fixture(scope="module")
def classes():
    torch.manual_seed(0)
    pyro.clear_param_store()
    x = torch.randn(30, 2, dtype=torch.float64)
    y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 0] > 1).long()
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model = bdl.models.Classification(bdl.bayesianize(net), num_data=30)
    guide = AutoEnsemble(model, size=3).prototype(x, y)
    bdl.training.train(model, guide, x, y, steps=300)
    return model, guide.laplace_approximation((x, y), structure="kron"), x, y


@pytest.mark.parametrize("method", ["centered-probit", "probit", "laplace-bridge", "monte-carlo"])
def test_class_probabilities_are_averaged(classes, method):
    model, mixture, x, _ = classes
    predictive = LinearizedPredictive(model, mixture, 2000)
    found = predictive.probabilities(x, method=method)["y"]
    members = [LinearizedPredictive(model, member, 2000) for member in mixture.members]
    apart = torch.stack([member.probabilities(x, method=method)["y"] for member in members])
    tolerance = 0.05 if method == "monte-carlo" else 1e-12
    torch.testing.assert_close(found, apart.mean(0), rtol=0, atol=tolerance)
    torch.testing.assert_close(found.sum(-1), torch.ones(30, dtype=torch.float64))


def test_in_a_comparison(classes):
    """A mixture of Laplace approximations is evaluated in the linear model, as its members are."""
    model, mixture, x, y = classes
    found = bdl.evaluate(model, mixture, x, y, num_samples=400)
    linear = LinearizedPredictive(model, mixture, 2000).mean(x)["y"].mean(0)
    torch.testing.assert_close(found.mean, linear, rtol=0, atol=0.06)


def test_with_a_seed_members_are_independent_and_all_calls_about_the_same_draws(conjugate, mixture):
    """Equal members, so that equal random numbers would give equal draws."""
    member = mixture.members[0]
    equal = LinearizedPredictive(conjugate.model, MixtureGuide([member] * 2, WEIGHTS), 21, seed=3)
    f, again = (equal(conjugate.x)["f"] for _ in "ab")
    assert len(f[:, 0].unique()) == 21
    torch.testing.assert_close(f, again)
    latents = equal.latents()
    direct = torch.cat([value.flatten(1) for value in latents.values()], 1)
    expected = torch.stack([_function(conjugate, {n: v[i] for n, v in latents.items()})
                            for i in range(21)])  # fmt: skip
    assert len(direct) == 21
    torch.testing.assert_close(f, expected)


def _function(conjugate, latents):
    return bdl.Program(conjugate.model, conjugate.x, conjugate.y).run(latents).deterministic["f"]
