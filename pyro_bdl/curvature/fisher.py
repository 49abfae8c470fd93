"""Fisher information of observation distributions in their own parameters, as square roots.

For one datum with parameters theta, F = E[s s'] with the score s = d log p(y | theta) / d theta.
The generalized Gauss-Newton matrix is sum_n J_n' F_n J_n, with J the Jacobian of theta in the
latents. Any parametrization gives the same matrix, since F is covariant. F = S S', and each column
of S is a cotangent that is back-propagated through the network (Schraudolph 2002; Martens 2020).
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints, kl_divergence

from pyro_bdl.distributions.copies import masks_of
from pyro_bdl.distributions.families import Cotangent, Roots, family_of, name_of
from pyro_bdl.distributions.parameters import base_distribution, parameters_of, rebuilt
from pyro_bdl.program.layout import support_bounds
from pyro_bdl.program.trace import Site
from pyro_bdl.utils.precision import double

ESTIMATION_DRAWS = 512  # draws per datum if the information has no closed form
_DIVERGENCE_UP_TO = 256  # the largest number of parameters of a cell
_NUMBERS_AT_ONCE = 2**18


def site_parameters(site: Site) -> dict[str, Tensor]:
    """The tensors of a site's distribution that depend on the latents, name -> (batch, *event)."""
    base = base_distribution(site.distribution)
    return {name: value for name, value in parameters_of(base).items() if value.requires_grad}


def num_data(site: Site) -> int:
    """The size of the leading dimension of an observed site; 1 if there is none."""
    shape = base_distribution(site.distribution).batch_shape
    return shape[0] if shape else 1


def check_scales(sites: Mapping[str, Site]) -> None:
    """Check that all observed sites scale a minibatch in the same way.

    :raises ValueError: if an observed site treats a minibatch as all data, while the program scales
        another site with the same number of rows up to all data.
    """
    scaled = [site for site in sites.values() if site.subsampling != 1]
    for name, site in sites.items():
        rows = num_data(site)
        partners = [other for other in scaled if num_data(other) == rows > 1]
        if site.subsampling == 1 and partners:
            raise ValueError(
                f"the observed site '{name}' treats a minibatch of {rows} rows as all of its data, "
                "so that they would have too little weight: give its plate "
                f"size={round(rows * partners[0].subsampling)}"
            )


def check_information(name: str, site: Site) -> None:
    """Check that an observed site's parameters determine its Fisher information.

    :raises ValueError: if its support depends on the latents, or its density depends on them in
        other ways than through its parameters.
    """
    base: Any = base_distribution(site.distribution)
    used, kind = site_parameters(site), type(base).__name__
    if not used:
        return
    advice = 'use structure="full" with curvature="hessian", or observe another distribution'
    if any(bound.requires_grad for bound in support_bounds(_support(base))):
        raise ValueError(
            f"the support of site '{name}' ({kind}) depends on the latents, so that there is no "
            f"Fisher information: {advice}"
        )
    if site.value.requires_grad:
        raise ValueError(
            f"the targets of site '{name}' depend on the latents, so that there is no Fisher "
            "information: write what the latents determine as a parameter of the distribution, as "
            'in Normal(f, noise) with obs=y for y - f, or use structure="full" with '
            'curvature="hessian"'
        )
    everything = {key: value.detach() for key, value in parameters_of(base).items()}
    with torch.enable_grad():
        found = _of_parameters(base, everything).log_prob(site.value)
    expected = base.log_prob(site.value).detach()
    slack = max(1e-3, 32 * torch.finfo(expected.dtype).eps)
    if found.requires_grad or not torch.allclose(
        found.to(expected), expected, rtol=slack, atol=slack, equal_nan=True
    ):
        raise ValueError(
            f"the density of site '{name}' ({kind}) is not determined by its parameters "
            f"{', '.join(everything)} alone, so that its Fisher information is not known: {advice}"
        )


def _support(base: Any) -> Any:
    try:
        return base.support
    except NotImplementedError:
        return constraints.real


def exact_columns(site: Site, num_draws: int = ESTIMATION_DRAWS) -> Iterator[Cotangent]:
    """The columns of S for all data at once; F is exact if it has a closed form.

    If a datum has several cells (outputs, pixels), which are independent given the parameters, each
    cell has its own columns.

    :param num_draws: observations drawn per datum if F has no closed form.
    """
    base = base_distribution(site.distribution)
    cells = torch.Size(base.batch_shape[1:])  # a plain tuple for zero-inflated ones
    for column in cell_columns(site, num_draws):
        if cells.numel() == 1:
            yield column
            continue
        for mask in _one_cell_at_a_time(base.batch_shape, next(iter(column.values()))):
            yield {name: _scaled(value, mask) for name, value in column.items()}


def cell_columns(site: Site, num_draws: int = ESTIMATION_DRAWS) -> Iterator[Cotangent]:
    """The columns of S for every cell (output, pixel) of every datum at once, each with its weight.

    :param num_draws: observations drawn per cell where F has no closed form.
    """
    base = base_distribution(site.distribution)
    used = {name: value.detach() for name, value in site_parameters(site).items()}
    weight, curvature = cell_weights(site), family_of(base).curvature
    if curvature is None:
        roots = cell_roots(base, used, num_draws)
    else:
        roots = curvature(base, site.value, used)
    for root in roots:
        yield {name: _scaled(value, weight) for name, value in root.items()}


