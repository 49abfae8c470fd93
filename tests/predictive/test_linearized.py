"""The linearized predictive: against Jacobians by autograd, closed forms, quadrature and draws."""

import functools
import math
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.nn import PyroParam
from torch import nn

from pyro_bdl import LinearizedPredictive, Predictive, bayesianize, handlers, models, priors
from pyro_bdl.curvature import chunking
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides import AutoLaplaceGGN, MixtureGuide
from pyro_bdl.predictive import linearized_component as module
from pyro_bdl.predictive.closed_forms import laplace_bridge, multiclass_probit, probit
from pyro_bdl.program import Program
from pyro_bdl.program.unconstrained_parameters import unconstrained_parameters

N = 6


@pytest.fixture(autouse=True)
def _double(_fresh):
    torch.set_default_dtype(torch.float64)


def net(out=1):
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, out))


def observing(out, distribution, kind=None):
    """A program of its own: ``distribution`` of the network's outputs (N, out)."""
    bnn = bayesianize(net(out))

    def model(x, y=None):
        outputs = bnn(x)
        with pyro.plate("data", len(x)):
            pyro.sample("y", distribution(outputs), obs=y)

    return model


def case(kind):
    """A program over an MLP, with x and y."""
    torch.manual_seed(3)
    x, y = torch.randn(N, 3), torch.randn(N)
    counts, two = torch.arange(N).double(), torch.randn(N, 2)
    F = torch.nn.functional
    softplus = F.softplus
    if kind == "normal":
        return models.Regression(bayesianize(net()), noise=0.4), x, y
    if kind == "several outputs":
        return models.Regression(bayesianize(net(2)), noise=0.4), x, two
    if kind == "learned noise":
        return (
            models.Regression(
                bayesianize(net(2)),
                noise=PyroParam(torch.tensor(0.4), constraint=dist.constraints.positive),
            ),
            x,
            two,
        )
    if kind == "latent noise":
        return models.Regression(bayesianize(net())), x, y
    if kind == "latent noise, several":
        return models.Regression(bayesianize(net(2))), x, two
    if kind == "heteroscedastic":
        return models.HeteroscedasticRegression(bayesianize(net(2))), x, y
    if kind == "student":
        return models.StudentTRegression(bayesianize(net())), x, y
    if kind == "poisson":
        return models.PoissonRegression(bayesianize(net())), x, counts
    if kind == "bernoulli":
        return models.BinaryClassification(bayesianize(net())), x, counts % 2
    if kind == "bernoulli, several":
        return models.BinaryClassification(bayesianize(net(2))), x, (two > 0).double()
    if kind == "categorical":
        return models.Classification(bayesianize(net(3))), x, torch.arange(N) % 3
    if kind == "probabilities":
        model = observing(3, lambda f: dist.Categorical(probs=f.softmax(-1)))
        return model, x, torch.arange(N) % 3
    if kind == "one-hot":
        model = observing(3, lambda f: dist.OneHotCategorical(logits=f))
        return model, x, F.one_hot(torch.arange(N) % 3, 3).double()
    if kind == "negative binomial":
        model = observing(
            2, lambda f: dist.NegativeBinomial(softplus(f[:, 0]) + 1.0, logits=f[:, 1])
        )
        return model, x, counts
    if kind == "binomial":
        return observing(1, lambda f: dist.Binomial(7, logits=f[:, 0])), x, counts
    if kind == "gamma":
        model = observing(2, lambda f: dist.Gamma(softplus(f[:, 0]) + 0.5, f[:, 1].exp()))
        return model, x, counts + 0.5
    if kind == "multivariate normal":
        tril = torch.tensor([[0.5, 0.0], [0.2, 0.3]])
        return observing(2, lambda f: dist.MultivariateNormal(f, scale_tril=tril)), x, two
    if kind == "cells in a plate":
        bnn = bayesianize(net(2))

        def model(x, y=None):
            outputs = bnn(x)
            with pyro.plate("outputs", 2, dim=-1), pyro.plate("data", len(x), dim=-2):
                pyro.sample("y", dist.Normal(outputs, 0.4), obs=y)

        return model, x, two
    if kind == "one datum":
        bnn = bayesianize(nn.Linear(3, 1))

        def model(x, y=None):
            pyro.sample("y", dist.Normal(bnn(x[0])[0], 0.4), obs=y)

        return model, x, torch.tensor(0.7)
    assert kind == "two sites"
    bnn = bayesianize(net(4))

    def model(x, y=None, z=None):
        outputs = bnn(x)
        level = pyro.sample("level", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.deterministic("spread", 3.0 * level)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(outputs[:, 0], 0.3), obs=y)
            pyro.sample("z", dist.Categorical(logits=outputs[:, 1:]), obs=z)

    return model, x, y, torch.arange(N) % 3


