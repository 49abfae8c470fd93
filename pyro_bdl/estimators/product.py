"""Linear operations of a network, brought to one form with the datum axis first."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Distribution, Normal

from pyro_bdl.distributions.dropout_noise import NoisyWeight
from pyro_bdl.distributions.take_apart import base_distribution
from pyro_bdl.program.linear_ops.tracker import Tag

Rearrange = Callable[[Tensor], Tensor]


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Rows:
    """The order of an operation's rows in terms of data.

    :param first: brings inputs to (N, ...), one entry of the first axis for each datum.
    :param back: brings outputs (N, ...) to the order that the program expects.
    """

    first: Rearrange = _same
    back: Rearrange = _same


def _swapped(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous()  # callers may view outputs, as they could without us


_SINGLE = Rows(lambda x: x[None], lambda z: z[0])  # no datum axis: one row for all
_SECOND = Rows(_swapped, _swapped)


@dataclass(frozen=True)
class Batch:
    """The known facts about the data axis in a run.

    :param sizes: how many data there may be; empty: unknown, the leading axis counts.
    :param attention: inside an attention, whose inputs are (L, N, E): N; else None.
    """

    sizes: frozenset[int] = frozenset()
    attention: int | None = None

    def rows(self, lead: torch.Size) -> Rows | None:
        """For inputs with these leading dimensions; None where data cannot be told apart."""
        if self.attention is not None:
            return self._attention_rows(lead, self.attention)
        if not lead:
            return _SINGLE
        if self._is_batch(lead[0]):
            return Rows()
        return _SECOND if len(lead) > 1 and self._is_batch(lead[1]) else None

    def _is_batch(self, size: int) -> bool:
        return not self.sizes or size in self.sizes

    def _attention_rows(self, lead: torch.Size, size: int) -> Rows | None:
        if not self._is_batch(size) or not lead:
            return None
        if len(lead) == 2 and lead[1] == size:
            return _SECOND
        if len(lead) == 1 and lead[0] % size == 0:  # (L N, E)
            return Rows(
                lambda x: x.unflatten(0, (-1, size)).transpose(0, 1),
                lambda z: z.transpose(0, 1).flatten(0, 1),
            )
        return None


@dataclass(frozen=True)
class Operand:
    """A weight or bias of an operation.

    :param value: as the operation takes it: the draw, where it is one of a latent.
    :param tag: which latent it is of; None for a constant.
    :param distribution: the latent's.
    :param shaped: brings numbers of the latent's shape to the operation's.
    """

    value: Tensor
    tag: Tag | None = None
    distribution: Distribution | None = None
    shaped: Rearrange = _same

    @property
    def base(self) -> Any:
        """The distribution of the single numbers."""
        if self.distribution is None:
            return None
        return base_distribution(self.distribution, through_masks=False)

    @cached_property
    def normal(self) -> Normal | None:
        """The distribution as a Normal; None where it is another one."""
        base = self.base.as_normal() if isinstance(self.base, NoisyWeight) else self.base
        return base if isinstance(base, Normal) else None

    def of(self, values: Tensor) -> Tensor:
        """Numbers that broadcast to the latent's shape, as the operation takes them."""
        assert self.tag is not None
        shape = self.tag.root.shape
        return self.shaped(self.tag.of(values if values.shape == shape else values.expand(shape)))

    @cached_property
    def loc(self) -> Tensor:
        """The mean of a Normal latent; the value of a constant."""
        return self.value if self.normal is None else self.of(self.normal.loc)

    @cached_property
    def scale(self) -> Tensor | None:
        """The standard deviation of a Normal latent; None for a constant."""
        return None if self.normal is None else self.of(self.normal.scale)


