"""The operations in which a program uses its latents, for derivatives.

While a program runs inside ``UseRecorder``, every product, convolution, look-up and bias becomes an
``AffineUse``. The gradient of any output in the latent is then the product of the operation's
input a and the gradient g of its output z. A latent in another operation, such as the scale of a
normalization, is a "dense" use, whose gradient is that of the operand itself.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.program.linear_ops.last_layer import Path
from pyro_bdl.program.linear_ops.recognize import AffineOp, recognize
from pyro_bdl.program.linear_ops.tracker import Tag, Tracker
from pyro_bdl.program.vmap import InsideAnotherMapError, attach_row, depends_on_row
from pyro_bdl.utils.trees import tensors_in, tree_map


@dataclass
class AffineUse:
    """One use of a latent: z = op(a, w), affine in w. Shapes are those of one datum.

    :param number: the number of this use of the site.
    :param op: the number of the operation, which its weight and its bias share.
    :param kind: "product" for z = a w' (also convolutions, as products of patches; a is None for
        a bias, whose input is 1), "lookup" for rows of an embedding, "dense" for z = w, the operand
        of any other operation.
    :param indices: the site's entries in the operation's weight, (groups, out, in) for a product,
        (rows, features) for a look-up; None: all, in order.
    :param shape: the weight's shape in that form.
    :param inputs: a as given to the operation: (*lead, in), an image for a convolution, indices
        for a look-up (-1: none). In a map over rows, what this returns of them has the rows in
        front.
    :param to_rows: brings z or its gradient to (*lead, features).
    :param unfold: brings the inputs, with the data axis first and the other axes flattened, to (n,
        T, groups, in); None for plain products.
    """

    site: str
    number: int
    op: int
    kind: str
    indices: Tensor | None
    shape: torch.Size
    output_shape: torch.Size
    dtype: torch.dtype
    inputs: Tensor | None
    to_rows: Callable[[Tensor], Tensor] | None = None
    unfold: Callable[[Tensor], Tensor] | None = None
    groups: int = 1


class UnseenUseError(Exception):
    """Latents are used in a way that a recorder cannot follow.

    :param sites: the latents.
    """

    def __init__(self, sites: set[str]) -> None:
        super().__init__(f"uses of {', '.join(sorted(sites))} cannot be followed")
        self.sites = sites


class UseRecorder(Tracker):
    """Tracker that records the uses of latents while a program runs.

    :param latents: site -> the same tensor objects that the program gets.
    :param lane: a number of each row of data, inside a map over rows (``program/rows.py``); None
        for a run over all data.
    :param differentiable: keep the graph of inputs and gradients.
    :ivar paths: what tensors of the run are of an operation's result z, by site and name, where
        they have a number for each of z, in order.
    """

    def __init__(
        self,
        latents: Mapping[str, Tensor],
        lane: Tensor | None = None,
        *,
        differentiable: bool = False,
    ) -> None:
        super().__init__(latents)
        self.differentiable = differentiable
        self.uses: list[AffineUse] = []
        self.edges: list[GradientEdge | None] = []  # of each operation's z in autograd's graph
        self.paths: dict[tuple[str, str], Path] = {}
        self.lane, self.mapped = lane, False  # whether the rows are mapped, or taken in a loop
        self._counts: Counter[str] = Counter()

    def operate(self, func: Any, args: tuple, kwargs: dict, tagged: list[Tag]) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            raise UnseenUseError({tag.site for tag in tagged})  # changed in place
        if name == "detach":
            return func(*args, **kwargs)
        op = recognize(func, args, kwargs, self.is_latent)
        if op is not None and op.settings.get("training"):
            raise UnsupportedProgramError(
                "a BatchNorm layer without running statistics computes with the batch's own, which "
                "makes data depend on each other: make it with track_running_stats=True and train "
                'again, use GroupNorm or LayerNorm, or declare rows="together"'
            )
        try:
            return self._record(op, func, args, kwargs, tagged)
        except InsideAnotherMapError as error:
            raise UnseenUseError({tag.site for tag in tagged}) from error

    def _record(
        self, op: AffineOp | None, func: Any, args: tuple, kwargs: dict, tagged: list[Tag]
    ) -> Any:
        if op is None or not op.is_plain or any(repeats(tag.indices) for tag in tagged):
            return self._dense(func, args, kwargs, tagged)
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor) or (self.lane is None and not result.requires_grad):
            return result
        number = len(self.edges)
        known = op.kind in _RECORDERS and result.dim() > 0
        recorded = _RECORDERS[op.kind](self, op, result) if known else []
        self.edges += [None] if recorded else []
        matched = {id(tag.tensor) for tag in recorded}
        others = [tag for tag in tagged if id(tag.tensor) not in matched]
        if others:
            result = self._dense(func, args, kwargs, others)
        if recorded:
            result, self.edges[number] = self._tapped(result)
        return result

    def _is_view(self, func: Any, args: tuple, tagged: list[Tag]) -> bool:
        """Return whether all rows take the same view: no rows of a table at indices of the data."""
        lane = self.lane
        try:
            if lane is not None and any(depends_on_row(x, lane) for x in tensors_in(args[1:])):
                return False
        except InsideAnotherMapError:  # which rows have these indices is not known
            return False
        return super()._is_view(func, args, tagged)

    def inputs(self) -> dict[int, Tensor]:
        """The inputs of the uses that have some, by their place among all."""
        return {n: use.inputs for n, use in enumerate(self.uses) if use.inputs is not None}

    def _dense(self, func: Any, args: tuple, kwargs: dict, tagged: list[Tag]) -> Any:
        """Compute a function of latents, whose gradients are then those of its operands."""
        uses, operands = [], {}
        for tag in tagged:
            operand, edge = self._tapped(tag.tensor)
            operands[id(tag.tensor)] = operand
            indices = None if tag.indices is None else tag.indices.reshape(-1)
            uses.append((tag, edge, indices))

        def operand_of(leaf: Any) -> Any:
            return operands.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf

        args, kwargs = tree_map(operand_of, (args, kwargs))
        result = func(*args, **kwargs)
        outputs = tensors_in(result)
        flows = self.lane is not None or any(leaf.requires_grad for leaf in outputs)
        if not outputs or not flows:
            return result
        for tag, edge, indices in uses:
            shape = torch.Size((tag.tensor.numel(),))
            self.add(tag, "dense", tag.tensor, indices=indices, shape=shape, inputs=None)
            self.edges.append(edge)
        return result

    def latent(self, site: str, value: Tensor) -> Tensor:
        """The value of a latent whose gradient is taken as a whole, however it is used."""
        tag = Tag(site, value, value)
        result, edge = self._tapped(value)
        shape = torch.Size((value.numel(),))
        self.add(tag, "dense", value, indices=None, shape=shape, inputs=None)
        self.edges.append(edge)
        return result

    def _tapped(self, value: Tensor) -> tuple[Tensor, GradientEdge | None]:
        result, outside = attach_row(value, self.lane)
        self.mapped = outside is not result
        return result, get_gradient_edge(outside) if outside.requires_grad else None

    def add(
        self, tag: Tag, kind: str, output: Tensor, *, inputs: Tensor | None, **options: Any
    ) -> None:
        if inputs is not None:
            inputs = inputs if self.differentiable else inputs.detach()
        self.uses.append(
            AffineUse(
                site=tag.site,
                number=self._counts[tag.site],
                op=len(self.edges),
                kind=kind,
                output_shape=output.shape,
                dtype=output.dtype,
                inputs=inputs,
                **options,
            )
        )
        self._counts[tag.site] += 1


def repeats(indices: Tensor | None) -> bool:
    return indices is not None and len(indices.unique()) < indices.numel()


def _product(mode: UseRecorder, op: AffineOp, output: Tensor) -> list[Tag]:
    """Record z = a w' + b."""
    weight = mode.tag(op.weight)
    if weight is None or mode.is_latent(op.inputs):
        return _bias(mode, op, output)
    if weight.tensor.dim() == 1:
        return _bias(mode, op, output)
    indices = weight.indices
    if op.weight_dim == 0:
        indices = op.as_matrix(weight.index())
    shape = torch.Size((1, *op.as_matrix(weight.tensor).shape))
    mode.add(
        weight,
        "product",
        output,
        indices=None if indices is None else indices.reshape(shape),
        shape=shape,
        inputs=op.rows(),
        to_rows=None if op.output_dim == -1 else op.permute_output,
    )
    return [weight, *_bias(mode, op, output)]


