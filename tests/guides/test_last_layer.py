"""AutoLastLayer: brute-force Bayesian linear regression, the mode of other likelihoods, errors."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.conjugate import Conjugate, with_ones
from pyro.nn import PyroParam
from torch import nn
from torch.func import functional_call, jacrev

from pyro_bdl import LinearizedPredictive, Program, bayesianize, evidence, models, priors
from pyro_bdl.bayesian_linear import SufficientStatistics, maximize, predict
from pyro_bdl.bayesian_linear import posterior as linear_posterior
from pyro_bdl.errors import BdlWarning, UnsupportedProgramError
from pyro_bdl.guides import AutoLaplaceGGN, AutoLastLayer
from pyro_bdl.guides.mode import find_mode

# around points that nobody trained
pytestmark = pytest.mark.filterwarnings("ignore:.*#not-at-a-maximum")

D = torch.float64
N, NOISE = 30, 0.4
POSITIVE = dist.constraints.positive


def network(outputs=1, hidden=5):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()


def inputs(count=N):
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(1), dtype=D)


def targets(x, outputs=1):
    mean = torch.sin(2 * x[:, :1]) + torch.arange(outputs, dtype=D) * x[:, 1:2]
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(2), dtype=D)
    return (mean + NOISE * noise).squeeze(-1)


def uneven(name, module, parameter):
    """A prior with a mean and a scale of its own for every weight."""
    numbers = torch.arange(parameter.numel(), dtype=D).reshape(parameter.shape)
    return dist.Normal(0.1 * numbers.cos(), 0.5 + 0.1 * numbers)


def tunable(model_noise=NOISE, scale=0.8, outputs=1):
    """A regression with PyroParams for the last layer's prior and the noise."""
    learned = PyroParam(torch.tensor(scale, dtype=D), constraint=POSITIVE)
    prior = priors.ByName({"2.*": priors.Normal(learned), "*": priors.Normal(1.0)})
    noise = PyroParam(torch.tensor(model_noise, dtype=D), constraint=POSITIVE)
    return models.Regression(bayesianize(network(outputs), prior), noise=noise)


def regression():
    x = inputs()
    return models.Regression(bayesianize(network()), noise=NOISE), x, targets(x)


def features(model, x):
    """phi with a column of ones, at the network's own values."""
    net = model.network.network
    hidden = torch.tanh(net[0](x)).detach()
    return torch.cat([hidden, torch.ones(len(x), 1, dtype=D)], 1)


class BruteForce:
    """y ~ Normal(c + J w, NOISE^2), w ~ Normal(m0, S): J by autograd, all as dense matrices."""

    def __init__(self, net, prior, x, y):
        last = {name: value.detach() for name, value in net[2].named_parameters(prefix="2")}
        found = jacrev(lambda weights: functional_call(net, weights, x))(last)
        self.design = torch.cat([found[name].detach().reshape(y.numel(), -1) for name in last], 1)
        self.priors = [prior(name, None, value) for name, value in last.items()]
        self.prior_mean = torch.cat([p.mean.reshape(-1) for p in self.priors])
        self.prior_variance = torch.cat([p.variance.reshape(-1) for p in self.priors])
        precision = self.design.T @ self.design / NOISE**2 + torch.diag(1 / self.prior_variance)
        self.covariance = torch.linalg.inv(precision)
        right = self.design.T @ y.reshape(-1) / NOISE**2 + self.prior_mean / self.prior_variance
        self.mean = self.covariance @ right
        spread = self.design * self.prior_variance @ self.design.T
        spread = spread + NOISE**2 * torch.eye(y.numel(), dtype=D)
        marginal = dist.MultivariateNormal(self.design @ self.prior_mean, spread)
        self.log_evidence = marginal.log_prob(y.reshape(-1))


def covariance(posterior):
    return torch.cholesky_inverse(posterior.precision.factor)


# Regression


