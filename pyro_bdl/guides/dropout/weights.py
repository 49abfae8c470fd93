"""The weights among the latents of a program, and the units of their inputs."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.program.layout import Latent, Layout
from pyro_bdl.program.linear_ops.recognize import recognize
from pyro_bdl.program.linear_ops.tracker import Tag, Tracker
from pyro_bdl.program.trace import Run, record, sum_out_discrete
from pyro_bdl.utils.module_state import evaluation_mode, vmappable
from pyro_bdl.utils.trees import tree_leaves
from pyro_bdl.utils.validation import real_number, require


@dataclass(frozen=True)
class Weight:
    """A latent that multiplies the units of a layer's input.

    :param units: the number of each entry's input unit, of the latent's shape: a feature of a
        product, a channel of a convolution, a row of an embedding.
    :param hidden: whether the input is computed from other latents or parameters.
    """

    units: Tensor
    hidden: bool

    @property
    def num_units(self) -> int:
        return int(self.units.max()) + 1

    def of_networks(self, latent: Latent) -> "Weight":
        """The weight in which each network of a plate has input units of its own."""
        batch = latent.shape[: len(latent.shape) - latent.event_dim]
        first = self.num_units * torch.arange(batch.numel(), device="cpu")
        return replace(
            self, units=self.units.clamp(min=0) + first.reshape(*batch, *[1] * latent.event_dim)
        )


@dataclass(frozen=True)
class UnitProduct:
    """An operation that multiplies the units of its input with a weight.

    :param tag: the weight.
    :param units: the number of each entry's input unit, of the weight as the operation takes it.
    :param input: the input.
    :param input_dim: the dimension of the units in the input; None for indices.
    """

    tag: Tag
    units: Tensor
    input: Tensor
    input_dim: int | None = -1


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
            self.use(product)
        return result

    def following(self, model: Callable) -> AbstractContextManager:
        """A context that tells the reader which modules of the program are called."""
        return nullcontext()

    def use(self, product: UnitProduct) -> None:
        """Record a use of a weight. The first use of an entry counts, but a use with hidden units
        takes precedence."""
        tag, hidden = product.tag, product.input.requires_grad
        weight = self.weights.get(tag.site)
        if weight is None or (hidden and not weight.hidden):
            units = torch.full(tag.root.shape, -1, device="cpu")
            weight = self.weights[tag.site] = Weight(units, hidden)
        entries, numbers = tag.index().flatten().cpu(), weight.units.view(-1)
        new = numbers[entries] < 0
        numbers[entries[new]] = product.units.flatten()[new]


def _unit_products(func: Any, args: tuple, kwargs: dict, reader: Tracker) -> Iterator[UnitProduct]:
    """The products with latents that a torch function computes."""
    tag, name = reader.tag, getattr(func, "__name__", "")
    op = recognize(func, args, kwargs, reader.is_latent)
    if op is not None:
        weight = tag(op.weight)
        if weight and weight.tensor.dim() > 1 and op.kind != "scale":
            units = _numbers(op.weight, op.weight_dim, op.groups)
            yield UnitProduct(weight, units, op.inputs, op.input_dim)
    elif name in RECURRENT:
        for leaf in tree_leaves(args):
            weight = tag(leaf)
            if weight and leaf.dim() == 2:
                inputs = args[0] if "weight_ih_l0" in weight.site else leaf
                yield UnitProduct(weight, _numbers(leaf, 1), inputs)
    elif name in CELLS:
        for place, inputs in ((2, args[0]), (3, CELLS[name](args[1]))):
            weight = tag(args[place])
            if weight:
                inputs = args[3] if inputs is None else inputs
                yield UnitProduct(weight, _numbers(args[place], 1), inputs)


def _numbers(weight: Tensor, dim: int, groups: int = 1) -> Tensor:
    """The number of each entry's input unit: its place along ``dim``, in a convolution's groups of
    output channels those of the group."""
    size, (first, *others) = weight.shape[dim], weight.shape
    group = torch.arange(first, device="cpu") * groups // first
    group = (size * group).reshape(first, *[1] * len(others)).expand(weight.shape)
    return group + torch.arange(size, device="cpu").reshape(size, *[1] * (weight.dim() - dim - 1))


RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
# The component of a cell's state that enters only its weights; None if the state is used elsewhere
# too.
CELLS: dict[str, Callable[[Any], Tensor | None]] = {
    "lstm_cell": lambda state: state[0],
    "rnn_tanh_cell": lambda state: state,
    "rnn_relu_cell": lambda state: state,
    "gru_cell": lambda state: None,
}


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
        if _can_be_weight(layout.latents[name]) and name not in partial
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


def _can_be_weight(latent: Latent) -> bool:
    """Return whether a latent may be a weight: in a plate a matrix, of a plate of networks."""
    return latent.transform is None and (not latent.plates or latent.event_dim > 1)


def rates_by_pattern(p: Any, sites: Any) -> dict[str, float]:
    """Names and patterns of sites with their rates, from ``p`` and ``sites`` of ``AutoMCDropout``.

    :raises TypeError: for a rate that is not a number, sites that are not names.
    :raises ValueError: if a dict of rates is given together with sites, if either is empty, or if a
        rate does not lie between 0 and 1.
    """
    if isinstance(p, Mapping):
        if sites is not None:
            raise ValueError("p names the sites already: give either a dict of rates or sites=...")
        rates = {name: real_number(rate, f"p[{name!r}]", "(0, 1)") for name, rate in p.items()}
    else:
        names = [sites or "hidden"] if isinstance(sites, str | None) else sites
        require(names, Iterable, 'sites must be "hidden", "all" or names of weights')
        rates = dict.fromkeys(names, real_number(p, "p", "(0, 1)"))
    for name in rates:
        require(name, str, "a site is given by its name or a pattern")
    if not rates:
        raise ValueError('give at least one name of a weight, such as {"*.weight": 0.1}, or "all"')
    return rates


def matching_rates(
    weights: Mapping[str, Weight], layout: Layout, patterns: Mapping[str, float]
) -> dict[str, float]:
    """The weights that patterns select, in the program's order, each with its first rate.

    :param patterns: "hidden" for weights whose inputs are hidden units, "all", or names and
        patterns with shell wildcards.
    :raises ValueError: for a pattern that matches no weight.
    """
    rates: dict[str, float] = {}
    for pattern, rate in patterns.items():
        for name in _matching(weights, layout, pattern):
            rates.setdefault(name, rate)
    return {name: rates[name] for name in layout.latents if name in rates}


def _matching(weights: Mapping[str, Weight], layout: Layout, pattern: str) -> list[str]:
    if pattern in ("hidden", "all"):
        return [name for name, weight in weights.items() if pattern == "all" or weight.hidden]
    if pattern in weights:  # exact names first: a name may contain brackets
        return [pattern]
    found = [name for name in layout.latents if pattern == name or fnmatchcase(name, pattern)]
    chosen = [name for name in found if name in weights]
    if not chosen:
        what = "a weight matrix, kernel or embedding" if found else "a latent site of the program"
        names = ", ".join(f"'{name}'" for name in weights) or "none"
        raise ValueError(
            f"'{pattern}' is not {what}: give 'hidden', 'all' or some of its weights, {names}"
        )
    return chosen
