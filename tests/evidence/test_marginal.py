"""The evidence of linear regression, exact with its gradients; batches, temperatures, subsets."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.parameters import AroundOne
from pyro.nn import PyroParam
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pyro_bdl import bayesianize, evidence, handlers, models, priors
from pyro_bdl.errors import BdlWarning
from pyro_bdl.evidence import log_marginal_likelihood
from pyro_bdl.evidence.linearized import LinearizedModel
from pyro_bdl.guides import AutoEnsemble, AutoLaplaceGGN

EXACTLY = {"rtol": 1e-10, "atol": 1e-10}


def gradients(value, guide):
    """By name, in the unconstrained parameters."""
    found = guide.read().parameters
    for parameter in found.values():
        parameter.leaf.grad = None
    value.backward()
    return {name.rpartition(".")[2]: p.leaf.grad for name, p in found.items()}


@pytest.mark.parametrize("linearized", [False, True])
def test_value_and_gradients_are_exact(line, linearized):
    """log p(y, u*) + p/2 log 2 pi - 1/2 log det (MacKay 1992, equation 2.3) is log N(y; 0, X S X' +
    noise^2) here, at the linearized optimum wherever u* is. The optimum is a maximum, so that its
    own movement adds nothing to the gradient (Antoran et al. 2022, section 3)."""
    guide = line.laplace(loc=line.mode() + 0.3 * linearized)
    found = log_marginal_likelihood(guide, linearized=linearized)
    logs = torch.tensor([line.prior, line.noise]).log().requires_grad_()
    exact = line.exact(*logs.exp())
    torch.testing.assert_close(found, exact, **EXACTLY)
    with torch.no_grad():
        torch.testing.assert_close(
            log_marginal_likelihood(guide, linearized=linearized), line.exact(), **EXACTLY
        )
    (slopes,) = torch.autograd.grad(exact, logs)
    grads = gradients(found, guide)
    found = torch.stack([grads["hyper_prior_scale"], grads["noise"]])
    torch.testing.assert_close(found, slopes, rtol=1e-8, atol=1e-8)


def test_it_follows_the_hyperparameters(line, put):
    """The MAP stays; at the linearized optimum the evidence is exact at other values too."""
    guide = line.laplace()
    put(guide, prior=1.3, noise=0.8)
    guide.refresh()
    offset = LinearizedModel(guide).optimum().offset
    torch.testing.assert_close(guide.loc + offset, line.mode(1.3, 0.8), **EXACTLY)
    found = log_marginal_likelihood(guide, linearized=True)
    torch.testing.assert_close(found, line.exact(1.3, 0.8), **EXACTLY)
    # at u* it is log p(y, u*) + p/2 log 2 pi - 1/2 log det
    joint = dist.Normal(line.design @ guide.loc, 0.8).log_prob(line.y).sum()
    joint = joint + dist.Normal(0.0, 1.3).log_prob(guide.loc).sum()
    logdet = line.precision(1.3, 0.8).logdet()
    expected = joint + 2 * math.log(2 * math.pi) - 0.5 * logdet
    torch.testing.assert_close(log_marginal_likelihood(guide), expected, **EXACTLY)
    torch.testing.assert_close(guide.precision.logdet(), logdet, **EXACTLY)


def test_minibatches_say_what_one_batch_says(line, put):
    data = DataLoader(TensorDataset(line.x, line.y), batch_size=5, shuffle=True)
    guide, whole = line.laplace(data=data), line.laplace()
    half = line.laplace(data=(line.x[:6], line.y[:6]))
    half.update((line.x[6:], line.y[6:]))
    put(guide, prior=1.3, noise=0.8)
    for other in (guide, half):
        other.refresh()
        found = log_marginal_likelihood(other, linearized=True)
        torch.testing.assert_close(found, line.exact(1.3, 0.8), **EXACTLY)
        torch.testing.assert_close(
            log_marginal_likelihood(other), log_marginal_likelihood(whole), **EXACTLY
        )


def test_more_data_at_another_noise_are_refused(line, put):
    guide = line.laplace(data=(line.x[:6], line.y[:6]))
    put(guide, noise=0.9)
    with pytest.raises(ValueError, match="the noise has changed since the curvature"):
        guide.update((line.x[6:], line.y[6:]))


def test_a_program_that_speaks_of_more_data(make_line):
    """Every sum over the data counts twice where half of them are passed twice."""
    line = make_line(size=12, num_data=24)
    with pytest.warns(BdlWarning, match="states 24 data, but 12 were passed"):
        guide = AutoLaplaceGGN(line.model, structure="full").prototype(*line.data)
        with torch.no_grad():
            guide.loc.copy_(line.mode())
        guide = guide.laplace_approximation(line.data)
    twice = make_line(size=12)
    doubled = twice.laplace(data=(torch.cat([line.x] * 2), torch.cat([line.y] * 2)), loc=guide.loc)
    for linearized in (False, True):
        torch.testing.assert_close(
            log_marginal_likelihood(guide, linearized=linearized),
            log_marginal_likelihood(doubled, linearized=linearized),
            **EXACTLY,
        )


@pytest.mark.parametrize("eta", [0.1, 2.0])
def test_tempered(line, eta, put):
    """log of the integral of p(y | w)^(1/eta) p(w): eta-scaled noise, and a constant."""
    model = handlers.temper(line.model, eta)
    guide = line.laplace(model=model, loc=line.mode(eta=eta))

    def exact(a, s):
        inflated = s * math.sqrt(eta)
        size = len(line.y)
        wide = -size * torch.log(s * math.sqrt(2 * math.pi)) / eta
        normal = size * torch.log(inflated * math.sqrt(2 * math.pi))
        return line.exact(a, inflated) + wide + normal

    logs = torch.tensor([line.prior, line.noise]).log().requires_grad_()
    expected = exact(*logs.exp())
    found = log_marginal_likelihood(guide)
    torch.testing.assert_close(found, expected, **EXACTLY)
    (slopes,) = torch.autograd.grad(expected, logs)
    grads = gradients(found, guide)
    found = torch.stack([grads["hyper_prior_scale"], grads["noise"]])
    torch.testing.assert_close(found, slopes, **EXACTLY)
    put(guide, noise=0.9)
    guide.refresh()
    expected = exact(torch.tensor(line.prior), torch.tensor(0.9))
    torch.testing.assert_close(log_marginal_likelihood(guide, linearized=True), expected, **EXACTLY)


def test_scales_of_every_shape(line, scales):
    """The prior covariance of (w, b) is diag(variances); slopes by the exact evidence."""
    model = models.Regression(bayesianize(nn.Linear(3, 1), scales.prior), noise=0.5)
    mean = 1.0 if isinstance(scales.prior, AroundOne) else 0.0
    rest, logs = line.y - mean * line.design.sum(1), torch.tensor(scales.start).log()
    diagonal = scales.variances(logs.requires_grad_().exp())
    total = line.design @ torch.diag(diagonal) @ line.design.T + 0.25 * torch.eye(12)
    expected = dist.MultivariateNormal(torch.zeros(12), total).log_prob(rest)
    precision = line.design.T @ line.design / 0.25 + torch.diag(1 / diagonal.detach())
    mode = torch.linalg.solve(precision, line.design.T @ rest / 0.25) + mean
    guide = line.laplace(model=model, loc=mode)
    found = log_marginal_likelihood(guide)
    torch.testing.assert_close(found, expected, **EXACTLY)
    (slopes,) = torch.autograd.grad(expected, logs)
    grads = gradients(found, guide)
    by_order = torch.cat([grads[name].reshape(-1) for name in sorted(grads, reverse=True)])
    torch.testing.assert_close(by_order, slopes, **EXACTLY)


@pytest.mark.parametrize("structure", ["kron", "low_rank"])
def test_other_structures_by_their_own_precision(structure, put):
    """log p(y, u*) + p/2 log 2 pi - 1/2 log det, with numerical slopes. Source: MacKay 1992,
    equation 2.3; Immer et al. 2021a, equation 6."""
    torch.manual_seed(1)
    x, y = torch.randn(20, 2), torch.randn(20)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    positive = {"constraint": dist.constraints.positive}
    prior = priors.Normal(PyroParam(torch.tensor(0.8), **positive))
    model = models.Regression(
        bayesianize(net, prior), noise=PyroParam(torch.tensor(0.4), **positive)
    )
    guide = AutoLaplaceGGN(model, structure=structure).prototype(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        guide = guide.laplace_approximation((x, y))

    def value(prior=0.8, noise=0.4):
        put(guide, prior=prior, noise=noise)
        guide.refresh()
        return log_marginal_likelihood(guide)

    found = value()
    latents = guide.require_layout().constrain(guide.loc)[0]
    with torch.no_grad():
        output = nn.functional.linear(x, latents["0.weight"], latents["0.bias"]).tanh()
        output = nn.functional.linear(output, latents["2.weight"], latents["2.bias"])[:, 0]
    joint = dist.Normal(output, 0.4).log_prob(y).sum()
    joint = joint + dist.Normal(0.0, 0.8).log_prob(guide.loc).sum()
    constant = 0.5 * guide.subset.size * math.log(2 * math.pi)
    expected = joint + constant - 0.5 * guide.precision.logdet()
    torch.testing.assert_close(found, expected, **EXACTLY)
    grads = gradients(found, guide)
    step = 1e-5
    for key, name in (("prior", "hyper_prior_scale"), ("noise", "noise")):
        start = {"prior": 0.8, "noise": 0.4}[key]
        up, down = (value(**{key: start * math.exp(s)}).item() for s in (step, -step))
        assert grads[name].item() == pytest.approx((up - down) / (2 * step), rel=1e-6, abs=1e-6)
        value()


def test_a_refit_at_other_hyperparameters_is_what_was_followed(put):
    """Curvature, likelihood and noise scale as if they were computed anew, for every kind."""
    torch.manual_seed(1)
    x, y = torch.randn(20, 2), torch.randn(20)
    positive = {"constraint": dist.constraints.positive}
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    noise = PyroParam(torch.tensor(0.4), **positive)
    model = models.Regression(bayesianize(net, priors.Normal(0.8)), noise=noise)
    map_guide = AutoLaplaceGGN(model).prototype(x, y)
    kinds = [("full", "ggn"), ("full", "empirical-fisher"), ("diag", "empirical-fisher")]
    for structure, curvature in [*kinds, ("kron", "ggn"), ("ekfac", "ggn"), ("low_rank", "ggn")]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BdlWarning)
            guide, again = (
                map_guide.laplace_approximation((x, y), structure=structure, curvature=curvature)
                for _ in range(2)
            )
            put(guide, noise=0.7)
            guide.refresh()
            again = map_guide.laplace_approximation(
                (x, y), structure=structure, curvature=curvature
            )
        torch.testing.assert_close(guide.precision.logdet(), again.precision.logdet())
        torch.testing.assert_close(log_marginal_likelihood(guide), log_marginal_likelihood(again))
        put(guide, noise=0.4)


def test_a_subset_has_the_evidence_given_the_others(line):
    """Only the bias: y - X w ~ Normal(b, s^2), b ~ Normal(0, a^2)."""
    guide = line.laplace(subset="bias")
    w, bias = guide.loc[:3], guide.loc[3]
    with torch.no_grad():
        rest = line.y - line.x @ w
        precision = 12 / line.noise**2 + 1 / line.prior**2
        best = rest.sum() / line.noise**2 / precision
        assert best.item() == pytest.approx(bias.item())
    total = line.noise**2 * torch.eye(12) + line.prior**2
    expected = dist.MultivariateNormal(torch.zeros(12), total).log_prob(rest)
    torch.testing.assert_close(log_marginal_likelihood(guide), expected, **EXACTLY)
    some = line.laplace(subset=torch.tensor([0, 1, 2, 3]))
    torch.testing.assert_close(log_marginal_likelihood(some), line.exact(), **EXACTLY)
    half = line.laplace(subset=torch.tensor([1, 3]))
    inside = line.design[:, [1, 3]]
    rest = line.y - line.design[:, [0, 2]] @ guide.loc[[0, 2]]
    total = line.noise**2 * torch.eye(12) + line.prior**2 * inside @ inside.T
    expected = dist.MultivariateNormal(torch.zeros(12), total).log_prob(rest)
    torch.testing.assert_close(log_marginal_likelihood(half), expected, **EXACTLY)


def test_constrained_latents_bring_their_volume():
    """u = log r of a Poisson rate with a Gamma prior: log p(T(u), y) + u at the maximum."""
    y = torch.tensor([2.0, 3.0, 1.0])

    def model(y=None):
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with pyro.plate("data", 3):
            pyro.sample("y", dist.Poisson(rate), obs=y)

    guide = AutoLaplaceGGN(model, structure="full").prototype(y)
    r = (y.sum() + 2) / 4
    with torch.no_grad():
        guide.loc.copy_(r.log()[None])
    guide = guide.laplace_approximation({"y": y})
    joint = dist.Poisson(r).log_prob(y).sum() + dist.Gamma(2.0, 1.0).log_prob(r) + r.log()
    logdet = (3 * r + r).log()
    expected = joint + 0.5 * math.log(2 * math.pi) - 0.5 * logdet
    torch.testing.assert_close(log_marginal_likelihood(guide), expected, **EXACTLY)


def test_members_of_a_mixture_have_the_evidence_of_their_own(line):
    """Exact from every member's point, and after one member has set the hyperparameters."""
    ensemble = AutoEnsemble(line.model, size=2).prototype(line.x, line.y)
    with torch.no_grad():
        ensemble.locs.copy_(torch.randn_like(ensemble.locs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)  # the members are not at the maximum
        mixture = ensemble.laplace_approximation((line.x, line.y), structure="full")

    def evidences():
        return [log_marginal_likelihood(member, linearized=True) for member in mixture.members]

    assert not torch.allclose(*(member.loc for member in mixture.members))
    for value in evidences():
        torch.testing.assert_close(value, line.exact(), **EXACTLY)
    best = evidence.maximize(mixture.members[0]).log_evidence
    mixture.members[1].refresh()
    assert best > float(line.exact()) + 1e-3
    for value in evidences():
        torch.testing.assert_close(value.item(), best, rtol=1e-6, atol=1e-6)
