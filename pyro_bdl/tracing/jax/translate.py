"""Translation of a pure torch function to a pure JAX function, by a trace of ATen operators.

Tensors that the function closes over (data, parameters) become constants. Operations that depend
only on constants are computed once, in torch.
"""

import copy
import functools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.autograd.function import BackwardCFunction

from pyro_bdl.errors import MissingOperatorError
from pyro_bdl.tracing.graph import is_random
from pyro_bdl.tracing.jax.ops.registry import RANDOM, as_dtype, aten, cast, lookup
from pyro_bdl.tracing.simplify import LARGE
from pyro_bdl.tracing.trace import (
    NotTraceable,
    outside_tensors,
    plain_torch,
    tensor_of,
    trace_pure,
)
from pyro_bdl.utils.autograd import leaves_behind, nodes_behind
from pyro_bdl.utils.trees import tensors_in, tree_leaves

KEYS = "threefry2x32"  # 3,051 normal numbers take 23 us of a CPU, by "rbg" 101
_NONE: Mapping[Any, int] = {}
# Options of creation operators that concern memory: device, layout and the like.
LAYOUT = {"device", "layout", "pin_memory", "memory_format", "non_blocking", "generator"}
# operators for which torch has decompositions that are not used by default
DECOMPOSED = [
    aten.grid_sampler_2d, aten.upsample_bicubic2d, aten.dist, aten.ldexp, aten.bucketize,
    aten.leaky_relu, aten.gelu, aten._log_softmax, aten.native_layer_norm,
    aten.native_batch_norm, aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_no_training,
]  # fmt: skip
# Their decompositions are others: torch 2.13 counts places without a label, and at a margin of 0
# they have a gradient.
_OTHERS = {aten.multilabel_margin_loss_forward, aten.multi_margin_loss}


@functools.cache
def _decompositions() -> dict[Any, Callable]:
    """torch's decompositions of the operators that the table lacks."""
    table = {**core_aten_decompositions(), **get_decompositions(DECOMPOSED)}
    known = {op for op in table if lookup(op) or lookup(op, RANDOM)}
    known |= {op for op in table if op.overloadpacket in _OTHERS}
    missing = {op: rule for op, rule in table.items() if op not in known}
    return {**missing, aten.as_strided.default: _by_positions}