CONTINUOUS = ["normal", "several outputs", "learned noise", "latent noise", "heteroscedastic"]
KINDS = [
    *CONTINUOUS,
    "latent noise, several",
    "student",
    "poisson",
    "bernoulli",
    "bernoulli, several",
    "categorical",
    "probabilities",
    "one-hot",
    "negative binomial",
    "binomial",
    "gamma",
    "multivariate normal",
    "cells in a plate",
    "one datum",
    "two sites",
]


def approximate(model, args, **options):
    """A Laplace guide somewhere, at no mode."""
    guide = AutoLaplaceGGN(model, **{"structure": "full", **options}).prototype(*args)
    with torch.no_grad():
        guide.loc += 0.1 * torch.randn(len(guide.loc))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        return guide.laplace_approximation([args])


@pytest.fixture
def full_covariance(covariance):
    """The exact covariance of a Laplace guide in R^P."""

    def compute(guide):
        put = functools.partial(guide.subset.put, guide.loc * 0)
        return put(put(covariance(guide)).mT.contiguous())

    return compute


def jacobian(model, guide, args, site):
    """Natural parameters of a site by name, and their Jacobians in u, by autograd."""
    program = Program(model, *args)

    def read(u):
        run = program.run(program.constrain(u)[0])
        return unconstrained_parameters(run.observed[site].distribution, run)

    names = list(read(guide.loc))
    values = read(guide.loc)
    found = {
        name: torch.autograd.functional.jacobian(lambda u, n=name: read(u)[n], guide.loc)
        for name in names
    }
    return {name: value.detach() for name, value in values.items()}, found


# Exact


def test_a_linear_gaussian_is_predicted_exactly(conjugate):
    """N(x'm, x'Cx + noise^2) (Bishop 2006, equation 3.58)."""
    for eta in (1.0, 0.1):
        model = handlers.temper(conjugate.model, eta)
        guide = AutoLaplaceGGN(model, structure="full").prototype(conjugate.x, conjugate.y)
        with torch.no_grad():
            guide.loc.copy_(conjugate.mean(eta))
        laplace = guide.laplace_approximation((conjugate.x, conjugate.y))
        x, y = torch.randn(5, 3), torch.randn(5)
        design = torch.cat([x, torch.ones(5, 1)], 1)
        mean, inverse = design @ conjugate.mean(eta), torch.linalg.inv(conjugate.precision(eta))
        joint = design @ inverse @ design.T
        total = joint.diagonal() + conjugate.noise**2
        predictive = LinearizedPredictive(model, laplace)
        moments = predictive.moments(x)["y"]
        exactly = {"rtol": 1e-10, "atol": 1e-12}
        torch.testing.assert_close(moments.mean, {"loc": mean}, **exactly)
        torch.testing.assert_close(moments.variance, {"loc": joint.diagonal()}, **exactly)
        torch.testing.assert_close(moments.predictive_variance, total, **exactly)
        found, whole = predictive.joint_covariance(x)["y"]
        torch.testing.assert_close(found, mean, **exactly)
        torch.testing.assert_close(whole, joint, **exactly)
        center, own = predictive.covariance(x)["y"]
        torch.testing.assert_close(center, mean[:, None], **exactly)
        torch.testing.assert_close(own, joint.diagonal()[:, None, None], **exactly)
        expected = dist.Normal(mean, total.sqrt()).log_prob(y)
        torch.testing.assert_close(predictive.log_density(x, y)["y"], expected, **exactly)


