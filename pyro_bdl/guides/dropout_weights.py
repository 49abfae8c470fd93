"""Which latents of a program are weights, and along which axis their input units lie."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyro_bdl.curvature.operations import LinearOperations, Tag
from pyro_bdl.layout import Layout
from pyro_bdl.modules import evaluation_mode, preserved_buffers, vmappable
from pyro_bdl.program import Run, record


@dataclass(frozen=True)
class Weight:
    """A latent that multiplies the units of a layer's input.

    :param site: its name.
    :param shape: its shape.
    :param axis: the axis of the input units: features of a product, channels of a convolution,
        rows of an embedding.
    :param groups: of a convolution; each has input units of its own, and output channels in the
        order of the groups.
    :param hidden: whether the input is computed from other latents or parameters.
    """

    site: str
    shape: torch.Size
    axis: int
    groups: int = 1
    hidden: bool = False

    def units(self) -> Tensor:
        """The number of each entry's input unit, of the weight's shape."""
        shape = [1] * len(self.shape)
        shape[self.axis] = self.shape[self.axis]
        units = torch.arange(self.shape[self.axis]).reshape(shape).expand(self.shape)
        if self.groups == 1:
            return units
        group = torch.arange(self.shape[0]) // (self.shape[0] // self.groups)
        group = group.reshape(-1, *[1] * (len(self.shape) - 1))
        return units + self.shape[self.axis] * group

    @property
    def num_units(self) -> int:
        return self.shape[self.axis] * self.groups


class WeightReader(LinearOperations):
    """Sees which latents enter a linear operation while a program runs.

    :param latents: site -> the very tensors that the program gets, which require gradients.
    """

    def __init__(self, latents: Mapping[str, Tensor]) -> None:
        super().__init__(latents)
        self.shapes = {name: value.shape for name, value in latents.items()}
        self.weights: dict[str, Weight] = {}
        self.inputs: list[Tensor] = []  # of the operation that runs

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        if func is F.batch_norm:  # has no matrix; statistics of the batch are no obstacle
            return func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.inputs = [leaf for leaf in leaves if id(leaf) not in self.tags]
        for leaf in leaves:
            tag = self.tags.get(id(leaf))
            if tag is not None and tag.indices is None:
                self._beyond(getattr(func, "__name__", ""), args, tag)
        return super().__torch_function__(func, types, args, kwargs)

    def _beyond(self, name: str, args: tuple, tag: Tag) -> None:
        """Operations on weights that the base class has no rule for."""
        if name in _TRANSPOSED and args[1] is tag.tensor:
            self._keep(Weight(tag.site, tag.tensor.shape, 0, hidden=args[0].requires_grad))
        elif name in _RECURRENT and tag.tensor.dim() == 2:
            hidden = args[0].requires_grad or "weight_ih_l0" not in tag.site
            self._keep(Weight(tag.site, tag.tensor.shape, 1, hidden=hidden))

    def add(self, tag: Tag, kind: str, output: Tensor, **options: Any) -> None:
        inputs, shape = options["inputs"], self.shapes[tag.site]
        if kind == "lookup":
            axis = 0 if tag.indices is None else None
        elif kind == "product" and inputs is not None:
            if options.get("unfold") is not None:
                axis = 1 if tag.indices is None else None
            else:
                axis = 1 if options["indices"] is None else _axis(options["indices"][0], shape)
        else:
            return
        if axis is not None:
            hidden = any(
                leaf.requires_grad and leaf.data_ptr() == inputs.data_ptr() for leaf in self.inputs
            )
            self._keep(Weight(tag.site, shape, axis, options.get("groups", 1), hidden))

    def _keep(self, weight: Weight) -> None:
        """The first use counts, but one with hidden units goes before."""
        before = self.weights.get(weight.site)
        if before is None or (weight.hidden and not before.hidden):
            self.weights[weight.site] = weight


_TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def _axis(indices: Tensor, shape: torch.Size) -> int | None:
    """The axis of a site along which the inputs of a product (out, in) lie; ``indices`` are the
    numbers of its entries in the flattened site."""
    stride = shape.numel()
    for axis, size in enumerate(shape):
        stride //= size
        coordinate = (indices // stride) % size
        if (coordinate == coordinate[:1]).all() and len(coordinate[0].unique()) == len(
            coordinate[0]
        ):
            return axis
    return None


def reading_run(
    reader: Callable[[Mapping[str, Tensor]], LinearOperations],
    model: Callable,
    layout: Layout,
    start: Tensor,
    args: tuple,
    kwargs: Mapping[str, Any],
) -> tuple[Any, Run]:
    """Run a program once, in evaluation mode, inside a reader of its weights.

    :param reader: makes the reader from the latents that it is to see.
    :param start: an unconstrained vector (P,).
    """
    leaves = {
        name: value.detach().clone().requires_grad_()
        for name, value in layout.unflatten(start).items()
        if _can_be_weight(layout, name)
    }
    others = {
        name: value.detach()
        for name, value in layout.constrain(start)[0].items()
        if name not in leaves and not layout.latents[name].plates
    }
    mode: Any = reader(leaves)
    with torch.enable_grad(), evaluation_mode(), preserved_buffers(), vmappable(), mode:
        run = record(model, {**leaves, **others}, args, kwargs)
    return mode, run


def _can_be_weight(layout: Layout, name: str) -> bool:
    latent = layout.latents[name]
    return not latent.plates and latent.transform is None


def num_data(run: Run) -> int | None:
    """How many data the observed sites of a run stand for; None where there is none."""
    counts = [
        round(site.distribution.batch_shape.numel() * site.subsampling)
        for site in run.observed.values()
    ]
    return sum(counts) if counts else None


class Source:
    """Where a guide has its rates from; called after the reading run."""

    reader: type[WeightReader] = WeightReader

    def __call__(self, reader: Any, layout: Layout) -> dict[str, tuple[Weight, float]]:
        """The dropped sites in the program's order, each with its rate."""
        raise NotImplementedError


