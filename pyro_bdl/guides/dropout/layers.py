"""Dropout layers of a network, converted to rates of the weights that their outputs feed.

A dropout layer multiplies the units h of a layer by factors eps. Since W (eps h) = (W diag(eps)) h,
the factors can be moved to the next weight W (Gal & Ghahramani 2016, section 3). Operations between
the layer and the weight must let the factors pass: ReLU, reshapes, pooling of whole channels,
multiplication by a number.
"""

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_bdl.distributions.dropout_noise import checked_rate
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides.dropout.weights import RECURRENT, UnitProduct, Weight, WeightReader
from pyro_bdl.program.layout import Layout
from pyro_bdl.program.linear_ops.recognize import decompose
from pyro_bdl.program.linear_ops.tracker import CASTS, VIEWS, Tag
from pyro_bdl.program.network_sites import SampledNetwork
from pyro_bdl.utils.module_state import hooked, modules_of
from pyro_bdl.utils.trees import tree_leaves

_ELEMENTS = {F.dropout, torch.dropout}
_CHANNELS = {F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout}
_AFFINE = {F.alpha_dropout, F.feature_alpha_dropout}
_HOMOGENEOUS = {"relu", "leaky_relu"}
_SCALINGS = {"mul", "rmul", "div", "true_divide", "truediv"}
_OUTPUTS = {"broadcast_tensors": "it drops outputs of the network"}  # parameters of a distribution
_POOLINGS = {"max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool", "mean", "amax"}


@dataclass(frozen=True)
class _Factors:
    """For each number of a tensor, the unit of one dropout layer whose factor multiplies it."""

    layer: int
    units: Tensor  # float64, with the tensor's shape
    tensor: Tensor  # kept, so that its id is not reused


@dataclass(frozen=True)
class _Arrival:
    """A layer's factors at the input of a weight.

    :param tied: the number of each input unit's factor; None if each has its own.
    :param shared: whether each position had its own factors, which one weight cannot express.
    """

    layer: int
    tied: tuple[int, ...] | None
    shared: bool


