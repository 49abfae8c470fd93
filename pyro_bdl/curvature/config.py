"""The choice of a curvature and its structure, and a check of its memory."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from pyro_bdl.curvature import structures
from pyro_bdl.curvature.fisher import empirical_columns, exact_columns, sampled_columns
from pyro_bdl.curvature.fisher_roots import ESTIMATION_DRAWS, Cotangent
from pyro_bdl.curvature.structures.base import Curvature, StructureOptions
from pyro_bdl.program.trace import Site
from pyro_bdl.utils.memory import available_memory

STRUCTURES = tuple(structures.STRUCTURES)
AUTOMATIC = "auto"  # chosen from the data, see ``automatic_structure``
CURVATURES = ("ggn", "ggn-mc", "empirical-fisher", "hessian")
_SLACK = 1.1  # allowance for other memory: rows of the Jacobian, intermediate products


@dataclass(frozen=True)
class CurvatureConfig(StructureOptions):
    """The choice of a curvature matrix and its compressed form.

    :param structure: "kron", "ekfac", "full", "diag", "low_rank", "kernel", "samples" or
        "auto".
    :param curvature: "ggn", the generalized Gauss-Newton matrix; "ggn-mc", its Monte Carlo estimate
        from ``num_draws`` drawn observations per datum; "empirical-fisher"; or "hessian" (full
        only).
    :param num_draws: observations drawn per datum, by default 1 for "ggn-mc". "ggn" draws
        observations, by default 512, only for distributions without a closed form
        (``fisher.cell_roots``).
    :param rank: the rank of "low_rank".
    :param reduce: an option of "kron" and "ekfac", see ``KroneckerCurvature``.
    :param num_samples: the number of samples of "samples".
    :param tolerance: of the solves of "samples", see ``SamplesCurvature``.
    """

    structure: str = "kron"
    curvature: str = "ggn"
    num_draws: int | None = None

    def __post_init__(self) -> None:
        if self.structure not in (*STRUCTURES, AUTOMATIC):
            known = ", ".join((*STRUCTURES, AUTOMATIC))
            raise ValueError(f"unknown structure {self.structure!r} (there are {known})")
        if self.curvature not in CURVATURES:
            raise ValueError(
                f"unknown curvature {self.curvature!r} (there are {', '.join(CURVATURES)})"
            )
        chosen = self.structure != AUTOMATIC
        if chosen and self.curvature == "hessian" and not self.kind.takes_hessian:
            able = (name for name, kind in structures.STRUCTURES.items() if kind.takes_hessian)
            named = " or ".join(f'structure="{name}"' for name in able)
            raise ValueError(f'curvature="hessian" needs {named}: it may be indefinite')
        if self.kind.takes_products and self.curvature != "ggn":
            raise ValueError(
                f'structure="{self.structure}" needs curvature="ggn", whose products with vectors '
                f"are known, got {self.curvature!r}"
            )
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance must be between 0 and 1, got {self.tolerance}")
        for name in ("num_draws", "rank", "num_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def columns(self, site: Site) -> Iterator[Cotangent]:
        """Yield cotangents whose outer products sum to the Fisher information of a site."""
        if self.curvature == "ggn-mc":
            return sampled_columns(site, self.num_draws or 1)
        if self.curvature == "empirical-fisher":
            return empirical_columns(site)
        return exact_columns(site, self.num_draws or ESTIMATION_DRAWS)

    @property
    def kind(self) -> type[Curvature]:
        """The class of the structure; of "auto" the one that is left where no other fits."""
        return structures.STRUCTURES["kron" if self.structure == AUTOMATIC else self.structure]

    def memory(self, size: int, like: Tensor, num_rows: int = 0) -> float:
        """Return the approximate memory of the structure over p latents, in bytes.

        :param size: p.
        :param like: a tensor with the dtype.
        :param num_rows: the number of rows of the data's Jacobians, for a structure that stores
            them (``row_counts.count_rows``).
        """
        item = 8 if self.kind.stores_rows else like.element_size()  # which are used in float64
        return _SLACK * self.kind.memory(size, self, num_rows) * item


def check_memory(
    config: CurvatureConfig,
    size: int,
    like: Tensor,
    *,
    num_rows: int = 0,
    advice: str | None = None,
) -> None:
    """Check that a structure fits in memory, before it is made.

    :param num_rows: as in ``CurvatureConfig.memory``.
    :param advice: the advice in the error; by default it names the structures that fit.
    :raises MemoryError: if the structure needs more than is free.
    """
    needed, available = config.memory(size, like, num_rows), available_memory(like.device)
    if available is None or needed <= available:
        return
    others = [replace(config, curvature="ggn", structure=name) for name in STRUCTURES]
    fitting = [
        f'"{other.structure}"'
        for other in others
        if not other.kind.stores_rows and other.memory(size, like) <= available
    ]
    of_rows = f" and {num_rows:,} outputs of the data" if num_rows else ""
    instead = f"use structure={' or '.join(fitting)}, or " if fitting else "use "
    raise MemoryError(
        f'structure="{config.structure}" over {size:,} latents{of_rows} needs about '
        f"{needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free: "
        + (advice or f"{instead}a subset of the latents")
    )
