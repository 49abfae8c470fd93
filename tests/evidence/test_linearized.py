"""The linearized model: its likelihood and its optimum."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_bdl import bayesianize, evidence, handlers, models, priors, working_memory
from pyro_bdl.errors import BdlWarning
from pyro_bdl.evidence import linearized as module
from pyro_bdl.evidence.linearized import LinearizedModel
from pyro_bdl.guides import AutoLaplaceGGN
from pyro_bdl.program import Program


def optimum(guide, **options):
    """u - u* at the optimum."""
    return LinearizedModel(guide).optimum(**options).offset


def log_likelihood(guide, offset):
    return LinearizedModel(guide).point(offset).log_likelihood


def slope(guide, offset):
    """The gradient of log likelihood and prior."""
    return LinearizedModel(guide)._value_and_gradient(offset)[1]


def network(kind, structure="full", batches=None):
    """A guide away from its mode, its program and its data."""
    torch.manual_seed(5)
    x = torch.randn(10, 2)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3 if kind == "classes" else 1))
    bnn = bayesianize(net, priors.Normal(0.8))
    if kind == "classes":
        model, y = models.Classification(bnn), torch.arange(10) % 3
    elif kind == "counts":
        model, y = models.PoissonRegression(bnn), torch.arange(10) % 4
    else:
        model, y = models.Regression(bnn, noise=0.4), torch.randn(10)
    guide = AutoLaplaceGGN(model, structure=structure).prototype(x, y)
    with torch.no_grad():
        guide.loc += 0.1 * torch.randn(len(guide.loc))
    data = (x, y) if batches is None else [(x[:3], y[:3]), (x[3:], y[3:])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        return guide.laplace_approximation(data), Program(model, x, y), y


@pytest.mark.parametrize("batches", [None, "two"])
@pytest.mark.parametrize("kind", ["numbers", "classes", "counts"])
def test_the_likelihood_by_autograd(kind, batches):
    """log p(y | f(u*) + J (u - u*)) (Antoran et al. 2022, section 3)."""
    guide, program, y = network(kind, batches=batches)

    def outputs(u):
        return program.run(program.constrain(u)[0]).deterministic["f"]

    start, slopes = outputs(guide.loc), torch.autograd.functional.jacobian(outputs, guide.loc)
    offset = (0.3 * torch.randn(len(guide.loc))).requires_grad_()
    f = start + slopes @ offset
    if kind == "classes":
        expected = dist.Categorical(logits=f).log_prob(y).sum()
    elif kind == "counts":
        expected = dist.Poisson(f.exp()).log_prob(y).sum()
    else:
        expected = dist.Normal(f, 0.4).log_prob(y).sum()
    torch.testing.assert_close(log_likelihood(guide, offset.detach()), expected.detach())
    prior = dist.Normal(0.0, 0.8).log_prob(guide.loc + offset).sum()
    (expected,) = torch.autograd.grad(expected + prior, offset)
    torch.testing.assert_close(slope(guide, offset.detach()), expected)


@pytest.mark.parametrize("kind", ["numbers", "classes", "counts"])
def test_the_optimum_has_no_slope(kind, structure):
    """Newton's method gets to the top with any of the precisions as preconditioner."""
    guide, _, _ = network(kind, structure)
    offset = optimum(guide, steps=100, tolerance=1e-14)
    assert slope(guide, torch.zeros_like(offset)).abs().max() > 0.1
    assert slope(guide, offset).abs().max() < 1e-4
    assert not offset.requires_grad


@pytest.mark.parametrize("eta", [1.0, 0.3])
def test_it_is_the_mode_of_a_linear_gaussian(line, eta):
    """From anywhere, in one step."""
    model = handlers.temper(line.model, eta)
    guide = line.laplace(model=model, loc=torch.tensor([3.0, -4.0, 5.0, 1.0]))
    found = guide.loc + optimum(guide, steps=1)
    torch.testing.assert_close(found, line.mode(eta=eta), rtol=1e-10, atol=1e-10)


