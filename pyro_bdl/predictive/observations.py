"""Moments, densities and draws of observed sites under a posterior."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_bdl.distributions.moments import (
    log_probabilities,
    observation_covariance,
    observation_mean,
    observation_moments,
)
from pyro_bdl.program.batches import Batches
from pyro_bdl.program.samples import Samples
from pyro_bdl.program.trace import Site
from pyro_bdl.utils.module_state import device_of


class PredictiveMoments(NamedTuple):
    """Moments of an observation, each ``(N, ...)``.

    :param mean: E[y], in units of y.
    :param variance: Var[y], in squared units of y, including noise.
    """

    mean: Tensor
    variance: Tensor

    def over_draws(self) -> "PredictiveMoments":
        """The moments over all draws, (N, ...), from the moments at each draw, (S, N, ...).

        E[y] = E[E[y | w]] and Var[y] = E[Var[y | w]] + Var[E[y | w]].
        """
        spread = self.mean.var(0, correction=0)
        return PredictiveMoments(self.mean.mean(0), self.variance.mean(0) + spread)


class SitePredictions(NamedTuple):
    """Predictions for one observed site at S draws of the latents, all of one run of the program.

    :param mean: E[y | w_s], ``(S, N, ...)``; for classes the probabilities ``(S, N, C)``.
    :param variance: Var[y | w_s], as ``mean``.
    :param draws: y ~ p(y | w_s), ``(S, N, ...)``.
    :param log_density: log p(y_n | w_s) in nats, ``(S, *batch)``; None without targets.
    :param log_mean: of classes log p(c | w_s), ``(S, N, ..., C)``; None for others, and mixtures.
    """

    mean: Tensor
    variance: Tensor
    draws: Tensor
    log_density: Tensor | None = None
    log_mean: Tensor | None = None


class ClosedPredictions(NamedTuple):
    """The predictions of one observed site in closed form, over posterior and noise.

    :param mean: E[y], ``(N, ...)``.
    :param variance: Var[y], as ``mean``.
    :param log_density: log p(y_n) in nats, of the distribution's batch shape; None without targets,
        and where it has no closed form.
    """

    mean: Tensor
    variance: Tensor
    log_density: Tensor | None = None


class AtDraws(NamedTuple):
    """Values read at S draws of the latents, each by site.

    :param values: what ``read`` returned of the observed sites.
    :param densities: log p(y_n | w_s) of the observed sites with a value, (S, *batch), where asked
        for.
    :param deterministic: the deterministic sites, (S, ...), where asked for.
    """

    values: dict[str, Any]
    densities: dict[str, Tensor]
    deterministic: dict[str, Tensor]


class Predictions:
    """What a posterior says of a program's observed sites, at draws or in closed form.

    Means, moments and covariances are those of y, noise included. Each draw is one function of all
    inputs.
    """

    model: Callable

    @property
    def samples(self) -> Samples | None:
        """The draws at which the program itself runs, where they are fixed; None for the
        linearized program, which stays what was fitted to all data."""
        return None

    def closed_predictions(self, *args: Any, **kwargs: Any) -> dict[str, ClosedPredictions]:
        """The sites whose predictions are known without draws; none by default."""
        return {}

    def _at_draws(
        self,
        read: Callable[[Any], Any],
        args: tuple,
        kwargs: dict,
        *,
        densities: bool = False,
        deterministic: bool = False,
    ) -> AtDraws:
        """Read the distribution of each observed site at each draw.

        :param read: of a distribution, of one draw or of several with the draws in front.
        :param densities: whether to compute them too.
        :param deterministic: whether to return these sites too.
        """
        raise NotImplementedError

    def at_fixed_draws(self, *args: Any, **kwargs: Any) -> "Predictions":
        """The same predictions with draws of the latents that are made once.

        :param args: the program's arguments, which Pyro's own guides are run with.
        """
        raise NotImplementedError

    def in_batches(
        self, data: Any, method: str = "__call__", **options: Any
    ) -> Iterator[dict[str, Any]]:
        """Predictions for one batch of data after another, all at the same draws of the latents.

        Only one batch and its predictions are in memory. Latents that a dict of draws lacks are
        drawn anew for each batch.

        Example::

            >>> x = torch.linspace(-1, 1, 20)[:, None]
            >>> model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=0.1)
            >>> guide = bdl.guides.AutoMeanField(model).prototype(x, x[:, 0])
            >>> predictive = bdl.Predictive(model, guide, num_samples=10)
            >>> [draws["y"].shape for draws in predictive.in_batches([(x[:15],), (x[15:],)])]
            [torch.Size([10, 15]), torch.Size([10, 5])]

        :param data: a ``DataLoader``, a list of batches, or a function that makes an iterator;
            batches may hold targets.
        :param method: which of this object's methods, as "moments" or "log_likelihood".
        :param options: of that method.
        """
        fixed = None
        for args, kwargs in Batches(data).to(device_of(self.model)):
            fixed = self.at_fixed_draws(*args, **kwargs) if fixed is None else fixed
            yield getattr(fixed, method)(*args, **kwargs, **options)

    def mean(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """E[y | w_s, x] for each observed site, (S, N, ...); for classes the probabilities
        (S, N, C)."""
        return self._at_draws(observation_mean, args, kwargs).values

    def moments(self, *args: Any, **kwargs: Any) -> dict[str, PredictiveMoments]:
        """Mean and variance of y for each observed site, over posterior and noise, (N, ...).

        E[y] is the mean over the draws, and Var[y] = E[Var[y | w]] + Var[E[y | w]]. For Normal
        noise with precision tau this is 1 / tau plus the variance over the draws (Gal & Ghahramani
        2016, section 4). For classes both are moments of each class's indicator.
        """
        of_draws = self.draw_moments(*args, **kwargs)
        return {name: moments.over_draws() for name, moments in of_draws.items()}

    def covariance(self, *args: Any, **kwargs: Any) -> dict[str, "PredictiveCovariance"]:
        """Mean (N, D) and covariance (N, D, D) of the D numbers of y of each datum, for each
        observed site: Cov[y] = E[Cov[y | w]] + Cov[E[y | w]].

        For classes they are those of the classes' indicators.
        """
        return self._covariance(args, kwargs, joint=False)

    def joint_covariance(self, *args: Any, **kwargs: Any) -> dict[str, "PredictiveCovariance"]:
        """The same over all data: mean (N, D) and covariance (N, D, N, D)."""
        return self._covariance(args, kwargs, joint=True)

    def _covariance(
        self, args: tuple, kwargs: dict, *, joint: bool
    ) -> dict[str, "PredictiveCovariance"]:
        moments = self._at_draws(observation_covariance, args, kwargs).values
        return {name: total_covariance(*values, joint=joint) for name, values in moments.items()}

    def probabilities(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The probabilities of the classes of each site, (N, C), and P(y = 1) of a Bernoulli, over
        the posterior."""
        return {name: mean.mean(0) for name, mean in self.mean(*args, **kwargs).items()}

    def draw_moments(self, *args: Any, **kwargs: Any) -> dict[str, PredictiveMoments]:
        """E[y | w_s, x] and Var[y | w_s, x] for each observed site and draw, (S, N, ...)."""
        return self._at_draws(_moments, args, kwargs).values

    def log_likelihood(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """log p(y_n | w_s, x_n) for each observed site, (S, N); the arguments include targets.

        :raises ValueError: if no target is given.
        """
        densities = self._at_draws(lambda distribution: (), args, kwargs, densities=True).densities
        if not densities:
            raise ValueError("no site is observed: pass the targets as well")
        return densities

    def observe(
        self, *args: Any, **kwargs: Any
    ) -> tuple[dict[str, SitePredictions], dict[str, Tensor]]:
        """All predictions of each observed site, and the deterministic sites ``(S, ...)``, of one
        run of the program at each draw.

        A site is predicted given the data of the sites before it, as in ``log_likelihood``.

        :param args: the program's arguments, with targets for their log densities.
        """
        at_draws = self._at_draws(_predictions, args, kwargs, densities=True, deterministic=True)
        sites = {
            name: SitePredictions(
                values[0],
                values[1],
                values[2],
                at_draws.densities.get(name),
                values[3] if len(values) > 3 else None,
            )
            for name, values in at_draws.values.items()
        }
        return sites, at_draws.deterministic


def _moments(distribution: Any) -> PredictiveMoments:
    return PredictiveMoments(*observation_moments(distribution))


def _predictions(distribution: Any) -> tuple[Tensor, ...]:
    mean, variance = observation_moments(distribution)
    try:
        draws = drawn(distribution)
    except RuntimeError:  # torch refuses some parameters that are NaN
        if not mean.isnan().any():
            raise
        draws = mean.new_full(distribution.shape(), torch.nan)
    logs = log_probabilities(distribution)
    return (mean, variance, draws) if logs is None else (mean, variance, draws, logs)


def drawn(distribution: Any) -> Tensor:
    """A draw, differentiable if gradients are enabled and the distribution allows it."""
    wanted = torch.is_grad_enabled() and distribution.has_rsample
    return distribution.rsample() if wanted else distribution.sample()


def densities_of(sites: dict[str, Site]) -> dict[str, Tensor]:
    """log p(value) of the sites that have a value, in nats per datum."""
    return {n: site.unscaled_log_prob() for n, site in sites.items() if site.value is not None}


class PredictiveCovariance(NamedTuple):
    """The joint moments of the D numbers of each observation, over posterior and noise.

    :param mean: E[y], (N, D), in units of y.
    :param covariance: Cov[y], (N, D, D), or over all data (N, D, N, D), in squared units of y.
    """

    mean: Tensor
    covariance: Tensor


def total_covariance(mean: Tensor, noise: Tensor, *, joint: bool) -> PredictiveCovariance:
    """Cov[y] = E[Cov[y | w]] + Cov[E[y | w]], over draws of w.

    :param mean: E[y | w], (S, *batch, E), as of ``observation_covariance``; the first batch
        dimension is the data's.
    :param noise: Cov[y | w], (S, *batch, E, E).
    """
    data = mean.shape[1] if mean.dim() > 2 else 1
    flat = mean.reshape(len(mean), data, -1)
    center = flat.mean(0)
    spread = flat - center
    if joint:
        inside = torch.einsum("snd,sme->ndme", spread, spread) / len(mean)
    else:
        inside = torch.einsum("snd,sne->nde", spread, spread) / len(mean)
    return PredictiveCovariance(center, with_noise(inside, noise.mean(0)))


def with_noise(covariance: Tensor, noise: Tensor) -> Tensor:
    """Add the covariance of the noise, which is independent between data and between events.

    :param covariance: (N, D, D) or (N, D, N, D).
    :param noise: (*batch, E, E), with N D entries of events in all.
    """
    data, size, events = covariance.shape[0], covariance.shape[1], noise.shape[-1]
    blocks = noise.reshape(data, size // events, events, events)
    result = covariance.clone()
    own = result if result.dim() == 3 else result.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    for start in range(blocks.shape[1]):
        part = slice(start * events, (start + 1) * events)
        own[:, part, part] += blocks[:, start]
    return result
