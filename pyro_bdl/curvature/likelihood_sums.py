"""The log likelihood of data and what goes with it, summed over batches."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.at import At
from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.curvature.fisher import cell_weights, check_scales, num_data
from pyro_bdl.curvature.jacobian.linearization import Linearization
from pyro_bdl.curvature.prior import hyperpriors
from pyro_bdl.curvature.structures.base import Curvature
from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.errors import UnsupportedProgramError, warn
from pyro_bdl.program.batches import Batches
from pyro_bdl.program.check import check_finite_batches
from pyro_bdl.program.supports import check_support
from pyro_bdl.program.trace import Run, Site
from pyro_bdl.utils.autograd import reaches
from pyro_bdl.utils.collectives import Ranks


class LikelihoodSums:
    """Sums over the data of a pass: their number, log likelihood and its gradient.

    ``log_likelihood`` is tempered and includes factors, a scalar in nats; ``gradient`` is its
    gradient in the subset, (p,); ``squares`` is the sum over Normal sites of ((y - loc) / scale)^2
    and ``cells`` the number of its terms, both weighted by the tempering; ``num_data`` counts along
    the leading axes of the observed sites. ``finish`` multiplies all by ``factor``. ``curvature``
    is that of the same data, and ``config`` says which; ``first`` is the pass's first run.

    :param earlier: whether these are added to the sums over earlier data.
    """

    curvature: Curvature
    first: Linearization
    factor: float = 1.0

    def __init__(
        self, at: At, batches: Batches, config: CurvatureConfig, *, earlier: bool = False
    ) -> None:
        self.batches, self.config = batches, config
        self.factors = FactorStatements(batches.ranks, earlier=earlier)
        self.log_likelihood: Any = 0.0
        self.num_data = 0
        self.gradient = torch.zeros_like(at.subset.take(at.vector))
        self.squares = self.cells = torch.zeros((), dtype=torch.float64, device=at.vector.device)
        self.stated: float = 0.0
        self.scaled = False

    @property
    def second_derivatives(self) -> bool:
        """True if a likelihood in a factor statement will do."""
        return self.config.curvature == "hessian"

    def add(self, linearization: Linearization) -> None:
        run = linearization.run
        if not run.observed and run.factors and not self.second_derivatives:
            raise UnsupportedProgramError(
                f"the likelihood is in the factor '{next(iter(run.factors))}', which has no Fisher "
                'information: take structure="full" with curvature="hessian", write it as a sample '
                "statement with obs=..., or use a variational guide or NUTS"
            )
        if not run.observed and not run.factors:
            raise ValueError(
                "the program has no observed site: pass the targets, so that a sample statement "
                "gets obs=..."
            )
        name = run.coupled_data()
        if name is not None and self.num_data:
            raise UnsupportedProgramError(
                f"the data of site '{name}' depend on each other through discrete sites, so that "
                "batches of them do not add up: pass all data as one batch"
            )
        check_scales(run.observed)
        check_support(run, first_row=self.num_data)
        part, largest = linearization.vector.new_zeros(()), 0
        for name, site in run.observed.items():
            if site.value is None:
                raise ValueError(
                    f"site '{name}' has no observation: pass the targets as well, as in "
                    "laplace_approximation((x, y))"
                )
            count = num_data(site)
            self._add_squares(site)
            largest = max(largest, count)
            self.stated = max(self.stated, round(count * site.subsampling, 3))  # N / B * B
            self.scaled = self.scaled or site.subsampling != 1
            part = part + site.batch_log_prob()
        self.factors.read(run, hyperpriors(run, linearization.leaves))
        for factor in self.factors.new:
            part = part + factor.batch_log_prob()
        if not torch.isfinite(part):
            check_finite_batches(linearization.model, self.batches.part())
            raise ValueError(
                f"the log likelihood at the MAP is {float(part.detach())}: the data or the "
                "network's outputs are not finite"
            )
        if part.requires_grad:
            self.gradient += linearization.gradient(part)
        self.log_likelihood = self.log_likelihood + part.detach().double()
        self.num_data += largest

    def _add_squares(self, site: Site) -> None:
        base: Any = base_distribution(site.distribution)
        if type(base).__name__ == "Normal":
            weights = cell_weights(site).square()
            offsets = ((site.value - base.loc) / base.scale).detach()
            self.squares = self.squares + (weights * offsets.square()).sum().double()
            self.cells = self.cells + weights.sum().double()

    def finish(self) -> None:
        """Add the sums of the other processes, and scale up to the number of data that the program
        states."""
        if self.batches.ranks is not None:
            self._add_up(self.batches.ranks)
        self.factor = factor = self._factor()
        self.gradient = self.gradient * factor
        self.squares, self.cells = self.squares * factor, self.cells * factor
        total = self.log_likelihood * factor
        self.log_likelihood = torch.as_tensor(total, device=self.gradient.device)

    def _add_up(self, ranks: Ranks) -> None:
        counts = self.squares.new_tensor([self.num_data, float(self.log_likelihood)])
        self.squares, self.cells = self.squares.clone(), self.cells.clone()
        ranks.add_up([counts, self.gradient, self.squares, self.cells])
        self.num_data, self.log_likelihood = round(counts[0].item()), counts[1]
        stated, scaled = zip(*ranks.gather((self.stated, self.scaled)), strict=True)
        self.stated, self.scaled = max(stated), any(scaled)
        if self.scaled and self.num_data > self.stated:
            warn(
                f"the processes hold {self.num_data} data, but the program states "
                f"{self.stated:.0f}: those that several hold, such as the rows that a "
                "DistributedSampler repeats, count several times",
                "number-of-data",
                stacklevel=5,
            )

    def _factor(self) -> float:
        if self.stated <= self.num_data or not self.num_data:
            return 1.0
        if self.factors.values and self.second_derivatives:
            raise ValueError(
                f"the program states {self.stated:.0f} data, but {self.num_data} were passed, and "
                f"it is unknown how to scale up the factor '{next(iter(self.factors.values))}': "
                "pass all data, in batches if necessary"
            )
        warn(
            f"the program states {self.stated:.0f} data, but {self.num_data} were passed: their "
            "curvature is scaled up; for the exact sum pass all data as an iterable of batches, or "
            "let a plate that chooses its own rows (subsample_size) use all of them",
            "number-of-data",
            stacklevel=5,
        )
        return self.stated / self.num_data


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
        warn(
            f"the factor '{moved[0]}' has no Fisher information and is left out of "
            "the curvature; it counts in the MAP, and to first order in the evidence; "
            'structure="full" with curvature="hessian" includes it',
            "no-fisher-information",
            stacklevel=4,
        )
