"""Dropout layers of a network, converted to rates of the weights that their outputs feed.

A dropout layer multiplies the units h of a layer by factors eps. Since W (eps h) = (W diag(eps)) h,
the factors can be moved to the next weight W (Gal & Ghahramani 2016, section 3). Operations between
the layer and the weight must let the factors pass: ReLU, views, multiplication by a number; for
factors of whole channels reshapes and pooling.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_bdl.errors import warn
from pyro_bdl.guides.dropout.weights import RECURRENT, UnitProduct, WeightReader
from pyro_bdl.program.layout import Layout
from pyro_bdl.program.linear_ops.recognize import decompose
from pyro_bdl.program.linear_ops.tracker import CASTS, VIEWS, Tag
from pyro_bdl.utils.module_state import hooked
from pyro_bdl.utils.trees import tensors_in, tree_leaves
from pyro_bdl.utils.validation import real_number

_ELEMENTS = {F.dropout, torch.dropout}
_CHANNELS = {F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout}
_AFFINE = {F.alpha_dropout, F.feature_alpha_dropout}
_SCALINGS = {"mul", "rmul", "div", "true_divide", "truediv"}
_PASSING = {"relu", "leaky_relu"} | CASTS
_SHAPES = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", "clone"}
_POOLINGS = {"max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool"}


@dataclass(eq=False)
class DropoutCall:
    """A call of dropout.

    :param rate: p.
    :param module: the module that drops; None outside of modules.
    :param shape: that of its input.
    :param channels: whether each channel has a factor, and not each number of a datum.
    :param obstacle: why no weight can have its factors; None if one can.
    """

    rate: float
    module: nn.Module | None
    shape: tuple[int, ...] = ()
    channels: bool = False
    obstacle: str | None = None

    def lets_pass(self, name: str, args: tuple) -> bool:
        """Return whether its factors multiply the result of an operation on its output."""
        if name in _PASSING:
            return True
        if name in _SCALINGS:
            return any(isinstance(arg, int | float) for arg in args)
        if self.channels:
            return name in _SHAPES or name.rstrip("123d") in _POOLINGS
        return name in VIEWS

    def arrives(self, inputs: Tensor, dim: int) -> "UnitFactors":
        """The layer's factors at the input of a weight, whose units are along a dimension."""
        size, dim = inputs.shape[dim], dim % inputs.dim()
        if not self.channels:
            return UnitFactors(self, None, inputs.numel() > self.shape[0] * size)
        each, rest = divmod(size, self.shape[1])
        rows_stay, flat = len(inputs) == self.shape[0], inputs.dim() == 2
        if dim != 1 or rest or not rows_stay or (each > 1 and not flat):
            self.obstacle = self.obstacle or "its channels are no units of the next weight"
        numbers = tuple(i // each for i in range(size)) if each > 1 else None
        return UnitFactors(self, numbers, False)


@dataclass(frozen=True)
class UnitFactors:
    """A layer's factors at the input of a weight.

    :param numbers: the number of each input unit's factor; None if each has its own.
    :param shared: whether each position had its own factors, which one weight cannot express.
    """

    layer: DropoutCall
    numbers: tuple[int, ...] | None
    shared: bool


class LayerReader(WeightReader):
    """Tracker that follows the outputs of dropout layers to the weights that they feed."""

    def __init__(self, latents: Mapping[str, Tensor]) -> None:
        super().__init__(latents)
        self.layers: list[DropoutCall] = []
        self.uses: dict[str, list[set[UnitFactors]]] = {}  # of each weight
        self._marks: dict[int, tuple[Tensor, set[DropoutCall]]] = {}  # by the ids of the tensors
        self._calls: list[nn.Module] = []
        self._multiplied: set[int] = set()  # ids of the inputs that the operation multiplies

    def following(self, model: Callable) -> AbstractContextManager:
        return hooked(self._called, self._returned, model)

    def _called(self, module: nn.Module, args: Any) -> None:
        self._calls.append(module)

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        self._calls.pop()

    def _layer(self, rate: float, **options: Any) -> DropoutCall:
        module = self._calls[-1] if self._calls else None
        self.layers.append(DropoutCall(float(rate), module, **options))
        return self.layers[-1]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ELEMENTS | _CHANNELS | _AFFINE:
            return self._drop(func, *args, **kwargs)
        self._multiplied = set()
        result = super().__torch_function__(func, types, args, kwargs)
        if func is F.multi_head_attention_forward and args[10] > 0:
            self._layer(args[10], obstacle="it drops attention weights")
        if decompose(func, args, kwargs, self.is_latent) is None:  # else seen part by part
            self._pass_on(func, args, kwargs, result)
        return result

    def _of(self, value: Any) -> set[DropoutCall]:
        """The layers whose factors multiply a value."""
        return self._marks[id(value)][1] if id(value) in self._marks else set()

    def _mark(self, value: Tensor, layers: set[DropoutCall]) -> None:
        self._marks[id(value)] = value, self._of(value) | layers

    def _drop(
        self, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not p > 0:
            return input
        layer = self._layer(p, shape=input.shape, channels=func in _CHANNELS)
        if training:  # all modules are in evaluation mode here
            raise ValueError(
                f"{type(layer.module).__name__}({p:g}) drops in evaluation mode too, on top of "
                "what the guide would drop: call F.dropout with training=self.training, or use "
                "nn.Dropout"
            )
        if func in _AFFINE:
            layer.obstacle = "alpha dropout shifts units instead of multiplying them"
        output = input if inplace else input.clone()  # a new object without factors
        self._mark(output, self._of(input) | {layer})
        return output

    def _pass_on(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        """Follow the factors of an operation's inputs to its results."""
        outputs = tensors_in(result)
        name = getattr(func, "__name__", "").strip("_")
        is_new = not any(leaf.is_floating_point() for leaf in outputs) or name.startswith("new_")
        for leaf in tree_leaves((args, kwargs)):
            if id(leaf) in self._multiplied or (is_new and not self._multiplied):
                continue  # the weight takes the factors, or a size or comparison has none
            layers = self._of(leaf)
            passing = {x for x in layers if not self._multiplied and x.lets_pass(name, args)}
            for layer in layers - passing:
                layer.obstacle = layer.obstacle or f"its output enters '{name}'"
            for output in outputs if passing else ():
                self._mark(output, passing)

    def use(self, product: UnitProduct) -> None:
        super().use(product)
        self._multiplied.add(id(product.input))
        layers, dim = self._of(product.input), product.input_dim
        arrivals = {layer.arrives(product.input, dim) for layer in layers if dim is not None}
        self.uses.setdefault(product.tag.site, []).append(arrivals)

    def operate(self, func: Any, args: tuple, kwargs: dict, tagged: list[Tag]) -> Any:
        """Handle recurrent modules, which drop the outputs of every layer except the last."""
        result = super().operate(func, args, kwargs, tagged)
        if getattr(func, "__name__", "") in RECURRENT:
            first = 4 if isinstance(args[3], bool) else 5  # packed sequences add batch sizes
            layers, rate = args[first : first + 2]
            if rate > 0 and layers > 1:
                arrival = UnitFactors(self._layer(rate), None, True)
                for site in (tag.site for tag in tagged):
                    if "weight_ih_l" in site and "weight_ih_l0" not in site:
                        self.uses[site][-1].add(arrival)
        return result


def rates_of_layers(reader: LayerReader, layout: Layout, model: Any) -> dict[str, float]:
    """The rates of the weights that a network's dropout layers feed; ``reader.weights`` gets the
    input units that share a factor.

    :raises ValueError: if the program has no dropout layer, or none can be expressed.
    """
    if not reader.layers:
        raise ValueError(
            "the program has no dropout layer with a rate above 0: give the rate as "
            "AutoMCDropout(model, p=...)"
        )
    rates: dict[str, float] = {}
    notes, shared = [], []
    fed: dict[DropoutCall, list[str]] = {layer: [] for layer in reader.layers}
    for site, latent in layout.latents.items():
        uses = [{a for a in use if not a.layer.obstacle} for use in reader.uses.get(site, ())]
        arrivals = set().union(*uses)
        if not arrivals:
            continue
        for layer in {arrival.layer for arrival in arrivals}:
            fed[layer].append(site)
        numbers = {arrival.numbers for arrival in arrivals}
        found = {tuple(sorted(arrival.layer.rate for arrival in use)) for use in uses}
        if len(found) > 1 or len(numbers) > 1:
            notes.append(
                f"'{site}' is left out, since dropout layers with other rates or units meet"
            )
            continue
        dropped = (real_number(p, "the rate of a dropout layer", "(0, 1)") for p in min(found))
        rates[site] = 1.0 - math.prod(1.0 - p for p in dropped)
        (tied,) = numbers
        if tied is not None:
            units = torch.tensor(tied, device="cpu")[reader.weights[site].units]
            reader.weights[site] = replace(reader.weights[site], units=units)
        again = not latent.plates and any(use != uses[0] for use in uses)  # else once a network
        if again or any(arrival.shared for arrival in arrivals):
            shared.append(f"'{site}'")
    names = {m: n for n, m in model.named_modules()} if isinstance(model, nn.Module) else {}
    for layer, sites in fed.items():
        what = f"{type(layer.module).__name__}({layer.rate:g}) '{names.get(layer.module)}'"
        if layer.obstacle or not sites:
            why = layer.obstacle or "it feeds no weight with a prior"
            notes.append(f"{what} is left out, since {why}")
        elif len(sites) > 1:
            listed = ", ".join(map(repr, sites))
            notes.append(f"{what} feeds {listed}, which get separate factors")
    if not rates:
        raise ValueError(f"no dropout layer can be turned into a guide: {'; '.join(notes)}")
    if shared:
        notes.append(
            f"the factors of {', '.join(shared)} are the same at all positions and in all calls, "
            "where the layers have separate ones"
        )
    if notes:
        warn(f"dropout layers as a guide: {'; '.join(notes)}", "dropout")
    return rates
