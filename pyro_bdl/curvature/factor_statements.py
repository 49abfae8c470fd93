"""Factor statements of a program, which have a density and no Fisher information."""

import warnings

import torch
from torch import Tensor

from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.errors import BdlWarning
from pyro_bdl.program.trace import Run, Site


class FactorStatements:
    """Record of factor statements, to separate factors of the data from factors of the latents
    only.

    ``values`` are the factors of the last batch. A factor with the same value as in the batch
    before depends on the latents only and counts once; ``new`` are the other factors, which count
    for this batch.
    """

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.new: list[Site] = []

    def read(self, run: Run) -> None:
        before = self.values
        self.values = {name: site.log_prob().detach() for name, site in run.factors.items()}
        self.new = [
            site
            for name, site in run.factors.items()
            if name not in before or not torch.equal(before[name], self.values[name])
        ]


def check_factors(run: Run, config: CurvatureConfig) -> None:
    """Warn if the program has factor statements, which have no Fisher information."""
    moved = [name for name, site in run.factors.items() if site.log_prob().requires_grad]
    if moved and config.curvature != "hessian":
        warnings.warn(
            f"the factor '{moved[0]}' has no Fisher information and is left out of "
            'the curvature; structure="full" with curvature="hessian" includes it',
            BdlWarning,
            stacklevel=4,
        )
