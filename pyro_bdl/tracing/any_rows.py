"""A graph of ATen operators that is valid for any number of rows of the data.

``require_any_rows`` proves that a function's operators are the same for all n >= 2 rows, and that
all its sizes are a n + b. ``trace_rows`` then needs the graphs of two sizes only.
"""

import builtins
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.overrides import TorchFunctionMode

from pyro_bdl.tracing.trace import NotTraceable, plain_torch, tensor_of, trace_pure
from pyro_bdl.utils.dispatch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
)
from pyro_bdl.utils.memory import stored_numbers
from pyro_bdl.utils.trees import tree_leaves

_SIZES = (3, 5)  # rows of the two graphs
_HINT = 61  # rows of the example for the proof, a size like any other
_SYMBOLS = (SymInt, SymFloat, SymBool)
_OF_VALUES = (
    GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException,
)  # fmt: skip
# what programs raise that cannot run with other numbers of rows than they were written for
NOT_WITH_OTHERS = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)


def _zeros(tangent: Tensor, like: Tensor, *, self_num_batch_dims: int = 0) -> Tensor:
    return like.new_zeros(tangent.shape[:self_num_batch_dims] + like.shape)


# what torch's jvp leaves in a graph, and exporters do not know
_PLAIN = {torch.ops.aten._new_zeros_with_same_feature_meta.default: _zeros}


# ------------------------------------------------------------------------------------ the proof


class _Symbolic(TorchDispatchMode):
    """Mode that runs operators of tensors or sizes with symbols on fake tensors, and all others as
    they are; each size must be a n + b."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        given = tree_leaves((args, kwargs or {}))
        if not any(isinstance(value, (FakeTensor, *_SYMBOLS)) for value in given):
            return func(*args, **(kwargs or {}))
        if torch.Tag.data_dependent_output in func.tags:
            raise NotTraceable("it reads numbers of a tensor with a row for each datum", str(func))
        with self.fake:
            result = func(*args, **(kwargs or {}))
        for value in [*given, *tree_leaves(result)]:
            # of sizes whose product is a n + b only one depends on n, and so all products are
            # (Pyro's deterministic value in a plate has n times the n numbers, and keeps n)
            size = stored_numbers(value) if isinstance(value, FakeTensor) else value
            if isinstance(size, _SYMBOLS) and not _is_multiple(size):
                raise NotTraceable(
                    f"a size in it, {_of_n(size)} for n rows, is not a n + b with fixed a and b",
                    str(func),
                )
        return result


class _Distances(TorchFunctionMode):
    """Mode in which ``torch.cdist`` does not choose its algorithm by the number of rows."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        if func is torch.cdist:
            mode = {"compute_mode": "donot_use_mm_for_euclid_dist"}
            return func(*args[:3], **(kwargs or {}) | mode)
        return func(*args, **(kwargs or {}))


def require_any_rows(function: Callable[..., Any], data: Sequence[Tensor]) -> None:
    """Check that a function runs the same operators for all numbers n >= 2 of rows of the data,
    with sizes a n + b.

    The function runs once on tensors without numbers, whose length is the symbol n. PyTorch
    records each comparison of sizes that is not the same for all n >= 2, and each size that is
    made a plain number.

    :param data: tensors with rows in front.
    :raises NotTraceable: otherwise.
    """
    sizes = ShapeEnv()
    mode = FakeTensorMode(shape_env=sizes, allow_non_fake_inputs=True, allow_fallback_kernels=True)
    examples = [_with_symbol(mode, value) for value in data]
    try:
        with (
            plain_torch(),
            _symbolic_len(),
            enable_python_dispatcher(),
            _Distances(),
            _Symbolic(mode),
        ):
            function(*examples)
    except _OF_VALUES as error:
        raise NotTraceable("a shape depends on numbers of a tensor with rows") from error
    except NOT_WITH_OTHERS as error:
        if not sizes.guards:
            raise NotTraceable(
                f"it fails for some numbers of rows ({_first_line(error)})"
            ) from error
    if sizes.guards:
        condition = _of_n(sizes.guards[0].expr)
        raise NotTraceable(f"what it computes depends on the number n of rows, by {condition}")


def _with_symbol(mode: FakeTensorMode, value: Tensor) -> Tensor:
    """A fake tensor like ``value`` with n rows; all data have the same n."""
    rest = [DimDynamic.STATIC for _ in value.shape[1:]]
    return mode.from_tensor(
        value.new_empty(_HINT, *value.shape[1:]),
        symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DUCK, *rest]),
    )


def _is_multiple(size: Any) -> bool:
    """Return whether a size is a n + b, or a number that is no size does not depend on n."""
    expression = size.node.expr
    if not expression.free_symbols:
        return True
    if not isinstance(size, SymInt) or not expression.is_polynomial(*expression.free_symbols):
        return False
    return expression.as_poly(*expression.free_symbols).total_degree() <= 1


def _of_n(expression: Any) -> str:
    """A size or a condition as text, with n for the number of rows."""
    expression = getattr(getattr(expression, "node", None), "expr", expression)
    return str(expression.subs({symbol: "n" for symbol in expression.free_symbols}))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


_one_proof = threading.Lock()


@contextmanager
def _symbolic_len() -> Iterator[None]:
    """Let ``len`` of a tensor be its symbol in this thread; Python itself makes a plain number of
    any length, also in ``torch.export``. In all other threads ``len`` is as before.
    """
    thread = threading.get_ident()

    def length(value: Any) -> Any:
        here = threading.get_ident() == thread and isinstance(value, Tensor) and value.dim()
        return value.shape[0] if here else plain(value)

    with _one_proof:
        plain, builtins.len = builtins.len, length  # type: ignore[assignment]
        try:
            yield
        finally:
            builtins.len = plain


# ------------------------------------------------------------------------------------ the graph


def trace_rows(
    function: Callable[..., Any], constant: Sequence[Tensor], data: Sequence[Tensor]
) -> fx.GraphModule:
    """The graph of ``function(*constant, *data)``, valid for any number n >= 2 of rows of data for
    which ``require_any_rows`` passes.

    The function is traced with 3 and with 5 rows. Both graphs must have the same operators; an
    integer in which they differ, a size or an index, is a n + b.

    :param data: tensors with rows in front, at least one tensor and one row.
    :raises NotTraceable: if the graphs differ otherwise.
    """
    graph, other = (
        _traced(function, constant, [of_length(value, count) for value in data], count)
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


def _traced(
    function: Callable[..., Any], constant: Sequence[Tensor], data: Sequence[Tensor], count: int
) -> fx.GraphModule:
    # tensors without numbers: the draws of all weights would each make all activations
    fake = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=True)
    try:
        return trace_pure(function, list(map(fake.from_tensor, [*constant, *data])), _PLAIN, fake)
    except NOT_WITH_OTHERS as error:
        raise NotTraceable(f"it fails with {count} rows ({_first_line(error)})") from error


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


def of_length(value: Tensor, count: int) -> Tensor:
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
