"""The prior's precision is minus the Hessian of its log density in the unconstrained vector."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroParam
from torch import nn
from torch.distributions import constraints

from pyro_bdl import bayesianize, handlers, models, priors
from pyro_bdl.curvature.prior import PriorPrecision, prior_precision, run_at
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides import AutoLaplaceGGN
from pyro_bdl.nn import with_prior
from pyro_bdl.program import Program
from pyro_bdl.program.subset import Subset

pytestmark = pytest.mark.filterwarnings("ignore:.*#log-prior")  # no curvature of a prior


def network(prior, noise=1.0):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    model = models.Regression(bayesianize(net, prior), noise=noise)
    return model, torch.randn(5, 3), torch.randn(5)


def found(model, program, vector, args, indices=None, **options):
    subset = Subset(program.layout, indices)
    run, leaves = run_at(model, subset, vector, args, {})
    return prior_precision(run, leaves, subset, **options)


def hessian(program, vector):
    def density(u):
        values, log_det = program.constrain(u)
        return program.log_prior(values) + log_det

    return -torch.autograd.functional.hessian(density, vector)


def check(oracle, model, *args, exact=True):
    """The matrix, whole and for some entries; warnings are errors."""
    program, vector = oracle.program(model, *args)
    expected = hessian(program, vector)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BdlWarning)
        precision = found(model, program, vector, args)
        some = torch.arange(0, program.size, 2)
        part = found(model, program, vector, args, some)
    size = program.size
    torch.testing.assert_close(precision.diagonal, expected.diagonal())
    torch.testing.assert_close(precision.added_to(torch.eye(size)), torch.eye(size) + expected)
    half = len(some)
    torch.testing.assert_close(
        part.added_to(torch.eye(half)), torch.eye(half) + expected[some][:, some]
    )
    return precision, expected


HALF = dist.HalfNormal(1.0)
NETWORKS = {  # the priors of a network's weights, and whether they couple these
    "Normal": (priors.Normal(0.7), False),
    "FanIn": (priors.FanIn(1.3), False),
    "ByName": (priors.ByName({"*.weight": priors.FanIn(2.0), "*": priors.Normal(0.5)}), False),
    "learned": (priors.Normal(PyroParam(torch.tensor(0.6), constraints.positive)), False),
    "HalfNormal": (priors.Normal(HALF), True),
    "LogNormal": (priors.FanIn(dist.LogNormal(0.0, 1.0)), True),
    "PerLayer": (priors.PerLayer(priors.Normal(HALF)), True),
    "Horseshoe": (priors.Horseshoe(0.5), True),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_priors_of_networks(oracle, name):
    """Minus the Hessian of log Normal(w; m, s^2) is 1 / s^2; a scale with a prior is coupled to
    every weight."""
    prior, couples = NETWORKS[name]
    model, x, y = network(prior)
    precision, expected = check(oracle, model, x, y)
    assert (precision.dense is not None) == couples
    assert ((expected - torch.diag(expected.diagonal())).abs().max() > 0.01) == couples


TRIL = torch.tensor([[1.0, 0.0], [0.8, 0.5]], dtype=torch.float64)


def hierarchy():
    s = pyro.sample("s", dist.HalfNormal(2.0))
    return pyro.sample("w", dist.Normal(torch.zeros(2), s).to_event(1))


def constrained():
    """Minus the second derivative in u of log p(T(u)) + log |dT/du|."""
    pyro.sample("a", dist.HalfNormal(2.0))
    pyro.sample("b", dist.LogNormal(0.3, 0.5))
    pyro.sample("c", dist.Beta(2.0, 3.0))
    pyro.sample("d", dist.Gamma(2.0, 3.0))
    pyro.sample("e", dist.Dirichlet(torch.tensor([2.0, 3.0, 1.5])))


def random_walk():
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    pyro.sample("b", dist.Normal(a, 0.5))


STATEMENTS = {  # latents of a program, and the prior precision by hand
    "hierarchy": (hierarchy, None),
    "constrained": (constrained, None),
    "uniform": (lambda: pyro.sample("c", dist.Uniform(-1.0, 3.0)), None),
    "correlated": (
        lambda: pyro.sample("w", dist.MultivariateNormal(torch.zeros(2), scale_tril=TRIL)),
        torch.linalg.inv(TRIL @ TRIL.T),
    ),
    "random walk": (random_walk, torch.tensor([[5.0, -4.0], [-4.0, 4.0]])),
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_priors_of_latents(oracle, name):
    latents, by_hand = STATEMENTS[name]

    def model(y):
        latents()
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=y)

    precision, expected = check(oracle, model, torch.tensor(0.0))
    assert precision.diagonal.any()
    if by_hand is not None:
        torch.testing.assert_close(expected, by_hand.to(expected))


def test_laplace_has_no_curvature_of_its_own(oracle):
    model, x, y = network(priors.Laplace(0.7))
    program, vector = oracle.program(model, x, y)
    with pytest.warns(BdlWarning, match=r"'0.weight' is not concave.*12 of 12.*1 / variance"):
        precision = found(model, program, vector, (x, y))
    torch.testing.assert_close(precision.diagonal, torch.full((21,), 1 / (2 * 0.49)))


def test_a_density_of_ones_own_is_no_normal_by_its_name(oracle):
    """Twice the log density of a Normal: twice its precision."""

    class Normal(dist.Normal):
        def log_prob(self, value):
            return 2.0 * super().log_prob(value)

    def model(y):
        w = pyro.sample("w", Normal(torch.zeros(3), 0.5).to_event(1))
        pyro.sample("y", Normal(w.sum(), 1.0), obs=y)

    precision, _ = check(oracle, model, torch.tensor(0.0))
    torch.testing.assert_close(precision.diagonal, torch.full((3,), 2.0 / 0.25))
    assert not precision.uniform and not precision.quadratic


def test_student_t_is_concave_near_its_center_only(oracle):
    model, x, y = network(priors.StudentT(4.0, 0.5))
    program, vector = oracle.program(model, x, y)
    vector = 0.1 * torch.randn(program.size)
    expected = hessian(program, vector).diagonal()
    precision = found(model, program, vector, (x, y))
    torch.testing.assert_close(precision.diagonal, expected)
    vector[3] = 2.0
    with pytest.warns(BdlWarning, match="1 of 12 entries"):
        precision = found(model, program, vector, (x, y))
    expected = hessian(program, vector).diagonal()
    assert expected[3] < 0
    expected[3] = 1 / (2 * 0.25)
    torch.testing.assert_close(precision.diagonal, expected)
    added = precision.added_to(torch.zeros(21, 21))
    torch.testing.assert_close(added, torch.diag(expected))


FLAT = {
    "masked": lambda: dist.Normal(0.0, 1.0).expand([2]).to_event(1).mask(False),
    "masked inside": lambda: dist.Normal(0.0, 1.0).mask(False).expand([2]).to_event(1),
    "Laplace": lambda: dist.Laplace(0.0, 1.0).expand([2]).to_event(1).mask(False),
    "improper": lambda: dist.ImproperUniform(constraints.real, (), (2,)),
    "improper batch": lambda: dist.ImproperUniform(constraints.real, (2,), ()).to_event(1),
    "positive": lambda: dist.HalfNormal(1.0).expand([2]).to_event(1).mask(False),
    "simplex": lambda: dist.ImproperUniform(constraints.simplex, (), (3,)),
    "one entry": lambda: dist.Normal(0.0, 1.0).mask(torch.tensor([True, False])).to_event(1),
    "one row": lambda: (
        dist.Normal(0.0, 1.0).expand([2, 2]).to_event(1).mask(torch.tensor([True, False]))
    ),
}


@pytest.mark.parametrize("kind", FLAT)
def test_flat_priors_have_no_precision(oracle, kind):
    """Only the log-determinant of a support that is not all of R^n has a curvature."""

    def model(y):
        w = pyro.sample("w", FLAT[kind]())
        pyro.sample("y", dist.Normal(w.sum(), 1.0), obs=y)

    precision, _ = check(oracle, model, torch.tensor(0.0))
    if kind not in ("simplex", "one entry", "one row"):
        assert not precision.diagonal.any()


def test_no_curvature_and_no_variance(oracle):
    def model(y):
        w = pyro.sample("w", dist.Cauchy(0.0, 0.1).expand([2]).to_event(1))
        pyro.sample("y", dist.Normal(w.sum(), 1.0), obs=y)

    y = torch.tensor(0.0)
    program = oracle.program(
        lambda y: pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1)), y
    )[0]
    vector = torch.tensor([2.0, 3.0])
    with pytest.raises(
        ValueError, match=r"'w' has no positive curvature.*2 of its entries.*Normal"
    ):
        found(model, program, vector, (y,))


def test_tempering_leaves_the_prior_and_cooling_does_not(oracle):
    model, x, y = network(priors.Normal(0.5))
    program, vector = oracle.program(model, x, y)
    tempered, cold = handlers.temper(model, 0.1), handlers.cold(model, 0.1)
    for handled, factor in ((tempered, 1.0), (cold, 10.0)):
        precision = found(handled, program, vector, (x, y))
        torch.testing.assert_close(precision.diagonal, torch.full((21,), 4.0 * factor))
    hierarchical, x, y = network(priors.Normal(dist.HalfNormal(1.0)))
    check(oracle, handlers.temper(hierarchical, 0.1), x, y)


@pytest.mark.filterwarnings("ignore:.*#large-priors")
def test_too_many_numbers_for_a_matrix(oracle):
    """The diagonal alone, exact also where a prior couples the entries of one site."""
    tril = torch.tensor([[1.0, 0.0], [0.8, 0.5]])

    def model(y):
        s = pyro.sample("s", dist.HalfNormal(1.0))
        v = pyro.sample("v", dist.Normal(torch.zeros(3), s).to_event(1))
        w = pyro.sample("w", dist.MultivariateNormal(torch.zeros(2), scale_tril=tril))
        pyro.sample("y", dist.Normal(w.sum() + v.sum(), 1.0), obs=y)

    y = torch.tensor(0.0)
    program, vector = oracle.program(model, y)
    precision = found(model, program, vector, (y,), dense_up_to=1)
    assert precision.dense is None
    torch.testing.assert_close(precision.diagonal, hessian(program, vector).diagonal())
    some = torch.tensor([0, 2, 5])
    part = found(model, program, vector, (y,), some, dense_up_to=1)
    torch.testing.assert_close(part.diagonal, precision.diagonal[some])


@pytest.mark.filterwarnings("ignore:.*#large-priors")
@pytest.mark.parametrize("first", range(4))
def test_pairs_that_a_prior_couples_have_their_own_diagonal(oracle, first):
    """Whatever the places of the pair in the site, of which the diagonal alone is wanted."""
    covariance = torch.eye(5)
    covariance[first, first + 1] = covariance[first + 1, first] = 0.8

    def model(y):
        w = pyro.sample("w", dist.MultivariateNormal(torch.zeros(5), covariance))
        pyro.sample("y", dist.Normal(w.sum(), 1.0), obs=y)

    program, vector = oracle.program(model, torch.tensor(0.0))
    precision = found(model, program, vector, (torch.tensor(0.0),), dense_up_to=1)
    torch.testing.assert_close(precision.diagonal, torch.linalg.inv(covariance).diagonal())


def test_a_prior_that_depends_on_an_earlier_posterior(oracle):
    """The Gaussian of the earlier data and the other site's density count once each."""

    def first(y):
        return pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))

    def model(y):
        w = first(y)
        v = pyro.sample("v", dist.Normal(w.sum(), 0.5))
        pyro.sample("y", dist.Normal(w.sum() + v, 1.0), obs=y)

    def earlier(y):
        pyro.sample("y", dist.Normal(first(y) @ torch.tensor([1.0, 2.0]), 0.7), obs=y)

    y = torch.tensor(0.0)
    guide = AutoLaplaceGGN(earlier, structure="full").prototype(y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)  # not at a maximum
        under = with_prior(model, guide.laplace_approximation((y,)))
    check(oracle, under, y)


