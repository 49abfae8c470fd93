"""Inputs of a comparison: test data, their units, and predictions without a posterior."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.program.batches import leading_size, taken
from pyro_bdl.utils.validation import check_finite_tensor

_CLASSES = ("Categorical", "Bernoulli", "OneHotCategorical", "OrderedLogistic")


@dataclass(frozen=True)
class Units:
    """Units of the target: ``y * scale + shift``, with y in the program's units.

    :param scale: positive.
    :param shift: in the target's own units.
    """

    scale: float = 1.0
    shift: float = 0.0

    def of(self, y: Tensor) -> Tensor:
        """Targets or predictions in the target's own units."""
        return y * self.scale + self.shift

    def density(self, log_density: Tensor, y: Tensor) -> Tensor:
        """The log density ``(S, N)`` of targets in their own units.

        It is smaller by log(scale) for each number in a target.
        """
        numbers = y.numel() / log_density.shape[1]
        return log_density.double() - math.log(self.scale) * numbers


@dataclass(frozen=True)
class Test:
    """Data: the program's arguments before the target, tensors or dicts of them, and the target.

    :param arguments: the arguments of a program of several observed sites, whose numbers ``y``
        holds together; None while the target is the last argument.
    :param whole: whether the program takes all data at once only.
    :param needs_targets: whether the program runs with targets only.
    """

    inputs: tuple[Any, ...]
    y: Any
    arguments: tuple[Any, ...] | None = None
    whole: bool = False
    needs_targets: bool = False

    @property
    def rows(self) -> int:
        return len(self.y) if isinstance(self.y, Tensor) else leading_size(self.given())

    def given(self) -> tuple[Any, ...]:
        """The program's arguments, with the targets."""
        return (*self.inputs, self.y) if self.arguments is None else self.arguments

    def asked(self) -> tuple[Any, ...]:
        """The program's arguments for predictions: without the target, if it runs without.

        Targets do not change predictions, but those of later observed sites that depend on them.
        """
        if self.arguments is not None or self.needs_targets or not self.inputs:
            return self.given()
        return (*self.inputs, None)

    def elsewhere(self, inputs: tuple[Any, ...]) -> "Test":
        """Other inputs, with placeholders for targets, which do not affect predictions."""
        y = self.y[:1].expand(leading_size(inputs), *self.y.shape[1:])
        return replace(self, inputs=inputs, y=y)

    def first(self, count: int | None) -> "Test":
        """The first rows, or all of them for None."""
        return self if count is None else self.part(slice(0, count))

    def part(self, rows: slice | Tensor) -> "Test":
        """Select rows; of data that cannot be divided all."""
        if self.whole:
            return self
        inputs, y, arguments = taken((self.inputs, self.y, self.arguments), rows)
        return replace(self, inputs=inputs, y=y, arguments=arguments)


@dataclass(frozen=True)
class Observation:
    """The observed site and the kind of its distribution.

    :param linear: whether the linearized model knows this distribution.
    :param site: name of the site.
    :param joint: whether one distribution covers all rows, such as a MultivariateNormal over them.
    :param tied: whether there is one density for all data of several sites.
    :param mixed: whether it stands for several sites, some of classes and some of other numbers.
    :param fixed_mean: whether the mean of a joint distribution does not depend on the latents, as
        for a Gaussian process whose function is integrated out.
    """

    site: str
    kind: str
    linear: bool = True
    joint: bool = False
    fixed_mean: bool = False
    tied: bool = False
    mixed: bool = False

    @property
    def is_class(self) -> bool:
        return self.kind in _CLASSES

    @property
    def why_not_left_out(self) -> str:
        """Why no datum can be left out; empty if each one can be."""
        if self.tied:
            return (
                "discrete sites that are summed out tie the data of all observed sites to each "
                "other"
            )
        return f"the site {self.site!r} is one joint observation of all rows" if self.joint else ""

    def probabilities(self, mean: Tensor) -> Tensor:
        """Class probabilities ``(S, N, C)`` from the observation's mean at each draw.

        Several labels in a row count as several points.
        """
        if self.kind == "Bernoulli":
            ones = mean.flatten(1)
            return torch.stack([1 - ones, ones], -1)
        return mean.flatten(1, -2)


@dataclass(frozen=True)
class PredictiveDraws:
    """An exact or published posterior of which only predictions at the test inputs are known.

    It can be one of the posteriors of ``compare``, also the reference::

        compare(model, {"vi": guide, "exact": PredictiveDraws(f)}, x, y, reference="exact")

    :param function: ``(S, N, ...)``, S draws at the N test inputs. For regression they are draws of
        the site ``f``, or of the observation's mean if the program has no such site, in the units
        of the program's target. For classification they are probabilities ``(S, N, C)``; for two
        classes ``(S, N)``, of the second class, is accepted too.
    :param targets: ``(S, N, ...)``, draws of a regression target, including noise, if known; needed
        for CRPS, coverage and the predictive distribution.
    :param log_likelihood: ``(S, N)``, log p(y_n | draw) of a regression, if known; needed for NLPD.
    :param chains: number of Markov chains of equal length, whose draws follow each other; 1 for
        independent draws, which get no R-hat.
    :raises TypeError: for a value that is not a tensor.
    :raises ValueError: for fewer than 2 draws, different numbers of draws, numbers that are not
        finite, or a number of draws that ``chains`` does not divide.
    """

    function: Tensor
    targets: Tensor | None = None
    log_likelihood: Tensor | None = None
    chains: int = 1

    def __repr__(self) -> str:
        shape = tuple(self.function.shape)
        return f"<PredictiveDraws: {shape[0]} draws of {self.chains} chains, function {shape}>"

    def __post_init__(self) -> None:
        for name in ("function", "targets", "log_likelihood"):
            value: Any = getattr(self, name)
            if value is None and name != "function":
                continue
            if not isinstance(value, Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
            if value.dim() < 2 or len(value) < 2:
                raise ValueError(
                    f"{name} must be of shape (draws, points, ...) with at least 2 draws, got "
                    f"{tuple(value.shape)}"
                )
            if value.shape[:2] != self.function.shape[:2]:
                raise ValueError(
                    f"{name} has (draws, points) {tuple(value.shape[:2])}, but function "
                    f"{tuple(self.function.shape[:2])}"
                )
            check_finite_tensor(name, value)
        if self.chains < 1 or len(self.function) % self.chains:
            raise ValueError(
                f"chains={self.chains} does not divide the {len(self.function)} draws: all chains "
                "must be of one length"
            )

    def at(self, rows: slice | Tensor) -> "PredictiveDraws":
        """The same draws at some of the test inputs."""

        def part(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[:, rows]

        return replace(
            self,
            function=self.function[:, rows],
            targets=part(self.targets),
            log_likelihood=part(self.log_likelihood),
        )

    def to(self, device: torch.device | str) -> "PredictiveDraws":
        """The same draws on another device."""
        names = ("function", "targets", "log_likelihood")
        known = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(self, **{name: value.to(device) for name, value in known.items()})

    def check_rows(self, name: str, rows: int) -> None:
        """Check that there are predictions at all test inputs.

        :param name: name of the posterior, for the message.
        :param rows: number of test inputs.
        :raises ValueError: if the number of predictions differs.
        """
        if self.function.shape[1] != rows:
            raise ValueError(
                f"posterior {name!r} holds predictions at {self.function.shape[1]} points, but "
                f"there are {rows} test inputs"
            )
