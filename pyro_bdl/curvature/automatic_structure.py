"""The choice of a curvature structure from the size of the model and the data."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from pyro_bdl.curvature.config import CurvatureConfig, fits
from pyro_bdl.curvature.prior import prior_precision, run_at
from pyro_bdl.curvature.row_counts import rows_of
from pyro_bdl.curvature.structures import Auto, Full, Kernel, Kron
from pyro_bdl.curvature.structures.prior_root import PriorRoot
from pyro_bdl.program.batches import Batches
from pyro_bdl.program.subset import Subset


def with_chosen_structure(
    model: Callable,
    subset: Subset,
    vector: Tensor,
    batches: Batches,
    config: CurvatureConfig,
    *,
    full_up_to: int = 2000,
    kernel_up_to: int = 4096,
) -> CurvatureConfig:
    """Return the configuration with a structure in place of "auto".

    It is "full" for up to 2000 latents. It is "kernel" if the data have fewer outputs N K than
    there are latents, and at most 4096, and the prior precision has an inverse. Both are exact, and
    are taken only if they fit in memory. It is "kron" otherwise, which neglects the covariance
    between layers and factorizes that within a layer. Over parts of sites, which have no Kronecker
    factors, and for curvature="hessian" it is "full".

    :param full_up_to: latents, whose matrix is factorized in a fraction of a second.
    :param kernel_up_to: rows, whose kernel is factorized in about a second.
    """
    if not isinstance(config.structure, Auto):
        return config
    if config.curvature == "hessian":
        return replace(config, structure=Full())
    whole = all(entries is None for entries in subset.chosen.values())
    if subset.size <= full_up_to and fits(Full(), subset.size, vector):
        return replace(config, structure=Full())
    if batches.ranks is None:
        run, leaves = run_at(model, subset, vector, *batches.first())
        rows = rows_of(run, batches, config)
        is_small = rows < subset.size and rows <= kernel_up_to
        if is_small and fits(Kernel(), subset.size, vector, rows):
            try:
                PriorRoot(prior_precision(run, leaves, subset), subset.parts, '"kernel"')
                return replace(config, structure=Kernel())
            except ValueError:  # a prior without a covariance
                pass
    return replace(config, structure=Kron() if whole else Full())
