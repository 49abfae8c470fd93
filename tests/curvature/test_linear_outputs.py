"""Outputs as linear functions of the latents: the product with one vector against the factors."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from pyro_bdl import bayesianize, models
from pyro_bdl.curvature.at import ProgramAtPoint
from pyro_bdl.curvature.linear_outputs import observed_outputs
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides import AutoLaplaceGGN
from pyro_bdl.program.subset import select

# networks that torch cannot vectorize
pytestmark = pytest.mark.filterwarnings("ignore:.*#one-by-one")

EYE = torch.eye(3, dtype=torch.float64)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 2, batch_first=True), nn.Linear(2, 1)

    def forward(self, x):
        return self.head(self.lstm(x[:, None])[0][:, -1])


def mlp():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


class _Sine(torch.autograd.Function):
    """A function with a backward pass that is not differentiable."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].cos()


class Residual(nn.Module):
    """Networks of which autograd differentiates one path twice, and leaves out another."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(2, 3), nn.Linear(3, 1), function

    def forward(self, x):
        hidden = self.first(x)
        return self.last(hidden + self.function(hidden))


@pytest.mark.parametrize("rows", ["alone", "together"])
@pytest.mark.parametrize("function", [torch.sin, _Sine.apply, lambda h: torch.cdist(h, EYE)])
def test_products_where_there_is_no_second_derivative(function, rows):
    torch.manual_seed(0)
    x, y = torch.randn(5, 2, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    model = models.Regression(bayesianize(Residual(function).double()), noise=dist.HalfNormal(1.0))
    guide = AutoLaplaceGGN(model).prototype(x, y)
    at = ProgramAtPoint(model, select(guide.require_layout()), guide.loc, rows)
    (outputs,) = observed_outputs(at.linearize((x, y), {})).values()
    vectors = torch.randn(4, guide.loc.numel(), dtype=torch.float64)
    several, single = outputs.times(vectors), outputs.times(vectors[1])
    expected = outputs.split(outputs.jacobian.apply(vectors))
    for key, value in expected.items():
        torch.testing.assert_close(several[key], value)
        torch.testing.assert_close(single[key], value[1])


def test_the_hessian_of_a_function_without_a_second_derivative_is_refused():
    x, y = torch.randn(5, 2), torch.randn(5)
    model = models.Regression(bayesianize(Residual(_Sine.apply)), noise=0.5)
    guide = AutoLaplaceGGN(model, structure="full", curvature="hessian")
    with pytest.raises(UnsupportedProgramError, match=r"autograd\.Function of its own"):
        guide.laplace_approximation((x, y))


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
    (outputs,) = observed_outputs(
        ProgramAtPoint(model, subset, guide.loc).linearize((x, y), {})
    ).values()
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
    assert outputs.dependent[0] == "loc"
    slope = outputs.rmatvec(outputs.split(ones))
    torch.testing.assert_close(slope, torch.einsum("knp,nk->p", outputs.jacobian.rows(), ones))
    site = outputs.observed(found)
    assert site.distribution.batch_shape == (5,)


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
def test_logits_with_a_term_that_is_zero_at_the_center_are_no_recorded_output():
    """An adapter beside a recorded network, started at zero, moves the logits."""

    def program(record):
        def model(x, y=None):
            w = pyro.sample("w", dist.Normal(torch.zeros(2, 3).double(), 1.0).to_event(2))
            v = pyro.sample("v", dist.Normal(torch.zeros(2, 3).double(), 1.0).to_event(2))
            f = pyro.deterministic("f", x @ w) if record else x @ w
            with pyro.plate("data", len(x)):
                return pyro.sample("y", dist.Categorical(logits=f + x.square() @ v), obs=y)

        return model

    x, y = torch.randn(8, 2, dtype=torch.float64), torch.arange(8) % 3
    found = []
    for record in (False, True):
        guide = AutoLaplaceGGN(program(record), structure="full").prototype(x, y)
        guide.loc.data = torch.cat([torch.linspace(-1, 1, 6), torch.zeros(6)]).double()
        posterior = guide.laplace_approximation((x, y))
        (at,) = posterior.at().linearizations([((x, y), {})])
        outputs = observed_outputs(at)["y"].gaussian(posterior.precision)
        found.append((outputs.mean, outputs.covariance))
    torch.testing.assert_close(found[1], found[0])
