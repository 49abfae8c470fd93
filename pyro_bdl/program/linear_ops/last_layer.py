"""The last linear operation of a program, and where its output goes, by the operations themselves.

A program's last layer is the last product (or convolution) that a latent enters as the weight, with
the biases that are added to its output. ``LastLayer`` finds it while the program runs, and follows
the output z: a tensor that holds numbers of z, or numbers that are each a known function of one
number of z, stays known; whatever else is computed from z is ``Path.MIXED``.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyro_bdl.program.linear_ops.recognize import FUNCTIONS, AffineOp, recognize
from pyro_bdl.program.linear_ops.tracker import Tag, Tracker, returns_values
from pyro_bdl.program.vmap import InsideAnotherMapError, without_map
from pyro_bdl.utils.autograd import is_transformed, reaches
from pyro_bdl.utils.trees import tensors_in, tree_leaves, tree_map


class Path(IntEnum):
    """What a tensor's numbers are of an output z.

    Up to AFFINE, and for EXP and CURVED, each is a function of one number of z: itself, plus a
    constant, affine, exp of an affine one, another function. LOGITS are z but for a number for all
    classes. LINEAR are affine in several numbers. MIXED is anything else.
    """

    SAME = 0
    SHIFTED = 1
    AFFINE = 2
    LOGITS = 3
    LINEAR = 4
    EXP = 5
    CURVED = 6
    MIXED = 7

    @property
    def is_linear(self) -> bool:
        return self in (Path.SAME, Path.SHIFTED, Path.AFFINE, Path.LINEAR)

    @property
    def is_alone(self) -> bool:
        """True if each number depends on one number of z."""
        return self in (Path.SAME, Path.SHIFTED, Path.AFFINE, Path.EXP, Path.CURVED)


@dataclass
class OutputTag(Tag):
    """A tensor that is computed from an output z, which is ``root``.

    :param steps: the operations on the way, with their arguments but tensors.
    :param by_data: whether a tensor selects the numbers, so that other data select others.
    :param normalizes: for the log of the sum of exp over all classes, the tensor of these.
    """

    path: Path = Path.SAME
    steps: tuple[str, ...] = ()
    by_data: bool = False
    normalizes: Tensor | None = None

    @property
    def is_complete(self) -> bool:
        """True if the tensor has a number for each one of z, in their order."""
        if self.by_data or self.tensor.numel() != self.root.numel():
            return False
        every = torch.arange(self.root.numel(), device=self.root.device)
        return torch.equal(self.index().reshape(-1), every)


@dataclass
class Term:
    """A product with a weight, or a bias, in a layer's output.

    :param op: the operation; ``tag``: the view of the latent in it.
    :param output: the operation's result.
    :param is_first: whether the latent had no use before.
    """

    site: str
    op: AffineOp
    tag: Tag
    output: Tensor
    is_bias: bool
    is_first: bool

    @property
    def inputs(self) -> Tensor | None:
        """a of a product a w', (..., in); None for a bias."""
        return None if self.is_bias else self.op.rows()

    @property
    def where(self) -> Tensor:
        """The entries of the flattened site that w holds, (K, in), or (K, 1) for a bias."""
        index = self.tag.index()
        return index.reshape(-1, 1) if self.is_bias else self.op.as_matrix(index)


@dataclass
class Layer:
    """A linear operation with its biases, and its output z.

    :ivar outside: z outside of a map over rows, with its graph; None in a transform of the
        program's own, after which z is no tensor any more.
    """

    terms: list[Term]
    output: Tensor
    outside: Tensor | None = None

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(term.site for term in self.terms))

    @property
    def outputs(self) -> int:
        """The number of outputs K, or of a convolution's channels."""
        op = self.terms[0].op
        return len(op.as_matrix(op.weight) if op.kind == "product" else op.weight)

    def as_rows(self, values: Tensor) -> Tensor:
        """Values of the output's shape as (rows, outputs), of a convolution with a row for each
        position."""
        op = self.terms[0].op
        if op.kind == "convolution":
            positions = values.dim() - op.weight.dim() + 2
            return values.flatten(positions).mT.flatten(0, -2)
        return op.permute_output(values).reshape(-1, self.outputs)


