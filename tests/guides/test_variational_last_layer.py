"""The variational last layer against closed forms and against draws."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_bdl import LinearizedPredictive, bayesian_linear, bayesianize, models, priors
from pyro_bdl.elbo import CompiledELBO, TemperedTrace_ELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides import AutoVariationalLastLayer
from pyro_bdl.guides.variational_last_layer import LayerPrecision
from pyro_bdl.program.program import Program
from pyro_bdl.program.trace import record

SCALE, NOISE = 0.75, 0.25
STRUCTURES = pytest.mark.parametrize("structure", ["dense", "matrix-normal"])


@pytest.fixture(autouse=True)
def _seeded():
    pyro.set_rng_seed(1)


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64)


X, Y = numbers(12, 3), numbers(12, 2)


def linear(outputs=2, **options):
    net = nn.Linear(3, outputs).double()
    prior = priors.Normal(SCALE)
    return models.Regression(bayesianize(net, prior=prior), noise=NOISE, **options)


def network(outputs):
    return bayesianize(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double())


def solved(model, *, temperature=1.0, **options):
    """A guide whose layer has the exact posterior, and the posterior."""
    guide = AutoVariationalLastLayer(model, **options).prototype(X, Y)
    *_, posterior = result = exact(beta=NOISE**-2 / temperature)
    values = {"weight": posterior.mean[:, :-1], "bias": posterior.mean[:, -1]}
    root = torch.linalg.cholesky(posterior.covariance)
    with torch.no_grad():
        guide.loc.copy_(guide.layout.flatten(values))
        guide.column = root.expand(2, 4, 4) if guide.structure == "dense" else root[0]
    return guide, result


def exact(alpha=SCALE**-2, beta=NOISE**-2):
    phi = torch.cat([X, X.new_ones(len(X), 1)], 1)
    statistics = bayesian_linear.SufficientStatistics.of(phi, Y)
    return phi, statistics, bayesian_linear.posterior(statistics, alpha, beta)


@STRUCTURES
@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_with_fixed_features_the_optimum_is_the_exact_posterior(structure, temperature):
    """The bound has no slope there, and is the log evidence; it is deterministic."""
    model, elbo = linear(), TemperedTraceMeanField_ELBO(temperature)
    guide, (_, statistics, _) = solved(model, temperature=temperature, structure=structure)
    loss = elbo.differentiable_loss(model, guide, X, Y)
    for gradient in torch.autograd.grad(loss, list(guide.parameters())):
        assert gradient.abs().max() < 1e-7
    if temperature == 1.0:
        evidence = bayesian_linear.log_evidence(statistics, SCALE**-2, NOISE**-2)
        assert -loss.item() == pytest.approx(evidence.item(), abs=1e-6)


def test_the_linearized_predictive_is_the_exact_one():
    model = linear()
    guide, (phi, _, posterior) = solved(model)
    mean, variance = bayesian_linear.predict(phi, posterior, NOISE**-2)
    moments = LinearizedPredictive(model, guide).parameter_moments(X)["y"]
    torch.testing.assert_close(moments.mean["loc"], mean)
    torch.testing.assert_close(moments.variance["loc"], variance - NOISE**2)


# The expected log likelihood


def _shifted(x, y=None):
    """A program without a network: a product with a vector, and a bias."""
    hidden = pyro.sample("hidden", dist.Normal(x.new_zeros(3, 4), 1.0).to_event(2))
    w = pyro.sample("w", dist.Normal(x.new_zeros(4), 1.0).to_event(1))
    b = pyro.sample("b", dist.Normal(x.new_zeros(()), 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Laplace(2.0 * (torch.tanh(x @ hidden) @ w + b) + 1.0, 0.5), obs=y)


PROGRAMS = {
    "Normal": (lambda: models.Regression(network(2)), Y),
    "heteroscedastic": (lambda: models.HeteroscedasticRegression(network(4), floor=0.1), Y),
    "Student t": (lambda: models.StudentTRegression(network(1), noise=0.5, df=3.0), Y[:, 0]),
    "Bernoulli": (lambda: models.BinaryClassification(network(1)), (Y[:, 0] > 0).double()),
    "Poisson": (lambda: models.PoissonRegression(network(1)), Y[:, 0].abs().round()),
    "Laplace, by hand": (lambda: _shifted, Y[:, 0]),
    "classes": (lambda: models.Classification(network(3)), torch.arange(12) % 3),
}


def ready(model, y, **options):
    """A guide with weights of the layer that are correlated."""
    guide = AutoVariationalLastLayer(model, init_scale=0.3, **options).prototype(X, y)
    with torch.no_grad():
        for name, parameter in guide.named_parameters():
            if name != "loc":
                parameter.add_(0.2 * torch.randn_like(parameter))
    assert guide.head is not None
    return guide


def at_draws(model, guide, y, count=20000):
    """Mean and standard error of log p(y | w) over draws of the layer."""
    program = Program(model, X, y)
    draws = guide.sample_latents(count)
    values = torch.vmap(program.log_likelihood)(draws)
    total = sum(v.reshape(count, -1).sum(1) for v in values.values())
    return total.mean().item(), (total.std() / count**0.5).item()


@STRUCTURES
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_expected_log_likelihood_is_the_mean_over_draws(name, structure):
    make, y = PROGRAMS[name]
    model = make()
    guide = ready(model, y, structure=structure)
    elbo = TemperedTraceMeanField_ELBO()
    elbo.loss(model, guide, X, y)
    mean, error = at_draws(model, guide, y)
    gap = mean - elbo.expected_log_likelihood.item()
    if name == "classes":
        assert 0 < gap < 0.1 * abs(mean)
    else:
        assert abs(gap) < 4 * error


def test_mixed_up_correlations_would_be_seen():
    """A location and its noise as outputs, which a matrix normal correlates."""
    make, y = PROGRAMS["heteroscedastic"]
    guide = ready(model := make(), y, structure="matrix-normal")
    with torch.no_grad():
        rows = torch.eye(4, dtype=torch.float64)
        rows[2, 0], rows[3, 1] = 1.5, -1.5
        guide.row = rows
    elbo = TemperedTraceMeanField_ELBO()
    elbo.loss(model, guide, X, y)
    right = elbo.expected_log_likelihood.item()
    guide.partner.copy_(torch.arange(4))
    elbo.loss(model, guide, X, y)
    mean, error = at_draws(model, guide, y, 100000)
    assert abs(mean - elbo.expected_log_likelihood.item()) > 5 * error > abs(mean - right)


def test_every_bound_of_the_package_takes_it():
    """The same expectation, and a KL in closed form or at a draw."""
    make, y = PROGRAMS["Normal"]
    guide = ready(model := make(), y)
    bounds = [TemperedTraceMeanField_ELBO(), TemperedTrace_ELBO(), CompiledELBO()]
    for bound in bounds:
        for _ in range(3):
            bound.differentiable_loss(model, guide, X, y)
    plain, sampled, compiled = bounds
    for bound in (sampled, compiled):
        assert bound.expected_log_likelihood.item() == pytest.approx(
            plain.expected_log_likelihood.item(), rel=1e-12
        )
    assert compiled.num_replays and compiled.kl.item() == pytest.approx(plain.kl.item())
    several = TemperedTrace_ELBO(num_particles=2000)
    several.loss(model, guide, X, y)
    assert several.kl.item() == pytest.approx(plain.kl.item(), abs=0.5)


def test_minibatches_add_up_and_particles_agree():
    make, y = PROGRAMS["classes"]
    model = make()
    model.num_data = 12
    guide = ready(model, y)
    elbo = TemperedTraceMeanField_ELBO()

    def likelihood(rows):
        elbo.loss(model, guide, X[rows], y[rows])
        return elbo.expected_log_likelihood.item()

    whole = likelihood(slice(None))
    halves = [likelihood(slice(6)), likelihood(slice(6, None))]
    assert sum(halves) / 2 == pytest.approx(whole, rel=1e-12)
    several = TemperedTraceMeanField_ELBO(num_particles=3)
    several.loss(model, guide, X, y)
    assert several.expected_log_likelihood.item() == pytest.approx(whole, rel=1e-12)


def test_one_pass_through_the_features():
    make, y = PROGRAMS["heteroscedastic"]
    guide, calls = ready(model := make(), y), []
    model.network.network[1].register_forward_hook(lambda *_: calls.append(1))
    elbo = TemperedTraceMeanField_ELBO()
    elbo.loss(model, guide, X, y)
    calls.clear()
    elbo.loss(model, guide, X, y)
    assert len(calls) == 1


def test_features_under_a_mean_field_guide():
    """The bound is an expectation over draws of the features, and all latents have a density."""
    make, y = PROGRAMS["Student t"]
    guide = ready(model := make(), y, features="mean-field")
    assert guide.has_density
    elbo = TemperedTraceMeanField_ELBO(num_particles=2000)
    elbo.loss(model, guide, X, y)
    mean, error = at_draws(model, guide, y)
    assert abs(mean - elbo.expected_log_likelihood.item()) < 5 * error


# Programs without such a form


def _joint(x, y=None):
    w = pyro.sample("w", dist.Normal(x.new_zeros(2, 3), 1.0).to_event(2))
    with pyro.plate("data", len(x)):
        root = torch.eye(2, dtype=x.dtype)
        pyro.sample("y", dist.MultivariateNormal(x @ w.mT, scale_tril=root), obs=y)


def _pooled(x, y=None):
    w = pyro.sample("w", dist.Normal(x.new_zeros(2, 3), 1.0).to_event(2))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal((x @ w.mT).mean(-1), 1.0), obs=None if y is None else y[:, 0])


@pytest.mark.parametrize("program", [_joint, _pooled])
def test_other_programs_take_draws_and_say_so(program):
    guide = AutoVariationalLastLayer(program)
    with pytest.warns(BdlWarning, match="at draws"):
        guide.prototype(X, Y)
    elbo = TemperedTraceMeanField_ELBO()
    with torch.random.fork_rng():
        vector = guide.sample_vectors(1)[0]
    elbo.loss(program, guide, X, Y)
    run = record(program, guide.layout.constrain(vector)[0], (X, Y))
    assert elbo.expected_log_likelihood.item() == pytest.approx(run.log_likelihood().item())


# The precision


@STRUCTURES
def test_the_precision_is_that_of_its_covariance(structure):
    guide = ready(model := PROGRAMS["Normal"][0](), Y, structure=structure, features="mean-field")
    precision = guide.precision
    assert isinstance(precision, LayerPrecision) and model is guide.program_model
    size = precision.size
    dense = precision.solve(torch.eye(size, dtype=torch.float64)).detach()
    torch.testing.assert_close(dense.diagonal(), precision.variances())
    torch.testing.assert_close(-dense.logdet(), precision.logdet())
    x = numbers(5, size)
    torch.testing.assert_close(
        precision.quadratic(x), (x @ dense.inverse() * x).sum(1), rtol=1e-6, atol=1e-6
    )
    sampled = precision.sample(30000).detach()
    spread = dense.diagonal().sqrt()
    error = (sampled.T.cov() - dense) / torch.outer(spread, spread)
    assert error.abs().max() < 5 * (2 / 30000) ** 0.5
