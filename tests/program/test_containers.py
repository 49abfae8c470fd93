"""Arguments that hold tensors: nested ones, pytrees, graphs of torch_geometric, Hugging Face's
batches."""

import dataclasses

import pytest
import torch
from helpers.conjugate import Conjugate
from torch import nn
from torch.utils._pytree import register_dataclass

import pyro_bdl as bdl
from pyro_bdl.errors import ArgumentError
from pyro_bdl.program.batches import Batches
from pyro_bdl.program.check import named_arguments

N = 9
D = {"dtype": torch.float64}


class Graph:
    """What torch_geometric's ``Data`` offers, of which nothing is registered as a pytree."""

    def __init__(self, **tensors):
        self.__dict__.update(tensors)

    def keys(self):
        return list(self.__dict__)

    def __getitem__(self, name):
        return self.__dict__[name]

    def __iter__(self):
        return iter(self.__dict__.items())

    def to(self, device):
        self.__dict__.update({name: value.to(device) for name, value in self})
        return self


def geometric(**tensors):
    return pytest.importorskip("torch_geometric.data").Data(**tensors)


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


register_dataclass(Pair)

KINDS = {
    "tuple": lambda x, e: (x, e),
    "nested": lambda x, e: {"a": (x, [e])},
    "pytree": Pair,
    "graph": lambda x, e: Graph(x=x, edge_index=e),
    "torch_geometric": lambda x, e: geometric(x=x, edge_index=e),
}
READ = {
    "tuple": lambda value: value,
    "nested": lambda value: (value["a"][0], value["a"][1][0]),
    "pytree": lambda value: (value.left, value.right),
    "graph": lambda value: (value.x, value.edge_index),
    "torch_geometric": lambda value: (value.x, value.edge_index),
}


class Convolution(nn.Module):
    """A linear layer on the mean of each node's neighbors: its rows interact."""

    def __init__(self, read):
        super().__init__()
        self.read, self.linear = read, nn.Linear(2, 1, bias=False, **D)

    def forward(self, value):
        x, edges = self.read(value)
        start, end = edges
        sums = torch.zeros_like(x).index_add(0, end, x[start])
        counts = torch.zeros(len(x), 1, **D).index_add(0, end, torch.ones(len(start), 1, **D))
        return self.linear((x + sums) / (1 + counts))


@pytest.fixture
def data():
    torch.manual_seed(0)
    nodes = torch.arange(N)
    edges = torch.stack([nodes, (nodes + 1) % N])
    return torch.randn(N, 2, **D), edges, torch.randn(N, **D)


@pytest.mark.parametrize("kind", KINDS)
def test_a_container_is_one_argument_and_its_posterior_is_exact(kind, data):
    x, edges, y = data
    given = KINDS[kind](x, edges)
    model = bdl.models.Regression(bdl.bayesianize(Convolution(READ[kind])), noise=0.3)
    guide = bdl.guides.AutoLaplaceGGN(model, rows="together")
    exact = Conjugate((x + x.roll(1, 0)) / 2, y, 0.3)
    bdl.training.train(model, guide, given, y, steps=40, learning_rate=0.3)
    assert (guide.location() - exact.mean).norm() < 0.1 * exact.mean.norm()
    guide.loc.data.copy_(exact.mean)
    for structure in ("full", "diag"):
        posterior = guide.laplace_approximation((given, y), structure=structure)
        expected = exact.precision if structure == "full" else exact.precision.diagonal().diag()
        inverse = posterior.precision.solve(torch.eye(2, **D))
        torch.testing.assert_close(inverse, expected.inverse())
    found = bdl.Predictive(model, posterior, 5)(given)
    assert found["f"].shape == (5, N)


@pytest.mark.parametrize("kind", ["graph", "torch_geometric"])
def test_a_loader_of_graphs_has_one_graph_to_a_batch(kind, data):
    x, edges, y = data
    graphs = [KINDS[kind](x + shift, edges) for shift in (0.0, 1.0)]
    for graph in graphs:
        graph.y = y
    batches = Batches(graphs)
    assert [args[0] is graph for (args, _), graph in zip(batches, graphs, strict=True)] == [
        True
    ] * 2
    assert Batches.of((graphs[0],)).first()[0][0] is graphs[0]  # though it is iterable
    moved = Batches(graphs[0]).to(torch.device("meta")).first()[0][0]
    assert moved.x.device.type == "meta" and graphs[0].x.device.type == "cpu"


def test_what_is_no_tensor_inside_is_named(data):
    x, edges, y = data

    def names(**arguments):
        return list(named_arguments(lambda **kwargs: None, (), arguments))

    assert names(x=(x, {"ids": edges})) == ["x[0]", "x[1]['ids']"]
    assert names(g=Graph(x=x, pair=Pair(x, y))) == ["g['x']", "g['pair'].left", "g['pair'].right"]
    model = bdl.models.Regression(bdl.bayesianize(Convolution(READ["tuple"])))
    guide = bdl.guides.AutoMAP(model)
    with pytest.raises(ArgumentError, match=r"x\[1\] is a numpy ndarray"):
        bdl.training.train(model, guide, (x, edges.numpy()), y, steps=1)
    bad = x.clone()
    bad[3] = torch.nan
    with pytest.raises(ValueError, match=r"x\[0\] holds NaN or infinity in rows 3"):
        bdl.training.train(model, guide, (bad, edges), y, steps=1)


def test_batches_of_hugging_face(data):
    transformers = pytest.importorskip("transformers")
    x, _, y = data

    def batch(rows):
        return transformers.BatchEncoding({"x": x[rows], "y": y[rows]})

    net = nn.Linear(2, 1, bias=False, **D)
    model = bdl.models.Regression(bdl.bayesianize(net), noise=0.3, num_data=N)
    found = []
    for given in (
        lambda: iter([batch(slice(4)), batch(slice(4, N))]),
        [(x[:4], y[:4]), (x[4:], y[4:])],
    ):
        guide = bdl.guides.AutoMAP(model)
        found.append(bdl.training.train(model, guide, given, steps=5).losses)
    assert torch.equal(*found)
