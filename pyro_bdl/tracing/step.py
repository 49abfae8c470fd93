"""A loss and its gradient as one graph, which torch or inductor runs."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from pyro_bdl.tracing.graph import lift
from pyro_bdl.tracing.simplify import call_directly, simplify
from pyro_bdl.tracing.trace import (
    NotTraceable,
    changed_tensors,
    outside_tensors,
    tensor_of,
    trace,
    variable_nodes,
)
from pyro_bdl.utils.autograd import leaves_behind, with_gradients, without_hooks
from pyro_bdl.utils.precision import rounding, without_autocast, without_cached_casts

Loss = Callable[..., tuple[Tensor, ...]]
Run = Callable[..., tuple[Tensor, ...]]


@dataclass
class StepGraph:
    """The graph of (loss, further results, gradients).

    :param run: a function of the arguments, followed by ``outside``.
    :param outside: the tensors that are not arguments: parameters and constants.
    :param written: the tensors that are changed in place.
    :param leaves: the tensors in which gradients are taken: parameters, and arguments by their
        position.
    :param num_others: the number of further results.
    :param constants: the tensors among ``outside``, or computed with in advance, that no run
        changes, each with its version.
    """

    run: Run
    outside: tuple[Tensor, ...]
    written: list[Tensor]
    leaves: list[Tensor | int]
    num_others: int
    constants: list[tuple[Tensor, int]]

    def has_its_constants(self) -> bool:
        """Return whether no constant was changed in place."""
        return all(tensor._version == version for tensor, version in self.constants)

    def __call__(self, arguments: Sequence[Tensor]) -> "Outcome":
        with torch.no_grad(), without_autocast():  # the graph holds the casts
            results = self.run(*arguments, *self.outside)
        leaves = [arguments[n] if isinstance(n, int) else n for n in self.leaves]
        return Outcome(results[: 1 + self.num_others], results[1 + self.num_others :], leaves)


class Outcome(NamedTuple):
    """The results of one run of a graph.

    :param results: the loss and further results, detached.
    :param gradients: of the loss in the leaves.
    """

    results: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    leaves: list[Tensor]

    def differentiable(self) -> Tensor:
        """The loss, to be differentiated once."""
        return with_gradients(self.results[0], self.gradients, self.leaves)


def trace_step(loss: Loss, examples: Sequence[Tensor], backend: str) -> StepGraph:
    """Trace a loss and its gradient.

    :param loss: from tensors to the loss, a scalar, and further results.
    :param examples: of the tensors; those that require a gradient get one.
    :param backend: of ``BACKENDS``.
    :raises NotTraceable: if the graph would not stand for the loss, or for one without gradient.
    """
    arguments = [e.detach().requires_grad_(e.requires_grad) for e in examples]
    leaves: list[Tensor] = []
    num_others = 0

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        nonlocal num_others
        value, *others = loss(*tensors)
        num_others = len(others)
        behind = leaves_behind(value)
        if not behind:
            raise NotTraceable("its loss depends on no parameter")
        with without_autocast(), without_hooks(behind):
            gradients = torch.autograd.grad(value, behind, allow_unused=True)
        pairs = [(a, g) for a, g in zip(behind, gradients, strict=True) if g is not None]
        leaves[:] = [leaf for leaf, _ in pairs]
        return value.detach(), *[r.detach() for r in others], *[g for _, g in pairs]

    run, outside, written, constants = compiled(function, arguments, backend)
    positions = {id(argument): number for number, argument in enumerate(arguments)}
    return StepGraph(
        run,
        outside,
        written,
        [positions.get(id(t), t) for t in leaves],
        num_others,
        [(tensor, tensor._version) for tensor in constants if not tensor.is_inference()],
    )


def compiled(
    function: Run, arguments: Sequence[Tensor], backend: str = "eager"
) -> tuple[Run, tuple[Tensor, ...], list[Tensor], list[Tensor]]:
    """Trace a function of tensors, and simplify its graph.

    :param backend: of ``BACKENDS``.
    :returns: the graph as a function of the arguments and then of the outside tensors, these
        tensors, those of them that it changes in place, and the tensors that it takes for
        constants.
    :raises NotTraceable: if the graph would not stand for the function.
    """
    with without_cached_casts():
        graph = trace(function, arguments)
    variable = {tensor_of(graph, n) for n in variable_nodes(graph) if n.op == "get_attr"}
    attributes, written = outside_tensors(graph), changed_tensors(graph)
    inputs = lift(graph.graph, attributes)
    constants = {node: tensor for node, tensor in inputs.items() if tensor not in variable}
    fixed = [*constants.values()]
    simplify(graph.graph, constants)
    inputs |= lift(graph.graph, {n: t for n, t in constants.items() if n.op != "placeholder"})
    for node in [node for node in inputs if not node.users]:
        graph.graph.erase_node(node)
        del inputs[node]
    graph.recompile()
    outside = tuple(inputs.values())
    with without_autocast():
        run = BACKENDS[backend](graph, [*arguments, *outside])
    return run, outside, [*written], fixed


def agree(a: Tensor, b: Tensor, size: Tensor) -> bool:
    """Return whether two tensors agree to half of their digits, relative to ``size``; under
    autocast, to half of the digits that are computed with."""
    if not b.is_floating_point():
        return torch.equal(a, b)
    tolerance = max(torch.finfo(b.dtype).eps, rounding()) ** 0.5
    return bool((a - b).norm() <= tolerance * size)


# ------------------------------------------------------------------------------------- backends


def eager(graph: fx.GraphModule, examples: Sequence[Tensor]) -> Run:
    """Run the graph's operators one after another."""
    call_directly(graph.graph)
    graph.recompile()
    return graph.forward


def inductor(graph: fx.GraphModule, examples: Sequence[Tensor]) -> Run:
    """Compile fused kernels for the examples' shapes, which takes seconds to a minute.

    Random numbers are torch's own.
    """
    from torch._inductor import compile as compile_graph

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs: list[Any] = [example.detach() for example in examples]
        compiled = compile_graph(graph, inputs, options={"fallback_random": True})
    return lambda *inputs: compiled(*[value.detach() for value in inputs])


BACKENDS: dict[str, Callable[[fx.GraphModule, Sequence[Tensor]], Run]] = {
    "eager": eager,
    "inductor": inductor,
}
