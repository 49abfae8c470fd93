"""Selectors of the weights of a subnetwork (Daxberger et al. 2021).

A selector gives every latent number a score; the highest scores are chosen. Selectors of whole
layers choose a set instead, and need no size. To add one, override ``scores``.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.laplace import AutoLaplaceGGN, LaplaceGuide, last_layer
from pyro_bdl.program.batches import Batches
from pyro_bdl.program.layout import Latent
from pyro_bdl.program.subset import select

Size = int | float | str | None


@dataclass(frozen=True)
class Trained:
    """The inputs of a selector: a guide at its MAP, and the data."""

    guide: AutoLaplaceGGN
    batches: Batches

    @property
    def vector(self) -> Tensor:
        return self.guide.location().detach()


class Selector:
    """Base: the ``size`` numbers with the highest scores."""

    needs_size = True

    def scores(self, trained: Trained) -> Tensor:
        """A score for each number of the flat vector, (P,); -inf: never."""
        raise NotImplementedError

    def __call__(self, trained: Trained, size: Size) -> Tensor:
        """Positions in the flat vector, sorted.

        :raises ValueError: for a size that is not positive or larger than there are numbers.
        """
        scores = self.scores(trained)
        allowed = int((scores > -torch.inf).sum())
        if not allowed:
            raise ValueError(f"{type(self).__name__} chooses nothing: every latent is left out")
        if size is None and self.needs_size:
            raise ValueError(
                f"{type(self).__name__} needs a size: a count, a fraction or memory such as '4 GB'"
            )
        count = allowed if size is None else number_of(size, len(scores), trained.vector)
        if size is not None and count > allowed:
            if self.needs_size:
                raise ValueError(f"size={size!r} asks for {count} of {allowed} latent numbers")
            count = allowed
        return scores.topk(count).indices.sort().values


def number_of(size: Size, total: int, like: Tensor) -> int:
    """A size as a count: an integer; a fraction below 1 of all; or as many as fit, with the full
    covariance and its factorization, in memory such as "4 GB".

    :raises ValueError: for a size that makes no count between 1 and ``total``.
    """
    if isinstance(size, bool) or not isinstance(size, int | float | str):
        raise ValueError(f"size must be a count, a fraction or memory, got {size!r}")
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9.]+)\s*(G|M)i?B\s*", size)
        if match is None:
            raise ValueError(f"size must be a count, a fraction or memory such as '4 GB': {size!r}")
        bytes_ = float(match[1]) * {"G": 1e9, "M": 1e6}[match[2]]
        return min(total, max(1, int((bytes_ / (_COPIES * like.element_size())) ** 0.5)))
    if isinstance(size, float):
        if not 0 < size <= 1:
            raise ValueError(f"a fraction must lie between 0 and 1, got size={size}")
        return max(1, round(size * total))
    if not 1 <= size <= total:
        raise ValueError(f"size must be from 1 to {total}, got {size}")
    return size


_COPIES = 3  # of the matrix, while it is added up and factorized


class LargestVariance(Selector):
    """The largest marginal variances: of all subsets, the one that keeps a diagonal posterior
    closest to itself in Wasserstein distance (Daxberger et al. 2021, who take diagonal SWAG).

    The distance is that of the weights, not of what the network computes. A weight without effect
    (into or out of a dead unit) keeps its prior's variance, the largest there is, under a diagonal
    Laplace approximation or a mean-field guide, and comes first; under SWAG it hardly moves, and
    comes last. ``LargestPredictiveVariance`` needs no SWAG.

    :param of: a guide with marginal variances (SWAG, mean-field, a Laplace approximation); by
        default a diagonal Laplace approximation on the data.
    """

    def __init__(self, of: Guide | None = None) -> None:
        if not isinstance(of, Guide | None):
            raise TypeError(
                f"LargestVariance needs a guide with marginal variances, got {type(of).__name__}"
            )
        self.of = of

    def scores(self, trained: Trained) -> Tensor:
        guide = diagonal_laplace(trained) if self.of is None else self.of
        variances = guide.variances().detach()
        if not (variances > 0).any():
            raise ValueError(
                f"LargestVariance: the variances of {type(guide).__name__} are all zero: give it "
                "the guide that laplace_approximation or swag_approximation returns"
            )
        return variances


class LargestPredictiveVariance(Selector):
    """The largest contributions to the outputs' variance on the data, under a diagonal Laplace
    approximation with curvature h_i = sum_n J_ni' F_n J_ni and prior precision l_i:

        sum_n J_ni' F_n J_ni Var[w_i] = h_i / (h_i + l_i),

    how far the data determine weight i, from 0 to 1 (MacKay 1992). Where all priors are equally
    wide these are the largest squared gradients (Raha, Khare & Patra 2026, "Gradient-Laplace").
    """

    def scores(self, trained: Trained) -> Tensor:
        guide = diagonal_laplace(trained)
        precision = guide.prior.diagonal
        # in the same order as h / (h + l), which rounds to 1 for many
        return guide.curvature.diagonal() / precision.clamp(min=torch.finfo(precision.dtype).tiny)


def diagonal_laplace(trained: Trained) -> LaplaceGuide:
    """A diagonal Laplace approximation of all latents."""
    config = replace(trained.guide.config, structure="diag")
    return LaplaceGuide(trained.guide, config, None, trained.batches, check=False)


class LargestMagnitude(Selector):
    """The largest absolute values at the MAP."""

    def scores(self, trained: Trained) -> Tensor:
        return trained.vector.abs()


class Random(Selector):
    """At random, every number with the same probability."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def scores(self, trained: Trained) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        vector = trained.vector
        return torch.rand(len(vector), generator=generator, device="cpu").to(vector.device)


class _Sites(Selector):
    """All numbers of some sites; with a size, the largest of them in magnitude."""

    needs_size = False

    def selection(self, trained: Trained) -> Any:
        """The chosen latents, in a form that ``select`` takes."""
        raise NotImplementedError

    def scores(self, trained: Trained) -> Tensor:
        model = trained.guide.program_model
        subset = select(trained.guide.require_layout(), self.selection(trained), model=model)
        inside = subset.put(
            torch.full_like(trained.vector, -torch.inf), subset.take(trained.vector.abs())
        )
        return inside


class LastLayer(_Sites):
    """The weights of the last linear operation of the program."""

    def selection(self, trained: Trained) -> Any:
        model = trained.guide.program_model
        layout = trained.guide.require_layout()
        return last_layer(model, layout, trained.vector, *trained.batches.first())


class ByModule(_Sites):
    """The weights of some modules of the network that ``bayesianize`` returned."""

    def __init__(self, *modules: nn.Module) -> None:
        self.modules = modules

    def selection(self, trained: Trained) -> Any:
        return list(self.modules)


class BySite(_Sites):
    """The sites that match some names or patterns with shell wildcards."""

    def __init__(self, *patterns: str) -> None:
        self.patterns = patterns

    def selection(self, trained: Trained) -> Any:
        return list(self.patterns)


class Predicate(_Sites):
    """The sites for which ``function(name, latent)`` is true."""

    def __init__(self, function: Callable[[str, Latent], bool]) -> None:
        self.function = function

    def selection(self, trained: Trained) -> Any:
        return self.function
