"""Densities and probabilities of the linearized predictive: closed forms, quadrature and draws."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.linearized_programs import (
    N,
    approximate,
    case,
    net,
)
from pyro import poutine
from torch import nn

from pyro_bdl import LinearizedPredictive, bayesianize
from pyro_bdl.curvature.closed_forms import (
    centered_probit,
    laplace_bridge,
    probit,
)
from pyro_bdl.guides import MixtureGuide
from pyro_bdl.program import Program

pytestmark = pytest.mark.usefixtures("double")


# Densities and probabilities


def gaussian_draws(mean, covariance, count):
    factor = torch.linalg.cholesky(covariance + 1e-14 * torch.eye(len(mean[0])))
    return mean + torch.einsum("nij,snj->sni", factor, torch.randn(count, *mean.shape))


def averaged(log_density):
    """log of the mean of exp over draws, and its standard error."""
    top = log_density.amax(0)
    values = (log_density - top).exp()
    mean, error = values.mean(0), values.std(0) / len(values) ** 0.5
    return top + mean.log(), error / mean


@pytest.mark.parametrize("kind", ["latent noise", "heteroscedastic"])
def test_an_uncertain_noise_is_integrated(kind):
    """p(y) = int N(y; f, sigma^2) p(f, log sigma), against quadrature on a grid."""
    model, x, y = case(kind)
    guide = approximate(model, (x, y))
    predictive = LinearizedPredictive(model, guide)
    f, log_scale = gaussian_draws(*predictive.parameter_covariance(x)["y"], 200000).unbind(-1)
    expected, error = averaged(dist.Normal(f, log_scale.exp()).log_prob(y))
    found = predictive.log_density(x, y)["y"]
    assert ((found - expected).abs() < 5 * error + 1e-4).all()
    moments = predictive.parameter_moments(x)["y"]
    square = (2 * log_scale).exp()
    slack = 5 * square.std(0) / 200000**0.5
    assert ((square.mean(0) - moments.noise_variance).abs() < slack).all()


@pytest.mark.parametrize("kind", ["several outputs", "cells in a plate", "one-hot"])
def test_densities_in_closed_form(kind):
    """A dense Normal of several outputs, of cells in a plate one of each, and of classes their
    probabilities."""
    model, x, y = case(kind)
    predictive = LinearizedPredictive(model, approximate(model, (x, y)))
    if kind == "one-hot":
        p = predictive.probabilities(x)["y"]
        torch.testing.assert_close(p.sum(-1), torch.ones(N))
        expected = (p * y).sum(-1).log()
    elif kind == "several outputs":
        mean, inside = predictive.parameter_covariance(x)["y"]
        expected = dist.MultivariateNormal(mean, inside + 0.4**2 * torch.eye(2)).log_prob(y)
    else:
        moments = predictive.parameter_moments(x)["y"]
        variance = moments.predictive_variance
        expected = dist.Normal(moments.mean["loc"], variance.sqrt()).log_prob(y)
    torch.testing.assert_close(predictive.log_density(x, y)["y"], expected)


@pytest.mark.parametrize("kind", ["latent noise, several", "student", "poisson", "gamma"])
def test_other_densities_are_averages_over_draws(kind):
    model, x, y = case(kind)
    guide = approximate(model, (x, y))
    predictive = LinearizedPredictive(model, guide, 50)
    torch.manual_seed(1)
    draws = predictive.log_likelihood(x, y)["y"]
    torch.manual_seed(1)
    found = predictive.log_density(x, y)["y"]
    torch.testing.assert_close(found, draws.logsumexp(0) - math.log(50))


def test_several_bernoullis_share_their_weights():
    """The density of a row is no product over its labels."""
    model, x, y = case("bernoulli, several")
    guide = approximate(model, (x, y))
    predictive = LinearizedPredictive(model, guide, 20000)
    logits = gaussian_draws(*predictive.parameter_covariance(x)["y"], 100000)
    expected, error = averaged(dist.Bernoulli(logits=logits).log_prob(y).sum(-1))
    found = predictive.log_density(x, y)["y"]
    assert ((found - expected).abs() < 20 * error).all()


def test_probit_against_quadrature():
    """sigmoid(m / sqrt(1 + pi v / 8)) (MacKay 1992, evidence framework for classification, equation
    10)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(100)
    nodes, weights = torch.tensor(nodes), torch.tensor(weights) / math.sqrt(2 * math.pi)
    mean = torch.linspace(-4, 4, 9)[:, None]
    variance = torch.tensor([0.0, 0.1, 1.0, 5.0, 20.0])
    f = mean[..., None] + variance.sqrt()[:, None] * nodes
    exact = (torch.sigmoid(f) * weights).sum(-1)
    assert (probit(mean, variance) - exact).abs().max() < 0.02
    torch.testing.assert_close(probit(mean[:, 0], torch.zeros(9)), torch.sigmoid(mean[:, 0]))


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_centered_probit_against_draws(classes):
    """Also where all classes move together, which softmax does not see; of two classes it is the
    probit approximation of their difference."""
    torch.manual_seed(0)
    mean, root = torch.randn(5, classes), 0.8 * torch.randn(5, classes, classes) / classes**0.5
    covariance = root @ root.mT
    found = centered_probit(mean, covariance)
    draws = torch.distributions.MultivariateNormal(mean, covariance).sample((20000,))
    assert (found - draws.softmax(-1).mean(0)).abs().max() < 0.06
    direction = torch.rand(5, 1, classes)  # cov(f + c 1) with c correlated with f
    shifted = covariance + 25.0 + direction + direction.mT
    torch.testing.assert_close(centered_probit(mean + 3.0, shifted), found)
    torch.testing.assert_close(found.sum(-1), torch.ones(5))
    if classes == 2:
        apart = covariance[:, 0, 0] + covariance[:, 1, 1] - 2 * covariance[:, 0, 1]
        torch.testing.assert_close(found[:, 0], probit(mean[:, 0] - mean[:, 1], apart))


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_the_bridge_inverts_the_laplace_approximation_of_a_dirichlet(classes):
    """MacKay 1998, in the softmax basis: m_k = log a_k - mean log a, and S_kl = d_kl / a_k - (1/a_k
    + 1/a_l - mean 1/a) / C; any common shift of f changes nothing. Inverse: Hobbhahn, Kristiadi &
    Hennig 2022, equation 12."""
    torch.manual_seed(classes)
    alpha = torch.rand(4, classes) * 5 + 0.5
    inverse = 1 / alpha
    mean = alpha.log() - alpha.log().mean(-1, keepdim=True)
    sums = inverse[:, :, None] + inverse[:, None, :] - inverse.mean(-1)[:, None, None]
    spread = torch.diag_embed(inverse) - sums / classes
    exact = alpha / alpha.sum(-1, keepdim=True)
    torch.testing.assert_close(laplace_bridge(mean, spread + 0.7), exact)
    free = torch.rand(4, classes)
    free = free / free.sum(-1, keepdim=True)  # f = g + t free, where g sums to 0 and t is any
    wide = spread + 0.7 * free[:, :, None] * free[:, None, :]
    torch.testing.assert_close(laplace_bridge(mean + 0.4 * free, wide), exact)
    extreme = laplace_bridge(torch.tensor([[900.0, -900.0, 0.0]]), torch.eye(3)[None])
    torch.testing.assert_close(extreme, torch.tensor([[1.0, 0.0, 0.0]]))
    nothing = laplace_bridge(torch.zeros(1, 3), torch.zeros(1, 3, 3))
    torch.testing.assert_close(nothing, torch.full((1, 3), 1 / 3))