@pytest.mark.parametrize("kind", KINDS)
def test_moments_by_autograd(kind, full_covariance):
    """N(f(x; u*), J C J') (Immer et al. 2021, "GLM predictive")."""
    model, *args = case(kind)
    guide = approximate(model, args)
    predictive, inverse = LinearizedPredictive(model, guide), full_covariance(guide)
    moments, inside = predictive.moments(*args), predictive.covariance(*args)
    joint = predictive.joint_covariance(*args)
    for site in moments:
        values, slopes = jacobian(model, guide, args, site)
        count = 1 if kind == "one datum" else N
        moving = {k: v.reshape(count, -1, len(guide.loc)) for k, v in slopes.items() if v.any()}
        assert set(moments[site].mean) == set(moving) == set(moments[site].variance)
        for name in moving:
            variance = torch.einsum("...p,pq,...q->...", slopes[name], inverse, slopes[name])
            torch.testing.assert_close(moments[site].mean[name], values[name])
            torch.testing.assert_close(moments[site].variance[name], variance)
        rows = torch.cat(list(moving.values()), 1)
        mean = torch.cat([values[name].reshape(count, -1) for name in moving], 1)
        blocks = torch.einsum("nip,pq,njq->nij", rows, inverse, rows)
        torch.testing.assert_close(inside[site], (mean, blocks))
        flat = rows.flatten(0, 1)
        torch.testing.assert_close(joint[site], (mean.reshape(-1), flat @ inverse @ flat.T))
        assert not any(t.requires_grad for t in (*inside[site], *joint[site]))
        assert not any(t.requires_grad for t in moments[site].variance.values())


@pytest.mark.parametrize("subset", [None, "last-layer", [0, 3, 13, 20]])
def test_every_structure_and_subset(structure, subset, full_covariance):
    model, x, y = case("several outputs")
    if isinstance(subset, list):
        if structure in ("kron", "ekfac"):
            subset = [*range(12), 24, 25]  # their factors are of whole sites
        subset = torch.tensor(subset)
    guide = approximate(model, (x, y), structure=structure, subset=subset)
    _, slopes = jacobian(model, guide, (x, y), "y")
    rows = slopes["loc"].flatten(0, 1)
    found = LinearizedPredictive(model, guide).joint_covariance(x)["y"][1]
    torch.testing.assert_close(found, rows @ full_covariance(guide) @ rows.T)


def test_the_last_layer_in_closed_form():
    """phi(x) fixed, y = phi(x)' w + b + noise: mean mu' phi, variance sigma^2 + phi' C phi. Source:
    Bishop 2006, equation 3.58."""
    torch.manual_seed(3)
    x, y = torch.randn(30, 3), torch.randn(30)
    bnn = bayesianize(net(), priors.Normal(0.8))
    model = models.Regression(bnn, noise=0.4)
    guide = AutoLaplaceGGN(model, subset="last-layer", structure="full").prototype(x, y)

    def features(x):
        with torch.no_grad():
            return torch.cat([bnn.network[:2](x), torch.ones(len(x), 1)], 1)

    phi = features(x)
    precision = phi.T @ phi / 0.4**2 + torch.eye(5) / 0.8**2
    mean = torch.linalg.solve(precision, phi.T @ y / 0.4**2)
    layout = guide.require_layout()
    with torch.no_grad():
        values = {**layout.unflatten(guide.loc.clone()), "2.weight": mean[None, :4]}
        guide.loc.copy_(layout.flatten({**values, "2.bias": mean[4:]}))
    laplace = guide.laplace_approximation((x, y))
    x_test, y_test = torch.randn(4, 3), torch.randn(4)
    variance = torch.einsum(
        "np,pq,nq->n", features(x_test), torch.linalg.inv(precision), features(x_test)
    )
    predictive = LinearizedPredictive(model, laplace)
    moments = predictive.moments(x_test)["y"]
    torch.testing.assert_close(moments.mean["loc"], features(x_test) @ mean)
    torch.testing.assert_close(moments.predictive_variance, variance + 0.4**2)
    expected = dist.Normal(features(x_test) @ mean, (variance + 0.4**2).sqrt()).log_prob(y_test)
    torch.testing.assert_close(predictive.log_density(x_test, y_test)["y"], expected)


# The tangent kernel


@pytest.mark.parametrize("structure", ["full", "kron", "kernel"])
def test_the_tangent_kernel_is_the_prior_covariance(structure, monkeypatch):
    """J(x) Lambda^-1 J(x2)', in parts of one row or at once, whatever the curvature."""
    model, x, y = case("several outputs")
    guide = approximate(model, (x, y), structure=structure)
    _, slopes = jacobian(model, guide, (x, y), "y")
    rows = slopes["loc"].flatten(0, 1)
    expected = rows / guide.prior.diagonal @ rows.T
    predictive = LinearizedPredictive(model, guide)
    torch.testing.assert_close(predictive.prior_covariance(x)["y"], expected)
    monkeypatch.setattr(chunking, "_BUDGET", 1)
    monkeypatch.setattr(chunking, "_PER_WEIGHT", 0)
    found = predictive.prior_covariance(x, (x[:3],))["y"]
    torch.testing.assert_close(found, expected[:, :6])


