"""The linearised predictive of a mixture: sum_k weight_k p_k(y | x), p_k linearised around the
centre of the member k (Eschenhagen et al. 2021, "mixtures of Laplace approximations")."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.guides.mixture import MixtureGuide
from pyro_bdl.predictive.linearized import Draws, LinearizedPredictive, Moments


class LinearizedMixture(LinearizedPredictive):
    """``LinearizedPredictive`` of a ``MixtureGuide`` of Laplace approximations.

    Draws are stratified over the members as those of the guide; moments follow from the law of
    total variance, densities and class probabilities are averages over the members.

    :param model: the Pyro program; call the result with its arguments, without the targets.
    :param posterior: a mixture of guides of ``laplace_approximation``.
    :param num_samples: S, how many draws.
    """

    def __init__(
        self, model: Callable, posterior: MixtureGuide, num_samples: int | None = None
    ) -> None:
        super().__init__(model, posterior, num_samples)
        self._kept = [k for k, weight in enumerate(posterior.weights.tolist()) if weight > 0]
        self.weights = posterior.weights[self._kept]

    def _member(self, number: int, num_samples: int) -> LinearizedPredictive:
        return LinearizedPredictive(self.model, self.posterior.members[number], num_samples)

    def _each(self, ask: Callable[[LinearizedPredictive], Any]) -> list[Any]:
        """What every member's linearised predictive says."""
        return [ask(self._member(k, self.num_samples)) for k in self._kept]

    def __call__(self, *args: Any, **kwargs: Any) -> Draws:
        """Draws of the observed and the deterministic sites, and the moments."""
        result = Draws(self._drawn(lambda member: member(*args, **kwargs)))
        result.moments = self.moments(*args, **kwargs)
        return result

    def mean(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """E[y | draw, x] for each observed site, (S, N, ...); for classes the probabilities."""
        return self._drawn(lambda member: member.mean(*args, **kwargs))

    def _draw_moments(self, args: tuple, kwargs: dict) -> dict[str, Tensor]:
        return self._drawn(lambda member: member._draw_moments(args, kwargs))

    def log_likelihood(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """log p(y_n | draw, x_n) for each observed site, (S, N); the arguments include targets."""
        return self._drawn(lambda member: member.log_likelihood(*args, **kwargs))

    def _drawn(self, ask: Callable[[LinearizedPredictive], Any]) -> dict[str, Tensor]:
        """Each member's draws, as many as its share, in random order."""
        shares = enumerate(self.posterior.shares(self.num_samples))
        found = [ask(self._member(k, number)) for k, number in shares if number]
        order = torch.randperm(self.num_samples, device=self.weights.device)
        return {name: torch.cat([part[name] for part in found])[order] for name in found[0]}

    # Closed forms

    def moments(self, *args: Any, **kwargs: Any) -> dict[str, Moments]:
        """Mean and variance of every observed site's unconstrained parameters; see
        ``LinearizedPredictive.moments``."""
        found = self._each(lambda member: member.moments(*args, **kwargs))
        return {name: self._total([each[name] for each in found]) for name in found[0]}

    def _total(self, parts: list[Moments]) -> Moments:
        mean, variance = {}, {}
        for key in parts[0].mean:
            means = torch.stack([part.mean[key] for part in parts])
            mean[key] = self._averaged(means)
            if any(key in part.variance for part in parts):
                zero = torch.zeros_like(mean[key])
                inside = torch.stack([part.variance.get(key, zero) for part in parts])
                variance[key] = self._averaged(inside + (means - mean[key]).square())
        noise: Any = [part.noise_variance for part in parts]
        return Moments(mean, variance, None if noise[0] is None else self._averaged(noise))

    def _averaged(self, values: Any) -> Tensor:
        """sum_k weight_k values_k over the first axis."""
        values = torch.stack(list(values))
        return torch.tensordot(self.weights.to(values), values, dims=1)

    def covariance(self, *args: Any, **kwargs: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """As ``LinearizedPredictive.covariance``, of the mixture."""
        return self._with_spread(self._each(lambda member: member.covariance(*args, **kwargs)))

    def joint_covariance(self, *args: Any, **kwargs: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """As ``LinearizedPredictive.joint_covariance``, of the mixture."""
        found = self._each(lambda member: member.joint_covariance(*args, **kwargs))
        return self._with_spread(found)

    def _with_spread(self, found: list[dict]) -> dict[str, tuple[Tensor, Tensor]]:
        result = {}
        for name in found[0]:
            means = torch.stack([each[name][0] for each in found])
            centre = self._averaged(means)
            spread = (means - centre)[..., :, None] * (means - centre)[..., None, :]
            inside = torch.stack([each[name][1] for each in found])
            result[name] = centre, self._averaged(inside + spread)
        return result

    def probabilities(self, *args: Any, method: str = "probit", **kwargs: Any) -> dict[str, Tensor]:
        """P(y = class), averaged over the members; see ``LinearizedPredictive.probabilities``."""
        found = self._each(lambda member: member.probabilities(*args, method=method, **kwargs))
        return {name: self._averaged([each[name] for each in found]) for name in found[0]}

    def log_density(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """log sum_k weight_k p_k(y_n | x_n); see ``LinearizedPredictive.log_density``."""
        found = self._each(lambda member: member.log_density(*args, **kwargs))
        result = {}
        for name in found[0]:
            terms = torch.stack([each[name] for each in found], -1)
            result[name] = torch.logsumexp(terms + self.weights.to(terms).log(), -1)
        return result