@pytest.mark.parametrize("hierarchical", [False, True])
def test_gradients_in_hyperparameters(oracle, hierarchical):
    scale = torch.tensor(0.6, requires_grad=True)

    def model(y):
        t = pyro.sample("t", dist.HalfNormal(scale)) if hierarchical else 1.0
        w = pyro.sample("w", dist.Normal(torch.zeros(2), scale * t).to_event(1))
        pyro.sample("y", dist.Normal(w.sum(), 1.0), obs=y)

    y = torch.tensor(0.0)
    program, vector = oracle.program(model, y)

    def total():
        precision = found(model, program, vector, (y,), create_graph=True)
        return precision.added_to(torch.eye(program.size)).logdet()

    (gradient,) = torch.autograd.grad(total(), scale)
    step = 1e-5
    values = []
    for sign in (1, -1):
        scale.data += sign * step
        values.append(float(total().detach()))
        scale.data -= sign * step
    assert gradient.item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-6)


def test_half_precision_is_worked_on_in_single(oracle):
    torch.set_default_dtype(torch.bfloat16)
    model, x, y = network(priors.Normal(HALF))
    program, vector = oracle.program(model, x, y)
    precision = found(model, program, vector, (x, y))
    assert precision.diagonal.dtype == precision.dense.dtype == torch.float32


