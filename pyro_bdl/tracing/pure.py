"""Graphs of pure functions of tensors, without in-place operators, for translations."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pyro
import torch
from torch import Tensor, fx
from torch.distributions import Distribution

from pyro_bdl.tracing.graph import changed, is_border, lift, without_kept_text
from pyro_bdl.tracing.trace import NotTraceable, operators_of, record, refuse_reads, tensor_of
from pyro_bdl.utils.module_state import vmappable


@contextmanager
def plain_torch() -> Iterator[None]:
    """Run without fused kernels and validation, which hide values from a trace or branch on
    them."""
    with ExitStack() as stack:
        for setting in (
            torch.no_grad(),
            vmappable(),
            _set(torch.backends.mkldnn, "enabled", False),
            _set(torch.backends.cudnn, "enabled", False),
            # The class default applies to distributions made in the trace, the method to earlier
            # ones. Pyro's context must come first, since it restores its own default in torch.
            _set(Distribution, "_validate_args", False),
            _set(Distribution, "_validate_sample", lambda self, value: None),
            pyro.validation_enabled(False),
        ):
            stack.enter_context(setting)
        yield


@contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@without_kept_text()
def trace_pure(
    function: Callable,
    examples: Sequence[Tensor],
    decompositions: Mapping[Any, Callable] | None = None,
) -> fx.GraphModule:
    """The graph of a pure function of tensors, without operators that change a tensor in place.

    It is valid for the shapes and dtypes of the examples. Tensors that are not arguments are
    constants (nodes ``get_attr``), including parameters. Validation, fused attention and oneDNN are
    off while tracing and restored afterwards.

    :param function: returns a pytree of tensors.
    :param decompositions: operators to be replaced by simpler ones, as in ``make_fx``.
    :raises NotTraceable: if control flow or a shape depends on the arguments, or if the function
        changes a tensor in place that it did not make.
    """
    examples = [example.detach() for example in examples]
    with plain_torch():
        graph, places = record(function, examples, decompositions)
        refuse_reads(graph, graph.graph.find_nodes(op="placeholder"), places)
        graph.graph.eliminate_dead_code(lambda node: is_border(node) or bool(changed(node)))
        if any(map(changed, graph.graph.nodes)):
            graph = _functional(graph, examples, decompositions)
    for node in graph.graph.nodes:
        if changed(node):
            raise NotTraceable(
                "it changes a tensor that it did not make, in place (a module in train mode?)",
                str(node.target),
            )
    graph.graph.eliminate_dead_code(is_border)
    graph.recompile()
    return graph


def _functional(
    graph: fx.GraphModule,
    examples: Sequence[Tensor],
    decompositions: Mapping[Any, Callable] | None,
) -> fx.GraphModule:
    """The graph without in-place operators; ``functionalize`` needs all tensors as inputs."""
    attributes = {n: tensor_of(graph, n) for n in graph.graph.find_nodes(op="get_attr")}
    constants = lift(graph.graph, attributes).values()
    graph.recompile()

    def run(*tensors: Tensor) -> Any:
        return graph(*tensors)

    functional = operators_of(
        torch.func.functionalize(run), [*examples, *constants], decompositions
    )
    inputs = list(functional.graph.find_nodes(op="placeholder"))[len(examples) :]
    for number, (node, value) in enumerate(zip(inputs, constants, strict=True)):
        functional.register_buffer(f"constant_{number}", value.detach())
        with functional.graph.inserting_before(node):
            node.replace_all_uses_with(functional.graph.get_attr(f"constant_{number}"))
        functional.graph.erase_node(node)
    return functional