def test_a_subset_moves_alone(line):
    guide = line.laplace(subset="weight", loc=torch.tensor([3.0, -4.0, 5.0, 1.0]))
    offset = optimum(guide)
    assert offset.shape == (3,)
    precision = line.precision()[:3, :3]
    right = line.x.T @ (line.y - 1.0) / line.noise**2
    torch.testing.assert_close(guide.loc[:3] + offset, torch.linalg.solve(precision, right))
    rest = line.y - 1.0
    total = line.noise**2 * torch.eye(12) + line.prior**2 * line.x @ line.x.T
    expected = dist.MultivariateNormal(torch.zeros(12), total).log_prob(rest)
    found = evidence.log_marginal_likelihood(guide, linearized=True)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_masks_are_kept():
    torch.manual_seed(5)
    x, y = torch.randn(6, 2), torch.randn(6)
    bnn = bayesianize(nn.Linear(2, 1))
    mask = torch.arange(6) > 2

    class Masked(models.Regression):
        def likelihood(self, output):
            return super().likelihood(output).mask(mask[: len(output)])

    options = {"structure": "full", "rows": "together"}  # a row alone has the first row's mask
    guide = AutoLaplaceGGN(Masked(bnn, noise=0.5), **options).prototype(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        guide = guide.laplace_approximation([(x, y)])
    design = torch.cat([x, torch.ones(6, 1)], 1)[3:]
    offset = torch.randn(3)
    expected = dist.Normal(design @ (guide.loc + offset), 0.5).log_prob(y[3:]).sum()
    torch.testing.assert_close(log_likelihood(guide, offset), expected)


# One optimum, whatever the curvature's structure


@pytest.fixture(scope="module")
def two_classes():
    """A guide of a classifier whose training stopped early, and its data."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    x = torch.randn(80, 2)
    y = (x[:, 0] * x[:, 1] + 0.5 * torch.randn(80) > 0).long()
    net = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 2))
    model = models.Classification(bayesianize(net, priors.Normal(1.0)))
    return AutoLaplaceGGN(model).prototype(x, y), (x, y)


def objective(guide, offset):
    prior = dist.Normal(0.0, 1.0).log_prob(guide.loc + offset).sum()
    return float(log_likelihood(guide, offset) + prior)


def approximation(source, data, structure):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        return source.laplace_approximation(data, structure=structure)


def test_a_gap_that_is_left_is_named(two_classes, monkeypatch):
    monkeypatch.setattr(module, "_DENSE_UP_TO", 0)  # the guide's precision preconditions
    guide = approximation(*two_classes, "diag")
    best = objective(guide, optimum(guide))
    with pytest.warns(BdlWarning, match="was not reached in 1 Newton steps") as caught:
        point = LinearizedModel(guide).optimum(steps=1, products=2)
        point.warn()
    said = float(str(caught[0].message).partition("is about ")[2].split()[0])
    missed = best - objective(guide, point.offset)
    assert missed > 0.1 and said == pytest.approx(missed, rel=0.9)


def test_products_are_those_of_the_gauss_newton_matrix(monkeypatch):
    """They are the same from rows of the Jacobian, from graphs, and from runs of the program."""
    guide, _, _ = network("numbers", "full", "two")
    vector, zero = torch.randn(len(guide.loc)), torch.zeros(len(guide.loc))
    found = LinearizedModel(guide)._times(zero, vector)
    torch.testing.assert_close(found, guide.curvature.matrix @ vector)
    monkeypatch.setattr(module, "SHARE_OF_MEMORY", 0.0)
    for limit in (2**30, 1):
        model = LinearizedModel(guide)
        with working_memory(limit):
            found = model._times(zero, vector)
        assert model._data.keeps_all == (limit > 1)
        torch.testing.assert_close(found, guide.curvature.matrix @ vector)


class Counted:
    """A loader that counts the rows that are read of it."""

    def __init__(self, x, y, size):
        self.batches, self.rows = list(zip(x.split(size), y.split(size), strict=True)), 0

    def __iter__(self):
        for x, y in self.batches:
            self.rows += len(x)
            yield x, y


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_a_loader_is_read_once_and_gives_the_evidence_of_a_tensor(structure):
    torch.manual_seed(2)
    x = torch.randn(60, 4)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
    loader, found = Counted(x, y, 10), []
    for data in (loader, (x, y)):
        prior = priors.learnable(priors.Normal(1.0))
        model = models.Classification(bayesianize(net, prior), num_data=60)
        guide = AutoLaplaceGGN(model, structure=structure)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BdlWarning)
            posterior = guide.laplace_approximation(data)
        loader.rows = 0
        found.append(evidence.maximize(posterior))
        if data is loader:
            assert loader.rows == 60  # one pass; its first batch was stored by the fit
    assert found[0].log_evidence == pytest.approx(found[1].log_evidence, rel=1e-6)
    assert found[0].gamma == pytest.approx(found[1].gamma, rel=1e-5)


def test_batches_whose_rows_depend_on_each_other_are_not_joined():
    """A Gaussian process for every batch of ten rows."""
    torch.manual_seed(1)
    x = torch.randn(20)

    def model(x, y=None):
        loc = pyro.sample("loc", dist.Normal(torch.zeros(1), 1.0).to_event(1))
        covariance = torch.exp(-0.5 * (x[:, None] - x).square()) + torch.eye(len(x))
        with pyro.plate("batches", 1):
            mean = loc.expand(1, len(x))
            pyro.sample("y", dist.MultivariateNormal(mean, covariance), obs=y)

    y = torch.randn(1, 20)
    batches = [(x[:10], y[:, :10]), (x[10:], y[:, 10:])]
    guide = AutoLaplaceGGN(model, structure="full").prototype(*batches[0])
    guide.loc.data.fill_(0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        posterior = guide.laplace_approximation(batches)
    found = LinearizedModel(posterior).optimum().offset
    blocks = [torch.exp(-0.5 * (b[:, None] - b).square()) + torch.eye(10) for b, _ in batches]
    ones = torch.ones(10)
    weights = [torch.linalg.solve(block, ones) for block in blocks]
    precision = 1.0 + sum(w.sum() for w in weights)
    mean = sum(w @ values[0] for w, (_, values) in zip(weights, batches, strict=True)) / precision
    torch.testing.assert_close(posterior.loc + found, mean[None])


def test_factors_count_to_first_order():
    """A penalty on the weights that has a slope at u*: the optimum of value plus slope."""
    torch.manual_seed(5)
    x, y = torch.randn(6, 2), torch.randn(6)

    def model(x, y=None):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(3), 0.8).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ weight[:2] + weight[2], 0.5), obs=y)
        pyro.factor("penalty", -weight[:2].abs().sum() - weight[:2].square().sum())

    guide = AutoLaplaceGGN(model, structure="full").prototype(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        guide.loc.data.copy_(torch.tensor([0.5, -0.3, 0.2]))
        guide = guide.laplace_approximation([(x[:4], y[:4]), (x[4:], y[4:])])
    u = guide.loc.clone()
    slope = torch.cat([-u[:2].sign() - 2 * u[:2], torch.zeros(1)])
    design = torch.cat([x, torch.ones(6, 1)], 1)
    precision = design.T @ design / 0.25 + torch.eye(3) / 0.64
    expected = torch.linalg.solve(precision, design.T @ y / 0.25 + slope)
    torch.testing.assert_close(u + optimum(guide), expected)
    offset = torch.randn(3)
    found = log_likelihood(guide, offset)
    value = dist.Normal(design @ (u + offset), 0.5).log_prob(y).sum()
    value = value - u[:2].abs().sum() - u[:2].square().sum() + slope @ offset
    torch.testing.assert_close(found, value)


def test_a_noise_that_changes_where_the_data_are_read_again(make_line):
    """The fixed point is the same whether or not the graphs of the data fit in memory."""
    found = []
    for limit in (2**30, 1):
        with working_memory(limit):
            result = evidence.maximize(make_line(size=6).laplace(), steps=2)
        found.append([result.log_evidence, *map(float, result.hyperparameters.values())])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
