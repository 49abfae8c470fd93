"""Queries and changes of a graph of ATen operators from ``make_fx``."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

# Their schemas do not show that in training they change the running statistics, arguments 3 and 4.
_BATCH_NORMS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}


def schema_of(node: fx.Node) -> Any:
    return getattr(node.target, "_schema", None)


def name_of(node: fx.Node) -> str:
    """The name of an operator without its overload, such as ``mul``."""
    packet = getattr(node.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else ""


def is_border(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output")


def tagged(node: fx.Node, tag: torch.Tag) -> bool:
    return tag in getattr(node.target, "tags", ())


def is_random(node: fx.Node) -> bool:
    return tagged(node, torch.Tag.nondeterministic_seeded)


def mutates(node: fx.Node) -> bool:
    """Return whether an operator's schema says that it changes an argument in place."""
    schema = schema_of(node)
    return schema is not None and schema.is_mutable


def changed(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operator changes in place."""
    if name_of(node) in _BATCH_NORMS:
        arguments: list[Any] = list(node.args[3:5]) if node.args[5] else []
    elif mutates(node):
        schema = schema_of(node).arguments
        written = [a for a in schema if a.alias_info is not None and a.alias_info.is_write]
        values = {a.name: value for a, value in zip(schema, node.args, strict=False)}
        values |= node.kwargs
        arguments = [values.get(a.name) for a in written]
    else:
        return []
    return [a for a in arguments if isinstance(a, fx.Node)]


def is_needed(node: fx.Node) -> bool:
    """Return whether a node must stay even if its result is not used."""
    return is_border(node) or is_random(node) or bool(changed(node))


class Kind(NamedTuple):
    """The properties of a tensor except its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def kind_of(node: fx.Node) -> Kind | None:
    """The kind of a node's result; None if it is not a tensor, or several."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    return Kind(value.shape, value.stride(), value.dtype, value.device)


def base(node: fx.Node) -> fx.Node:
    """The node whose memory a view shares; the node itself if it is not a view."""
    while node.args and isinstance(node.args[0], fx.Node) and _is_part(node):
        node = node.args[0]
    return node


def _is_part(node: fx.Node) -> bool:
    schema = schema_of(node)
    if schema is None:
        return node.op == "call_function"  # getitem of a split or of several results
    return any(result.alias_info is not None for result in schema.returns)


def reached(graph: fx.Graph, sources: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """The nodes whose results depend on the sources, in execution order.

    A tensor that is changed in place depends from then on on the arguments of that operator.
    """
    live = set(sources)
    for node in graph.nodes:
        if node not in live and not live.intersection(node.all_input_nodes):
            continue
        live.add(node)
        yield node
        for part in changed(node):
            # The base of a changed view is changed too.
            live.add(part)
            while part.args and isinstance(part.args[0], fx.Node):
                part = part.args[0]
                live.add(part)


def lift(graph: fx.Graph, tensors: dict[fx.Node, Tensor]) -> dict[fx.Node, Tensor]:
    """Turn nodes with these values into arguments of the graph, after the others, one for each
    tensor.

    :returns: the new arguments and their values, in order.
    """
    lifted: dict[int, fx.Node] = {}
    result: dict[fx.Node, Tensor] = {}
    places = list(graph.find_nodes(op="placeholder"))
    last = places[-1]
    for node, tensor in tensors.items():
        if id(tensor) not in lifted:
            with graph.inserting_after(last):
                last = graph.placeholder(f"outside_{len(places) + len(result)}")
            last.meta["val"] = tensor.detach()
            lifted[id(tensor)] = last
            result[last] = tensor
        node.replace_all_uses_with(lifted[id(tensor)])
    graph.eliminate_dead_code(is_needed)
    return result