def test_what_couples_numbers_is_found_without_a_matrix_over_all_of_them():
    """A million numbers and their scale: (10^6)^2 entries would not fit."""
    numbers, count = torch.full((1_000_001,), 0.5), 1_000_000
    alone = PriorPrecision(numbers, torch.tensor([count]), torch.ones(1, 1))
    assert not alone.couples(slice(0, count)) and not alone.couples(slice(0, count + 1))
    dense = torch.tensor([[0.5, 0.1], [0.1, 1.0]])
    pair = PriorPrecision(numbers, torch.tensor([7, count]), dense)
    assert pair.couples(slice(0, count + 1)) and not pair.couples(slice(0, count))
    assert pair.couples(torch.tensor([count, 7])) and not PriorPrecision(numbers).couples(slice(9))
    torch.testing.assert_close(pair.within(torch.tensor([count, 7])), dense.flip(0, 1))


def test_sites_of_one_precision(oracle):
    """A number that is expanded, as a parameter may be; not equal numbers side by side."""
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    rows = torch.ones(3, 1, requires_grad=True)
    one = torch.tensor(2.0, requires_grad=True)

    def prior(name, module, parameter):
        scale = rows if name == "0.weight" else one
        normal = dist.Normal(torch.zeros(()), scale).expand(parameter.shape)
        return normal.to_event(parameter.dim())

    model = models.Regression(bayesianize(net, prior), noise=1.0)
    x = torch.randn(4, 2)
    program, vector = oracle.program(model, x, torch.randn(4))
    subset = Subset(program.layout)
    found = prior_precision(*run_at(model, subset, vector, (x,), {}), subset, create_graph=True)
    assert set(found.uniform) == {"0.bias", "1.weight", "1.bias"}
    assert [value.item() for value in found.uniform.values()] == [0.25] * 3
    expected = [torch.ones(6), torch.full((7,), 0.25)]
    torch.testing.assert_close(found.diagonal, torch.cat(expected))
    found.diagonal.sum().backward()
    torch.testing.assert_close(one.grad, torch.tensor(7 * -2 / 2.0**3))
    torch.testing.assert_close(rows.grad, torch.full((3, 1), -4.0))


@pytest.mark.filterwarnings("ignore:.*#large-priors")
def test_a_large_joint_prior_is_no_known_quadratic():
    """Its diagonal alone is at hand, so that its density off u* has to come from the program."""
    model, x, y = network(priors.Normal(1.0))
    guide = AutoLaplaceGGN(model, structure="kron").prototype(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)  # not at a maximum
        model.update_prior(guide.laplace_approximation((x, y)))
    program = Program(model, x, y)
    vector = program.unconstrain(program.initial)
    assert found(model, program, vector, (x, y)).quadratic
    large = found(model, program, vector, (x, y), dense_up_to=1)
    assert large.dense is None and not large.quadratic
