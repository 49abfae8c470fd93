"""The affine operations in which a program uses its latents, for derivatives.

While a program runs inside ``UseRecorder``, every operation on a latent that is affine in it
(products, convolutions, look-ups, norm scales, biases) is recorded as an ``AffineUse``. The
gradient of any output in the latent is then the product of the use's input a and the gradient g of
its output z. A latent that enters any other operation is listed in ``unmatched``.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves

from pyro_bdl.curvature.jacobian.patches import patches
from pyro_bdl.program.linear_ops.tracker import OPERATIONS, Tag, Tracker


@dataclass
class AffineUse:
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


class UseRecorder(Tracker):
    """A recorder of the uses of latents while a program runs.

    :param latents: site -> the very tensors that the program gets.
    """

    def __init__(self, latents: Mapping[str, Tensor]) -> None:
        super().__init__(latents)
        self.uses: list[AffineUse] = []
        self._counts: Counter[str] = Counter()
        self.unmatched: set[str] = set()

    def operate(self, func: Any, args: tuple, kwargs: dict, tagged: list[Tag]) -> Any:
        result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not outputs or all(id(leaf) in self.tags for leaf in outputs):
            return result
        if outputs[0].requires_grad:  # else nothing flows back through it
            seen = _record(func, args, kwargs, result, self)
            self.unmatched.update(tag.site for tag in tagged if id(tag.tensor) not in seen)
        return result

    def add(self, tag: Tag, kind: str, output: Tensor, **options: Any) -> None:
        self.uses.append(
            AffineUse(
                site=tag.site,
                number=self._counts[tag.site],
                kind=kind,
                edge=get_gradient_edge(output),
                output_shape=output.shape,
                **options,
            )
        )
        self._counts[tag.site] += 1


def _record(func: Any, args: tuple, kwargs: dict, result: Any, mode: UseRecorder) -> set[int]:
    """Record the uses of one operation; returns the ids of the tensors that were understood."""
    operation = OPERATIONS.get(func)
    if operation is None or not isinstance(result, Tensor):
        return set()
    return _RECORDERS[operation.family](mode, operation.bind(args, kwargs), result)


# ------------------------------------------------------------------------------- products


def _product(
    mode: UseRecorder,
    tag: Tag,
    output: Tensor,
    inputs: Tensor,
    *,
    transposed: bool = False,
    to_rows: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Record z = a w' for w (out, in), or z = a w for w (in, out) where ``transposed``."""
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
    mode: UseRecorder,
    tag: Tag,
    output: Tensor,
    to_rows: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Record z = ... + b with b along the features."""
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


def _linear(mode: UseRecorder, named: dict, output: Tensor) -> set[int]:
    inputs, seen = named["input"], set()
    weight, bias = mode.tag(named["weight"]), mode.tag(named.get("bias"))
    if weight and not mode.tag(inputs) and weight.tensor.dim() == 2:
        _product(mode, weight, output, inputs)
        seen.add(id(weight.tensor))
    if bias:
        _bias(mode, bias, output)
        seen.add(id(bias.tensor))
    return seen


def _matmul(mode: UseRecorder, named: dict, output: Tensor) -> set[int]:
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


def _rmatmul(mode: UseRecorder, named: dict, output: Tensor) -> set[int]:
    return _matmul(mode, {"input": named["other"], "other": named["input"]}, output)


def _addmm(mode: UseRecorder, named: dict, output: Tensor) -> set[int]:
    if named.get("beta", 1) != 1 or named.get("alpha", 1) != 1:
        return set()
    seen = _matmul(mode, {"input": named["mat1"], "other": named["mat2"]}, output)
    bias = mode.tag(named["input"])
    if bias and bias.tensor.shape == output.shape[-1:]:
        _bias(mode, bias, output)
        seen.add(id(bias.tensor))
    return seen


# ------------------------------------------------------------------------------- convolutions


def _convolution(mode: UseRecorder, named: dict, output: Tensor) -> set[int]:
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


def _embedding(mode: UseRecorder, named: dict, output: Tensor) -> set[int]:
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


def _norm(mode: UseRecorder, named: dict, output: Tensor, plain: Callable, dim: int) -> set:
    """Record z = xhat * w + b, with w along dimension ``dim`` of z and the following ones."""
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
    mode: UseRecorder, tag: Tag, output: Tensor, multiplier: Tensor | None, dim: int
) -> set[int]:
    """Record z = multiplier * w + ..., with the dimensions of w at ``dim`` of z and after."""
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


def _layer_norm(mode: UseRecorder, named: dict, output: Tensor) -> set[int]:
    def plain(n: dict) -> Tensor:
        return F.layer_norm(n["input"], n["normalized_shape"], None, None, n.get("eps", 1e-5))

    return _norm(mode, named, output, plain, -len(named["normalized_shape"]))


def _rms_norm(mode: UseRecorder, named: dict, output: Tensor) -> set[int]:
    def plain(n: dict) -> Tensor:
        return F.rms_norm(n["input"], n["normalized_shape"], None, n.get("eps"))

    return _norm(mode, named, output, plain, -len(named["normalized_shape"]))


def _group_norm(mode: UseRecorder, named: dict, output: Tensor) -> set[int]:
    def plain(n: dict) -> Tensor:
        return F.group_norm(n["input"], n["num_groups"], None, None, n.get("eps", 1e-5))

    return _norm(mode, named, output, plain, 1)


def _batch_norm(mode: UseRecorder, named: dict, output: Tensor) -> set[int]:
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
    mode: UseRecorder, named: dict, output: Tensor, multiplied: bool, signs: tuple[int, int]
) -> set[int]:
    """Record z = w + x, w - x, x - w or w * x; the latent lies along the last dimensions of z."""
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


def _add(mode: UseRecorder, named: dict, output: Tensor) -> set[int]:
    return _elementwise(mode, named, output, False, (1, 1))


def _subtract(mode: UseRecorder, named: dict, output: Tensor) -> set[int]:
    return _elementwise(mode, named, output, False, (1, -1))


def _subtract_from(mode: UseRecorder, named: dict, output: Tensor) -> set[int]:
    return _elementwise(mode, named, output, False, (-1, 1))


def _multiply(mode: UseRecorder, named: dict, output: Tensor) -> set[int]:
    return _elementwise(mode, named, output, True, (1, 1))


_RECORDERS: dict[str, Callable[[UseRecorder, dict, Tensor], set[int]]] = {
    "linear": _linear,
    "addmm": _addmm,
    "matmul": _matmul,
    "rmatmul": _rmatmul,
    "convolution": _convolution,
    "embedding": _embedding,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    "add": _add,
    "subtract": _subtract,
    "subtract_from": _subtract_from,
    "multiply": _multiply,
}
