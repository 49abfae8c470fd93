"""SWAG: a Gaussian from the points that SGD passes through (Maddox et al. 2019)."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pyro.distributions as dist
import torch
from torch import Tensor, nn

from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.ensemble import AutoEnsemble
from pyro_bdl.guides.mixture import MixtureGuide
from pyro_bdl.guides.normal import LowRankNormal
from pyro_bdl.guides.point import JointGuide, UnconstrainedMAP, restored_source
from pyro_bdl.program.batches import Batch
from pyro_bdl.program.gaussian_prior import GaussianPrior
from pyro_bdl.program.subset import Subset
from pyro_bdl.utils import bibliography
from pyro_bdl.utils.validation import real_number, whole_number


class Snapshots(nn.Module):
    """Running mean and sum of squared deviations of vectors, and the last ``rank`` vectors.

    Welford's recurrence: with d = u - mean, mean += d / T and squares += d (u - mean).

    :param rank: K, the number of vectors kept.
    :param like: a vector (..., P); K + 2 tensors of its size are stored.
    """

    count: Tensor
    mean: Tensor
    squares: Tensor
    recent: Tensor

    def __init__(self, rank: int, like: Tensor) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long, device=like.device))
        self.register_buffer("mean", torch.zeros_like(like))
        self.register_buffer("squares", torch.zeros_like(like))
        self.register_buffer("recent", like.new_zeros(rank, *like.shape))

    @torch.no_grad()
    def add(self, vector: Tensor) -> int:
        """Add a vector; return the number of vectors so far.

        :raises ValueError: if the vector is not finite; nothing is changed then.
        """
        number = int(self.count) + 1
        if not torch.isfinite(vector).all():
            raise ValueError(
                f"snapshot {number} holds NaN or infinity and was not taken: start again from the "
                "MAP with a lower learning rate"
            )
        difference = vector - self.mean
        self.mean += difference / number
        self.squares += difference * (vector - self.mean)
        if len(self.recent):
            self.recent[(number - 1) % len(self.recent)] = vector
        self.count += 1
        return number

    def gaussian(self, rank: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Mean (..., P), diagonal (..., P) and factor F (rank, ..., P) of SWAG's covariance.

        :raises ValueError: for fewer snapshots than the rank, or fewer than 2.
        """
        scale = real_number(scale, "scale")
        if not (rank == 0 or 2 <= rank <= len(self.recent)):
            raise ValueError(
                f"rank must be 0, for a diagonal covariance, or from 2 to the guide's "
                f"{len(self.recent)}, got {rank}"
            )
        count = int(self.count)
        if count < max(2, rank):
            raise ValueError(
                f"SWAG of rank {rank} needs at least {max(2, rank)} snapshots, and there are "
                f"{count}: call guide.collect() between more steps, use training.collect_swag, or "
                "ask for a lower rank"
            )
        variances = self.squares / (count - 1)
        if not rank:
            return self.mean, scale * variances, self.mean.new_zeros(0, *self.mean.shape)
        last = torch.arange(count - rank, count, device=self.mean.device)
        deviations = self.recent[last % len(self.recent)] - self.mean
        return self.mean, 0.5 * scale * variances, deviations * (0.5 * scale / (rank - 1)) ** 0.5


class _Collecting(Guide):
    """The part of a guide that collects snapshots of its points."""

    rank: int
    points: str  # the parameter that holds them
    snapshots: Snapshots

    def create_parameters(self, start: Tensor) -> None:
        super().create_parameters(start)
        self.discard()

    def collect(self) -> int:
        """Take a snapshot of the current point, or of every member; return the number so far.

        :raises ValueError: if a point is not finite; the earlier snapshots stay.
        """
        points = self._points()
        return self.snapshots.add(points)

    def discard(self) -> None:
        """Forget all snapshots."""
        self.snapshots = Snapshots(self.rank, self._points())

    def _points(self) -> Tensor:
        return self.parameter(self.points).detach()

    def _gaussian(self, rank: int | None, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        self.require_layout()
        return self.snapshots.gaussian(self.rank if rank is None else rank, scale)


class AutoSWAG(_Collecting, UnconstrainedMAP):
    """A guide that trains the MAP, and then fits a Gaussian to snapshots of SGD.

    ``collect()`` takes a snapshot; call it between SGD steps after training.
    ``swag_approximation()`` returns the Gaussian guide::

        for step in range(steps):          # after training, at a constant learning rate
            svi.step(x, y)
            if (step + 1) % steps_per_epoch == 0:
                guide.collect()
        posterior = guide.swag_approximation()

    ``training.collect_swag`` runs such a loop. The snapshots take the memory of ``rank`` + 2
    vectors of length P and are saved in ``state_dict``. Source: Maddox et al. 2019, algorithm 1,
    but for the deviations, which are from the mean of all snapshots and not of those so far.

    :param model: a Pyro program with continuous latents.
    :param rank: K, the rank of the low-rank term: the number of last snapshots that are kept; 0 for
        none.
    :param options: ``init_loc_fn``, where the guide starts, and ``create_plates``, see ``Guide``.
    :raises ValueError: for a rank of 1 or below 0.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.SWAG,)
    points = "loc"

    def __init__(
        self,
        model: Callable,
        *,
        rank: int = 20,
        **options: Any,
    ) -> None:
        _check_rank(rank)
        super().__init__(model, **options)
        self.rank = rank

    def options(self) -> dict[str, Any]:
        return {"rank": self.rank}

    def swag_approximation(self, *, rank: int | None = None, scale: float = 1.0) -> "SWAGGuide":
        """The Gaussian with the snapshots' moments; this guide and its snapshots are not changed.

        :param rank: how many of the last snapshots to use, 0 for a diagonal covariance; by default
            the guide's rank.
        :param scale: a factor of the covariance.
        :raises ValueError: for fewer snapshots than the rank, or fewer than 2.
        """
        return SWAGGuide(self, *self._gaussian(rank, scale))


class AutoMultiSWAG(_Collecting, AutoEnsemble):
    """An ensemble whose members collect snapshots, for a mixture of SWAG posteriors (Wilson &
    Izmailov 2020).

    Train it like ``AutoEnsemble``, with ``num_particles`` = K, and collect as with ``AutoSWAG``.
    The snapshots take K (``rank`` + 2) P numbers.

    :param model: a Pyro program with continuous latents.
    :param size: K, the number of members.
    :param rank: the rank for each member, see ``AutoSWAG``.
    :param options: ``init_loc_fn``, where the guide starts, and ``create_plates``, see ``Guide``.
    :raises ValueError: for a size below 1, a rank of 1 or below 0.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.SWAG, bibliography.MULTI_SWAG)
    points = "locs"

    def __init__(
        self,
        model: Callable,
        *,
        size: int = 5,
        rank: int = 20,
        **options: Any,
    ) -> None:
        _check_rank(rank)
        super().__init__(model, size=size, **options)
        self.rank = rank

    def options(self) -> dict[str, Any]:
        return {**super().options(), "rank": self.rank}

    def swag_approximation(self, *, rank: int | None = None, scale: float = 1.0) -> MixtureGuide:
        """The mixture of the members' Gaussians, with equal weights; see
        ``AutoSWAG.swag_approximation``."""
        means, diagonals, factors = self._gaussian(rank, scale)
        parts = zip(means, diagonals, factors.unbind(1), strict=True)
        return MixtureGuide([SWAGGuide(self, *part) for part in parts])