def test_probabilities_of_every_method():
    model, x, y = case("categorical")
    guide = approximate(model, (x, y))
    predictive = LinearizedPredictive(model, guide, 20000)
    mean, inside = predictive.parameter_covariance(x)["y"]
    exact = gaussian_draws(mean, inside, 200000).softmax(-1).mean(0)
    drawn = predictive.probabilities(x, method="monte-carlo")["y"]
    assert drawn.shape == (N, 3) and (drawn - exact).abs().max() < 0.02
    scaled = mean / (1 + math.pi / 8 * inside.diagonal(dim1=-2, dim2=-1)).sqrt()
    each = predictive.probabilities(x, method="probit")["y"]
    torch.testing.assert_close(each, scaled.softmax(-1))
    centered = predictive.probabilities(x)["y"]
    torch.testing.assert_close(centered, centered_probit(mean, inside))
    bridge = predictive.probabilities(x, method="laplace-bridge")["y"]
    torch.testing.assert_close(bridge, laplace_bridge(mean, inside))
    torch.testing.assert_close(bridge.sum(-1), torch.ones(N))
    found = predictive.log_density(x, y)["y"]
    torch.testing.assert_close(found, centered.log().gather(1, y[:, None])[:, 0])


def test_several_categorical_numbers_per_datum():
    """Each has its own covariance, a block of that of all logits."""
    torch.manual_seed(1)
    x, y = torch.randn(N, 3), torch.randint(3, (N, 2))
    net = bayesianize(nn.Linear(3, 6))

    def model(x, y=None):
        logits = net(x).reshape(-1, 2, 3)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Categorical(logits=logits).to_event(1), obs=y)

    predictive = LinearizedPredictive(model, approximate(model, (x, y)))
    mean, covariance = predictive.parameter_covariance(x)["y"]
    apart = [
        centered_probit(mean[:, part], covariance[:, part, part])
        for part in (slice(0, 3), slice(3, 6))
    ]
    torch.testing.assert_close(predictive.probabilities(x)["y"], torch.stack(apart, 1))


@pytest.mark.parametrize("kind", ["bernoulli", "bernoulli, several"])
def test_probabilities_of_two_classes(kind):
    model, x, y = case(kind)
    guide = approximate(model, (x, y))
    predictive = LinearizedPredictive(model, guide, 20000)
    exact = gaussian_draws(*predictive.parameter_covariance(x)["y"], 100000).sigmoid().mean(0)
    for method in ("probit", "monte-carlo"):
        found = predictive.probabilities(x, method=method)["y"]
        assert found.shape == y.shape
        assert (found - exact.reshape(y.shape)).abs().max() < 0.02
    if kind == "bernoulli":
        p = predictive.probabilities(x)["y"]
        expected = dist.Bernoulli(p).log_prob(y)
        torch.testing.assert_close(predictive.log_density(x, y)["y"], expected)


