"""Simplification of a graph to fewer and cheaper operators with the same results.

``make_fx`` records all operators of autograd and the densities. Many are not needed: aliases,
products with one, sums with zero, and functions of constants.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._C import _VariableFunctions

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
_SAME_NUMBERS = {"detach", "alias", "view", "_unsafe_view", "reshape", "expand", "squeeze", "slice"}
_INVERSE_OF_ITSELF = {"t", "neg"}


def simplify(graph: fx.Graph, known: Known) -> None:
    """Simplify a graph in place.

    Results may afterwards share memory with each other and with inputs.

    :param known: the nodes with the same values in every run, and these values. Nodes that depend
        on them alone are added.
    """
    touched = _touched(graph)
    _join_parts(graph, touched)
    for node in list(graph.nodes):
        if node.op != "call_function" or node in touched or is_random(node) or mutates(node):
            continue
        if touched.intersection(node.all_input_nodes):
            continue
        value = _constant(node, known)
        if value is not None:
            known[node] = value
            continue
        take_all_as_view(node, known)
        other = _simpler(node, known)
        if other is not None:
            node.replace_all_uses_with(other)
    graph.eliminate_dead_code(is_needed)
    for node in [node for node in known if node.graph is not graph or node._erased]:
        del known[node]


def _touched(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose memory is changed in place, so that the order of reads matters."""
    roots = {base(part) for node in graph.nodes for part in changed(node)}
    return {node for node in graph.nodes if base(node) in roots}


def _constant(node: fx.Node, known: Known) -> Any:
    """The value of a node that depends on known values only; else None."""
    operate: Any = node.target
    if name_of(node) in _FILLED and isinstance(node.args[0], fx.Node):
        example = _empty(node.args[0])
        if example is None or any(isinstance(n, fx.Node) for n in node.args[1:]):
            return None
        value = operate(example, *node.args[1:], **node.kwargs)
        return value if value.numel() <= LARGE else None
    if not known.keys() >= set(node.all_input_nodes):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: known[n])
    with torch.no_grad():
        value = operate(*args, **kwargs)
    if not isinstance(value, Tensor):
        return None
    sources = sum(known[n].numel() for n in node.all_input_nodes)
    return value if value.numel() <= max(LARGE, sources) else None


def _empty(node: fx.Node) -> Tensor | None:
    """A tensor like a node's result, with arbitrary values."""
    kind = kind_of(node)
    if kind is None:
        return None
    return torch.empty_strided(kind.shape, kind.stride, dtype=kind.dtype, device=kind.device)


# Removal of operators ----------------------------------------------------------------------------


def _simpler(node: fx.Node, known: Known) -> fx.Node | None:
    """An earlier node with the same values, shape and dtype, if the operator implies that; else
    None."""
    name = name_of(node)
    args = node.args
    first = args[0] if args else None
    if not isinstance(first, fx.Node):
        return None
    if name == "select" and name_of(first) == "expand":
        inner: Any = first.args[0]
        return inner if _alike(node, inner) else None
    if name == "sum":  # over dimensions of size 1 that are kept
        return first if _alike(node, first) and not node.kwargs else None
    if name in _SAME_NUMBERS or (name == "pow" and args[1] == 1):
        return first if _alike(node, first) else None
    if name in _INVERSE_OF_ITSELF and name_of(first) == name:
        inner = first.args[0]
        return inner if isinstance(inner, fx.Node) and _alike(node, inner) else None
    if len(args) != 2 or node.kwargs:
        return None
    second: Any = args[1]
    neutral = {"mul": 1, "div": 1, "add": 0, "sub": 0}.get(name)
    if neutral is None:
        return None
    if _is(second, neutral, known) and _alike(node, first):
        return first
    commutes = name in ("mul", "add") and isinstance(second, fx.Node)
    if commutes and _is(first, neutral, known) and _alike(node, second):
        return second
    return None


def _is(value: Any, number: int, known: Known) -> bool:
    """Return whether a number or a known tensor is that number everywhere."""
    if isinstance(value, fx.Node):
        return value in known and bool((known[value] == number).all())
    return isinstance(value, int | float) and value == number


def _alike(a: fx.Node, b: fx.Node) -> bool:
    """Return whether two nodes have the same shape, strides, dtype and device."""
    kind = kind_of(a)
    return kind is not None and kind == kind_of(b)


# Indexing with all indices -----------------------------------------------------------------------


