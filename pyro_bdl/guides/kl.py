"""KL divergences between the sites of a guide and of a program."""

import math
import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from pyro.distributions import Delta
from torch import Tensor
from torch.distributions import (
    Exponential,
    Gamma,
    HalfNormal,
    InverseGamma,
    LogNormal,
    Normal,
    kl_divergence,
    register_kl,
)
from torch.distributions.transforms import ExpTransform

from pyro_bdl.distributions.copies import is_constant
from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.program.layout import Layout, marginal
from pyro_bdl.program.trace import Site
from pyro_bdl.utils.autograd import is_transformed

# priors with a closed form under a LogNormal
_POSITIVE = (HalfNormal, Gamma, Exponential, InverseGamma)


def sampled_kl(q: Mapping[str, Site], p: Mapping[str, Site]) -> Tensor:
    """log q(w) - log p(w) in nats, a scalar, at the draw w that the sites hold."""
    terms = [site.log_prob().sum() for site in q.values()]
    terms += [-site.log_prob().sum() for site in p.values()]
    return _sum(terms)


def mean_field_kl(q: Mapping[str, Site], p: Mapping[str, Site]) -> Tensor:
    """KL(q || p) in nats, a scalar: for each site in closed form if there is one, else at the draw.

    Correct if q factorizes over the sites. If a site has different scales in guide and program, its
    term is s_q E[log q] - s_p E[log p] = s_p KL + (s_p - s_q) H(q).
    """
    terms = []
    for name, site in q.items():
        prior = p.get(name)
        # an auxiliary site of the guide has no counterpart in the program
        terms.append(site.log_prob().sum() if prior is None else _site_kl(site, prior))
    terms += [-p[name].log_prob().sum() for name in p if name not in q]
    return _sum(terms)


def diagonal_normal_kl(
    layout: Layout,
    loc: Tensor,
    scale: Tensor,
    p: Mapping[str, Site],
    finished: "FinishedPriors | None" = None,
) -> Tensor:
    """KL of q(u) = Normal(loc, scale^2), u in R^P, from the program's prior, a scalar.

    Sites over the reals with a Normal prior share one closed form, sum_i log(t_i / s_i) + (s_i^2 +
    (m_i - n_i)^2) / (2 t_i^2) - 1/2 for a prior Normal(n, t^2). Other sites are evaluated one by
    one at the draw that ``p`` holds, and so are its statements that are no sites.

    :param finished: keeps the Normals' numbers from call to call where they are constant.
    """
    terms: list[Tensor] = []
    normals = normal_priors({name: p[name] for name in layout.latents})
    (m, locs), (s, scales) = layout.split(loc, normals), layout.split(scale, normals)
    for name in locs:
        latent = layout.latents[name]
        shape = latent.unconstrained_shape
        if isinstance(latent.transform, ExpTransform) and _is_plain(p[name]):
            prior = base_distribution(p[name].distribution, through_masks=False)
            if isinstance(prior, _POSITIVE):
                kl = _lognormal_kl(locs[name].view(shape), scales[name].view(shape), prior)
                terms.append(kl.sum() if kl.dim() else kl)
                continue
        q = marginal(latent, locs[name].view(shape), scales[name].view(shape))
        q = q.to_event(latent.event_dim - q.event_dim)
        terms.append(_site_kl(Site(q, p[name].value, 1.0, None), p[name]))
    if normals:
        n, precision = (finished or FinishedPriors())(normals)
        distance = (m if n is None else m - n) * precision
        ratio = (s * precision).square()
        # subtracted in this order: no large numbers that cancel where q is the prior
        terms.append(0.5 * ((ratio - 1.0 - ratio.log()).sum() + torch.dot(distance, distance)))
    terms += [-p[name].log_prob().sum() for name in p if name not in layout.latents]
    return _sum(terms)


class FinishedPriors:
    """Locations n and 1 / t of Normal priors(n, t^2), side by side, made once where they are
    declared constant, and anew where other distributions take their place."""

    def __init__(self) -> None:
        self._priors: list[Normal] = []
        self._vectors: tuple[Tensor | None, Tensor] | None = None

    def __call__(self, normals: Mapping[str, Normal]) -> tuple[Tensor | None, Tensor]:
        """The vectors (p,); None in place of locations that are constant and zero."""
        priors = list(normals.values())
        same = len(priors) == len(self._priors) and all(map(operator.is_, priors, self._priors))
        if same and self._vectors is not None:
            return self._vectors
        loc, scale = as_vectors(normals)
        passing = is_transformed() or torch.is_inference_mode_enabled()  # tensors not to be kept
        if passing or not all(map(is_constant, priors)):
            return loc, scale.reciprocal()
        self._priors, self._vectors = priors, (loc if loc.any() else None, scale.reciprocal())
        return self._vectors


