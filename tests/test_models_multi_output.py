"""Ready-made programs of several outputs: densities by hand, and all methods."""

import functools
from collections import namedtuple
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroParam
from torch import nn
from torch.distributions import constraints

import pyro_bdl as bdl
from pyro_bdl.models import (
    BinaryClassification,
    Classification,
    HeteroscedasticRegression,
    MultiOutput,
    PoissonRegression,
    Regression,
    StudentTRegression,
)

N = 6
Pair = namedtuple("Pair", ["price", "label"])


@pytest.fixture(autouse=True)
def _double(_fresh):
    torch.set_default_dtype(torch.float64)


class _Net(nn.Module):
    """Two outputs of one hidden layer, packed by ``kind``."""

    def __init__(self, kind=None):
        super().__init__()
        self.kind = kind or (lambda price, label: {"price": price, "label": label})
        self.hidden, self.price, self.label = nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(3, 3)

    def forward(self, x):
        hidden = self.hidden(x).tanh()
        return self.kind(self.price(hidden), self.label(hidden))


def _heads(**options):
    return {"price": Regression(**{"noise": 0.3} | options), "label": Classification()}


def _model(kind=None, heads=None, **options):
    return MultiOutput(bdl.bayesianize(_Net(kind)), heads or _heads(), **options)


def _data():
    x = torch.randn(N, 2)
    return x, {"price": torch.randn(N), "label": torch.arange(N) % 3}


def _by_hand(latents, x, y, noise=0.3):
    hidden = nn.functional.linear(x, latents["hidden.weight"], latents["hidden.bias"]).tanh()
    price, label = (
        nn.functional.linear(hidden, latents[f"{name}.weight"], latents[f"{name}.bias"])
        for name in ("price", "label")
    )
    return {
        "price": dist.Normal(price[:, 0], noise).log_prob(y["price"]),
        "label": -nn.functional.cross_entropy(label, y["label"], reduction="none"),
    }


@pytest.mark.parametrize(
    "kind,outputs",
    [
        (None, {}),
        (lambda price, label: (price, label), {}),
        (Pair, {}),
        (lambda price, label: SimpleNamespace(price=price, label=label), {}),
        (
            lambda price, label: torch.cat([price, label], 1),
            {"price": lambda f: f[:, 0], "label": lambda f: f[:, 1:]},
        ),
        (lambda price, label: [label, price], {"price": 1, "label": 0}),
    ],
    ids=["dict", "tuple", "named tuple", "attributes", "columns", "places"],
)  # fmt: skip
def test_the_density_by_hand_however_the_outputs_are_packed(kind, outputs):
    (x, y), parts = _data(), {"price": functools.partial(Regression, noise=0.3)}
    heads = {
        name: parts.get(name, Classification)(output=outputs.get(name))
        for name in ("price", "label")
    }
    program = bdl.Program(_model(kind, heads), x, y)
    assert program.observed == ("price", "label")
    latents = program.constrain(0.5 * torch.randn(program.size))[0]
    expected = _by_hand(latents, x, y)
    torch.testing.assert_close(program.log_likelihood(latents), expected)
    total = sum(term.sum() for term in expected.values())
    torch.testing.assert_close(program.log_joint(latents), program.log_prior(latents) + total)