# Which of them ------------------------------------------------------------------------------------


def chosen(
    weights: Mapping[str, Weight], layout: Layout, sites: str | Iterable[str]
) -> dict[str, Weight]:
    """The weights that a user means, in the program's order.

    :param sites: "hidden" for those whose inputs are hidden units, "all", or names and patterns
        with shell wildcards.
    :raises ValueError: for a name that is no latent site or no weight, a pattern without any.
    """
    if sites in ("hidden", "all"):
        kept = {n for n, weight in weights.items() if sites == "all" or weight.hidden}
    else:
        patterns = [sites] if isinstance(sites, str) else list(sites)
        kept = {name for pattern in patterns for name in matching(weights, layout, pattern)}
    return {name: weights[name] for name in layout.latents if name in kept}


def matching(weights: Mapping[str, Weight], layout: Layout, pattern: str) -> list[str]:
    """The weights that one name or pattern means.

    :raises ValueError: where there is none.
    """
    if not isinstance(pattern, str):
        raise TypeError(f"a site is given by its name or a pattern, got {type(pattern).__name__}")
    if pattern in weights:  # also a name with brackets in it
        return [pattern]
    found = [name for name in layout.latents if pattern == name or fnmatchcase(name, pattern)]
    if not found:
        near = difflib.get_close_matches(pattern, weights, n=3) or list(weights)
        raise ValueError(
            f"'{pattern}' is no latent site of the program; its weights are {_listed(near)}"
        )
    kept = [name for name in found if name in weights]
    if not kept:
        raise ValueError(
            f"'{pattern}' is no weight matrix, kernel or embedding, so that it has no input units "
            f"to drop; the program's weights are {_listed(weights)}"
        )
    return kept


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"
