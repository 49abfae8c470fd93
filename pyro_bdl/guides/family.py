"""The interface of a family of guides: a distribution over the flat vector; and its quantiles."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from pyro_bdl.program.gaussian_prior import GaussianPrior
from pyro_bdl.program.layout import Latent
from pyro_bdl.program.trace import Run
from pyro_bdl.utils.random_state import seeded

if TYPE_CHECKING:
    from pyro_bdl.guides.base import Guide

DRAWS = 4096  # for quantiles without a closed form
_NUMBERS = 2**24  # in draws that are held at a time


class Family:
    """A distribution q over one flat unconstrained vector u (P,), with latents w = T(u).

    A family defines

    - ``create_parameters(start)``: make parameters and buffers from an initial vector;
    - ``sample_vectors(num_samples)``, ``log_density(vector, log_det)``, ``location()`` and
      ``variances()``, all over u;
    - where the sites are independent: ``site_vectors()`` and ``site_distribution(latent, ...)``,
      from which Pyro's sample statements are made; else each site is a point of a joint draw.

    Where they have closed forms also ``kl``, ``entropy``, ``as_prior`` and ``vector_quantiles``
    (else medians and quantiles are those of draws, and differ from call to call); and
    ``normal_marginals = True`` if every number of u has a Normal marginal with that location and
    variance, or is fixed.
    """

    papers: ClassVar[tuple[str, ...]] = ()
    normal_marginals = False
    # Draws that a step must take to train all of the guide: the number of an ensemble's members.
    num_members = 1
    # False of guides that start from several vectors, or find their way from the data alone.
    starts_at_a_vector = True

    def create_parameters(self, start: Tensor) -> None:
        """Create the parameters.

        :param start: the initial unconstrained vector (P,).
        """
        raise NotImplementedError

    @property
    def has_density(self) -> bool:
        """True if ``log_density`` is a density over all latents; False if some or all latents are
        fixed."""
        return True

    @property
    def linearized(self) -> bool:
        """True if the posterior belongs to the program linearized at its center."""
        return False

    @property
    def independent_draws(self) -> bool:
        """True if draws do not depend on how many are made at once; False for members of an
        ensemble, of which each comes once."""
        return True

    def sample_vectors(self, num_samples: int) -> Tensor:
        """Independent unconstrained draws (num_samples, P), differentiable in the parameters if
        possible."""
        raise NotImplementedError

    def sample_with_offset(self, num_samples: int) -> tuple[Tensor, Tensor | float]:
        """Draws of a step, and the mean over them of what log q holds beyond ``log_density``: the
        members of an anchored ensemble differ in it."""
        return self.sample_vectors(num_samples), 0.0

    def log_density(self, vector: Tensor, log_det: Tensor) -> Tensor:
        """log q(w), a scalar, at w = T(u).

        :param vector: u, (P,).
        :param log_det: log |det dT/du|.
        """
        raise NotImplementedError

    def expected_log_likelihood(
        self,
        latents: Mapping[str, Tensor],
        run_at: Callable[[Mapping[str, Tensor]], Run],
        log_likelihood: Callable[[Run], Any],
    ) -> tuple[Any, Run]:
        """E_q[log p(y | w)] in nats, a scalar, and a run with the latents' priors; by default the
        estimate at the draw.

        A family may integrate latents that enter the likelihood in a known form, such as the last
        layer's weights. The ELBOs call this where no estimator takes noise for each datum.

        :param latents: a draw, by site.
        :param run_at: runs the program at latents.
        :param log_likelihood: log p(y | w) of a run.
        """
        run = run_at(latents)
        return log_likelihood(run), run

    def kl(self, vector: Tensor, log_det: Tensor, run: Run) -> Tensor:
        """KL(q || p) in nats for the prior p of ``run``, a scalar; by default an estimate at the
        run's draw."""
        return self.log_density(vector, log_det) - run.log_prior()

    def entropy(self, vector: Tensor, log_det: Tensor) -> Tensor:
        """The entropy H(q) in nats, a scalar; by default the estimate -log q(w) at the draw."""
        return -self.log_density(vector, log_det)

    def location(self) -> Tensor:
        """The guide's center as an unconstrained vector (P,)."""
        raise NotImplementedError

    def variances(self) -> Tensor:
        """The marginal variances (P,) of the unconstrained vector."""
        raise NotImplementedError

    def vector_quantiles(self, levels: Tensor) -> Tensor:
        """Marginal quantiles (levels, P) of the unconstrained vector.

        For a Normal marginal they are m + s Phi^-1(level), for a fixed number m; for others those
        of 4096 draws, the same ones in each call.
        """
        if not self.normal_marginals:
            with torch.no_grad(), seeded(0):
                return empirical_quantiles(self.sample_vectors(DRAWS), levels)
        scale = self.variances().sqrt()
        offsets = scale * torch.special.ndtri(levels)[:, None]
        return self.location() + torch.where(scale > 0, offsets, torch.zeros_like(offsets))

    def as_prior(self) -> GaussianPrior:
        """A copy of this posterior as the prior of a next task (continual learning).

        See ``model.update_prior`` and ``nn.with_prior``.

        :raises TypeError: for a posterior that is not Gaussian in the unconstrained vector.
        """
        raise TypeError(
            f"{type(self).__name__} is not a Gaussian over the unconstrained latents and cannot be "
            "a prior: take AutoMeanField, AutoLowRank, AutoMatrixNormal or a Laplace approximation"
        )

    def site_vectors(self) -> tuple[Tensor, ...] | None:
        """The vectors (P,) whose slices ``site_distribution`` takes, such as means and scales; None
        if the sites depend on each other."""
        return None

    def site_distribution(self, latent: Latent, *parts: Tensor) -> Any:
        """The distribution of a site, of which event dimensions may count as batch dimensions.

        :param parts: the site's slices of ``site_vectors``.
        """
        raise NotImplementedError


