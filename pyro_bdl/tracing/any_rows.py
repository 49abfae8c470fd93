"""A graph of ATen operators that is valid for any number of rows of the data."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pyro_bdl.tracing.trace import NotTraceable, tensor_of, trace_pure

_SIZES = (3, 5)  # rows of the two graphs


def _zeros(tangent: Tensor, like: Tensor, *, self_num_batch_dims: int = 0) -> Tensor:
    return like.new_zeros(tangent.shape[:self_num_batch_dims] + like.shape)


# what torch's jvp leaves in a graph, and symbolic shapes do not know
_PLAIN = {torch.ops.aten._new_zeros_with_same_feature_meta.default: _zeros}


def trace_rows(
    function: Callable[..., Any], constant: Sequence[Tensor], data: Sequence[Tensor]
) -> fx.GraphModule:
    """The graph of ``function(*constant, *data)``, valid for any number n of rows of the data.

    The function is traced with 3 and with 5 rows. Both graphs must have the same operators; an
    integer i(n) in which they differ, a size or an index, is a n + b.

    :param data: tensors with rows in front, at least one tensor and one row.
    :raises NotTraceable: if the graphs differ otherwise.
    """
    graph, other = (
        trace_pure(function, [*constant, *(_of_length(value, count) for value in data)], _PLAIN)
        for count in _SIZES
    )
    nodes = list(graph.graph.nodes)
    if len(nodes) != len(other.graph.nodes):
        raise NotTraceable("its operators depend on the number of rows")
    inputs = [node for node in nodes if node.op == "placeholder"]
    with graph.graph.inserting_after(inputs[-1]):
        rows = graph.graph.call_function(torch.ops.aten.sym_size.int, (inputs[-1], 0))
    sizes = _Sizes(graph.graph, rows)
    for node, twin in zip(nodes, other.graph.nodes, strict=True):
        if node.op == "get_attr" and _differ(tensor_of(graph, node), tensor_of(other, twin)):
            raise NotTraceable("it makes a tensor whose values depend on the number of rows")
        if (node.op, node.op == "get_attr" or node.target) != (
            twin.op, twin.op == "get_attr" or twin.target,
        ):  # fmt: skip
            raise NotTraceable("its operators depend on the number of rows", str(node.target))
        node.args = _matched(node.args, twin.args, sizes)
        node.kwargs = _matched(node.kwargs, twin.kwargs, sizes)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


class _Sizes:
    """Nodes of a graph for integers a n + b, each made once."""

    def __init__(self, graph: fx.Graph, rows: fx.Node) -> None:
        self.graph, self.rows, self._last = graph, rows, rows
        self._nodes: dict[tuple[int, int], fx.Node] = {(1, 0): rows}

    def node(self, factor: int, shift: int) -> fx.Node:
        """The node of ``factor * n + shift``."""
        if (factor, shift) not in self._nodes:
            with self.graph.inserting_after(self._last):
                product = self.graph.call_function(operator.mul, (self.rows, factor))
            with self.graph.inserting_after(product):
                total = self.graph.call_function(operator.add, (product, shift))
            self._nodes[factor, shift] = self._last = total
        return self._nodes[factor, shift]


def _of_length(value: Tensor, count: int) -> Tensor:
    """The first rows, over and over, as many as asked for."""
    return value[torch.arange(count, device=value.device) % len(value)]


def _differ(value: Tensor, other: Tensor) -> bool:
    return value.shape != other.shape or not torch.equal(value, other)


def _matched(value: Any, other: Any, sizes: _Sizes) -> Any:
    """The arguments of a node, with nodes in place of the integers that depend on n."""
    if isinstance(value, fx.Node):
        return value
    if isinstance(value, tuple | list):
        return type(value)(_matched(*pair, sizes) for pair in zip(value, other, strict=True))
    if isinstance(value, dict):
        return {key: _matched(value[key], other[key], sizes) for key in value}
    if value == other or (value != value and other != other):
        return value
    few, many = _SIZES
    if isinstance(value, bool) or not isinstance(value, int):
        raise NotTraceable(f"a number in it depends on the number of rows ({value}, {other})")
    factor = (other - value) // (many - few)
    if value - factor * few != other - factor * many:
        raise NotTraceable(f"a size in it is no multiple of the rows ({value}, {other})")
    return sizes.node(factor, value - factor * few)
