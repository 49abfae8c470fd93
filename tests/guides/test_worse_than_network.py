"""Posteriors that predict their own training rows worse than the network does."""

import re
import warnings

import pytest
import torch
from helpers.conjugate import Conjugate
from torch import nn

from pyro_bdl import LinearizedPredictive, bayesianize, models, priors
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides import AutoLaplaceGGN

D = torch.float64
WORDS = "of its own training rows worse than the network alone"


def classes(count=120):
    """Four classes in the plane, which a network without weight decay learns with certainty."""
    torch.manual_seed(0)
    y = torch.arange(count) % 4
    centers = torch.tensor([[2.0, 2.0], [2.0, -2.0], [-2.0, 2.0], [-2.0, -2.0]], dtype=D)
    x = centers[y] + 0.5 * torch.randn(count, 2, dtype=D)
    network = nn.Sequential(
        nn.Linear(2, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 4)
    )
    network = network.to(D)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    return network, x, y


def told(make):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BdlWarning)
        posterior = make()
    return posterior, [str(w.message) for w in caught]


def test_a_network_without_weight_decay_under_a_wide_prior():
    """Both numbers are the log densities of the first 64 rows; it stands for the sentence on the
    maximum, is said once, and not where held-out rows choose the width."""
    network, x, y = classes()
    model = models.Classification(bayesianize(network, priors.Normal(1.0)), num_data=len(x))
    guide = AutoLaplaceGGN(model, structure="kron")
    posterior, words = told(lambda: guide.laplace_approximation((x, y)))
    (said,) = words
    assert WORDS in said and "held_out=(x, y)" in said and "maximum" not in said
    rows = slice(64)
    before = network(x[rows]).log_softmax(1).gather(1, y[rows, None])[:, 0]
    p = LinearizedPredictive(model, posterior).probabilities(x[rows])["y"]
    after = p.gather(1, y[rows, None]).log()[:, 0]
    numbers = re.search(r"is (\S+) nats each instead of (\S+) \(difference (\S+) ± (\S+)\)", said)
    found = [float(number) for number in numbers.groups()]
    change = (after - before).mean().item()
    error = ((after - before).std() / 8).item()
    exact = [after.mean().item(), before.mean().item(), change, error]
    assert found == pytest.approx(exact, rel=0.2)
    assert change < -2 * error - 0.01
    assert told(lambda: guide.laplace_approximation((x, y)))[1] == []
    fresh = AutoLaplaceGGN(model, structure="kron")
    assert told(lambda: fresh.laplace_approximation((x, y), held_out=(x, y)))[1] == []


def test_a_narrow_prior_is_not_told_of():
    network, x, y = classes()
    for scale in (0.01, 0.1):  # at .1 the loss is above two errors, and below .01 nats
        model = models.Classification(bayesianize(network, priors.Normal(scale)), num_data=len(x))
        guide = AutoLaplaceGGN(model, structure="kron")
        words = told(lambda: guide.laplace_approximation((x, y)))[1]  # noqa: B023
        assert not any(WORDS in each for each in words)


def test_a_posterior_wider_than_its_own_rows_allow_is_told_of():
    """A diagonal posterior of many correlated weights has leverages above 1, which no right one
    has, and predicts new rows worse, though the effective number of its parameters is larger than
    that of the data."""
    torch.manual_seed(0)
    x, directions = torch.randn(100, 4, dtype=D), torch.randn(4, 200, dtype=D)
    y = x[:, 0] + 0.3 * torch.randn(100, dtype=D)
    network = nn.Linear(200, 1, bias=False, dtype=D)
    features = x @ directions
    network.weight.data.copy_(Conjugate(features, y, 0.3).mean)
    model = models.Regression(bayesianize(network, priors.Normal(1.0)), noise=0.3)
    said = {}
    for structure in ("full", "diag"):
        guide = AutoLaplaceGGN(model, structure=structure)
        posterior, words = told(lambda: guide.laplace_approximation((features, y)))  # noqa: B023
        said[structure] = [WORDS in each for each in words]
    assert said == {"full": [], "diag": [True]}
    assert posterior.effective_parameters() > 100


@pytest.mark.parametrize("structure", ["full", "kron", "samples"])
def test_the_posterior_of_a_logistic_regression_is_not_told_of(structure):
    """Of 12 programs whose weights come from their prior."""
    for seed in range(12):
        torch.manual_seed(seed)
        x, weight = torch.randn(100, 5, dtype=D), torch.randn(5, dtype=D)
        y = torch.bernoulli(torch.sigmoid(x @ weight))
        mode = torch.zeros(5, dtype=D)
        for _ in range(20):  # Newton's method
            p = torch.sigmoid(x @ mode)
            hessian = (x.mT * p * (1 - p)) @ x + torch.eye(5, dtype=D)
            mode = mode + torch.linalg.solve(hessian, x.mT @ (y - p) - mode)
        network = nn.Linear(5, 1, bias=False, dtype=D)
        network.weight.data.copy_(mode)
        model = models.BinaryClassification(bayesianize(network, priors.Normal(1.0)))
        guide = AutoLaplaceGGN(model, structure=structure)
        assert told(lambda: guide.laplace_approximation((x, y)))[1] == []  # noqa: B023


@pytest.mark.parametrize("structure", ["full", "kernel", "diag", "kron", "low_rank", "samples"])
@pytest.mark.parametrize("size", [2, 10, 25])
def test_the_exact_posterior_is_never_told_of(size, structure):
    """Linear regression with 30 rows and up to 25 weights: the mean fits its own rows better than
    the predictive does, by up to 3 / 4 h^2 nats at leverage h."""
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(30, size, dtype=D)
        y = x @ torch.randn(size, dtype=D) + torch.randn(30, dtype=D)
        network = nn.Linear(size, 1, bias=False, dtype=D)
        precision = x.T @ x + torch.eye(size, dtype=D)
        network.weight.data.copy_(torch.linalg.solve(precision, x.T @ y))
        model = models.Regression(bayesianize(network, priors.Normal(1.0)), noise=1.0)
        guide = AutoLaplaceGGN(model, structure=structure)
        assert told(lambda: guide.laplace_approximation((x, y)))[1] == []  # noqa: B023
