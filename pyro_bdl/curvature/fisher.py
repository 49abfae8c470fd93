"""Fisher information of observation distributions in their own parameters, as square roots.

For one datum with parameters theta, F = E[s s'] with the score s = d log p(y | theta) / d theta.
The generalized Gauss-Newton matrix is sum_n J_n' F_n J_n, with J the Jacobian of theta in the
latents. Any parametrization gives the same matrix, since F is covariant. F = S S', and each column
of S is a cotangent that is back-propagated through the network (Schraudolph 2002; Martens 2020).
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_bdl.curvature.fisher_roots import ESTIMATION_DRAWS, Cotangent, cell_roots, rebuilt, scores
from pyro_bdl.distributions.copies import masks_of
from pyro_bdl.distributions.take_apart import (
    base_distribution,
    parameters_of,
)
from pyro_bdl.program.layout import support_bounds
from pyro_bdl.program.trace import Site


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
    everything = {key: value.detach() for key, value in parameters_of(base).items()}
    with torch.enable_grad():
        found = rebuilt(base, everything).log_prob(site.value)
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
    weight = cell_weights(site)
    for root in cell_roots(base, used, num_draws):
        yield {name: _scaled(value, weight) for name, value in root.items()}


def sampled_columns(site: Site, num_draws: int) -> Iterator[Cotangent]:
    """Scores of drawn observations, one column for each draw: E[S S'] = F."""
    weight = cell_weights(site) / math.sqrt(num_draws)
    base = base_distribution(site.distribution)
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
    return scores(base, site_parameters(site), value, many=False)
