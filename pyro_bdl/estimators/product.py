"""Linear operations of a network in one common form, with the data axis first."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Distribution, Normal

from pyro_bdl.distributions.dropout_noise import NoisyWeight
from pyro_bdl.distributions.take_apart import base_distribution
from pyro_bdl.program.linear_ops.recognize import AffineOp
from pyro_bdl.program.linear_ops.tracker import Tag

Rearrange = Callable[[Tensor], Tensor]


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Rows:
    """Conversions between an operation's order of rows and one with the data axis first.

    :param first: brings inputs to (N, ...), one entry of the first axis for each datum.
    :param back: brings outputs (N, ...) to the order that the program expects.
    """

    first: Rearrange = _same
    back: Rearrange = _same


def _swapped(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous()  # contiguous, since callers may use view on the outputs


_SINGLE = Rows(lambda x: x[None], lambda z: z[0])  # no data axis: a single row for all
_SECOND = Rows(_swapped, _swapped)


@dataclass(frozen=True)
class Batch:
    """Information about the data axis in a run.

    :param sizes: the possible numbers of data; if empty, the leading axis is the data axis.
    :param attention: N inside an attention, whose inputs are (L, N, E); else None.
    """

    sizes: frozenset[int] = frozenset()
    attention: int | None = None

    def rows(self, lead: torch.Size) -> Rows | None:
        """The conversions for inputs with these leading dimensions; None if the data axis is
        unknown."""
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

    :param value: the tensor that the operation takes; for a latent, its draw.
    :param tag: the latent that the tensor comes from; None for a constant.
    :param distribution: the latent's distribution.
    :param shaped: converts values of the latent's shape to the operation's shape.
    """

    value: Tensor
    tag: Tag | None = None
    distribution: Distribution | None = None
    shaped: Rearrange = _same

    @property
    def base(self) -> Any:
        """The distribution without wrappers, of single numbers."""
        if self.distribution is None:
            return None
        return base_distribution(self.distribution, through_masks=False)

    @cached_property
    def normal(self) -> Normal | None:
        """The distribution as a Normal; None if it is not a Normal."""
        base = self.base.as_normal() if isinstance(self.base, NoisyWeight) else self.base
        return base if isinstance(base, Normal) else None

    def of(self, values: Tensor) -> Tensor:
        """Convert values that broadcast to the latent's shape to the operation's shape."""
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
class DataProduct:
    """z_n = apply(a_n, w, b), affine in the weight w and the bias b.

    :param apply: from inputs (N, ...), a weight and a bias to outputs (N, ...).
    :param inputs: a (N, ...); for a look-up the numbers of the rows.
    :param weight: w.
    :param bias: b, or None.
    :param features: the axis of the features in inputs and outputs.
    :param groups: the groups of a convolution.
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
        """The outputs op(a, E[w], E[b]) at the means."""
        return self.apply(
            self.inputs, self.weight.loc, None if self.bias is None else self.bias.loc
        )

    def has_positions(self, output: Tensor) -> bool:
        """Return whether a datum uses the weight at several positions, as in sequences and
        images."""
        return output.numel() > output.shape[0] * output.shape[self.features]

    def datum_by_datum(self, weights: Tensor, biases: Tensor | None) -> Tensor:
        """The outputs op(a_n, w_n, b_n) for weights (N, ...) and biases (N, ...)."""

        def single(a: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
            return self.apply(a[None], w, b)[0]

        dims = (0, 0, None if biases is None else 0)
        return torch.vmap(single, in_dims=dims)(self.inputs, weights, biases)

    def along_features(self, values: Tensor, output: Tensor) -> Tensor:
        """Values (N, features) or (features,), reshaped to broadcast with inputs or outputs."""
        if values.dim() == 1:
            values = values[None]
        shape = [1] * output.dim()
        shape[0], shape[self.features] = values.shape
        return values.reshape(shape)


def data_product(
    op: AffineOp | None, operand: Callable[[Any], Operand], batch: Batch
) -> DataProduct | None:
    """An operation in the common form; None if it is not a product of data with latents.

    :param op: the recognized operation.
    :param operand: a function that wraps a tensor as an operand.
    """
    form = None if op is None else _FORMS.get(op.kind)
    if op is None or form is None or not op.is_plain or operand(op.inputs).tag is not None:
        return None
    bias = None if op.bias is None else operand(op.bias)
    product = form(op, operand(op.weight), bias, batch)
    return product if product is not None and product.operands else None


def _linear(
    op: AffineOp, weight: Operand, bias: Operand | None, batch: Batch
) -> DataProduct | None:
    """a w' + b for a (..., in) and w (out, in)."""
    if bias is not None and (bias.value.dim() != 1 or op.output_dim != op.bias_dim):
        return None
    inputs, is_vector = op.rows(), weight.value.dim() == 1
    rows = batch.rows(inputs.shape[:-1])
    if rows is None:
        return None

    def back(z: Tensor) -> Tensor:
        z = rows.back(z)
        return z[..., 0] if is_vector else op.turned(z)

    weight = Operand(op.as_matrix(weight.value), weight.tag, weight.distribution, op.as_matrix)
    return DataProduct(F.linear, rows.first(inputs), weight, bias, back=back)


def _convolution(
    op: AffineOp, weight: Operand, bias: Operand | None, batch: Batch
) -> DataProduct | None:
    rows = batch.rows(op.inputs.shape[: op.input_dim])
    if rows is None or op.input_dim not in (0, 1) or rows is _SECOND:
        return None

    def apply(a: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return op.function(a, w, b, **op.settings)

    inputs = rows.first(op.inputs)
    return DataProduct(apply, inputs, weight, bias, features=1, groups=op.groups, back=rows.back)


def _embedding(op: AffineOp, weight: Operand, bias: None, batch: Batch) -> DataProduct | None:
    rows = batch.rows(op.inputs.shape)
    if rows is None:
        return None

    def apply(a: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return F.embedding(a, w, **op.settings)

    return DataProduct(apply, rows.first(op.inputs), weight, None, is_lookup=True, back=rows.back)


_FORMS: dict[str, Callable[[AffineOp, Operand, Any, Batch], DataProduct | None]] = {
    "product": _linear,
    "convolution": _convolution,
    "embedding": _embedding,
}


def sizes_of(values: Collection[Any]) -> frozenset[int]:
    """The length of the first tensor among the arguments, as a possible number of data."""
    for value in values:
        if isinstance(value, Tensor) and value.dim() > 0:
            return frozenset({len(value)})
    return frozenset()
