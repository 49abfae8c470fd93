"""Fisher information of observation distributions in their own parameters, as square roots.

For one datum with parameters theta, F = E[s s'] with the score s = d log p(y | theta) / d theta.
The generalised Gauss-Newton matrix is sum_n J_n' F_n J_n, with J the Jacobian of theta in the
latents; since F is covariant, any parametrisation gives the same matrix. F = S S', and each
column of S is a cotangent that is sent back through the network.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor
from torch.distributions import Distribution, Independent

from pyro_bdl.distributions.take_apart import parameters_of, rebuild, take_apart, without_wrappers
from pyro_bdl.program.trace import Site

Cotangent = dict[str, Tensor]
Roots = list[Cotangent]

_ESTIMATION_DRAWS = 512
_NUMBERS_AT_ONCE = 2**18


def site_parameters(site: Site) -> dict[str, Tensor]:
    """The distribution's tensors through which the latents act, name -> (batch, *event)."""
    base, _ = without_wrappers(site.distribution)
    return {name: value for name, value in parameters_of_any(base).items() if value.requires_grad}


def parameters_of_any(base: Any) -> dict[str, Tensor]:
    """The tensors that a distribution without wrappers is made of, by argument."""
    values = parameters_of(base)
    both = [name for name in vars(base) if name in ("probs", "logits")]
    if len(both) == 2 and values.keys() & set(both):  # the second was derived from the first since
        values = {**values, both[0]: getattr(base, both[0])}
        values.pop(both[1], None)
    if not values:  # of distributions made by a transform, which hold another one
        names = [name for name in base.arg_constraints if hasattr(base, name)]
        names = [name for name in names if name != "logits" or "probs" not in names]
        values = {name: getattr(base, name) for name in names}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def num_data(site: Site) -> int:
    """The size of the leading dimension of an observed site; 1 where there is none."""
    shape = without_wrappers(site.distribution)[0].batch_shape
    return shape[0] if shape else 1


def check_scales(sites: Mapping[str, Site]) -> None:
    """:raises ValueError: where an observed site takes a minibatch for all of its data, while the
    program scales another site with as many rows up to all of them."""
    scaled = [site for site in sites.values() if site.subsampling != 1]
    for name, site in sites.items():
        rows = num_data(site)
        partners = [other for other in scaled if num_data(other) == rows > 1]
        if site.subsampling == 1 and partners:
            raise ValueError(
                f"the observed site '{name}' takes a minibatch of {rows} rows for all of its data, "
                "so that they would count too little: give its plate "
                f"size={round(rows * partners[0].subsampling)}"
            )


def exact_columns(site: Site) -> Iterator[Cotangent]:
    """The columns of S for every datum at once, F being exact.

    Where a datum has several cells (outputs, pixels), independent given the parameters, each
    cell has columns of its own.
    """
    base, _ = without_wrappers(site.distribution)
    used = {name: value.detach() for name, value in site_parameters(site).items()}
    roots = cell_roots(base, used)
    weight = cell_weights(site)
    cells = torch.Size(base.batch_shape[1:])  # that of a zero-inflated one is a tuple
    for mask in _one_cell_at_a_time(base.batch_shape, next(iter(used.values()))):
        for root in roots:
            factor = weight if cells.numel() == 1 else weight * mask
            yield {name: _scaled(value, factor) for name, value in root.items()}


def sampled_columns(site: Site, num_draws: int) -> Iterator[Cotangent]:
    """Scores of drawn observations, one column for each draw: E[S S'] = F."""
    weight = cell_weights(site) / math.sqrt(num_draws)
    base, _ = without_wrappers(site.distribution)
    for _ in range(num_draws):
        yield {k: _scaled(v, weight) for k, v in _score(site, base.sample()).items()}


def empirical_columns(site: Site) -> Iterator[Cotangent]:
    """The score of what was observed: the empirical Fisher."""
    weight = cell_weights(site)
    yield {name: _scaled(v, weight) for name, v in _score(site, site.value).items()}


def cell_weights(site: Site) -> Tensor:
    """Square roots of the cells' weights, of the batch shape: temperatures and masks."""
    base, _ = without_wrappers(site.distribution)
    like = next(iter(parameters_of_any(base).values()))
    outer: Any = site.distribution
    factors = [(site.scale, outer.batch_shape), (1.0 / site.subsampling, outer.batch_shape)]
    factors += [] if site.mask is None else [(site.mask, outer.batch_shape)]
    while isinstance(outer, Independent | MaskedDistribution):
        if isinstance(outer, MaskedDistribution) and outer._mask is not None:
            factors.append((outer._mask, outer.batch_shape))
        outer = outer.base_dist
    weight = torch.ones(base.batch_shape, dtype=like.dtype, device=like.device)
    for factor, shape in factors:
        value = torch.as_tensor(factor, dtype=like.dtype, device=like.device)
        value = value.detach().expand(shape)
        weight = weight * value.reshape((*shape, *(1,) * (weight.dim() - len(shape))))
    return weight.sqrt()


