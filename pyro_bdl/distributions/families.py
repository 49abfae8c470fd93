"""The table of distributions: what their constructors and ``arg_constraints`` do not say.

A family without an entry is made of the tensors that its ``arg_constraints`` names, if its
constructor takes no others, and its Fisher information is estimated. An entry is one line of
``FAMILIES``; the function of a closed form stands above it.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from pyro.distributions import ZeroInflatedDistribution
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor, nn
from torch.distributions import (
    Distribution,
    Gamma,
    Independent,
    MixtureSameFamily,
    TransformedDistribution,
)

from pyro_bdl.distributions.censored import Censored
from pyro_bdl.distributions.targets import ZeroTruncated

Cotangent = dict[str, Tensor]
Roots = Iterable[Cotangent]


class Family(NamedTuple):
    """Properties of a class of distributions.

    :param information: columns of S with S S' = F, the Fisher information of each cell, from a
        distribution and its tensors that depend on the latents, the others being known; None where
        these have no closed form.
    :param divergence: whether torch's KL divergence of two members is twice differentiable where
        they are equal; its Hessian is F.
    :param constants: arguments that are no tensors, each with the attribute that holds it.
    :param parts: arguments that are distributions.
    :param draw: a draw of the batch shape by operators that ``vmap`` has, where torch's own is made
        of others: it fills tensors in place, or has an ``autograd.Function``.
    :param curvature: columns of S with S S' = -d^2 log p at an observed value, in the place of F:
        for a distribution of which each datum is known in a way of its own, that no draw has.
    """

    information: Callable[[Any, Cotangent], Roots | None] | None = None
    divergence: bool = False
    constants: Mapping[str, str] = MappingProxyType({})
    parts: tuple[str, ...] = ()
    draw: Callable[[Any], Tensor] | None = None
    curvature: Callable[[Any, Tensor, Cotangent], Roots] | None = None


def name_of(base: Distribution) -> str:
    """The name of a family: of torch's or Pyro's class that a distribution is of, or of the class
    whose constructor takes its parts; empty for other classes, whose density may be another."""
    for kind in (MixtureSameFamily, ZeroInflatedDistribution):
        if isinstance(base, kind):
            return kind.__name__
    name, ours = type(base).__name__, (Censored, ZeroTruncated)
    known = (getattr(torch.distributions, name, None), getattr(dist, name, None), *ours)
    return name if type(base) in known else ""


def family_of(base: Distribution) -> Family:
    """The entry of a distribution without wrappers."""
    return FAMILIES.get(name_of(base), Family())


# ------------------------------------------------------------------------------- closed forms


def _diagonal(information: dict[str, Tensor], parameters: Cotangent) -> Roots:
    return [{name: value.sqrt()} for name, value in information.items() if name in parameters]


def _location_scale(of_loc: float, of_scale: float) -> Callable[[Any, Cotangent], Roots]:
    """The information of a symmetric location-scale family, in units of 1 / scale^2."""

    def roots(base: Any, parameters: Cotangent) -> Roots:
        precision = base.scale.detach().square().reciprocal()
        return _diagonal({"loc": of_loc * precision, "scale": of_scale * precision}, parameters)

    return roots


def _student_t(base: Any, parameters: Cotangent) -> Roots:
    """The information of location, scale and df (Lange, Little & Taylor 1989, appendix B)."""
    df, scale = base.df.detach(), base.scale.detach()
    precision = scale.square().reciprocal()
    loc = (df + 1) / (df + 3) * precision
    trigamma = torch.special.polygamma
    of_df = 0.25 * (trigamma(1, df / 2) - trigamma(1, (df + 1) / 2))
    of_df = of_df - (df + 5) / (2 * df * (df + 1) * (df + 3))
    of_scale = 2 * df / (df + 3) * precision
    cross = -2 / ((df + 1) * (df + 3) * scale)
    if not {"scale", "df"} <= parameters.keys():
        return _diagonal({"loc": loc, "scale": of_scale, "df": of_df.clamp(min=0.0)}, parameters)
    root = of_scale.sqrt()
    rest = (of_df - cross.square() / of_scale).clamp(min=0.0).sqrt()
    return [*_diagonal({"loc": loc}, parameters), {"scale": root, "df": cross / root}, {"df": rest}]


def _poisson(base: Any, parameters: Cotangent) -> Roots:
    rate = base.rate.detach()
    tiny = torch.finfo(rate.dtype).tiny
    return _diagonal({"rate": rate.clamp(min=tiny).reciprocal()}, parameters)


def _of_probability(count: Callable[[Any], Any]) -> Callable[[Any, Cotangent], Roots | None]:
    """The information of a probability p: count p (1 - p) for its logits, count / (p (1 - p)) for
    p."""

    def roots(base: Any, parameters: Cotangent) -> Roots | None:
        if "total_count" in parameters:
            return None
        logits = base.logits.detach()
        variance = torch.sigmoid(logits) * torch.sigmoid(-logits)
        if "logits" in parameters:
            return _diagonal({"logits": count(base) * variance}, parameters)
        p = base.probs.detach()
        variance = (p * (1 - p)).clamp(min=torch.finfo(p.dtype).tiny)
        return _diagonal({"probs": count(base) / variance}, parameters)

    return roots


def _failures(base: Any) -> Tensor:
    """The information of r failures is that of r / (1 - p) trials."""
    rest = torch.sigmoid(-base.logits.detach())
    return base.total_count.detach() / rest.clamp(min=torch.finfo(rest.dtype).tiny)


def _categorical(base: Any, parameters: Cotangent) -> Roots:
    """Columns sqrt(n p_k) (e_k - p) for logits, sqrt(n / p_k) e_k for probabilities, of n draws."""
    p = base.probs.detach()
    count = math.sqrt(getattr(base, "total_count", 1))
    for k in range(p.shape[-1]):
        p_k, one = p[..., k : k + 1], p.new_zeros(p.shape[-1])
        one[k] = 1.0
        if "probs" in parameters:
            yield {"probs": count * one * p_k.clamp(min=torch.finfo(p.dtype).tiny).rsqrt()}
        else:
            yield {"logits": count * p_k.sqrt() * (one - p)}


def _mean_of_normal(base: Any, parameters: Cotangent) -> Roots | None:
    """The information Sigma^-1 = L^-T L^-1 of a multivariate Normal's mean alone."""
    if parameters.keys() != {"loc"}:
        return None
    inverse = torch.linalg.inv(base.scale_tril.detach())
    rows = inverse.expand(*base.batch_shape, *inverse.shape[-2:]).unbind(-2)
    return [{"loc": row} for row in rows]


