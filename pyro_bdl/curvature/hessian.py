"""The Hessian of a program's log likelihood, row by row."""

from typing import Any

from torch import Tensor

from pyro_bdl.curvature.at import At
from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.curvature.likelihood_sums import LikelihoodSums
from pyro_bdl.curvature.structures.base import Curvature
from pyro_bdl.program.batches import Batches


def hessian(
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