def test_each_head_has_its_own_hyperparameters():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 6)

        def forward(self, x):
            f = self.linear(x)
            return f[:, :1], f[:, 1:2], f[:, 2:4], f[:, 4:5], f[:, 5:]

    heads = {
        "a": Regression(noise=dist.LogNormal(0.0, 1.0)),
        "b": StudentTRegression(noise=PyroParam(torch.tensor(0.7), constraints.positive), df=3.0),
        "c": HeteroscedasticRegression(),
        "d": PoissonRegression(),
        "e": BinaryClassification(),
    }
    model = MultiOutput(bdl.bayesianize(Net()), heads, num_data=2 * N)
    x = torch.randn(N, 2)
    y = {"a": torch.randn(N), "b": torch.randn(N, 1), "c": torch.randn(N)}
    y |= {"d": torch.arange(N), "e": torch.arange(N) % 2}
    program = bdl.Program(model, x, y)
    assert set(program.latents) == {"linear.weight", "linear.bias", "a.noise"}
    assert program.deterministic == ("a.f", "b.f", "c.noise", "c.f", "d.f", "e.f")
    latents = program.constrain(torch.randn(program.size))[0]
    f = nn.functional.linear(x, latents["linear.weight"], latents["linear.bias"])
    expected = (
        dist.Normal(f[:, 0], latents["a.noise"]).log_prob(y["a"])
        + dist.StudentT(3.0, f[:, 1], 0.7).log_prob(y["b"][:, 0])
        + dist.Normal(f[:, 2], nn.functional.softplus(f[:, 3])).log_prob(y["c"])
        + dist.Poisson(f[:, 4].exp()).log_prob(y["d"])
        + dist.Bernoulli(logits=f[:, 5]).log_prob(y["e"].double())
    )
    found = program.log_likelihood(latents)
    torch.testing.assert_close(sum(found.values()), expected, rtol=1e-7, atol=1e-7)
    gap = program.log_joint(latents) - program.log_prior(latents)
    torch.testing.assert_close(gap, 2 * expected.sum(), rtol=1e-7, atol=1e-7)
    guide = bdl.guides.AutoMeanField(model)
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), pyro.infer.Trace_ELBO())
    for _ in range(2):
        svi.step(x, y)
    assert (heads["b"].noise - 0.7).abs() > 0.05  # learned


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
def test_curvature_and_predictions():
    (x, y), model = _data(), _model(heads=_heads(noise=dist.HalfNormal(1.0)), num_data=N)
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full").prototype(x, y)
    laplace = guide.laplace_approximation((x, y))
    latents = laplace.median()
    program = bdl.Program(model, x, y)

    def curvature(name, factor):
        """J' F J over the weights, J of the head's output, F its Fisher information."""

        def output(weights):
            f = program.run({**latents, **weights}).deterministic[f"{name}.f"]
            return f.reshape(N, -1)

        weights = {site: value for site, value in latents.items() if "noise" not in site}
        found = torch.func.jacrev(output)(weights)
        rows = torch.cat([j.reshape(N, -1, weights[s].numel()) for s, j in found.items()], -1)
        return torch.einsum("nip,nij,njq->pq", rows, factor(output(weights)), rows)

    def softmax(logits):
        p = logits.softmax(-1)
        return torch.diag_embed(p) - p[:, :, None] * p[:, None]

    noise = latents["price.noise"]
    size = laplace.subset.size
    found = torch.linalg.inv(laplace.precision.solve(torch.eye(size)))
    expected = curvature("label", softmax) + curvature(
        "price", lambda f: noise.square().reciprocal().expand(N, 1, 1)
    )
    inner = slice(0, size - 1)
    torch.testing.assert_close(found[inner, inner], expected + torch.eye(size - 1))
    moments = bdl.LinearizedPredictive(model, laplace).parameter_moments(x)
    assert moments["price"].mean["loc"].shape == (N,)
    assert moments["label"].mean["logits"].shape == (N, 3)
    for predictive in (bdl.LinearizedPredictive, bdl.Predictive):
        drawn = predictive(model, laplace, 3)(x)
        assert drawn["price"].shape == drawn["label"].shape == (3, N)
        assert drawn["label.f"].shape == (3, N, 3)
        density = predictive(model, laplace, 3).log_likelihood(x, y)
        assert density["price"].shape == density["label"].shape == (3, N)


def test_a_head_is_predicted_from_the_others():
    (x, y), model = _data(), _model()
    guide = bdl.guides.AutoMAP(model).prototype(x, y)
    some = bdl.Predictive(model, guide, 2).log_likelihood(x, y | {"label": None})
    assert set(some) == {"price"}


NETWORK = bdl.bayesianize(_Net().double())


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda x, y: _model()(x, y | {"price": y["price"][:5]}), r"y\['price'\] has shape \(5,\)"),
        (lambda x, y: _model()(x, y | {"label": y["price"]}), r"y\['label'\] must hold class num"),
        (lambda x, y: _model()(x, {"price": y["price"]}), r"head \(price, label; .* \['price'\]"),
        (lambda x, y: _model()(x, y["price"]), "got Tensor"),
        (lambda x, y: _model(lambda a, b: (a[:5], b))(x), r"numbers of rows: \{'price': 5"),
        (lambda x, y: _model(lambda a, b: {"label": b})(x), "without a tensor 'price'"),
        (lambda x, y: _model(num_data=3)(x, y), "num_data is 3"),
        (lambda x, y: Regression(noise=1.0)(x), "Regression has no network"),
        (lambda x, y: MultiOutput(NETWORK, {}), "heads is empty"),
        (lambda x, y: MultiOutput(NETWORK, {"price": Regression}), "program such as Regression"),
        *(
            (lambda x, y, bad=bad: MultiOutput(NETWORK, {"price": bad()}), "program of its own")
            for bad in (
                lambda: Regression(NETWORK),
                lambda: Regression(num_data=3),
                lambda: _model().heads["price"],
            )
        ),
    ],
)
def test_errors_say_which_head(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call(*_data())