_IN_PLACE = {"__setitem__"} | {
    f"__i{name}__"
    for name in (
        "add", "sub", "mul", "truediv", "floordiv", "div", "mod", "pow", "and", "or", "xor",
        "lshift", "rshift", "matmul",
    )
}  # fmt: skip
_LIKE = {"to", "type_as", "expand_as", "view_as", "reshape_as"}  # the second one is a pattern
_EXPANSIONS = {"expand", "expand_as", "broadcast_to"}
_SELECTIONS = {"gather", "index_select", "take_along_dim", "diagonal"}
_EXP = {torch.exp, Tensor.exp}
# Functions of each number alone, as the ready-made programs have them for rates and scales.
_KNOWN = _EXP | {F.softplus}
_NEGATIONS = {torch.neg, torch.negative, Tensor.neg, Tensor.negative, Tensor.__neg__}
_QUOTIENTS = {torch.div, torch.true_divide, Tensor.div, Tensor.true_divide, Tensor.__truediv__}
_DIFFERENCES = {torch.sub, torch.subtract, Tensor.sub, Tensor.subtract, Tensor.__sub__}
_SUMS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__} | _DIFFERENCES
_LINEAR = _SUMS | {
    torch.stack, torch.cat, torch.concat, torch.sum, torch.mean, Tensor.sum, Tensor.mean,
}  # fmt: skip
_LOG_SUM_EXP = {torch.logsumexp, Tensor.logsumexp}
_LOG_SOFTMAX = {torch.log_softmax, Tensor.log_softmax, F.log_softmax}


