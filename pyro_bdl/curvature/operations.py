"""Where the latents of a program enter linear operations: one mode that sees them all.

``LinearOperations`` is a ``TorchFunctionMode``. While a program runs inside it, every operation
on a latent that is affine in it (products, convolutions, look-ups, norm scales, biases) is
recorded as a ``Use``: the gradient of any output in the latent is then the product of the use's
input a and the gradient g of its output z. Views of a latent are followed; a latent that enters
any other operation is listed in ``unmatched``.
"""

import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pyro_bdl.curvature.patches import patches


@dataclass
class Tag:
    """A tensor made of a latent's entries: the site, and which entries (None: all, in order)."""

    site: str
    indices: Tensor | None
    tensor: Tensor  # kept, so that its id stays its own

    def index(self) -> Tensor:
        """The entries' numbers in the flattened site, of the tensor's shape."""
        if self.indices is not None:
            return self.indices
        return torch.arange(self.tensor.numel(), device=self.tensor.device).view(self.tensor.shape)


@dataclass
class Use:
    """One affine use of a latent: z = op(a, w).

    ``edge`` is where autograd knows z. ``lead`` is how many leading dimensions of z (in the
    order of ``to_rows``) number rows; the remaining one numbers features.

    :param number: counts the uses of the site.
    :param kind: "product" for z = a w' (also convolutions, as products of patches; a is None for
        a bias, whose input is 1), "lookup" for rows of an embedding, "scale" for an elementwise
        multiple of w, broadcast to z.
    :param indices: which entries of the site the operation's weight holds, (groups, out, in) for a
        product, (rows, features) for a look-up, flat for a scale; None: all, in order.
    :param shape: the weight's shape in that form.
    :param inputs: a as given to the operation: (*lead, in), an image for a convolution, indices
        for a look-up (-1: none), the multiplier for a scale (None: 1).
    :param to_rows: brings z or its gradient to (*lead, features).
    :param unfold: brings the inputs, their datum axis first and their other axes flattened, to
        (n, T, groups, in); None for plain products.
    :param reduce_dims: for a scale, the dimensions of z over which w is broadcast.
    """

    site: str
    number: int
    kind: str
    indices: Tensor | None
    shape: torch.Size
    edge: GradientEdge
    output_shape: torch.Size
    inputs: Tensor | None
    to_rows: Callable[[Tensor], Tensor] | None = None
    unfold: Callable[[Tensor], Tensor] | None = None
    groups: int = 1
    reduce_dims: tuple[int, ...] = ()


_VIEWS = {
    "view", "reshape", "t", "transpose", "permute", "chunk", "split", "unbind", "__getitem__",
    "unsqueeze", "squeeze", "expand", "contiguous", "flatten", "unflatten", "narrow", "select",
    "swapaxes", "swapdims", "movedim", "moveaxis", "tensor_split", "view_as", "expand_as",
    "clone", "to", "float", "double", "bfloat16", "half", "broadcast_to", "split_with_sizes",
    "adjoint",
}  # fmt: skip
_VIEW_PROPERTIES = {torch.Tensor.T, torch.Tensor.mT}
_CASTS = {"to", "float", "double", "bfloat16", "half"}


def _body(function: Any) -> Callable:
    """A Python function of torch.nn.functional that does not offer itself to modes again, so
    that the operations inside it are seen."""
    scope = {**function.__globals__, "has_torch_function": lambda args: False}
    copied = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


_COMPOSITES = {F.multi_head_attention_forward: _body(F.multi_head_attention_forward)}