@pytest.mark.parametrize("outputs", [1, 2])
def test_it_is_linear_regression_on_the_features(outputs):
    """m = C Phi' y / noise^2, C^-1 = Phi' Phi / noise^2 + prior precision (Bishop 2006, section
    3.3)."""
    net, x = network(outputs), inputs()
    y = targets(x, outputs)
    model = models.Regression(bayesianize(net, uneven), noise=NOISE)
    exact = BruteForce(net, uneven, x, y)
    posterior = AutoLastLayer(model).laplace_approximation((x, y))
    assert posterior.mode == "closed"
    assert posterior.subset.sites == ("2.weight", "2.bias")
    torch.testing.assert_close(posterior.subset.take(posterior.loc), exact.mean)
    torch.testing.assert_close(covariance(posterior), exact.covariance)
    torch.testing.assert_close(evidence.log_marginal_likelihood(posterior), exact.log_evidence)
    assert torch.equal(posterior.loc[:20], AutoLastLayer(model).prototype(x, y).loc[:20])


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_predictive_is_exact(outputs):
    """N(m' phi, noise^2 + phi' C phi) (Bishop 2006, equation 3.58)."""
    x = inputs()
    y, new = targets(x, outputs), torch.randn(7, 3, dtype=D)
    model = models.Regression(bayesianize(network(outputs), priors.Normal(0.8)), noise=NOISE)
    posterior = AutoLastLayer(model).laplace_approximation((x, y))
    moments = LinearizedPredictive(model, posterior).parameter_moments(new)["y"]
    statistics = SufficientStatistics.of(features(model, x), y)
    weights = linear_posterior(statistics, 0.8**-2, NOISE**-2)
    mean, variance = predict(features(model, new), weights, NOISE**-2)
    torch.testing.assert_close(moments.mean["loc"].reshape(7, -1), mean)
    torch.testing.assert_close(moments.predictive_variance.reshape(7, -1), variance)


def test_minibatches_and_updates_are_the_whole():
    model, x, y = regression()
    guide = AutoLastLayer(model)
    whole = guide.laplace_approximation((x, y))
    parts = [(x[i : i + 7], y[i : i + 7]) for i in range(0, N, 7)]
    for other in (
        guide.laplace_approximation(parts),
        guide.laplace_approximation(parts[:2]).update(parts[2]).update(parts[3:]),
    ):
        torch.testing.assert_close(other.loc, whole.loc)
        torch.testing.assert_close(covariance(other), covariance(whole))
        torch.testing.assert_close(
            evidence.log_marginal_likelihood(other), evidence.log_marginal_likelihood(whole)
        )


def test_the_guide_is_not_changed_but_by_solve():
    model, x, y = regression()
    guide = AutoLastLayer(model).prototype(x, y)
    before = guide.loc.detach().clone()
    posterior = guide.laplace_approximation((x, y))
    assert torch.equal(guide.loc, before)
    assert guide.solve((x, y)) is guide
    assert torch.equal(guide.loc, posterior.loc)


def test_hidden_scales_of_the_prior():
    """A latent scale of the weights' prior stays at its point, and given it all is Gaussian."""
    x = inputs()
    y = targets(x)
    prior = priors.PerLayer(priors.Normal(dist.HalfNormal(1.0)))
    model = models.Regression(bayesianize(network(), prior), noise=NOISE)
    guide = AutoLastLayer(model).prototype(x, y)
    posterior = guide.laplace_approximation((x, y))
    scale = next(v for k, v in guide.median().items() if k.startswith("2.") and "scale" in k)
    exact = linear_posterior(SufficientStatistics.of(features(model, x), y), scale**-2, NOISE**-2)
    assert posterior.mode == "closed" and posterior.subset.sites == ("2.weight", "2.bias")
    torch.testing.assert_close(posterior.subset.take(posterior.loc), exact.mean[0])
    torch.testing.assert_close(covariance(posterior), exact.covariance[0])


def test_a_prior_that_is_not_normal():
    x = inputs()
    y = targets(x)
    model = models.Regression(bayesianize(network(), priors.StudentT(4.0, 0.5)), noise=NOISE)
    posterior = AutoLastLayer(model).laplace_approximation((x, y))
    assert posterior.mode == "steps"
    assert slope(model, posterior, x, y).abs().max() < 1e-8