def _scaled(value: Tensor, factor: Tensor) -> Tensor:
    return value * factor.reshape(factor.shape + (1,) * (value.dim() - factor.dim()))


def _one_cell_at_a_time(batch_shape: torch.Size, like: Tensor) -> Iterator[Tensor]:
    cells = torch.Size(batch_shape[1:])
    for number in range(cells.numel()):
        mask = torch.zeros(cells.numel(), dtype=like.dtype, device=like.device)
        mask[number] = 1.0
        yield mask.reshape(cells).expand(batch_shape)


def _score(site: Site, value: Tensor) -> Cotangent:
    base, _ = without_wrappers(site.distribution)
    used = site_parameters(site)
    everything = {name: v.detach() for name, v in parameters_of_any(base).items()}
    with torch.enable_grad():
        leaves = {name: everything[name].clone().requires_grad_() for name in used}
        again = rebuilt(base, everything | leaves)
        total = again.log_prob(value).sum()
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
    }


def rebuilt(base: Any, parameters: dict[str, Tensor]) -> Any:
    """A distribution of the same kind with other parameters, which may have more leading
    dimensions."""
    kind: Any = type(base)
    apart = take_apart(base)
    try:
        if apart is not None:
            return rebuild(apart[0], parameters)
        return kind(**parameters, validate_args=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the Fisher information of {kind.__name__} has no closed form here, and it cannot be "
            f"made again from its parameters ({', '.join(parameters)}) to estimate it; use "
            'structure="full" with curvature="hessian"'
        ) from error


# ------------------------------------------------------------------------------- closed forms


def cell_roots(base: Distribution, parameters: dict[str, Tensor]) -> Roots:
    """Columns of S with S S' = F for each cell of a distribution.

    :param base: the distribution, without ``to_event`` and masks.
    :param parameters: those of its tensors that matter; the others count as known.
    """
    function = _CLOSED_FORMS.get(type(base).__name__)
    roots = function(base, parameters) if function else None
    if roots is None:
        return _estimated_roots(base, parameters)
    return roots


def _diagonal(information: dict[str, Tensor], parameters: dict[str, Tensor]) -> Roots:
    return [{name: information[name].sqrt()} for name in information if name in parameters]


def _pair(
    first: tuple[str, Tensor], second: tuple[str, Tensor], cross: Tensor, parameters: dict
) -> Roots:
    """[[a, c], [c, b]] = S S', or only the known part of it."""
    (x, a), (y, b) = first, second
    if x not in parameters or y not in parameters:
        return _diagonal({x: a, y: b}, parameters)
    root = a.sqrt()
    return [{x: root, y: cross / root}, {y: (b - cross.square() / a).clamp(min=0.0).sqrt()}]


def _normal(base: Any, parameters: dict[str, Tensor]) -> Roots:
    precision = base.scale.detach().square().reciprocal()
    return _diagonal({"loc": precision, "scale": 2.0 * precision}, parameters)


def _laplace(base: Any, parameters: dict[str, Tensor]) -> Roots:
    precision = base.scale.detach().square().reciprocal()
    return _diagonal({"loc": precision, "scale": precision}, parameters)


def _cauchy(base: Any, parameters: dict[str, Tensor]) -> Roots:
    half = 0.5 * base.scale.detach().square().reciprocal()
    return _diagonal({"loc": half, "scale": half}, parameters)


def _gumbel(base: Any, parameters: dict[str, Tensor]) -> Roots:
    precision = base.scale.detach().square().reciprocal()
    rest = 1.0 - 0.5772156649015329
    scale = precision * (math.pi**2 / 6 + rest**2)
    return _pair(("loc", precision), ("scale", scale), -rest * precision, parameters)


def _student_t(base: Any, parameters: dict[str, Tensor]) -> Roots:
    """Lange, Little & Taylor 1989, appendix B."""
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


def _bernoulli(base: Any, parameters: dict[str, Tensor]) -> Roots:
    if "probs" in parameters:
        p = base.probs.detach()
        tiny = torch.finfo(p.dtype).tiny
        return _diagonal({"probs": (p * (1 - p)).clamp(min=tiny).reciprocal()}, parameters)
    return _diagonal({"logits": _logistic_variance(base.logits.detach())}, parameters)


def _binomial(base: Any, parameters: dict[str, Tensor]) -> Roots | None:
    if "total_count" in parameters:
        return None
    variance = _logistic_variance(base.logits.detach())
    return _diagonal({"logits": base.total_count.detach() * variance}, parameters)