# ---------------------------------------------------------------------------- draws under vmap


def _uniform(like: Tensor) -> Tensor:
    return torch.rand(like.shape, dtype=like.dtype, device=like.device)


def _normal(like: Tensor) -> Tensor:
    return torch.randn(like.shape, dtype=like.dtype, device=like.device)


def _gamma(concentration: Tensor) -> Tensor:
    return Gamma(concentration, torch.ones_like(concentration), validate_args=False).sample()


def _exponential(like: Tensor) -> Tensor:
    return -torch.log1p(-_uniform(like))


def _draw_cauchy(base: Any) -> Tensor:
    return base.loc + base.scale * torch.tan(torch.pi * (_uniform(base.loc) - 0.5))


def _draw_laplace(base: Any) -> Tensor:
    return base.loc + base.scale * (_exponential(base.loc) - _exponential(base.loc))


def _draw_student_t(base: Any) -> Tensor:
    chi2 = 2.0 * _gamma(base.df / 2)
    return base.loc + base.scale * _normal(base.loc) * (chi2 / base.df).rsqrt()


def _draw_beta(base: Any) -> Tensor:
    one, other = _gamma(base.concentration1), _gamma(base.concentration0)
    return one / (one + other)


def _draw_dirichlet(base: Any) -> Tensor:
    parts = _gamma(base.concentration)
    return parts / parts.sum(-1, keepdim=True)


def _draw_multivariate_normal(base: Any) -> Tensor:
    return base.loc + (base.scale_tril @ _normal(base.loc)[..., None])[..., 0]


