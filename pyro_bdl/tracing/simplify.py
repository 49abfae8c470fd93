"""Simplification of a graph to fewer and cheaper operators with the same results.

``make_fx`` records all operators of autograd and the densities. Many are not needed: aliases,
products with one, sums with zero, repeated operators, and functions of constants.
"""

import types
from typing import Any

import torch
from torch import Tensor, fx

from pyro_bdl.tracing.graph import (
    base,
    changed,
    is_needed,
    is_random,
    kind_of,
    mutates,
    name_of,
    schema_of,
)

# Constants that are computed once must not need much more memory than their inputs.
LARGE = 2**16

Known = dict[fx.Node, Tensor]

_FILLED = {"ones_like", "zeros_like", "full_like", "new_zeros", "new_ones", "new_full"}
# These return the numbers of their argument where shape, strides and dtype are the same.
_SAME_NUMBERS = {
    "detach", "alias", "view", "_unsafe_view", "reshape", "expand", "squeeze", "slice", "sum",
}  # fmt: skip
_INVERSE_OF_ITSELF = {"t", "neg"}
_NEUTRAL = {"mul": 1, "div": 1, "add": 0, "sub": 0, "pow": 1}


def simplify(graph: fx.Graph, known: Known) -> None:
    """Simplify a graph in place.

    Results may afterwards share memory with each other and with inputs.

    :param known: the nodes with the same values in every run, and these values. Nodes that depend
        on them alone are added.
    """
    # Where memory is changed in place, the order of reads matters.
    roots = {base(part) for node in graph.nodes for part in changed(node)}
    touched = {node for node in graph.nodes if base(node) in roots}
    seen: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node in touched or is_random(node) or mutates(node):
            continue
        if touched.intersection(node.all_input_nodes):
            continue
        value = _constant(node, known)
        if value is not None:
            known[node] = value
            continue
        _take_all_as_view(node, known)
        call = repr((node.target, node.args, node.kwargs))
        other = _simpler(node, known) or seen.setdefault(call, node)
        if other is not node:
            node.replace_all_uses_with(other)
    graph.eliminate_dead_code(is_needed)
    for node in [node for node in known if node.graph is not graph or node._erased]:
        del known[node]


def _constant(node: fx.Node, known: Known) -> Tensor | None:
    """The value of a node that depends on known values, or shapes, only; else None."""
    operate: Any = node.target
    values, inputs = known, node.all_input_nodes
    if name_of(node) in _FILLED and inputs == [node.args[0]]:
        values = {inputs[0]: _empty(inputs[0])}
    elif not known.keys() >= set(inputs):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    with torch.no_grad():
        value = operate(*args, **kwargs)
    if not isinstance(value, Tensor):
        return None
    sources = sum(known[n].numel() for n in inputs if n in known)
    return value if value.numel() <= max(LARGE, sources) else None


def _empty(node: fx.Node) -> Any:
    """A tensor like a node's result, with arbitrary values."""
    kind = kind_of(node)
    assert kind is not None
    return torch.empty_strided(kind.shape, kind.stride, dtype=kind.dtype, device=kind.device)


def _simpler(node: fx.Node, known: Known) -> fx.Node | None:
    """An earlier node with the same values, shape and dtype, if the operator implies that; else
    None."""
    name, args = name_of(node), node.args
    first: Any = args[0] if args else None
    other: Any = None
    if name in _SAME_NUMBERS:
        other = first
    elif name in _INVERSE_OF_ITSELF and isinstance(first, fx.Node) and name_of(first) == name:
        other = first.args[0]
    elif name in _NEUTRAL and len(args) == 2:
        number, second = _NEUTRAL[name], args[1]
        if _is(second, number, known):
            other = first
        elif name in ("mul", "add") and _is(first, number, known):
            other = second
    alike = isinstance(other, fx.Node) and not node.kwargs and kind_of(node) == kind_of(other)
    return other if alike and kind_of(node) is not None else None


def _take_all_as_view(node: fx.Node, known: Known) -> None:
    """Turn an index with all of 0, 1, ..., K - 1 in order, and its gradient, into a view: a table
    is read in this way at the values of a discrete site that is summed out."""
    name, args = name_of(node), node.args
    source: Any = args[0] if args else None
    table: Any = node
    if name == "index":
        table = source
    elif name == "index_put" and len(args) == 4 and _is(source, 0, known) and args[3] is True:
        source = args[2]
    else:
        return
    indices: Any = args[1]
    index = known.get(indices[0]) if len(indices) == 1 else None
    if index is None or index.dtype != torch.long:
        return
    size, before, after = (n.meta["val"] for n in (table, source, node))
    rows = torch.arange(len(size), device=index.device)
    whole = torch.equal(index.reshape(-1), rows) and before.numel() == after.numel()
    if whole and before.is_contiguous() and after.is_contiguous():
        node.target, node.args = torch.ops.aten.view.default, (source, list(after.shape))


def _is(value: Any, number: int, known: Known) -> bool:
    """Return whether a number or a known tensor is that number everywhere."""
    if isinstance(value, fx.Node):
        return value in known and bool((known[value] == number).all())
    return isinstance(value, int | float) and value == number


def call_directly(graph: fx.Graph) -> None:
    """Replace operators by torch's functions of the same name, which halves the cost of a call.

    A call of an ATen operator checks the schema each time.
    """
    for node in graph.nodes:
        schema, name = schema_of(node), name_of(node)
        if schema is None or mutates(node) or schema.name != f"aten::{name}":
            continue
        if any(str(argument.type) == "List[Optional[Tensor]]" for argument in schema.arguments):
            continue  # such as index_put: torch's functions differ
        function = getattr(Tensor if name in ("view", "expand") else torch, name, None)
        if isinstance(function, types.BuiltinFunctionType | types.MethodDescriptorType):
            node.target = function