class LastLayer(Tracker):
    """Tracker of the linear operations that latents enter, and of what their outputs become.

    :param latents: site -> the same tensor objects that the program gets.
    :param change: called with each product; what it returns is added to its output.
    :param functions: torch's functions, besides exp and softplus, that act on each number alone.
    :param lane: a number of the row, inside a map over rows (``program/rows.py``).
    :ivar layers: the operations in their order; the last one is the last layer.
    :ivar others: the sites that entered other operations, with one of these.
    :ivar deep: whether inputs of an operation are computed from the output of an earlier one.
    :ivar left: the operation by which numbers of an output left the tensors, or were changed in
        place, so that no output is known; None else.
    """

    def __init__(
        self,
        latents: Mapping[str, Tensor],
        change: Callable[[Term], Tensor] | None = None,
        functions: Iterable[Callable] = (),
        lane: Tensor | None = None,
    ) -> None:
        super().__init__(latents)
        self.change, self.lane = change, lane
        self.functions = _KNOWN | set(functions)
        self.layers: list[Layer] = []
        self.others: dict[str, str] = {}
        self._used: set[str] = set()
        self.deep = False
        self.left: str | None = None

    @property
    def output(self) -> Tensor:
        """z of the last layer."""
        return self.layers[-1].output

    def is_latent(self, value: Any) -> bool:
        return not isinstance(self.tag(value), OutputTag | None)

    def output_tag(self, value: Any) -> OutputTag | None:
        """What a tensor is of an output; None for one that no operation has made from it.

        A custom ``autograd.Function`` is no operation that a mode sees: its result is MIXED if it
        has a gradient.
        """
        tag = self.tag(value)
        if isinstance(tag, OutputTag):
            return tag
        if tag is not None:
            return OutputTag(tag.site, tag.root, value, path=Path.MIXED)
        if isinstance(value, Tensor) and self._reached_by(value):
            return OutputTag("", value, value, path=Path.MIXED)
        return None

    def _reached_by(self, value: Tensor) -> bool:
        """Return whether a tensor has an output in its graph."""
        if not self.layers or (self.lane is None and is_transformed()):
            return False
        found = self._outside(value)
        outputs = [layer.outside for layer in self.layers if layer.outside is not None]
        if found is None or len(outputs) < len(self.layers):  # no graph of its own
            return True
        return reaches(found, outputs)

    def _outside(self, value: Tensor) -> Tensor | None:
        """A tensor outside of the map over rows; None in a transform of the program's own."""
        try:
            return without_map(value, self.lane)
        except InsideAnotherMapError:
            return None

    # Operations

    def operate(self, func: Any, args: tuple, kwargs: dict, tagged: list[Tag]) -> Any:
        result = func(*args, **kwargs)
        if func is torch.broadcast_tensors:
            for number, argument in enumerate(args):
                self._tag_expanded(argument, result[number])
            return result
        name = func.__name__
        in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        is_pattern = name in _LIKE and bool(args) and self.tag(args[0]) is None
        if is_pattern or not (returns_values(func, result) or name == "__setitem__"):
            return result
        if in_place or "out" in kwargs or not tensors_in(result):
            self.left = name
        latents = [tag for tag in tagged if not isinstance(tag, OutputTag)]
        if latents:
            return self._enter(func, args, kwargs, latents, result)
        self._tag_results(func, args, kwargs, tagged, result)
        return result

    def _enter(self, func: Any, args: tuple, kwargs: dict, latents: list[Tag], result: Any) -> Any:
        """Take up an operation on latents."""
        op = recognize(func, args, kwargs, self.is_latent)
        terms = [] if op is None else self._terms(op, result)
        self._used |= {tag.site for tag in latents}
        entered = {id(term.tag) for term in terms}
        for tag in latents:
            if id(tag) not in entered:
                self.others[tag.site] = func.__name__
        if not terms:
            for output in tensors_in(result):
                self.tags[id(output)] = OutputTag("", output, output, path=Path.MIXED)
            return result
        if terms[0].is_bias:
            layer = self._layer_of(terms[0].op.inputs)
            assert layer is not None
            layer.terms += terms
        else:
            if self.change is not None:
                result = result + self.change(terms[0]).reshape(result.shape).to(result)
            self.deep = self.deep or self.output_tag(terms[0].op.inputs) is not None
            layer = Layer(terms, result)
            self.layers.append(layer)
        layer.output, layer.outside = result, self._outside(result)
        if layer.outside is None:
            self.left = func.__name__
        self.tags[id(result)] = OutputTag("", result, result)
        return result

    def _terms(self, op: AffineOp, result: Any) -> list[Term]:
        """A product with a latent and its bias, or a bias of a layer's output."""
        weight, bias = self.tag(op.weight), self.tag(op.bias)
        if not isinstance(result, Tensor):
            return []

        def term(tag: Tag, is_bias: bool) -> Term:
            return Term(tag.site, op, tag, result, is_bias, tag.site not in self._used)

        added = [] if bias is None else [term(bias, True)]
        if op.kind in ("product", "convolution"):
            is_weight = weight is not None and not isinstance(weight, OutputTag)
            if weight is None or not is_weight or self.is_latent(op.inputs):
                return []
            return [term(weight, False), *added]
        layer = self._layer_of(op.inputs) if op.kind == "addition" else None
        if layer is None or bias is None or not (op.is_plain and op.sign > 0):
            return []
        of_each = op.inputs is layer.output and bias.tensor.shape == result.shape[-1:]
        is_single = bias.tensor.numel() == 1
        fits = bias.tensor.numel() == layer.outputs and (of_each or is_single)
        return added if fits and result.shape == op.inputs.shape else []

    def _layer_of(self, value: Any) -> Layer | None:
        """The layer whose output a tensor is, or whose only output."""
        tag = self.tag(value)
        if not isinstance(tag, OutputTag) or tag.path is not Path.SAME:
            return None
        layer = next((layer for layer in self.layers if layer.output is tag.root), None)
        if layer is None or tag.tensor is tag.root:
            return layer
        return layer if tag.tensor.numel() == tag.root.numel() and not tag.by_data else None

    # Outputs

    def _is_view(self, func: Any, args: tuple, tagged: list[Tag]) -> bool:
        if super()._is_view(func, args, tagged):
            return True
        selects = getattr(func, "__name__", "") in _SELECTIONS
        is_single = len(tagged) == 1 and bool(args) and self.tag(args[0]) is tagged[0]
        return selects and is_single and isinstance(tagged[0], OutputTag)

    def _follow(self, func: Any, args: tuple, kwargs: dict) -> Any:
        result, source = super()._follow(func, args, kwargs), self.tag(args[0])
        if isinstance(source, OutputTag):
            step = _described(func, args, kwargs, source)
            others = tree_leaves((args[1:], kwargs))
            by_data = any(isinstance(leaf, Tensor) for leaf in others)
            for output in tensors_in(result):
                tag = self.tag(output)
                if not isinstance(tag, OutputTag) or output is args[0]:
                    continue
                rounded = output.dtype != source.tensor.dtype and not output.is_floating_point()
                tag.path = Path.MIXED if rounded else source.path
                if source.path is not Path.MIXED:  # whose last step is the one that mixed
                    tag.steps = (*source.steps, step)
                tag.by_data = source.by_data or by_data
        return result

    def _tag_expanded(self, value: Any, result: Tensor) -> None:
        tag = self.tag(value)
        if tag is not None and result is not value:
            view = _expanded(tag, result.shape)
            self.tags[id(result)] = replace(tag, tensor=result, view=view, whole=False)

    def _tag_results(
        self, func: Any, args: tuple, kwargs: dict, tagged: list[Tag], result: Any
    ) -> None:
        """Tag the results of an operation on outputs that is no view of them."""
        tags = [tag for tag in tagged if isinstance(tag, OutputTag)]
        first, path = tags[0], self._path(func, args, kwargs, tags)
        steps = tuple(step for tag in tags for step in tag.steps)
        for output in tensors_in(result):
            tag = OutputTag("", output, output, path=path)
            if path.is_alone or path is Path.LOGITS:
                # the same cells of z as the operand's, which a constant may have expanded
                view = _expanded(first, output.shape)
                tag = replace(first, tensor=output, path=path, view=view, whole=False)
            elif func in _LOG_SUM_EXP and _over_last(first.tensor, args, kwargs, keepdim=True):
                tag.normalizes = first.tensor
            known = first.path is not Path.MIXED
            tag.steps = (*steps, _described(func, args, kwargs, first)) if known else first.steps
            tag.by_data = any(other.by_data for other in tags)
            self.tags[id(output)] = tag

    def _path(self, func: Any, args: tuple, kwargs: dict, tags: list[OutputTag]) -> Path:
        """The tags of an operation's results."""
        first = tags[0]
        if len(tags) > 1:
            of_same = first.path in (Path.SAME, Path.LOGITS)
            is_log_softmax = func in _DIFFERENCES and tags[1].normalizes is first.tensor
            if of_same and is_log_softmax and len(args) == 2:
                return Path.LOGITS
        linear = all(tag.path.is_linear for tag in tags)
        if len(tags) > 1:
            return Path.LINEAR if linear and func in _LINEAR else Path.MIXED
        if func in _LOG_SOFTMAX:
            of_same = first.path in (Path.SAME, Path.LOGITS)
            return Path.LOGITS if of_same and _over_last(first.tensor, args, kwargs) else Path.MIXED
        if func in self.functions and first.path.is_alone:
            is_exp = func in _EXP and first.path.is_linear
            return Path.EXP if is_exp else Path.CURVED
        step = self._affine(func, args, kwargs, first)
        if step is None:
            return Path.LINEAR if linear and func in _LINEAR else Path.MIXED
        if linear:
            return max(step, first.path)
        return Path.CURVED if first.path.is_alone else Path.MIXED

    def _affine(self, func: Any, args: tuple, kwargs: dict, tag: OutputTag) -> Path | None:
        """SHIFTED or AFFINE for a sum with, or a multiple by, what no output has made."""
        if func in _NEGATIONS:
            return Path.AFFINE
        others = [leaf for leaf in tree_leaves((args, kwargs)) if leaf is not tag.tensor]
        if any(self.output_tag(leaf) is not None for leaf in others):
            return None
        if func in _QUOTIENTS:
            is_divided = args[0] is tag.tensor and not kwargs.get("rounding_mode")
            return Path.AFFINE if is_divided else None
        op = recognize(func, args, kwargs, lambda value: value is tag.tensor)
        if op is None:
            return None
        if op.kind == "addition" and op.bias is tag.tensor and op.inputs is not tag.tensor:
            is_shift = op.is_plain and op.sign > 0
            return Path.SHIFTED if is_shift else Path.AFFINE
        is_multiple = op.kind == "scale" and op.weight is tag.tensor
        return Path.AFFINE if is_multiple and func not in _NORMALIZATIONS else None


