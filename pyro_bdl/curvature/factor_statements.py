"""Factor statements of a program, which have a density and no Fisher information."""

import warnings
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.errors import BdlWarning
from pyro_bdl.program.trace import Run, Site
from pyro_bdl.utils.autograd import reaches
from pyro_bdl.utils.collectives import Ranks


class FactorStatements:
    """The factor statements of a pass over the data.

    A factor in a plate of its own data counts in every batch. One in no plate, or in a plate of the
    latents, is about the latents: it counts once. ``values`` are the latter's, ``new`` the factors
    that count for this batch.

    :param ranks: processes with the other data, of which the first counts factors of the latents.
    :param earlier: whether a pass over earlier data has counted them.
    """

    def __init__(self, ranks: Ranks | None = None, *, earlier: bool = False) -> None:
        self.values: dict[str, Tensor] = {}
        self.new: list[Site] = []
        self._counts = not earlier and (ranks is None or ranks.number == 0)

    def read(self, run: Run, apart: Iterable[str]) -> None:
        """Record the factors of a run.

        :param apart: the names of the hyperpriors, which are not part of the likelihood.
        :raises ValueError: if a factor that counts once differs from batch to batch.
        """
        apart, of_latents, self.new = set(apart), set(), []
        for latent in run.latents.values():
            of_latents |= {plate for plate, _ in latent.plates}
        for name, site in run.factors.items():
            if name in apart:
                continue
            if any(plate not in of_latents for plate, _ in site.plates):
                self.new.append(site)
                continue
            value = site.log_prob().detach()
            if name not in self.values and self._counts:
                self.new.append(site)
            if not torch.allclose(self.values.setdefault(name, value), value, equal_nan=True):
                raise ValueError(
                    f"the factor '{name}' is in no plate of the data, so that it counts once, but "
                    "its value differs from batch to batch: put it in the plate of the data"
                )


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
