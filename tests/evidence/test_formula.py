"""The evidence without runs of the program is that with them."""

import warnings

import pytest
import torch
from helpers.parameters import AroundOne
from torch import nn

from pyro_bdl import bayesianize, models, priors
from pyro_bdl.errors import BdlWarning
from pyro_bdl.evidence.formula import Formula, NormalFormula, log_determinant, sum_of_logs
from pyro_bdl.evidence.linearized import LinearizedModel
from pyro_bdl.guides import AutoLaplaceGGN


def guide_of(model, y, **options):
    x = torch.randn(len(y), 2)
    guide = AutoLaplaceGGN(model, **options).prototype(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        return guide.laplace_approximation((x, y))


def net():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))


@pytest.mark.parametrize("structure", ["kron", "full"])
def test_its_fixed_point_is_that_of_a_run(structure, learn):
    torch.manual_seed(0)
    rules = {"0.*": priors.FanIn(learn(0.8)), "2.*": priors.Normal(learn(0.7))}
    model = models.Regression(bayesianize(net(), priors.ByName(rules)), noise=learn(0.4))
    guide = guide_of(model, torch.randn(12, 2), structure=structure)
    formula = NormalFormula.of(guide, guide.read())
    for point in (None, LinearizedModel(guide).optimum()):
        expected = Formula(guide, guide.read()).fixed_point(point)
        assert len(expected) == 3
        torch.testing.assert_close(formula.fixed_point(point), expected)


@pytest.mark.parametrize("subset", [None, "0.*"])
@pytest.mark.parametrize("structure", ["kron", "full", "diag"])
def test_it_is_the_evidence_and_its_gradient(structure, subset, learn, put):
    """Priors of two kinds, one around another mean, at other hyperparameters than it was read."""
    torch.manual_seed(0)
    rules = {
        "0.weight": priors.FanIn(learn(0.8)),
        "0.bias": AroundOne(learn(0.5)),
        "2.*": priors.Normal(0.7),
    }
    model = models.Regression(bayesianize(net(), priors.ByName(rules)), noise=learn(0.4))
    guide = guide_of(model, torch.randn(12, 2), structure=structure, subset=subset)
    formula = NormalFormula.of(guide, guide.read())
    put(guide, prior=0.6, noise=0.9)
    guide.refresh()
    for point in (None, LinearizedModel(guide).optimum()):
        assert len(formula.tuned) == 3
        leaves = [parameter.leaf for parameter in formula.tuned.values()]
        expected, found = Formula(guide, guide.read()).value(point), formula.value(point)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        slopes = [torch.autograd.grad(v, leaves) for v in (found, expected)]
        torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("structure", ["kron", "ekfac", "full", "diag", "low_rank"])
@pytest.mark.parametrize("prior", ["one scale", "a scale for each layer"])
def test_one_number_for_each_group_of_sites(prior, structure, learn, put):
    """The formula takes eigenvalues alone, where the structure has them."""
    torch.manual_seed(0)
    one = priors.Normal(learn(0.8))
    chosen = priors.PerLayer(one) if prior == "a scale for each layer" else one
    model = models.Regression(bayesianize(net(), chosen), noise=learn(0.4))
    guide = guide_of(model, torch.randn(12, 2), structure=structure)
    formula = NormalFormula.of(guide, guide.read())
    assert [len(group.locs) for group in formula.groups] == ([4] if chosen is one else [2, 2])
    put(guide, prior=0.6, noise=0.9)
    guide.refresh()
    leaves = [parameter.leaf for parameter in formula.tuned.values()]
    expected, found = Formula(guide, guide.read()).value(), formula.value()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    slopes = [torch.autograd.grad(value, leaves) for value in (found, expected)]
    torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-9)


def test_the_gradient_of_a_log_determinant():
    eigenvalues = torch.rand(5)
    precision, factor = (torch.rand((), requires_grad=True) for _ in range(2))
    torch.testing.assert_close(
        log_determinant(eigenvalues, precision, factor),
        (factor * eigenvalues + precision).log().sum(),
    )
    assert torch.autograd.gradcheck(
        lambda d, c: log_determinant(eigenvalues, d, c), (precision, factor)
    )


@pytest.mark.parametrize("size", [1.0, 1e60, 1e-39, 1e-60])
@pytest.mark.parametrize("count", [0, 5, 8, 21])
def test_sums_of_logarithms(count, size):
    """Also where the products are too large or too small for a number."""
    values = size * (torch.rand(count) + 0.5)
    torch.testing.assert_close(sum_of_logs(values), values.log().sum(), rtol=1e-14, atol=1e-13)


@pytest.mark.parametrize("subset", [None, "0.*"])
def test_the_guide_follows_the_formula_as_a_run_of_its_program(subset, learn, put):
    torch.manual_seed(0)
    rules = {"0.weight": priors.FanIn(learn(0.8)), "0.bias": AroundOne(0.5)}
    model = models.Regression(
        bayesianize(net(), priors.ByName(rules | {"*": priors.Normal(0.7)})), noise=learn(0.4)
    )
    guide = guide_of(model, torch.randn(12, 2), structure="kron", subset=subset)
    formula = NormalFormula.of(guide, guide.read())
    put(guide, prior=0.6, noise=0.9)
    states = []
    for follow in (formula.follow, guide.refresh):
        follow()
        states.append((guide.prior_diagonal, guide.prior_slope, guide.noise_factor))
    torch.testing.assert_close(*states, rtol=1e-12, atol=1e-12)


def test_where_the_likelihood_has_no_noise(learn):
    model = models.Classification(bayesianize(net(), priors.Normal(learn(0.8))))
    guide = guide_of(model, torch.arange(12) % 2)
    found = NormalFormula.of(guide, guide.read()).value()
    expected = Formula(guide, guide.read()).value()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["heavy tails", "one scale for each weight", "shifted"])
def test_programs_without_a_formula(kind, learn):
    prior = priors.Normal(learn(torch.rand(3, 1) + 0.5))
    if kind == "heavy tails":
        prior = priors.StudentT(4.0, learn(0.8))
    elif kind == "shifted":

        class Shifted(priors.Normal):
            def _value(self, argument, like):
                return super()._value(argument, like) + 0.1

        prior = Shifted(learn(0.5))
    rules = {"0.weight": prior, "*": priors.Normal(1.0)}
    model = models.Regression(bayesianize(net(), priors.ByName(rules)), noise=0.4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        guide = guide_of(model, torch.randn(12, 2), structure="full")
        assert guide.read().parameters
        assert NormalFormula.of(guide, guide.read()) is None
