"""The choice of a curvature and its structure, by the user or from the program, its size and the
data, and a check of its memory."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from pyro_bdl.curvature.fisher import (
    ESTIMATION_DRAWS,
    empirical_columns,
    exact_columns,
    num_data,
    sampled_columns,
    site_parameters,
)
from pyro_bdl.curvature.prior import prior_precision
from pyro_bdl.curvature.structures import STRUCTURES, Auto, Full, Kernel, Kron, structure_of
from pyro_bdl.curvature.structures.base import Curvature, Structure
from pyro_bdl.distributions.families import Cotangent
from pyro_bdl.errors import warn
from pyro_bdl.program.batches import Batch, Batches, leading_size
from pyro_bdl.program.rows import ROWS
from pyro_bdl.program.subset import Subset
from pyro_bdl.program.trace import Run, Site
from pyro_bdl.utils.memory import available_memory
from pyro_bdl.utils.random_state import seeded
from pyro_bdl.utils.validation import one_of, whole_number

CURVATURES = ("ggn", "ggn-mc", "empirical-fisher", "hessian")
_SLACK = 1.1  # allowance for that of a batch, as rows of its Jacobian


@dataclass(frozen=True)
class CurvatureConfig:
    """The choice of a curvature matrix and its compressed form.

    :param structure: ``Kron()`` or another of ``structures``, or its name.
    :param curvature: "ggn", the generalized Gauss-Newton matrix; "ggn-mc", its Monte Carlo estimate
        from ``num_draws`` drawn observations per datum; "empirical-fisher"; or "hessian" (full
        only).
    :param num_draws: observations drawn per datum, by default 1 for "ggn-mc". "ggn" draws
        observations, by default 512, only for distributions without a closed form
        (``fisher.cell_roots``).
    :param rows: "alone" where the program runs on one row of the data at a time; "together" where
        its rows depend on each other, so that whole batches run.
    """

    structure: Structure = field(default_factory=Kron)
    curvature: str = "ggn"
    num_draws: int | None = None
    rows: str = "alone"

    def __post_init__(self) -> None:
        object.__setattr__(self, "structure", structure_of(self.structure))
        name = self.structure.name
        one_of(self.curvature, "curvature", CURVATURES)
        if self.curvature == "hessian" and name != "auto" and not self.kind.takes_hessian:
            able = (key for key, kind in STRUCTURES.items() if kind.curvature.takes_hessian)
            named = " or ".join(f'structure="{key}"' for key in able)
            raise ValueError(f'curvature="hessian" needs {named}: it may be indefinite')
        if self.structure.takes_products and self.curvature != "ggn":
            raise ValueError(
                f'structure="{name}" needs curvature="ggn", whose products with vectors are known, '
                f"got {self.curvature!r}"
            )
        one_of(self.rows, "rows", ROWS)
        if self.num_draws is not None:
            whole_number(self.num_draws, "num_draws")

    def columns(self, site: Site) -> Iterator[Cotangent]:
        """Yield cotangents whose outer products sum to the Fisher information of a site."""
        if self.curvature == "ggn-mc":
            return sampled_columns(site, self.num_draws or 1)
        if self.curvature == "empirical-fisher":
            return empirical_columns(site)
        return exact_columns(site, self.num_draws or ESTIMATION_DRAWS)

    def noise_factor(self, ratio: Tensor) -> Tensor:
        """The factor by which a change of a Normal's noise scales the curvature.

        :param ratio: (noise of the fit / current noise)^2.
        """
        return ratio.square() if self.curvature == "empirical-fisher" else ratio

    @property
    def kind(self) -> type[Curvature]:
        """The class of the curvature."""
        return self.structure.curvature


def fits(structure: Structure, size: int, like: Tensor, num_rows: int = 0) -> bool:
    """Return whether a structure over p latents fits in memory.

    :param like: a tensor with the dtype and device.
    :param num_rows: the number of rows of the data's Jacobians, for a structure that stores them
        (``rows_of``).
    """
    available = available_memory(like.device)
    return available is None or _bytes(structure, size, like, num_rows) <= available


def check_memory(
    config: CurvatureConfig,
    size: int,
    like: Tensor,
    *,
    num_rows: int = 0,
    advice: str | None = None,
) -> None:
    """Check that a structure fits in memory, before it is made.

    :param num_rows: as in ``fits``.
    :param advice: the advice in the error; by default it names the structures that fit.
    :raises MemoryError: if the structure needs more than is free.
    """
    structure = config.structure
    if fits(structure, size, like, num_rows):
        return
    fitting = [
        f'"{name}"'
        for name, kind in STRUCTURES.items()
        if not kind().stores_rows and fits(kind(), size, like)
    ]
    of_rows = f" and {num_rows:,} outputs of the data" if num_rows else ""
    instead = f"use structure={' or '.join(fitting)}, or " if fitting else "use "
    needed = _bytes(structure, size, like, num_rows)
    raise MemoryError(
        f'structure="{structure.name}" over {size:,} latents{of_rows} needs about '
        f"{needed / 2**30:.1f} GiB, {(available_memory(like.device) or 0) / 2**30:.1f} GiB are "
        f"free: {advice or instead + 'a subset of the latents'}"
    )


def _bytes(structure: Structure, size: int, like: Tensor, num_rows: int) -> float:
    return _SLACK * structure.memory(size, like, num_rows)


def chosen_config(
    config: CurvatureConfig,
    run: Run,
    leaves: Mapping[str, Tensor],
    subset: Subset,
    batch: Batch,
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

    :param run: the program on ``batch`` of the data, with its leaves.
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
    rows = rows_of(run, batch, batches, config)
    few_rows = rows < subset.size and rows <= kernel_up_to
    kernel_fits = batches.ranks is None and few_rows and fits(Kernel(), subset.size, like, rows)
    if kernel_fits and prior_precision(run, leaves, subset).has_inverse:
        return replace(config, structure=Kernel())
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