def _check_rank(rank: int) -> None:
    if whole_number(rank, "rank", least=0) == 1:
        raise ValueError(f"rank must be at least 2, or 0 for diagonal covariances, got {rank}")


class SWAGGuide(JointGuide, LowRankNormal):
    """N(mean, scale / 2 (diag(v) + D' D / (K - 1))) over the unconstrained vector, or
    N(mean, scale diag(v)) without D (Maddox et al. 2019, equation 1 and section 3.2).

    Here v are the empirical variances of all T snapshots, with divisor T - 1, and the rows of D are
    the last K snapshots minus the mean of all T. For K = T both terms have the empirical variances.
    The paper divides v by T, and takes deviations from the mean of the snapshots up to that time.

    If all snapshots of a number are equal (a weight without gradient), its variance is zero: draws
    equal the mean there, and the guide has no density.

    :param source: a guide for the same program.
    :param mean: (P,), in unconstrained units like all arguments.
    :param diagonal: the diagonal term (P,) of the covariance.
    :param factor: F (K, P) with F' F the low-rank term.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.SWAG,)
    loc: Tensor
    diagonal: Tensor
    factor: Tensor

    def __init__(self, source: Guide, mean: Tensor, diagonal: Tensor, factor: Tensor) -> None:
        super().__init__(source)
        self.subset = Subset(self.require_layout())
        self.register_buffer("loc", mean.detach().clone())
        self.register_buffer("diagonal", diagonal.detach())
        self.register_buffer("factor", factor.detach())

    @classmethod
    def restored(cls, model: Callable, saved: Mapping[str, Any], batch: Batch) -> "SWAGGuide":
        state = saved["state"]
        source = restored_source(model, batch)
        guide = cls(source, state["loc"], state["diagonal"], state["factor"])
        guide.load_state_dict(state)
        return guide

    @property
    def has_density(self) -> bool:
        return bool((self.diagonal > 0).all())

    def location(self) -> Tensor:
        return self.loc

    def scale_and_factor(self) -> tuple[Tensor, Tensor]:
        return self.diagonal.sqrt(), self.factor.mT

    def log_density(self, vector: Tensor, log_det: Tensor) -> Tensor:
        """log N(u; mean, S + F' F) - log |det dT/du|.

        :raises ValueError: if a variance is zero.
        """
        self._require_density()
        return super().log_density(vector, log_det)

    def as_prior(self) -> GaussianPrior:
        """A Gaussian prior over all latents, see ``Guide.as_prior``.

        :raises ValueError: if the guide has no density.
        """
        self._require_density()
        return super().as_prior()

    def get_posterior(self, *args: Any, **kwargs: Any) -> dist.TorchDistribution:
        """q over the unconstrained vector (P,).

        :raises ValueError: if the guide has no density.
        """
        self._require_density()
        return super().get_posterior(*args, **kwargs)

    def _require_density(self) -> None:
        if self.has_density:
            return
        where = (self.diagonal <= 0).nonzero()[:, 0]
        first = int(where[0])
        slices = self.require_layout().slices
        site = next(name for name, part in slices.items() if part.start <= first < part.stop)
        raise ValueError(
            f"SWAG has no density: the variance of {len(where)} of {len(self.loc)} numbers is zero "
            f"(the first in site '{site}'), as no snapshot moved them: draws are fixed there"
        )
