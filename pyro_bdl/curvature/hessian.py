"""The Hessian of a program's log likelihood, row by row."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.chunking import linearizations
from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.curvature.likelihood_sums import LikelihoodSums
from pyro_bdl.curvature.structures.base import Curvature
from pyro_bdl.program.batches import Batches
from pyro_bdl.program.subset import Subset


def hessian(
    model: Callable,
    subset: Subset,
    vector: Tensor,
    batches: Batches,
    config: CurvatureConfig,
    like: Tensor,
) -> tuple[Curvature, LikelihoodSums]:
    """Minus the second derivatives of the log likelihood, factors included."""
    matrix = like.new_zeros(subset.size, subset.size)
    seen = LikelihoodSums(vector, batches, second_derivatives=True)
    for linearization in linearizations(model, subset, vector, batches.part(), None):
        seen.add(linearization)
        total: Any = 0.0
        run = linearization.run
        for site in (*run.observed.values(), *seen.factors.new):
            total = total + site.batch_log_prob()
        leaves = [linearization.leaves[name] for name in subset.parts]
        chosen = [subset.chosen[name] for name in subset.parts]
        if not isinstance(total, Tensor) or not total.requires_grad:
            continue
        gradients = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
        start = 0
        for gradient, leaf, kept in zip(gradients, leaves, chosen, strict=True):
            flat = torch.zeros_like(leaf) if gradient is None else gradient
            flat = flat.reshape(-1)
            for entry in flat if kept is None else flat[kept.to(flat.device)]:
                if entry.requires_grad:
                    found = torch.autograd.grad(entry, leaves, retain_graph=True, allow_unused=True)
                    row = [
                        (torch.zeros_like(other) if g is None else g).reshape(-1)
                        for g, other in zip(found, leaves, strict=True)
                    ]
                    row = [
                        r if k is None else r[k.to(r.device)]
                        for r, k in zip(row, chosen, strict=True)
                    ]
                    matrix[start] -= torch.cat(row)
                start += 1
    return config.kind.from_matrix(0.5 * (matrix + matrix.mT)), seen
