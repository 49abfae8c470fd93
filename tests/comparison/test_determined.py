"""gamma of P, and its words."""

import warnings

import pytest
import torch
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.comparison.costs import determined
from pyro_bdl.comparison.judge import reasons


def reading(gamma, latents, fitted):
    """What is said of gamma, after that there is nothing to hold the posterior against."""
    row = {"gamma": gamma, "latents": latents, "fitted": fitted}
    return " ".join(reason.words for reason in reasons(row, None, 10)[1:])


@pytest.mark.parametrize(
    ("gamma", "words"),
    [
        (84.0, "the data determine 84 of 85 parameters, nearly all: the network may be too small"),
        (0.4, "the data determine 0.4 of 85 parameters, nearly none: the prior decides"),
        (30.0, ""),
    ],
)
def test_the_reading(gamma, words):
    assert reading(gamma, 85, 40) == words


def test_few_of_many_parameters_may_be_all_that_the_data_can_determine():
    assert reading(20.0, 10_000, 50) == ""


def test_it_is_a_column_of_the_comparison():
    """Linear regression: gamma is the trace of the posterior's share of the curvature."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    x, y = torch.randn(30, 3), torch.randn(30)
    net = bdl.bayesianize(nn.Linear(3, 1), bdl.priors.Normal(10.0))
    model = bdl.models.Regression(net, noise=0.5)
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full").prototype(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bdl.errors.BdlWarning)
        posterior = guide.laplace_approximation((x, y))
    design = torch.cat([x, torch.ones(30, 1)], 1)
    curvature = design.T @ design / 0.25
    gamma = torch.linalg.solve(curvature + 0.01 * torch.eye(4), curvature).trace()
    assert determined(posterior) == {
        "gamma": pytest.approx(float(gamma)),
        "latents": 4,
        "fitted": 30,
    }
    assert determined(guide) == {}
    found = bdl.compare(model, {"laplace": posterior}, x, y, reference=None, num_samples=4)
    assert found.table.loc["laplace", "gamma"] == pytest.approx(float(gamma))
    assert "nearly all: the network may be too small" in found.verdicts["laplace"]
    assert "gamma" in found.to_text()