class LinearOperations(TorchFunctionMode):
    """Records the uses of latents while a program runs.

    :param latents: site -> the very tensors that the program gets.
    """

    def __init__(self, latents: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.tags = {id(value): Tag(name, None, value) for name, value in latents.items()}
        self.uses: list[Use] = []
        self._counts: Counter[str] = Counter()
        self.unmatched: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tags = self.tags
        tagged = [tags[id(leaf)] for leaf in tree_leaves((args, kwargs)) if id(leaf) in tags]
        if not tagged:
            return func(*args, **kwargs)
        if func in _COMPOSITES:
            with self:
                return _COMPOSITES[func](*args, **kwargs)
        result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not outputs or all(id(leaf) in tags for leaf in outputs):
            return result
        if self._is_view(func, args, tagged):
            self._follow(func, args, kwargs, outputs)
        elif not outputs[0].requires_grad:
            pass  # detached: nothing flows back through it
        else:
            seen = _record(func, args, kwargs, result, self)
            self.unmatched.update(tag.site for tag in tagged if id(tag.tensor) not in seen)
        return result

    def _is_view(self, func: Any, args: tuple, tagged: list[Tag]) -> bool:
        if len(tagged) != 1 or not args or id(args[0]) not in self.tags:
            return False
        name = getattr(func, "__name__", "")
        return name in _VIEWS or (
            name == "__get__" and getattr(func, "__self__", None) in _VIEW_PROPERTIES
        )

    def _follow(self, func: Any, args: tuple, kwargs: dict, outputs: list[Tensor]) -> None:
        tag = self.tags[id(args[0])]
        if func.__name__ in _CASTS:
            indices = [tag.indices]
        else:
            indices = [
                leaf
                for leaf in tree_leaves(func(tag.index(), *args[1:], **kwargs))
                if isinstance(leaf, Tensor)
            ]
        for output, index in zip(outputs, indices, strict=True):
            self.tags[id(output)] = Tag(tag.site, index, output)

    def tag(self, value: Any) -> Tag | None:
        return self.tags.get(id(value)) if isinstance(value, Tensor) else None

    def add(self, tag: Tag, kind: str, output: Tensor, **options: Any) -> None:
        self.uses.append(
            Use(
                site=tag.site,
                number=self._counts[tag.site],
                kind=kind,
                edge=get_gradient_edge(output),
                output_shape=output.shape,
                **options,
            )
        )
        self._counts[tag.site] += 1


def _record(func: Any, args: tuple, kwargs: dict, result: Any, mode: LinearOperations) -> set[int]:
    """Record the uses of one operation; returns the ids of the tensors that were understood."""
    handler = _HANDLERS.get(func)
    if handler is None or not isinstance(result, Tensor):
        return set()
    names, function = handler
    named = dict(zip(names, args, strict=False)) | kwargs
    return function(mode, named, result)


# ------------------------------------------------------------------------------- products


def _product(
    mode: LinearOperations,
    tag: Tag,
    output: Tensor,
    inputs: Tensor,
    *,
    transposed: bool = False,
    to_rows: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """z = a w' for w (out, in), or z = a w for w (in, out) where ``transposed``."""
    weight = tag.tensor
    out, into = weight.shape[::-1] if transposed else weight.shape
    indices = tag.indices
    if transposed:
        indices = tag.index().mT
    mode.add(
        tag,
        "product",
        output,
        indices=None if indices is None else indices.reshape(1, out, into),
        shape=torch.Size((1, out, into)),
        inputs=inputs.detach(),
        to_rows=to_rows,
    )


def _bias(
    mode: LinearOperations,
    tag: Tag,
    output: Tensor,
    to_rows: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """z = ... + b with b along the features."""
    size = tag.tensor.numel()
    mode.add(
        tag,
        "product",
        output,
        indices=None if tag.indices is None else tag.indices.reshape(1, size, 1),
        shape=torch.Size((1, size, 1)),
        inputs=None,
        to_rows=to_rows,
    )


def _linear(mode: LinearOperations, named: dict, output: Tensor) -> set[int]:
    inputs, seen = named["input"], set()
    weight, bias = mode.tag(named["weight"]), mode.tag(named.get("bias"))
    if weight and not mode.tag(inputs) and weight.tensor.dim() == 2:
        _product(mode, weight, output, inputs)
        seen.add(id(weight.tensor))
    if bias:
        _bias(mode, bias, output)
        seen.add(id(bias.tensor))
    return seen


def _matmul(mode: LinearOperations, named: dict, output: Tensor) -> set[int]:
    left, right = named["input"], named["other"]
    first, second = mode.tag(left), mode.tag(right)
    if (first and second) or not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return set()
    if second and right.dim() == 2 and left.dim() >= 2:
        _product(mode, second, output, left, transposed=True)
        return {id(right)}
    if first and left.dim() == 2 and right.dim() >= 2:
        _product(mode, first, output, right.mT, to_rows=lambda z: z.mT)
        return {id(left)}
    return set()


def _rmatmul(mode: LinearOperations, named: dict, output: Tensor) -> set[int]:
    return _matmul(mode, {"input": named["other"], "other": named["input"]}, output)


def _addmm(mode: LinearOperations, named: dict, output: Tensor) -> set[int]:
    if named.get("beta", 1) != 1 or named.get("alpha", 1) != 1:
        return set()
    seen = _matmul(mode, {"input": named["mat1"], "other": named["mat2"]}, output)
    bias = mode.tag(named["input"])
    if bias and bias.tensor.shape == output.shape[-1:]:
        _bias(mode, bias, output)
        seen.add(id(bias.tensor))
    return seen


# ------------------------------------------------------------------------------- convolutions


def _convolution(mode: LinearOperations, named: dict, output: Tensor) -> set[int]:
    inputs, weight = named["input"], named["weight"]
    spatial = weight.dim() - 2
    tag, bias, seen = mode.tag(weight), mode.tag(named.get("bias")), set()
    groups = named.get("groups", 1)
    if inputs.dim() != spatial + 2 or mode.tag(inputs):
        return set()

    def to_rows(z: Tensor) -> Tensor:  # (rows, channels, *positions) -> (rows, positions, channels)
        return z.flatten(2).mT

    if tag:
        settings = {
            "kernel": tuple(weight.shape[2:]),
            "stride": _spread(named.get("stride", 1), spatial),
            "dilation": _spread(named.get("dilation", 1), spatial),
            "padding": named.get("padding", 0),
            "groups": groups,
        }
        out, into = weight.shape[0] // groups, weight[0].numel()
        mode.add(
            tag,
            "product",
            output,
            indices=None if tag.indices is None else tag.indices.reshape(groups, out, into),
            shape=torch.Size((groups, out, into)),
            inputs=inputs.detach(),
            to_rows=to_rows,
            unfold=lambda a: patches(a, **settings),
            groups=groups,
        )
        seen.add(id(weight))
    if bias:
        _bias(mode, bias, output, to_rows)
        seen.add(id(bias.tensor))
    return seen


def _spread(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * (dims if len(value) == 1 else 1)


# ------------------------------------------------------------------------------- look-ups, scales


def _embedding(mode: LinearOperations, named: dict, output: Tensor) -> set[int]:
    tag = mode.tag(named["weight"])
    if not tag or named.get("max_norm") is not None or named.get("scale_grad_by_freq"):
        return set()
    inputs = named["input"]
    padding = named.get("padding_idx")
    if padding is not None:  # that row has no gradient, as in autograd
        inputs = inputs.masked_fill(inputs == padding % len(tag.tensor), -1)
    mode.add(
        tag, "lookup", output, indices=tag.indices, shape=tag.tensor.shape, inputs=inputs.detach()
    )
    return {id(tag.tensor)}


def _norm(mode: LinearOperations, named: dict, output: Tensor, plain: Callable, dim: int) -> set:
    """z = xhat * w + b, with w along dimension ``dim`` of z and the following ones."""
    seen: set[int] = set()
    weight, bias = mode.tag(named.get("weight")), mode.tag(named.get("bias"))
    if mode.tag(named["input"]):
        return seen
    if weight:
        with torch.no_grad():
            multiplier = plain(named)
        seen |= _scale(mode, weight, output, multiplier, dim)
    if bias:
        seen |= _scale(mode, bias, output, None, dim)
    return seen


def _scale(
    mode: LinearOperations, tag: Tag, output: Tensor, multiplier: Tensor | None, dim: int
) -> set[int]:
    """z = multiplier * w + ..., with the dimensions of w at ``dim`` of z and after."""
    start = dim % output.dim()
    shape = (1,) * start + tuple(tag.tensor.shape)
    shape += (1,) * (output.dim() - len(shape))
    reduce_dims = tuple(d for d, size in enumerate(shape) if size == 1)
    mode.add(
        tag,
        "scale",
        output,
        indices=None if tag.indices is None else tag.indices.reshape(-1),
        shape=torch.Size((tag.tensor.numel(),)),
        inputs=None if multiplier is None else multiplier.detach(),
        reduce_dims=reduce_dims,
    )
    return {id(tag.tensor)}


def _layer_norm(mode: LinearOperations, named: dict, output: Tensor) -> set[int]:
    def plain(n: dict) -> Tensor:
        return F.layer_norm(n["input"], n["normalized_shape"], None, None, n.get("eps", 1e-5))

    return _norm(mode, named, output, plain, -len(named["normalized_shape"]))


def _rms_norm(mode: LinearOperations, named: dict, output: Tensor) -> set[int]:
    def plain(n: dict) -> Tensor:
        return F.rms_norm(n["input"], n["normalized_shape"], None, n.get("eps"))

    return _norm(mode, named, output, plain, -len(named["normalized_shape"]))


def _group_norm(mode: LinearOperations, named: dict, output: Tensor) -> set[int]:
    def plain(n: dict) -> Tensor:
        return F.group_norm(n["input"], n["num_groups"], None, None, n.get("eps", 1e-5))

    return _norm(mode, named, output, plain, 1)


def _batch_norm(mode: LinearOperations, named: dict, output: Tensor) -> set[int]:
    if named.get("training"):
        raise ValueError(
            "a BatchNorm layer computes with the batch's own statistics, which makes data depend "
            "on each other: call network.eval() and use its running statistics "
            "(track_running_stats=True) for curvature"
        )

    def plain(n: dict) -> Tensor:
        mean, variance = n["running_mean"], n["running_var"]
        return F.batch_norm(n["input"], mean, variance, None, None, False, 0.0, n.get("eps", 1e-5))

    return _norm(mode, named, output, plain, 1)


def _elementwise(
    mode: LinearOperations, named: dict, output: Tensor, multiplied: bool, signs: tuple[int, int]
) -> set[int]:
    """z = w + x, w - x, x - w or w * x; a latent along the last dimensions of z."""
    left, right = named["input"], named["other"]
    first, second = mode.tag(left), mode.tag(right)
    if (first and second) or named.get("alpha", 1) != 1:
        return set()
    tag, other, sign = (first, right, signs[0]) if first else (second, left, signs[1])
    assert tag is not None
    multiplier = None
    if multiplied:
        multiplier = torch.as_tensor(other, device=output.device, dtype=output.dtype)
        multiplier = multiplier.detach().expand(output.shape)
    elif sign < 0:
        multiplier = -torch.ones((), device=output.device, dtype=output.dtype).expand(output.shape)
    elif tag.tensor.shape == output.shape[-1:] and output.dim() > 1:
        _bias(mode, tag, output)
        return {id(tag.tensor)}
    dim = output.dim() - tag.tensor.dim()
    return _scale(mode, tag, output, multiplier, dim) if output.dim() else set()


def _add(mode: LinearOperations, named: dict, output: Tensor) -> set[int]:
    return _elementwise(mode, named, output, False, (1, 1))


def _subtract(mode: LinearOperations, named: dict, output: Tensor) -> set[int]:
    return _elementwise(mode, named, output, False, (1, -1))


def _subtract_from(mode: LinearOperations, named: dict, output: Tensor) -> set[int]:
    return _elementwise(mode, named, output, False, (-1, 1))


def _multiply(mode: LinearOperations, named: dict, output: Tensor) -> set[int]:
    return _elementwise(mode, named, output, True, (1, 1))


_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_PAIR = ("input", "other")
_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
_BATCH_NORM: tuple[str, ...] = (
    "input",
    "running_mean",
    "running_var",
    "weight",
    "bias",
    "training",
)
_BATCH_NORM += ("momentum", "eps")

_HANDLERS: dict[Any, tuple[tuple[str, ...], Callable]] = {
    F.linear: (("input", "weight", "bias"), _linear),
    torch.addmm: (("input", "mat1", "mat2"), _addmm),
    F.embedding: (_EMBEDDING, _embedding),
    F.layer_norm: (("input", "normalized_shape", "weight", "bias", "eps"), _layer_norm),
    F.rms_norm: (("input", "normalized_shape", "weight", "eps"), _rms_norm),
    F.group_norm: (("input", "num_groups", "weight", "bias", "eps"), _group_norm),
    F.batch_norm: (_BATCH_NORM, _batch_norm),
}
_SAME = {
    _matmul: (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__),
    _rmatmul: (Tensor.__rmatmul__,),
    _convolution: (F.conv1d, F.conv2d, F.conv3d),
    _add: (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__),
    _subtract: (torch.sub, Tensor.sub, Tensor.__sub__),
    _subtract_from: (Tensor.__rsub__,),
    _multiply: (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__),
}
for _function, _names in _SAME.items():
    _arguments = _CONVOLUTION if _function is _convolution else _PAIR
    _HANDLERS.update({name: (_arguments, _function) for name in _names})
