"""Linear operators applied once to a sum of arguments: the same gradients by fewer operators."""

import pytest
import torch

from pyro_bdl.tracing import linear_sums
from pyro_bdl.tracing.linear_sums import join_linear
from pyro_bdl.tracing.simplify import simplify
from pyro_bdl.tracing.trace import trace

pytestmark = pytest.mark.usefixtures("double")


def chain(w, x):
    """Steps that read the same weights, each through its own operators."""
    total = x
    for _ in range(5):
        moves = w.view(3, 3).t().log_softmax(0).unsqueeze(0)
        total = (total[:, None] * 0.5 + moves).logsumexp(-1) - 2.0 * w[:3]
    return total.sum()


def gradient(w, x):
    w = w.detach().requires_grad_()
    (found,) = torch.autograd.grad(chain(w, x), [w])
    return (found,)


def graph_of(function, *args):
    """The graph, and how many operators it had before and has now."""
    graph = trace(lambda *args: tuple(function(*args)), args)
    simplify(graph.graph, {})
    before = _operators(graph)
    join_linear(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return graph, before, _operators(graph)


def _operators(graph):
    return sum(node.op == "call_function" for node in graph.graph.nodes)


def test_gradients_are_the_same_by_fewer_operators():
    torch.manual_seed(0)
    w, x = torch.randn(9), torch.randn(3)
    graph, before, after = graph_of(gradient, w, x)
    assert after < 0.9 * before
    for _ in range(2):
        w, x = torch.randn(9), torch.randn(3)
        torch.testing.assert_close(graph(w, x), gradient(w, x))


def test_terms_that_occur_twice_or_are_used_elsewhere_stay():
    def function(a, b):
        twice, other = a * 3.0, b * 3.0
        return twice + twice + other + (-b), other

    a, b = torch.randn(2), torch.randn(2)
    graph, *_ = graph_of(function, a, b)
    torch.testing.assert_close(graph(a, b), function(a, b))


def test_broadcast_sums_and_large_arguments_stay(monkeypatch):
    def broadcast(a, b):
        return (a.sum(0) * 2.0 + b * 2.0,)

    a, b = torch.randn(3, 2), torch.randn(4, 2)
    graph, before, after = graph_of(broadcast, a, b)
    assert after == before
    torch.testing.assert_close(graph(a, b), broadcast(a, b))

    def two(a, b):
        return (a.sum(0) + b.sum(0),)

    assert graph_of(two, a, 2 * a)[2] == 2
    monkeypatch.setattr(linear_sums, "MOST_NUMBERS", 5)
    assert graph_of(two, a, 2 * a)[2] == 3
