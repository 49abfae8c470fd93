"""The choice of a curvature and its structure from the program, its size and the data."""

import warnings
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from pyro_bdl.curvature.config import CurvatureConfig, fits
from pyro_bdl.curvature.prior import PriorRoot, prior_precision
from pyro_bdl.curvature.row_counts import rows_of
from pyro_bdl.curvature.structures import Auto, Full, Kernel, Kron
from pyro_bdl.errors import BdlWarning
from pyro_bdl.program.batches import Batch, Batches
from pyro_bdl.program.subset import Subset
from pyro_bdl.program.trace import Run


def chosen_config(
    config: CurvatureConfig,
    run: Run,
    leaves: Mapping[str, Tensor],
    subset: Subset,
    few: Batch,
    batches: Batches,
    *,
    full_up_to: int = 2000,
    kernel_up_to: int = 4096,
) -> CurvatureConfig:
    """Return the configuration with a structure in place of "auto", and with the dense Hessian
    where no Fisher information is known.

    That is so if discrete sites are summed out of a likelihood so that it is no mixture for each
    datum. "auto" is "full" for up to 2000 latents. It is "kernel" if the data have fewer outputs
    N K than there are latents, and at most 4096, and the prior precision has an inverse. Both are
    exact, and are taken only if they fit in memory. It is "kron" otherwise, and "full" over parts
    of sites, which have no Kronecker factors, and for curvature="hessian".

    :param run: the program on ``few`` of the data, with its leaves.
    :param full_up_to: latents, whose matrix is factorized in a fraction of a second.
    :param kernel_up_to: rows, whose kernel is factorized in about a second.
    """
    if config.curvature == "hessian":
        return replace(config, structure=Full()) if _is_open(config) else config
    name = run.coupled_data()
    if name is not None:
        warnings.warn(
            f"the data of site '{name}' depend on each other through discrete sites that are "
            "summed out, so that their likelihood is no product of known ones: the curvature is "
            'its dense Hessian; structure="full" with curvature="hessian" asks for that',
            BdlWarning,
            stacklevel=5,
        )
        return replace(config, structure=Full(), curvature="hessian")
    if not _is_open(config):
        return config
    like = next(iter(leaves.values()))
    if subset.size <= full_up_to and fits(Full(), subset.size, like):
        return replace(config, structure=Full())
    rows = rows_of(run, few, batches, config)
    few_rows = rows < subset.size and rows <= kernel_up_to
    if batches.ranks is None and few_rows and fits(Kernel(), subset.size, like, rows):
        try:
            PriorRoot(prior_precision(run, leaves, subset), subset.parts, '"kernel"')
            return replace(config, structure=Kernel())
        except ValueError:  # a prior without a covariance
            pass
    whole = all(entries is None for entries in subset.chosen.values())
    return replace(config, structure=Kron() if whole else Full())


def _is_open(config: CurvatureConfig) -> bool:
    return isinstance(config.structure, Auto)
