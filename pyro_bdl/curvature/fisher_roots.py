"""Roots of the Fisher information of one observation: closed forms, sums or estimates."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from pyro_bdl.distributions.take_apart import (
    base_distribution,
    parameters_of_any,
    rebuild,
    take_apart,
)

Cotangent = dict[str, Tensor]
Roots = Iterable[Cotangent]

ESTIMATION_DRAWS = 512  # draws per datum if the information has no closed form
_CLOSED_FORM_UP_TO = 2048  # the largest number of columns of a multivariate Normal's information
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

    F has a closed form for Normal, LogNormal, Laplace, Cauchy, Gumbel, StudentT, Gamma, Beta,
    Exponential, HalfNormal, Poisson, Bernoulli, Binomial and NegativeBinomial (where the count is
    known), Categorical, OneHotCategorical, MultivariateNormal and LowRankMultivariateNormal (up to
    63 dimensions, if more than the mean is latent). If there are at most 512 possible observations,
    F is a sum over them. For all other distributions F is estimated from drawn observations.

    :param base: the distribution, without ``to_event`` and masks.
    :param parameters: its tensors that depend on the latents; the others count as known.
    :param num_draws: observations drawn per datum if F has no closed form.
    :raises ValueError: if the density has no gradient in any of the parameters.
    """
    kind = type(base).__name__
    roots: Roots | None = None
    if kind == "TransformedDistribution":
        roots = _transformed(base, parameters, num_draws)
    elif kind in _CLOSED_FORMS:
        function, covered = _CLOSED_FORMS[kind]
        roots = function(base, parameters) if parameters.keys() <= covered else None
    return _estimated_roots(base, parameters, num_draws) if roots is None else roots


def _diagonal(information: dict[str, Tensor], parameters: dict[str, Tensor]) -> list[Cotangent]:
    return [{name: information[name].sqrt()} for name in information if name in parameters]


def _pair(
    first: tuple[str, Tensor], second: tuple[str, Tensor], cross: Tensor, parameters: dict
) -> list[Cotangent]:
    """Columns of S with [[a, c], [c, b]] = S S', restricted to the given parameters."""
    (x, a), (y, b) = first, second
    if x not in parameters or y not in parameters:
        return _diagonal({x: a, y: b}, parameters)
    root = a.sqrt()
    return [{x: root, y: cross / root}, {y: (b - cross.square() / a).clamp(min=0.0).sqrt()}]


def _location_scale(of_loc: float, of_scale: float) -> Callable[..., Roots]:
    """The information of a symmetric location-scale family, in units of 1 / scale^2."""

    def roots(base: Any, parameters: dict[str, Tensor]) -> Roots:
        precision = base.scale.detach().square().reciprocal()
        return _diagonal({"loc": of_loc * precision, "scale": of_scale * precision}, parameters)

    return roots


def _gumbel(base: Any, parameters: dict[str, Tensor]) -> Roots:
    precision = base.scale.detach().square().reciprocal()
    rest = 1.0 - 0.5772156649015329
    scale = precision * (math.pi**2 / 6 + rest**2)
    return _pair(("loc", precision), ("scale", scale), -rest * precision, parameters)


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
    roots = _diagonal({"loc": loc}, parameters)
    return roots + _pair(("scale", of_scale), ("df", of_df.clamp(min=0.0)), cross, parameters)


def _gamma(base: Any, parameters: dict[str, Tensor]) -> Roots:
    shape, rate = base.concentration.detach(), base.rate.detach()
    first = ("rate", shape / rate.square())
    second = ("concentration", torch.special.polygamma(1, shape))
    return _pair(first, second, -1.0 / rate, parameters)


def _beta(base: Any, parameters: dict[str, Tensor]) -> Roots:
    a, b = base.concentration1.detach(), base.concentration0.detach()
    both = torch.special.polygamma(1, a + b)
    first = ("concentration1", torch.special.polygamma(1, a) - both)
    second = ("concentration0", torch.special.polygamma(1, b) - both)
    return _pair(first, second, -both, parameters)


def _exponential(base: Any, parameters: dict[str, Tensor]) -> Roots:
    return _diagonal({"rate": base.rate.detach().square().reciprocal()}, parameters)


def _half_normal(base: Any, parameters: dict[str, Tensor]) -> Roots:
    return _diagonal({"scale": 2.0 * base.scale.detach().square().reciprocal()}, parameters)


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


def _multivariate_normal(base: Any, parameters: dict[str, Tensor]) -> Roots | None:
    """The information P = Sigma^-1 of the mean, and tr(P dSigma P dSigma) / 2 of Sigma = L L'.

    With the lower triangular M = L^-1 dL the latter is sum_ij M_ij^2 + sum_i M_ii^2.
    """
    inverse = torch.linalg.inv(base.scale_tril.detach())  # F = L^-T L^-1
    inverse = inverse.expand(*base.batch_shape, *inverse.shape[-2:])
    if not _is_small(inverse.shape[-1], "scale_tril" in parameters):
        return None

    def of_scale(row: int, column: int) -> Cotangent:
        root = torch.zeros_like(inverse)
        root[..., column] = inverse[..., row, :] * (math.sqrt(2.0) if row == column else 1.0)
        return {"scale_tril": root.tril()}

    return _of_mean_and_covariance(inverse, parameters, "scale_tril", of_scale)


