"""Graphs of ATen operators that are valid for other tensors than the traced ones.

``trace`` keeps exactly the operators that the function ran, including random and in-place ones, so
that torch gives the same numbers. ``trace_pure`` has none that change a tensor in place, for a
translation to JAX.
"""

import operator
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from pyro_bdl.tracing.graph import (
    base,
    changed,
    is_border,
    is_random,
    lift,
    name_of,
    reached,
    tagged,
)
from pyro_bdl.utils.dispatch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    TorchDispatchMode,
    TracingContext,
    tracing,
    without_modes,
)
from pyro_bdl.utils.module_state import vmappable
from pyro_bdl.utils.trees import tree_leaves, tree_map_only

_FOLDERS = [Path(str(file)).parent for file in (__file__, torch.__file__, pyro.__file__)]
_LIBRARIES = ("<string>", "<frozen", *(f"{folder}{os.sep}" for folder in _FOLDERS))
# Methods that read a tensor's values without an operator, and other methods that read them.
_PAST = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr}
_READS = _PAST | {
    Tensor.item, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__,
    Tensor.__contains__, torch.equal, torch.allclose,
}  # fmt: skip
_DATA: Any = Tensor.data
# Functions whose results have no gradient, though their operators have one.
_STOPS = {
    torch.detach, torch.tensor, torch.as_tensor, Tensor.detach, Tensor.new_tensor,
    torch.nn.functional.gumbel_softmax,
}  # fmt: skip


class NotTraceable(Exception):
    """A function cannot be traced; the message is a clause that follows "since".

    :param operator: the name of the ATen operator that causes it, if there is one.
    """

    def __init__(self, message: str, operator: str = "") -> None:
        super().__init__(message)
        self.operator = operator


class _Methods(TorchFunctionMode):
    """Mode that makes reads of values visible to the graph, and records their lines.

    :param marks_constants: put a ``detach`` behind functions under ``torch.no_grad``, which leaves
        no other trace in a graph, and refuse hooks of gradients, which leave none.
    """

    def __init__(self, marks_constants: bool = False) -> None:
        super().__init__()
        self.marks_constants = marks_constants
        self.places: list[str] = []
        self.stops = self.differentiates = False  # a gradient now, and anything so far

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        if func == _DATA.__get__:  # made anew by each access
            return self._constant(args[0])  # the same values, visible to the trace
        if func in _READS:
            self.places.append(_users_line())
        if self.marks_constants and func is Tensor.register_hook:
            name = "Tensor.register_hook"
            raise NotTraceable(f"it changes gradients{_users_line()}", name)
        if func in (Tensor.detach_, torch.detach_):  # of which a graph holds nothing
            raise NotTraceable(
                "it detaches a tensor in place: use detach()", "aten.detach_.default"
            )
        if func in _PAST and args[0].numel():
            first = args[0].detach().reshape(-1)[0]
            is_truth = first.dtype is torch.bool  # all are read, not this truth value alone
            (first.byte() if is_truth else first).item()
        self.stops, before = func in _STOPS, self.stops
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            self.stops = before
        if func is torch.autograd.grad:
            self.differentiates = True
            constant = not (kwargs or {}).get("create_graph") and torch.is_grad_enabled()
        else:
            constant = self.marks_constants and not torch.is_grad_enabled()
        if not constant:
            return result
        given = {id(leaf) for leaf in tree_leaves((args, kwargs))}  # changed in place
        return tree_map_only(Tensor, lambda v: v if id(v) in given else self._constant(v), result)

    def _constant(self, value: Tensor) -> Tensor:
        self.stops, before = True, self.stops
        try:
            return value.detach()
        finally:
            self.stops = before


