"""The last layer's closed forms are what its columns add up to, one by one."""

import pytest
import torch
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.curvature import LowRank
from pyro_bdl.curvature.jacobian.jacobian import IdentityBlock, SoftmaxBlock
from pyro_bdl.curvature.jacobian.linearization import VJP
from pyro_bdl.utils.random_state import fixed_normal


def case(bias: bool = True):
    torch.manual_seed(0)
    last = nn.Linear(4, 5, bias=bias, dtype=torch.float64)
    net = nn.Sequential(nn.Linear(3, 4, dtype=torch.float64), nn.Tanh(), last)
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.randint(5, (7,))
    model = bdl.models.Classification(bdl.bayesianize(net))
    guide = bdl.guides.AutoLaplaceGGN(model, subset="last-layer").prototype(x, y)
    return model, guide, x, y


def results(model, guide, x, y, structure, kind="logits"):
    posterior = guide.laplace_approximation(
        (x, y), structure=LowRank(8) if structure == "low_rank" else structure
    )
    predictive = bdl.LinearizedPredictive(model, posterior)
    return [
        posterior.curvature.diagonal(),
        posterior.precision.logdet(),
        predictive.parameter_moments(x)["y"].variance[kind],
        predictive.parameter_covariance(x)["y"][1],
        predictive.joint_parameter_covariance(x)["y"][1],
    ]


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
@pytest.mark.parametrize("bias", [True, False])
def test_the_closed_forms_are_the_sums_over_columns(structure, bias, monkeypatch):
    """diag(p) - p p' is the Fisher information of the logits of classes."""
    made = case(bias)
    known = results(*made, structure)
    monkeypatch.setattr(VJP, "_output_layer", lambda *_: [])
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


class Doubled(torch.autograd.Function):
    """2 z, by a function of somebody's own, whose operations no mode sees."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z):
        return 2 * z

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class DoubledInRows(Doubled):
    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, z):
        return 2 * z, in_dims[0]


def changed_in_place(z):
    z = z + 0.0
    z[..., 1] = 0.0
    return z


def without_gradient(z):
    with torch.no_grad():
        return 1 * z


HEADS = {
    "multiple": lambda z: 2.0 * z,
    "almost the output": lambda z: 1.0001 * z,
    "another order": lambda z: z.flip(-1),
    "an order by numbers": lambda z: z[..., [0, 2, 1, 3, 4]],
    "sorted": lambda z: z.sort(-1).values,
    "tanh of small numbers": lambda z: 1e3 * torch.tanh(1e-3 * z),
    "plus a multiple": lambda z: z + 1e-3 * z.sum(-1, keepdim=True),
    "a function": Doubled.apply,
    "plus a function": lambda z: z + Doubled.apply(z),
    "plus a function with a map of its own": lambda z: z + DoubledInRows.apply(z),
    "plus a map": lambda z: z + torch.vmap(torch.tanh)(z),
    "changed in place": changed_in_place,
    "plus what has no gradient": lambda z: 2 * z + without_gradient(z),
}


def plainly(layer, x):
    return layer(x)


def with_and_without(head, kind, dtype, monkeypatch, apply=plainly):
    """Results with closed forms where they are taken and without them, and what these were."""

    class Last(nn.Linear):
        def forward(self, x):
            return head(apply(super().forward, x))

    torch.manual_seed(0)
    network = bdl.bayesianize(Last(3, 5, dtype=dtype))
    x, y = torch.randn(7, 3, dtype=dtype), torch.randn(7, 5, dtype=dtype)
    model = bdl.models.Regression(network, noise=1.0)
    if kind == "logits":
        model, y = bdl.models.Classification(network), torch.randint(5, (7,))
    guide = bdl.guides.AutoLaplaceGGN(model).prototype(x, y)
    found, whole = [], VJP._output_layer
    monkeypatch.setattr(VJP, "_output_layer", lambda *a: found.append(whole(*a)) or found[-1])
    known = results(model, guide, x, y, "kron", kind)
    monkeypatch.setattr(VJP, "_output_layer", lambda *_: [])
    return known, results(model, guide, x, y, "kron", kind), found


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", ["logits", "loc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_layer_whose_output_goes_on_does_not(head, kind, dtype, monkeypatch):
    known, expected, found = with_and_without(HEADS[head], kind, dtype, monkeypatch)
    assert not any(found)
    for mine, value in zip(known, expected, strict=True):
        torch.testing.assert_close(mine, value)


TRANSFORMS = {
    "vmap": lambda layer, x: torch.vmap(layer)(x),
    "jvp": lambda layer, x: torch.func.jvp(layer, (x,), (torch.ones_like(x),))[0],
    "vmap of jvp": lambda layer, x: torch.vmap(
        lambda row: torch.func.jvp(layer, (row,), (torch.ones_like(row),))[0]
    )(x),
}


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
@pytest.mark.parametrize("head", ["multiple", "plus a multiple"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_layer_in_a_transform_of_the_network_does_not(transform, head, monkeypatch):
    """After the transform its output is no tensor any more, and is not asked for one."""
    known, expected, found = with_and_without(
        HEADS[head], "loc", torch.float64, monkeypatch, TRANSFORMS[transform]
    )
    assert not any(found)
    for mine, value in zip(known, expected, strict=True):
        torch.testing.assert_close(mine, value)


SAME = {
    "views": lambda z: z.t()[None].squeeze(0).mT.contiguous().float().to(z.dtype),
    "a constant more": lambda z: torch.arange(5, dtype=z.dtype) + z - 1.0,
}


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
@pytest.mark.parametrize("head", SAME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_views_and_constants_keep_it(head, dtype, monkeypatch):
    known, expected, found = with_and_without(SAME[head], "loc", dtype, monkeypatch)
    assert found and all(found)
    rtol, atol = (0.05, 0.01) if dtype is torch.bfloat16 else (1e-4, 1e-5)
    for mine, value in zip(known, expected, strict=True):
        torch.testing.assert_close(mine, value, rtol=rtol, atol=atol)


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
def test_no_cotangent_stands_for_all():
    """f = z + b (a'z), with b orthogonal in each row to one vector v: v' df/dz is v."""
    torch.manual_seed(0)
    x, y = torch.randn(7, 3), torch.randn(7, 5)
    largest = 1.0 / torch.finfo(y.dtype).eps / 10  # of whole numbers whose sums are exact
    v = (largest * fixed_normal(y, seed=1).erf()).round()
    b = torch.stack([v[:, 1], -v[:, 0]], 1) / largest

    class Last(nn.Linear):
        def forward(self, x):
            z, b = super().forward(x[:, :3]), x[:, 3:]
            return z + nn.functional.pad(b, (0, 3)) * z[:, 2:3]

    model = bdl.models.Regression(bdl.bayesianize(Last(3, 5)), noise=1.0)
    rows = torch.cat([x, b], 1)
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full").prototype(rows, y)
    predictive = bdl.LinearizedPredictive(model, guide.laplace_approximation((rows, y)))
    found = predictive.parameter_covariance(rows)["y"][1]

    weight_rows = torch.cat([x, torch.ones(7, 1)], 1)  # of each output, bias last
    head = torch.eye(5).repeat(7, 1, 1)
    head[:, :2, 2] += b
    jacobian = torch.einsum("nkl,nh->nklh", head, weight_rows).flatten(2)
    flat = jacobian.flatten(0, 1)
    covariance = torch.linalg.inv(flat.mT @ flat + torch.eye(20))
    expected = jacobian @ covariance @ jacobian.mT
    torch.testing.assert_close(found, expected)


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