@pytest.mark.parametrize("structure", ["full", "kernel"])
def test_the_posterior_covariance_is_that_of_the_gaussian_process(structure):
    """K(x, x) - K(x, X) (K(X, X) + noise)^-1 K(X, x) (Rasmussen & Williams 2006, equation 2.24)."""
    model, x, y = case("several outputs")
    predictive = LinearizedPredictive(model, approximate(model, (x, y), structure=structure))
    new = torch.randn(3, 3)
    cross = predictive.prior_covariance(new, x)["y"]
    noisy = predictive.prior_covariance(x)["y"] + 0.4**2 * torch.eye(2 * len(x))
    expected = predictive.prior_covariance(new)["y"] - cross @ torch.linalg.solve(noisy, cross.T)
    found = predictive.joint_covariance(new)["y"][1]
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_the_tangent_kernel_is_of_one_center():
    model, x, y = case("normal")
    guide = approximate(model, (x, y))
    mixture = LinearizedPredictive(model, MixtureGuide([guide, guide]))
    with pytest.raises(ValueError, match="take the LinearizedPredictive of a member"):
        mixture.prior_covariance(x)


# Draws


def test_draws_are_functions_with_the_joint_covariance(structure):
    """J C J' over all inputs (Immer et al. 2021)."""
    model, x, y = case("latent noise")
    guide = approximate(model, (x, y), structure=structure)
    count = 20000
    predictive = LinearizedPredictive(model, guide, num_samples=count)
    drawn = predictive(x)
    _, joint = predictive.joint_covariance(x)["y"]
    joint = joint[::2, ::2]  # of the locations
    mean = drawn.moments["y"].mean["loc"]
    assert ((drawn["f"].mean(0) - mean).abs() < 5 * (joint.diagonal() / count).sqrt()).all()
    error = ((joint.diagonal()[:, None] * joint.diagonal() + joint.square()) / count).sqrt()
    assert ((torch.cov(drawn["f"].T) - joint).abs() < 5 * error).all()
    noise = drawn["y"] - drawn["f"]
    expected = drawn.moments["y"].noise_variance
    assert (
        (noise.square().mean(0) / expected - 1).abs() < 5 * (noise**2).std(0) / count**0.5
    ).all()


@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_shapes_are_those_of_predictive(kind):
    model, x, *targets = case(kind)
    guide = approximate(model, (x, *targets))
    linear, plain = LinearizedPredictive(model, guide, 5), Predictive(model, guide, 5)
    first, second = linear(x), plain(x)
    assert {k: v.shape for k, v in first.items()} == {k: v.shape for k, v in second.items()}
    assert {k: v.dtype for k, v in first.items()} == {k: v.dtype for k, v in second.items()}
    assert not any(value.requires_grad for value in first.values())
    first, second = linear.mean(x), plain.mean(x)
    assert {k: v.shape for k, v in first.items()} == {k: v.shape for k, v in second.items()}
    first, second = linear.log_likelihood(x, *targets), plain.log_likelihood(x, *targets)
    assert {k: v.shape for k, v in first.items()} == {k: v.shape for k, v in second.items()}
    density = linear.log_density(x, *targets)
    assert {k: v.shape for k, v in density.items()} == {k: v.shape[1:] for k, v in second.items()}
    assert all(torch.isfinite(value).all() for value in density.values())


def test_draws_at_a_tiny_covariance_are_the_program_itself():
    """With C = 0 every draw is the network at its MAP; a Poisson's f is the log of its rate."""
    model, x, y = case("poisson")
    guide = approximate(model, (x, y))
    guide.precision.factor *= 1e9
    predictive = LinearizedPredictive(model, guide, 3)
    program = Program(model, x, y)
    run = program.run(program.constrain(guide.loc)[0])
    torch.testing.assert_close(predictive(x)["f"], run.deterministic["f"].expand(3, N))
    torch.testing.assert_close(predictive.mean(x)["y"], run.deterministic["f"].exp().expand(3, N))
    expected = run.observed["y"].distribution.log_prob(y).expand(3, N)
    torch.testing.assert_close(predictive.log_likelihood(x, y)["y"], expected)


