"""Factor statements of a program, which have a density and no Fisher information."""

import warnings
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.errors import BdlWarning
from pyro_bdl.program.trace import Run, Site
from pyro_bdl.utils.autograd import reaches


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

    def read(self, run: Run, apart: Iterable[str]) -> None:
        """Record the factors of a run.

        :param apart: the names of the hyperpriors, which are not part of the likelihood.
        """
        before, apart = self.values, set(apart)
        factors = {name: site for name, site in run.factors.items() if name not in apart}
        self.values = {name: site.log_prob().detach() for name, site in factors.items()}
        self.new = [
            site
            for name, site in factors.items()
            if name not in before or not torch.equal(before[name], self.values[name])
        ]


def check_factors(run: Run, leaves: Mapping[str, Tensor], config: CurvatureConfig) -> None:
    """Warn if the program has factor statements, which have no Fisher information."""
    with torch.enable_grad():
        values = {name: site.log_prob() for name, site in run.factors.items()}
    moved = [name for name, value in values.items() if reaches(value, leaves.values())]
    if moved and config.curvature != "hessian":
        warnings.warn(
            f"the factor '{moved[0]}' has no Fisher information and is left out of "
            "the curvature; it counts in the MAP, and to first order in the evidence; "
            'structure="full" with curvature="hessian" includes it',
            BdlWarning,
            stacklevel=4,
        )
