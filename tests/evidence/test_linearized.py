"""The linearized model: its likelihood and its optimum."""

import warnings

import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_bdl import bayesianize, evidence, handlers, models, priors
from pyro_bdl.errors import BdlWarning
from pyro_bdl.evidence import linearized_log_likelihood, linearized_optimum
from pyro_bdl.guides import AutoLaplaceGGN
from pyro_bdl.program import Program


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
    found = linearized_log_likelihood(guide, offset)
    torch.testing.assert_close(found, expected)
    first, second = (torch.autograd.grad(v, offset)[0] for v in (found, expected))
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("kind", ["numbers", "classes", "counts"])
def test_the_optimum_has_no_slope(kind, structure):
    """Newton's method increases the density with every precision, and reaches the maximum with full
    ones. Source: Antoran et al. 2022, section 3."""
    guide, _, _ = network(kind, structure)
    zero = torch.zeros(len(guide.loc))

    def value(offset):
        density = linearized_log_likelihood(guide, offset)
        return density + dist.Normal(0.0, 0.8).log_prob(guide.loc + offset).sum()

    offset = linearized_optimum(guide, steps=100, tolerance=1e-14)
    assert value(offset) > value(zero)
    at = offset.clone().requires_grad_()
    (slope,) = torch.autograd.grad(value(at), at)
    limit = 1e-4 if structure in ("full", "low_rank") else 0.3
    assert slope.abs().max() < limit
    assert not offset.requires_grad


@pytest.mark.parametrize("eta", [1.0, 0.3])
def test_it_is_the_mode_of_a_linear_gaussian(line, eta):
    """From anywhere, in one step."""
    model = handlers.temper(line.model, eta)
    guide = line.laplace(model=model, loc=torch.tensor([3.0, -4.0, 5.0, 1.0]))
    found = guide.loc + linearized_optimum(guide, steps=1)
    torch.testing.assert_close(found, line.mode(eta=eta), rtol=1e-10, atol=1e-10)


def test_a_subset_moves_alone(line):
    guide = line.laplace(subset="weight", loc=torch.tensor([3.0, -4.0, 5.0, 1.0]))
    offset = linearized_optimum(guide)
    assert offset.shape == (3,)
    precision = line.precision()[:3, :3]
    right = line.x.T @ (line.y - 1.0) / line.noise**2
    torch.testing.assert_close(guide.loc[:3] + offset, torch.linalg.solve(precision, right))
    rest = line.y - 1.0
    total = line.noise**2 * torch.eye(12) + line.prior**2 * line.x @ line.x.T
    expected = dist.MultivariateNormal(torch.zeros(12), total).log_prob(rest)
    found = evidence.log_marginal_likelihood(guide, offset=offset)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_masks_are_kept():
    torch.manual_seed(5)
    x, y = torch.randn(6, 2), torch.randn(6)
    bnn = bayesianize(nn.Linear(2, 1))
    mask = torch.arange(6) > 2

    class Masked(models.Regression):
        def likelihood(self, output):
            return super().likelihood(output).mask(mask[: len(output)])

    guide = AutoLaplaceGGN(Masked(bnn, noise=0.5), structure="full").prototype(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        guide = guide.laplace_approximation([(x, y)])
    design = torch.cat([x, torch.ones(6, 1)], 1)[3:]
    offset = torch.randn(3)
    expected = dist.Normal(design @ (guide.loc + offset), 0.5).log_prob(y[3:]).sum()
    torch.testing.assert_close(linearized_log_likelihood(guide, offset), expected)


def test_a_recurrent_network_is_linear_too():
    """LSTM layers have no forward derivative in torch: the product with J is by backward ones."""
    torch.manual_seed(5)
    x, y = torch.randn(5, 3, 2), torch.randn(5)

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(2, 2, batch_first=True), nn.Linear(2, 1)

        def forward(self, x):
            return self.head(self.lstm(x)[0][:, -1])

    model = models.Regression(bayesianize(Recurrent()), noise=0.4)
    guide = AutoLaplaceGGN(model, structure="diag").prototype(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        guide = guide.laplace_approximation((x, y))
    offset = 0.1 * torch.randn(len(guide.loc))
    program, size = Program(model, x, y), 1e-6
    ends = [
        program.run(program.constrain(guide.loc + sign * size * offset)[0]).deterministic["f"]
        for sign in (-1.0, 0.0, 1.0)
    ]
    f = ends[1] + (ends[2] - ends[0]) / (2 * size)
    expected = dist.Normal(f, 0.4).log_prob(y).sum()
    found = linearized_log_likelihood(guide, offset)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)


def test_the_former_spelling_is_understood(line):
    assert evidence.linearised_optimum is linearized_optimum
    assert evidence.linearised_log_likelihood is linearized_log_likelihood
    guide = line.laplace()
    with pytest.warns(DeprecationWarning, match="linearized="):
        found = evidence.maximize(guide, steps=1, linearised=True)
    assert found.history
    with pytest.warns(DeprecationWarning, match="linearized="):
        training = evidence.MarginalLikelihoodTraining(guide, line.data, linearised=True)
    assert training.linearized
