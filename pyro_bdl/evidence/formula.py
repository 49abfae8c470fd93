"""The log evidence of a Laplace approximation as a function of its hyperparameters.

    log p(y) = log p(y | u) + log p(u) + p/2 log 2 pi - 1/2 log det(curvature + prior precision)

at u = u*, or at the optimum of the linearized model. ``Formula`` reads prior and noise off a run of
the program; ``NormalFormula`` needs no run, where hyperparameters scale Normal priors and a noise.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.hyperparameters import (
    Hyperparameter,
    ParameterReading,
    Scaled,
    followed,
    group_sum,
    is_proportional,
    noise_of,
    prior_normals,
    read,
    scaled_priors,
    slopes,
)
from pyro_bdl.curvature.prior import PriorPrecision, flat_entries, hyperpriors, prior_precision
from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.evidence.linearized import LinearizedModel, LinearizedPoint
from pyro_bdl.guides.gaussian import LaplaceGuide
from pyro_bdl.utils.autograd import reaches, with_gradients

_SMALLEST = 1e-8  # of gamma and of squared weights
_LOG_2PI = math.log(2 * math.pi)


def log_marginal_likelihood(guide: LaplaceGuide, *, linearized: bool = False) -> Tensor:
    """The Laplace approximation of log p(y | hyperparameters) in nats, a scalar.

    It is log p(y, u*) + p/2 log 2 pi - 1/2 log det(precision) (MacKay 1992, equation 2.3; Immer et
    al. 2021a, equation 6), differentiable in every ``PyroParam`` of the priors and of a Normal's
    noise, through the fit and the determinant; other parameters of the likelihood count as
    constants. Densities of hyperparameters under their hyperpriors are included. If only a subset
    of the latents has a covariance, it is the evidence given the other latents. What ``obs_mask``
    leaves unobserved is integrated out, if no other statement uses it.

    Example::

        >>> x, y = torch.linspace(-1, 1, 20)[:, None], torch.linspace(-2, 2, 20)
        >>> model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=0.1)
        >>> guide = bdl.guides.AutoLaplaceGGN(model, structure="full")
        >>> training = bdl.training.train(model, guide, x, y, steps=100, learning_rate=0.1)
        >>> posterior = guide.laplace_approximation((x, y))
        >>> round(bdl.evidence.log_marginal_likelihood(posterior, linearized=True).item(), 2)
        18.57

    :param guide: a guide of ``laplace_approximation``.
    :param linearized: evaluate at the optimum of the linearized model instead of at u* (Antoran et
        al. 2022, section 3).
    """
    reading = read_guide(guide)
    point = None
    if linearized:
        guide.refresh(reading)
        point = LinearizedModel(guide).optimum()
        point.warn(stacklevel=2)
    with torch.enable_grad():
        return Formula(guide, reading).value(point)


def read_guide(guide: LaplaceGuide) -> ParameterReading:
    """A run of the guide's program on a few of its data, at the current hyperparameters.

    :raises TypeError: for other guides.
    :raises ValueError: for a guide whose width was fitted to held-out rows.
    :raises UnsupportedProgramError: for a latent of which a mask leaves numbers without a density.
    """
    if not isinstance(guide, LaplaceGuide):
        raise TypeError(
            "the evidence is that of the Gaussian guide which AutoLaplaceGGN's "
            f"laplace_approximation(data) returns, got {type(guide).__name__}"
        )
    if guide.held_out is not None:
        raise ValueError(
            "the width of this posterior was fitted to held-out rows, not to the evidence: call "
            "laplace_approximation(data) without held_out for the evidence"
        )
    reading = guide.read()
    reading.run.refuse_improper("evidence")
    return reading


def formula_of(guide: LaplaceGuide, reading: ParameterReading) -> "Formula":
    """The formula of a guide's evidence; one that runs no program, if its program has one.

    :param reading: of the guide's program.
    """
    return NormalFormula.of(guide, reading) or Formula(guide, reading)


class Formula:
    """The log evidence of a guide at the present values of its hyperparameters.

    :param reading: of the guide's program, at these values.
    """

    def __init__(self, guide: LaplaceGuide, reading: ParameterReading) -> None:
        self.guide, self.tuned = guide, followed(reading)
        self._first: ParameterReading | None = reading

    def _reading(self) -> ParameterReading:
        reading, self._first = self._first or read_guide(self.guide), None
        return reading

    def value(self, point: LinearizedPoint | None = None) -> Tensor:
        """The log evidence in nats, a scalar, differentiable in the program's parameters.

        :param point: of the linearized model, to evaluate there.
        """
        guide, reading = self.guide, self._reading()
        prior = prior_precision(reading.run, reading.leaves, guide.subset, create_graph=True)
        factor, apart = guide.noise_factor_at(reading), hyperpriors(reading.run, reading.leaves)
        likelihood = _log_likelihood(guide, factor, point)
        log_prior = _log_prior(guide, reading, point)
        for site in apart.values():
            log_prior = log_prior + site.log_prob().sum().double()
        scaled = 1.0 if factor is None else guide.config.noise_factor(factor)
        log_determinant = guide.curvature.with_prior(prior, scaled).logdet()
        return self._total(likelihood, log_prior, log_determinant)

    def _total(self, likelihood: Tensor, log_prior: Tensor, log_determinant: Tensor) -> Tensor:
        return likelihood + log_prior + 0.5 * (self.guide.subset.size * _LOG_2PI - log_determinant)

    def follow(self) -> None:
        """Adapt the guide to the present values."""
        self.guide.refresh(self._reading())

    def _scales(self) -> tuple[list[Scaled], Hyperparameter | None]:
        """The hyperparameters that scale Normal priors, and the one that scales the noise."""
        reading, subset = self._reading(), self.guide.subset
        noise = noise_of(reading)
        return scaled_priors(reading, subset), None if noise is None else noise.owner

    @torch.enable_grad()
    def fixed_point(self, point: LinearizedPoint | None = None) -> dict[str, Tensor]:
        """The next values of the hyperparameters that the fixed point of ``maximize`` covers.

        The guide must follow the present values.

        :raises NoFixedPointError: for the noise, if gamma is not below the number of observations.
        """
        guide, parts = self.guide, self.guide.subset.parts
        at: Any = guide if point is None else point
        vector = guide.subset.take(guide.loc)
        if point is not None:
            vector = vector + point.offset.to(vector)
        variances = guide.precision.variances().to(vector)

        def sums(site: str, loc: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
            offset, spread = vector[parts[site]] - loc, variances[parts[site]]
            return offset.square() * precision, 1.0 - spread * precision

        scaled, noise = self._scales()
        found = rescaled(scaled, sums)
        if noise is not None:
            gamma = guide.effective_parameters()
            if gamma >= guide.cells:
                raise NoFixedPointError(
                    f"the effective number of parameters ({float(gamma):.1f}) is not below the "
                    f"number of observations ({float(guide.cells):.0f}): the noise has no fixed "
                    "point there"
                )
            ratio = at.squares * guide.noise_factor / (guide.cells - gamma)
            value = noise.value * ratio.clamp(min=_SMALLEST).sqrt().to(noise.value)
            found[noise.name] = value.detach()
        return found


def rescaled(
    scaled: list[Scaled], of_site: Callable[[str, Tensor, Tensor], tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """theta sqrt(sum_i a_i / sum_i b_i) over the entries i that each number theta scales, by name.

    :param of_site: a and b of a site, given its name, means and precisions.
    """
    found = {}
    for parameter, sites in scaled:
        above, below = torch.zeros_like(parameter.value), torch.zeros_like(parameter.value)
        for site, scale, loc in sites:
            a, b = of_site(site, loc, scale.detach().square().reciprocal())
            above += group_sum(scale, a, parameter)
            below += group_sum(scale, b, parameter)
        ratio = above.clamp(min=_SMALLEST) / below.clamp(min=_SMALLEST)
        found[parameter.name] = (parameter.value * ratio.sqrt()).detach()
    return found


class NoFixedPointError(ValueError):
    """The fixed point of ``maximize`` does not exist at the present hyperparameters."""


def _log_likelihood(
    guide: LaplaceGuide, factor: Tensor | None, point: LinearizedPoint | None
) -> Tensor:
    """log p(y | u), for a Normal -1/2 c sum r^2 + 1/2 n log c + constant with r in units of the
    noise of the fit."""
    at: Any = guide if point is None else point
    if factor is None:
        return at.log_likelihood
    return at.log_likelihood - 0.5 * (factor - 1.0) * at.squares + 0.5 * guide.cells * factor.log()


def _log_prior(
    guide: LaplaceGuide, reading: ParameterReading, point: LinearizedPoint | None
) -> Tensor:
    """log p(T(u)) + log |det dT/du| of the subset's latents, with the prior's factors of them."""
    subset, layout = guide.subset, guide.require_layout()
    if point is not None:
        vector = subset.put(guide.loc, subset.take(guide.loc) + point.offset.to(guide.loc))
        reading = read(guide.program_model, subset, vector, *guide.few_rows)
    total = guide.loc.new_zeros((), dtype=torch.float64)
    for name, chosen in subset.chosen.items():
        site, latent = reading.run.latents[name], layout.latents[name]
        if chosen is None:
            total = total + site.log_prob().sum().double()
        else:
            base: Any = base_distribution(site.distribution)
            density = base.log_prob(site.value).reshape(-1)
            if density.numel() != latent.size:
                raise ValueError(
                    f"the prior of site '{name}' couples its entries: choose all or none of them"
                )
            flat = flat_entries(site, latent.unconstrained_shape, density.device)
            density = density.masked_fill(flat, 0.0)
            total = total + (site.scale * density[chosen.to(density.device)]).sum().double()
        if latent.transform is not None:
            leaf = reading.leaves[name]
            volume = latent.transform.log_abs_det_jacobian(leaf, site.value).reshape(-1)
            volume = volume if chosen is None else volume[chosen.to(volume.device)]
            total = total + volume.sum().double()
    leaves = [reading.leaves[name] for name in subset.chosen]
    for site in reading.run.prior_factors.values():
        value = site.log_prob().sum()
        if reaches(value, leaves):
            total = total + value.double()
    return total


@dataclass
class _Group:
    """Independent Normals N(loc, (ratio theta)^2) over the entries of sites in the subset.

    :param ratio: one number.
    :param owner: theta, where a hyperparameter scales them.
    :param power: by which their log density counts.
    :param locs: the means, by site.
    """

    ratio: Tensor
    owner: str | None
    power: float
    locs: dict[str, Tensor] = field(default_factory=dict)

    def scale(self, values: Mapping[str, Tensor]) -> Tensor:
        return self.ratio if self.owner is None else self.ratio * values[self.owner]


class NormalFormula(Formula):
    """The formula of independent Normals over all of the subset, with one scale for each site,
    fixed or proportional to a hyperparameter, and of a likelihood that changes by its noise alone.

    Then log p(u) = -1/2 sum_i ((u_i - m_i) / (c_i theta))^2 - sum_i log(c_i theta) + constant.

    :param groups: of sites with the same scale.
    :param noise: the hyperparameter that scales the noise, and the noise of the fit in units of it.
    """

    def __init__(
        self,
        guide: LaplaceGuide,
        reading: ParameterReading,
        groups: list[_Group],
        noise: tuple[Hyperparameter, Tensor] | None,
    ) -> None:
        super().__init__(guide, reading)
        self.groups, self.noise = groups, noise
        self._at: Any = None
        self._squares: list[Tensor] = []
        self._curvature: Any = None  # of which the eigenvalues are known
        self._spectra: list[Tensor] | None = None

    @classmethod
    def of(cls, guide: LaplaceGuide, reading: ParameterReading) -> "NormalFormula | None":
        """The formula of the program that a reading is of; None where it has none."""
        tuned, subset = followed(reading), guide.subset
        normals = prior_normals(reading, subset)
        if (
            reading.run.factors
            or reading.run.prior_factors
            or set(normals) != set(subset.parts)
            or len(tuned) + len(reading.in_likelihood) != len(reading.parameters)
        ):
            return None
        groups: dict[Any, _Group] = {}
        for name, (loc, scale) in normals.items():
            site, moved = reading.run.latents[name], slopes(scale, tuned.values())
            owner = tuned[next(iter(moved))] if len(moved) == 1 else None
            ratio = scale.detach()[0]
            if (
                loc.requires_grad
                or isinstance(site.scale, Tensor)
                or bool((scale.detach() != ratio).any())
            ):
                return None
            if owner is not None:
                one = owner.value.numel() == 1
                if not one or not is_proportional(scale, owner, moved[owner.name]):
                    return None
                ratio = ratio / owner.value.detach().reshape(())
            elif scale.requires_grad:
                return None
            group = _Group(ratio, None if owner is None else owner.name, float(site.scale))
            group = groups.setdefault((group.owner, float(ratio), group.power), group)
            group.locs[name] = loc
        found, noise = noise_of(reading), None
        if found is None and reading.in_likelihood:
            return None
        if found is not None and found.value is not None and guide.reference_noise is not None:
            owner = found.owner
            if owner is None or any(group.owner == owner.name for group in groups.values()):
                return None
            noise = owner, guide.reference_noise
        return cls(guide, reading, list(groups.values()), noise)

    def _now(self) -> dict[str, Tensor]:
        return {name: p.now() for name, p in self.tuned.items()}

    def _factor(self, values: Mapping[str, Tensor]) -> Tensor | None:
        if self.noise is None:
            return None
        parameter, noise_of_fit = self.noise
        return (noise_of_fit / values[parameter.name]).square().to(self.guide.squares)

    def value(self, point: LinearizedPoint | None = None) -> Tensor:
        guide, values = self.guide, self._now()
        factor, log_prior = self._factor(values), guide.loc.new_zeros((), dtype=torch.float64)
        precisions = []
        for group, squares in zip(self.groups, self._squares_at(point), strict=True):
            count, scale = sum(map(len, group.locs.values())), group.scale(values).reshape(())
            precision = scale.square().reciprocal()
            terms = 0.5 * squares * precision + count * (scale.log() + 0.5 * _LOG_2PI)
            log_prior = log_prior - group.power * terms.double()
            precisions.append(group.power * precision)
        one = torch.as_tensor(1.0, device=guide.loc.device)
        scaled = one if factor is None else guide.config.noise_factor(factor)
        log_determinant = self._log_determinant(precisions, scaled)
        return self._total(_log_likelihood(guide, factor, point), log_prior, log_determinant)

    def _log_determinant(self, precisions: list[Tensor], factor: Tensor) -> Tensor:
        """log det of the posterior precision, for the prior precision of each group of sites."""
        guide, parts = self.guide, self.guide.subset.parts
        if self._curvature is not guide.curvature:
            self._curvature = guide.curvature
            slices = [{site: parts[site] for site in group.locs} for group in self.groups]
            self._spectra = guide.curvature.spectra(slices)
        if self._spectra is None:
            return guide.curvature.with_prior(self._prior(precisions), factor).logdet()
        pairs = zip(self._spectra, precisions, strict=True)
        return torch.stack([log_determinant(values, p, factor) for values, p in pairs]).sum()

    def _prior(self, precisions: list[Tensor]) -> PriorPrecision:
        pairs = zip(self.groups, precisions, strict=True)
        uniform = {site: precision for group, precision in pairs for site in group.locs}
        parts = self.guide.subset.parts
        pieces = [uniform[site].expand(part.stop - part.start) for site, part in parts.items()]
        diagonal = torch.cat(pieces).to(self.guide.prior_diagonal)
        return PriorPrecision(diagonal, uniform=uniform, quadratic=True)

    def _squares_at(self, point: LinearizedPoint | None) -> list[Tensor]:
        """The sum of (u_i - m_i)^2 over each group; that at the last point is kept."""
        guide = self.guide
        at = guide.loc, None if point is None else point.offset
        if self._at is None or self._at[0] is not at[0] or self._at[1] is not at[1]:
            vector = guide.subset.take(guide.loc)
            vector = vector if point is None else vector + point.offset
            parts, self._at = guide.subset.parts, at
            self._squares = []
            for group in self.groups:
                offsets = [vector[parts[site]] - loc for site, loc in group.locs.items()]
                sums = [offset.square().double().sum() for offset in offsets]
                self._squares.append(torch.stack(sums).sum())
        return self._squares

    @torch.no_grad()
    def follow(self) -> None:
        guide, subset, values = self.guide, self.guide.subset, self._now()
        scales = [group.scale(values).reshape(()) for group in self.groups]
        pairs = zip(self.groups, scales, strict=True)
        prior = self._prior([g.power * scale.square().reciprocal() for g, scale in pairs])
        locs = {site: loc for group in self.groups for site, loc in group.locs.items()}
        offset = torch.cat([locs[site] for site in subset.parts]) - subset.take(guide.loc)
        guide.adapt(prior, prior.diagonal.to(offset) * offset, self._factor(values))

    def _scales(self) -> tuple[list[Scaled], Hyperparameter | None]:
        values = self._now()
        found: dict[str, list[Any]] = {}
        for group in self.groups:
            if group.owner is not None:
                scale = group.scale(values)
                sites = [(site, scale.expand(len(loc)), loc) for site, loc in group.locs.items()]
                found.setdefault(group.owner, []).extend(sites)
        now = {name: replace(p, value=values[name]) for name, p in self.tuned.items()}
        noise = None if self.noise is None else now[self.noise[0].name]
        return [Scaled(now[name], sites) for name, sites in found.items()], noise


def sum_of_logs(values: Tensor) -> Tensor:
    """sum_i log x_i of positive numbers, in float64, by logarithms of products of eight."""
    whole = len(values) - len(values) % 8
    products = values[:whole].view(8, -1).prod(0, dtype=torch.float64)
    limits, rest = torch.finfo(torch.float64), values[whole:].double().log().sum()
    if bool(((products >= limits.tiny) & (products <= limits.max)).all()):
        return products.log().sum() + rest
    return values.double().log().sum()  # the products leave the range of the numbers


def log_determinant(eigenvalues: Tensor, precision: Tensor, factor: Tensor) -> Tensor:
    """log det(factor * curvature + precision), a scalar that can be differentiated once.

        d / d precision = sum_i 1 / (factor l_i + precision)
        d / d factor = sum_i l_i / (factor l_i + precision)

    :param eigenvalues: l, of the curvature, (r,).
    :param precision: of the prior, positive, a scalar.
    :param factor: of the curvature, positive, a scalar.
    """
    with torch.no_grad():
        sums = eigenvalues * factor.to(eigenvalues) + precision.to(eigenvalues)
        value = sum_of_logs(sums)
        inverse = sums.reciprocal_()
        derivatives: list[Tensor | None] = [inverse.sum().to(precision), None]
        if factor.requires_grad:
            derivatives[1] = (eigenvalues @ inverse).to(factor)
    return with_gradients(value, derivatives, (precision, factor))
