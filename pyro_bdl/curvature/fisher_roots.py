"""Roots of the Fisher information of one observation: closed forms, sums or estimates."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, kl_divergence

from pyro_bdl.distributions.take_apart import (
    base_distribution,
    parameters_of,
    rebuild,
    take_apart,
)

Cotangent = dict[str, Tensor]
Roots = Iterable[Cotangent]

ESTIMATION_DRAWS = 512  # draws per datum if the information has no closed form
_DIVERGENCE_UP_TO = 256  # the largest number of parameters of a cell
_NUMBERS_AT_ONCE = 2**18


def rebuilt(base: Any, parameters: dict[str, Tensor]) -> Any:
    """A distribution of the same class with other parameters, which may have more leading
    dimensions."""
    kind: Any = type(base)
    apart = take_apart(base)
    try:
        if apart is not None:
            return rebuild(apart[0], parameters)
        return kind(**parameters, validate_args=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            _no_estimate(base, f"be made again from its parameters ({', '.join(parameters)})")
        ) from error


def _no_estimate(base: Any, missing: str) -> str:
    return (
        f"the Fisher information of {type(base).__name__} has no closed form here, and it cannot "
        f'{missing} to estimate it; use structure="full" with curvature="hessian"'
    )


def cell_roots(
    base: Distribution, parameters: dict[str, Tensor], num_draws: int = ESTIMATION_DRAWS
) -> Roots:
    """Columns of S with S S' = F for each cell of a distribution.

    F has a closed form for Normal, LogNormal, Laplace, Cauchy, StudentT, Poisson, Bernoulli,
    Binomial and NegativeBinomial (of a known count), Categorical, OneHotCategorical and the mean of
    a multivariate Normal. It is the Hessian of a divergence for Gamma, Beta, Gumbel, Exponential,
    HalfNormal, Geometric, MultivariateNormal and LowRankMultivariateNormal, up to 256 parameters.
    It is a sum for at most 512 possible observations, and else estimated from drawn ones.

    :param base: the distribution, without ``to_event`` and masks.
    :param parameters: its tensors that depend on the latents; the others count as known.
    :param num_draws: observations drawn per datum if F has no closed form.
    :raises ValueError: if the density has no gradient in any of the parameters.
    """
    kind = type(base).__name__
    roots: Roots | None = None
    if kind == "TransformedDistribution":
        roots = _transformed(base, parameters, num_draws)
    elif kind in _MULTIVARIATE and parameters.keys() == {"loc"}:
        roots = _mean_of_normal(base)
    elif kind in _CLOSED_FORMS:
        function, covered = _CLOSED_FORMS[kind]
        roots = function(base, parameters) if parameters.keys() <= covered else None
    elif kind in _DIVERGENCES:
        roots = _by_divergence(base, parameters)
    return _estimated_roots(base, parameters, num_draws) if roots is None else roots


def _by_divergence(base: Any, parameters: dict[str, Tensor]) -> Roots | None:
    """F = d^2 KL(p_0 || p_theta) / d theta^2 at theta = theta_0, in float64 (Kullback 1959)."""
    shapes = _event_shapes(base, parameters)
    if sum(shape.numel() for shape in shapes.values()) > _DIVERGENCE_UP_TO:
        return None
    every = {name: value.detach().double() for name, value in parameters_of(base).items()}
    with torch.enable_grad():
        leaves = {name: every[name].clone().requires_grad_() for name in parameters}
        total = kl_divergence(rebuilt(base, every), rebuilt(base, every | leaves)).sum()
        gradient = _of_cells(
            base, torch.autograd.grad(total, [*leaves.values()], create_graph=True)
        )
        rows = [
            torch.autograd.grad(
                entry.sum(), [*leaves.values()], retain_graph=True, materialize_grads=True
            )
            for entry in gradient.unbind(-1)
        ]
    information = torch.stack([_of_cells(base, row) for row in rows], -1)
    like = next(iter(parameters.values()))
    return [_cotangent(base, column.to(like), shapes) for column in _root(information)]


def _mean_of_normal(base: Any) -> Iterator[Cotangent]:
    """The information Sigma^-1 = L^-T L^-1 of a multivariate Normal's mean."""
    inverse = torch.linalg.inv(base.scale_tril.detach())
    for row in inverse.expand(*base.batch_shape, *inverse.shape[-2:]).unbind(-2):
        yield {"loc": row}