def expected_log_prior(
    layout: Layout,
    loc: Tensor,
    variance: Tensor,
    p: Mapping[str, Site],
    *,
    at_draw: Collection[str] = (),
) -> Tensor:
    """E_q[log p(w)], a scalar, for a q over w in R^P with means ``loc`` and marginal variances
    ``variance`` (P,).

    Sites over the reals with a Normal prior(n, t^2) in closed form, -sum_i log t_i + (v_i + (m_i -
    n_i)^2) / (2 t_i^2) + log(2 pi) / 2; other sites are evaluated at the draw that ``p`` holds.

    :param at_draw: further sites to evaluate at the draw, because their prior depends on a latent
        that is not independent of them under q.
    """
    normals = normal_priors({name: site for name, site in p.items() if name not in at_draw})
    terms = [site.log_prob().sum() for name, site in p.items() if name not in normals]
    if normals:
        prior_loc, prior_scale = as_vectors(normals)
        m, v = layout.take(loc, list(normals)), layout.take(variance, list(normals))
        square = v + (m - prior_loc).square()
        quadratic = (square / prior_scale.square()).sum() + len(square) * math.log(2 * math.pi)
        terms.append(-0.5 * quadratic - prior_scale.log().sum())
    return _sum(terms)


def normal_priors(p: Mapping[str, Site]) -> dict[str, Normal]:
    """The independent Normals among the priors, in the program's order."""
    normals = {}
    for name, site in p.items():
        base = base_distribution(site.distribution, through_masks=False)
        if _is_plain(site) and isinstance(base, Normal):
            normals[name] = base
    return normals


def _is_plain(site: Site) -> bool:
    """Return whether the density counts once, and of every number."""
    return isinstance(site.scale, int | float) and site.scale == 1.0 and site.mask is None


def as_vectors(normals: Mapping[str, Normal]) -> tuple[Tensor, Tensor]:
    """Locations and scales, side by side."""
    locs = torch.cat([normal.loc.reshape(-1) for normal in normals.values()])
    return locs, torch.cat([normal.scale.reshape(-1) for normal in normals.values()])


def entropy(q: Mapping[str, Site]) -> Tensor:
    """H(q) in nats of a guide that factorizes over the sites, a scalar: closed forms, or at the
    draw."""
    terms = []
    for site in q.values():
        try:
            value = site.distribution.entropy()
        except NotImplementedError:
            value = -site.distribution.log_prob(site.value)
        terms.append((value * site.scale).sum())
    return _sum(terms)


def _sum(terms: list[Tensor]) -> Tensor:
    if len(terms) == 1:
        return terms[0]
    return torch.stack(terms).sum() if terms else torch.zeros((), device="cpu")


def _alike(a: Site, b: Site) -> bool:
    same_scale = a.scale is b.scale or (
        isinstance(a.scale, int | float) and isinstance(b.scale, int | float) and a.scale == b.scale
    )
    return same_scale and a.mask is None and b.mask is None


def _site_kl(site: Site, prior: Site) -> Tensor:
    # The log density of a Delta holds the guide's log determinant, which the closed form would
    # drop.
    at_draw = (
        isinstance(base_distribution(site.distribution, through_masks=False), Delta)
        or site.mask is not None
    )
    if not at_draw and prior.mask is None:
        try:
            kl = kl_divergence(site.distribution, prior.distribution)
            if _alike(site, prior):
                return (kl * site.scale).sum()
            h = site.distribution.entropy()
            return (prior.scale * kl + (prior.scale - site.scale) * h).sum()
        except NotImplementedError:
            pass
    return site.log_prob().sum() - prior.log_prob().sum()


# KL(q || p) = -H(q) - E_q[log p(w)] for q = LogNormal(m, s^2), the distribution of mean-field
# guides at positive sites, with E[log w] = m and E[w^k] = exp(k m + k^2 s^2 / 2).


def _lognormal_kl(loc: Tensor, scale: Tensor, p: Any) -> Tensor:
    def moment(power: int) -> Tensor:
        return torch.exp(power * loc + 0.5 * power**2 * scale.square())

    if isinstance(p, HalfNormal):
        variance = p.scale.square()
        log_p = 0.5 * (math.log(2 / math.pi) - variance.log() - moment(2) / variance)
    elif isinstance(p, Exponential):
        log_p = p.rate.log() - p.rate * moment(1)
    else:
        a, b, sign = p.concentration, p.rate, 1 if isinstance(p, Gamma) else -1
        log_p = a * b.log() - a.lgamma() + (sign * a - 1) * loc - b * moment(sign)
    entropy = loc + scale.log() + 0.5 * math.log(2 * math.pi * math.e)
    return -entropy - log_p


for _kind in _POSITIVE:
    register_kl(LogNormal, _kind)(lambda q, p: _lognormal_kl(q.loc, q.scale, p))
