"""Hyperparameters as the evidence finds them in a program."""

import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroParam
from torch import nn

from pyro_bdl import bayesianize, evidence, guides, models, priors


@pytest.mark.parametrize("method", ["mackay", "gradient"])
def test_single_precision_hyperparameters_of_a_double_precision_network(method):
    """A PyroParam keeps its own dtype; MacKay's equations hold at the point found."""
    torch.manual_seed(0)
    x = torch.randn(40, 3, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + 0.3 * torch.randn(40)

    def learned(start):
        return PyroParam(torch.tensor(start), constraint=dist.constraints.positive)

    net = nn.Linear(3, 1, bias=False).double()
    model = models.Regression(bayesianize(net, priors.Normal(learned(1.0))), noise=learned(0.3))
    guide = guides.AutoLaplaceGGN(model, structure="full").prototype(x, y)
    for _ in range(20):
        scale, noise = model.network.hyper_prior_scale.detach(), model.noise.detach()
        ridge = torch.eye(3, dtype=torch.float64) * (noise / scale).double() ** 2
        with torch.no_grad():
            guide.loc.copy_(torch.linalg.solve(x.T @ x + ridge, x.T @ y))
        laplace = guide.laplace_approximation((x, y))
        found = evidence.maximize(laplace, method=method)
    scale, noise = model.network.hyper_prior_scale.item(), model.noise.item()
    weights, residuals = guide.loc.square().sum().item(), (y - x @ guide.loc).square().sum().item()
    assert scale**-2 == pytest.approx(found.gamma / weights, rel=0.02)
    assert noise**-2 == pytest.approx((40 - found.gamma) / residuals, rel=0.02)
