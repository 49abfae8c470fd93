"""A table of the torch functions that are affine in some of their arguments.

``recognize`` converts a call of such a function to an ``AffineOp``. Curvature, estimators, dropout
and last layers use only this record, not the functions. To add a function, add an entry to
``_ENTRIES`` and a case to the test of this file.
"""

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Kind = Literal["product", "convolution", "transposed convolution", "embedding", "scale", "addition"]


@dataclass(frozen=True)
class AffineOp:
    """A call z = op(a, w) + b, affine in the weight w and in the bias b.

    The orientation of the weight is given by one dimension each of inputs, weight and output:
    ``F.linear(x, w)`` has (-1, 1, -1), ``x @ w`` has (-1, 0, -1) and ``w @ x`` has (-2, 1, -2).

    :param kind: "product" for sums over input features; "convolution", "transposed convolution";
        "embedding" for rows of w; "scale" for an elementwise multiple of w, broadcast to z, as in
        a normalization; "addition" for b alone.
    :param function: the torch function.
    :param inputs: a, as the function takes it; for an addition, or a scale by multiplication, the
        other operand.
    :param weight: w, as the function takes it: a matrix or a vector for a product. None if there is
        none.
    :param bias: b, as the function takes it. None if there is none.
    :param input_dim: the dimension of a that numbers the input units; None for an embedding.
    :param weight_dim: the dimension of w that numbers the input units.
    :param output_dim: the dimension of z that numbers the output units; for a scale the first
        dimension along which w lies.
    :param bias_dim: the first dimension of z along which b lies.
    :param groups: the number of groups of input units, which are consecutive along the output units
        of w. 1 for a transposed convolution, whose w holds the units of all groups.
    :param sign: -1 for a bias that is subtracted.
    :param is_plain: whether z has exactly this form. False if the call has a factor other than 1,
        rescales the rows that it looks up, or changes their gradients.
    :param settings: the other arguments of the call.
    :param multiplier: for a scale, a function that computes the multiplier of w.
    """

    kind: Kind
    function: Callable
    inputs: Any
    weight: Any = None
    bias: Any = None
    input_dim: int | None = -1
    weight_dim: int = 1
    output_dim: int = -1
    bias_dim: int = -1
    groups: int = 1
    sign: int = 1
    is_plain: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)
    multiplier: Callable[[], Any] | None = None

    def rows(self) -> Tensor:
        """The inputs of a product, (..., in)."""
        return self.inputs if self.input_dim == -1 else self.inputs.mT

    def as_matrix(self, weight: Tensor) -> Tensor:
        """Convert the weight of a product, or other values of its shape, to (out, in)."""
        if weight.dim() == 1:
            return weight[None]
        return weight.mT if self.weight_dim == 0 else weight

    def permute_output(self, output: Tensor) -> Tensor:
        """Convert the output of a product, or other values of its shape, to (..., out), or back."""
        return output if self.output_dim == -1 else output.mT


IsLatent = Callable[[Any], bool]


def recognize(func: Any, args: tuple, kwargs: dict, is_latent: IsLatent) -> AffineOp | None:
    """Read a call of a torch function as an affine operation.

    :param is_latent: whether an argument is computed from a latent. It determines which operand of
        ``a @ b``, ``a + b`` or ``a * b`` is the weight or the bias.
    :returns: None for a function that is not in the table, or if both operands are latents.
    """
    entry = _TABLE.get(func)
    if entry is None:
        return None
    names, read = entry
    return read(func, dict(zip(names, args, strict=False)) | kwargs, is_latent)


def decompose(
    func: Any, args: tuple, kwargs: dict, is_latent: IsLatent
) -> Callable[[], Any] | None:
    """Decompose a call into several operations: attention, and einsums that are products with a
    weight.

    :returns: a function that runs these operations, visible to modes; None for other functions.
    """
    read = _COMPOSITES.get(func)
    return None if read is None else read(args, kwargs, is_latent)


# ------------------------------------------------------------------------------- products


def _linear(function: Any, named: dict, is_latent: IsLatent) -> AffineOp:
    weight = named["weight"]
    return AffineOp(
        "product", function, named["input"], weight, named.get("bias"), weight_dim=weight.dim() - 1
    )


def _matmul(
    function: Any, named: dict, is_latent: IsLatent, left: str = "input", right: str = "other"
) -> AffineOp | None:
    a, b = named[left], named[right]
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or is_latent(a) == is_latent(b):
        return None
    if is_latent(b):
        return AffineOp("product", function, a, b, weight_dim=0) if b.dim() <= 2 else None
    if a.dim() > 2:
        return None
    dim = -1 if b.dim() == 1 else -2
    return AffineOp("product", function, b, a, None, dim, a.dim() - 1, dim)