def site_quantiles(guide: "Guide", levels: Tensor) -> dict[str, Tensor]:
    """Marginal quantiles of each site, site -> (levels, *shape).

    A transformation that increases each number alone maps the quantiles of the vector; for another,
    as onto a simplex, they are those of 4096 draws.
    """
    layout = guide.require_layout()
    result = layout.constrain(guide.vector_quantiles(levels))[0]
    for name, latent in layout.latents.items():
        if not _is_increasing(latent.transform):
            values = empirical_quantiles(_draws_of(guide, latent).flatten(1), levels)
            result[name] = values.reshape(len(levels), *latent.shape)
    return result


def empirical_quantiles(
    draws: Tensor, levels: Tensor, *, numbers_at_once: int = _NUMBERS
) -> Tensor:
    """Interpolated quantiles (levels, P) of draws (S, P), computed a few columns at a time.

    :param numbers_at_once: numbers that ``torch.quantile`` may hold; it refuses more than 2^24.
    """
    columns = max(1, numbers_at_once // (2 * len(draws)))
    return torch.cat([torch.quantile(part, levels, dim=0) for part in draws.split(columns, 1)], 1)


def _draws_of(guide: "Guide", latent: Latent) -> Tensor:
    """4096 draws of a site (4096, *shape), of which few whole vectors are held at a time."""
    layout, parts = guide.require_layout(), []
    most = max(1, _NUMBERS // layout.size)
    for start in range(0, DRAWS, most):
        vectors = guide.sample_vectors(min(most, DRAWS - start))
        parts.append(vectors[:, layout.slices[latent.name]].clone())
    draws = torch.cat(parts).reshape(DRAWS, *latent.unconstrained_shape)
    return draws if latent.transform is None else latent.transform(draws)


def _is_increasing(transform: Any) -> bool:
    """Return whether a transform maps numbers one by one, in their order."""
    try:
        sign = 1 if transform is None else transform.sign
    except NotImplementedError:
        return False
    return bool((sign > 0).all()) if isinstance(sign, Tensor) else sign > 0