@dataclass(frozen=True)
class Product:
    """z_n = apply(a_n, w, b), affine in the weight w and the bias b.

    :param apply: from inputs (N, ...), a weight and a bias to outputs (N, ...).
    :param inputs: a (N, ...); for a look-up the rows' numbers.
    :param weight: w.
    :param bias: b, or None.
    :param features: the axis of the features in inputs and outputs.
    :param groups: of a convolution.
    :param is_lookup: whether it looks up rows of w.
    :param back: brings outputs to the order that the program expects.
    """

    apply: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    inputs: Tensor
    weight: Operand
    bias: Operand | None
    features: int = -1
    groups: int = 1
    is_lookup: bool = False
    back: Rearrange = _same

    @property
    def operands(self) -> list[Operand]:
        """The operands that are latents."""
        return [o for o in (self.weight, self.bias) if o is not None and o.tag is not None]

    def at_means(self) -> Tensor:
        """op(a, E[w], E[b])."""
        return self.apply(
            self.inputs, self.weight.loc, None if self.bias is None else self.bias.loc
        )

    def has_positions(self, output: Tensor) -> bool:
        """Return whether a datum meets the weight more than once: sequences, images."""
        return output.numel() > output.shape[0] * output.shape[self.features]

    def datum_by_datum(self, weights: Tensor, biases: Tensor | None) -> Tensor:
        """op(a_n, w_n, b_n) for weights (N, ...) and biases (N, ...)."""

        def single(a: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
            return self.apply(a[None], w, b)[0]

        dims = (0, 0, None if biases is None else 0)
        return torch.vmap(single, in_dims=dims)(self.inputs, weights, biases)

    def along_features(self, values: Tensor, output: Tensor) -> Tensor:
        """Values (N, features) or (features,), to be broadcast with inputs or outputs."""
        if values.dim() == 1:
            values = values[None]
        shape = [1] * output.dim()
        shape[0], shape[self.features] = values.shape
        return values.reshape(shape)


def product_of(
    family: str, named: dict[str, Any], operand: Callable[[Any], Operand], batch: Batch
) -> Product | None:
    """An operation in one form; None where it is no product of data with latents.

    :param family: as in ``tracking.OPERATIONS``.
    :param named: the operation's arguments.
    :param operand: makes a tensor an operand.
    """
    make = _FAMILIES.get(family)
    product = None if make is None else make(named, operand, batch)
    return product if product is not None and product.operands else None


def _linear_form(
    inputs: Tensor, weight: Operand, bias: Operand | None, batch: Batch
) -> Product | None:
    """a w' + b for a (..., in) and w (out, in)."""
    if weight.value.dim() != 2 or (bias is not None and bias.value.dim() != 1):
        return None
    rows = batch.rows(inputs.shape[:-1])
    if rows is None:
        return None
    return Product(F.linear, rows.first(inputs), weight, bias, back=rows.back)


def _linear(named: dict, operand: Callable, batch: Batch) -> Product | None:
    bias = named.get("bias")
    inputs = operand(named["input"])
    if inputs.tag is not None:
        return None
    weight = operand(named["weight"])
    return _linear_form(inputs.value, weight, None if bias is None else operand(bias), batch)


def _reshaped(operand: Operand, shaped: Rearrange) -> Operand:
    return Operand(shaped(operand.value), operand.tag, operand.distribution, shaped)


def _transposed(x: Tensor) -> Tensor:
    return x.mT


def _matmul(named: dict, operand: Callable, batch: Batch) -> Product | None:
    left, right = named["input"], named["other"]
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return None
    first, second = operand(left), operand(right)
    if second.tag is not None and first.tag is None and left.dim() >= 1:
        if right.dim() == 2:
            return _linear_form(left, _reshaped(second, _transposed), None, batch)
        if right.dim() == 1:
            weight = _reshaped(second, lambda w: w[None])
            return _then(_linear_form(left, weight, None, batch), lambda z: z[..., 0])
    if first.tag is not None and second.tag is None and left.dim() == 2 and right.dim() >= 2:
        return _then(_linear_form(right.mT, first, None, batch), _transposed)
    return None


def _then(product: Product | None, last: Rearrange) -> Product | None:
    if product is None:
        return None
    back = product.back
    return Product(**{**vars(product), "back": lambda z: last(back(z))})


def _rmatmul(named: dict, operand: Callable, batch: Batch) -> Product | None:
    return _matmul({"input": named["other"], "other": named["input"]}, operand, batch)


def _addmm(named: dict, operand: Callable, batch: Batch) -> Product | None:
    if named.get("beta", 1) != 1 or named.get("alpha", 1) != 1:
        return None
    inputs, weight = operand(named["mat1"]), operand(named["mat2"])
    if inputs.tag is not None:
        return None
    bias = operand(named["input"])
    return _linear_form(inputs.value, _reshaped(weight, _transposed), bias, batch)


def _convolution(named: dict, operand: Callable, batch: Batch) -> Product | None:
    inputs, weight, bias = operand(named["input"]), operand(named["weight"]), named.get("bias")
    spatial = weight.value.dim() - 2
    if inputs.tag is not None:
        return None
    rows = batch.rows(inputs.value.shape[: -spatial - 1])
    if rows is None or inputs.value.dim() - spatial not in (1, 2) or rows is _SECOND:
        return None
    settings = {k: named[k] for k in ("stride", "padding", "dilation", "groups") if k in named}
    return Product(
        partial(_convolve, (F.conv1d, F.conv2d, F.conv3d)[spatial - 1], settings),
        rows.first(inputs.value),
        weight,
        None if bias is None else operand(bias),
        features=1,
        groups=settings.get("groups", 1),
        back=rows.back,
    )


def _convolve(function: Any, settings: dict, a: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return function(a, w, b, **settings)


def _embedding(named: dict, operand: Callable, batch: Batch) -> Product | None:
    weight = operand(named["weight"])
    if named.get("max_norm") is not None or named.get("scale_grad_by_freq"):
        return None
    rows = batch.rows(named["input"].shape)
    if rows is None:
        return None
    padding = named.get("padding_idx")

    def apply(a: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return F.embedding(a, w, padding)

    return Product(apply, rows.first(named["input"]), weight, None, is_lookup=True, back=rows.back)


_FAMILIES: dict[str, Callable[[dict, Callable, Batch], Product | None]] = {
    "linear": _linear,
    "matmul": _matmul,
    "rmatmul": _rmatmul,
    "addmm": _addmm,
    "convolution": _convolution,
    "embedding": _embedding,
}


def sizes_of(values: Collection[Any]) -> frozenset[int]:
    """The length of the first tensor among arguments, as the possible number of data."""
    for value in values:
        if isinstance(value, Tensor) and value.dim() > 0:
            return frozenset({len(value)})
    return frozenset()