def _addmm(function: Any, named: dict, is_latent: IsLatent) -> AffineOp:
    bias, left, right = named["input"], named["mat1"], named["mat2"]
    plain = bool(named.get("beta", 1) == 1 and named.get("alpha", 1) == 1)
    if is_latent(left) and is_latent(right):
        return AffineOp("addition", function, None, bias=bias, is_plain=plain)
    if is_latent(left):
        return AffineOp("product", function, right, left, bias, -2, 1, -2, is_plain=plain)
    return AffineOp("product", function, left, right, bias, weight_dim=0, is_plain=plain)


def _convolution(
    function: Any, named: dict, is_latent: IsLatent, kind: Kind = "convolution"
) -> AffineOp:
    inputs, weight = named["input"], named["weight"]
    channels = inputs.dim() - weight.dim() + 1
    return AffineOp(
        kind,
        function,
        inputs,
        weight,
        named.get("bias"),
        input_dim=channels,
        weight_dim=1 if kind == "convolution" else 0,
        output_dim=channels,
        bias_dim=channels,
        groups=named.get("groups", 1) if kind == "convolution" else 1,
        settings={k: v for k, v in named.items() if k not in ("input", "weight", "bias")},
    )


def _embedding(function: Any, named: dict, is_latent: IsLatent) -> AffineOp:
    return AffineOp(
        "embedding",
        function,
        named["input"],
        named["weight"],
        input_dim=None,
        weight_dim=0,
        is_plain=named.get("max_norm") is None and not named.get("scale_grad_by_freq"),
        settings={"padding_idx": named.get("padding_idx")},
    )


# ------------------------------------------------------------------------------- elementwise


def _normalization(function: Any, named: dict, is_latent: IsLatent) -> AffineOp:
    start = -len(named["normalized_shape"]) if "normalized_shape" in named else 1
    settings = {k: v for k, v in named.items() if k not in ("input", "weight", "bias")}
    # a second call must not move running statistics again
    frozen = {"momentum": 0.0} if function is F.batch_norm else {}
    return AffineOp(
        "scale",
        function,
        named["input"],
        named.get("weight"),
        named.get("bias"),
        output_dim=start,
        bias_dim=start,
        settings=settings,
        multiplier=lambda: function(named["input"], **settings | frozen),
    )


def _operands(named: dict, is_latent: IsLatent) -> tuple[Tensor, Any, bool] | None:
    """The latent of two operands, the other operand, and whether the latent comes second."""
    left, right = named["input"], named["other"]
    if is_latent(left) == is_latent(right):
        return None
    return (right, left, True) if is_latent(right) else (left, right, False)


def _addition(function: Any, named: dict, is_latent: IsLatent, sign: int = 1) -> AffineOp | None:
    """Read a sum or a difference.

    :param sign: of the second operand.
    """
    operands = _operands(named, is_latent)
    if operands is None:
        return None
    latent, other, is_second = operands
    return AffineOp(
        "addition",
        function,
        other,
        bias=latent,
        bias_dim=-latent.dim(),
        sign=sign if is_second else 1,
        is_plain=named.get("alpha", 1) == 1,
    )


def _multiplication(function: Any, named: dict, is_latent: IsLatent) -> AffineOp | None:
    operands = _operands(named, is_latent)
    if operands is None:
        return None
    latent, other, _ = operands
    return AffineOp(
        "scale", function, other, latent, output_dim=-latent.dim(), multiplier=lambda: other
    )


# ------------------------------------------------------------------------------- the table

Reader = Callable[[Any, dict, IsLatent], AffineOp | None]

_PAIR, _SWAPPED = ("input", "other"), ("other", "input")
_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = (*_CONVOLUTION[:5], "output_padding", "groups", "dilation")
_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum")

