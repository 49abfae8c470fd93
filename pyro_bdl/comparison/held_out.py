"""Inputs of a comparison: test data, their units, and predictions without a posterior."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.program.batches import taken
from pyro_bdl.utils.validation import check_finite_tensor

_CLASSES = ("Categorical", "Bernoulli", "OneHotCategorical", "OrderedLogistic")


@dataclass(frozen=True)
class Units:
    """Units of the target: ``y * scale + shift`` for the y that the program knows.

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

        It is smaller by the log of the scale for each number that one density is of.
        """
        numbers = y.numel() / log_density.shape[1]
        return log_density.double() - math.log(self.scale) * numbers


@dataclass(frozen=True)
class Test:
    """Data: the program's arguments before the target, tensors or dicts of them, and the target."""

    inputs: tuple[Any, ...]
    y: Tensor

    @property
    def rows(self) -> int:
        return len(self.y)

    def part(self, rows: slice | Tensor) -> "Test":
        """Some of the rows."""
        return Test(*taken((self.inputs, self.y), rows))


@dataclass(frozen=True)
class Observation:
    """The observed site and the kind of its distribution.

    :param linear: whether the linearized model knows this distribution.
    :param joint: whether one distribution is of all rows, such as a MultivariateNormal over them.
    :param fixed_mean: whether the latents of a joint one do not move its mean, as of a Gaussian
        process whose function is integrated out.
    """

    site: str
    kind: str
    linear: bool = True
    joint: bool = False
    fixed_mean: bool = False

    @property
    def is_class(self) -> bool:
        return self.kind in _CLASSES

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
    """An exact or published posterior that is known by its predictions at the test inputs alone.

    It takes its place among the posteriors of ``compare``, as the reference or not::

        compare(model, {"vi": guide, "exact": PredictiveDraws(f)}, x, y, reference="exact")

    :param function: ``(S, N, ...)``, S draws at the N test inputs: of the site ``f`` (of the
        observation's mean where the program has none), in the units of the program's target; of
        classes the probabilities ``(S, N, C)``, for two classes also ``(S, N)`` of the second.
    :param targets: ``(S, N, ...)``, of a regression draws of the target, noise included, where
        they are known: what CRPS, coverage and the predictive distribution need.
    :param log_likelihood: ``(S, N)``, of a regression log p(y_n | draw), which NLPD needs.
    :param chains: how many Markov chains of equal length the draws are of, one after the other; 1
        for independent draws, which need no R-hat.
    :raises TypeError: for what is not a tensor.
    :raises ValueError: for fewer than 2 draws, numbers of draws that differ, numbers that are not
        finite, or draws that are no multiple of the chains.
    """

    function: Tensor
    targets: Tensor | None = None
    log_likelihood: Tensor | None = None
    chains: int = 1

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

    def check_rows(self, name: str, rows: int) -> None:
        """Check that the draws are at all test inputs.

        :param name: of the posterior, for the message.
        :param rows: number of test inputs.
        :raises ValueError: if they are not.
        """
        if self.function.shape[1] != rows:
            raise ValueError(
                f"posterior {name!r} holds predictions at {self.function.shape[1]} points, but "
                f"there are {rows} test inputs"
            )
