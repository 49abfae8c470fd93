"""Backends that run a graph: torch, operator by operator, or code from inductor."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pyro_bdl.errors import BdlWarning
from pyro_bdl.tracing.graph import base, is_random, kind_of, mutates, name_of
from pyro_bdl.tracing.simplify import LARGE, call_directly

Run = Callable[..., tuple[Tensor, ...]]


def eager(graph: fx.GraphModule, examples: Sequence[Tensor]) -> Run:
    """Run the graph's operators one after another."""
    call_directly(graph.graph)
    graph.recompile()
    return graph.forward


def inductor(graph: fx.GraphModule, examples: Sequence[Tensor]) -> Run:
    """Compile fused kernels for the examples' shapes, which takes seconds to a minute.

    Random numbers are torch's own. Draws that need no result of the graph are made before it, in
    the same order.
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
    results = {base(node) for node in graph.graph.output_node().all_input_nodes}
    for node in list(graph.graph.nodes):
        if not is_random(node):
            continue
        draw = _draw(node, keep=base(node) not in results)
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


def _draw(node: fx.Node, *, keep: bool) -> Callable[[], Tensor] | None:
    """A function that draws a node's numbers, if they need no result of the graph; else None.

    :param keep: whether large draws may be written over those of the run before.
    """
    target, args, kwargs = node.target, node.args, node.kwargs
    assert callable(target)
    if not node.all_input_nodes:
        fill = _FILLS.get(name_of(node))
        if fill is None:
            return lambda: target(*args, **kwargs)
        return _filled(kind_of(node), fill, keep)
    first = args[0]
    filled = mutates(node) and isinstance(first, fx.Node) and name_of(first) in _EMPTY
    if not filled or len(first.users) != 1 or len(node.all_input_nodes) != 1:  # type: ignore[union-attr]
        return None
    return _filled(kind_of(first), lambda e: target(e, *args[1:], **kwargs), keep)  # type: ignore[arg-type]


def _filled(kind: Any, fill: Callable[[Tensor], Any], keep: bool) -> Callable[[], Tensor]:
    """A function that fills a tensor, a new one each time or, if it is large, the same one.

    The C library gives large blocks back to the system, so that new ones cost page faults, which
    take half as long as the numbers.
    """
    keep = keep and kind.device.type == "cpu" and kind.shape.numel() > LARGE
    kept: list[Tensor] = []

    def draw() -> Tensor:
        if kept:
            return fill(kept[0])
        empty = torch.empty_strided(kind.shape, kind.stride, dtype=kind.dtype, device=kind.device)
        if keep:
            kept.append(empty)
        return fill(empty)

    return draw


_FILLS: dict[str, Callable[[Tensor], Any]] = {"randn": Tensor.normal_, "rand": Tensor.uniform_}
_EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "zeros_like"}