# The functions, the names of their arguments in order, and how a call is read.
_ENTRIES: tuple[tuple[tuple[Any, ...], tuple[str, ...], Reader], ...] = (
    ((F.linear,), ("input", "weight", "bias"), _linear),
    ((torch.matmul, Tensor.matmul, Tensor.__matmul__), _PAIR, _matmul),
    ((Tensor.__rmatmul__,), _SWAPPED, _matmul),
    ((torch.mm, Tensor.mm), ("input", "mat2"), partial(_matmul, right="mat2")),
    ((torch.mv, Tensor.mv), ("input", "vec"), partial(_matmul, right="vec")),
    ((torch.addmm,), ("input", "mat1", "mat2"), _addmm),
    ((F.conv1d, F.conv2d, F.conv3d), _CONVOLUTION, _convolution),
    (
        (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        _TRANSPOSED,
        partial(_convolution, kind="transposed convolution"),
    ),
    ((F.embedding,), _EMBEDDING, _embedding),
    (
        (F.layer_norm,),
        ("input", "normalized_shape", "weight", "bias", "eps"),
        _normalization,
    ),
    ((F.rms_norm,), ("input", "normalized_shape", "weight", "eps"), _normalization),
    ((F.group_norm,), ("input", "num_groups", "weight", "bias", "eps"), _normalization),
    ((F.batch_norm,), (*_BATCH_NORM, "eps"), _normalization),
    ((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _PAIR, _addition),
    ((torch.sub, Tensor.sub, Tensor.__sub__), _PAIR, partial(_addition, sign=-1)),
    ((Tensor.__rsub__,), _SWAPPED, partial(_addition, sign=-1)),
    ((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), _PAIR, _multiplication),
)
_TABLE: dict[Any, tuple[tuple[str, ...], Reader]] = {
    function: (names, read) for functions, names, read in _ENTRIES for function in functions
}
FUNCTIONS = frozenset(_TABLE)


# ------------------------------------------------------------------------------- composites


def _without_offer(function: Any) -> Callable:
    """A function of torch.nn.functional without the dispatch to modes, so that they see its inner
    operations."""
    scope = {**function.__globals__, "has_torch_function": lambda args: False}
    copied = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def as_linear(args: tuple, is_weight: Callable[[Any], bool]) -> Callable[[], Tensor] | None:
    """A function that computes an einsum as a product z = a w'; None for other einsums.

    An example is "bi,oi->bo". Axes may have any order, the weight may have several
    ("btd,hdk->bthk"), and an ellipsis may stand for axes of the data. Each axis of the weight must
    either be summed over, and also be an axis of the data, or be an axis of the output only. All
    other axes of the data are axes of the output.

    :param args: the arguments of ``torch.einsum``: the equation and two operands.
    :param is_weight: whether an operand is the weight; exactly one must be.
    """
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    left, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow or len(operands) != 2 or is_weight(operands[0]) == is_weight(operands[1]):
        return None
    number = 1 if is_weight(operands[1]) else 0
    weight, inputs = operands[number], operands[1 - number]
    of_weight, of_inputs = left.split(",")[number], left.split(",")[1 - number]
    if "..." in of_inputs:  # digits cannot be letters of an einsum
        dots = "".join(map(str, range(inputs.dim() - len(of_inputs) + 3)))
        of_inputs, output = of_inputs.replace("...", dots), output.replace("...", dots)
    summed = "".join(axis for axis in of_weight if axis in of_inputs)
    outputs = "".join(axis for axis in of_weight if axis not in of_inputs)
    rest = "".join(axis for axis in of_inputs if axis not in of_weight)
    size = dict(zip(of_weight, weight.shape, strict=False))
    length = dict(zip(of_inputs, inputs.shape, strict=False))
    if (
        not summed
        or len(size) < len(of_weight)  # a diagonal
        or len(length) < len(of_inputs)
        or sorted(output) != sorted(rest + outputs)
        or any(size[axis] != length[axis] for axis in summed)  # broadcast
    ):
        return None

    def product() -> Tensor:
        matrix = _ordered(weight, of_weight, outputs + summed)
        data = _ordered(inputs, of_inputs, rest + summed)
        if len(summed) > 1:
            matrix, data = matrix.flatten(len(outputs)), data.flatten(len(rest))
        if len(outputs) != 1:
            matrix = matrix.reshape(-1, matrix.shape[-1])
        result = F.linear(data, matrix)
        if len(outputs) != 1:
            result = result.reshape((*result.shape[:-1], *(size[axis] for axis in outputs)))
        return _ordered(result, rest + outputs, output)

    return product


def _ordered(x: Tensor, axes: str, order: str) -> Tensor:
    return x if axes == order else x.permute([axes.index(axis) for axis in order])


_attention = _without_offer(F.multi_head_attention_forward)

_COMPOSITES: dict[Any, Callable[[tuple, dict, IsLatent], Callable[[], Any] | None]] = {
    F.multi_head_attention_forward: lambda args, kwargs, _: partial(_attention, *args, **kwargs),
    torch.einsum: lambda args, kwargs, is_latent: as_linear(args, is_latent),
}
