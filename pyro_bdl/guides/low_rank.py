"""Gaussian variational inference with a covariance that is diagonal plus low rank."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from pyro.distributions import constraints
from pyro.nn import PyroParam
from torch import Tensor, nn

from pyro_bdl.curvature.prior import independent_normal, run_at
from pyro_bdl.guides.kl import expected_log_prior
from pyro_bdl.guides.normal import LowRankNormal
from pyro_bdl.program.subset import Subset
from pyro_bdl.program.trace import Run
from pyro_bdl.utils import bibliography
from pyro_bdl.utils.validation import real_number, whole_number


class AutoLowRank(LowRankNormal):
    """q(u) = Normal(m, diag(s^2) + W W') over the unconstrained latents, with ``rank`` columns in
    W.

    A draw is u = m + s * eps + W eta, with standard Normal eps (P,) and eta (rank,). The parameters
    are ``loc`` (m, (P,)), ``scale`` (s > 0, (P,)) and ``factor`` (F, (P, rank)) with W = diag(s) F,
    so that an optimizer's steps in W are small where s is small. A step costs O(P rank^2). The
    family is that of Ong, Nott & Smith 2018; family and parameters are those of Pyro's
    ``AutoLowRankMultivariateNormal``.

    Example::

        >>> x, y = torch.linspace(-1, 1, 20)[:, None], torch.linspace(-2, 2, 20)
        >>> model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=0.1)
        >>> guide = bdl.guides.AutoLowRank(model, rank=1)
        >>> training = bdl.training.train(model, guide, x, y, steps=100, learning_rate=0.1)
        >>> guide.factor.shape, round(guide.median()["weight"].item(), 1)
        (torch.Size([2, 1]), 2.0)

    :param model: a Pyro program with continuous latents.
    :param rank: the number of columns of W; with P columns any covariance is possible.
    :param init_scale: the initial value of every s, in unconstrained units; W starts at random with
        a hundredth of that variance.
    :param options: ``init_loc_fn``, where the guide starts, and ``create_plates``, see ``Guide``.
    :raises TypeError: for a rank that is not a whole number.
    :raises ValueError: for a rank below 1, or an ``init_scale`` that is not positive and finite.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.FACTOR_COVARIANCE,)

    def __init__(
        self,
        model: Callable,
        *,
        rank: int = 10,
        init_scale: float = 0.05,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        self.rank = whole_number(rank, "rank")
        self.init_scale = real_number(init_scale, "init_scale")

    def options(self) -> dict[str, Any]:
        return {"rank": self.rank}

    def _moving_priors(self, vector: Tensor) -> frozenset[str]:
        """The sites whose prior is not Normal, or is a Normal that depends on another latent."""
        if self.subsampled:
            return frozenset()
        model, layout = self.program_model, self.require_layout()
        run, leaves = run_at(model, Subset(layout), vector, *self.example_rows)
        return frozenset(
            name
            for name, site in run.latents.items()
            if independent_normal(site, layout.latents[name].transform, leaves) is None
        )

    def create_parameters(self, start: Tensor) -> None:
        self.loc = nn.Parameter(start.clone())
        self.scale = PyroParam(
            torch.full_like(start, self.init_scale), constraints.softplus_positive
        )
        self.subset, self._at_draw = Subset(self.require_layout()), self._moving_priors(start)
        columns = torch.randn(len(start), self.rank, dtype=start.dtype, device=start.device)
        self.factor = nn.Parameter(columns * (0.1 / math.sqrt(self.rank)))

    def scale_and_factor(self) -> tuple[Tensor, Tensor]:
        scale = self.parameter("scale")
        return scale, scale[:, None] * self.parameter("factor")

    def location(self) -> Tensor:
        return self.parameter("loc")

    def kl(self, vector: Tensor, log_det: Tensor, run: Run) -> Tensor:
        """-H(q) - E_q[log p(w)] in nats, in closed form for Normal priors.

        Sites without a Normal prior, or with a prior that depends on another latent, are evaluated
        at the draw.
        """
        expected = expected_log_prior(
            self.require_layout(), self.location(), self.variances(), run.priors,
            at_draw=self._at_draw,
        )  # fmt: skip
        return -self.entropy(vector, log_det) - expected