# Hyperparameters


@pytest.mark.parametrize("outputs", [1, 2])
def test_alpha_and_beta_are_at_the_maximum_of_the_evidence(outputs):
    """alpha = gamma / m'm and beta = (N - gamma) / residual (MacKay 1992, section 3; Bishop 2006,
    section 3.5)."""
    x = inputs()
    y, model = targets(x, outputs), tunable(outputs=outputs)
    posterior = AutoLastLayer(model).laplace_approximation((x, y))
    evidence.maximize(posterior, steps=1000, tolerance=1e-6)
    best = maximize(SufficientStatistics.of(features(model, x), y))
    scale, noise = (
        next(value for name, value in hyper(posterior).items() if part in name)
        for part in ("scale", "noise")
    )
    torch.testing.assert_close(scale, best.alpha.rsqrt(), rtol=1e-4, atol=0)
    torch.testing.assert_close(noise, best.beta.rsqrt(), rtol=1e-4, atol=0)
    value = evidence.log_marginal_likelihood(posterior)
    torch.testing.assert_close(value.detach(), best.log_evidence)
    gradients = torch.autograd.grad(value, list(model.parameters()))
    assert all(abs(gradient) < 1e-3 for gradient in gradients)


def hyper(posterior):
    return posterior.hyperparameters()


def test_the_posterior_follows_the_hyperparameters_without_the_data():
    """After ``maximize`` it is what a fit at the hyperparameters found gives."""
    x, model = inputs(), tunable()
    y = targets(x)
    guide = AutoLastLayer(model)
    posterior = guide.laplace_approximation((x, y))
    before = posterior.loc.clone()
    evidence.maximize(posterior)
    again = guide.laplace_approximation((x, y))
    assert (posterior.loc - before).abs().max() > 0.1
    torch.testing.assert_close(posterior.loc, again.loc)
    torch.testing.assert_close(covariance(posterior), covariance(again))
    torch.testing.assert_close(again.squares, posterior.noise_factor * posterior.squares)
    torch.testing.assert_close(
        evidence.log_marginal_likelihood(posterior), evidence.log_marginal_likelihood(again)
    )


def test_alpha_of_a_classifier_and_its_mode_agree():
    """alpha = gamma / m'm at the mode that belongs to alpha."""
    x = inputs(60)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    learned = PyroParam(torch.tensor(1.0, dtype=D), constraint=POSITIVE)
    prior = priors.ByName({"2.*": priors.Normal(learned), "*": priors.Normal(1.0)})
    model = models.Classification(bayesianize(network(3), prior))
    guide = AutoLastLayer(model)
    posterior = guide.laplace_approximation((x, y))
    evidence.maximize(posterior, tolerance=1e-3)
    ((_, scale),) = hyper(posterior).items()
    weights = posterior.subset.take(posterior.loc)
    gamma = (1.0 - covariance(posterior).diagonal() / scale**2).sum()
    torch.testing.assert_close(scale**2, weights.square().sum() / gamma, rtol=1e-2, atol=0)
    torch.testing.assert_close(posterior.loc, guide.laplace_approximation((x, y)).loc)


# Other observations


def slope(model, posterior, x, y):
    """The gradient of log p(y, w) in the last layer."""
    at = posterior.loc.clone().requires_grad_()
    value = Program(model, x, y).log_density(at)
    return posterior.subset.take(torch.autograd.grad(value, at)[0])


CASES = {
    "classes": (models.Classification, 3, lambda x: (x[:, 0] > 0).long() + (x[:, 1] > 0).long()),
    "binary": (models.BinaryClassification, 1, lambda x: (x[:, 0] + x[:, 1] > 0).long()),
    "counts": (models.PoissonRegression, 1, lambda x: (3 * x[:, 0].abs()).round()),
    "student": (lambda net: models.StudentTRegression(net, noise=0.3), 1, targets),
    "heteroscedastic": (models.HeteroscedasticRegression, 2, targets),
}


