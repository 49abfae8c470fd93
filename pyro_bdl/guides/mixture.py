"""Mixtures of guides, such as MultiSWAG and ensembles of Laplace approximations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from pyro.nn.module import PyroModuleList
from torch import Tensor

from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.point import JointGuide
from pyro_bdl.guides.saved import class_path, restored, sites_of
from pyro_bdl.program.batches import Batch
from pyro_bdl.utils import bibliography
from pyro_bdl.utils.precision import double, double_device

_HALVINGS = 60


class MixtureGuide(JointGuide):
    """q(w) = sum_k weight_k q_k(w) over guides q_k for one program (Wilson & Izmailov 2020).

    Draws are stratified: S weight_k of S draws, up to rounding, come from member k, in random
    order. The members' parameters are parameters of the mixture.

    :param members: trained guides with the same latents.
    :param weights: one nonnegative number for each member, normalized here; equal by default.
    :raises RuntimeError: if a member has no parameters yet.
    :raises ValueError: if there are no members, members of different programs, or weights that do
        not fit.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.MIXTURES_OF_LAPLACE,)
    weights: Tensor

    def __init__(
        self, members: Sequence[Guide], weights: Sequence[float] | Tensor | None = None
    ) -> None:
        members = list(members)
        _check(members)
        super().__init__(members[0])
        self.members = PyroModuleList(members)
        like = members[0].location().detach()
        given = [1.0] * len(members) if weights is None else weights
        values = torch.as_tensor(given, dtype=torch.float64, device=double_device(like.device))
        if values.shape != (len(members),) or not (values >= 0).all() or not values.sum() > 0:
            raise ValueError(
                f"weights must be {len(members)} numbers, one for each member, none of them "
                f"negative and not all zero, got {values.tolist()}"
            )
        self.register_buffer("weights", (values / values.sum()).to(like))

    def saved(self) -> dict[str, Any]:
        parts = {"members": [member.saved() for member in self._guides()], "weights": self.weights}
        return {"class": class_path(type(self)), **parts}

    @classmethod
    def restored(cls, model: Callable, saved: Mapping[str, Any], batch: Batch) -> "MixtureGuide":
        members = [restored(model, member, batch) for member in saved["members"]]
        return cls(members, saved["weights"])

    def _guides(self) -> list[Any]:
        return list(self.members)

    @property
    def has_density(self) -> bool:
        return all(member.has_density for member in self._guides())

    def shares(self, num_samples: int) -> list[int]:
        """The number of draws of each member, by systematic resampling.

        It is S weight_k rounded up or down at random, with expectation S weight_k.
        """
        ends = double(self.weights).cumsum(0)
        positions = torch.arange(num_samples, dtype=ends.dtype, device=ends.device)
        positions = (positions + torch.rand_like(ends[0])) / num_samples * ends[-1]
        chosen = torch.searchsorted(ends, positions).clamp(max=len(ends) - 1)
        return chosen.bincount(minlength=len(ends)).tolist()

    @property
    def independent_draws(self) -> bool:
        return False

    def sample_vectors(self, num_samples: int) -> Tensor:
        """Stratified draws (num_samples, P), in random order."""
        shares = zip(self._guides(), self.shares(num_samples), strict=True)
        draws = torch.cat([member.sample_vectors(number) for member, number in shares if number])
        return draws[torch.randperm(num_samples, device=draws.device)]

    def log_density(self, vector: Tensor, log_det: Tensor) -> Tensor:
        """log sum_k weight_k q_k(w), in nats.

        :raises ValueError: if a member has no density.
        """
        for number, member in enumerate(self._guides()):
            if not member.has_density:
                raise ValueError(
                    f"the mixture has no density, since its member {number} "
                    f"({type(member).__name__}) is a point, at least in some of the latents"
                )
        terms = [member.log_density(vector, log_det) for member in self._guides()]
        return torch.logsumexp(torch.stack(terms, -1) + self.weights.log(), -1)

    def location(self) -> Tensor:
        """The mean of the members' centers (P,)."""
        return self.weights @ torch.stack([member.location() for member in self._guides()])

    def variances(self) -> Tensor:
        """The variances sum_k weight_k (v_k + (m_k - m)^2), (P,), for members with centers m_k and
        variances v_k."""
        center, total = self.location(), torch.zeros_like(self.location())
        for weight, member in zip(self.weights, self._guides(), strict=True):
            spread = (member.location() - center).square()
            total = total + weight * (member.variances() + spread)
        return total

    @torch.no_grad()
    def vector_quantiles(self, levels: Tensor) -> Tensor:
        """Marginal quantiles: by bisection if the members' marginals are Normal, else from
        draws."""
        if all(member.normal_marginals for member in self._guides()):
            return self._normal_quantiles(levels)
        return super().vector_quantiles(levels)

    def _normal_quantiles(self, levels: Tensor) -> Tensor:
        members, weights = self._guides(), self.weights
        theirs = torch.stack([member.vector_quantiles(levels) for member in members])
        low, high = theirs.amin(0), theirs.amax(0)  # bounds of the mixture's quantiles
        means = torch.stack([member.location() for member in members])[:, None]
        scales = torch.stack([member.variances().sqrt() for member in members])[:, None]
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            offsets = middle - means
            steps = (offsets >= 0).to(offsets)  # of numbers that are fixed
            masses = torch.where(scales > 0, torch.special.ndtr(offsets / scales), steps)
            below = torch.tensordot(weights, masses, 1) < levels[:, None]
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return high


def _check(members: list[Guide]) -> None:
    if not members:
        raise ValueError("a mixture needs at least one member")
    for number, member in enumerate(members):
        if not isinstance(member, Guide):
            raise TypeError(
                f"member {number} of the mixture is a {type(member).__name__}: mixtures are of "
                "guides of this package"
            )
        first, own = (sites_of(guide.require_layout()) for guide in (members[0], member))
        if own != first:
            other = next((site[0] for site in own if site not in first), "in another order")
            raise ValueError(
                f"member {number} of the mixture has other latents than the first (site '{other}'):"
                " all must be for the same program"
            )
