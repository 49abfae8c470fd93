"""Predictions without a posterior, as a posterior of a comparison."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.utils.validation import check_finite_tensor


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

    def to(self, device: torch.device | str) -> "PredictiveDraws":
        """The same draws on another device."""
        names = ("function", "targets", "log_likelihood")
        known = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(self, **{name: value.to(device) for name, value in known.items()})
