"""The number of rows of the data's weighted Jacobians: N K for N data with K outputs."""

from pyro_bdl.curvature.at import At
from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.curvature.fisher import num_data, site_parameters
from pyro_bdl.curvature.prior import run_at
from pyro_bdl.program.batches import Batch, Batches, leading_size
from pyro_bdl.program.trace import Run
from pyro_bdl.utils.random_state import seeded


def count_rows(at: At, batches: Batches, config: CurvatureConfig) -> int:
    """Return the number of rows that the curvature over the data adds up, at most.

    The program runs once, on the first batch; other batches count by their rows of data.
    """
    run, _ = run_at(at.model, at.subset, at.vector, *batches.first())
    return rows_of(run, batches.first(), batches, config)


def rows_of(run: Run, batch: Batch, batches: Batches, config: CurvatureConfig) -> int:
    """Return the number of rows of all batches, given the run on one batch."""
    own = 0
    with seeded(0):  # which Monte Carlo columns would draw
        for site in run.observed.values():
            if site.value is not None and site_parameters(site):
                own += num_data(site) * sum(1 for _ in config.columns(site))
    sizes, size = [leading_size(other) for other in batches.part()], leading_size(batch)
    return round(own * (sum(sizes) / size if size else len(sizes)))
