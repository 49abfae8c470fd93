"""The weights among the latents of a program, and the axes of their input units."""

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.distributions.dropout_noise import checked_rate
from pyro_bdl.program.layout import Layout
from pyro_bdl.program.linear_ops.recognize import recognize
from pyro_bdl.program.linear_ops.tracker import Tag, Tracker
from pyro_bdl.program.trace import Run, record, sum_out_discrete
from pyro_bdl.utils.module_state import evaluation_mode, vmappable
from pyro_bdl.utils.trees import tree_leaves


@dataclass(frozen=True)
class Weight:
    """A latent that multiplies the units of a layer's input.

    :param site: its name.
    :param shape: its shape.
    :param axis: the axis of the input units: features of a product, channels of a convolution,
        rows of an embedding.
    :param groups: the groups of a convolution; each has its own input units, and output channels
        are ordered by group.
    :param hidden: whether the input is computed from other latents or parameters.
    :param tied: the number of each input unit's factor, where several share one.
    :param batch_dims: how many leading dimensions number the networks of plates; each of them has
        input units of its own.
    """

    site: str
    shape: torch.Size
    axis: int
    groups: int = 1
    hidden: bool = False
    tied: tuple[int, ...] | None = None
    batch_dims: int = 0

    @property
    def num_units(self) -> int:
        """The number of input units."""
        return self.shape[: self.batch_dims].numel() * self.shape[self.axis] * self.groups

    def factors(self) -> Tensor:
        """The number of each entry's factor, of the weight's shape."""
        if self.tied is None:
            return self.units()
        return self._of_each_network(torch.tensor(self.tied, device="cpu")[self._units()])

    def units(self) -> Tensor:
        """The number of each entry's input unit, of the weight's shape."""
        return self._of_each_network(self._units())

    def _of_each_network(self, numbers: Tensor) -> Tensor:
        """Other numbers for each of the networks of plates."""
        batch = self.shape[: self.batch_dims]
        networks = torch.arange(batch.numel(), device="cpu") * (numbers.max() + 1)
        return networks.reshape(batch + (1,) * numbers.dim()) + numbers

    def _units(self) -> Tensor:
        """The number of each entry's input unit in one network, of its weight's shape."""
        whole, axis = self.shape[self.batch_dims :], self.axis - self.batch_dims
        shape = [1] * len(whole)
        shape[axis] = whole[axis]
        units = torch.arange(whole[axis], device="cpu").reshape(shape).expand(whole)
        if self.groups == 1:
            return units
        group = torch.arange(whole[0], device="cpu") // (whole[0] // self.groups)
        return units + whole[axis] * group.reshape(-1, *[1] * (len(whole) - 1))


class WeightReader(Tracker):
    """Tracker that finds the latents that are weights while a program runs.

    :param latents: site -> the same tensor objects that the program gets; they require gradients.
    """

    def __init__(self, latents: Mapping[str, Tensor]) -> None:
        super().__init__(latents)
        self.weights: dict[str, Weight] = {}

    def operate(self, func: Any, args: tuple, kwargs: dict, tagged: list[Tag]) -> Any:
        result = func(*args, **kwargs)
        for product in _unit_products(func, args, kwargs, self):
            axis = product.axis()
            if axis is not None:
                self.use(product, axis)
        return result

    def following(self, model: Callable) -> AbstractContextManager:
        """A context that tells the reader which modules of the program are called."""
        return nullcontext()

    def use(self, product: "UnitProduct", axis: int) -> None:
        """Record a use of a weight. The first use counts, but a use with hidden units takes
        precedence."""
        site, shape = product.tag.site, product.tag.root.shape
        before = self.weights.get(site)
        if before is None or (product.hidden and not before.hidden):
            self.weights[site] = Weight(site, shape, axis, product.groups, product.hidden)


@dataclass(frozen=True)
class UnitProduct:
    """An operation that multiplies the units of its input with a weight.

    :param tag: the weight.
    :param dim: the dimension of the input units, in the weight as the operation takes it.
    :param input: the input.
    :param units: the dimension of the units in the input; None for indices.
    :param groups: the groups of a convolution.
    """

    tag: Tag
    dim: int
    input: Tensor
    units: int | None = -1
    groups: int = 1

    @property
    def hidden(self) -> bool:
        return self.input.requires_grad

    def axis(self) -> int | None:
        """The axis of the latent along which the input units lie."""
        if self.tag.whole:
            return self.dim
        numbers = self.tag.index().movedim(self.dim, -1)
        return _axis(numbers.reshape(-1, numbers.shape[-1]), self.tag.root.shape)


def _unit_products(func: Any, args: tuple, kwargs: dict, reader: Tracker) -> Iterator[UnitProduct]:
    """The products with latents that a torch function computes."""
    tag, name = reader.tag, getattr(func, "__name__", "")
    op = recognize(func, args, kwargs, reader.is_latent)
    if op is not None:
        weight = tag(op.weight)
        if weight and weight.tensor.dim() > 1 and op.kind != "scale":
            yield UnitProduct(weight, op.weight_dim, op.inputs, op.input_dim, op.groups)
    elif name in RECURRENT:
        for leaf in tree_leaves(args):
            weight = tag(leaf)
            if weight and leaf.dim() == 2:
                yield UnitProduct(weight, 1, args[0] if "weight_ih_l0" in weight.site else leaf)
    elif name in CELLS:
        for place, inputs in ((2, args[0]), (3, CELLS[name](args[1]))):
            weight = tag(args[place])
            if weight:
                yield UnitProduct(weight, 1, args[3] if inputs is None else inputs)


RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
# The component of a cell's state that enters only its weights; None if the state is used elsewhere
# too.
CELLS: dict[str, Callable[[Any], Tensor | None]] = {
    "lstm_cell": lambda state: state[0],
    "rnn_tanh_cell": lambda state: state,
    "rnn_relu_cell": lambda state: state,
    "gru_cell": lambda state: None,
}


def _axis(indices: Tensor, shape: torch.Size) -> int | None:
    """The last axis of a site along which the inputs of a product (out, in) lie.

    :param indices: the positions of the product's entries in the flattened site.
    """
    stride = 1
    for axis in reversed(range(len(shape))):  # what numbers networks comes first
        coordinate = (indices // stride) % shape[axis]
        stride *= shape[axis]
        if (coordinate == coordinate[:1]).all() and len(coordinate[0].unique()) == len(
            coordinate[0]
        ):
            return axis
    return None


def reading_run(
    reader: Callable[[Mapping[str, Tensor]], Tracker],
    model: Callable,
    layout: Layout,
    start: Tensor,
    args: tuple,
    kwargs: Mapping[str, Any],
    *,
    partial: Collection[str] = (),
) -> tuple[Any, Run]:
    """Run a program once in evaluation mode, inside a reader of its weights.

    :param reader: makes the reader from the latents that it should track.
    :param start: an unconstrained vector (P,).
    :param partial: sites of which a run has a part, which are not read.
    """
    leaves = {
        name: value.detach().clone().requires_grad_()
        for name, value in layout.unflatten(start).items()
        if _can_be_weight(layout, name) and name not in partial
    }
    others = {
        name: value.detach()
        for name, value in layout.constrain(start)[0].items()
        if name not in leaves and not layout.latents[name].plates
    }
    mode: Any = reader(leaves)
    with (
        torch.enable_grad(),
        evaluation_mode(model),
        vmappable(),
        mode.following(model),
        mode,
    ):
        run = record(model, {**leaves, **others}, args, kwargs, draw=sum_out_discrete)
    return mode, run


def _can_be_weight(layout: Layout, name: str) -> bool:
    """Return whether a latent may be a weight: in a plate a matrix, of a plate of networks."""
    latent = layout.latents[name]
    return latent.transform is None and (not latent.plates or latent.event_dim > 1)


def total_num_data(run: Run) -> int | None:
    """The total number of data of the observed sites of a run; None if there is none.

    For a site without a plate the first event dimension counts the data.
    """
    counts = []
    for site in run.observed.values():
        shape = site.distribution.batch_shape or site.distribution.event_shape[:1]
        counts.append(round(shape.numel() * site.subsampling))
    return sum(counts) if counts else None


def rates_by_pattern(p: Any, sites: Any) -> dict[str, float]:
    """Names and patterns of sites with their rates, from ``p`` and ``sites`` of ``AutoMCDropout``.

    :raises TypeError: for a rate that is not a number, sites that are not names.
    :raises ValueError: if a dict of rates is given together with sites, if either is empty, or if a
        rate does not lie between 0 and 1.
    """
    if isinstance(p, Mapping):
        if sites is not None:
            raise ValueError("p names the sites already: give either a dict of rates or sites=...")
        if not p:
            raise ValueError("p names no site: give at least one, such as {'*.weight': 0.1}")
        return {name: checked_rate(rate, f"p[{name!r}]") for name, rate in p.items()}
    rate = checked_rate(p, "p")
    if sites is None or isinstance(sites, str):
        return {sites or "hidden": rate}
    if not isinstance(sites, Iterable):
        raise TypeError(f'sites must be "hidden", "all" or names of weights, got {sites!r}')
    names = list(sites)
    if not names:
        raise ValueError('sites names no weight: give at least one name, "hidden" or "all"')
    return dict.fromkeys(names, rate)


def matching_rates(
    weights: Mapping[str, Weight], layout: Layout, patterns: Mapping[str, float]
) -> dict[str, tuple[Weight, float]]:
    """The weights that patterns select, in the program's order, each with its first rate.

    :param patterns: "hidden" for weights whose inputs are hidden units, "all", or names and
        patterns with shell wildcards.
    :raises ValueError: for a name that is not a latent site or not a weight, a pattern that matches
        no weight.
    """
    rates: dict[str, float] = {}
    for pattern, rate in patterns.items():
        for name in matching(weights, layout, pattern):
            rates.setdefault(name, rate)
    return {name: (weights[name], rates[name]) for name in layout.latents if name in rates}


def matching(weights: Mapping[str, Weight], layout: Layout, pattern: str) -> list[str]:
    """The weights that one name or pattern selects.

    :raises ValueError: if there is none.
    """
    if not isinstance(pattern, str):
        raise TypeError(f"a site is given by its name or a pattern, got {type(pattern).__name__}")
    if pattern in ("hidden", "all"):
        return [name for name, weight in weights.items() if pattern == "all" or weight.hidden]
    if pattern in weights:  # exact names first: a name may contain brackets
        return [pattern]
    found = [name for name in layout.latents if pattern == name or fnmatchcase(name, pattern)]
    if not found:
        if word := difflib.get_close_matches(pattern, ["hidden", "all"], n=1):
            hint = f"did you mean '{word[0]}'?"
        else:
            near = difflib.get_close_matches(pattern, weights, n=3) or list(weights)
            hint = f"its weights are {_listed(near)}"
        raise ValueError(f"'{pattern}' is not a latent site of the program; {hint}")
    kept = [name for name in found if name in weights]
    if not kept:
        raise ValueError(
            f"'{pattern}' is not a weight matrix, kernel or embedding, so that it has no input "
            f"units to drop; the program's weights are {_listed(weights)}"
        )
    return kept


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"
