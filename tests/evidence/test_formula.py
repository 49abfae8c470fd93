"""The evidence without runs of the program is that with them."""

import warnings

import pytest
import torch
from helpers.parameters import AroundOne, learned
from torch import nn

from pyro_bdl import bayesianize, models, priors
from pyro_bdl.errors import BdlWarning
from pyro_bdl.evidence.formula import Formula, NormalFormula, log_determinant, sum_of_logs
from pyro_bdl.evidence.linearized import LinearizedModel
from pyro_bdl.guides import AutoLaplaceGGN


def guide_of(prior, kind=models.Regression, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    regression = kind is models.Regression
    noise = {"noise": learned(0.4)} if regression else {}
    x, y = torch.randn(12, 2), torch.randn(12, 2) if regression else torch.arange(12) % 2
    guide = AutoLaplaceGGN(kind(bayesianize(net, prior), **noise), **options).prototype(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        return guide.laplace_approximation((x, y))


def two_kinds():
    """One around another mean, one fixed."""
    rules = {"0.weight": priors.FanIn(learned(0.8)), "0.bias": AroundOne(learned(0.5))}
    return priors.ByName(rules | {"2.*": priors.Normal(0.7)})


PRIORS = {  # with the numbers of sites that share a scale
    "two kinds": (two_kinds, [1, 1, 2]),
    "one scale": (lambda: priors.Normal(learned(0.8)), [4]),
    "a scale for each layer": (lambda: priors.PerLayer(priors.Normal(learned(0.8))), [2, 2]),
}


@pytest.mark.parametrize(
    ("prior", "options"),
    [
        *(("two kinds", {"structure": s, "subset": "0.*"}) for s in ("kron", "full", "diag")),
        ("two kinds", {"structure": "kron"}),
        *(("one scale", {"structure": s}) for s in ("kron", "ekfac", "full", "low_rank")),
        *(("a scale for each layer", {"structure": s}) for s in ("kron", "full", "diag")),
        ("one scale", {"structure": "kron", "kind": models.Classification}),
    ],
)
def test_it_is_the_evidence_as_a_run_gives_it(prior, options, put):
    """Its gradient, its fixed point, and how the guide follows, at other hyperparameters than it
    was read at; it takes eigenvalues alone, where the structure has them."""
    make, groups = PRIORS[prior]
    guide = guide_of(make(), **options)
    formula = NormalFormula.of(guide, guide.read())
    if "subset" not in options:
        assert [len(group.locs) for group in formula.groups] == groups
    put(guide, prior=0.6, noise=0.9)
    close, states = torch.testing.assert_close, []
    for follow in (formula.follow, guide.refresh):
        follow()
        states.append((guide.prior_diagonal, guide.prior_slope, guide.noise_factor))
    close(*states, rtol=1e-12, atol=1e-12)
    leaves = [parameter.leaf for parameter in formula.tuned.values()]
    for point in (None, LinearizedModel(guide).optimum()):
        expected, found = Formula(guide, guide.read()).value(point), formula.value(point)
        close(found, expected, rtol=1e-10, atol=1e-10)
        slopes = [torch.autograd.grad(value, leaves) for value in (found, expected)]
        close(*slopes, rtol=1e-9, atol=1e-9)
        plain = Formula(guide, guide.read())
        expected = plain.fixed_point(plain.parts(point))
        assert len(expected) == len(leaves)
        close(formula.fixed_point(formula.parts(point)), expected)


def test_the_gradient_of_a_log_determinant():
    spectra = [torch.rand(5), torch.rand(9)]
    precisions, factor = (torch.rand(shape, requires_grad=True) for shape in (2, ()))
    sums = [(factor * e + p).log().sum() for e, p in zip(spectra, precisions, strict=True)]
    torch.testing.assert_close(log_determinant(spectra, precisions, factor), sum(sums))
    assert torch.autograd.gradcheck(
        lambda d, c: log_determinant(spectra, d, c), (precisions, factor)
    )


@pytest.mark.parametrize("size", [1.0, 1e60, 1e-39, 1e-60])
@pytest.mark.parametrize("count", [0, 5, 8, 21])
def test_sums_of_logarithms(count, size):
    """Also where the products are too large or too small for a number."""
    values = size * (torch.rand(count) + 0.5)
    torch.testing.assert_close(sum_of_logs(values), values.log().sum(), rtol=1e-14, atol=1e-13)


class Shifted(priors.Normal):
    def _value(self, argument, like):
        return super()._value(argument, like) + 0.1


@pytest.mark.parametrize(
    "prior",
    [
        lambda: priors.StudentT(4.0, learned(0.8)),
        lambda: priors.Normal(learned(torch.rand(3, 1) + 0.5)),
        lambda: Shifted(learned(0.5)),
    ],
    ids=["heavy tails", "one scale for each weight", "shifted"],
)
def test_programs_without_a_formula(prior):
    guide = guide_of(priors.ByName({"0.weight": prior(), "*": priors.Normal(1.0)}))
    assert len(guide.read().parameters) == 2
    assert NormalFormula.of(guide, guide.read()) is None