class LayerReader(WeightReader):
    """Tracker that follows the outputs of dropout layers to the weights that they feed."""

    def __init__(self, latents: Mapping[str, Tensor]) -> None:
        super().__init__(latents)
        self.rates: list[float] = []  # of each layer, in the order of the calls
        self.modules: list[nn.Module | None] = []
        self.stops: dict[int, str] = {}  # why a layer cannot be expressed
        self.always: list[int] = []  # layers that drop even in evaluation mode
        self.arrivals: dict[str, list[set[_Arrival]]] = {}  # of each use of a weight
        self._factors: dict[int, list[_Factors]] = {}
        self._calls: list[nn.Module] = []
        self._used: set[int] = set()  # ids of the inputs that the current operation multiplies

    def following(self, model: Callable) -> AbstractContextManager:
        return hooked(modules_of(model), self._called, self._returned)

    def _called(self, module: nn.Module, args: Any) -> None:
        self._calls.append(module)

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        self._calls.pop()

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        """The modules that drop units in training mode."""
        return tuple(dict.fromkeys(module for module in self.modules if module is not None))

    def _layer(self, rate: float) -> int:
        self.rates.append(float(rate))
        self.modules.append(self._calls[-1] if self._calls else None)
        return len(self.rates) - 1

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ELEMENTS | _CHANNELS | _AFFINE:
            return self._drop(func, *args, **kwargs)
        name = getattr(func, "__name__", "").strip("_")
        self._used = set()
        result = super().__torch_function__(func, types, args, kwargs)
        if func is F.multi_head_attention_forward and args[10] > 0:
            self.stops[self._layer(args[10])] = "it drops attention weights"
        if decompose(func, args, kwargs, self.is_latent) is None:  # else seen part by part
            leaves = [leaf for leaf in tree_leaves((args, kwargs)) if id(leaf) not in self._used]
            arrived = [factors for leaf in leaves for factors in self._of(leaf)]
            if self._used:
                self._stop(arrived, name)
            else:
                self._pass_on(func, name, args, kwargs, result, arrived)
        return result

    def _of(self, value: Any) -> list[_Factors]:
        return self._factors.get(id(value), [])

    def _drop(
        self, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        output = input if inplace else input.clone()  # a new object without factors
        before = [replace(factors, tensor=output) for factors in self._of(input)]
        if p > 0:
            number = self._layer(p)
            if training:  # all modules are in evaluation mode here
                self.always.append(number)
            if func in _AFFINE:
                self.stops[number] = "alpha dropout shifts units instead of multiplying them"
            units = torch.zeros(input.shape, dtype=torch.float64, device=input.device)
            shape = input.shape[1:2] if func in _CHANNELS else input.shape[1:]
            numbers = torch.arange(shape.numel(), device=input.device).reshape(shape) + 1.0
            trailing = input.dim() - 1 - len(shape)
            units = units + numbers.reshape(*shape, *[1] * trailing)
            before.append(_Factors(number, units, output))
        self._factors[id(output)] = before
        return output

    def _pass_on(
        self, func: Any, name: str, args: tuple, kwargs: dict, result: Any, arrived: list[_Factors]
    ) -> None:
        """Follow the factors of an operation's inputs to its results."""
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not any(leaf.is_floating_point() for leaf in outputs) or name.startswith("new_"):
            return  # a size or a comparison, or a function such as zeros_like
        for factors in arrived:
            units = _passed(func, name, factors.units, args, kwargs)
            if units is None or len(units) != len(outputs):
                self._stop([factors], name)
                continue
            for output, part in zip(outputs, units, strict=True):
                kept = [f for f in self._of(output) if f.layer != factors.layer]
                self._factors[id(output)] = [*kept, _Factors(factors.layer, part, output)]

    def _stop(self, arrived: list[_Factors], name: str) -> None:
        """Record that no weight can express the factors that enter this operation."""
        for factors in arrived:
            why = _OUTPUTS.get(name, f"its output enters '{name}'")
            self.stops.setdefault(factors.layer, why)

    def use(self, product: UnitProduct, axis: int) -> None:
        super().use(product, axis)
        self._used.add(id(product.input))
        found = set()
        for factors in self._of(product.input):
            assert product.units is not None
            units = factors.units.movedim(product.units, -1)
            found.add(_arrival(factors.layer, units.reshape(-1, units.shape[-1])))
        self.arrivals.setdefault(product.tag.site, []).append(found)

    def operate(self, func: Any, args: tuple, kwargs: dict, tagged: list[Tag]) -> Any:
        """Handle recurrent modules, which drop the outputs of every layer except the last."""
        result = super().operate(func, args, kwargs, tagged)
        if getattr(func, "__name__", "") not in RECURRENT:
            return result
        first = 4 if isinstance(args[3], bool) else 5  # packed sequences add batch sizes
        layers, rate = args[first : first + 2]
        if rate > 0 and layers > 1:
            arrival = _Arrival(self._layer(rate), None, True)
            for site in (tag.site for tag in tagged):
                if "weight_ih_l" in site and "weight_ih_l0" not in site:
                    self.arrivals[site][-1].add(arrival)
        return result


def _arrival(layer: int, rows: Tensor) -> _Arrival:
    """Factors (positions, units) at the input of a weight."""
    if not (rows == rows[:1]).all():
        return _Arrival(layer, None, True)
    tied = rows[0].unique(return_inverse=True)[1]
    if len(tied.unique()) == len(tied):
        return _Arrival(layer, None, False)
    return _Arrival(layer, tuple(tied.tolist()), False)


def _passed(
    func: Callable, name: str, units: Tensor, args: tuple, kwargs: dict
) -> list[Tensor] | None:
    """The unit whose factor multiplies each number of an operation's results; None if there is no
    single unit."""
    if name in _HOMOGENEOUS:
        return [units]
    if name in _SCALINGS:
        number = any(isinstance(arg, int | float) for arg in args)
        return [units] if number else None
    if name in VIEWS:
        if name in CASTS:
            return [units]
        return tree_leaves(func(units, *args[1:], **kwargs))
    if name.rstrip("123d") in _POOLINGS:
        pooled, square = (func(values, *args[1:], **kwargs) for values in (units, units.square()))
        lowest = -func(-units, *args[1:], **kwargs)
        if torch.allclose(square, pooled.square()) and torch.allclose(pooled, lowest):
            return [pooled.round()]
    return None


def rates_of_layers(
    reader: LayerReader, layout: Layout, model: Any
) -> dict[str, tuple[Weight, float]]:
    """The weights that a network's dropout layers feed, each with its rate.

    :raises ValueError: if the program has no dropout layer, none can be expressed, or one drops
        in evaluation mode too.
    """
    if not reader.rates:
        raise ValueError(
            "the program has no dropout layer with a rate above 0: give the rate as "
            "AutoMCDropout(model, p=...)"
        )
    names = _names(model, reader)
    if reader.always:
        raise ValueError(
            f"{names[reader.always[0]]} drops in evaluation mode too, on top of what the guide "
            "would drop: call F.dropout with training=self.training, or use nn.Dropout"
        )
    notes = [f"{names[layer]} is left out, since {why}" for layer, why in reader.stops.items()]
    found: dict[str, tuple[Weight, float]] = {}
    fed: dict[int, list[str]] = {layer: [] for layer in range(len(reader.rates))}
    for site in layout.latents:
        kept = [
            {arrival for arrival in use if arrival.layer not in reader.stops}
            for use in reader.arrivals.get(site, ())
        ]
        for layer in {arrival.layer for use in kept for arrival in use}:
            fed[layer].append(site)
        if not any(kept):
            continue
        settings = {_rate_and_sharing(use, reader.rates, names) for use in kept}
        if len(settings) > 1:
            notes.append(f"'{site}' is left out, since its uses have different dropout layers")
            continue
        ((rate, ties),) = settings
        if len(ties) > 1:
            notes.append(
                f"'{site}' is left out, since a layer for channels and one for single numbers "
                "meet there"
            )
            continue
        of_networks = bool(layout.latents[site].plates)  # each is called once
        if not of_networks and any(use != kept[0] for use in kept):
            notes.append(
                f"'{site}' is used {len(kept)} times, each behind a call of dropout of its "
                "own, of which it can only have one for all"
            )
        arrivals = {arrival for use in kept for arrival in use}
        for layer in sorted({arrival.layer for arrival in arrivals if arrival.shared}):
            notes.append(
                f"{names[layer]} has separate factors at every position, of which '{site}' "
                "can only have one for all"
            )
        (tied,) = ties
        found[site] = replace(reader.weights[site], tied=tied), rate
    for layer, sites in fed.items():
        if not sites and layer not in reader.stops:
            notes.append(f"{names[layer]} is left out, since it feeds no weight with a prior")
        elif len(sites) > 1:
            listed = ", ".join(map(repr, sites))
            notes.append(f"{names[layer]} feeds {listed}, which get separate factors")
    if not found:
        raise ValueError(f"no dropout layer can be turned into a guide: {'; '.join(notes)}")
    if notes:
        warnings.warn(f"dropout layers as a guide: {'; '.join(notes)}", BdlWarning, stacklevel=6)
    return found


def _rate_and_sharing(
    use: set[_Arrival], rates: list[float], names: list[str]
) -> tuple[float, frozenset[tuple[int, ...] | None]]:
    """The rate of a weight in one use, and the groups of input units that share a factor."""
    kept = 1.0
    for layer in sorted({arrival.layer for arrival in use}):
        kept *= 1.0 - checked_rate(rates[layer], names[layer])
    return 1.0 - kept, frozenset(arrival.tied for arrival in use)


def _names(model: Any, reader: LayerReader) -> list[str]:
    """The name of each dropout layer, for messages."""
    known: dict[int, str] = {}
    for outer in model.modules() if isinstance(model, nn.Module) else ():
        network = outer.network if isinstance(outer, SampledNetwork) else outer
        for name, module in network.named_modules():
            if isinstance(outer, SampledNetwork) or id(module) not in known:
                known[id(module)] = name
    result = []
    for module, rate in zip(reader.modules, reader.rates, strict=True):
        kind = "dropout" if module is None else type(module).__name__
        name = known.get(id(module))
        result.append(f"{kind}({rate:g})" + (f" '{name}'" if name else ""))
    return result