def _root(information: Tensor) -> tuple[Tensor, ...]:
    """The columns of S with S S' = F, for F (*batch, k, k), as many as parameters that it has."""
    size = information.shape[-1]
    diagonal = information.diagonal(dim1=-2, dim2=-1).reshape(-1, size)
    used = diagonal.any(0).nonzero()[:, 0]
    values, vectors = torch.linalg.eigh(information[..., used[:, None], used])
    columns = information.new_zeros(*information.shape[:-1], len(used))
    columns[..., used, :] = vectors * values.clamp(min=0.0).sqrt()[..., None, :]
    return columns.unbind(-1)


def _event_shapes(base: Any, parameters: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: v.shape[len(base.batch_shape) :] for name, v in parameters.items()}


def _of_cells(base: Any, values: Iterable[Tensor]) -> Tensor:
    """Values of the parameters side by side for each cell, (*batch, k)."""
    return torch.cat([value.reshape(*base.batch_shape, -1) for value in values], -1)


def _cotangent(base: Any, column: Tensor, shapes: dict[str, torch.Size]) -> Cotangent:
    parts = column.split([shape.numel() for shape in shapes.values()], -1)
    pairs = zip(shapes.items(), parts, strict=True)
    return {name: part.reshape((*base.batch_shape, *shape)) for (name, shape), part in pairs}


def _diagonal(information: dict[str, Tensor], parameters: dict[str, Tensor]) -> list[Cotangent]:
    return [{name: information[name].sqrt()} for name in information if name in parameters]


def _location_scale(of_loc: float, of_scale: float) -> Callable[..., Roots]:
    """The information of a symmetric location-scale family, in units of 1 / scale^2."""

    def roots(base: Any, parameters: dict[str, Tensor]) -> Roots:
        precision = base.scale.detach().square().reciprocal()
        return _diagonal({"loc": of_loc * precision, "scale": of_scale * precision}, parameters)

    return roots


def _student_t(base: Any, parameters: dict[str, Tensor]) -> Roots:
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


def _poisson(base: Any, parameters: dict[str, Tensor]) -> Roots:
    rate = base.rate.detach()
    tiny = torch.finfo(rate.dtype).tiny
    return _diagonal({"rate": rate.clamp(min=tiny).reciprocal()}, parameters)


def _binomial(base: Any, parameters: dict[str, Tensor]) -> Roots:
    count = 1.0 if type(base).__name__ == "Bernoulli" else base.total_count.detach()
    return _of_probability(base, parameters, count)


def _negative_binomial(base: Any, parameters: dict[str, Tensor]) -> Roots:
    """The information of r failures; for the logits of p it is r p."""
    tiny = torch.finfo(base.logits.dtype).tiny
    rest = torch.sigmoid(-base.logits.detach())
    return _of_probability(base, parameters, base.total_count.detach() / rest.clamp(min=tiny))


def _of_probability(base: Any, parameters: dict[str, Tensor], count: Any) -> Roots:
    """The information of a probability p: count p (1 - p) for its logits, count / (p (1 - p)) for
    p."""
    if "probs" in parameters:
        p = base.probs.detach()
        tiny = torch.finfo(p.dtype).tiny
        return _diagonal({"probs": count / (p * (1 - p)).clamp(min=tiny)}, parameters)
    logits = base.logits.detach()
    variance = torch.sigmoid(logits) * torch.sigmoid(-logits)
    return _diagonal({"logits": count * variance}, parameters)


def _categorical(base: Any, parameters: dict[str, Tensor]) -> Roots:
    """Columns sqrt(p_k) (e_k - p) for logits, e_k / sqrt(p_k) for probabilities."""
    p = base.probs.detach()
    roots = []
    for k in range(p.shape[-1]):
        if "probs" in parameters:
            root = torch.zeros_like(p)
            root[..., k] = p[..., k].clamp(min=torch.finfo(p.dtype).tiny).rsqrt()
            roots.append({"probs": root})
        else:
            root = -p * p[..., k : k + 1].sqrt()
            root[..., k] += p[..., k].sqrt()
            roots.append({"logits": root})
    return roots


def _transformed(base: Any, parameters: dict[str, Tensor], num_draws: int) -> Roots | None:
    """The information of a transformed distribution: a bijection of the observation does not change
    it."""
    inner, start = base_distribution(base.base_dist), "base_dist."
    moved = not all(name.startswith(start) for name in parameters)
    if moved or inner.batch_shape != base.batch_shape:
        return None
    own = {name.removeprefix(start): value for name, value in parameters.items()}
    roots = cell_roots(inner, own, num_draws)
    return ({start + k: v for k, v in root.items()} for root in roots)


