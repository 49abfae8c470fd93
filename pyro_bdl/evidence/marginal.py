"""The log marginal likelihood of a Laplace approximation, as a function of hyperparameters."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_bdl.curvature.factor_statements import FactorStatements
from pyro_bdl.curvature.hyperparameters import ParameterReading, noise_site, read
from pyro_bdl.curvature.prior import (
    PriorPrecision,
    flat_entries,
    hyperpriors,
    prior_precision,
)
from pyro_bdl.distributions.take_apart import base_distribution
from pyro_bdl.evidence.linearized import LinearizedPoint, linearized_log_likelihood
from pyro_bdl.guides.laplace import LaplaceGuide
from pyro_bdl.program.trace import record, sum_out_discrete
from pyro_bdl.utils.module_state import evaluation_mode


class Terms(NamedTuple):
    """The terms of log p(y) = log_likelihood + log_prior + p/2 log 2 pi - 1/2 log det precision.

    ``log_prior`` includes the densities of hyperparameters under their hyperpriors. The terms are
    scalars in nats, differentiable in the program's parameters.
    """

    log_likelihood: Tensor
    log_prior: Tensor
    log_determinant: Tensor
    size: int

    def total(self) -> Tensor:
        constant = 0.5 * self.size * math.log(2 * math.pi)
        return self.log_likelihood + self.log_prior + constant - 0.5 * self.log_determinant


def log_marginal_likelihood(guide: LaplaceGuide, *, offset: Tensor | None = None) -> Tensor:
    """The Laplace approximation of log p(y | hyperparameters) in nats, a scalar.

    It is log p(y, u*) + p/2 log 2 pi - 1/2 log det(precision) (MacKay 1992, equation 2.3; Immer et
    al. 2021a, equation 6), differentiable in every ``PyroParam`` of the priors and of a Normal's
    noise, through the fit and the determinant. ``backward()`` fills the gradients of the
    unconstrained parameters. For other parameters of the likelihood the curvature counts as
    constant. If only a subset of the latents has a covariance, it is the evidence given the other
    latents.

    :param guide: a guide of ``laplace_approximation``.
    :param offset: u - u* in the subset (p,), to evaluate at the linearized model's optimum
        (``linearized_optimum``) instead of at u* (Antoran et al. 2022, section 3).
    """
    with torch.enable_grad():
        reading = read_guide(guide)
        return terms(guide, reading, offset=offset).total()


def read_guide(guide: LaplaceGuide) -> ParameterReading:
    """A run of the guide's program on a few of its data, at the current hyperparameters.

    :raises TypeError: for other guides.
    :raises ValueError: for a guide whose width was fitted to held-out rows.
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
    return guide._read()


def terms(
    guide: LaplaceGuide,
    reading: ParameterReading,
    *,
    offset: Tensor | None = None,
    point: LinearizedPoint | None = None,
) -> Terms:
    """The terms of the evidence at the hyperparameters of a reading.

    :param offset: where the linearized model is evaluated.
    :param point: the same, where what the evidence needs to know there is known.
    """
    prior = prior_precision(reading.run, reading.leaves, guide.subset, create_graph=True)
    factor = noise_factor(guide, reading)
    scaled = 1.0 if factor is None else guide.curvature_factor(factor)
    posterior = guide.curvature.with_prior(prior, scaled)
    if point is not None:
        offset = point.offset
    likelihood = _log_likelihood(guide, reading, factor, offset, point)
    log_prior = _log_prior(guide, reading, offset)
    for site in hyperpriors(reading.run, reading.leaves).values():
        log_prior = log_prior + site.log_prob().sum().double()
    return Terms(likelihood, log_prior, posterior.logdet(), guide.subset.size)


def noise_factor(guide: LaplaceGuide, reading: ParameterReading) -> Tensor | None:
    """The factor of the curvature for the current noise of a Normal observation.

    It is (reference / noise)^2, where the reference is the noise of the fit; None if the noise is
    not a parameter of the program.
    """
    site = noise_site(reading)
    if site is None or guide.reference_noise is None:
        return None
    scale: Any = base_distribution(site.distribution)
    if not scale.scale.requires_grad:
        return None
    ratios = (guide.reference_noise / scale.scale).square()
    return ratios.mean().to(guide.squares)


def _log_likelihood(
    guide: LaplaceGuide,
    reading: ParameterReading,
    factor: Tensor | None,
    offset: Tensor | None,
    point: LinearizedPoint | None,
) -> Tensor:
    if factor is not None and (offset is None or point is not None):
        # for a Normal: -1/2 c sum r^2 + 1/2 n log c + constant, r in units of the reference noise
        here: Any = guide if point is None else point
        return (
            here.log_likelihood
            - 0.5 * (factor - 1.0) * here.squares
            + (0.5 * guide.cells * factor.log())
        )
    if reading.in_likelihood:
        apart = hyperpriors(reading.run, reading.leaves)
        return _passed(guide, apart) if offset is None else linearized_log_likelihood(guide, offset)
    if point is not None:
        return point.log_likelihood
    return guide.log_likelihood if offset is None else linearized_log_likelihood(guide, offset)


def _passed(guide: LaplaceGuide, apart: Iterable[str]) -> Tensor:
    """The log likelihood, from a pass over the data.

    :param apart: the names of the hyperpriors, which are not part of it.
    """
    model = guide.program_model
    latents = guide.require_layout().constrain(guide.loc)[0]
    total = guide.loc.new_zeros((), dtype=torch.float64)
    factors = FactorStatements()
    with evaluation_mode(model):
        for batches, count in guide.passes:
            for args, kwargs in batches:
                run = record(model, latents, args, kwargs, draw=sum_out_discrete)
                factors.read(run, apart)
                for site in (*run.observed.values(), *factors.new):
                    total = total + count * site.batch_log_prob().double()
    return total


def _log_prior(guide: LaplaceGuide, reading: ParameterReading, offset: Tensor | None) -> Tensor:
    """log p(T(u)) + log |det dT/du| of the subset's latents."""
    subset, layout = guide.subset, guide.require_layout()
    if offset is not None:
        model = guide.program_model
        vector = subset.put(guide.loc, subset.take(guide.loc) + offset.to(guide.loc))
        reading = read(model, subset, vector, *guide.few)
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
            kept = volume if chosen is None else volume[chosen.to(volume.device)]
            total = total + kept.sum().double()
    return total


def effective_parameters(guide: LaplaceGuide, prior: PriorPrecision | None = None) -> Tensor:
    """The effective number of parameters gamma = sum_i (1 - prior precision_i * posterior
    variance_i).

    It is a scalar between 0 and p: the number of parameters that the data determine (MacKay 1992,
    equation 3.2).
    """
    prior = guide.prior if prior is None else prior
    return guide.subset.size - guide.precision.weighted_trace(prior.diagonal)