def _by_positions(
    x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """``torch.as_strided`` by indices, since arrays of JAX have no strides.

    torch itself calls it where images lie in memory with their channels last.
    """
    start = int(x.storage_offset())

    def positions(sizes: Sequence[int], strides: Sequence[int], first: int) -> np.ndarray:
        place = np.array(first)
        for count, step in zip(sizes, strides, strict=True):
            place = place[..., None] + step * np.arange(count)
        return place.ravel()

    own = positions(x.shape, x.stride(), start)
    wanted = positions(size, stride, start if storage_offset is None else storage_offset)
    if not np.isin(wanted, own).all():
        raise NotTraceable("reaches beyond its tensor", "aten.as_strided.default")
    order = own.argsort()
    index = order[np.searchsorted(own, wanted, sorter=order)]
    return x.reshape(-1)[torch.from_numpy(index)].reshape(size)


def _traced(function: Callable, examples: Sequence[Tensor], **options: Any) -> fx.GraphModule:
    """The graph of ATen operators, decomposed where the table lacks an operator."""
    try:
        return trace_pure(function, examples, _decompositions(), **options)
    except NotTraceable as error:
        message = f"{error.operator}: {error}."
        raise MissingOperatorError(message, op=error.operator) from error


# Translation ------------------------------------------------------------------------------------


def _call(node: fx.Node, values: dict[fx.Node, Any], key: Any = None) -> Any:
    """The result of one operator in JAX, with torch's dtype.

    :param key: of an operator that draws random numbers.
    """
    for n in node.all_input_nodes:
        if values[n] is None:
            source: Any = n.args[0]
            number = n.args[1]
            raise _missing([source], f"its result number {number} has no JAX translation.")
    args, kwargs = _replace((node.args, node.kwargs), values)
    kwargs = {name: value for name, value in kwargs.items() if name not in LAYOUT}
    expected = node.meta["val"]
    function: Any = node.target if node.target is operator.getitem else lookup(node.target)
    if key is not None:
        first = expected if isinstance(expected, Tensor) else expected[0]
        dtype = jax.dtypes.canonicalize_dtype(as_dtype(first))
        spec = jax.ShapeDtypeStruct(tuple(first.shape), dtype)
        drawn: Any = _random(node)
        function = functools.partial(drawn, key, spec)
    try:
        result = function(*args, **kwargs)
        if isinstance(expected, Tensor):
            return _like(expected, result)
        return [_like(*pair) for pair in zip(expected, result, strict=True)]
    except (NotImplementedError, TypeError, ValueError, IndexError) as error:
        reason = str(error).partition("\n")[0]
        raise _missing([node], f"cannot be translated as it is used: {reason}") from error


def _random(node: fx.Node) -> Callable | None:
    """The function of an operator that draws random numbers; None for any other."""
    return lookup(node.target, RANDOM) if is_random(node) else None


class _Constant(NamedTuple):
    """A constant array; if all its entries are equal, only that value, since XLA fuses the
    broadcast."""

    value: np.ndarray
    shape: tuple[int, ...]


class JaxFunction:
    """A torch function in JAX, see :func:`to_jax`.

    :ivar pure: (constants, *arguments) to the results; it holds no constants itself.
    :ivar operators: the operators of ATen in it.
    :ivar signature: two functions with the same signature differ in their constants alone.
    :ivar wide: whether it needs 64 bits, though its arguments have 32.
    """

    def __init__(self, translated: "_Translation") -> None:
        function, self._numbers = translated.function, translated.constants
        self.pure = lambda constants, *arguments: function((), constants, None, *arguments)
        self.operators, self.signature = translated.operators, translated.signature
        self.wide = translated.wide
        self._constants: dict[bool, list[jax.Array]] = {}

    def __call__(self, *arguments: jax.Array) -> Any:
        if self.wide and not jax.config.read("jax_enable_x64"):
            raise TypeError(
                "The function computes numbers of 64 bits, which JAX has only under "
                "jax.enable_x64(True): call it there."
            )
        return self.pure(self.constants(), *arguments)

    def in_double(self) -> "JaxFunction":
        """The same function of numbers in double precision, which it rounds to those that it
        takes."""
        other, pure = copy.copy(self), self.pure

        def rounding(constants: list, *arguments: Any) -> Any:
            results = pure(constants, *(a.astype(jnp.float32) for a in arguments))
            return jax.tree.map(lambda value: value.astype(jnp.float64), results)

        other.pure, other.signature = rounding, f"in double: {self.signature}"
        return other

    def constants(self) -> list[jax.Array]:
        """The constants that the function closes over, in the present precision."""
        x64 = bool(jax.config.read("jax_enable_x64"))
        if x64 not in self._constants:
            with jax.ensure_compile_time_eval():
                self._constants[x64] = [jnp.asarray(number) for number in self._numbers]
        return self._constants[x64]


def to_jax(function: Callable, example: Tensor, *more_examples: Tensor) -> JaxFunction:
    """The JAX version of a pure torch function of tensors that returns a pytree of tensors.

    It takes arrays with the examples' shapes and dtypes and can be jitted, differentiated and
    mapped. Call it under ``jax.enable_x64(True)`` for float64, and where it computes numbers in
    float64 or integers that 32 bits do not hold.

    :param function: the torch function.
    :param example: a tensor with the shape and dtype of the first argument.
    :param more_examples: tensors for the other arguments.
    :raises MissingOperatorError: at this call, if an operator has no translation.
    """
    examples = (example, *more_examples)
    graph = _traced(function, examples)
    _refuse_randomness(graph)
    result = JaxFunction(_translation(graph, examples))
    with jax.enable_x64(result.wide or any(e.dtype == torch.float64 for e in examples)):
        jax.eval_shape(result, *map(_spec, examples))
    return result


class JaxLoss(NamedTuple):
    """A loss in JAX.

    :param function: ``(parameters, constants, key, *arguments)`` to the results of the torch
        function: lists of arrays, a key of ``jax.random``, and arrays.
    :param constants: what the loss reads besides its arguments and parameters.
    :param signature: two losses with the same signature have the same function.
    :param operators: the operators of ATen in it.
    :param double: whether it computes in 64 bits, integers included, under
        ``jax.enable_x64(True)``.
    :param parameters: the tensors that have a gradient, in the order of the arrays.
    """

    function: Callable[..., Any]
    constants: list[np.ndarray]
    signature: str
    operators: frozenset[Any]
    double: bool
    parameters: list[Tensor]


def loss_to_jax(
    loss: Callable[..., Any], parameters: Sequence[Tensor], examples: Sequence[Tensor]
) -> JaxLoss:
    """The JAX version of a torch loss that draws random numbers, to be differentiated in JAX.

    The parameters are recognized in the graph by identity, and are those that torch's ``backward``
    would give a gradient. Everything else that the loss reads and does not get as an argument is a
    constant. Blocks under ``torch.no_grad`` have no gradient here
    either.

    :param loss: of tensors; its first result is differentiated.
    :param parameters: leaves that ``loss`` reads.
    :param examples: of its arguments.
    :raises MissingOperatorError: for an operator without translation, or a custom gradient.
    """

    def function(*tensors: Tensor) -> Any:
        results = loss(*tensors)
        first = tree_leaves(results)[0]
        _refuse_custom_gradients(first)
        behind.extend(leaves_behind(first))
        return results

    behind: list[Tensor] = []
    graph = _traced(function, examples, differentiable=True)
    tensors = outside_tensors(graph)
    used = [p for p in parameters if any(leaf is p for leaf in behind)]
    number = {id(parameter): i for i, parameter in enumerate(used)}
    leaves = {node: number[id(t)] for node, t in tensors.items() if id(t) in number}
    translated = _translation(graph, examples, leaves, draws=True)
    with jax.enable_x64(translated.double):
        key = jax.eval_shape(lambda: jax.random.key(0, impl=KEYS))
        parts = list(map(_spec, used)), translated.constants, key, *map(_spec, examples)
        jax.eval_shape(translated.function, *parts)
    return JaxLoss(*translated[:-1], used)


def _spec(tensor: Tensor) -> jax.ShapeDtypeStruct:
    dtype = jax.dtypes.canonicalize_dtype(as_dtype(tensor))
    return jax.ShapeDtypeStruct(tuple(tensor.shape), dtype)


class _Translation(NamedTuple):
    """A graph in JAX, see :class:`JaxLoss`."""

    function: Callable[..., Any]
    constants: list[np.ndarray]
    signature: str
    operators: frozenset[Any]
    double: bool
    wide: bool


def _translation(
    graph: fx.GraphModule,
    examples: Sequence[Tensor],
    leaves: Mapping[fx.Node, int] = _NONE,
    *,
    draws: bool = False,
) -> _Translation:
    """A graph as a function of parameters, constants, a key and arguments.

    :param leaves: the nodes that are parameters, each with its number.
    :param draws: let operators draw random numbers.
    """
    known = _known(graph, leaves)
    for node in outside_tensors(graph):  # what follows needs the nodes, not the tensors
        if hasattr(graph, str(node.target)):
            delattr(graph, str(node.target))
    examples = [example.detach().to("meta") for example in examples]
    operators = [n for n in graph.graph.nodes if n.op == "call_function" and n not in known]
    _refuse_unknown(operators)
    drawing = [node for node in operators if draws and _random(node)]
    places = {node: i for i, node in enumerate(drawing)}
    inputs = list(graph.graph.find_nodes(op="placeholder"))
    output = graph.graph.output_node()
    used = {n for user in (*operators, output) for n in user.all_input_nodes}
    index, constants = _constants({node: known[node] for node in known if node in used})
    # Integers may be indices or masks, which must stay concrete under jit.
    moving = [i for i, c in enumerate(constants) if np.issubdtype(c.value.dtype, np.inexact)]
    still = {i: c.value for i, c in enumerate(constants) if i not in moving}
    shapes = [constant.shape for constant in constants]

    def evaluate(
        parameters: Sequence[jax.Array], held: Sequence[jax.Array], key: Any, *arguments: jax.Array
    ) -> Any:
        _check(arguments, examples)
        values: dict[fx.Node, Any] = dict(zip(inputs, arguments, strict=True))
        values |= {node: parameters[i] for node, i in leaves.items()}
        with jax.ensure_compile_time_eval():
            arrays = {i: jnp.asarray(value) for i, value in still.items()}
        arrays |= zip(moving, held, strict=True)
        for node, i in index.items():
            shape, value = shapes[i], arrays[i]
            values[node] = value if value.shape == shape else jnp.broadcast_to(value, shape)
        keys = jax.random.split(key, len(places)) if places else ()
        for node in operators:
            values[node] = _call(node, values, keys[places[node]] if node in places else None)
        return _replace(output.args[0], values)

    kinds = [(str(n), _kind(n)) for n in graph.graph.nodes]
    numbers = {str(node): i for node, i in (*leaves.items(), *index.items())}
    integers = {i: (str(value.dtype), value.tobytes()) for i, value in still.items()}
    signature = repr((str(graph.graph), kinds, numbers, shapes, integers, moving))
    called = frozenset(node.target for node in operators)
    double = any("torch.float64" in str(kind) or "torch.int64" in str(kind) for _, kind in kinds)
    of_double = any(example.dtype == torch.float64 for example in examples)
    wide = (
        double
        and not of_double
        and _is_wide([*inputs, *operators], {n: constants[i] for n, i in index.items()})
    )
    held = [constants[i].value for i in moving]
    return _Translation(evaluate, held, signature, called, double, wide)


def _kind(node: fx.Node) -> Any:
    """The shapes and dtypes of a node's results."""
    return [(tuple(v.shape), str(v.dtype)) for v in _tensors(node)]


_INT32, _ARGUMENT = 2**31 - 1, 2**30  # the largest sizes of integers in 32 bits, of arguments
_ADDED = {aten.sum, aten.cumsum, aten.scatter_add, aten.scatter_reduce, aten.index_put, aten.put}
_UNBOUNDED = {aten.pow, aten.prod, aten.cumprod, aten._to_copy}


def _is_wide(nodes: Sequence[fx.Node], constants: dict[fx.Node, _Constant]) -> bool:
    """Return whether results are in float64 or complex128, or integers that may exceed 32 bits, by
    the bounds of what they are computed of.

    :param nodes: arguments and operators, in order.
    """
    bounds: dict[Any, float] = {}
    for node, constant in constants.items():
        if constant.value.dtype.kind in "iub" and constant.value.size:
            bounds[node] = max(abs(int(constant.value.max())), abs(int(constant.value.min())))
    for node in nodes:
        results = _tensors(node)
        if node.op == "call_function" and any(
            v.dtype in (torch.float64, torch.complex128) for v in results
        ):
            return True
        bounds[node] = _bound(node, bounds, results)
    return any(bound > _INT32 for bound in bounds.values())


def _bound(node: fx.Node, bounds: Mapping[Any, float], results: Sequence[Tensor]) -> float:
    """A bound of the integers that a node gives."""
    if not any(v.dtype == torch.int64 for v in results):
        return 1 if all(v.dtype == torch.bool for v in results) else _ARGUMENT
    if node.op == "placeholder":
        return _ARGUMENT
    sources = [n for n in node.all_input_nodes if not _is_floating(n)]
    numbers = [
        bounds.get(a, 0) if isinstance(a, fx.Node) else abs(a) if isinstance(a, int) else 0
        for a in node.args
    ]
    first, second, _, fourth = (*numbers, 0, 0, 0, 0)[:4]
    count = max((v.numel() for n in node.all_input_nodes for v in _tensors(n)), default=1)
    match getattr(node.target, "overloadpacket", node.target):
        case aten.add | aten.sub:
            alpha: Any = node.kwargs.get("alpha", 1)
            return first + second * abs(alpha)
        case aten.mul:
            return first * second
        case aten.remainder | aten.fmod:
            return second
        case aten.gather | aten.index | aten.index_select | aten.embedding:
            return first
        case aten.scatter:
            return max(first, fourth)
        case packet if packet in _UNBOUNDED:
            return math.inf if packet is not aten._to_copy or not sources else bounds[sources[0]]
        case packet if packet in _ADDED:
            return sum(bounds.get(n, 0) for n in sources) * count
        case aten.full_like:
            return second
        case aten.clamp:
            return max(numbers)
    return max([count, *(bounds.get(n, 0) for n in sources)])


def _tensors(node: fx.Node) -> list[Tensor]:
    return tensors_in(node.meta.get("val"))


def _is_floating(node: fx.Node) -> bool:
    return all(v.is_floating_point() for v in _tensors(node))


def _replace(structure: Any, values: dict[fx.Node, Any]) -> Any:
    """Replace nodes by their values, and fx's containers by plain ones, which JAX knows."""
    match structure:
        case fx.Node():
            return values[structure]
        case dict():
            return {key: _replace(value, values) for key, value in structure.items()}
        case list():
            return [_replace(value, values) for value in structure]
        case tuple():
            return tuple(_replace(value, values) for value in structure)
    return structure


def _like(expected: Tensor | None, result: Any) -> jax.Array | None:
    """Cast an operator's result to torch's dtype; None if the result is not used."""
    if expected is None or result is None:
        return None
    result = cast(result, expected)
    if result.shape != expected.shape:
        raise ValueError(f"its shape is {tuple(expected.shape)}, not {result.shape}")
    return result


def _check(arguments: Sequence[jax.Array], examples: Sequence[Tensor]) -> None:
    if len(arguments) != len(examples):
        raise TypeError(f"The function takes {len(examples)} arrays, not {len(arguments)}.")
    for argument, example in zip(arguments, examples, strict=True):
        if jnp.shape(argument) != example.shape:
            shape = tuple(example.shape)
            raise ValueError(f"The function takes shape {shape}, not {jnp.shape(argument)}.")
        expected = as_dtype(example)
        if not example.is_floating_point():
            expected = jax.dtypes.canonicalize_dtype(expected)  # 32 bits, but under x64
        if jnp.result_type(argument) != expected:
            hint = " (call it under jax.enable_x64(True))" if example.dtype == torch.float64 else ""
            raise TypeError(
                f"The function takes {example.dtype}, not {jnp.result_type(argument)}{hint}."
            )


# Constants --------------------------------------------------------------------------------------


def _known(graph: fx.GraphModule, leaves: Collection[fx.Node]) -> dict[fx.Node, Any]:
    """The values of the nodes that depend neither on an argument nor on a parameter."""
    known: dict[fx.Node, Any] = {}
    with plain_torch():
        for node in graph.graph.nodes:
            if node.op == "get_attr" and node not in leaves:
                known[node] = tensor_of(graph, node)
            elif _foldable(node, known):
                value = node.target(*_replace(node.args, known), **_replace(node.kwargs, known))
                sources = [known[n] for n in node.all_input_nodes]
                if not sources or _size(value) <= max(LARGE, sum(map(_size, sources))):
                    known[node] = value
    return known


def _foldable(node: fx.Node, known: dict[fx.Node, Any]) -> bool:
    if node.op != "call_function" or is_random(node):
        return False
    return known.keys() >= set(node.all_input_nodes)


def _size(value: Any) -> int:
    return value.numel() if isinstance(value, Tensor) else sum(map(_size, value))


def _constants(tensors: dict[fx.Node, Tensor]) -> tuple[dict[fx.Node, int], list[_Constant]]:
    """For each node its position in the list of distinct constants; and that list."""
    constants: dict[Any, tuple[int, _Constant]] = {}
    index = {}
    for node, tensor in tensors.items():
        array = _numpy(tensor)
        filled = tensor.is_floating_point() and array.size > 1 and (array == array.flat[0]).all()
        constant = _Constant(array.flat[0] if filled else array, array.shape)
        key = array.dtype, array.shape, constant.value.tobytes()
        index[node], _ = constants.setdefault(key, (len(constants), constant))
    return index, [constant for _, constant in constants.values()]


def _numpy(tensor: Tensor) -> np.ndarray:
    """Copy a tensor to numpy: the program's tensors may change later."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().copy().view(jnp.bfloat16)
    return tensor.numpy().copy()


# Errors -----------------------------------------------------------------------------------------


def _missing(nodes: Sequence[fx.Node], what: str) -> MissingOperatorError:
    names = list(dict.fromkeys(str(node.target) for node in nodes))
    return MissingOperatorError(f"{', '.join(names)}: {what}", op=names[0])


def _refuse_randomness(graph: fx.GraphModule) -> None:
    for node in graph.graph.nodes:
        if is_random(node) and lookup(node.target) is None:
            what = "draws random numbers, but a density is a function (dropout in train mode?)."
            raise _missing([node], what)


def _refuse_custom_gradients(value: Tensor) -> None:
    """Refuse a gradient that is not that of the operators: a function with a ``backward`` of its
    own."""
    for node in nodes_behind(value):
        if isinstance(node, BackwardCFunction):
            name = type(node).__name__
            raise MissingOperatorError(f"{name}: has a gradient of its own in torch.", op=name)


def _refuse_unknown(nodes: Sequence[fx.Node]) -> None:
    unknown = [
        n for n in nodes if not (_random(n) or lookup(n.target) or n.target is operator.getitem)
    ]
    if unknown:
        raise _missing(unknown, "no JAX translation.")
