"""Supports of latent sites and of targets."""

from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_bdl.distributions.copies import point_of
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.program.layout import support_bounds, transform_of
from pyro_bdl.program.trace import Run, Site
from pyro_bdl.utils.autograd import reaches
from pyro_bdl.utils.module_state import preserved_buffers
from pyro_bdl.utils.one_thread import Hidden
from pyro_bdl.utils.validation import listed


def check_fixed_supports(program: Any) -> None:
    """Check that supports with tensor bounds do not depend on other latents."""
    bounded = [site for site in program.latents.values() if support_bounds(site.support)]
    if not bounded or len(program.latents) < 2:
        return
    with torch.enable_grad(), Hidden(), preserved_buffers(program.modules):
        vector = program.unconstrain(program.initial).detach() + 0.5
        again = program.run(program.constrain(vector.requires_grad_())[0]).latents
    for site in bounded:
        before = support_bounds(site.support)
        after = support_bounds(again[site.name].distribution.support)
        moved = any(reaches(bound, [vector]) for bound in after)
        # what has no gradient, such as a step, is seen where it differs
        if moved or any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)):
            raise UnsupportedProgramError(
                f"the support of site '{site.name}' depends on other latents: sample it on a fixed "
                "support and rescale it in the program"
            )


def check_support(run: Run, *, first_row: int = 0) -> None:
    """Check that targets lie in the supports of their distributions.

    Supports with tensor bounds are not checked, since they may depend on the latents.

    :param first_row: the number of the run's first row, for messages.
    :raises ValueError: if a target is outside its distribution's support, such as a class that does
        not exist; the error names site and rows.
    :raises UnsupportedProgramError: if a Delta observes other values than its own.
    """
    for name, site in run.factors.items():
        if point_of(site.distribution) is not None and site.log_prob().isneginf().any():
            raise UnsupportedProgramError(
                f"the site '{name}' observes values that its Delta does not take, so that the "
                "program has no density: give it a distribution with some noise"
            )
    for name, site in run.observed.items():
        bad = _outside_support(site)
        if bad is None or not bad.any():
            continue
        rows = (bad.nonzero()[:, 0].unique() + first_row).tolist() if bad.dim() else []
        where = f" in rows {listed(rows)}" if rows else ""
        support = site.distribution.support  # type: ignore[attr-defined]
        raise ValueError(
            f"the targets of site '{name}' hold values outside the support of their distribution "
            f"({support}){where}: correct these targets"
        )


def nan_outside_support(total: Any, run: Run) -> Any:
    """Replace a log likelihood by NaN if a target is outside its distribution's support.

    Many densities are finite there. No value is read on the host, so this can be part of a graph.
    """
    for site in run.observed.values():
        bad = _outside_support(site)
        if bad is not None:
            total = total.masked_fill(bad.any(), torch.nan)  # torch.where would copy the number
    return total


def _outside_support(site: Site) -> Tensor | None:
    """A mask of the targets outside their support; None if there cannot be any, or if the support
    may depend on the latents."""
    if site.value is None:
        return None
    distribution: Any = site.distribution
    support = distribution.support
    if _is_real(support) or (support_bounds(support) and not support.is_discrete):
        return None
    bad = ~support.check(_of_shape(distribution, site.value))
    return bad if site.mask is None else bad & site.mask


def _is_real(support: Any) -> bool:
    while isinstance(support, (constraints.independent, constraints.MixtureSameFamilyConstraint)):
        support = support.base_constraint
    return support is constraints.real


def feasible_value(fn: Any, radius: float = 0.0) -> Tensor:
    """A value in the support of a distribution, which may be improper.

    :param radius: the unconstrained numbers are drawn uniformly from [-radius, radius].
    """
    transform, shape = transform_of(fn.support), fn.shape()
    if transform is not None:
        shape = transform.inverse_shape(shape)
    numbers = torch.empty(shape, device="cpu").uniform_(-radius, radius)
    return numbers if transform is None else transform(numbers)


def _of_shape(distribution: Any, value: Tensor) -> Tensor:
    """Expand a value that broadcasts against a distribution to its event shape."""
    missing = distribution.event_dim - value.dim()
    return value.expand(distribution.event_shape) if missing > 0 else value
