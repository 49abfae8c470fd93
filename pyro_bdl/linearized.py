"""The linearised posterior predictive: f(x; u) = f(x; u*) + J(x) (u - u*), u Gaussian.

With u ~ N(u*, C) the unconstrained parameters of the observation distribution are Gaussian,
N(f(x; u*), J C J'), in closed form. A generalised Gauss-Newton posterior belongs to this linear
model; the network itself at its draws predicts badly (Foong et al. 2019; Immer et al. 2021, "GLM
predictive").
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from pyro_bdl.curvature.fisher import num_data
from pyro_bdl.curvature.fit import linearizations
from pyro_bdl.curvature.jacobian import Jacobian
from pyro_bdl.curvature.linearize import Alignment, Linearization
from pyro_bdl.guides.laplace import LaplaceGuide
from pyro_bdl.natural import constrained_parameters, natural_parameters, natural_value
from pyro_bdl.observation import (
    Structure,
    observation_mean,
    parameters_of,
    rebuild,
    take_apart,
    without_wrappers,
)
from pyro_bdl.program import Run, Site

METHODS = ("probit", "laplace-bridge", "monte-carlo")

_DRAWS_AT_ONCE = 2**29  # bytes of latent draws
_NODES = 24


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


class LinearizedPredictive:
    """Predictions of the linearised program under a Gaussian guide.

    ``LinearizedPredictive(model, guide)(x)`` gives draws ``{"y": (S, N, ...), "f": (S, N, ...)}``
    like ``Predictive``, each one function of all inputs, and their ``moments`` in closed form.

    :param model: the Pyro program; call the result with its arguments, without the targets.
    :param posterior: a guide of ``laplace_approximation``.
    :param num_samples: S, how many draws.
    """

    def __init__(
        self, model: Callable, posterior: LaplaceGuide, num_samples: int | None = None
    ) -> None:
        if not isinstance(posterior, LaplaceGuide):
            raise TypeError(
                "LinearizedPredictive needs the Gaussian guide that laplace_approximation(data) "
                f"returns, got {type(posterior).__name__}"
            )
        if num_samples is not None and num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}")
        self.model, self.posterior = model, posterior
        self.num_samples = 100 if num_samples is None else num_samples

    def __call__(self, *args: Any, **kwargs: Any) -> Draws:
        """Draws of the observed and the deterministic sites, and the moments."""
        result = Draws()
        drawn, deterministic = self._draw(args, kwargs)
        for name, (structure, parameters) in drawn.items():
            result[name] = rebuild(structure, parameters).sample()
        result.update(deterministic)
        result.moments = self.moments(*args, **kwargs)
        return result

    # Closed forms

    def moments(self, *args: Any, **kwargs: Any) -> dict[str, Moments]:
        """Mean and variance of every observed site's unconstrained parameters."""
        result = {}
        for name, gaussian in self._gaussians(args, kwargs, full=False).items():
            means, variances = gaussian.means(), gaussian.variances()
            result[name] = Moments(means, variances, _noise_variance(gaussian, means, variances))
        return result

    def covariance(self, *args: Any, **kwargs: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """For each observed site the mean (N, K) and the covariances (N, K, K) of the K
        unconstrained parameters of each datum."""
        gaussians = self._gaussians(args, kwargs, full=True)
        return {name: (g.mean, g.covariance) for name, g in gaussians.items()}

    def joint_covariance(self, *args: Any, **kwargs: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """For each observed site the mean (N K,) and the covariance (N K, N K) over all inputs,
        data before parameters. Takes the whole batch at once."""
        guide = self.posterior
        with torch.enable_grad():
            at = Linearization(self.model, guide.subset, guide.loc, args, kwargs)
        result = {}
        for name, site in at.run.observed.items():
            outputs = _Outputs(name, site, at.run)
            if not outputs.moving:
                continue
            jacobian = _jacobian(at, outputs)
            mean = outputs.flat(at.run)
            result[name] = (mean.reshape(-1), guide.precision.joint_covariance(jacobian))
        return result

    def probabilities(
        self, *args: Any, method: str = "probit", **kwargs: Any
    ) -> dict[str, Tensor]:
        """P(y = class) for each Categorical site, (N, C), and P(y = 1) for Bernoulli ones, (N,).

        :param method: "probit" (MacKay 1992; per class for several), "laplace-bridge" (Hobbhahn
            et al. 2022; for several classes) or "monte-carlo" over ``num_samples`` draws.
        :raises ValueError: for another method, or where no site is discrete.
        """
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r} (there are {', '.join(METHODS)})")
        if method == "monte-carlo":
            result = {k: v.mean(0) for k, v in self.mean(*args, **kwargs).items()}
            kinds = {k: s.kind for k, (s, _) in self._structures(args, kwargs).items()}
            result = {k: v for k, v in result.items() if kinds[k] in _DISCRETE}
        else:
            result = {}
            full = method == "laplace-bridge"
            for name, gaussian in self._gaussians(args, kwargs, full=full).items():
                if gaussian.outputs.structure.kind in _DISCRETE:
                    result[name] = _probabilities(gaussian, method)
        if not result:
            raise ValueError("no observed site is Categorical or Bernoulli")
        return result

    def log_density(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """log p(y_n | x_n, data) for each observed site, (N, ...), without draws where there is a
        closed form: Normal (by quadrature over an uncertain noise scale), Categorical and
        Bernoulli (probit); otherwise from ``num_samples`` draws. The arguments include targets.
        """
        result: dict[str, Tensor] = {}
        gaussians = self._gaussians(args, kwargs, full=True)
        for name, gaussian in gaussians.items():
            value = gaussian.value
            if value is None:
                raise ValueError(f"site '{name}' has no observation: pass the targets as well")
            kind = gaussian.outputs.structure.kind
            closed = _normal_log_density(gaussian, value) if kind == "Normal" else None
            if closed is not None:
                result[name] = closed
            elif kind in _DISCRETE:
                cells = _discrete_log_density(_probabilities(gaussian, "probit"), value)
                dims = gaussian.outputs.structure.event_dims
                result[name] = cells.flatten(-dims).sum(-1) if dims else cells
        missing = [name for name in gaussians if name not in result]
        if missing:
            draws = self.log_likelihood(*args, **kwargs)
            for name in missing:
                result[name] = draws[name].logsumexp(0) - math.log(len(draws[name]))
        return result

    # Draws, as Predictive has them

    def mean(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """E[y | draw, x] for each observed site, (S, N, ...); for classes the probabilities."""
        drawn, _ = self._draw(args, kwargs)
        return {name: observation_mean(rebuild(s, p)) for name, (s, p) in drawn.items()}

    def log_likelihood(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """log p(y_n | draw, x_n) for each observed site, (S, N); the arguments include targets."""
        values = {name: site.value for name, site in self._sites(args, kwargs).items()}
        if all(value is None for value in values.values()):
            raise ValueError("no site is observed: pass the targets as well")
        drawn, _ = self._draw(args, kwargs)
        return {
            name: rebuild(s, p).log_prob(values[name])
            for name, (s, p) in drawn.items()
            if values[name] is not None
        }

    # How

    def _parts(self, args: tuple, kwargs: dict, known: dict) -> Iterator[Linearization]:
        guide = self.posterior
        with torch.enable_grad():
            yield from linearizations(
                self.model, guide.subset, guide.loc, [(args, kwargs)], None,
                known=known, every_output=True,
            )  # fmt: skip

    def _sites(self, args: tuple, kwargs: dict) -> dict[str, Site]:
        at = Linearization(self.model, self.posterior.subset, self.posterior.loc, args, kwargs)
        return at.run.observed

    def _structures(self, args: tuple, kwargs: dict) -> dict[str, tuple[Structure, Any]]:
        sites = self._sites(args, kwargs)
        return {name: _taken(site.distribution) for name, site in sites.items()}

    @torch.no_grad()
    def _gaussians(self, args: tuple, kwargs: dict, *, full: bool) -> "dict[str, _Gaussian]":
        known: dict[Any, Alignment] = {}
        found: dict[str, list[_Gaussian]] = {}
        for at in self._parts(args, kwargs, known):
            for name, site in at.run.observed.items():
                outputs = _Outputs(name, site, at.run)
                mean = outputs.flat(at.run).detach()
                if outputs.moving:
                    with torch.enable_grad():
                        jacobian = _jacobian(at, outputs)
                    covariance = self.posterior.precision.covariance(jacobian)
                else:
                    covariance = mean.new_zeros(*mean.shape, mean.shape[-1])
                if not full:
                    covariance = covariance.diagonal(dim1=-2, dim2=-1).clone()
                found.setdefault(name, []).append(
                    _Gaussian(outputs, mean, covariance, site.value, full)
                )
        return {name: _joined(parts) for name, parts in found.items()}

    @torch.no_grad()
    def _draw(
        self, args: tuple, kwargs: dict
    ) -> tuple[dict[str, tuple[Structure, dict[str, Tensor]]], dict[str, Tensor]]:
        """Drawn parameters of every observed site, and drawn deterministic sites."""
        guide = self.posterior
        precision, size = guide.precision, guide.subset.size
        at_once = max(1, _DRAWS_AT_ONCE // max(1, 4 * size))
        known: dict[Any, Alignment] = {}
        chunks: list[list[dict[str, Any]]] = []
        structures: dict[str, Structure] = {}
        for start in range(0, self.num_samples, at_once):
            count = min(at_once, self.num_samples - start)
            offsets = precision.sample(count)
            parts = []
            for at in self._parts(args, kwargs, known):
                values: dict[str, Any] = {}
                for name, site in at.run.observed.items():
                    outputs = _Outputs(name, site, at.run)
                    structures[name] = outputs.structure
                    values[name] = outputs.parameters(self._moved(at, outputs, offsets))
                for name, moved in self._deterministic(at, offsets, values).items():
                    values["deterministic " + name] = {"value": moved}
                parts.append(values)
            chunks.append(parts)
        joined = _concatenated(chunks)
        drawn = {name: (structures[name], joined.pop(name)) for name in structures}
        rest = {name.removeprefix("deterministic "): v["value"] for name, v in joined.items()}
        return drawn, rest

    def _moved(self, at: Linearization, outputs: "_Outputs", offsets: Tensor) -> Tensor:
        """Unconstrained parameters at draws, (S, n, K)."""
        mean = outputs.flat(at.run).detach()
        if not outputs.moving:
            return mean.expand(len(offsets), *mean.shape)
        with torch.enable_grad():
            jacobian = _jacobian(at, outputs)
        return mean + jacobian.apply(offsets.to(jacobian.like)).to(mean)

    def _deterministic(
        self, at: Linearization, offsets: Tensor, values: dict[str, Any]
    ) -> dict[str, Tensor]:
        """Draws of the deterministic sites, linearised; parameters of observed sites are reused."""
        result = {}
        for name, value in at.run.deterministic.items():
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            reused = _reused(value, at.run, values)
            if reused is None:
                outputs = _Outputs.of_deterministic(name, value)
                reused = self._moved(at, outputs, offsets).reshape(len(offsets), *value.shape)
            result[name] = reused
        return result


_DISCRETE = ("Categorical", "OneHotCategorical", "Bernoulli")


class _Outputs:
    """The unconstrained parameters of an observed site, flattened to (n, K)."""

    def __init__(self, name: str, site: Site, run: Run) -> None:
        self.label: Any = ("outputs", name)
        self.name = name
        self.structure, self.given = _taken(site.distribution)
        self.num_data = num_data(site)
        natural = natural_parameters(site.distribution, run)
        self.moving = {key: value for key, value in natural.items() if value.requires_grad}
        self.fixed = {key: value for key, value in natural.items() if key not in self.moving}
        self.shapes = {key: value.shape[1:] if value.dim() else value.shape for key, value in
                       self.moving.items()}  # fmt: skip

    @classmethod
    def of_deterministic(cls, name: str, value: Tensor) -> "_Outputs":
        result = cls.__new__(cls)
        result.label, result.name = ("deterministic", name), name
        result.num_data = value.shape[0] if value.dim() else 1
        result.moving = {"value": value} if value.requires_grad else {}
        result.fixed = {} if value.requires_grad else {"value": value}
        result.shapes = {"value": value.shape[1:]} if value.requires_grad else {}
        return result

    def read(self, run: Run) -> list[Tensor]:
        if self.label[0] == "deterministic":
            return [run.deterministic[self.name]]
        natural = natural_parameters(run.observed[self.name].distribution, run)
        return [natural[key] for key in self.moving]

    def flat(self, run: Run) -> Tensor:
        """(n, K), K the unconstrained parameters of a datum that depend on the latents."""
        if not self.moving:
            like = next(iter(self.fixed.values()))
            if self.label[0] == "deterministic":
                return like.reshape(self.num_data, -1)
            return like.new_zeros(self.num_data, 0)
        parts = [value.reshape(self.num_data, -1) for value in self.moving.values()]
        return torch.cat(parts, -1)

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """(..., n, K) by parameter, (..., n, *shape)."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        return {
            key: part.reshape(*part.shape[:-1], *shape)
            for (key, shape), part in zip(self.shapes.items(), flat.split(sizes, -1), strict=True)
        }

    def parameters(self, moved: Tensor) -> dict[str, Tensor]:
        """Constructor arguments at unconstrained values (S, n, K)."""
        values = self.split(moved) if self.moving else {}
        draws = moved.shape[0]
        for key, value in self.fixed.items():
            values[key] = value.expand(draws, *value.shape)
        return constrained_parameters(self.structure.kind, values)


@dataclass
class _Gaussian:
    """N(mean, covariance) over (n, K); ``covariance`` holds variances (n, K) unless ``full``."""

    outputs: _Outputs
    mean: Tensor
    covariance: Tensor
    value: Any
    full: bool

    def means(self) -> dict[str, Tensor]:
        return self.outputs.split(self.mean) if self.outputs.moving else {}

    def variances(self) -> dict[str, Tensor]:
        flat = self.covariance.diagonal(dim1=-2, dim2=-1) if self.full else self.covariance
        return self.outputs.split(flat) if self.outputs.moving else {}


def _joined(parts: list[_Gaussian]) -> _Gaussian:
    first = parts[0]
    if len(parts) == 1:
        return first
    value = None if first.value is None else torch.cat([part.value for part in parts])
    mean = torch.cat([part.mean for part in parts])
    covariance = torch.cat([part.covariance for part in parts])
    outputs = first.outputs
    outputs.fixed = {
        key: torch.cat([part.outputs.fixed[key] for part in parts]) if fixed.dim() else fixed
        for key, fixed in outputs.fixed.items()
    }
    return _Gaussian(outputs, mean, covariance, value, first.full)


def _taken(distribution: Distribution) -> tuple[Structure, dict[str, Tensor]]:
    taken = take_apart(distribution)
    if taken is None:
        kind = type(without_wrappers(distribution)[0]).__name__
        raise NotImplementedError(
            f"the linearised predictive does not know {kind} observations: use Predictive"
        )
    structure, tensors = taken
    return structure, tensors


def _jacobian(at: Linearization, outputs: _Outputs) -> Jacobian:
    """The K unconstrained parameters as K columns."""
    pullback = at.pullback(outputs.read, outputs.num_data, label=outputs.label)
    columns: list[list[Tensor]] = []
    for number, output in enumerate(pullback.outputs):
        size = output.numel() // outputs.num_data
        for entry in range(size):
            column = [torch.zeros_like(other) for other in pullback.outputs]
            column[number].view(outputs.num_data, size)[:, entry] = 1.0
            columns.append(column)
    return pullback.jacobian(columns)


def _reused(value: Tensor, run: Run, values: dict[str, Any]) -> Tensor | None:
    """Draws of a deterministic site that is a parameter of an observed site."""
    for name, site in run.observed.items():
        drawn = values.get(name)
        natural = natural_parameters(site.distribution, run)
        given = parameters_of(without_wrappers(site.distribution)[0])
        kind = type(without_wrappers(site.distribution)[0]).__name__
        for key, parameter in natural.items():
            if drawn is None or key not in drawn:
                continue
            if parameter.shape == value.shape and torch.equal(parameter, value):
                return natural_value(kind, key, drawn[key])
            plain = given.get(key)
            if plain is not None and plain.shape == value.shape and torch.equal(plain, value):
                return drawn[key]
    return None


def _concatenated(chunks: list[list[dict[str, Any]]]) -> dict[str, dict[str, Tensor]]:
    """Draws by chunk of draws and part of the data, put together."""
    rows = []
    for parts in chunks:
        first = parts[0]
        rows.append(
            {
                name: {
                    key: _cat([part[name][key] for part in parts], 1) for key in first[name]
                }
                for name in first
            }
        )
    return {
        name: {key: _cat([row[name][key] for row in rows], 0) for key in rows[0][name]}
        for name in rows[0]
    }


def _cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    if len(tensors) == 1 or tensors[0].dim() <= dim:
        return tensors[0]
    return torch.cat(list(tensors), dim)


# ------------------------------------------------------------------------------- formulas


def _noise_variance(
    gaussian: _Gaussian, means: dict[str, Tensor], variances: dict[str, Tensor]
) -> Tensor | None:
    """E[sigma^2] of a Normal: exp(2 m + 2 v) for log sigma ~ N(m, v)."""
    if gaussian.outputs.structure.kind != "Normal":
        return None
    if "scale" in means:
        return (2.0 * means["scale"] + 2.0 * variances["scale"]).exp()
    scale = (2.0 * gaussian.outputs.fixed["scale"]).exp().detach()
    like = means.get("loc", gaussian.outputs.fixed.get("loc"))
    return scale.expand_as(like) if like is not None else scale


def _probabilities(gaussian: _Gaussian, method: str) -> Tensor:
    outputs = gaussian.outputs
    mean = gaussian.means()["logits"] if outputs.moving else outputs.fixed["logits"]
    if not outputs.moving:
        binary = outputs.structure.kind == "Bernoulli"
        return mean.sigmoid() if binary else mean.softmax(-1)
    variance = gaussian.variances()["logits"]
    if outputs.structure.kind == "Bernoulli":
        if method == "laplace-bridge":
            raise ValueError('"laplace-bridge" is for several classes: use "probit" for two')
        return probit(mean, variance)
    if method == "probit":
        return multiclass_probit(mean, variance)
    classes = mean.shape[-1]
    if mean.dim() != 2:
        raise ValueError('"laplace-bridge" needs one Categorical per datum: use "probit"')
    return laplace_bridge(mean, gaussian.covariance.reshape(-1, classes, classes))


def probit(mean: Tensor, variance: Tensor) -> Tensor:
    """E[sigmoid(f)] for f ~ N(mean, variance), about sigmoid(m / sqrt(1 + pi v / 8)) (MacKay
    1992, equation 10)."""
    return torch.sigmoid(mean / torch.sqrt(1.0 + math.pi / 8.0 * variance))


def multiclass_probit(mean: Tensor, variance: Tensor) -> Tensor:
    """E[softmax(f)] about softmax(m_k / sqrt(1 + pi v_k / 8)), (..., C) (Gibbs 1997)."""
    return torch.softmax(mean / torch.sqrt(1.0 + math.pi / 8.0 * variance), -1)


def laplace_bridge(mean: Tensor, covariance: Tensor) -> Tensor:
    """E[softmax(f)] from the Dirichlet that the Laplace bridge gives for f ~ N(mean, covariance)
    restricted to sum f = 0 (Hobbhahn, Kristiadi & Hennig 2022, equations 3 and 12).

    :param mean: (N, C).
    :param covariance: (N, C, C).
    """
    classes = mean.shape[-1]
    total = covariance.sum((-2, -1))[:, None]
    rows = covariance.sum(-1)
    mean = mean - rows * mean.sum(-1, keepdim=True) / total
    variance = covariance.diagonal(dim1=-2, dim2=-1) - rows.square() / total
    spread = torch.exp(-mean).sum(-1, keepdim=True)
    alpha = (1.0 - 2.0 / classes + mean.exp() / classes**2 * spread) / variance
    return alpha / alpha.sum(-1, keepdim=True)


def _discrete_log_density(probabilities: Tensor, value: Tensor) -> Tensor:
    tiny = torch.finfo(probabilities.dtype).tiny
    if probabilities.dim() == value.dim():
        if value.is_floating_point() or value.dtype == torch.bool:
            p = torch.where(value > 0.5, probabilities, 1.0 - probabilities)
            return p.clamp(min=tiny).log()
        return probabilities.clamp(min=tiny).log().gather(-1, value[..., None])[..., 0]
    return probabilities.clamp(min=tiny).log().gather(-1, value[..., None].long())[..., 0]


def _normal_log_density(gaussian: _Gaussian, value: Tensor) -> Tensor | None:
    """log p(y) for y ~ N(f, sigma^2), (f, log sigma) Gaussian; None where there is no short form.

    With a known noise it is Gaussian; an uncertain noise of one output is integrated by
    Gauss-Hermite quadrature over log sigma.
    """
    outputs, n = gaussian.outputs, len(gaussian.mean)
    y = value.reshape(n, -1)
    cells = y.shape[-1]
    uncertain = "scale" in outputs.moving
    if "loc" not in outputs.moving or (uncertain and cells > 1):
        return None
    mean = gaussian.mean[:, :cells]
    covariance = gaussian.covariance[:, :cells, :cells]
    if not uncertain:
        noise = (2.0 * outputs.fixed["scale"].detach()).exp().expand(value.shape).reshape(n, cells)
        total = covariance + torch.diag_embed(noise)
        return torch.distributions.MultivariateNormal(mean, total).log_prob(y)
    f, s = covariance[:, 0, 0], gaussian.covariance[:, 1, 1]
    cross = gaussian.covariance[:, 0, 1]
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    terms = []
    for node, weight in zip(nodes, weights / math.sqrt(2 * math.pi), strict=True):
        log_scale = gaussian.mean[:, 1] + node * s.sqrt()
        slope = cross / s.sqrt().clamp(min=1e-30)
        variance = (f - slope.square()).clamp(min=0.0) + (2.0 * log_scale).exp()
        terms.append(_normal(y[:, 0], mean[:, 0] + slope * node, variance) + math.log(weight))
    return torch.stack(terms).logsumexp(0)


def _normal(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return -0.5 * ((y - mean).square() / variance + variance.log() + math.log(2 * math.pi))
