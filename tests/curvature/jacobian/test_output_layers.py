"""The last layer's closed forms are what its columns add up to, one by one."""

import pytest
import torch
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.curvature import LowRank
from pyro_bdl.curvature.jacobian.jacobian import IdentityBlock, SoftmaxBlock
from pyro_bdl.curvature.jacobian.linearization import VJP


def case(bias: bool = True):
    torch.manual_seed(0)
    last = nn.Linear(4, 5, bias=bias, dtype=torch.float64)
    net = nn.Sequential(nn.Linear(3, 4, dtype=torch.float64), nn.Tanh(), last)
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.randint(5, (7,))
    model = bdl.models.Classification(bdl.bayesianize(net))
    guide = bdl.guides.AutoLaplaceGGN(model, subset="last-layer").prototype(x, y)
    return model, guide, x, y


def results(model, guide, x, y, structure):
    posterior = guide.laplace_approximation(
        (x, y), structure=LowRank(8) if structure == "low_rank" else structure
    )
    predictive = bdl.LinearizedPredictive(model, posterior)
    return [
        posterior.curvature.diagonal(),
        posterior.precision.logdet(),
        predictive.parameter_moments(x)["y"].variance["logits"],
        predictive.parameter_covariance(x)["y"][1],
        predictive.joint_parameter_covariance(x)["y"][1],
    ]


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
@pytest.mark.parametrize("bias", [True, False])
def test_the_closed_forms_are_the_sums_over_columns(structure, bias, monkeypatch):
    """diag(p) - p p' is the Fisher information of the logits of classes."""
    made = case(bias)
    known = results(*made, structure)
    monkeypatch.setattr(VJP, "_output_layer", lambda self, **options: [])
    for mine, expected in zip(known, results(*made, structure), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
@pytest.mark.parametrize("structure", ["kron", "full"])
@pytest.mark.parametrize(
    ("method", "kind"), [("softmax", SoftmaxBlock), ("identity", IdentityBlock)]
)
def test_a_last_layer_takes_them(method, kind, structure, monkeypatch):
    model, guide, x, y = case()
    seen = []
    whole = getattr(VJP, method)

    def spy(self, *args):
        result = whole(self, *args)
        seen.extend(type(block) for block in result.blocks)
        return result

    monkeypatch.setattr(VJP, method, spy)
    results(model, guide, x, y, structure)
    assert set(seen) == {kind}


HEADS = {
    "multiple": lambda z: 2.0 * z,
    "almost the output": lambda z: 1.0001 * z,
    "another order": lambda z: z.flip(-1),
    "sorted": lambda z: z.sort(-1).values,
    "tanh of small numbers": lambda z: 1e3 * torch.tanh(1e-3 * z),
}


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_layer_whose_output_goes_on_does_not(head, dtype, monkeypatch):
    class Last(nn.Linear):
        def forward(self, x):
            return HEADS[head](super().forward(x))

    torch.manual_seed(0)
    x, y = torch.randn(7, 3, dtype=dtype), torch.randint(5, (7,))
    model = bdl.models.Classification(bdl.bayesianize(Last(3, 5, dtype=dtype)))
    guide = bdl.guides.AutoLaplaceGGN(model).prototype(x, y)
    found = []
    whole = VJP.softmax
    monkeypatch.setattr(VJP, "softmax", lambda self, w: found.append(whole(self, w)) or found[-1])
    known = results(model, guide, x, y, "kron")
    assert found == [None]
    monkeypatch.setattr(VJP, "_output_layer", lambda self, **options: [])
    for mine, expected in zip(known, results(model, guide, x, y, "kron"), strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_half_precision_is_no_reason_to_take_a_multiple_for_the_output(dtype):
    """The variances are those of 1.2 z, not of z."""

    class Scaled(nn.Linear):
        def forward(self, x):
            return 1.2 * super().forward(x)

    found = {}
    for kind in (torch.float64, dtype):
        torch.manual_seed(0)
        net = Scaled(3, 2, dtype=torch.float64).to(kind)
        x, y = (torch.randn(9, k, dtype=torch.float64).to(kind) for k in (3, 2))
        model = bdl.models.Regression(bdl.bayesianize(net), noise=1.0)
        guide = bdl.guides.AutoLaplaceGGN(model, structure="full").prototype(x, y)
        predictive = bdl.LinearizedPredictive(model, guide.laplace_approximation((x, y)))
        found[kind] = predictive.parameter_moments(x)["y"].variance["loc"].double()
    torch.testing.assert_close(found[dtype], found[torch.float64], rtol=0.05, atol=0.01)
