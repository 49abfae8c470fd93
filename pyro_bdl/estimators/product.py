"""Linear operations of a network in one common form, as they see a single datum."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Distribution, Normal

from pyro_bdl.distributions.dropout_noise import NoisyWeight
from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.program.linear_ops.recognize import AffineOp
from pyro_bdl.program.linear_ops.tracker import Tag

Rearrange = Callable[[Tensor], Tensor]


def _same(x: Tensor) -> Tensor:
    return x


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
    """z = apply(a, w, b) of one datum, affine in the weight w and the bias b.

    :param apply: from inputs, a weight and a bias to outputs.
    :param inputs: a; for a look-up the numbers of the rows.
    :param weight: w.
    :param bias: b, or None.
    :param features: the axis of the features in inputs and outputs; all others are positions.
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
        """Return whether the datum uses the weight at several positions, as in sequences and
        images."""
        return output.numel() > output.shape[self.features]

    def along_features(self, values: Tensor, output: Tensor) -> Tensor:
        """Values (features,), reshaped to broadcast with inputs or outputs."""
        shape = [1] * output.dim()
        shape[self.features] = len(values)
        return values.reshape(shape)


def data_product(op: AffineOp | None, operand: Callable[[Any], Operand]) -> DataProduct | None:
    """An operation in the common form; None if it is not a product of data with latents.

    :param op: the recognized operation.
    :param operand: a function that wraps a tensor as an operand.
    """
    form = None if op is None else _FORMS.get(op.kind)
    if op is None or form is None or not op.is_plain or operand(op.inputs).tag is not None:
        return None
    bias = None if op.bias is None else operand(op.bias)
    product = form(op, operand(op.weight), bias)
    return product if product is not None and product.operands else None


def _linear(op: AffineOp, weight: Operand, bias: Operand | None) -> DataProduct | None:
    """a w' + b for a (..., in) and w (out, in)."""
    if bias is not None and (bias.value.dim() != 1 or op.output_dim != op.bias_dim):
        return None
    is_vector = weight.value.dim() == 1

    def back(z: Tensor) -> Tensor:
        return z[..., 0] if is_vector else op.permute_output(z)

    weight = Operand(op.as_matrix(weight.value), weight.tag, weight.distribution, op.as_matrix)
    return DataProduct(F.linear, op.rows(), weight, bias, back=back)


def _convolution(op: AffineOp, weight: Operand, bias: Operand | None) -> DataProduct:
    def apply(a: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return op.function(a, w, b, **op.settings)

    assert op.input_dim is not None
    return DataProduct(apply, op.inputs, weight, bias, features=op.input_dim, groups=op.groups)


def _embedding(op: AffineOp, weight: Operand, bias: None) -> DataProduct:
    def apply(a: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return F.embedding(a, w, **op.settings)

    return DataProduct(apply, op.inputs, weight, None, is_lookup=True)


_FORMS: dict[str, Callable[[AffineOp, Operand, Any], DataProduct | None]] = {
    "product": _linear,
    "convolution": _convolution,
    "embedding": _embedding,
}
