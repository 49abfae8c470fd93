"""Outputs as linear functions of the latents: the product with one vector against the factors."""

import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_bdl import bayesianize, models
from pyro_bdl.curvature.at import At
from pyro_bdl.curvature.linear_outputs import observed_outputs
from pyro_bdl.guides import AutoLaplaceGGN
from pyro_bdl.program.subset import select


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 2, batch_first=True), nn.Linear(2, 1)

    def forward(self, x):
        return self.head(self.lstm(x[:, None])[0][:, -1])


def mlp():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


@pytest.mark.parametrize(
    ("make", "chosen"),
    [(mlp, None), (mlp, ["0.weight"]), (mlp, torch.tensor([1, 4, 13])), (Recurrent, None)],
)
def test_a_moved_output_is_the_jacobian_times_the_offset(make, chosen):
    """f(u* + d) = f(u*) + J d (Immer et al. 2021, "GLM predictive"). LSTM layers have no forward
    derivative in torch: the product with J is by backward ones."""
    torch.manual_seed(0)
    x, y = torch.randn(5, 2, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    net = make().double()
    model = models.Regression(bayesianize(net), noise=dist.HalfNormal(1.0))
    guide = AutoLaplaceGGN(model).prototype(x, y)
    subset = select(guide.require_layout(), chosen, model=model)
    (outputs,) = observed_outputs(At(model, subset, guide.loc).linearize((x, y), {})).values()
    offset = torch.randn(subset.size, dtype=torch.float64)
    slopes = outputs.times(offset)
    found = outputs.values | {key: outputs.values[key] + slope for key, slope in slopes.items()}
    change = outputs.jacobian.apply(offset[None])
    expected = outputs.values | {
        key: value[0] for key, value in outputs.split(outputs.mean + change).items()
    }
    torch.testing.assert_close(found, expected)
    ones = torch.zeros_like(outputs.mean)
    ones[:, 0] = 1.0  # the location comes first
    assert outputs.moving[0] == "loc"
    slope = outputs.transposed_times(outputs.split(ones))
    torch.testing.assert_close(slope, torch.einsum("knp,nk->p", outputs.jacobian.rows(), ones))
    site = outputs.observed(found)
    assert site.distribution.batch_shape == (5,)
