"""The evidence as a formula in its hyperparameters, without runs of the program."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.hyperparameters import (
    ParameterReading,
    followed,
    is_proportional,
    noise_owner,
    noise_site,
    prior_locations,
    prior_scales,
    slopes,
)
from pyro_bdl.curvature.prior import PriorPrecision
from pyro_bdl.distributions.take_apart import base_distribution
from pyro_bdl.evidence.linearized import LinearizedPoint
from pyro_bdl.evidence.marginal import Terms, effective_parameters, noise_factor
from pyro_bdl.guides.laplace import LaplaceGuide
from pyro_bdl.utils.autograd import with_gradients

SMALLEST = 1e-8  # of gamma and of squared weights
_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


@dataclass
class _Weights:
    """Independent Normals N(loc, (ratio theta)^2) over the entries of sites in the subset.

    :param locs: the means, by site; of several sites only where ``ratio`` is one number.
    :param owner: theta, where a hyperparameter scales them.
    :param power: by which their log density counts.
    """

    locs: dict[str, Tensor]
    ratio: Tensor
    owner: str | None
    power: float

    def scale(self, values: Mapping[str, Tensor]) -> Tensor:
        return self.ratio if self.owner is None else self.ratio * values[self.owner]

    def takes(self, other: "_Weights") -> bool:
        """True if both have one number as their scale, and always the same."""
        if len(self.ratio) != 1 or len(other.ratio) != 1:
            return False
        same = self.owner == other.owner and self.power == other.power
        return same and bool(self.ratio == other.ratio)


class EvidenceFormula:
    """The terms of a guide's evidence where its hyperparameters scale Normal priors and a noise.

    Then log p(u) = -1/2 sum_i ((u_i - m_i) / (c_i theta))^2 - sum_i log(c_i theta) + constant, and
    the likelihood changes by the noise alone.
    """

    def __init__(
        self,
        guide: LaplaceGuide,
        weights: list[_Weights],
        noise: tuple[str, Tensor] | None,
    ) -> None:
        self.guide, self.weights, self.noise = guide, weights, noise
        self._at: tuple[Tensor, Tensor | None] | None = None
        self._squares: list[Tensor] = []
        self._curvature: Any = None  # of which the eigenvalues are known
        self._spectra: list[Tensor] | None = None

    @classmethod
    def of(cls, guide: LaplaceGuide, reading: ParameterReading) -> "EvidenceFormula | None":
        """The formula of the program that a reading is of; None where it has none."""
        tuned, subset = followed(reading), guide.subset
        found = prior_scales(reading, subset)
        if (
            reading.run.factors
            or set(found) != set(subset.parts)
            or len(tuned) + len(reading.in_likelihood) != len(reading.parameters)
        ):
            return None
        weights: list[_Weights] = []
        for name, scale in found.items():
            site = reading.run.latents[name]
            base: Any = base_distribution(site.distribution)
            if base.loc.requires_grad or isinstance(site.scale, Tensor):
                return None
            ratio, moved = scale.detach(), slopes(scale, tuned.values())
            owner = tuned[next(iter(moved))] if len(moved) == 1 else None
            if owner is not None:
                one = owner.value.numel() == 1
                if not one or not is_proportional(scale, owner, moved[owner.name]):
                    return None
                ratio = ratio / owner.value.detach()
            elif scale.requires_grad:
                return None
            if bool((ratio == ratio[0]).all()):
                ratio = ratio[:1]
            loc = prior_locations(reading, subset, name)
            theirs = None if owner is None else owner.name
            own = _Weights({name: loc}, ratio, theirs, float(site.scale))
            known = next((group for group in weights if group.takes(own)), None)
            if known is None:
                weights.append(own)
            else:
                known.locs[name] = loc
        factor, noise = noise_factor(guide, reading), None
        if factor is not None:
            owned = noise_owner(reading, subset)
            if owned is None or any(weight.owner == owned[0].name for weight in weights):
                return None
            root = owned[0].value.detach() * factor.detach().sqrt()
            noise = owned[0].name, root
        elif noise_site(reading) is None and reading.in_likelihood:
            return None
        return cls(guide, weights, noise)

    def terms(self, values: Mapping[str, Tensor], point: LinearizedPoint | None) -> Terms:
        """The terms at other values of the hyperparameters, by name, differentiable in them.

        :param point: of the linearized model, to evaluate there.
        """
        guide, subset = self.guide, self.guide.subset
        here: Any = guide if point is None else point
        likelihood, scaled = here.log_likelihood, torch.as_tensor(1.0, device=guide.loc.device)
        if self.noise is not None:
            name, root = self.noise
            factor = (root / values[name]).square().to(guide.squares)
            likelihood = likelihood - 0.5 * (factor - 1.0) * here.squares
            likelihood = likelihood + 0.5 * guide.cells * factor.log()
            scaled = guide.curvature_factor(factor)
        log_prior = guide.loc.new_zeros((), dtype=torch.float64)
        precisions = []
        for weights, squares in zip(self.weights, self._squares_at(point), strict=True):
            count = sum(len(guide.prior_diagonal[subset.parts[site]]) for site in weights.locs)
            scale = weights.scale(values)
            precision = scale.square().reciprocal()
            if len(scale) == 1:
                fit, volume = squares * precision[0], count * scale[0].log()
            else:
                fit, volume = (squares * precision).double().sum(), scale.log().sum()
            constant = count * _HALF_LOG_2PI
            log_prior = log_prior - weights.power * (0.5 * fit + volume + constant).double()
            precisions.append(weights.power * precision)
        log_determinant = self._log_determinant(precisions, scaled)
        return Terms(likelihood, log_prior, log_determinant, subset.size)

    def _log_determinant(self, precisions: list[Tensor], factor: Tensor) -> Tensor:
        """log det of the posterior precision, for the prior precision of each group of sites."""
        guide, subset = self.guide, self.guide.subset
        if self._curvature is not guide.curvature:
            self._curvature, self._spectra = guide.curvature, None
            if all(len(weights.ratio) == 1 for weights in self.weights):
                groups = [
                    {site: subset.parts[site] for site in weights.locs} for weights in self.weights
                ]
                self._spectra = guide.curvature.spectra(groups)
        if self._spectra is not None:
            terms = [
                log_determinant(eigenvalues, precision[0], factor)
                for eigenvalues, precision in zip(self._spectra, precisions, strict=True)
            ]
            return torch.stack(terms).sum()
        uniform, pieces = {}, {}
        for weights, precision in zip(self.weights, precisions, strict=True):
            for site in weights.locs:
                pieces[site] = precision.expand(guide.prior_diagonal[subset.parts[site]].shape)
                if len(precision) == 1:
                    uniform[site] = precision[0]
        diagonal = torch.cat([pieces[site] for site in subset.parts]).to(guide.prior_diagonal)
        prior = PriorPrecision(diagonal, uniform=uniform, quadratic=True)
        return guide.curvature.with_prior(prior, factor).logdet()

    @torch.no_grad()
    def fixed_point(
        self, values: Mapping[str, Tensor], point: LinearizedPoint | None
    ) -> dict[str, Tensor] | None:
        """One step of the fixed point of ``maximize``, from these values to the result's; None
        where it has none."""
        guide, parts = self.guide, self.guide.subset.parts
        if any(weights.power != 1.0 for weights in self.weights):
            return None
        variances = guide.precision.variances().double()
        gamma, fit = dict.fromkeys(values, 0.0), dict.fromkeys(values, 0.0)
        for weights, squares in zip(self.weights, self._squares_at(point), strict=True):
            name = weights.owner
            if name is not None:
                precision = weights.scale(values).square().reciprocal().double()
                own = torch.cat([variances[parts[site]] for site in weights.locs])
                gamma[name] += len(own) - float((precision * own).sum())
                fit[name] += float((precision * squares).sum())
        if self.noise is not None:
            name, root = self.noise
            here: Any = guide if point is None else point
            factor = (root / values[name]).square()
            gamma[name] = float(guide.cells) - float(effective_parameters(guide))
            fit[name] = float(factor * here.squares)
            if gamma[name] <= 0:
                return None
        return {
            name: value * math.sqrt(max(fit[name], SMALLEST) / max(gamma[name], SMALLEST))
            for name, value in values.items()
        }

    @torch.no_grad()
    def follow(self, values: Mapping[str, Tensor]) -> None:
        """Adapt the guide to other values of the hyperparameters, as ``LaplaceGuide.follow``."""
        guide, subset = self.guide, self.guide.subset
        vector = subset.take(guide.loc)
        diagonal, slope = torch.empty_like(guide.prior_diagonal), torch.empty_like(vector)
        for weights in self.weights:
            precision = weights.power * weights.scale(values).square().reciprocal()
            for site, loc in weights.locs.items():
                part = subset.parts[site]
                diagonal[part], slope[part] = precision, precision * (loc - vector[part])
        factor = None
        if self.noise is not None:
            name, root = self.noise
            factor = (root / values[name]).square()
        guide.adapt(PriorPrecision(diagonal, quadratic=True), slope, factor)

    def _squares_at(self, point: LinearizedPoint | None) -> list[Tensor]:
        """Sums of (u_i - m_i)^2 over the groups of sites whose scale is one number; the squares
        themselves of other sites."""
        guide = self.guide
        at = guide.loc, None if point is None else point.offset
        if self._at is None or self._at[0] is not at[0] or self._at[1] is not at[1]:
            vector = guide.subset.take(guide.loc)
            if point is not None:
                vector = vector + point.offset
            self._at, self._squares = at, []
            for weights in self.weights:
                squares = [
                    (vector[guide.subset.parts[site]] - loc).square()
                    for site, loc in weights.locs.items()
                ]
                one = len(weights.ratio) == 1
                total: Any = sum(part.double().sum() for part in squares) if one else squares[0]
                self._squares.append(total)
        return self._squares


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
