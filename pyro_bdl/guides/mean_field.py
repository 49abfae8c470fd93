"""Mean-field variational inference: q(u) = prod_i Normal(u_i; m_i, s_i^2)."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.nn import PyroParam
from torch import Tensor, nn

from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.kl import FinishedPriors, diagonal_normal_kl
from pyro_bdl.program.gaussian_prior import GaussianPrior, independent_prior
from pyro_bdl.program.layout import Latent, Layout, marginal
from pyro_bdl.program.trace import Run
from pyro_bdl.utils import bibliography
from pyro_bdl.utils.validation import one_of, real_number

SHARING = ("per-weight", "per-row", "per-layer")


class AutoMeanField(Guide):
    """Independent Normals over the unconstrained latents: u = m + s * eps, w = T(u).

    The guide emits each site's own distribution, Normal or transformed Normal, at the site itself,
    so that ELBOs with analytic KL terms are correct on constrained sites too. The parameters are
    two flat vectors in unconstrained units: ``loc`` (m, (P,)) and ``scale`` (s > 0, one entry for
    each group of numbers that share it; P entries by default). Sources: Blundell et al. 2015;
    Kucukelbir et al. 2017. An initial scale of ``init.relative_scale(0.1)`` with
    ``priors.Pretrained`` or ``priors.Moped`` is empirical Bayes from a pretrained network (Krishnan
    et al. 2020).

    Example::

        >>> x, y = torch.linspace(-1, 1, 20)[:, None], torch.linspace(-2, 2, 20)
        >>> model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=0.1)
        >>> guide = bdl.guides.AutoMeanField(model)
        >>> training = bdl.training.train(model, guide, x, y, steps=100, learning_rate=0.1)
        >>> round(guide.median()["weight"].item(), 1)
        2.0
        >>> guide.scale.shape
        torch.Size([2])

    :param model: a Pyro program with continuous latents.
    :param init_scale: the initial s in unconstrained units: a number, or a function from m (P,) to
        s (P,). Numbers that share one s start at their root mean square.
    :param scale: which numbers share s. "per-weight": none. "per-row": the numbers of one output,
        which is the first event dimension of a site; each entry of a vector is a separate output.
        "per-layer": the numbers of one site. A number fixes s to that value everywhere.
    :param max_scale: an upper bound on s, or None; 0.1 or less is usual if a network underfits.
    :param train_loc: False keeps m at its initial value, such as a pretrained network, and trains
        only the scales.
    :param options: ``init_loc_fn``, where the guide starts, and ``create_plates``, see ``Guide``.
    :raises ValueError: for scales that are not positive and finite or not below ``max_scale``, an
        unknown sharing, or a bound on a fixed scale.
    """

    papers: ClassVar[tuple[str, ...]] = (
        bibliography.BAYES_BY_BACKPROP,
        bibliography.VARIATIONAL_INFERENCE,
    )
    normal_marginals = True

    def __init__(
        self,
        model: Callable,
        *,
        init_scale: float | Callable[[Tensor], Tensor] = 0.05,
        scale: str | float = "per-weight",
        max_scale: float | None = None,
        train_loc: bool = True,
        **options: Any,
    ) -> None:
        _check_scales(init_scale, scale, max_scale)
        super().__init__(model, **options)
        self.init_scale, self.max_scale, self.train_loc = init_scale, max_scale, train_loc
        self.sharing = scale
        self._finished_priors = FinishedPriors()

    def options(self) -> dict[str, Any]:
        return {"scale": self.sharing, "max_scale": self.max_scale, "train_loc": self.train_loc}

    def create_parameters(self, start: Tensor) -> None:
        if self.train_loc:
            self.loc = nn.Parameter(start.clone())
        else:
            self.register_buffer("loc", start.clone())
        if not isinstance(self.sharing, str):
            self.register_buffer("scale", start.new_tensor(float(self.sharing)))
            return
        groups = shared_groups(self.require_layout(), self.sharing)
        self.register_buffer(
            "groups", None if groups is None else groups.to(start.device), persistent=False
        )
        initial = self._initial_scales(start)
        if groups is not None:
            squares = initial.new_zeros(int(groups[-1]) + 1)
            squares.index_add_(0, self.groups, initial.square())
            initial = (squares / self.groups.bincount()).sqrt()
        bounded = constraints.interval(0.0, self.max_scale)
        self.scale = PyroParam(
            initial, constraints.softplus_positive if self.max_scale is None else bounded
        )

    def _initial_scales(self, start: Tensor) -> Tensor:
        if not callable(self.init_scale):
            return torch.full_like(start, self.init_scale)
        values = torch.as_tensor(self.init_scale(start), dtype=start.dtype, device=start.device)
        highest = math.inf if self.max_scale is None else self.max_scale
        if values.shape != start.shape or not ((values > 0) & (values < highest)).all():
            raise ValueError(
                f"init_scale must give {len(start)} numbers between 0 and max_scale ({highest}), "
                f"got shape {tuple(values.shape)}, from {float(values.min()):.3g} to "
                f"{float(values.max()):.3g}"
            )
        return values

    def site_vectors(self) -> tuple[Tensor, ...]:
        return self.loc_and_scale()

    def site_distribution(self, latent: Latent, *parts: Tensor) -> dist.TorchDistribution:
        return marginal(latent, *parts)

    def get_posterior(self, *args: Any, **kwargs: Any) -> dist.TorchDistribution:
        """q over the unconstrained vector (P,), a diagonal Normal."""
        self._prototype_if_given(args, kwargs)
        return dist.Normal(*self.loc_and_scale()).to_event(1)

    def loc_and_scale(self) -> tuple[Tensor, Tensor]:
        """m and s, both (P,)."""
        loc, scale = self.parameter("loc"), self.parameter("scale")
        if self.sharing == "per-weight":
            return loc, scale
        if not isinstance(self.sharing, str):
            return loc, scale.expand_as(loc)
        return loc, scale.index_select(0, self.groups)

    def location(self) -> Tensor:
        return self.parameter("loc")

    def sample_vectors(self, num_samples: int) -> Tensor:
        loc, scale = self.loc_and_scale()
        noise = torch.randn(num_samples, len(loc), dtype=loc.dtype, device=loc.device)
        return torch.addcmul(loc, scale, noise)

    def log_density(self, vector: Tensor, log_det: Tensor) -> Tensor:
        return dist.Normal(*self.loc_and_scale()).log_prob(vector).sum(-1) - log_det

    def kl(self, vector: Tensor, log_det: Tensor, run: Run) -> Tensor:
        return diagonal_normal_kl(
            self.require_layout(), *self.loc_and_scale(), run.priors, self._finished_priors
        )

    def entropy(self, vector: Tensor, log_det: Tensor) -> Tensor:
        return dist.Normal(*self.loc_and_scale()).entropy().sum() + log_det

    def variances(self) -> Tensor:
        """The marginal variances of the unconstrained vector (P,)."""
        return self.loc_and_scale()[1].square()

    def as_prior(self) -> GaussianPrior:
        """Independent Normals over u, see ``Guide.as_prior``."""
        self._require_global()
        return independent_prior(self.require_layout(), *self.loc_and_scale())


def shared_groups(layout: Layout, sharing: str) -> Tensor | None:
    """The group of each of the P numbers, (P,), counted from 0; None if each number is its own
    group.

    :param sharing: as ``scale`` of ``AutoMeanField``.
    """
    if sharing == "per-weight":
        return None
    groups, count = [], 0
    for latent in layout.latents.values():
        shape, rows = latent.unconstrained_shape, 1
        if sharing == "per-row":
            # plates and the first event dimension number the groups; other dimensions share
            kept = len(shape) - max(0, latent.unconstrained_event_dim - 1)
            rows = math.prod(shape[:kept])
        numbers = torch.arange(count, count + rows, device="cpu")
        groups.append(numbers.repeat_interleave(latent.size // rows))
        count += rows
    return torch.cat(groups)


def _check_scales(init_scale: Any, scale: Any, max_scale: Any) -> None:
    if isinstance(scale, str):
        one_of(scale, "scale", SHARING)
    elif max_scale is not None:
        raise ValueError(f"scale={scale} is fixed and takes no max_scale: leave one of them out")
    else:
        real_number(scale, "scale")
    most = math.inf if max_scale is None else real_number(max_scale, "max_scale")
    if not callable(init_scale) and real_number(init_scale, "init_scale") >= most:
        raise ValueError(f"init_scale {init_scale} must be less than max_scale {max_scale}")