def _bias(
    mode: UseRecorder,
    op: AffineOp,
    output: Tensor,
    to_rows: Callable[[Tensor], Tensor] | None = None,
) -> list[Tag]:
    """Record z = ... + b with b along the features."""
    tag = mode.tag(op.bias)
    if tag is None or tag.tensor.shape != output.shape[op.bias_dim :][:1]:
        return []
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
    return [tag]


def _convolution(mode: UseRecorder, op: AffineOp, output: Tensor) -> list[Tag]:
    if op.input_dim != 1 or mode.is_latent(op.inputs):  # no data axis
        return []

    def to_rows(z: Tensor) -> Tensor:  # (rows, channels, *positions) -> (rows, positions, channels)
        return z.flatten(2).mT

    tag = mode.tag(op.weight)
    if tag is None:
        return _bias(mode, op, output, to_rows)
    weight, groups = tag.tensor, op.groups
    shape = torch.Size((groups, weight.shape[0] // groups, weight[0].numel()))
    mode.add(
        tag,
        "product",
        output,
        indices=None if tag.indices is None else tag.indices.reshape(shape),
        shape=shape,
        inputs=op.inputs,
        to_rows=to_rows,
        unfold=unfolding(op),
        groups=groups,
    )
    return [tag, *_bias(mode, op, output, to_rows)]


def _embedding(mode: UseRecorder, op: AffineOp, output: Tensor) -> list[Tag]:
    tag = mode.tag(op.weight)
    if tag is None:
        return []
    inputs, padding = op.inputs, op.settings["padding_idx"]
    if padding is not None:  # the padding row has no gradient, as in autograd
        inputs = inputs.masked_fill(inputs == padding % len(tag.tensor), -1)
    mode.add(tag, "lookup", output, indices=tag.indices, shape=tag.tensor.shape, inputs=inputs)
    return [tag]


def _addition(mode: UseRecorder, op: AffineOp, output: Tensor) -> list[Tag]:
    """Record z = x + b."""
    return _bias(mode, op, output) if op.sign > 0 and output.dim() > 1 else []


_RECORDERS: dict[str, Callable[[UseRecorder, AffineOp, Tensor], list[Tag]]] = {
    "product": _product,
    "convolution": _convolution,
    "embedding": _embedding,
    "addition": _addition,
}


def unfolding(op: AffineOp) -> Callable[[Tensor], Tensor]:
    """The function from the images of a convolution to their patches."""
    kernel = tuple(op.weight.shape[2:])
    return partial(
        patches,
        kernel=kernel,
        stride=_spread(op.settings.get("stride", 1), len(kernel)),
        dilation=_spread(op.settings.get("dilation", 1), len(kernel)),
        padding=op.settings.get("padding", 0),
        groups=op.groups,
    )


def patches(
    images: Tensor,
    *,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: str | int | tuple[int, ...],
    groups: int,
) -> Tensor:
    """Return the inputs of every output position, (n, positions, groups, channels/groups * kernel).

    :param images: (n, channels, *spatial), of any number of spatial dimensions.
    :param padding: as in ``torch.nn.functional.conv2d``, including "same" and "valid".
    """
    dims = len(kernel)
    images = F.pad(images, _padding(padding, kernel, dilation))
    if dims <= 2:
        return _image_patches(images, kernel, stride, dilation, groups)
    for d in range(dims):
        reach = dilation[d] * (kernel[d] - 1) + 1
        images = images.unfold(2 + d, reach, stride[d])
        if dilation[d] > 1:
            images = images[..., :: dilation[d]]
    n, channels = images.shape[:2]
    images = images.unflatten(1, (groups, channels // groups))
    # (n, groups, channels, *positions, *kernel)
    positions = tuple(range(3, 3 + dims))
    window = tuple(range(3 + dims, 3 + 2 * dims))
    images = images.permute(0, *positions, 1, 2, *window)
    return images.reshape(n, -1, groups, channels // groups * math.prod(kernel))


def _image_patches(
    images: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Tensor:
    """Return patches by torch's ``unfold``, which is faster; sequences are images of height 1."""
    if len(kernel) == 1:
        images, kernel = images[:, :, None], (1, *kernel)
        stride, dilation = (1, *stride), (1, *dilation)
    columns = F.unfold(images, kernel, dilation=dilation, stride=stride)  # (n, in, positions)
    return columns.mT.unflatten(-1, (groups, -1))


def _padding(
    padding: str | int | tuple[int, ...], kernel: tuple[int, ...], dilation: tuple[int, ...]
) -> list[int]:
    """Return padding in the order of ``F.pad``: last dimension first, left and right."""
    result: list[int] = []
    for d in reversed(range(len(kernel))):
        if padding == "valid":
            result += [0, 0]
        elif padding == "same":
            total = dilation[d] * (kernel[d] - 1)
            result += [total // 2, total - total // 2]
        else:
            assert not isinstance(padding, str)
            size = padding if isinstance(padding, int) else padding[d % len(padding)]
            result += [size, size]
    return result


def _spread(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * (dims if len(value) == 1 else 1)