def test_deterministic_sites_are_linearized_too():
    model, *args = case("two sites")
    guide = approximate(model, args)
    program = Program(model, *args)
    x = args[0]
    torch.manual_seed(5)
    drawn = LinearizedPredictive(model, guide, 4)(x)["spread"]
    torch.manual_seed(5)
    offsets = guide.precision.sample(4)
    where = program.slices["level"]
    torch.testing.assert_close(drawn, 3 * (guide.loc + offsets)[:, where])


# In parts


@pytest.mark.parametrize("kind", ["latent noise", "heteroscedastic", "categorical", "two sites"])
def test_parts_say_the_same_as_all_at_once(kind, monkeypatch):
    model, *args = case(kind)
    guide = approximate(model, args)
    predictive = LinearizedPredictive(model, guide, 3)

    def everything():
        torch.manual_seed(7)
        found = [predictive.moments(*args)["y"].variance, predictive.covariance(*args)]
        found += [predictive.log_density(*args), predictive.mean(*args)]
        found.append(predictive.moments(*args)["y"].noise_variance)
        found.append(predictive.log_likelihood(*args))
        drawn = predictive(args[0])  # observations are drawn part by part
        found.append({k: v for k, v in drawn.items() if k not in ("y", "z")})
        found.append(drawn.moments["y"].mean)
        return found

    whole = everything()
    sizes = []
    monkeypatch.setattr(chunking, "_part_size", lambda *a: 4)
    inner = module.Linearization.__init__

    def counting(self, model, subset, vector, batch, kwargs, **options):
        sizes.append(len(batch[0]))
        inner(self, model, subset, vector, batch, kwargs, **options)

    monkeypatch.setattr(module.Linearization, "__init__", counting)
    parts = everything()
    assert set(sizes) == {4, 2}
    torch.testing.assert_close(parts, whole)


def test_the_budget_cuts_batches(monkeypatch):
    model, x, y = case("normal")
    guide = approximate(model, (x, y))
    predictive = LinearizedPredictive(model, guide)
    whole = predictive.log_density(x, y)
    monkeypatch.setattr(chunking, "_BUDGET", 1)
    monkeypatch.setattr(chunking, "_PER_WEIGHT", 0)
    torch.testing.assert_close(predictive.log_density(x, y), whole)
    assert sum(1 for _ in predictive.components[0].parts((x, y), {})) > 1


def test_draws_come_in_chunks(monkeypatch):
    model, x, y = case("normal")
    guide = approximate(model, (x, y))
    monkeypatch.setattr(module, "_DRAWS_AT_ONCE", 3 * 8 * guide.subset.size)
    drawn = LinearizedPredictive(model, guide, 7)(x)
    assert drawn["f"].shape == drawn["y"].shape == (7, N)
    assert len(drawn["f"][:, 0].unique()) == 7
    assert drawn.moments["y"].mean["loc"].shape == (N,)


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
    f, log_scale = gaussian_draws(*predictive.covariance(x)["y"], 200000).unbind(-1)
    expected, error = averaged(dist.Normal(f, log_scale.exp()).log_prob(y))
    found = predictive.log_density(x, y)["y"]
    assert ((found - expected).abs() < 5 * error + 1e-4).all()
    moments = predictive.moments(x)["y"]
    square = (2 * log_scale).exp()
    slack = 5 * square.std(0) / 200000**0.5
    assert ((square.mean(0) - moments.noise_variance).abs() < slack).all()


def test_several_outputs_are_dense_normals():
    model, x, y = case("several outputs")
    guide = approximate(model, (x, y))
    predictive = LinearizedPredictive(model, guide)
    mean, inside = predictive.covariance(x)["y"]
    total = inside + 0.4**2 * torch.eye(2)
    expected = dist.MultivariateNormal(mean, total).log_prob(y)
    torch.testing.assert_close(predictive.log_density(x, y)["y"], expected)


def test_cells_in_a_plate_are_separate_data():
    model, x, y = case("cells in a plate")
    guide = approximate(model, (x, y))
    predictive = LinearizedPredictive(model, guide)
    variance = predictive.moments(x)["y"].predictive_variance
    expected = dist.Normal(predictive.moments(x)["y"].mean["loc"], variance.sqrt()).log_prob(y)
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
    logits = gaussian_draws(*predictive.covariance(x)["y"], 100000)
    expected, error = averaged(dist.Bernoulli(logits=logits).log_prob(y).sum(-1))
    found = predictive.log_density(x, y)["y"]
    assert ((found - expected).abs() < 20 * error).all()