def _draw_lkj(base: Any) -> Tensor:
    """The onion method (Lewandowski, Kurowicka & Joe 2009, section 3.2), row after row: row k + 1
    has squared length y ~ Beta(k / 2, concentration + (d - 1 - k) / 2) before its diagonal.
    torch 2.13 has Beta(k - 1 / 2, ...) there, and correlations that are too large."""
    d, concentration = base.dim, base.concentration[..., None]
    k = torch.arange(1, d, device=concentration.device, dtype=concentration.dtype)
    rest = concentration + (d - 1 - k) / 2
    before, after = _gamma((k / 2).expand(rest.shape)), _gamma(rest)
    y = before / (before + after)
    sphere = _normal(rest[..., None].expand(*rest.shape, d - 1)).tril()
    sphere = sphere / sphere.norm(dim=-1, keepdim=True)
    below = nn.functional.pad(y.sqrt()[..., None] * sphere, (0, 1, 1, 0))
    diagonal = nn.functional.pad((after / (before + after)).sqrt(), (1, 0), value=1.0)
    return below + torch.diag_embed(diagonal)


def sample_of(distribution: Distribution) -> Tensor:
    """A draw without gradients, also under ``vmap`` for the families whose entry says how, and
    these inside ``to_event``, ``mask`` and transforms."""
    base: Any = distribution
    if isinstance(base, Independent | MaskedDistribution):
        return sample_of(base.base_dist)
    own = family_of(base).draw
    with torch.no_grad():
        if own is not None:
            return own(base)
        if type(base).sample is TransformedDistribution.sample:
            value = sample_of(base.base_dist)
            for transform in base.transforms:
                value = transform(value)
            return value
    return base.sample()  # not rsample, which vmap refuses


# ---------------------------------------------------------------------------------- the table

_NORMAL = Family(_location_scale(1.0, 2.0))
_MULTIVARIATE = Family(_mean_of_normal, divergence=True)
_DIVERGENCE = Family(divergence=True)

FAMILIES: dict[str, Family] = {
    "Normal": _NORMAL,
    "LogNormal": _NORMAL,
    "Laplace": Family(_location_scale(1.0, 1.0), draw=_draw_laplace),
    "Cauchy": Family(_location_scale(0.5, 0.5), draw=_draw_cauchy),
    "StudentT": Family(_student_t, draw=_draw_student_t),
    "Poisson": Family(_poisson, constants={"is_sparse": "is_sparse"}),
    "Bernoulli": Family(_of_probability(lambda base: 1.0)),
    "Binomial": Family(_of_probability(lambda base: base.total_count.detach())),
    "NegativeBinomial": Family(_of_probability(_failures)),
    "Categorical": Family(_categorical),
    "OneHotCategorical": Family(_categorical),
    "MultivariateNormal": _MULTIVARIATE._replace(draw=_draw_multivariate_normal),
    "LowRankMultivariateNormal": _MULTIVARIATE,
    "Gamma": _DIVERGENCE,
    "Beta": _DIVERGENCE._replace(draw=_draw_beta),
    "Dirichlet": _DIVERGENCE._replace(draw=_draw_dirichlet),
    "LKJCholesky": Family(draw=_draw_lkj),
    "Gumbel": _DIVERGENCE,
    "Exponential": _DIVERGENCE._replace(draw=lambda base: _exponential(base.rate) / base.rate),
    "HalfNormal": _DIVERGENCE,
    "Geometric": _DIVERGENCE,
    "Multinomial": Family(_categorical, constants={"total_count": "total_count"}),
    "DirichletMultinomial": Family(constants={"is_sparse": "is_sparse"}),
    "ContinuousBernoulli": Family(constants={"lims": "_lims"}),
    "MixtureSameFamily": Family(parts=("mixture_distribution", "component_distribution")),
    "ZeroInflatedDistribution": Family(parts=("base_dist",)),
    "ZeroTruncated": Family(parts=("base_dist",)),
    "TransformedDistribution": Family(parts=("base_dist",)),
    "Censored": Family(constants={"law": "law"}, curvature=Censored.curvature_roots),
}
