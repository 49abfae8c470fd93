"""Factors that are declared a part of the prior: no temperature of the likelihood scales them."""

import math

import jax
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule, PyroParam
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.handlers import cold, temper
from pyro_bdl.program import record

ETA, LAMBDA = 0.1, 3.0
Y = torch.tensor([0.3, 1.2, -0.4, 2.0, 0.9], dtype=torch.float64)


def factored(y=None, *, declare=bdl.priors.factor):
    """w ~ N(0, 1) exp(-lambda w^2 / 2), which is N(0, 1 / (1 + lambda)) but for its mass."""
    w = pyro.sample("w", dist.Normal(Y.new_zeros(()), 1.0))
    declare("narrower", -0.5 * LAMBDA * w.square())
    with pyro.plate("data", 50, subsample=Y if y is None else y):  # N / B = 10
        pyro.sample("y", dist.Normal(w, 1.0), obs=y)


def as_likelihood(y=None):
    factored(y, declare=pyro.factor)


def log_joint(w, of_prior, of_likelihood):
    log_prior = dist.Normal(Y.new_zeros(()), 1.0).log_prob(w) - 0.5 * LAMBDA * w.square()
    log_likelihood = 10 * dist.Normal(w, 1.0).log_prob(Y).sum()
    return of_prior * log_prior + of_likelihood * log_likelihood