@pytest.mark.parametrize(
    "case, batches",
    [
        ("classes", 1),
        *(
            pytest.param(case, 3, marks=pytest.mark.slow if case == "heteroscedastic" else ())
            for case in CASES
        ),
    ],
)
def test_it_finds_the_mode(case, batches):
    kind, outputs, make = CASES[case]
    x = inputs()
    y, model = make(x), kind(bayesianize(network(outputs)))
    data = list(zip(x.chunk(batches), y.chunk(batches), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error", BdlWarning)
        posterior = AutoLastLayer(model).laplace_approximation(data)
    assert posterior.mode == "steps"
    first_order = case in ("student", "heteroscedastic")
    assert slope(model, posterior, x, y).abs().max() < (1e-4 if first_order else 1e-8)
    assert torch.isfinite(evidence.log_marginal_likelihood(posterior))


def test_an_update_of_a_classifier_finds_the_mode_of_all():
    kind, outputs, make = CASES["classes"]
    x = inputs()
    y, model = make(x), kind(bayesianize(network(outputs)))
    posterior = AutoLastLayer(model).laplace_approximation((x[:20], y[:20]))
    posterior.update((x[20:], y[20:]))
    assert slope(model, posterior, x, y).abs().max() < 1e-8
    whole = AutoLastLayer(model).laplace_approximation((x, y))
    torch.testing.assert_close(covariance(posterior), covariance(whole))


def test_steps_that_overflow_are_halved():
    """From rates of almost zero the Newton step of counts leads to rates of infinity."""
    x = torch.linspace(-1, 1, 20, dtype=D)[:, None]
    y = torch.arange(20, dtype=D)
    net = nn.Linear(1, 1).double()
    with torch.no_grad():
        net.bias.fill_(-20.0)
    model = models.PoissonRegression(bayesianize(net, priors.Normal(10.0)))
    posterior = AutoLastLayer(model).laplace_approximation((x, y))
    assert slope(model, posterior, x, y).abs().max() < 1e-8


def test_a_mode_that_is_not_reached_is_said():
    """From the mode under one prior to that under another, ten times as wide."""
    x = inputs()
    prior = priors.Normal(PyroParam(torch.tensor(1.0, dtype=D), constraint=POSITIVE))
    model = models.Classification(bayesianize(network(3), prior))
    posterior = AutoLastLayer(model).laplace_approximation((x, CASES["classes"][2](x)))
    (scale,) = (p for n, p in model.named_parameters() if n.endswith("scale_unconstrained"))
    with torch.no_grad():
        scale += math.log(10.0)
    posterior.refresh()
    with pytest.warns(BdlWarning, match="the mode was not reached in 2 steps"):
        find_mode(posterior, steps=2)


# What is asked for, and what is kept


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


def test_weights_that_are_used_twice():
    model = models.Classification(bayesianize(Twice()))
    with pytest.raises(UnsupportedProgramError, match=r"'layer\.weight' are used more than once"):
        AutoLastLayer(model).laplace_approximation((torch.randn(8, 2), torch.arange(8) % 2))


def test_other_structures_are_refused():
    model, x, y = regression()
    with pytest.raises(ValueError, match='AutoLaplaceGGN with subset="last-layer"'):
        AutoLastLayer(model).laplace_approximation((x, y), structure="kron")


def test_another_structure_is_refused_where_the_guide_is_made():
    with pytest.raises(ValueError, match=r'AutoLaplaceGGN with subset="last-layer".*"kron"'):
        AutoLastLayer(regression()[0], structure="kron")
    assert AutoLastLayer(regression()[0], structure="full").config.structure.name == "full"


@pytest.mark.parametrize("spelling", ["last-layer", "last_layer"])
def test_both_spellings_are_the_last_layer(spelling):
    model, x, y = regression()
    posterior = AutoLaplaceGGN(model, subset=spelling).laplace_approximation((x, y))
    assert posterior.subset.sites == ("2.weight", "2.bias")


# location of z, noise of z, whether log p(y, w) is quadratic in w
HEADS = {
    "itself": (lambda z: z, None, True),
    "scaled": (lambda z: 3.0 - 2.0 * z / 5.0, None, True),
    "summed": (lambda z: z + z.sum() + torch.cat([z[1:], z[:1]]), None, True),
    "positive here": (lambda z: (z + 100.0).clamp(min=0.0), None, False),
    "absolute": (lambda z: (z + 100.0).abs(), None, False),
    "squared": (lambda z: z * z, None, False),
    "with its noise": (lambda z: z, lambda z: 0.3 + 1e-9 * z.square(), False),
}


@pytest.mark.parametrize("name", HEADS)
def test_whether_it_is_linear_regression_is_told_by_the_operations(name):
    location, noise, closed = HEADS[name]
    x, y = inputs(), targets(inputs())

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(x.new_zeros(3), 1.0).to_event(1))
        z = x @ w
        spread = 0.3 if noise is None else noise(z)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(location(z), spread), obs=y)

    guide = AutoLastLayer(model, rows="together" if name == "summed" else "alone")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        posterior = guide.laplace_approximation((x, y))
    assert posterior.mode == ("closed" if closed else "steps")