def take_all_as_view(node: fx.Node, known: Known) -> None:
    """Turn an index with all of 0, 1, ..., K - 1 in this order, and its gradient, into a view.

    A table is read in this way at the values of a discrete site that is summed out.
    """
    name = name_of(node)
    if name not in ("index", "index_put") or node.kwargs:
        return
    first, indices, *more = node.args
    index: Any = indices[0] if isinstance(indices, list | tuple) and len(indices) == 1 else None
    if name == "index":
        source, kind = first, kind_of(first) if isinstance(first, fx.Node) else None
    else:  # a sum into zeros
        source, kind = more[0], kind_of(node)
        if not _is(first, 0, known) or more[1:] != [True]:
            return
    if index not in known or kind is None or not isinstance(source, fx.Node):
        return
    value, sizes, given = known[index], kind_of(node), kind_of(source)
    if value.dtype != torch.long or not kind.shape or len(value.reshape(-1)) != kind.shape[0]:
        return
    if not torch.equal(value.reshape(-1), torch.arange(kind.shape[0], device=value.device)):
        return
    if sizes is None or given is None or sizes.shape.numel() != given.shape.numel():
        return
    if _is_contiguous(given) and _is_contiguous(sizes):
        node.target, node.args = torch.ops.aten.view.default, (source, list(sizes.shape))


def _is_contiguous(kind: Any) -> bool:
    expected = 1
    for size, stride in zip(reversed(kind.shape), reversed(kind.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


# Gradients of slices -----------------------------------------------------------------------------


def _join_parts(graph: fx.Graph, touched: set[fx.Node]) -> None:
    """Replace a sum of slice gradients, each padded with zeros, by their concatenation.

    Such sums are gradients in a vector whose slices are used separately. Since x + 0 = x, the
    values are the same.
    """
    for node in list(graph.nodes):
        if node in touched:
            continue
        if name_of(node) == "select_backward":
            part, sizes, dim, _ = node.args
            if sizes[dim] == 1:  # type: ignore[index]
                node.target, node.args = torch.ops.aten.unsqueeze.default, (part, dim)
        elif name_of(node) == "add" and not any(map(_parts, node.users)):  # the outermost sum
            parts = _parts(node) or []
            if _is_complete(parts):
                dim = parts[0].slice.args[2]
                values = [part.slice.args[0] for part in parts]
                node.target, node.args = torch.ops.aten.cat.default, (values, dim)


class _Part(NamedTuple):
    """A vector that is zero outside the entries from ``start`` to ``stop``.

    :param slice: its node, a ``slice_backward``.
    """

    start: int
    stop: int
    slice: fx.Node


def _parts(node: fx.Node) -> list[_Part] | None:
    """The slices in a sum of such vectors, in order; None for other nodes."""
    if name_of(node) == "slice_backward":
        _, sizes, dim, start, stop, step = node.args
        length: Any = sizes[dim]  # type: ignore[index]
        if step != 1 or not 0 <= start < stop:  # type: ignore[operator]
            return None
        return [_Part(start, min(stop, length), node)]  # type: ignore[arg-type,type-var]
    if name_of(node) != "add" or len(node.args) != 2 or node.kwargs:
        return None
    first, second = [_parts(a) if isinstance(a, fx.Node) else None for a in node.args]
    if first is None or second is None:
        return None
    return sorted(first + second, key=lambda part: part.start)


def _is_complete(parts: list[_Part]) -> bool:
    """Return whether slices cover all entries of one dimension without gaps."""
    kinds = [part.slice.args[1:3] for part in parts]
    if not kinds or any(kind != kinds[0] for kind in kinds):
        return False
    sizes, dim = kinds[0]
    ends = [part.stop for part in parts]
    return [part.start for part in parts] == [0, *ends[:-1]] and ends[-1] == sizes[dim]  # type: ignore[index]


# Cheaper calls -----------------------------------------------------------------------------------


def call_directly(graph: fx.Graph) -> None:
    """Replace operators by equivalent torch functions, which halves the cost of a call.

    A call of an ATen operator checks the schema each time.
    """
    for node in graph.nodes:
        if node.target is torch.ops.aten.slice.Tensor and _is_narrow(node):
            start: Any = node.args[2]
            kind: Any = kind_of(node)
            length = kind.shape[node.args[1]]
            node.target, node.args = torch.narrow, (*node.args[:2], start, length)
            continue
        function = _direct(node)
        if function is not None:
            node.target = function


def _is_narrow(node: fx.Node) -> bool:
    """Return whether a slice has nonnegative integer bounds and a step of 1."""
    if len(node.args) != 4 or node.kwargs:
        return False
    return all(isinstance(bound, int) and bound >= 0 for bound in node.args[2:])


def _direct(node: fx.Node) -> Callable | None:
    name = name_of(node)
    if not name or node.target is operator.getitem or mutates(node):
        return None
    schema = schema_of(node)
    if schema.name != f"aten::{name}":
        return None
    if any(str(argument.type) == "List[Optional[Tensor]]" for argument in schema.arguments):
        return None  # such as index_put: torch's functions differ
    if name in ("view", "expand"):
        return getattr(Tensor, name)
    return getattr(_VariableFunctions, name, None)
