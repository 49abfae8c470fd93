"""The linearised posterior predictive: f(x; u) = f(x; u*) + J(x) (u - u*), u Gaussian.

With u ~ N(u*, C) the unconstrained parameters of the observation distribution are Gaussian,
N(f(x; u*), J C J'), in closed form. A generalised Gauss-Newton posterior belongs to this linear
model; the network itself at its draws predicts badly (Foong et al. 2019; Immer et al. 2021, "GLM
predictive").
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from pyro.distributions.util import scale_and_mask
from torch import Tensor
from torch.utils._pytree import tree_map

from pyro_bdl.curvature.chunking import linearizations
from pyro_bdl.curvature.jacobian.datum_axes import Alignment
from pyro_bdl.curvature.jacobian.linearization import Linearization
from pyro_bdl.curvature.structures.draws import Offsets
from pyro_bdl.distributions.take_apart import (
    base_distribution,
    observation_mean,
    observation_variance,
    parameters_of,
)
from pyro_bdl.guides.laplace import LaplaceGuide
from pyro_bdl.guides.mixture import MixtureGuide
from pyro_bdl.predictive import closed_forms
from pyro_bdl.predictive.linear_outputs import Outputs
from pyro_bdl.predictive.sampled import PredictiveMoments
from pyro_bdl.program.batches import leading_size
from pyro_bdl.program.subsampling import on_whole_data
from pyro_bdl.program.unconstrained_parameters import constrained_value, with_natural
from pyro_bdl.utils.validation import whole_number

METHODS = ("probit", "laplace-bridge", "monte-carlo")

_DRAWS_AT_ONCE = 2**29  # bytes of latent draws


@dataclass(frozen=True)
class Moments:
    """A Gaussian over an observed site's unconstrained parameters.

    Parameters are those that depend on the latents: the location and the logarithm of the scale
    for a Normal, the logits for classes, the logarithm of a rate, ...

    :param mean: by parameter, (N, ...), at the MAP.
    :param variance: by parameter, (N, ...); the noise of the observation is not in it.
    :param noise_variance: for a Normal the expected variance of the noise, (N, ...), in squared
        units of y, over the posterior of the noise scale; None for other distributions.
    """

    mean: dict[str, Tensor]
    variance: dict[str, Tensor]
    noise_variance: Tensor | None

    @property
    def predictive_variance(self) -> Tensor:
        """Var[y] of a Normal, (N, ...): of its location plus the noise."""
        if self.noise_variance is None:
            raise ValueError("only a Normal observation has a predictive variance in closed form")
        return self.variance.get("loc", torch.zeros_like(self.noise_variance)) + self.noise_variance


class Draws(dict[str, Tensor]):
    """Draws by site, as ``Predictive`` gives them, with the ``moments`` they were drawn from."""

    moments: dict[str, Moments]


Part = dict[str, Outputs]

UNKNOWN = (
    "the linearised model does not know {kind} observations: the draws of {posterior} go through "
    "the network itself"
)


def is_linear(posterior: Any) -> bool:
    """Whether a posterior is one of the linearised program: a Laplace approximation, or a mixture
    of nothing else."""
    if isinstance(posterior, MixtureGuide):
        return all(isinstance(member, LaplaceGuide) for member in posterior.members)
    return isinstance(posterior, LaplaceGuide)


class LinearizedPredictive:
    """Predictions of the linearised program under a Gaussian guide.

    ``LinearizedPredictive(model, guide)(x)`` gives draws ``{"y": (S, N, ...), "f": (S, N, ...)}``
    like ``Predictive``, each one function of all inputs, and their ``moments`` in closed form.

    :param model: the Pyro program; call the result with its arguments, without the targets.
    :param posterior: a guide of ``laplace_approximation``; of a mixture of such the program is
        linearised around each member (``LinearizedMixture``).
    :param num_samples: S, how many draws.
    :raises TypeError: for another posterior.
    """

    def __new__(cls, model: Callable, posterior: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is LinearizedPredictive and isinstance(posterior, MixtureGuide):
            from pyro_bdl.predictive.linearized_mixture import LinearizedMixture

            return super().__new__(LinearizedMixture)
        return super().__new__(cls)

    def __init__(self, model: Callable, posterior: Any, num_samples: int | None = None) -> None:
        if not is_linear(posterior):
            raise TypeError(
                "LinearizedPredictive needs the Gaussian guide, or mixture of such, that "
                f"laplace_approximation(data) returns, got {type(posterior).__name__}"
            )
        if num_samples is not None:
            num_samples = whole_number(num_samples, "num_samples")
        self.model, self.posterior = model, posterior
        self.num_samples = 100 if num_samples is None else num_samples

    def __call__(self, *args: Any, **kwargs: Any) -> Draws:
        """Draws of the observed and the deterministic sites, and the moments."""
        moments: list[dict[str, tuple]] = []
        rows: list[int] = []

        def draw(at: Linearization, part: Part, offsets: Offsets, first: bool) -> dict[str, Tensor]:
            natural = {name: outputs.draws(offsets) for name, outputs in part.items()}
            drawn: dict[str, Tensor] = {
                name: with_natural(at.run.observed[name], values).distribution.sample()
                for name, values in natural.items()
            }
            if first:
                moments.append(self._moments(at, part))
                rows.append(_rows(at))
            return drawn | _deterministic(at, part, natural, offsets)

        result = Draws(self._map_draws(draw, args, kwargs))
        result.moments = _as_moments(_joined(moments, rows, 0))
        return result

    # Closed forms

    def moments(self, *args: Any, **kwargs: Any) -> dict[str, Moments]:
        """Mean and variance of every observed site's unconstrained parameters, in closed form.

        Not those of y, which ``Predictive.moments`` gives: E[y] and Var[y] of any observation are
        ``draw_moments(x)["y"].over_draws()``, those of a Normal ``mean["loc"]`` and
        ``predictive_variance`` of the result here.
        """
        return _as_moments(self._map(self._moments, args, kwargs))

    def _moments(self, at: Linearization, part: Part) -> dict[str, tuple]:
        result = {}
        for name, outputs in part.items():
            gaussian = outputs.gaussian(self.posterior.precision)
            noise = closed_forms.noise_variance(gaussian) if outputs.kind == "Normal" else None
            result[name] = gaussian.means(), gaussian.variances(), noise
        return result

    def covariance(self, *args: Any, **kwargs: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """For each observed site the mean (N, K) and the covariances (N, K, K) of the K
        unconstrained parameters of each datum."""

        def function(at: Linearization, part: Part) -> dict[str, tuple[Tensor, Tensor]]:
            found = {k: outputs.gaussian(self.posterior.precision) for k, outputs in part.items()}
            return {name: (g.mean, g.covariance) for name, g in found.items()}

        return self._map(function, args, kwargs)

    @torch.no_grad()
    def joint_covariance(self, *args: Any, **kwargs: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """For each observed site the mean (N K,) and the covariance (N K, N K) over all inputs,
        data before parameters. Takes the whole batch at once."""
        guide, result = self.posterior, {}
        at = Linearization(self.model, guide.subset, guide.loc, args, kwargs)
        for name, outputs in _observed(at).items():
            if outputs.moving:
                covariance = guide.precision.joint_covariance(outputs.jacobian)
                result[name] = (outputs.mean.reshape(-1), covariance.detach())
        return result

    def probabilities(self, *args: Any, method: str = "probit", **kwargs: Any) -> dict[str, Tensor]:
        """P(y = class) for each Categorical site, (N, C), and P(y = 1) for Bernoulli ones, (N,).

        :param method: "probit" (MacKay 1992; per class for several), "laplace-bridge" (Hobbhahn
            et al. 2022; for several classes) or "monte-carlo" over ``num_samples`` draws.
        :raises ValueError: for another method, or where no site is discrete.
        """
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r} (there are {', '.join(METHODS)})")

        def closed(at: Linearization, part: Part) -> dict[str, Tensor]:
            return {
                name: closed_forms.class_probabilities(
                    outputs.gaussian(self.posterior.precision), method
                )
                for name, outputs in part.items()
                if outputs.kind in closed_forms.DISCRETE
            }

        if method == "monte-carlo":
            draws = self._means(args, kwargs, closed_forms.DISCRETE)
            result = {name: value.mean(0) for name, value in draws.items()}
        else:
            result = self._map(closed, args, kwargs)
        if not result:
            raise ValueError("no observed site is Categorical or Bernoulli")
        return result

    def log_density(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """log p(y_n | x_n, data) for each observed site, (N, ...), without draws where there is a
        closed form; otherwise, and for several numbers per datum unless they are Normal with known
        noise, from ``num_samples`` draws. The arguments include targets.

        Closed forms are those of a Normal (an uncertain noise is integrated by quadrature), and of
        one Categorical or Bernoulli per datum (probit).
        """

        def closed(at: Linearization, part: Part) -> dict[str, Tensor]:
            result = {}
            for name, outputs in part.items():
                site = at.run.observed[name]
                if site.value is None:
                    raise ValueError(f"site '{name}' has no observation: pass the targets as well")
                density = closed_forms.log_density(site, outputs.gaussian(self.posterior.precision))
                if density is not None:
                    result[name] = scale_and_mask(density, 1.0, site.mask)
                else:
                    others.add(name)
            return result

        others: set[str] = set()
        result = self._map(closed, args, kwargs)
        if others:
            for name, draws in self.log_likelihood(*args, **kwargs).items():
                if name in others:
                    result[name] = draws.logsumexp(0) - math.log(len(draws))
        return result

    # Draws, as Predictive has them

    def mean(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """E[y | draw, x] for each observed site, (S, N, ...); for classes the probabilities."""
        return self._means(args, kwargs)

    def _means(
        self, args: tuple, kwargs: dict, kinds: tuple[str, ...] | None = None
    ) -> dict[str, Tensor]:
        def draw(at: Linearization, part: Part, offsets: Offsets, first: bool) -> dict[str, Tensor]:
            sites = {
                name: with_natural(at.run.observed[name], outputs.draws(offsets))
                for name, outputs in part.items()
                if kinds is None or outputs.kind in kinds
            }
            return {name: observation_mean(site.distribution) for name, site in sites.items()}

        return self._map_draws(draw, args, kwargs)

    def draw_moments(self, *args: Any, **kwargs: Any) -> dict[str, PredictiveMoments]:
        """E[y | draw, x] and Var[y | draw, x] for each observed site and draw, (S, N, ...)."""
        found = self._draw_moments(args, kwargs)
        names = [key.removeprefix("mean ") for key in found if key.startswith("mean ")]
        return {n: PredictiveMoments(found[f"mean {n}"], found[f"variance {n}"]) for n in names}

    def _draw_moments(self, args: tuple, kwargs: dict) -> dict[str, Tensor]:
        def draw(at: Linearization, part: Part, offsets: Offsets, first: bool) -> dict[str, Tensor]:
            found = {}
            for name, outputs in part.items():
                site = with_natural(at.run.observed[name], outputs.draws(offsets))
                found[f"mean {name}"] = observation_mean(site.distribution)
                found[f"variance {name}"] = observation_variance(site.distribution)
            return found

        return self._map_draws(draw, args, kwargs)

    def log_likelihood(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """log p(y_n | draw, x_n) for each observed site, (S, N); the arguments include targets.

        :raises ValueError: where no target is given.
        """

        def draw(at: Linearization, part: Part, offsets: Offsets, first: bool) -> dict[str, Tensor]:
            given = {
                n: outputs for n, outputs in part.items() if at.run.observed[n].value is not None
            }
            if not given:
                raise ValueError("no site is observed: pass the targets as well")
            return {
                name: with_natural(
                    at.run.observed[name], outputs.draws(offsets)
                ).unscaled_log_prob()
                for name, outputs in given.items()
            }

        return self._map_draws(draw, args, kwargs)

    # Over the data, in parts

    @torch.no_grad()
    def _parts(
        self, args: tuple, kwargs: dict, known: dict[Any, Alignment] | None = None
    ) -> Iterator[tuple[Linearization, Part]]:
        guide = self.posterior
        batch, program = [(args, kwargs)], on_whole_data(self.model)
        for at in linearizations(
            program, guide.subset, guide.loc, batch, None, known=known, every_output=True
        ):
            yield at, _observed(at)

    @torch.no_grad()
    def _map(
        self, function: Callable[[Linearization, Part], Any], args: tuple, kwargs: dict
    ) -> Any:
        """Nested results of every part, put together along their first axes."""
        found, rows = [], []
        for at, part in self._parts(args, kwargs):
            found.append(function(at, part))
            rows.append(_rows(at))
        return _joined(found, rows, 0)

    @torch.no_grad()
    def _map_draws(
        self,
        function: Callable[[Linearization, Part, Offsets, bool], dict[str, Tensor]],
        args: tuple,
        kwargs: dict,
    ) -> dict[str, Tensor]:
        """Results (S, n, ...) at draws of the latents, put together."""
        precision = self.posterior.precision
        item = self.posterior.loc.element_size()
        at_once = max(1, _DRAWS_AT_ONCE // max(1, item * self.posterior.subset.size))
        known: dict[Any, Alignment] = {}
        chunks = []
        for start in range(0, self.num_samples, at_once):
            offsets = precision.draw(min(at_once, self.num_samples - start))
            found, rows = [], []
            for at, part in self._parts(args, kwargs, known):
                found.append(function(at, part, offsets, start == 0))
                rows.append(_rows(at))
            chunks.append(_joined(found, rows, 1))
        return {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}


def _observed(at: Linearization) -> Part:
    return {name: Outputs.of_site(at, name, site) for name, site in at.run.observed.items()}


def _rows(at: Linearization) -> int:
    return leading_size((at.args, dict(at.kwargs)))


def _joined(found: list[Any], rows: list[int], dim: int) -> Any:
    """The parts' results one after the other; those that are not of the data once."""

    def join(*parts: Any) -> Any:
        if parts[0] is None or len(parts) == 1 or parts[0].dim() <= dim:
            return parts[0]
        of_data = all(part.shape[dim] == size for part, size in zip(parts, rows, strict=True))
        if not of_data and all(torch.equal(part, parts[0]) for part in parts):
            return parts[0]
        return torch.cat(parts, dim)

    return tree_map(join, found[0], *found[1:])


def _as_moments(found: dict[str, tuple]) -> dict[str, Moments]:
    return {name: Moments(*values) for name, values in found.items()}


def _deterministic(
    at: Linearization, part: Part, natural: dict[str, dict[str, Tensor]], offsets: Offsets
) -> dict[str, Tensor]:
    """Draws of the deterministic sites, linearised; parameters of observed sites are reused."""
    result = {}
    for name, value in at.run.deterministic.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            drawn = _reused(at, value, part, natural)
            if drawn is None:
                drawn = Outputs.of_deterministic(at, name).draws(offsets)["value"]
            result[name] = drawn
    return result


def _reused(
    at: Linearization, value: Tensor, part: Part, natural: dict[str, dict[str, Tensor]]
) -> Tensor | None:
    """Draws of a deterministic site that is a parameter of an observed site."""
    for name, outputs in part.items():
        base = base_distribution(at.run.observed[name].distribution)
        given = parameters_of(base)
        for key, parameter in outputs.values.items():
            if torch.equal(parameter, value):
                return natural[name][key]
            if key in given and torch.equal(given[key], value):
                return constrained_value(base, key, natural[name][key])
    return None
