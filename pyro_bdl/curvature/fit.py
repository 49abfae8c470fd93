"""Curvature of a program's log likelihood over data, computed in passes over batches."""

import functools
from typing import Any

import torch

from pyro_bdl.curvature.at import At
from pyro_bdl.curvature.automatic_structure import count_rows
from pyro_bdl.curvature.config import CurvatureConfig, check_memory
from pyro_bdl.curvature.fisher import check_information
from pyro_bdl.curvature.jacobian.linearization import Linearization
from pyro_bdl.curvature.likelihood_sums import LikelihoodSums
from pyro_bdl.curvature.linearized_data import GaussNewtonProducts
from pyro_bdl.curvature.site_jacobians import fisher_jacobians
from pyro_bdl.program.batches import Batches
from pyro_bdl.utils.progress import shown
from pyro_bdl.utils.random_state import set_torch_states, torch_states

SCALED_UP = (
    "the program states more data than it was given, so that each part is scaled up to all of them "
    "and parts do not add up: pass all data to laplace_approximation as an iterable of batches, or "
    "leave num_data out of the program"
)


@torch.enable_grad()
def fit_curvature(
    at: At,
    data: Any,
    config: CurvatureConfig,
    *,
    before: Any = None,
    progress: bool | None = None,
) -> LikelihoodSums:
    """Compute the curvature of minus the tempered log likelihood at a point, and the other sums.

    Every datum counts once, weighted by its tempering. If the program states more data
    (``num_data``) than were passed, the sums are scaled up to that number, with a warning. A
    program that scales one observed site, but not another one with the same number of rows, is
    refused.

    :param data: the program's arguments, or an iterable of batches of them.
    :param before: a curvature of earlier data to include in the result's.
    """
    batches = data if isinstance(data, Batches) else Batches(data)
    batches.check_same("location", at.vector)
    like = at.vector.new_empty(0, dtype=torch.promote_types(at.vector.dtype, torch.float32))
    num_rows = count_rows(at, batches, config) if config.kind.stores_rows else 0
    check_memory(config, at.subset.size, like, num_rows=num_rows)
    curvature = config.structure.empty(at.subset, like, before)
    is_hessian = config.curvature == "hessian"
    sums = LikelihoodSums(at, batches, second_derivatives=is_hessian, earlier=before is not None)
    states = torch_states()

    def one_pass(number: int) -> None:
        if number:  # the same draws in all passes, for one matrix
            set_torch_states(states)
        curvature.start_pass(number)
        found = at.linearizations(batches.part(), None if is_hessian else config)
        title = f"curvature, pass {number + 1} of {curvature.passes}"
        for linearization in shown(found, title, progress):
            if number == 0:
                is_first = not sums.num_data
                sums.add(linearization)
                for name, site in linearization.run.observed.items():
                    if is_first and not is_hessian:
                        check_information(name, site)
            if is_hessian:
                _add_hessian(curvature, linearization, sums)
            else:
                for jacobian in fisher_jacobians(linearization, config):
                    with torch.no_grad():  # the sums hold no graph of a batch
                        curvature.add(jacobian)
            curvature.end_batch()

    for number in range(curvature.passes):
        batches.together(functools.partial(one_pass, number))
        if batches.ranks is not None:
            curvature.add_up(batches.ranks)
    sums.finish()
    if before is not None and sums.factor != 1.0:
        raise ValueError(SCALED_UP)
    curvature.scale(sums.factor)
    if curvature.takes_products:
        curvature.connect(GaussNewtonProducts(at, [(batches, sums.factor)]))
    sums.curvature = curvature.finish(before)
    return sums


def _add_hessian(curvature: Any, linearization: Linearization, sums: LikelihoodSums) -> None:
    """Add minus the second derivatives of a batch's log likelihood, factors included."""
    total: Any = 0.0
    for site in (*linearization.run.observed.values(), *sums.factors.new):
        total = total + site.batch_log_prob()
    if not isinstance(total, torch.Tensor) or not total.requires_grad:
        return
    matrix = torch.zeros_like(curvature.matrix)
    for row, entry in enumerate(linearization.gradient(total, create_graph=True)):
        if entry.requires_grad:
            matrix[row] = linearization.gradient(entry)
    curvature.matrix -= 0.5 * (matrix + matrix.mT)