VECTORS = {
    "x @ w": lambda x, w: x @ w,
    "w @ x'": lambda x, w: w @ x.T,
    "mv": torch.mv,
    "linear": torch.nn.functional.linear,
}


@pytest.mark.parametrize("form", VECTORS)
def test_a_vector_of_weights(form):
    """Bayesian linear regression on features that another latent makes."""
    torch.manual_seed(0)
    x = torch.randn(12, 2, dtype=torch.float64)
    y = x.sum(-1).sin()

    def model(x, y=None):
        inside = pyro.sample("inside", dist.Normal(x.new_zeros(2, 3), 1.0).to_event(2))
        w = pyro.sample("w", dist.Normal(x.new_zeros(3), 1.0).to_event(1))
        b = pyro.sample("b", dist.Normal(x.new_zeros(()), 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(VECTORS[form]((x @ inside).tanh(), w) + b, 0.3), obs=y)

    guide = AutoLastLayer(model).prototype(x, y)
    assert list(guide.layer(x, y).sites) == ["w", "b"]
    laplace = guide.laplace_approximation((x, y))
    exact = Conjugate(with_ones((x @ guide.median()["inside"]).tanh()), y, 0.3)
    torch.testing.assert_close(laplace.loc[-4:], exact.mean)
    torch.testing.assert_close(laplace.variances()[-4:], exact.covariance.diagonal())


def test_networks_in_a_plate_have_a_regression_each():
    torch.manual_seed(0)
    x, y = torch.randn(5, 2), torch.randn(5, 3)
    network = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    networks = bayesianize(network, plate="groups")

    def model(x, y=None):
        with pyro.plate("groups", 3):
            f = pyro.deterministic("f", networks(x)[..., 0])
            with pyro.plate("data", len(x)):
                pyro.sample("y", dist.Normal(f.T, 0.3), obs=y)

    guide = AutoLastLayer(model).prototype(x, y)
    with torch.no_grad():
        guide.loc += 0.3 * torch.randn_like(guide.loc)
    fitted = guide.laplace_approximation((x, y))
    at, found = (g.require_layout().constrain(g.loc.detach())[0] for g in (guide, fitted))
    variances = fitted.require_layout().unflatten(fitted.variances())
    for n in range(3):
        hidden = torch.tanh(x @ at["0.weight"][n].T + at["0.bias"][n])
        exact = Conjugate(with_ones(hidden), y[:, n], 0.3)
        both = torch.cat([found["2.weight"][n].flatten(), found["2.bias"][n]])
        torch.testing.assert_close(both, exact.mean)
        both = torch.cat([variances["2.weight"][n].flatten(), variances["2.bias"][n]])
        torch.testing.assert_close(both, exact.covariance.diagonal())
