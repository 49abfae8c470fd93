"""A simplified graph gives the very same numbers with fewer operators."""

import pytest
import torch
from torch.nn import functional as F

from pyro_bdl.tracing.graph import base, changed, is_random, name_of, reached
from pyro_bdl.tracing.simplify import call_directly, simplify
from pyro_bdl.tracing.trace import trace

CONSTANT = torch.tensor([1.0, 2.0, 3.0])


def _simplified(function, *examples):
    """The graph as it was, and simplified, with its outside tensors as constants; and how many
    operators each has."""
    plain, graph = trace(function, examples), trace(function, examples)
    known = {n: getattr(graph, n.target) for n in graph.graph.find_nodes(op="get_attr")}
    simplify(graph.graph, known)
    for number, (node, value) in enumerate(list(known.items())):
        if node.op != "get_attr":
            graph.register_buffer(f"computed{number}", value)
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph.get_attr(f"computed{number}"))
    call_directly(graph.graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return plain, graph, _operators(plain), _operators(graph)


def _operators(graph):
    return [n for n in graph.graph.nodes if n.op == "call_function"]


def _gradient(function):
    def with_gradient(*tensors):
        tensors = [t.detach().requires_grad_() for t in tensors]
        value = function(*tensors)
        return value.detach(), *torch.autograd.grad(value, tensors)

    return with_gradient


@pytest.mark.parametrize(
    ("function", "most"),
    [
        (lambda x: (x.detach() * 1.0 + 0).reshape(3).exp(), 1),
        (lambda x: x * CONSTANT.log().exp(), 1),
        (lambda x: x + torch.zeros_like(x), 0),
        (lambda x: torch.ones(3) * x, 0),
        (lambda x: x.exp().neg().neg(), 1),
        (lambda x: x.exp() * x.exp(), 2),
        (lambda x: x.exp()[None].t().t(), 2),
        (lambda x: x.exp().pow(1.0), 1),
        (lambda x: x[None].exp().sum(0, keepdim=True), 2),
        (lambda x: x[None].exp().sum((0,), keepdim=True).expand(1, 3), 2),
    ],
)
def test_operators_that_do_nothing(function, most):
    x = torch.tensor([0.3, -0.2, 1.7])
    plain, graph, before, after = _simplified(lambda x: (function(x),), x)
    assert len(after) <= most < len(before)
    assert torch.equal(plain(2 * x)[0], graph(2 * x)[0])


@pytest.mark.parametrize("index, most", [((0, 1, 2), 2), ((1, 0, 2), 9), ((0, 1), 9)])
def test_all_indices_in_order_are_a_view(index, most):
    index = torch.tensor(index).reshape(-1, 1)

    def function(x):
        return torch.func.grad(lambda v: (v[index].sin() * CONSTANT[None]).sum())(x.sin())

    x = torch.randn(3, 3)
    plain, graph, before, after = _simplified(function, x)
    torch.testing.assert_close(graph(x), plain(x), rtol=0, atol=0)
    found = [n for n in after if name_of(n) in ("index", "index_put")]
    assert bool(found) == (most > 2) and len(before) >= len(after)


def test_what_only_looks_as_if_it_did_nothing():
    """Broadcasts, other dtypes and sums that reduce."""

    def function(x):
        return x * torch.ones(2, 1), x.double() * 1.0, x[None].sum(0), torch.ones(3).int() * 1.0

    x = torch.tensor([0.3, -0.2, 1.7])
    plain, graph, *_ = _simplified(function, x)
    for a, b in zip(plain(x), graph(x), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_changes_in_place_keep_their_order():
    def function(x):
        total = torch.zeros(3)
        first = total + 1.0
        total.add_(x)
        second = total + 1.0  # the same operator on the same tensor, later
        view = total[:2]
        view.mul_(2.0)
        return first, second, total + 1.0

    x = torch.randn(3)
    plain, graph, *_ = _simplified(function, x)
    for _ in range(2):
        for a, b in zip(plain(x), graph(x), strict=True):
            assert torch.equal(a, b)


def test_a_network_and_its_gradient():
    def function(x, w, b):
        hidden = torch.tanh(F.linear(x, w[:6].view(2, 3), b))
        image = F.conv2d(hidden.view(1, 1, 4, 2), w[6:].view(1, 1, 1, 3), padding=1)
        picked = F.layer_norm(image, image.shape[-1:])[:, :, [0, 2, 1, 2]]
        return F.softplus(picked).square().mean() + torch.logsumexp(hidden, 1).max()

    tensors = torch.randn(4, 3), torch.randn(9), torch.randn(2)
    plain, graph, before, after = _simplified(_gradient(function), *tensors)
    assert len(after) < 0.85 * len(before)
    others = [t.flip(0).clone() for t in tensors]
    for a, b in zip(plain(*others), graph(*others), strict=True):
        assert torch.equal(a, b)


# Questions about graphs


def test_what_is_changed_and_what_depends_on_it():
    running = torch.zeros(3)

    def function(x):
        y = F.batch_norm(x, running, torch.ones(3), training=True)
        fresh = torch.empty(3).normal_()
        return y, fresh, torch.ones(2)

    graph = trace(function, (torch.randn(4, 3),)).graph
    written = [base(part) for node in graph.nodes for part in changed(node)]
    assert sum(node.op == "get_attr" for node in written) == 1
    assert sum(is_random(node) for node in graph.nodes) == 1
    (x,) = graph.find_nodes(op="placeholder")
    names = {name_of(node) for node in reached(graph, [x])}
    assert any("batch_norm" in name for name in names) and "normal_" not in names
