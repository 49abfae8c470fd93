"""The gradient of a log likelihood and the squared gradients of its data, in a training step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.curvature.fisher import site_parameters
from pyro_bdl.curvature.jacobian.linearization import Linearization
from pyro_bdl.curvature.site_jacobians import site_jacobians, site_pullback
from pyro_bdl.curvature.structures.diagonal import DiagonalCurvature
from pyro_bdl.distributions.copies import masks_of
from pyro_bdl.program.trace import Site


def gradient_and_squares(
    likelihood: Tensor, wanted: Sequence[Tensor], at: Linearization, config: CurvatureConfig
) -> tuple[list[Tensor], Tensor]:
    """Return the gradients of a batch's log likelihood and the diagonal of its curvature, (P,).

    The curvature is scaled up to all data like the log likelihood. For the empirical Fisher of one
    observed site, if the log likelihood is that of ``at``, one backward pass gives both.

    :param likelihood: a scalar.
    :param wanted: the tensors in which gradients are taken.
    :param at: the program at the same draw.
    """
    name = _only_site(at) if at.training and config.curvature == "empirical-fisher" else None
    if name is None:
        return _gradients(likelihood, wanted), _squares(at, config)
    site = at.run.observed[name]
    parameters = site_parameters(site)
    pullback = site_pullback(at, name, tuple(parameters))
    inputs = [*parameters.values(), *(use.edge for use in at.uses)]
    found = torch.autograd.grad(
        likelihood, [*wanted, *inputs], retain_graph=True, allow_unused=True
    )
    score = found[len(wanted) :]
    column = _filled(score[: len(parameters)], list(parameters.values()))
    diagonal = DiagonalCurvature(len(at.vector), at.vector)
    diagonal.add(pullback.jacobian([column], [score[len(parameters) :]]))
    diagonal.scale(1.0 / site.subsampling)  # it enters both factors of a square
    return _filled(found[: len(wanted)], wanted), diagonal.diagonal()


def _gradients(output: Tensor, wanted: Sequence[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(output, wanted, retain_graph=True, allow_unused=True)
    return _filled(found, wanted)


def _filled(gradients: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    pairs = zip(gradients, like, strict=True)
    return [torch.zeros_like(value) if g is None else g for g, value in pairs]


def _only_site(at: Linearization) -> str | None:
    """Return the only observed site, if there are no factors and its cells have no weights."""
    run = at.run
    if len(run.observed) != 1 or run.factors:
        return None
    ((name, site),) = run.observed.items()
    return name if _counts_plainly(site) and site_parameters(site) else None


def _counts_plainly(site: Site) -> bool:
    """Return whether every cell counts once or not at all: no temperatures, and only Boolean
    masks."""
    if not isinstance(site.scale, float | int) or site.scale != site.subsampling:
        return False
    masks = [site.mask, *(mask for mask, _ in masks_of(site.distribution))]
    return all(not isinstance(mask, Tensor) or mask.dtype == torch.bool for mask in masks)


def _squares(at: Linearization, config: CurvatureConfig) -> Tensor:
    total = torch.zeros_like(at.vector)
    for name, site in at.run.observed.items():
        diagonal = DiagonalCurvature(len(at.vector), at.vector)
        for jacobian in site_jacobians(at, name, config):
            diagonal.add(jacobian)
        total += site.subsampling * diagonal.diagonal()
    return total
