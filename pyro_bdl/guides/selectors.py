"""Selectors of the weights of a subnetwork (Daxberger et al. 2021).

A selector gives every number of the flat vector a score; the numbers with the highest scores are
chosen. Selectors of whole layers choose sites instead, and need no size. A new selector overrides
``scores``.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.structures.diagonal import Diagonal
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.gaussian import LaplaceGuide, approximate
from pyro_bdl.guides.laplace import AutoLaplaceGGN, subset_of
from pyro_bdl.program.batches import Batches
from pyro_bdl.program.subset import Subset
from pyro_bdl.utils.random_state import checked_seed
from pyro_bdl.utils.validation import listed

Size = int | float | None


@dataclass(frozen=True)
class Trained:
    """The inputs of a selector: a guide at its MAP, and the data."""

    guide: AutoLaplaceGGN
    batches: Batches

    @property
    def vector(self) -> Tensor:
        return self.guide.location().detach()


class Selector:
    """Base class of selectors: the ``size`` numbers with the highest scores are chosen."""

    needs_size = True

    def scores(self, trained: Trained) -> Tensor:
        """A score for each number of the flat vector, (P,); -inf excludes a number."""
        raise NotImplementedError

    def __call__(self, trained: Trained, size: Size) -> Tensor:
        """The chosen positions in the flat vector, sorted.

        :raises ValueError: for a size that is not positive or exceeds the number of candidates, or
            scores that are NaN.
        """
        scores = self.scores(trained)
        if (unknown := scores.isnan()).any():
            raise ValueError(
                f"{type(self).__name__} gives {int(unknown.sum())} of {len(scores)} numbers the "
                f"score NaN, at positions {listed(unknown.nonzero()[:, 0].tolist())}: give each a "
                "number, -inf to leave it out"
            )
        allowed = int((scores > -torch.inf).sum())
        if size is None and self.needs_size:
            raise ValueError(f"{type(self).__name__} needs a size: a count or a fraction")
        count = allowed if size is None else number_of(size, len(scores))
        if count > allowed and self.needs_size:
            raise ValueError(f"size={size!r} asks for {count} of {allowed} latent numbers")
        return scores.topk(min(count, allowed)).indices.sort().values


def number_of(size: Size, total: int) -> int:
    """Convert a size, a count or a fraction of all numbers, to a count.

    :raises ValueError: for a size that does not give a count between 1 and ``total``.
    """
    size = checked_size(size)
    if size > total:
        raise ValueError(f"size must be from 1 to {total}, got {size}")
    return max(1, round(size * total)) if isinstance(size, float) else size


def checked_size(size: Any) -> int | float:
    """Return a size, checked as far as the number of latent numbers does not matter.

    :raises ValueError: for a size that is no positive count or fraction.
    """
    is_count = isinstance(size, int) and not isinstance(size, bool) and size > 0
    if not is_count and not (isinstance(size, float) and 0 < size <= 1):
        raise ValueError(
            f"size must be a count or a fraction, at least 1 or between 0 and 1, got {size!r}"
        )
    return size


class LargestVariance(Selector):
    """Selector of the largest marginal variances.

    For a diagonal posterior this subset minimizes the Wasserstein distance between the subnetwork's
    posterior and the full one (Daxberger et al. 2021, who use diagonal SWAG). The distance is
    between weights, not between outputs of the network. A weight without effect, into or out of a
    dead unit, keeps its prior's variance under a diagonal Laplace approximation or a mean-field
    guide. That is the largest variance, so it is chosen first. Under SWAG such a weight hardly
    moves and is chosen last. ``LargestPredictiveVariance`` needs no SWAG.

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
    """Selector of the largest contributions to the outputs' variance on the data.

    Under a diagonal Laplace approximation with curvature h_i = sum_n J_ni' F_n J_ni and prior
    precision l_i the contribution of weight i is

        sum_n J_ni' F_n J_ni Var[w_i] = h_i / (h_i + l_i),

    which says how well the data determine weight i, from 0 to 1 (MacKay 1992). If all priors have
    the same width, it chooses the largest squared gradients (Raha, Khare & Patra 2026,
    "Gradient-Laplace").
    """

    def scores(self, trained: Trained) -> Tensor:
        guide = diagonal_laplace(trained)
        precision = guide.prior.diagonal
        # h / l has the same order as h / (h + l), which rounds to 1 for many weights
        return guide.curvature.diagonal() / precision.clamp(min=torch.finfo(precision.dtype).tiny)


def diagonal_laplace(trained: Trained) -> LaplaceGuide:
    """A diagonal Laplace approximation of all latents."""
    guide = trained.guide
    config, subset = replace(guide.config, structure=Diagonal()), Subset(guide.require_layout())
    return approximate(guide, config, subset, trained.batches, check=False)


class LargestMagnitude(Selector):
    """Selector of the largest absolute values at the MAP."""

    def scores(self, trained: Trained) -> Tensor:
        return trained.vector.abs()


class Random(Selector):
    """Selector at random, with the same probability for every number."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = checked_seed(seed)

    def scores(self, trained: Trained) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        vector = trained.vector
        return torch.rand(len(vector), generator=generator, device="cpu").to(vector.device)


class Sites(Selector):
    """Selector of whole sites: all their numbers, or the ``size`` largest in magnitude.

    :param selection: the sites, in any form that ``subset`` of ``AutoLaplaceGGN`` takes: names or
        patterns, modules of the network, a predicate ``(name, latent) -> bool``, or "last-layer".
    """

    needs_size = False

    def __init__(self, selection: Any) -> None:
        self.selection = selection

    def scores(self, trained: Trained) -> Tensor:
        vector, batch = trained.vector, trained.batches.first()
        subset = subset_of(trained.guide, self.selection, *batch)
        excluded = torch.full_like(vector, -torch.inf)
        return subset.put(excluded, subset.take(vector.abs()))
