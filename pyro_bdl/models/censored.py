"""A program of times and other numbers of which some are known within limits only."""

from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_bdl.distributions.censored import INTERVAL, LAWS, Censored
from pyro_bdl.models.base import ObservationModel, Output
from pyro_bdl.scales import Scale
from pyro_bdl.utils.validation import one_of


class CensoredRegression(ObservationModel):
    """Times and other numbers of which some are only known to be beyond a limit, or between two.

    y = f(x) + scale e or, of the other laws, log y = f(x) + scale e, with e of a standard Normal
    or, for the Weibull, a law of smallest extreme values; its shape is then 1 / scale.

    The targets are ``(N, 2)``, a value and its status, as in R's ``Surv``: 1, it is y; 0
    (right-censored), y is larger; 2 (left-censored), y is smaller. Intervals have the status 3 and
    their upper end in a third column, ``(N, 3)``, which other rows may have anything finite in.
    Predictions are of y itself. ``compare`` has the log score and a CRPS in which a censored target
    counts as what is known of it; RMSE would take the limit for y.

    :param law: "normal", "lognormal" or "weibull".
    :param scale: as ``noise`` of ``Regression``.
    :raises ValueError: for another law; of the call, for targets of another shape or status.

    Source: Klein & Moeschberger (2003), Survival analysis, sections 3.5 and 12.
    """

    def __init__(
        self,
        network: nn.Module | None = None,
        law: str = "lognormal",
        *,
        scale: Scale | None = None,
        num_data: int | None = None,
        output: Output = None,
    ) -> None:
        super().__init__(network, num_data=num_data, output=output)
        self.law = one_of(law, "law", LAWS)
        self._declare("scale", dist.HalfNormal(1.0) if scale is None else scale)

    def likelihood(self, output: Tensor) -> Distribution:
        status, upper = torch.ones_like(output), torch.zeros_like(output)
        scale = self._hyperparameter("scale", output)
        return Censored(self.law, self.record(output), scale, status, upper)

    def observation_shape(self, output: Tensor) -> torch.Size:
        if output.dim() != 1:
            raise ValueError(
                f"CensoredRegression needs a network with one output, got output shape "
                f"{tuple(output.shape)}"
            )
        return output.shape

    def _checked_targets(self, output: Tensor, y: Tensor) -> Tensor:
        rows = self.observation_shape(output)[0]
        if y.shape not in ((rows, 2), (rows, 3)):
            raise ValueError(
                f"{self._targets_name} has shape {tuple(y.shape)}, but must be ({rows}, 2), values "
                f"and status, or ({rows}, 3), with the upper ends of intervals"
            )
        return y.to(output)

    def _as_observed(self, likelihood: Any, y: Tensor) -> tuple[Any, Tensor]:
        loc, scale, upper = likelihood.loc, likelihood.scale, likelihood.upper
        upper = y[:, 2] if y.shape[1] == 3 else upper
        if likelihood.is_validated:
            self._check_known(y[:, 0], y[:, 1], upper)
        return Censored(self.law, loc, scale, y[:, 1], upper), y[:, 0]

    def _check_known(self, value: Tensor, status: Tensor, upper: Tensor) -> None:
        """Check that each status is one, and that intervals end above their values."""
        known = torch.isin(status, torch.arange(4, device=status.device).to(status))
        right = (status != INTERVAL) | (upper > value)
        for fits, words in (
            (known, "a status that is not 0, 1, 2 or 3"),
            (right, "the status 3, an interval, whose upper end is not above its value"),
        ):
            if not fits.all():
                row = int((~fits).nonzero()[0])
                raise ValueError(f"{self._targets_name} has in row {row} {words}")