def test_log_likelihood_is_that_of_the_drawn_parameters():
    model, x, y = case("normal")
    guide = approximate(model, (x, y))
    predictive = LinearizedPredictive(model, guide, 4)
    torch.manual_seed(2)
    mean = predictive.mean(x)["y"]
    torch.manual_seed(2)
    found = predictive.log_likelihood(x, y)["y"]
    torch.testing.assert_close(found, dist.Normal(mean, 0.4).log_prob(y))


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


def test_multiclass_probit_against_draws():
    """softmax(m_k / sqrt(1 + pi v_k / 8)) (Gibbs 1997)."""
    torch.manual_seed(0)
    mean, variance = torch.randn(5, 3), torch.rand(5, 3)
    draws = (mean + variance.sqrt() * torch.randn(50000, 5, 3)).softmax(-1).mean(0)
    assert (multiclass_probit(mean, variance) - draws).abs().max() < 0.03


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
    mean, inside = predictive.covariance(x)["y"]
    exact = gaussian_draws(mean, inside, 200000).softmax(-1).mean(0)
    drawn = predictive.probabilities(x, method="monte-carlo")["y"]
    assert drawn.shape == (N, 3) and (drawn - exact).abs().max() < 0.02
    scaled = mean / (1 + math.pi / 8 * inside.diagonal(dim1=-2, dim2=-1)).sqrt()
    torch.testing.assert_close(predictive.probabilities(x)["y"], scaled.softmax(-1))
    bridge = predictive.probabilities(x, method="laplace-bridge")["y"]
    torch.testing.assert_close(bridge, laplace_bridge(mean, inside))
    torch.testing.assert_close(bridge.sum(-1), torch.ones(N))
    found = predictive.log_density(x, y)["y"]
    torch.testing.assert_close(found, scaled.log_softmax(-1).gather(1, y[:, None])[:, 0])


@pytest.mark.parametrize("kind", ["bernoulli", "bernoulli, several"])
def test_probabilities_of_two_classes(kind):
    model, x, y = case(kind)
    guide = approximate(model, (x, y))
    predictive = LinearizedPredictive(model, guide, 20000)
    exact = gaussian_draws(*predictive.covariance(x)["y"], 100000).sigmoid().mean(0)
    for method in ("probit", "monte-carlo"):
        found = predictive.probabilities(x, method=method)["y"]
        assert found.shape == y.shape
        assert (found - exact.reshape(y.shape)).abs().max() < 0.02
    if kind == "bernoulli":
        p = predictive.probabilities(x)["y"]
        expected = dist.Bernoulli(p).log_prob(y)
        torch.testing.assert_close(predictive.log_density(x, y)["y"], expected)


def test_one_hot_classes_are_classes():
    model, x, y = case("one-hot")
    guide = approximate(model, (x, y))
    predictive = LinearizedPredictive(model, guide)
    p = predictive.probabilities(x)["y"]
    torch.testing.assert_close(p.sum(-1), torch.ones(N))
    torch.testing.assert_close(predictive.log_density(x, y)["y"], (p * y).sum(-1).log())


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

    guide = approximate(model, (x, y))
    predictive = LinearizedPredictive(model, guide, 2000)
    draws, density = predictive.log_likelihood(x, y)["y"], predictive.log_density(x, y)["y"]
    assert draws.shape == (2000, N)
    for found in (draws[0], density):
        assert ((found == 0) == ~mask).all()
    expected, error = averaged(draws)
    assert ((density - expected).abs() <= 6 * error + 1e-12).all()
    moments = predictive.moments(x)["y"]
    if how == "event":
        variance = moments.predictive_variance[:, 0]
        first = dist.Normal(moments.mean["loc"][:, 0], variance.sqrt()).log_prob(y[:, 0])
        assert ((density - first)[mask].abs() <= 6 * error[mask]).all()


def test_parameters_that_no_latent_moves_are_known():
    """A learned noise has no posterior, and the density is in closed form."""
    model, x, y = case("learned noise")
    guide = approximate(model, (x, y))
    moments = LinearizedPredictive(model, guide).moments(x)["y"]
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
    drawn = predictive(x, y)
    assert drawn.moments["y"].variance == {} and set(drawn.moments["z"].variance) == {"loc"}
    torch.testing.assert_close(drawn.moments["y"].predictive_variance, torch.full((N,), 0.25))
    assert "y" not in predictive.joint_covariance(x, y)
    program = Program(model, x, y)
    run = program.run(program.constrain(guide.loc)[0])
    expected = run.observed["y"].distribution.log_prob(y)
    torch.testing.assert_close(predictive.log_density(x, y)["y"], expected)


