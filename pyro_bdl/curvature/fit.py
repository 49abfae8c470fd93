"""Curvature of a program's log likelihood over data, computed in passes over batches."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from pyro_bdl.curvature.at import At
from pyro_bdl.curvature.config import CurvatureConfig, check_memory
from pyro_bdl.curvature.fisher import check_information
from pyro_bdl.curvature.likelihood_sums import LikelihoodSums
from pyro_bdl.curvature.linearized_data import GaussNewtonProducts
from pyro_bdl.curvature.row_counts import count_rows
from pyro_bdl.curvature.site_jacobians import fisher_jacobians
from pyro_bdl.curvature.structures.base import Curvature
from pyro_bdl.program.batches import Batches
from pyro_bdl.utils.progress import hidden
from pyro_bdl.utils.random_state import set_torch_states, torch_states

SCALED_UP = (
    "the program states more data than it was given, so that each part is scaled up to all of them "
    "and parts do not add up: pass all data to laplace_approximation as an iterable of batches, or "
    "leave num_data out of the program"
)


@dataclass
class Fitted:
    """A curvature over data, with other sums from the same pass.

    :param curvature: the curvature of minus the tempered log likelihood in the subset.
    :param log_likelihood: the tempered log likelihood of the data, including factors, a scalar in
        nats.
    :param num_data: the number of data, counted along the leading axes of the observed sites.
    :param gradient: gradient of the tempered log likelihood in the subset, (p,).
    :param squares: the sum over Normal sites of ((y - loc) / scale)^2, weighted by the tempering.
    :param factor: the factor by which the sums over the given data were multiplied.
    :param cells: the number of terms in ``squares``, weighted by the tempering.
    """

    curvature: Curvature
    log_likelihood: Tensor
    num_data: int
    gradient: Tensor
    squares: Tensor
    cells: Tensor
    factor: float


@torch.enable_grad()
def fit_curvature(
    at: At,
    data: Any,
    config: CurvatureConfig,
    *,
    before: Any = None,
    progress: bool | None = None,
) -> Fitted:
    """Compute the curvature of a program's log likelihood at a point.

    Every datum counts once, weighted by its tempering. If the program states more data
    (``num_data``) than were passed, the sums are scaled up to that number, with a warning. A
    program that scales one observed site, but not another one with the same number of rows, is
    refused.

    :param data: the program's arguments, or an iterable of batches of them.
    :param before: a curvature of earlier data to include in the result.
    """
    batches = data if isinstance(data, Batches) else Batches(data)
    batches.check_same("location", at.vector)
    like = at.vector.new_empty(0, dtype=torch.promote_types(at.vector.dtype, torch.float32))
    num_rows = count_rows(at, batches, config) if config.kind.stores_rows else 0
    check_memory(config, at.subset.size, like, num_rows=num_rows)
    if config.curvature == "hessian":
        curvature, seen = batches.together(lambda: _hessian(at, batches, config, like, before))
        batches.add_up(*curvature.sums())
        seen.add_up(batches)
    else:
        curvature, seen = _accumulated(at, batches, config, like, before, progress)
    factor = seen.factor()
    if before is not None and factor != 1.0:
        raise ValueError(SCALED_UP)
    curvature.scale(factor)
    if curvature.takes_products:
        curvature.connect(GaussNewtonProducts(at, [(batches, factor)]))
    curvature = curvature.finish(before)
    total = torch.as_tensor(seen.log_likelihood * factor, device=seen.gradient.device)
    gradient = seen.gradient * factor
    squares, cells = seen.squares * factor, seen.cells * factor
    return Fitted(curvature, total, seen.num_data, gradient, squares, cells, factor)


def _accumulated(
    at: At,
    batches: Batches,
    config: CurvatureConfig,
    like: Tensor,
    before: Any,
    progress: bool | None,
) -> tuple[Curvature, LikelihoodSums]:
    curvature = config.structure.empty(at.subset, like, before)
    seen = LikelihoodSums(at, batches, earlier=before is not None)
    states = torch_states()

    def one_pass(number: int) -> None:
        if number:  # the same draws in all passes, for one matrix
            set_torch_states(states)
        curvature.start_pass(number)
        parts = tqdm(
            at.linearizations(batches.part(), config),
            desc=f"curvature, pass {number + 1} of {curvature.passes}",
            unit="batch",
            disable=hidden(progress),
            leave=False,
            delay=1,
        )
        for linearization in parts:
            if number == 0:
                first = not seen.num_data
                seen.add(linearization)
                for name, site in linearization.run.observed.items() if first else ():
                    check_information(name, site)
            for jacobian in fisher_jacobians(linearization, config):
                curvature.add(jacobian)
            curvature.end_batch()

    for number in range(curvature.passes):
        batches.together(functools.partial(one_pass, number))
        if batches.ranks is not None:
            curvature.add_up(batches.ranks)
    seen.add_up(batches)
    return curvature, seen


def _hessian(
    at: At,
    batches: Batches,
    config: CurvatureConfig,
    like: Tensor,
    before: Curvature | None = None,
) -> tuple[Curvature, LikelihoodSums]:
    """Minus the second derivatives of the log likelihood, factors included.

    :param before: the curvature of earlier data, which holds the factors of the latents.
    """
    matrix = like.new_zeros(at.subset.size, at.subset.size)
    seen = LikelihoodSums(at, batches, second_derivatives=True, earlier=before is not None)
    for linearization in at.linearizations(batches.part()):
        seen.add(linearization)
        total: Any = 0.0
        run = linearization.run
        for site in (*run.observed.values(), *seen.factors.new):
            total = total + site.batch_log_prob()
        if not isinstance(total, Tensor) or not total.requires_grad:
            continue
        for row, entry in enumerate(linearization.gradient(total, create_graph=True)):
            if entry.requires_grad:
                matrix[row] -= linearization.gradient(entry)
    return config.kind.from_matrix(0.5 * (matrix + matrix.mT)), seen