# For each class its closed form, and the parameters that it covers.
_CLOSED_FORMS: dict[str, tuple[Callable[..., Roots | None], frozenset[str]]] = {
    "Normal": (_location_scale(1.0, 2.0), frozenset({"loc", "scale"})),
    "LogNormal": (_location_scale(1.0, 2.0), frozenset({"loc", "scale"})),
    "Laplace": (_location_scale(1.0, 1.0), frozenset({"loc", "scale"})),
    "Cauchy": (_location_scale(0.5, 0.5), frozenset({"loc", "scale"})),
    "StudentT": (_student_t, frozenset({"df", "loc", "scale"})),
    "Poisson": (_poisson, frozenset({"rate"})),
    "Bernoulli": (_binomial, frozenset({"probs", "logits"})),
    "Binomial": (_binomial, frozenset({"probs", "logits"})),
    "NegativeBinomial": (_negative_binomial, frozenset({"probs", "logits"})),
    "Categorical": (_categorical, frozenset({"probs", "logits"})),
    "OneHotCategorical": (_categorical, frozenset({"probs", "logits"})),
}
_MULTIVARIATE = ("MultivariateNormal", "LowRankMultivariateNormal")
# With a divergence in torch that is differentiable at zero.
_DIVERGENCES = ("Gamma", "Beta", "Gumbel", "Exponential", "HalfNormal", "Geometric", *_MULTIVARIATE)


def _estimated_roots(
    base: Distribution, parameters: dict[str, Tensor], num_draws: int
) -> Iterator[Cotangent]:
    """S for distributions without a closed form.

    F is the sum over y of p(y) s s' if y takes few values, else the mean of s s' over draws, which
    is positive semi-definite by construction. The network is not evaluated.
    """
    shapes = _event_shapes(base, parameters)
    size = sum(shape.numel() for shape in shapes.values())
    total: Any = 0.0
    numbers = sum(v.numel() for v in parameters.values())
    for values, weights in _weighted_values(base, numbers, num_draws):
        found = scores(base, parameters, values, many=True).values()
        rows = torch.cat([v.reshape(len(values), *base.batch_shape, -1) for v in found], -1)
        if size > num_draws:  # the scores themselves are fewer columns than a root of F
            for column in rows * weights.sqrt()[..., None]:
                yield _cotangent(base, column, shapes)
        else:
            total = total + torch.einsum("d...i,d...j->...ij", rows * weights[..., None], rows)
    for column in _root(total) if size <= num_draws else ():
        yield _cotangent(base, column, shapes)


def _weighted_values(
    base: Distribution, numbers: int, num_draws: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield blocks of values (d, *batch, *event) of the observation, with weights (d, *batch) or
    (d, 1...).

    :param numbers: the numbers of one score, which determine the size of a block.
    """
    size = max(1, min(num_draws, _NUMBERS_AT_ONCE // max(1, numbers)))
    support = _few_values(base)
    if support is None:
        ones = (1,) * len(base.batch_shape)
        for start in range(0, num_draws, size):
            try:
                values = base.sample((min(size, num_draws - start),))
            except NotImplementedError as error:
                raise ValueError(_no_estimate(base, "be sampled")) from error
            like = next(iter(parameters_of(base).values())).detach()
            yield values, like.new_full((len(values), *ones), 1.0 / num_draws)
        return
    for values in support.split(size):
        yield values, base.log_prob(values).detach().exp()


def _few_values(base: Any) -> Tensor | None:
    if not base.has_enumerate_support or base.event_shape:
        return None
    try:
        values = base.enumerate_support()
    except NotImplementedError:  # their number differs between data
        return None
    return values if len(values) <= ESTIMATION_DRAWS else None


def scores(base: Distribution, names: Iterable[str], values: Tensor, *, many: bool) -> Cotangent:
    """d log p(value) / d theta for some of the parameters, of their shapes.

    :param many: whether values and results have a leading dimension of draws.
    :raises ValueError: if the density has no gradient in any of the parameters.
    """
    batch = (len(values), *base.batch_shape) if many else tuple(base.batch_shape)
    draws = batch[:1] if many else ()
    every = {n: v.detach().expand(*draws, *v.shape) for n, v in parameters_of(base).items()}
    with torch.enable_grad():
        leaves = {name: every[name].clone().requires_grad_() for name in names}
        again = rebuilt(base, every | leaves)
        if tuple(again.batch_shape) != batch:
            raise ValueError(_no_estimate(base, "be given a batch of parameters"))
        total = again.log_prob(values).sum()
    if not total.requires_grad:
        raise ValueError(
            f"the density of {type(base).__name__} has no gradient in its {', '.join(leaves)}, so "
            "that it has no Fisher information: observe a distribution whose density depends on "
            "the latents"
        )
    found = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, found, strict=True))
