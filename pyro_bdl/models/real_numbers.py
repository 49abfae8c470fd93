"""Programs of real numbers: with Normal noise, of one size or of another at each input, and with
heavy tails; and of shares between 0 and 1."""

from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.functional import softplus

from pyro_bdl.models.base import ObservationModel, Scales, halves
from pyro_bdl.utils.validation import real_number


class Regression(ObservationModel):
    """y ~ Normal(f(x), noise^2); several targets are independent given f.

    Example::

        >>> x, y = torch.linspace(-1, 1, 20)[:, None], torch.linspace(-2, 2, 20)
        >>> bnn = bdl.bayesianize(torch.nn.Linear(1, 1))
        >>> model = bdl.models.Regression(bnn, noise=dist.HalfNormal(1.0))
        >>> list(bdl.Program(model, x, y).latents)
        ['weight', 'bias', 'noise']

    :param noise: the noise's standard deviation, in units of y: a number, a ``PyroParam`` or a
        distribution (then a latent site ``noise``). Of D targets each has its own where it is D
        numbers, a ``PyroParam`` of them, or a distribution of batch shape (D,).
    :param options: ``num_data``, ``output`` and ``missing_targets``, see ``ObservationModel``.
    """

    def __init__(
        self, network: nn.Module | None = None, *, noise: Scales | None = None, **options: Any
    ) -> None:
        super().__init__(network, **options)
        self._declare("noise", dist.HalfNormal(1.0) if noise is None else noise)

    def likelihood(self, output: Tensor) -> Distribution:
        noise = self._hyperparameter("noise", output)
        return dist.Normal(self.record(output), noise).to_event(output.dim() - 1)


class HeteroscedasticRegression(ObservationModel):
    """y ~ Normal(f(x), s(x)^2), with f and s from the network.

    The last dimension of the output is split into two halves: f, and r with s = floor +
    softplus(r). The site ``f`` is the mean, the deterministic site ``noise`` is s.

    The likelihood has no maximum without a floor: a network that passes through a single point may
    let s go to zero there, and the density at that point goes to infinity. A long training of a
    point estimate does so, one point after another, and its log likelihood on held-out data falls
    while that on the training data grows. A floor at the size of the measurement error bounds this,
    ``training.train(..., held_out=0.1)`` stops before it, and averaging over the posterior does not
    run into it.

    :param floor: the smallest s, in units of y; by default the rounding error of the dtype.
    :param options: ``num_data``, ``output`` and ``missing_targets``, see ``ObservationModel``.
    :raises ValueError: for a floor that is not positive and finite.
    """

    def __init__(
        self, network: nn.Module | None = None, *, floor: float | None = None, **options: Any
    ) -> None:
        super().__init__(network, **options)
        self.floor = None if floor is None else real_number(floor, "floor")

    def likelihood(self, output: Tensor) -> Distribution:
        mean, raw = halves(self, output)
        floor = torch.finfo(raw.dtype).eps if self.floor is None else self.floor
        noise = pyro.deterministic(self._site("noise"), softplus(raw) + floor)
        return dist.Normal(self.record(mean), noise).to_event(mean.dim() - 1)

    def observation_shape(self, output: Tensor) -> torch.Size:
        return halves(self, output)[0].shape


class StudentTRegression(ObservationModel):
    """y ~ StudentT(df, f(x), noise): regression that is robust to outliers.

    :param noise: the scale, in units of y; ``df``: the degrees of freedom. Each a number, a
        ``PyroParam`` or a distribution (then a latent site of that name), for all targets or, as
        in ``Regression``, for each.
    :param options: ``num_data``, ``output`` and ``missing_targets``, see ``ObservationModel``.
    """

    def __init__(
        self,
        network: nn.Module | None = None,
        *,
        noise: Scales | None = None,
        df: Scales = 4.0,
        **options: Any,
    ) -> None:
        super().__init__(network, **options)
        self._declare("noise", dist.HalfNormal(1.0) if noise is None else noise)
        self._declare("df", df)

    def likelihood(self, output: Tensor) -> Distribution:
        df, noise = self._hyperparameter("df", output), self._hyperparameter("noise", output)
        return dist.StudentT(df, self.record(output), noise).to_event(output.dim() - 1)


class BetaRegression(ObservationModel):
    """Shares y between 0 and 1, y ~ Beta(m precision, (1 - m) precision).

    Their mean is m = sigmoid(f(x)), their variance m (1 - m) / (1 + precision). Targets that are 0
    or 1 have no finite density: move them inside, or write a statement of their own for them.

    :param precision: as ``noise`` of ``Regression``; by default a LogNormal with median 7.4.
    :param options: ``num_data``, ``output`` and ``missing_targets``, see ``ObservationModel``.

    Source: Ferrari & Cribari-Neto (2004), Beta regression for modelling rates and proportions.
    """

    def __init__(
        self, network: nn.Module | None = None, *, precision: Scales | None = None, **options: Any
    ) -> None:
        super().__init__(network, **options)
        self._declare("precision", dist.LogNormal(2.0, 1.0) if precision is None else precision)

    def likelihood(self, output: Tensor) -> Distribution:
        precision, f = self._hyperparameter("precision", output), self.record(output)
        return dist.Beta(f.sigmoid() * precision, (-f).sigmoid() * precision).to_event(f.dim() - 1)