_NORMALIZATIONS = {F.layer_norm, F.rms_norm, F.group_norm, F.batch_norm}


class _Functions(TorchFunctionMode):
    """Mode that notes the functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[Callable] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if returns_values(func, result):
            self.called.append(func)
        return result


def functions_in(declared: Callable | Iterable[Callable]) -> tuple[Callable, ...]:
    """Torch's functions that functions of one tensor consist of.

    :param declared: one function or several, each of a tensor.
    """
    every = (declared,) if callable(declared) else tuple(declared)
    with _Functions() as seen:
        for function in every:
            function(torch.ones(1, device="cpu"))
    affine = FUNCTIONS | _NEGATIONS | _QUOTIENTS
    return tuple(function for function in dict.fromkeys(seen.called) if function not in affine)


def _expanded(tag: Tag, shape: torch.Size) -> Callable[[Tensor], Tensor]:
    """The view of a tag, expanded."""
    return lambda values: tag.of(values).expand(shape)


def _over_last(value: Tensor, args: tuple, kwargs: dict, *, keepdim: bool = False) -> bool:
    """Return whether a reduction is over the last dimension, which stays if ``keepdim``."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    keeps = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    is_last = isinstance(dim, int) and dim in (-1, value.dim() - 1)
    return is_last and (not keepdim or bool(keeps))


def _described(func: Any, args: tuple, kwargs: dict, tag: Tag) -> str:
    """A call without its tensors, and with "N" for the number of rows of its operand."""
    owner = getattr(getattr(func, "__self__", None), "__name__", "")  # of the properties T, mT
    if func.__name__ in _EXPANSIONS:
        return func.__name__
    rows = tag.tensor.shape[:1]

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return None
        return "N" if isinstance(leaf, int) and (leaf,) == rows else repr(leaf)

    return f"{owner}{func.__name__}{tree_map(plain, (args, kwargs))}"