@pytest.mark.parametrize("how", ["handler", "distribution", "event"])
def test_masked_data_count_nothing(how):
    torch.manual_seed(3)
    x, y = torch.randn(N, 3), torch.randn(N, 2)
    bnn = bayesianize(net(2))
    mask = torch.tensor([True, False, True, True, False, True])
    cells = mask[:, None] & torch.tensor([True, False])

    def model(x, y=None):
        outputs = bnn(x)
        normal = dist.Normal(outputs, 0.4)
        normal = normal.mask(cells).to_event(1) if how == "event" else normal.to_event(1)
        if how == "distribution":
            normal = normal.mask(mask)
        with pyro.plate("data", len(x)), poutine.mask(mask=mask if how == "handler" else True):
            pyro.sample("y", normal, obs=y)

    guide = approximate(model, (x, y), rows="together")
    predictive = LinearizedPredictive(model, guide, 2000)
    draws, density = predictive.log_likelihood(x, y)["y"], predictive.log_density(x, y)["y"]
    assert draws.shape == (2000, N)
    for found in (draws[0], density):
        assert ((found == 0) == ~mask).all()
    expected, error = averaged(draws)
    assert ((density - expected).abs() <= 6 * error + 1e-12).all()
    moments = predictive.parameter_moments(x)["y"]
    if how == "event":
        variance = moments.predictive_variance[:, 0]
        first = dist.Normal(moments.mean["loc"][:, 0], variance.sqrt()).log_prob(y[:, 0])
        assert ((density - first)[mask].abs() <= 6 * error[mask]).all()


def test_parameters_that_no_latent_moves_are_known():
    """A learned noise has no posterior, and the density is in closed form."""
    model, x, y = case("learned noise")
    guide = approximate(model, (x, y))
    moments = LinearizedPredictive(model, guide).parameter_moments(x)["y"]
    assert set(moments.mean) == {"loc"}
    torch.testing.assert_close(moments.noise_variance, torch.full((N, 2), 0.4**2))
    first, second = (LinearizedPredictive(model, guide, 3).log_density(x, y)["y"] for _ in range(2))
    assert torch.equal(first, second) and not first.requires_grad


def test_nothing_moves_where_the_subset_does_not_matter():
    """Latents outside the subset are fixed, also in outputs that depend on them."""
    bnn = bayesianize(nn.Linear(3, 1))

    def model(x, y=None):
        outputs = bnn(x)[:, 0]
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        pyro.sample("z", dist.Normal(level, 1.0), obs=torch.tensor(0.3))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(outputs, 0.5), obs=y)

    x, y = torch.randn(N, 3), torch.randn(N)
    guide = approximate(model, (x, y), subset="level")
    predictive = LinearizedPredictive(model, guide, 4)
    moments = predictive.parameter_moments(x, y)
    assert moments["y"].variance == {} and set(moments["z"].variance) == {"loc"}
    torch.testing.assert_close(moments["y"].predictive_variance, torch.full((N,), 0.25))
    assert "y" not in predictive.joint_parameter_covariance(x, y)
    program = Program(model, x, y)
    run = program.run(program.constrain(guide.loc)[0])
    expected = run.observed["y"].distribution.log_prob(y)
    torch.testing.assert_close(predictive.log_density(x, y)["y"], expected)


@pytest.mark.parametrize(
    "kind",
    ["normal", "several outputs", "latent noise", "heteroscedastic", "cells in a plate",
     "latent noise, several"],
)  # fmt: skip
def test_closed_predictions_are_what_draws_tend_to(kind):
    """Mean, variance and density of y, of one Gaussian and of a mixture, against 40,000 draws."""
    model, *data = case(kind)
    one = approximate(model, data)
    for posterior in (one, MixtureGuide([one, approximate(model, data)], [0.3, 0.7])):
        predictive = LinearizedPredictive(model, posterior, 40000, seed=0)
        closed, (drawn, _) = predictive.closed_predictions(*data)["y"], predictive.observe(*data)
        draws = drawn["y"].draws
        error = draws.std(0) / 200
        assert ((draws.mean(0) - closed.mean).abs() < 5 * error).all()
        ratio = draws.var(0) / closed.variance
        assert ((ratio - 1).abs() < 0.1).all()
        if closed.log_density is None:  # several numbers with one uncertain noise
            assert kind == "latent noise, several"
            continue
        expected, relative = averaged(drawn["y"].log_density)
        assert ((expected - closed.log_density).abs() < 5 * relative + 1e-3).all()
        without = predictive.closed_predictions(*data[:1])["y"]
        torch.testing.assert_close(without.mean, closed.mean)
        assert without.log_density is None


def test_other_observations_have_no_closed_predictions():
    model, *data = case("two sites")
    found = LinearizedPredictive(model, approximate(model, data)).closed_predictions(*data)
    assert found.keys() == {"y"}