# What it leaves alone


class Failing(nn.Module):
    fails = False

    def forward(self, x):
        if self.fails and len(x) == 4:
            raise RuntimeError("no luck today")
        return x


def test_the_program_is_as_before_and_after_errors(monkeypatch):
    torch.manual_seed(3)
    stop = Failing()
    inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), stop)
    model = models.Regression(bayesianize(nn.Sequential(inner, nn.Linear(4, 1))))
    x, y = torch.randn(8, 3), torch.randn(8)
    model.eval()
    guide = approximate(model, (x, y))
    predictive = LinearizedPredictive(model, guide, 5)
    before = predictive.moments(x)["y"].mean
    model.train()
    stop = model.network.network[0][3]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = {k: v.clone() for k, v in (model.state_dict() | guide.state_dict()).items()}
    modes = [m.training for m in model.modules()]
    hooks = len(nn.modules.module._global_forward_pre_hooks)

    def unchanged():
        now = model.state_dict() | guide.state_dict()
        assert all(torch.equal(now[key], value) for key, value in state.items())
        assert [m.training for m in model.modules()] == modes
        assert len(nn.modules.module._global_forward_pre_hooks) == hooks
        assert all((p.grad == 1).all() for p in model.parameters())
        assert torch.is_grad_enabled()

    calls = [
        lambda: predictive(x),
        lambda: predictive.moments(x),
        lambda: predictive.joint_covariance(x),
        lambda: predictive.log_density(x, y),
        lambda: predictive.log_likelihood(x, y),
        lambda: predictive.mean(x),
    ]
    for call in calls:
        call()
        unchanged()
    torch.testing.assert_close(predictive.moments(x)["y"].mean, before)
    monkeypatch.setattr(chunking, "_part_size", lambda *a: 4)
    stop.fails = True
    for call in calls:
        kept = None
        try:
            call()
        except RuntimeError as error:
            kept = error  # with its frames, and the generators in them
        if call is not calls[2]:
            assert "no luck today" in str(kept)
        unchanged()
    del kept
    unchanged()


def test_float32_is_close_to_float64():
    found = {}
    for dtype in (torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        torch.manual_seed(3)
        x, y = torch.randn(N, 3), torch.randn(N)
        model = models.Regression(bayesianize(net()))
        guide = AutoLaplaceGGN(model).prototype(x, y)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            loc = torch.randn(len(guide.loc), generator=generator, dtype=torch.float64)
            guide.loc.copy_(0.3 * loc)
        x, y = (torch.linspace(-1, 1, 3 * N).reshape(N, 3) ** 3, torch.linspace(-1, 1, N))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BdlWarning)
            laplace = guide.laplace_approximation((x, y))
        predictive = LinearizedPredictive(model, laplace, 3)
        density = predictive.log_density(x, y)["y"]
        drawn = predictive(x)
        assert {density.dtype, drawn["y"].dtype, drawn["f"].dtype} == {dtype}
        variance = predictive.moments(x)["y"].variance
        found[dtype] = [v.double() for v in (density, *variance.values())]
    torch.testing.assert_close(*found.values(), rtol=1e-3, atol=1e-5)


# What it refuses


def test_bad_arguments():
    model, x, y = case("normal")
    map_guide = AutoLaplaceGGN(model).prototype(x, y)
    with pytest.raises(TypeError, match=r"laplace_approximation\(data\) .*, got AutoLaplace"):
        LinearizedPredictive(model, map_guide)
    guide = approximate(model, (x, y))
    with pytest.raises(ValueError, match="num_samples must be at least 1, got 0"):
        LinearizedPredictive(model, guide, 0)
    predictive = LinearizedPredictive(model, guide)
    with pytest.raises(ValueError, match=r"unknown method 'exact' .there are probit"):
        predictive.probabilities(x, method="exact")
    for method in ("probit", "laplace-bridge", "monte-carlo"):
        with pytest.raises(ValueError, match="no observed site is Categorical or Bernoulli"):
            predictive.probabilities(x, method=method)
    with pytest.raises(ValueError, match="site 'y' has no observation: pass the targets"):
        predictive.log_density(x)
    with pytest.raises(ValueError, match="no site is observed: pass the targets"):
        predictive.log_likelihood(x)