PROGRAMS = {  # with the powers of prior and likelihood
    "plain": (factored, 1.0, 1.0),
    "tempered": (temper(factored, ETA), 1.0, 1 / ETA),
    "cold": (cold(factored, ETA), 1 / ETA, 1 / ETA),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_densities(name):
    model, of_prior, of_likelihood = PROGRAMS[name]
    program, w = bdl.Program(model, Y), torch.tensor(0.7, dtype=torch.float64)
    run = program.run({"w": w})
    assert list(run.prior_factors) == ["narrower"] and not run.factors
    terms = run.prior_terms() | run.terms()
    assert float(sum(terms.values())) == pytest.approx(float(program.log_joint({"w": w})))
    exact = float(log_joint(w, of_prior, of_likelihood))
    assert float(program.log_joint({"w": w})) == pytest.approx(exact)
    assert float(program.log_density(w.reshape(1))) == pytest.approx(exact)
    assert float(program.log_prior({"w": w})) == pytest.approx(
        float(log_joint(w, of_prior, 0.0)), rel=1e-12
    )
    with jax.enable_x64(True):
        density = program.to_jax()(w.reshape(1).numpy())  # as NUTS evaluates it
    assert float(density) == pytest.approx(exact)
    by_sites = program.log_density_terms(w.reshape(1))
    assert float(sum(by_sites.values())) == pytest.approx(exact)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore:.*#number-of-data")
def test_the_laplace_approximation_is_exact(name):
    model, of_prior, of_likelihood = PROGRAMS[name]
    precision = of_prior * (1 + LAMBDA) + of_likelihood * 50
    mean = of_likelihood * 10 * float(Y.sum()) / precision
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full").prototype(Y)
    with torch.no_grad():
        guide.loc.fill_(mean)
    posterior = guide.laplace_approximation((Y,))
    assert posterior.variances().item() == pytest.approx(1 / precision)
    exact = float(log_joint(torch.tensor(mean, dtype=torch.float64), of_prior, of_likelihood))
    exact += 0.5 * math.log(2 * math.pi / precision)
    assert bdl.evidence.log_marginal_likelihood(posterior).item() == pytest.approx(exact)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(
    "bound", [bdl.elbo.TemperedTrace_ELBO, bdl.elbo.TemperedTraceMeanField_ELBO]
)
@pytest.mark.parametrize("guide", [bdl.guides.AutoMeanField, bdl.guides.AutoLowRank])
def test_bounds(name, bound, guide):
    """L(eta) = E_q[log p(y | w)] - eta E_q[log q - log p], and the cold bound, by closed forms."""
    model, _, _ = PROGRAMS["plain"]
    guide = guide(model, init_scale=0.2).prototype(Y)
    mean, variance = guide.location().detach(), guide.variances().detach()
    options = {
        "plain": {}, "tempered": {"temperature": ETA}, "cold": {"cold_temperature": ETA}
    }[name]  # fmt: skip
    torch.manual_seed(0)
    elbo = bound(num_particles=20_000, **options)
    loss = elbo.loss(model, guide, Y)
    second = variance + mean.square()
    prior = -0.5 * math.log(2 * math.pi) - 0.5 * (1 + LAMBDA) * second
    likelihood = 10 * (
        -0.5 * len(Y) * math.log(2 * math.pi)
        - 0.5 * (Y.square().sum() - 2 * mean * Y.sum() + len(Y) * second)
    )
    entropy = 0.5 * (2 * math.pi * math.e * variance).log()
    kl = -entropy - prior
    exact = {
        "plain": likelihood - kl,
        "tempered": likelihood - ETA * kl,
        "cold": likelihood + prior + ETA * entropy,
    }[name]
    assert -loss == pytest.approx(float(exact), rel=3e-3)


def test_a_factor_that_is_not_declared_is_likelihood():
    run = bdl.Program(temper(as_likelihood, ETA), Y).run({"w": torch.tensor(0.7)})
    assert list(run.factors) == ["narrower"] and run.factors["narrower"].scale == 1 / ETA


def _learned():
    return PyroParam(torch.tensor(2.0), dist.constraints.positive)


HYPERPRIOR = dist.Gamma(2.0, 1.0)
OWN = {
    "of the weights": lambda scale: bdl.models.Regression(
        bdl.bayesianize(nn.Linear(2, 1), bdl.priors.Normal(scale)), noise=0.5
    ),
    "of the noise": lambda scale: bdl.models.Regression(
        bdl.bayesianize(nn.Linear(2, 1)), noise=scale
    ),
}
BOUNDS = {
    "sampled": bdl.elbo.TemperedTrace_ELBO,
    "closed": bdl.elbo.TemperedTraceMeanField_ELBO,
    "rows": lambda temperature: bdl.elbo.TemperedTrace_ELBO(temperature, estimator="flipout"),
    "compiled": bdl.elbo.CompiledELBO,
    "limit": bdl.elbo.MeanFieldLimit,
}
GUIDES = {
    "MAP": bdl.guides.AutoMAP,
    "mean-field": bdl.guides.AutoMeanField,
    "low rank": bdl.guides.AutoLowRank,
    "matrix normal": bdl.guides.AutoMatrixNormal,
    "dropout": lambda model: bdl.guides.AutoMCDropout(model, sites="all", p=0.3),
    "last layer": bdl.guides.AutoVariationalLastLayer,
    "inducing": bdl.guides.AutoInducing,
    "ensemble": lambda model: bdl.guides.AutoEnsemble(model, size=1),
    "Pyro's": pyro.infer.autoguide.AutoNormal,
}
PAIRS = [(guide, "sampled") for guide in GUIDES] + [(guide, "closed") for guide in GUIDES]
PAIRS += [("mean-field", bound) for bound in ("rows", "compiled", "limit")]


@pytest.mark.parametrize("guide, bound", PAIRS)
@pytest.mark.parametrize("own", OWN)
def test_hyperpriors_in_bounds(own, guide, bound):
    """They add -eta log p(theta), whichever guide and bound."""
    x, y = torch.randn(6, 2), torch.randn(6)
    losses = []
    for scale in (bdl.priors.Hyperprior(HYPERPRIOR, start=2.0), _learned()):
        pyro.clear_param_store()
        torch.manual_seed(0)
        model = OWN[own](scale)
        made = GUIDES[guide](model)
        torch.manual_seed(1)
        made(x, y)
        torch.manual_seed(2)
        losses.append(BOUNDS[bound](temperature=ETA).loss(model, made, x, y))
    expected = -ETA * float(HYPERPRIOR.log_prob(torch.tensor(2.0)))
    assert losses[0] - losses[1] == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("handler, of_prior", [(temper, 1.0), (cold, 1 / ETA)])
def test_weight_decay_of_rank_one(handler, of_prior):
    x, y = torch.randn(6, 2), torch.randn(6)
    model = bdl.models.Regression(bdl.nn.rank_one(nn.Linear(2, 1)), noise=0.5, num_data=60)
    tempered = handler(model, ETA)
    at = bdl.Program(model, x, y).initial
    plain, changed = (bdl.Program(each, x, y).run(at) for each in (model, tempered))
    exact = sum(
        float(dist.Normal(0.0, 1.0).log_prob(value).sum())
        for name, value in model.network.network.named_parameters()
        if "base" in name or "bias" in name
    )
    assert float(plain.prior_terms()["weights"]) == pytest.approx(exact)
    assert float(changed.log_prior()) == pytest.approx(of_prior * float(plain.log_prior()))
    assert float(changed.log_likelihood()) == pytest.approx(float(plain.log_likelihood()) / ETA)


def test_the_evidence_of_hyperpriors_is_tempered_in_the_likelihood_alone():
    """log of the tempered evidence, N(y; 0, ...) in closed form, plus log p(theta)."""
    x, y = torch.randn(6, 1).double(), torch.randn(6).double()
    net = nn.Linear(1, 1, bias=False).double()
    bnn = bdl.bayesianize(net, bdl.priors.Normal(bdl.priors.Hyperprior(HYPERPRIOR, start=2.0)))
    model = temper(bdl.models.Regression(bnn, noise=0.5), ETA)
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full").prototype(x, y)
    precision = 0.25 + float(x.square().sum()) / (0.25 * ETA)
    mode = float((x[:, 0] * y).sum()) / (0.25 * ETA) / precision
    with torch.no_grad():
        guide.loc.fill_(mode)
    found = bdl.evidence.log_marginal_likelihood(guide.laplace_approximation((x, y))).item()
    w = torch.tensor(mode).double()
    exact = dist.Normal(0.0, 2.0).log_prob(w) + HYPERPRIOR.log_prob(torch.tensor(2.0))
    exact = exact + dist.Normal(x[:, 0] * w, 0.5).log_prob(y).sum() / ETA
    assert found == pytest.approx(float(exact) + 0.5 * math.log(2 * math.pi / precision), rel=1e-5)


class Joint(PyroModule):
    """Two weights under a Gaussian prior with a matrix, and a prior factor that ties them."""

    def forward(self, x, y=None):
        w = pyro.sample("w", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
        bdl.priors.factor("alike", -2.0 * (w[0] - w[1]).square())
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


def test_a_factor_couples_the_weights_in_the_prior_precision():
    x, y = torch.randn(5, 2).double(), torch.randn(5).double()
    alike = 4.0 * torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).double()
    precision = torch.eye(2).double() + alike + x.mT @ x
    guide = bdl.guides.AutoLaplaceGGN(Joint(), structure="full").prototype(x, y)
    with torch.no_grad():
        guide.loc.copy_(torch.linalg.solve(precision, x.mT @ y))
    posterior = guide.laplace_approximation((x, y))
    torch.testing.assert_close(posterior.variances(), precision.inverse().diagonal())


def test_a_program_of_prior_factors_alone_observes_nothing():
    def model():
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        bdl.priors.factor("narrower", -w.square())

    with pytest.raises(bdl.errors.UnsupportedProgramError, match="no observed site"):
        bdl.Program(model).require_observed()


def test_a_factor_of_a_discrete_site_is_refused():
    def model(y):
        k = pyro.sample("k", dist.Categorical(torch.ones(2)))
        bdl.priors.factor("of k", -1.0 * k)
        pyro.sample("y", dist.Normal(k.to(y), 1.0), obs=y)

    with pytest.raises(bdl.errors.UnsupportedProgramError, match="depends on a discrete site"):
        bdl.Program(model, torch.tensor(0.3)).log_joint({})


def test_one_name_is_one_statement():
    def model(y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        bdl.priors.factor("w", -w)
        pyro.sample("y", dist.Normal(w, 1.0), obs=y)

    with pytest.raises(bdl.errors.UnsupportedProgramError, match="two statements"):
        record(model, {}, (torch.tensor(0.0),))


def test_arviz_gets_no_draws_of_a_prior_that_a_factor_weighs():
    draws = bdl.Samples({"w": torch.randn(1, 20, dtype=torch.float64)})
    with pytest.warns(bdl.errors.BdlWarning, match="the factor 'narrower' weighs"):
        data = bdl.to_arviz(factored, draws, Y)
    assert "prior" not in data.groups() and "log_likelihood" in data.groups()
    x, y = torch.randn(6, 2), torch.randn(6)
    model = OWN["of the weights"](bdl.priors.Hyperprior(HYPERPRIOR))
    guide = bdl.guides.AutoMeanField(model).prototype(x, y)
    assert "prior" in bdl.to_arviz(model, guide, x, y, num_samples=4, prior_samples=4).groups()