def _low_rank_multivariate_normal(base: Any, parameters: dict[str, Tensor]) -> Roots | None:
    """The information of a multivariate Normal with Sigma = W W' + D."""
    factor = base.cov_factor.detach()
    inverse = torch.linalg.inv(base.scale_tril.detach())
    inverse = inverse.expand(*base.batch_shape, *inverse.shape[-2:])
    if not _is_small(inverse.shape[-1], bool(parameters.keys() & {"cov_factor", "cov_diag"})):
        return None

    def of_scale(row: int, column: int) -> Cotangent:
        first, second = inverse[..., row, :], inverse[..., column, :]
        weight = math.sqrt(0.5) if row == column else 1.0
        root = {"cov_diag": weight * first * second}
        through_first = (second[..., None, :] @ factor) * first[..., :, None]
        through_second = (first[..., None, :] @ factor) * second[..., :, None]
        root["cov_factor"] = weight * (through_first + through_second)
        return {name: value for name, value in root.items() if name in parameters}

    return _of_mean_and_covariance(inverse, parameters, "cov_", of_scale)


def _is_small(size: int, has_scale: bool) -> bool:
    return not has_scale or size * (size + 1) // 2 <= _CLOSED_FORM_UP_TO


def _of_mean_and_covariance(
    inverse: Tensor, parameters: dict[str, Tensor], scale: str, of_scale: Callable
) -> Iterator[Cotangent]:
    """Yield columns one by one, since there are d (d + 1) / 2 of them, with d x d numbers per
    datum.

    :param inverse: L^-1 for the covariance L L'.
    :param scale: the prefix of the names of the covariance's tensors.
    :param of_scale: the column of an entry on or below the diagonal.
    """
    size = inverse.shape[-1]
    if "loc" in parameters:
        for k in range(size):
            yield {"loc": inverse[..., k, :]}
    if any(name.startswith(scale) for name in parameters):
        for row in range(size):
            for column in range(row + 1):
                yield of_scale(row, column)


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
    "Gumbel": (_gumbel, frozenset({"loc", "scale"})),
    "StudentT": (_student_t, frozenset({"df", "loc", "scale"})),
    "Gamma": (_gamma, frozenset({"concentration", "rate"})),
    "Beta": (_beta, frozenset({"concentration1", "concentration0"})),
    "Exponential": (_exponential, frozenset({"rate"})),
    "HalfNormal": (_half_normal, frozenset({"scale"})),
    "Poisson": (_poisson, frozenset({"rate"})),
    "Bernoulli": (_binomial, frozenset({"probs", "logits"})),
    "Binomial": (_binomial, frozenset({"probs", "logits"})),
    "NegativeBinomial": (_negative_binomial, frozenset({"probs", "logits"})),
    "Categorical": (_categorical, frozenset({"probs", "logits"})),
    "OneHotCategorical": (_categorical, frozenset({"probs", "logits"})),
    "MultivariateNormal": (_multivariate_normal, frozenset({"loc", "scale_tril"})),
    "LowRankMultivariateNormal": (
        _low_rank_multivariate_normal,
        frozenset({"loc", "cov_factor", "cov_diag"}),
    ),
}


def _estimated_roots(
    base: Distribution, parameters: dict[str, Tensor], num_draws: int
) -> Iterator[Cotangent]:
    """S for distributions without a closed form.

    F is the sum over y of p(y) s s' if y takes few values, else the mean of s s' over draws, which
    is positive semi-definite by construction. The network is not evaluated.
    """
    shapes = {name: v.shape[len(base.batch_shape) :] for name, v in parameters.items()}
    sizes = [shape.numel() for shape in shapes.values()]

    def cotangent(column: Tensor) -> Cotangent:
        parts = zip(shapes.items(), column.split(sizes, -1), strict=True)
        return {name: part.reshape((*base.batch_shape, *shape)) for (name, shape), part in parts}

    total: Any = 0.0
    numbers = sum(v.numel() for v in parameters.values())
    for values, weights in _weighted_values(base, numbers, num_draws):
        scores = _scores(base, tuple(parameters), values)
        if sum(sizes) > num_draws:  # the scores themselves are fewer columns than a root of F
            yield from map(cotangent, scores * weights.sqrt()[..., None])
        else:
            squares = torch.einsum("d...i,d...j->...ij", scores * weights[..., None], scores)
            total = total + squares
    if sum(sizes) <= num_draws:
        values, vectors = torch.linalg.eigh(total)
        columns = vectors * values.clamp(min=0.0).sqrt()[..., None, :]
        yield from map(cotangent, columns.unbind(-1))


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
            like = next(iter(parameters_of_any(base).values())).detach()
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


def _scores(base: Distribution, names: tuple[str, ...], values: Tensor) -> Tensor:
    """d log p(value) / d theta, (d, *batch, k)."""
    count = len(values)
    every = {n: v.detach().expand(count, *v.shape) for n, v in parameters_of_any(base).items()}
    with torch.enable_grad():
        leaves = {name: every[name].clone().requires_grad_() for name in names}
        again = rebuilt(base, every | leaves)
        if again.batch_shape != (count, *base.batch_shape):
            raise ValueError(_no_estimate(base, "be given a batch of parameters"))
        log_prob = again.log_prob(values).sum()
        found: Any = [None] * len(names)
        if log_prob.requires_grad:
            found = torch.autograd.grad(log_prob, list(leaves.values()), allow_unused=True)
    if all(gradient is None for gradient in found):
        raise ValueError(
            f"the density of {type(base).__name__} has no gradient in its {', '.join(names)}, so "
            "that it has no Fisher information: observe a distribution whose density depends on "
            "the latents"
        )
    pairs = zip(leaves.values(), found, strict=True)
    scores = [torch.zeros_like(leaf) if g is None else g for leaf, g in pairs]
    return torch.cat([s.reshape(count, *base.batch_shape, -1) for s in scores], -1)