class _Outside(TorchDispatchMode):
    """Mode that turns reads of tensors from outside into operators, and keeps tensors that are
    changed in place.

    :ivar constants: aliases of what the user's code detached. What autograd detaches to keep it for
        a derivative is not among them.
    """

    def __init__(self, methods: _Methods) -> None:
        super().__init__()
        self.methods, self.constants = methods, list[Tensor]()
        self.saved: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        if any(isinstance(leaf, torch.Generator) for leaf in tree_leaves((args, kwargs))):
            raise NotTraceable(
                "it draws from a torch.Generator, whose state a graph does not hold: draw before, "
                "or without it",
                str(func),
            )
        if torch.Tag.data_dependent_output in func.tags:
            args = tree_map_only(Tensor, torch.ops.aten.detach.default, args)
        if func._schema.is_mutable:
            given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
            given |= kwargs or {}
            written = [
                given.get(argument.name)
                for argument in func._schema.arguments
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            with without_modes():
                for tensor in tree_leaves(written):
                    if isinstance(tensor, Tensor) and id(tensor) not in self.saved:
                        self.saved[id(tensor)] = tensor, tensor.detach().clone()
        result = func(*args, **(kwargs or {}))
        if self.methods.stops and func is torch.ops.aten.detach.default:
            self.constants.append(torch.ops.aten.alias.default(result))
        return result

    def put_back(self) -> None:
        """Restore the tensors that were changed in place."""
        for tensor, value in reversed(self.saved.values()):
            if tensor.shape == value.shape:  # a reshaped tensor belongs to the run
                tensor.data.copy_(value)


def _users_line() -> str:
    """The line of the innermost frame outside libraries, as text."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_LIBRARIES):
            return f" in line {frame.lineno} of {Path(frame.filename).name}"
    return ""


def trace(function: Callable[..., Any], examples: Sequence[Tensor]) -> fx.GraphModule:
    """The graph of a function of tensors that returns a tuple of tensors.

    It is valid for the examples' shapes, strides, dtypes and devices. Tensors that are not
    arguments are its attributes (nodes ``get_attr``), not copied. The function runs once; its
    in-place changes are undone.

    :raises NotTraceable: if control flow or a shape depends on numbers that may be others in the
        next run: those of arguments, of parameters, random ones, those changed in place.
    """
    graph, places = record(function, examples)
    if any(tensor.grad_fn is not None for tensor in outside_tensors(graph).values()):
        raise NotTraceable(
            "it uses a tensor with a gradient that was computed outside: compute it in the program"
        )
    for node in graph.graph.nodes:
        if any(base(part).op == "placeholder" for part in changed(node)):
            raise NotTraceable(f"it changes an argument in place ({node.target})", str(node.target))
    refuse_reads(graph, variable_nodes(graph), places)
    return graph


def record(
    function: Callable[..., Any],
    examples: Sequence[Tensor],
    decompositions: Mapping[Any, Callable] | None = None,
    fake: FakeTensorMode | None = None,
    *,
    marks_constants: bool = False,
) -> tuple[fx.GraphModule, list[str]]:
    """Run a function once and return its operators as a graph, without checks of reads and changes.

    :param decompositions: operators to be replaced by simpler ones, as in ``make_fx``.
    :param fake: the mode of the examples, if these are fake tensors, which hold no numbers.
    :param marks_constants: put a ``detach`` behind functions under ``torch.no_grad``.
    :returns: the graph, and the lines of the user's files that read values of tensors.
    """
    methods = _Methods(marks_constants)
    outside = _Outside(methods)

    def followed(*tensors: Tensor) -> Any:
        with methods, outside:
            return function(*tensors), outside.constants

    try:
        graph = operators_of(followed, examples, decompositions, fake)
        _let_gradients_through(graph, kept=not methods.differentiates)
        return graph, methods.places
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        place = methods.places[-1] if methods.places else ""
        raise NotTraceable(
            f"it reads numbers that change from step to step{place}, as control flow does",
            str(error.func),
        ) from error
    finally:
        outside.put_back()


def _let_gradients_through(graph: fx.GraphModule, *, kept: bool) -> None:
    """Take the user's constants off the results of a graph, and remove every other ``detach``.

    :param kept: leave them, since ``torch.autograd.grad``, which makes them, was not called.
    """
    output = graph.graph.output_node()
    returned: Any = output.args[0]
    results, aliases = returned
    output.args = (results,)
    stopped = set[fx.Node]()
    for alias in aliases:
        stopped.update(alias.all_input_nodes)
        if not alias.users:
            graph.graph.erase_node(alias)
    if not kept:
        for node in graph.graph.find_nodes(
            op="call_function", target=torch.ops.aten.detach.default
        ):
            if node not in stopped:
                node.replace_all_uses_with(node.all_input_nodes[0])
                graph.graph.erase_node(node)
    graph.recompile()


def operators_of(
    function: Callable[..., Any],
    examples: Sequence[Tensor],
    decompositions: Mapping[Any, Callable] | None = None,
    fake: FakeTensorMode | None = None,
) -> fx.GraphModule:
    """``make_fx`` in less than half the time, with reads of values in the graph.

    The graph describes each result by a fake tensor. In a tracing context all are of one
    ``FakeTensorMode``; without it torch makes a mode for each operator, and each new mode reads the
    source lines of the whole stack.
    """
    # Which reads of values are allowed is decided on the complete graph.
    make = make_fx(function, decompositions, _error_on_data_dependent_ops=False)  # type: ignore[arg-type]
    with tracing(TracingContext(fake or FakeTensorMode(allow_fallback_kernels=True))):
        return make(*examples)


def tensor_of(graph: fx.GraphModule, node: fx.Node) -> Tensor:
    """The outside tensor of a node ``get_attr``."""
    return getattr(graph, str(node.target))


def outside_tensors(graph: fx.GraphModule) -> dict[fx.Node, Tensor]:
    """The tensors that are not arguments, by node."""
    return {node: tensor_of(graph, node) for node in graph.graph.find_nodes(op="get_attr")}


def changed_tensors(graph: fx.GraphModule) -> set[Tensor]:
    """The outside tensors that the graph changes in place."""
    parts = (base(part) for node in graph.graph.nodes for part in changed(node))
    return {tensor_of(graph, node) for node in parts if node.op == "get_attr"}


def variable_nodes(graph: fx.GraphModule) -> set[fx.Node]:
    """The nodes whose values may differ between runs: arguments, parameters, random numbers and
    outside tensors that are changed in place."""
    written, tensors = changed_tensors(graph), outside_tensors(graph).items()
    found = {node for node in graph.graph.nodes if node.op == "placeholder" or is_random(node)}
    return found | {
        node
        for node, tensor in tensors
        if tensor.requires_grad or isinstance(tensor, torch.nn.Parameter) or tensor in written
    }


def refuse_reads(
    graph: fx.GraphModule, variable: Iterable[fx.Node], places: Sequence[str] = ()
) -> None:
    """Refuse control flow and shapes that depend on values that may differ in the next run.

    :param variable: the nodes of such values.
    :param places: the lines that read values, from ``record``.
    :raises NotTraceable: naming the operator.
    """
    live = set(reached(graph.graph, variable))
    nodes = graph.graph.nodes
    readers = [node for node in nodes if tagged(node, torch.Tag.data_dependent_output)]
    for number, node in enumerate(readers):
        if live.intersection(node.all_input_nodes):
            place = places[number] if len(places) == len(readers) else ""
            raise NotTraceable(
                f"it reads numbers that change from step to step{place}, as control flow does",
                str(node.target),
            )
    for node in graph.graph.nodes:
        if live.intersection(node.all_input_nodes) and _shape_varies(node, live):
            raise NotTraceable(
                f"the shape of a tensor depends on numbers that change from step to step "
                f"({node.target})",
                str(node.target),
            )


def _shape_varies(node: fx.Node, live: set[fx.Node]) -> bool:
    if node.target is operator.getitem or not tagged(node, torch.Tag.dynamic_output_shape):
        return False
    if name_of(node) not in ("index", "masked_select"):
        return True
    indices = [n for n in node.all_input_nodes[1:] if n in live]
    return any(n.meta["val"].dtype in (torch.bool, torch.uint8) for n in indices)


# ------------------------------------------------------------- pure functions, for translations


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Turn oneDNN off; ``torch.backends.mkldnn.flags`` warns about GPUs that are not there."""
    backend: Any = torch.backends.mkldnn
    enabled, backend.enabled = backend.enabled, False
    try:
        yield
    finally:
        backend.enabled = enabled


@contextmanager
def plain_torch() -> Iterator[None]:
    """Run without gradients, fused kernels and validation, which hide values from a trace or branch
    on them."""
    with (
        torch.no_grad(),
        vmappable(),
        _without_onednn(),
        torch.backends.cudnn.flags(enabled=False),
        torch.backends.nnpack.flags(enabled=False),  # which is chosen by the number of rows
        pyro.validation_enabled(False),
    ):
        yield


def trace_pure(
    function: Callable,
    examples: Sequence[Tensor],
    decompositions: Mapping[Any, Callable] | None = None,
    fake: FakeTensorMode | None = None,
    *,
    differentiable: bool = False,
) -> fx.GraphModule:
    """The graph of a pure function of tensors, without operators that change a tensor in place.

    It is valid for the shapes and dtypes of the examples. Tensors that are not arguments are
    constants (nodes ``get_attr``), including parameters. Validation, fused attention and oneDNN are
    off while tracing and restored afterwards.

    :param function: returns a pytree of tensors.
    :param decompositions: operators to be replaced by simpler ones, as in ``make_fx``.
    :param fake: the mode of the examples, if these are fake tensors, which hold no numbers.
    :param differentiable: run the function with gradients enabled, as training does, and detach
        what it computes without them.
    :raises NotTraceable: if control flow or a shape depends on the arguments, on random numbers, or
        on parameters of a ``differentiable`` function, or if the function changes a tensor in place
        that it did not make.
    """
    examples = [example.detach() for example in examples]
    with plain_torch():
        with torch.set_grad_enabled(differentiable):
            graph, places = record(
                function, examples, decompositions, fake, marks_constants=differentiable
            )
        _follow_changes_of_data(graph)
        variable = variable_nodes(graph)
        if not differentiable:  # parameters are constants
            variable -= outside_tensors(graph).keys()
        refuse_reads(graph, variable, places)
        graph.graph.eliminate_dead_code(lambda node: is_border(node) or bool(changed(node)))
        for node in graph.graph.nodes:
            if any(base(part).op in ("placeholder", "get_attr") for part in changed(node)):
                raise NotTraceable(
                    "it changes a tensor that it did not make, in place (a module in train mode?)",
                    str(node.target),
                )
        if any(map(changed, graph.graph.nodes)):
            graph = _functional(graph, examples, decompositions, fake)
    graph.graph.eliminate_dead_code(is_border)
    graph.recompile()
    return graph


def _follow_changes_of_data(graph: fx.GraphModule) -> None:
    """Let what is added in place through ``.data`` be added to the tensor itself, which has its
    gradient; of other changes a graph without operators in place has none.

    :raises NotTraceable: for another change.
    """
    for node in graph.graph.nodes:
        for part in changed(node):
            while part.target is not torch.ops.aten.detach.default and part is not base(part):
                part = part.all_input_nodes[0]
            if part.target is not torch.ops.aten.detach.default:
                continue
            if name_of(node) not in ("add_", "sub_"):
                raise NotTraceable("it changes a tensor in place by .data", str(node.target))
            part.replace_all_uses_with(part.all_input_nodes[0])


def _functional(
    graph: fx.GraphModule,
    examples: Sequence[Tensor],
    decompositions: Mapping[Any, Callable] | None,
    fake: FakeTensorMode | None,
) -> fx.GraphModule:
    """The graph without in-place operators; ``functionalize`` needs all tensors as inputs."""
    constants = lift(graph.graph, outside_tensors(graph)).values()
    graph.recompile()

    def run(*tensors: Tensor) -> Any:
        return graph(*tensors)

    functional = operators_of(
        torch.func.functionalize(run), [*examples, *constants], decompositions, fake
    )
    inputs = list(functional.graph.find_nodes(op="placeholder"))[len(examples) :]
    for number, (node, value) in enumerate(zip(inputs, constants, strict=True)):
        functional.register_buffer(f"constant_{number}", value)
        with functional.graph.inserting_before(node):
            node.replace_all_uses_with(functional.graph.get_attr(f"constant_{number}"))
        functional.graph.erase_node(node)
    return functional
