"""The choice of a curvature and its structure from the program, its size and the data."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from pyro_bdl.curvature.config import CurvatureConfig, fits
from pyro_bdl.curvature.fisher import num_data, site_parameters
from pyro_bdl.curvature.prior import prior_precision
from pyro_bdl.curvature.structures import Auto, Full, Kernel, Kron
from pyro_bdl.errors import warn
from pyro_bdl.program.batches import Batch, Batches, leading_size
from pyro_bdl.program.subset import Subset
from pyro_bdl.program.trace import Run
from pyro_bdl.utils.random_state import seeded


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
        warn(
            f"the data of site '{name}' depend on each other through discrete sites that are "
            "summed out, so that their likelihood is no product of known ones: the curvature is "
            'its dense Hessian; structure="full" with curvature="hessian" asks for that',
            "data-depend",
            stacklevel=11,
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
            prior_precision(run, leaves, subset).root(subset.parts, '"kernel"')
            return replace(config, structure=Kernel())
        except ValueError:  # a prior without a covariance
            pass
    whole = all(entries is None for entries in subset.chosen.values())
    return replace(config, structure=Kron() if whole else Full())


def _is_open(config: CurvatureConfig) -> bool:
    return isinstance(config.structure, Auto)


def rows_of(run: Run, batch: Batch, batches: Batches, config: CurvatureConfig) -> int:
    """Return the number of rows of all batches, given the run on one batch."""
    own = 0
    with seeded(0):  # which Monte Carlo columns would draw
        for site in run.observed.values():
            if site.value is not None and site_parameters(site):
                own += num_data(site) * sum(1 for _ in config.columns(site))
    sizes, size = [leading_size(other) for other in batches.part()], leading_size(batch)
    return round(own * (sum(sizes) / size if size else len(sizes)))
