"""Backends that run a graph: torch, operator by operator, or code from inductor."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pyro_bdl.errors import BdlWarning
from pyro_bdl.tracing.graph import is_random, kind_of, mutates, name_of
from pyro_bdl.tracing.simplify import call_directly

Run = Callable[..., tuple[Tensor, ...]]


def eager(graph: fx.GraphModule, examples: Sequence[Tensor]) -> Run:
    """Run the graph's operators one after another."""
    call_directly(graph.graph)
    graph.recompile()
    return graph.forward


def inductor(graph: fx.GraphModule, examples: Sequence[Tensor]) -> Run:
    """Compile fused kernels for the examples' shapes, which takes seconds to a minute.

    Random numbers are torch's own. Draws that need no result of the graph are made before it, in
    the same order, which is faster than inductor's calls of torch.
    """
    draws = _draws_first(graph)
    inputs = [example.detach() for example in examples] + [draw() for draw in draws]
    compiled: Run
    try:
        compiled = _compiled(graph, inputs)
    except Exception as error:
        warnings.warn(
            f'backend="inductor" could not compile the graph ({_first_line(error)}), whose '
            'operators run one by one as with backend="eager": it needs a C++ compiler on the '
            "CPU and Triton on a GPU",
            BdlWarning,
            stacklevel=2,
        )
        compiled = eager(graph, inputs)

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        return compiled(*[i.detach() for i in inputs], *[draw() for draw in draws])

    return run


def _compiled(graph: fx.GraphModule, inputs: list[Any]) -> Run:
    from torch._inductor import compile as compile_graph

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile_graph(graph, inputs, options={"fallback_random": True})


BACKENDS: dict[str, Callable[[fx.GraphModule, Sequence[Tensor]], Run]] = {
    "eager": eager,
    "inductor": inductor,
}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


def _draws_first(graph: fx.GraphModule) -> list[Callable[[], Tensor]]:
    """Make random numbers inputs of the graph, after the others; return the functions that draw
    them."""
    draws: list[Callable[[], Tensor]] = []
    last = list(graph.graph.find_nodes(op="placeholder"))[-1]
    for node in list(graph.graph.nodes):
        if not is_random(node):
            continue
        draw = _draw(node)
        if draw is None:
            break  # later numbers must be drawn after this one
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(f"noise_{len(draws)}")
        node.replace_all_uses_with(last)
        graph.graph.erase_node(node)
        draws.append(draw)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return draws


def _draw(node: fx.Node) -> Callable[[], Tensor] | None:
    """A function that draws a node's numbers, if they need no result of the graph; else None."""
    target, args, kwargs = node.target, node.args, node.kwargs
    assert callable(target)
    if not node.all_input_nodes:
        return lambda: target(*args, **kwargs)
    empty = args[0]
    if not (mutates(node) and isinstance(empty, fx.Node) and name_of(empty) in _EMPTY):
        return None
    kind = kind_of(empty)
    if kind is None or len(empty.users) != 1 or len(node.all_input_nodes) != 1:
        return None

    def fill() -> Tensor:
        tensor = torch.empty_strided(kind.shape, kind.stride, dtype=kind.dtype, device=kind.device)
        return target(tensor, *args[1:], **kwargs)

    return fill


_EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "zeros_like"}
