"""Which curvature is computed, and in which form."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyro_bdl.curvature.fisher import (
    ESTIMATION_DRAWS,
    Cotangent,
    empirical_columns,
    exact_columns,
    sampled_columns,
)
from pyro_bdl.curvature.structures.dense import DiagonalCurvature, FullCurvature
from pyro_bdl.curvature.structures.kron.curvature import KroneckerCurvature
from pyro_bdl.curvature.structures.low_rank import LowRankCurvature
from pyro_bdl.program.trace import Site
from pyro_bdl.utils.memory import available_memory

STRUCTURES = ("kron", "ekfac", "full", "diag", "low_rank")
CURVATURES = ("ggn", "ggn-mc", "empirical-fisher", "hessian")
_SLACK = 1.1  # for what lies beside the matrix: rows of the Jacobian, parts of a product


@dataclass(frozen=True)
class Recipe:
    """Which matrix is computed, and in which form.

    :param structure: "kron", "ekfac", "full", "diag" or "low_rank".
    :param curvature: "ggn", the generalised Gauss-Newton matrix; "ggn-mc", its estimate from
        ``num_draws`` drawn observations per datum; "empirical-fisher"; or "hessian" (full only).
    :param num_draws: observations drawn per datum, 1 by default for "ggn-mc" and 512 for the
        distributions whose information "ggn" has no closed form of (``fisher.cell_roots``).
    :param rank: of "low_rank".
    :param reduce: of "kron" and "ekfac", see ``KroneckerCurvature``.
    """

    structure: str = "kron"
    curvature: str = "ggn"
    num_draws: int | None = None
    rank: int = 50
    reduce: bool = False

    def __post_init__(self) -> None:
        if self.structure not in STRUCTURES:
            raise ValueError(
                f"unknown structure {self.structure!r} (there are {', '.join(STRUCTURES)})"
            )
        if self.curvature not in CURVATURES:
            raise ValueError(
                f"unknown curvature {self.curvature!r} (there are {', '.join(CURVATURES)})"
            )
        if self.curvature == "hessian" and self.structure != "full":
            raise ValueError('curvature="hessian" needs structure="full": it may be indefinite')
        for name in ("num_draws", "rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def columns(self, site: Site) -> Iterator[Cotangent]:
        """Cotangents whose outer products are the Fisher information of a site."""
        if self.curvature == "ggn-mc":
            return sampled_columns(site, self.num_draws or 1)
        if self.curvature == "empirical-fisher":
            return empirical_columns(site)
        return exact_columns(site, self.num_draws or ESTIMATION_DRAWS)

    def empty(self, size: int, like: Tensor, before: Any = None) -> Any:
        """A curvature of this structure over nothing yet, in R^p."""
        if self.structure == "full":
            return FullCurvature(size, like)
        if self.structure == "diag":
            return DiagonalCurvature(size, like)
        if self.structure == "low_rank":
            return LowRankCurvature(size, like, rank=self.rank, start=before)
        corrected = self.structure == "ekfac"
        return KroneckerCurvature(
            size, like, reduce=self.reduce, corrected=corrected, start=before if corrected else None
        )


def check_memory(recipe: Recipe, size: int, like: Tensor, *, advice: str | None = None) -> None:
    """
    :param advice: what would fit; by default other structures.
    :raises MemoryError: before a matrix is made that cannot fit, naming what would.
    """
    copies = {"full": 3 * size, "low_rank": 3 * (recipe.rank + 10), "diag": 3}
    needed = _SLACK * copies.get(recipe.structure, 0) * size * like.element_size()
    available = available_memory(like.device)
    if available is None or needed <= available:
        return
    others = (
        '"kron" or "diag"' if recipe.structure == "low_rank" else '"kron", "low_rank" or "diag"'
    )
    raise MemoryError(
        f'structure="{recipe.structure}" over {size:,} latents needs about '
        f"{needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free: "
        + (advice or f"use structure={others}, or a subset of the latents")
    )