def test_what_has_no_closed_form_is_told():
    model, x, y = case("bernoulli")
    guide = approximate(model, (x, y))
    predictive = LinearizedPredictive(model, guide)
    with pytest.raises(ValueError, match=r"is for several classes: use .probit. for two"):
        predictive.probabilities(x, method="laplace-bridge")
    with pytest.raises(ValueError, match="only a Normal observation has a predictive variance"):
        _ = predictive.moments(x)["y"].predictive_variance


def test_unknown_distributions_are_told():
    model = observing(1, lambda f: dist.Chi2(f[:, 0].exp()))
    x, y = torch.randn(N, 3), torch.rand(N) + 0.5
    guide = approximate(model, (x, y))
    with pytest.raises(NotImplementedError, match="does not know Chi2 observations"):
        LinearizedPredictive(model, guide)(x)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", ["latent noise", "heteroscedastic", "categorical"])
def test_a_gpu_says_the_same(kind):
    found, start = [], None
    for device in ("cpu", "cuda"):
        model, *args = case(kind)
        model, args = model.to(device), tuple(value.to(device) for value in args)
        guide = AutoLaplaceGGN(model, structure="full").prototype(*args)
        with torch.no_grad():  # the start of a noise scale is drawn
            start = guide.loc.clone() if start is None else start
            guide.loc.copy_(start)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BdlWarning)
            predictive = LinearizedPredictive(model, guide.laplace_approximation(args), 3)
        found.append([predictive.covariance(*args)["y"], predictive.log_density(*args)["y"]])
        drawn = predictive(*args)
        assert all(value.device.type == device for value in drawn.values())
    second = [tuple(v.cpu() for v in found[1][0]), found[1][1].cpu()]
    torch.testing.assert_close(second, found[0])


def test_moments_of_each_draw_add_up_to_the_predictive_ones():
    """Mean and variance over the draws against the closed form; of a mixture of two as well."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 2), torch.randn(8)
    model = models.Regression(bayesianize(torch.nn.Linear(2, 1)), noise=0.5)
    guide = AutoLaplaceGGN(model, structure="full").prototype(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        members = [guide.laplace_approximation((x, y)) for _ in range(2)]
    for posterior in (members[0], MixtureGuide(members)):
        predictive = LinearizedPredictive(model, posterior, 20000)
        mean, variance = predictive.draw_moments(x)["y"]
        exact = predictive.moments(x)["y"]
        assert mean.shape == variance.shape == (20000, 8)
        drawn = predictive.draw_moments(x)["y"].over_draws()
        assert drawn.mean.shape == drawn.variance.shape == (8,)
        torch.testing.assert_close(drawn.variance, exact.predictive_variance, rtol=0.05, atol=0)
        total = variance.mean(0) + mean.var(0)
        torch.testing.assert_close(drawn.variance, total, rtol=0.05, atol=0)
        error = (exact.variance["loc"] / 20000).sqrt()
        assert ((drawn.mean - exact.mean["loc"]).abs() < 5 * error).all()
        assert ((mean.mean(0) - exact.mean["loc"]).abs() < 5 * error).all()
        assert (variance == 0.25).all()


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "low_rank"])
def test_predictions_are_differentiable_in_the_inputs(structure):
    """Moments as functions of the inputs have the derivatives that finite differences find, and
    the values that they have without."""
    torch.manual_seed(0)
    x = torch.randn(8, 2, dtype=torch.float64)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    model = models.Regression(bayesianize(net), noise=0.3)
    guide = AutoLaplaceGGN(model, structure=structure).prototype(x, x.sum(-1).sin())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        laplace = guide.laplace_approximation((x, x.sum(-1).sin()))
    predictive = LinearizedPredictive(model, laplace, num_samples=2)
    inputs = torch.randn(2, 2, dtype=torch.float64)

    def moments(inputs):
        found = predictive.moments(inputs)["y"]
        joint = predictive.joint_covariance(inputs)["y"][1]
        return found.mean["loc"], found.variance["loc"], joint

    plain = moments(inputs)
    assert not any(value.requires_grad for value in plain)
    inputs.requires_grad_()
    torch.testing.assert_close([value.detach() for value in moments(inputs)], list(plain))
    assert torch.autograd.gradcheck(moments, (inputs,))
    assert predictive(inputs)["f"].requires_grad
    with torch.no_grad():
        assert not predictive(inputs)["f"].requires_grad