def _negative_binomial(base: Any, parameters: dict[str, Tensor]) -> Roots | None:
    if "total_count" in parameters:
        return None
    information = base.total_count.detach() * torch.sigmoid(base.logits.detach())
    return _diagonal({"logits": information}, parameters)


def _logistic_variance(logits: Tensor) -> Tensor:
    return torch.sigmoid(logits) * torch.sigmoid(-logits)


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
    if "scale_tril" in parameters:
        return None
    inverse = torch.linalg.inv(base.scale_tril.detach())  # F = L^-T L^-1
    inverse = inverse.expand(*base.batch_shape, *inverse.shape[-2:])
    return [{"loc": inverse[..., k, :]} for k in range(inverse.shape[-1])]


def _transformed(base: Any, parameters: dict[str, Tensor]) -> Roots | None:
    """A bijection of the observation leaves the information as it is."""
    inner, start = without_wrappers(base.base_dist)[0], "base_dist."
    moved = not all(name.startswith(start) for name in parameters)
    if moved or inner.batch_shape != base.batch_shape:
        return None
    own = {name.removeprefix(start): value for name, value in parameters.items()}
    return [{start + k: v for k, v in root.items()} for root in cell_roots(inner, own)]


_CLOSED_FORMS: dict[str, Callable[[Any, dict[str, Tensor]], Roots | None]] = {
    "Normal": _normal,
    "LogNormal": _normal,
    "Laplace": _laplace,
    "Cauchy": _cauchy,
    "Gumbel": _gumbel,
    "StudentT": _student_t,
    "Gamma": _gamma,
    "Beta": _beta,
    "Exponential": _exponential,
    "HalfNormal": _half_normal,
    "Poisson": _poisson,
    "Bernoulli": _bernoulli,
    "Binomial": _binomial,
    "NegativeBinomial": _negative_binomial,
    "Categorical": _categorical,
    "OneHotCategorical": _categorical,
    "MultivariateNormal": _multivariate_normal,
    "TransformedDistribution": _transformed,
}


def _estimated_roots(base: Distribution, parameters: dict[str, Tensor]) -> Roots:
    """S for distributions without a closed form, from F = sum over y of p(y) s s' where y takes a
    few values, else the mean of s s' over many draws.

    The estimate is positive semi-definite by construction. Nothing goes through the network.
    """
    shapes = {name: v.shape[len(base.batch_shape) :] for name, v in parameters.items()}
    total: Any = 0.0
    for values, weights in _weighted_values(base, sum(v.numel() for v in parameters.values())):
        scores = _scores(base, tuple(parameters), values)
        total = total + torch.einsum("d...i,d...j->...ij", scores * weights[..., None], scores)
    values, vectors = torch.linalg.eigh(total)
    columns = vectors * values.clamp(min=0.0).sqrt()[..., None, :]
    roots = []
    for k in range(columns.shape[-1]):
        parts = columns[..., k].split([shape.numel() for shape in shapes.values()], -1)
        roots.append(
            {
                name: part.reshape((*base.batch_shape, *shape))
                for (name, shape), part in zip(shapes.items(), parts, strict=True)
            }
        )
    return roots


def _weighted_values(base: Distribution, numbers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Values (d, *batch, *event) of the observation and their weights (d, *batch) or (d, 1...),
    in blocks; ``numbers`` are those of one score."""
    size = max(1, min(_ESTIMATION_DRAWS, _NUMBERS_AT_ONCE // max(1, numbers)))
    support = _few_values(base)
    if support is None:
        ones = (1,) * len(base.batch_shape)
        for start in range(0, _ESTIMATION_DRAWS, size):
            values = base.sample((min(size, _ESTIMATION_DRAWS - start),))
            like = next(iter(parameters_of_any(base).values())).detach()
            yield values, like.new_full((len(values), *ones), 1.0 / _ESTIMATION_DRAWS)
        return
    for values in support.split(size):
        yield values, base.log_prob(values).detach().exp()


def _few_values(base: Any) -> Tensor | None:
    if not base.has_enumerate_support or base.event_shape:
        return None
    try:
        values = base.enumerate_support()
    except NotImplementedError:  # as many as differ from datum to datum
        return None
    return values if len(values) <= _ESTIMATION_DRAWS else None


def _scores(base: Distribution, names: tuple[str, ...], values: Tensor) -> Tensor:
    """d log p(value) / d theta, (d, *batch, k)."""
    count = len(values)
    every = {n: v.detach().expand(count, *v.shape) for n, v in parameters_of_any(base).items()}
    with torch.enable_grad():
        leaves = {name: every[name].clone().requires_grad_() for name in names}
        log_prob = rebuilt(base, every | leaves).log_prob(values).sum()
        scores = torch.autograd.grad(log_prob, list(leaves.values()))
    return torch.cat([s.reshape(count, *base.batch_shape, -1) for s in scores], -1)
