"""Posteriors of networks whose nodes exchange messages, against dense Gauss-Newton matrices."""

import warnings

import pytest
import torch
from torch import nn
from torch.func import jacrev

import pyro_bdl as bdl
from pyro_bdl.errors import BdlWarning, UnsupportedProgramError

D = {"dtype": torch.float64}
N, CLASSES = 9, 3


class Graph(nn.Module):
    """Two layers of messages; the last layer acts on each node, or its outputs are averaged too."""

    def __init__(self, messages, *, averaged):
        super().__init__()
        self.messages, self.averaged = messages, averaged
        self.first, self.last = nn.Linear(2, 4, **D), nn.Linear(4, CLASSES, **D)

    def forward(self, x):
        f = self.last((self.messages @ self.first(x)).tanh())
        return self.messages @ f if self.averaged else f


@pytest.fixture
def messages():
    ring = torch.eye(N, **D) + torch.eye(N, **D).roll(1, 0) + torch.eye(N, **D).roll(-1, 0)
    return ring / 3


@pytest.fixture
def data():
    torch.manual_seed(0)
    return torch.randn(N, 2, **D), torch.arange(N) % CLASSES


def fitted(family, messages, data, averaged, **options):
    net = Graph(messages, averaged=averaged)
    model = bdl.models.Classification(bdl.bayesianize(net, bdl.priors.Normal(1.0)))
    guide = family(model, rows="together", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        bdl.training.train(model, guide, *data, steps=50, learning_rate=0.05)
        return model, guide.laplace_approximation(data)


def dense(posterior, messages, x, averaged, head):
    """Logits' covariance (N, C, N, C) by J (sum_n J_n' F_n J_n + 1)^-1 J' over all of J."""
    values, _ = posterior.require_layout().constrain(posterior.location().detach())
    names = [n for n in values if not head or ".last." in n or n.startswith("last")]
    shapes = [values[n].shape for n in names]
    start = torch.cat([values[n].reshape(-1) for n in names])

    def logits(vector):
        parts = vector.split([shape.numel() for shape in shapes])
        named = {n: p.reshape(s) for n, p, s in zip(names, parts, shapes, strict=True)}
        w = {n.split("net.")[-1]: v for n, v in {**values, **named}.items()}
        hidden = (messages @ (x @ w["first.weight"].mT + w["first.bias"])).tanh()
        f = hidden @ w["last.weight"].mT + w["last.bias"]
        return messages @ f if averaged else f

    jacobian, p = jacrev(logits)(start), logits(start).softmax(-1)
    fisher = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    curvature = torch.einsum("nap,nab,nbq->pq", jacobian, fisher, jacobian)
    inverse = (curvature + torch.eye(len(start), **D)).inverse()
    return torch.einsum("nap,pq,mbq->namb", jacobian, inverse, jacobian)


CASES = {
    "full": (bdl.guides.AutoLaplaceGGN, False, {"structure": "full"}),
    "last layer": (bdl.guides.AutoLastLayer, True, {}),
}


@pytest.mark.parametrize("averaged", [False, True], ids=["by node", "averaged"])
@pytest.mark.parametrize("case", CASES)
def test_the_posterior_of_a_graph_is_the_dense_one(case, averaged, messages, data):
    family, head, options = CASES[case]
    model, posterior = fitted(family, messages, data, averaged, **options)
    expected = dense(posterior, messages, data[0], averaged, head)
    predictive = bdl.LinearizedPredictive(model, posterior)
    found = predictive.joint_parameter_covariance(data[0], sites=["f"])["f"][1]
    torch.testing.assert_close(found.reshape(expected.shape), expected)
    variances = torch.einsum("nana->na", expected)
    draws = bdl.LinearizedPredictive(model, posterior, 4000)(data[0])["f"]
    torch.testing.assert_close(draws.var(0), variances, rtol=0.15, atol=0.01)


def test_a_graph_by_single_rows_is_refused(messages, data):
    model = bdl.models.Classification(bdl.bayesianize(Graph(messages, averaged=False)))
    guide = bdl.guides.AutoLastLayer(model).prototype(*data)
    with pytest.raises(UnsupportedProgramError, match='rows="together"'):
        guide.laplace_approximation(data)


class OfArguments(nn.Module):
    """The messages come with the data, as a matrix of nodes by nodes."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 4, **D), nn.Linear(4, CLASSES, **D)

    def forward(self, graph):
        return self.last((graph["messages"] @ self.first(graph["x"])).tanh())


def numbers_of(messages, data):
    """Numbers of all stages of a program that says that its rows need each other."""
    torch.manual_seed(1)
    given = {"x": data[0], "messages": messages}, data[1]
    model = bdl.models.Classification(bdl.bayesianize(OfArguments()))
    model.rows = "together"
    guide = bdl.guides.AutoLaplaceGGN(model, subset="last-layer")
    losses = bdl.training.train(model, guide, *given, steps=5).losses
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        posterior = guide.laplace_approximation(given)
    scores = bdl.evaluate(model, posterior, *given, train=given, num_samples=20).scores
    probabilities = bdl.LinearizedPredictive(model, posterior).probabilities(given[0])["y"]
    return losses, posterior.variances(), torch.tensor(scores["nlpd"]), probabilities


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_a_sparse_adjacency_is_the_dense_one(sparse, messages, data):
    for found, expected in zip(
        numbers_of(sparse(messages), data), numbers_of(messages, data), strict=True
    ):
        torch.testing.assert_close(found, expected)
