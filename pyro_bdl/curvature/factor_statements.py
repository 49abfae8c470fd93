"""Factor statements of a program, which have a density and no Fisher information."""

import warnings

import torch
from torch import Tensor

from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.errors import BdlWarning
from pyro_bdl.program.trace import Run, Site


class FactorStatements:
    """A memory of factors that tells those of the data from those of the latents alone.

    ``values`` are those of the last batch. ``new`` are the factors to be counted for it: not those
    that had the same value in the batch before, which are about the latents alone and count once.
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
    """Warn where the program has factor statements, which have no Fisher information."""
    moved = [name for name, site in run.factors.items() if site.log_prob().requires_grad]
    if moved and config.curvature != "hessian":
        warnings.warn(
            f"the factor '{moved[0]}' has no Fisher information and is left out of "
            'the curvature; structure="full" with curvature="hessian" includes it',
            BdlWarning,
            stacklevel=4,
        )
