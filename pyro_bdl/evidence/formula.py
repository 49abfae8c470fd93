"""The log evidence of a Laplace approximation as a function of its hyperparameters.

    log p(y) = log p(y | u) + log p(u) + p/2 log 2 pi - 1/2 log det(curvature + prior precision)

at u = u*, or at the optimum of the linearized model. ``Formula`` reads prior and noise off a run of
the program; ``NormalFormula`` needs no run, where hyperparameters scale Normal priors and a noise.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_bdl.curvature.hyperparameters import (
    ParameterReading,
    followed,
    owners_of_priors,
    prior_normals,
    read,
)
from pyro_bdl.curvature.prior import PriorPrecision, flat_entries, hyperpriors, prior_precision
from pyro_bdl.curvature.structures.base import beside
from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.evidence.linearized import LinearizedModel, LinearizedPoint
from pyro_bdl.guides.gaussian import LaplaceGuide
from pyro_bdl.program.subset import Subset
from pyro_bdl.utils.autograd import reaches, with_gradients
from pyro_bdl.utils.precision import double, double_device

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
        point.warn()
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


class Parts(NamedTuple):
    """The log evidence at one value of the hyperparameters, and its parts for the fixed point.

    :param values: of the hyperparameters, by name, with their graph.
    :param value: the log evidence, a scalar.
    :param terms: of ``normal_terms``, those of the Normals that hyperparameters scale.
    :param half: half the log determinant of the precision.
    """

    values: dict[str, Tensor]
    value: Tensor
    terms: list[tuple[Tensor, Tensor]]
    half: Tensor

    @property
    def above(self) -> Any:
        """The quadratic terms of the Normals that hyperparameters scale."""
        return sum(quadratic for quadratic, _ in self.terms)

    @property
    def below(self) -> Any:
        """The sum of their log scales, and half the log determinant of the precision."""
        return sum((logs for _, logs in self.terms), self.half)


class Formula:
    """The log evidence of a guide at the present values of its hyperparameters.

    :param reading: of the guide's program, at these values.
    """

    def __init__(self, guide: LaplaceGuide, reading: ParameterReading) -> None:
        self.guide, self.tuned = guide, followed(reading)
        self._first: ParameterReading | None = reading
        noise = reading.noise
        self._noise = None if noise is None or noise.owner is None else noise.owner.name
        self._owners = owners_of_priors(reading, guide.subset)
        self.covered = only_scales(reading, guide.subset)

    def _reading(self) -> ParameterReading:
        reading, self._first = self._first or read_guide(self.guide), None
        return reading

    def parts(self, point: LinearizedPoint | None = None) -> Parts:
        guide, reading = self.guide, self._reading()
        prior = prior_precision(reading.run, reading.leaves, guide.subset, create_graph=True)
        log_prior = _log_prior(guide, reading, point)
        for site in hyperpriors(reading.run, reading.leaves).values():
            log_prior = log_prior + double(site.log_prob().sum())
        vector, parts, terms = _vector(guide, point), guide.subset.parts, []
        for name, (loc, scale) in prior_normals(reading, guide.subset).items():
            if name in self._owners:
                squares = (vector[parts[name]] - loc.detach()).square()
                terms.append(normal_terms(scale, squares, 1, reading.run.latents[name].scale))
        values = {name: reading.parameters[name].value for name in self.tuned}
        factor = guide.noise_factor_at(reading)
        scaled = 1.0 if factor is None else guide.config.noise_factor(factor)
        log_determinant = guide.curvature.with_prior(prior, scaled).logdet()
        return self._sum(values, log_prior, log_determinant, terms, factor, point)

    def _sum(
        self,
        values: dict[str, Tensor],
        log_prior: Tensor,
        log_determinant: Tensor,
        terms: list[tuple[Tensor, Tensor]],
        factor: Tensor | None,
        point: LinearizedPoint | None,
    ) -> Parts:
        """The parts, with log p(y | u), for a Normal -1/2 c sum r^2 + 1/2 n log c + constant with r
        in units of the noise of the fit.

        :param terms: of ``normal_terms``, those of the priors that hyperparameters scale.
        """
        guide, half = self.guide, double(0.5 * log_determinant)
        at: Any = guide if point is None else point
        total = at.log_likelihood + 0.5 * guide.subset.size * _LOG_2PI + log_prior - half
        if factor is not None:
            fallen, logs = double(-0.5 * factor) * at.squares, double(factor.log())
            terms = [*terms, (fallen, -0.5 * guide.cells * logs)]
            total = total + 0.5 * at.squares + terms[-1][0] - terms[-1][1]
        return Parts(values, total, terms, half)

    def value(self, point: LinearizedPoint | None = None) -> Tensor:
        """The log evidence in nats, a scalar, differentiable in the program's parameters.

        :param point: of the linearized model, to evaluate there.
        """
        return self.parts(point).value

    def follow(self) -> None:
        """Adapt the guide to the present values."""
        self.guide.refresh(self._reading())

    @torch.enable_grad()
    def fixed_point(self, parts: Parts) -> dict[str, Tensor]:
        """The next values of the hyperparameters that the fixed point of ``maximize`` covers.

        For Normals with scales theta the derivative of the log evidence in log theta is a - b, with
        a that of the quadratic terms and b that of the logarithms of the scales and of half the log
        determinant; the next value is theta sqrt(a / b).

        :raises NoFixedPointError: for the noise, if gamma is not below the number of observations.
        """
        values = {name: value for name, value in parts.values.items() if name in self.covered}
        above, below = log_slopes(parts.above, values), log_slopes(parts.below, values)
        if self._noise in values and not below[self._noise] > 0:
            cells = float(self.guide.cells)
            raise NoFixedPointError(
                f"the effective number of parameters ({cells - float(below[self._noise]):.1f}) is "
                f"not below the number of observations ({cells:.0f}): the noise has no fixed point "
                "there"
            )
        return rescaled(values, above, below)


@torch.enable_grad()
def only_scales(reading: ParameterReading, subset: Subset) -> set[str]:
    """The hyperparameters that scale Normal priors or the noise, and do nothing else."""
    owners, noise, run = owners_of_priors(reading, subset), reading.noise, reading.run
    normals, names = prior_normals(reading, subset), set(owners.values())
    others = [normals[site][0] if site in owners else run.latents[site].log_prob()
              for site in subset.parts]  # fmt: skip
    others += [factor.log_prob() for factor in run.prior_factors.values()]
    if noise is not None and noise.owner is not None:
        names.add(noise.owner.name)
    elif noise is not None and noise.value is not None:
        others.append(noise.value)
    return {
        name for name in names.difference(reading.in_likelihood)
        if not any(reaches(other, [reading.parameters[name].value]) for other in others)
    }  # fmt: skip


def normal_terms(
    scale: Tensor, squares: Tensor, entries: Any, power: Any = 1.0
) -> tuple[Tensor, Tensor]:
    """-1/2 sum of squares / s^2, and the sum of log s, of Normal densities.

    :param scale: s, (m,) or one number.
    :param squares: sums of squared deviations from the mean, like ``scale``.
    :param entries: the number of terms in each of them.
    :param power: by which the log density counts.
    """
    scale = beside(scale, squares)
    quadratic = -0.5 * double(power * squares / scale.square()).sum()
    return quadratic, double(power * entries * scale.log()).sum()


def log_slopes(total: Any, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """d total / d log theta, by name."""
    if not values or not isinstance(total, Tensor) or not total.requires_grad:
        return {name: torch.zeros_like(value) for name, value in values.items()}
    leaves = list(values.values())
    found = torch.autograd.grad(total, leaves, retain_graph=True, materialize_grads=True)
    return {n: value.detach() * g for (n, value), g in zip(values.items(), found, strict=True)}


def rescaled(
    values: Mapping[str, Tensor], above: Mapping[str, Tensor], below: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """theta sqrt(above / below), by name."""
    return {
        name: value.detach()
        * (above[name].clamp(min=_SMALLEST) / below[name].clamp(min=_SMALLEST)).sqrt()
        for name, value in values.items()
    }


class NoFixedPointError(ValueError):
    """The fixed point of ``maximize`` does not exist at the present hyperparameters."""


def _vector(guide: LaplaceGuide, point: LinearizedPoint | None) -> Tensor:
    """The subset's vector at a point of the linearized model, or at the guide's center."""
    vector = guide.subset.take(guide.loc)
    return vector if point is None else vector + point.offset.to(vector)


def _log_prior(
    guide: LaplaceGuide, reading: ParameterReading, point: LinearizedPoint | None
) -> Tensor:
    """log p(T(u)) + log |det dT/du| of the subset's latents, with the prior's factors of them."""
    subset, layout = guide.subset, guide.require_layout()
    if point is not None:
        vector = subset.put(guide.loc, _vector(guide, point))
        reading = read(guide.program_model, subset, vector, *guide.example_rows)
    total = double(guide.loc.new_zeros(()))
    for name, chosen in subset.chosen.items():
        site, latent = reading.run.latents[name], layout.latents[name]
        if chosen is None:
            total = total + double(site.log_prob().sum())
        else:
            base: Any = base_distribution(site.distribution)
            density = base.log_prob(site.value).reshape(-1)
            if density.numel() != latent.size:
                raise ValueError(
                    f"the prior of site '{name}' couples its entries: choose all or none of them"
                )
            flat = flat_entries(site, latent.unconstrained_shape, density.device)
            density = density.masked_fill(flat, 0.0)
            total = total + double((site.scale * density[chosen.to(density.device)]).sum())
        if latent.transform is not None:
            leaf = reading.leaves[name]
            volume = latent.transform.log_abs_det_jacobian(leaf, site.value).reshape(-1)
            volume = volume if chosen is None else volume[chosen.to(volume.device)]
            total = total + double(volume.sum())
    leaves = [reading.leaves[name] for name in subset.chosen]
    for site in reading.run.prior_factors.values():
        value = site.log_prob().sum()
        if reaches(value, leaves):
            total = total + double(value)
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

    @property
    def size(self) -> int:
        return sum(map(len, self.locs.values()))

    def scale(self, values: Mapping[str, Tensor]) -> Tensor:
        return self.ratio if self.owner is None else self.ratio * values[self.owner].reshape(())


class NormalFormula(Formula):
    """The formula of independent Normals over all of the subset, with one scale for each site,
    fixed or proportional to a hyperparameter, and of a likelihood that changes by its noise alone.

    It runs no program, and takes eigenvalues of the curvature where a structure has them.

    :param groups: of sites with the same scale.
    """

    def __init__(
        self, guide: LaplaceGuide, reading: ParameterReading, groups: list[_Group]
    ) -> None:
        super().__init__(guide, reading)
        self.groups = groups
        self._at: Any = None
        self._squares = torch.empty(0, device="cpu")
        dtype, device = torch.float64, double_device(guide.loc.device)
        self._powers = torch.tensor([group.power for group in groups], dtype=dtype, device=device)
        self._sizes = torch.tensor([group.size for group in groups], dtype=dtype, device=device)
        self._curvature: Any = None  # of which the eigenvalues are known
        self._spectra: list[Tensor] | None = None

    @classmethod
    def of(cls, guide: LaplaceGuide, reading: ParameterReading) -> "NormalFormula | None":
        """The formula of the program that a reading is of; None where it has none."""
        tuned, subset, run = followed(reading), guide.subset, reading.run
        normals, owners = prior_normals(reading, subset), owners_of_priors(reading, subset)
        noise = reading.noise
        if (
            run.factors
            or run.prior_factors
            or set(normals) != set(subset.parts)
            or len(tuned) + len(reading.in_likelihood) != len(reading.parameters)
            or (noise is None and reading.in_likelihood)
        ):
            return None
        groups: dict[Any, _Group] = {}
        for name, (loc, scale) in normals.items():
            owner, ratio = owners.get(name), scale.detach()[0]
            is_one = not bool((scale.detach() != ratio).any())
            followed_by_one = owner in tuned and tuned[owner].value.numel() == 1
            if (
                loc.requires_grad
                or isinstance(run.latents[name].scale, Tensor)
                or not is_one
                or (scale.requires_grad and not followed_by_one)
            ):
                return None
            if owner is not None:
                ratio = ratio / tuned[owner].value.detach().reshape(())
            group = _Group(ratio, owner, float(run.latents[name].scale))
            group = groups.setdefault((group.owner, float(ratio), group.power), group)
            group.locs[name] = loc
        owner_of_noise = None if noise is None or noise.owner is None else noise.owner.name
        is_learned = noise is not None and noise.value is not None
        if is_learned and (owner_of_noise is None or owner_of_noise in owners.values()):
            return None
        return cls(guide, reading, list(groups.values()))

    def _values(self) -> dict[str, Tensor]:
        return {name: p.now() for name, p in self.tuned.items()}

    def _factor(self, values: Mapping[str, Tensor]) -> Tensor | None:
        before = self.guide.reference_noise
        if self._noise is None or before is None:
            return None
        return (before / values[self._noise].reshape(())).square().to(self.guide.squares)

    def parts(self, point: LinearizedPoint | None = None) -> Parts:
        guide, values = self.guide, self._values()
        scales, squares = self._scales(values), self._squares_at(point)
        quadratic, logs = normal_terms(scales, squares, self._sizes, self._powers)
        constant = 0.5 * _LOG_2PI * sum(group.power * group.size for group in self.groups)
        log_prior, factor = quadratic - (logs + constant), self._factor(values)
        scaled = 1.0 if factor is None else guide.config.noise_factor(factor)
        scaled = torch.as_tensor(scaled, device=guide.squares.device)
        log_determinant = self._log_determinant(self._powers / scales.square(), scaled)
        return self._sum(values, log_prior, log_determinant, [(quadratic, logs)], factor, point)

    def _scales(self, values: Mapping[str, Tensor]) -> Tensor:
        """The standard deviation of each group of sites, in float64."""
        return torch.stack([double(group.scale(values)) for group in self.groups])

    def _log_determinant(self, precisions: Tensor, factor: Tensor) -> Tensor:
        """log det of the posterior precision, for the prior precision of each group of sites."""
        guide, parts = self.guide, self.guide.subset.parts
        if self._curvature is not guide.curvature:
            self._curvature = guide.curvature
            slices = [{site: parts[site] for site in group.locs} for group in self.groups]
            self._spectra = guide.curvature.spectra(slices)
        if self._spectra is None:
            return guide.curvature.with_prior(self._prior(precisions), factor).logdet()
        return log_determinant(self._spectra, precisions, factor)

    def _prior(self, precisions: Tensor) -> PriorPrecision:
        pairs = zip(self.groups, precisions.to(self.guide.prior_diagonal), strict=True)
        uniform = {site: precision for group, precision in pairs for site in group.locs}
        parts = self.guide.subset.parts
        pieces = [uniform[site].expand(part.stop - part.start) for site, part in parts.items()]
        return PriorPrecision(torch.cat(pieces), uniform=uniform, quadratic=True)

    def _squares_at(self, point: LinearizedPoint | None) -> Tensor:
        """The sum of (u_i - m_i)^2 over each group; that at the last point is kept."""
        guide = self.guide
        at = guide.loc, None if point is None else point.offset
        if self._at is None or self._at[0] is not at[0] or self._at[1] is not at[1]:
            vector, parts, self._at = _vector(guide, point), guide.subset.parts, at
            sums = []
            for group in self.groups:
                offsets = [vector[parts[site]] - loc for site, loc in group.locs.items()]
                sums.append(torch.stack([double(d.square()).sum() for d in offsets]).sum())
            self._squares = torch.stack(sums)
        return self._squares

    @torch.no_grad()
    def follow(self) -> None:
        guide, subset, values = self.guide, self.guide.subset, self._values()
        prior = self._prior(self._powers / self._scales(values).square())
        locs = {site: loc for group in self.groups for site, loc in group.locs.items()}
        offset = torch.cat([locs[site] for site in subset.parts]) - subset.take(guide.loc)
        guide.adapt(prior, prior.diagonal.to(offset) * offset, self._factor(values))


def sum_of_logs(values: Tensor) -> Tensor:
    """sum_i log x_i of positive numbers, in float64, by logarithms of products of eight."""
    whole = len(values) - len(values) % 8
    products = double(values[:whole].view(8, -1)).prod(0)
    limits, rest = torch.finfo(torch.float64), double(values[whole:]).log().sum()
    if bool(((products >= limits.tiny) & (products <= limits.max)).all()):
        return products.log().sum() + rest
    return double(values).log().sum()  # the products leave the range of the numbers


def log_determinant(spectra: list[Tensor], precisions: Tensor, factor: Tensor) -> Tensor:
    """sum_k log det(factor * curvature_k + precision_k), a scalar that can be differentiated once.

        d / d precision_k = sum_i 1 / (factor l_ki + precision_k)
        d / d factor = sum_ki l_ki / (factor l_ki + precision_k)

    :param spectra: the eigenvalues l_k of each curvature, (r,).
    :param precisions: of the priors, positive, one for each curvature.
    :param factor: of the curvatures, positive, a scalar.
    """
    values, traces, slopes = [], [], []
    with torch.no_grad():
        for eigenvalues, precision in zip(spectra, precisions, strict=True):
            sums = eigenvalues * factor.to(eigenvalues) + precision.to(eigenvalues)
            values.append(sum_of_logs(sums))
            inverse = sums.reciprocal_()
            traces.append(inverse.sum())
            if factor.requires_grad:
                slopes.append((eigenvalues @ inverse).to(factor))
        derivatives = [torch.stack(traces).to(precisions), sum(slopes) if slopes else None]
    return with_gradients(torch.stack(values).sum(), derivatives, (precisions, factor))