def sampled_columns(site: Site, num_draws: int) -> Iterator[Cotangent]:
    """Scores of drawn observations, one column for each draw: E[S S'] = F; of a family with a
    curvature of its own its columns with random signs."""
    weight = cell_weights(site) / math.sqrt(num_draws)
    base = base_distribution(site.distribution)
    if family_of(base).curvature is not None:  # no draw is known as the datum is
        roots = list(cell_columns(site))
        for _ in range(num_draws):
            signs = [torch.randint_like(weight, 2) * 2 - 1 for _ in roots]
            pairs = list(zip(roots, signs, strict=True))
            yield {
                k: sum(_scaled(root[k], sign) for root, sign in pairs) / math.sqrt(num_draws)  # type: ignore[misc]
                for k in roots[0]
            }
        return
    for _ in range(num_draws):
        yield {k: _scaled(v, weight) for k, v in _score(site, base.sample()).items()}


def empirical_columns(site: Site) -> Iterator[Cotangent]:
    """The score of the observed values, as one column, for the empirical Fisher information."""
    weight = cell_weights(site)
    yield {name: _scaled(v, weight) for name, v in _score(site, site.value).items()}


def cell_weights(site: Site) -> Tensor:
    """Square roots of the cells' weights (temperatures and masks), with the batch shape."""
    base = base_distribution(site.distribution)
    like = next(iter(parameters_of(base).values()))
    whole = site.distribution.batch_shape
    factors: list[Any] = [(site.scale, whole), (1.0 / site.subsampling, whole)]
    factors += [] if site.mask is None else [(site.mask, whole)]
    factors += masks_of(site.distribution)
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
    base = base_distribution(site.distribution)
    return _scores(base, site_parameters(site), value)


# ------------------------------------------------------------------------- roots of a distribution


def cell_roots(
    base: Distribution, parameters: dict[str, Tensor], num_draws: int = ESTIMATION_DRAWS
) -> Roots:
    """Columns of S with S S' = F for each cell of a distribution.

    F has the closed form of ``distributions/families.py``; or it is the Hessian of a divergence
    that is named there, up to 256 parameters; or a sum for at most 512 possible observations, or
    counts that hardly exceed 511; or else it is estimated from drawn ones. A bijection of the
    observation does not change it.

    :param base: the distribution, without ``to_event`` and masks.
    :param parameters: its tensors that depend on the latents; the others count as known.
    :param num_draws: observations drawn per datum if F has no closed form.
    :raises ValueError: if the density has no gradient in any of the parameters.
    """
    family, start = family_of(base), "base_dist."
    if name_of(base) == "TransformedDistribution":
        inner = base_distribution(base.base_dist)  # type: ignore[attr-defined]
        if inner.batch_shape == base.batch_shape and all(n.startswith(start) for n in parameters):
            own = {name.removeprefix(start): value for name, value in parameters.items()}
            roots = cell_roots(inner, own, num_draws)
            return ({start + k: v for k, v in root.items()} for root in roots)
    closed = None if family.information is None else family.information(base, parameters)
    if closed is not None:
        return closed
    size = sum(shape.numel() for shape in _event_shapes(base, parameters).values())
    if family.divergence and size <= _DIVERGENCE_UP_TO:
        return _by_divergence(base, parameters)
    return _estimated_roots(base, parameters, num_draws)


def _by_divergence(base: Any, parameters: dict[str, Tensor]) -> Roots:
    """F = d^2 KL(p_0 || p_theta) / d theta^2 at theta = theta_0, in float64 (Kullback 1959)."""
    every = {name: double(value.detach()) for name, value in parameters_of(base).items()}
    with torch.enable_grad():
        leaves = {name: every[name].clone().requires_grad_() for name in parameters}
        moved = _of_parameters(base, every | leaves)
        total = kl_divergence(_of_parameters(base, every), moved).sum()
        gradient = torch.autograd.grad(total, [*leaves.values()], create_graph=True)
        rows = [
            torch.autograd.grad(
                entry.sum(), [*leaves.values()], retain_graph=True, materialize_grads=True
            )
            for entry in _of_cells(base, gradient).unbind(-1)
        ]
    information = torch.stack([_of_cells(base, row) for row in rows], -1)
    return _root(information, base, parameters)


def _root(information: Tensor, base: Any, parameters: dict[str, Tensor]) -> Roots:
    """The columns of S with S S' = F, for F (*batch, k, k), as many as parameters that it has."""
    size = information.shape[-1]
    diagonal = information.diagonal(dim1=-2, dim2=-1).reshape(-1, size)
    used = diagonal.any(0).nonzero()[:, 0]
    values, vectors = torch.linalg.eigh(information[..., used[:, None], used])
    columns = information.new_zeros(*information.shape[:-1], len(used))
    columns[..., used, :] = vectors * values.clamp(min=0.0).sqrt()[..., None, :]
    return [_cotangent(base, column, parameters) for column in columns.unbind(-1)]


