"""Curvature of a program's log likelihood over data, computed in passes over batches."""

import functools
import itertools
from typing import Any

import torch

from pyro_bdl.curvature.at import At
from pyro_bdl.curvature.automatic_structure import chosen_config, rows_of
from pyro_bdl.curvature.config import CurvatureConfig, check_memory
from pyro_bdl.curvature.fisher import check_information
from pyro_bdl.curvature.jacobian.linearization import Linearization
from pyro_bdl.curvature.likelihood_sums import LikelihoodSums
from pyro_bdl.curvature.linearized_data import GaussNewtonProducts
from pyro_bdl.curvature.site_jacobians import fisher_jacobians
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.program.batches import Batches
from pyro_bdl.utils.autograd import has_own_functions
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
    :param config: with "auto" for a structure that the first run chooses.
    :param before: a curvature of earlier data to include in the result's.
    """
    batches = data if isinstance(data, Batches) else Batches(data)
    batches.check_same("location", at.vector)
    sums = LikelihoodSums(at, batches, config, earlier=before is not None)
    states = [torch_states()]  # before the first run, and after it

    def one_pass(number: int) -> None:
        if number:  # the same draws in all passes, for one matrix
            set_torch_states(states[0])
            sums.curvature.start_pass(number)
        found = at.linearizations(batches.part(), lambda: sums.config, read=number == 0)
        title = f"curvature, pass {number + 1} of {sums.config.kind.passes}"
        for place, linearization in enumerate(shown(found, title, progress)):
            is_first = number == place == 0
            if is_first:
                _begin(sums, linearization, before)
                states.append(torch_states())
            elif place == 0:
                set_torch_states(states[1])
            is_hessian = sums.config.curvature == "hessian"
            if number == 0:
                sums.add(linearization)
                for name, site in linearization.run.observed.items():
                    if is_first and not is_hessian:
                        check_information(name, site)
            if is_hessian:
                _add_hessian(sums.curvature, linearization, sums)
            else:
                for jacobian in fisher_jacobians(linearization, sums.config):
                    with torch.no_grad():  # the sums hold no graph of a batch
                        sums.curvature.add(jacobian)
            sums.curvature.end_batch()

    for number in itertools.count():
        batches.together(functools.partial(one_pass, number))
        curvature = sums.curvature
        if batches.ranks is not None:
            curvature.add_up(batches.ranks)
        if number + 1 == curvature.passes:
            break
    sums.finish()
    if before is not None and sums.factor != 1.0:
        raise ValueError(SCALED_UP)
    curvature.scale(sums.factor)
    if curvature.takes_products:
        curvature.connect(GaussNewtonProducts(at, [(batches, sums.factor)]))
    sums.curvature = curvature.finish(before)
    return sums


def _begin(sums: LikelihoodSums, first: Linearization, before: Any) -> None:
    """Choose the structure by the first run of a pass, and make an empty curvature."""
    subset, reading, batches = first.subset, first.reading, sums.batches
    assert reading is not None
    batch = first.args, dict(first.kwargs)
    like = first.vector.new_empty(0, dtype=torch.promote_types(first.vector.dtype, torch.float32))
    config = chosen_config(sums.config, reading.run, reading.leaves, subset, batch, batches)
    stored = config.kind.stores_rows
    num_rows = rows_of(reading.run, batch, batches, config) if stored else 0
    check_memory(config, subset.size, like, num_rows=num_rows)
    sums.first, sums.config = first, config
    sums.curvature = config.structure.empty(subset, like, before)
    sums.curvature.start_pass(0)


def _add_hessian(curvature: Any, linearization: Linearization, sums: LikelihoodSums) -> None:
    """Add minus the second derivatives of a batch's log likelihood, factors included."""
    total: Any = 0.0
    for site in (*linearization.run.observed.values(), *sums.factors.new):
        total = total + site.batch_log_prob()
    if not isinstance(total, torch.Tensor) or not total.requires_grad:
        return
    if has_own_functions([total]):
        raise UnsupportedProgramError(
            'curvature="hessian" takes second derivatives, and the program has a '
            "torch.autograd.Function of its own, whose part in them autograd may leave out: use "
            'curvature="ggn", or write the function with torch\'s operators'
        )
    matrix = torch.zeros_like(curvature.matrix)
    for row, entry in enumerate(linearization.gradient(total, create_graph=True)):
        if entry.requires_grad:
            matrix[row] = linearization.gradient(entry)
    curvature.matrix -= 0.5 * (matrix + matrix.mT)