def _event_shapes(base: Any, parameters: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: v.shape[len(base.batch_shape) :] for name, v in parameters.items()}


def _of_cells(base: Any, values: Iterable[Tensor]) -> Tensor:
    """Values of the parameters side by side for each cell, (*batch, k)."""
    return torch.cat([value.reshape(*base.batch_shape, -1) for value in values], -1)


def _cotangent(base: Any, column: Tensor, parameters: dict[str, Tensor]) -> Cotangent:
    shapes = _event_shapes(base, parameters)
    parts = column.split([shape.numel() for shape in shapes.values()], -1)
    return {
        name: part.reshape(parameters[name].shape).to(parameters[name])
        for name, part in zip(shapes, parts, strict=True)
    }


def _estimated_roots(base: Any, parameters: dict[str, Tensor], num_draws: int) -> Roots:
    """S for distributions without a closed form.

    F is the sum over y of p(y) s s' if y takes few values, or counts that hardly exceed 511, else
    the mean of s s' over draws, which is positive semi-definite by construction. The network is not
    evaluated.
    """
    size = sum(shape.numel() for shape in _event_shapes(base, parameters).values())
    total: Any = 0.0
    for values, weights in _weighted_values(base, parameters, num_draws):
        scores = _scores(base, parameters, values, draws=values.shape[:1]).values()
        rows = torch.cat([v.reshape(len(values), *base.batch_shape, -1) for v in scores], -1)
        weights = torch.as_tensor(weights, device=rows.device).to(rows)[..., None]
        if size > num_draws:  # the scores themselves are fewer columns than a root of F
            yield from (_cotangent(base, row, parameters) for row in rows * weights.sqrt())
        else:
            total = total + torch.einsum("d...i,d...j->...ij", rows * weights, rows)
    if size <= num_draws:
        yield from _root(total, base, parameters)


def _weighted_values(
    base: Any, parameters: dict[str, Tensor], num_draws: int
) -> Iterator[tuple[Tensor, Any]]:
    """Yield blocks of values (d, *batch, *event) of the observation, with their weights."""
    numbers = sum(v.numel() for v in parameters.values())
    size = max(1, min(num_draws, _NUMBERS_AT_ONCE // max(1, numbers)))
    support = _few_values(base)
    if support is None and _are_counts(base):
        support = _counts_with_all_mass(base, size)
    for values in () if support is None else support.split(size):
        yield values, base.log_prob(values).detach().exp()
    for start in range(0, num_draws if support is None else 0, size):
        try:
            values = base.sample((min(size, num_draws - start),))
        except NotImplementedError as error:
            raise ValueError(_no_estimate(base, "be sampled")) from error
        yield values, 1.0 / num_draws


def _are_counts(base: Any) -> bool:
    return _support(base) is constraints.nonnegative_integer and not base.event_shape


def _counts_with_all_mass(base: Any, size: int) -> Tensor | None:
    """The counts up to 511, ``(512, *batch)``, where all cells have all but 1e-6 of their
    probability there."""
    like = next(iter(parameters_of(base).values()))
    counts = torch.arange(ESTIMATION_DRAWS, dtype=like.dtype, device=like.device)
    counts = counts.reshape(-1, *(1,) * len(base.batch_shape)).expand(-1, *base.batch_shape)
    with torch.no_grad():
        parts = [base.log_prob(part).exp().sum(0) for part in counts.split(size)]
    return counts if bool((torch.stack(parts).sum(0) > 1 - 1e-6).all()) else None


def _few_values(base: Any) -> Tensor | None:
    if not base.has_enumerate_support or base.event_shape:
        return None
    try:
        values = base.enumerate_support()
    except NotImplementedError:  # their number differs between data
        return None
    return values if len(values) <= ESTIMATION_DRAWS else None


def _scores(
    base: Any, names: Iterable[str], values: Tensor, *, draws: tuple[int, ...] = ()
) -> Cotangent:
    """d log p(value) / d theta for some of the parameters, (*draws, *shape).

    :param draws: leading dimensions of the values.
    :raises ValueError: if the density has no gradient in any of the parameters.
    """
    every = {n: v.detach().expand(*draws, *v.shape) for n, v in parameters_of(base).items()}
    with torch.enable_grad():
        leaves = {name: every[name].clone().requires_grad_() for name in names}
        again = _of_parameters(base, every | leaves)
        if (*again.batch_shape,) != (*draws, *base.batch_shape):
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


def _of_parameters(base: Any, parameters: dict[str, Tensor]) -> Any:
    """A distribution of the same class with other parameters."""
    try:
        return rebuilt(base, parameters)
    except (TypeError, ValueError) as error:
        missing = f"be made again from its parameters ({', '.join(parameters)})"
        raise ValueError(_no_estimate(base, missing)) from error


def _no_estimate(base: Any, missing: str) -> str:
    return (
        f"the Fisher information of {type(base).__name__} has no closed form here, and it cannot "
        f'{missing} to estimate it; use structure="full" with curvature="hessian"'
    )
