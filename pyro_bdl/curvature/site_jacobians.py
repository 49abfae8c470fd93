"""Jacobians of observed sites, whose rows' outer products add up to a curvature."""

from collections.abc import Iterator

from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.curvature.fisher import cell_weights, num_data, site_parameters
from pyro_bdl.curvature.jacobian.jacobian import Jacobian
from pyro_bdl.curvature.jacobian.linearization import Linearization, Pullback
from pyro_bdl.distributions.families import Cotangent
from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.program.trace import Site
from pyro_bdl.utils.autograd import reaches
from pyro_bdl.utils.memory import bytes_at_once

_COLUMNS_BUDGET = 8 * 2**20  # bytes of columns that are stacked, which copies them


def fisher_jacobians(linearization: Linearization, config: CurvatureConfig) -> Iterator[Jacobian]:
    """Yield Jacobians whose rows' outer products add up to the batch's curvature."""
    for name, site in linearization.run.observed.items():
        known = None if linearization.rows is None else linearization.rows.num_data
        if config.kind.takes_single_rows and num_data(site) not in (1, known):
            raise UnsupportedProgramError(
                f'structure="{config.structure}" takes the rows of the data one at a time, and '
                f"those of site '{name}' depend on each other, or are no rows of the program's "
                "arguments: pass tensors whose first dimension numbers the data, or use "
                'structure="full" or "diag"'
            )
        yield from site_jacobians(linearization, name, config)


def site_jacobians(
    linearization: Linearization, name: str, config: CurvatureConfig
) -> Iterator[Jacobian]:
    """Yield the Jacobians of one observed site, each datum counted once."""
    site = linearization.run.observed[name]
    if not site_parameters(site):
        _check_readable(linearization, name, site)
        return
    known = _softmax_jacobian(linearization, name, site, config)
    if known is not None:
        yield known
        return

    def jacobian(keys: tuple[str, ...], columns: list[Cotangent]) -> Jacobian:
        pullback = _pullback(linearization, name, keys)
        return pullback.jacobian([[column[key] for key in keys] for column in columns])

    groups: dict[tuple[str, ...], list[Cotangent]] = {}
    most = _columns_at_once(linearization, num_data(site), config)
    for column in config.columns(site):
        touched = tuple(key for key, value in column.items() if value.any())
        if not touched:
            continue
        groups.setdefault(touched, []).append(column)
        if len(groups[touched]) >= most:
            yield jacobian(touched, groups.pop(touched))
    for touched, columns in groups.items():
        yield jacobian(touched, columns)


def _check_readable(linearization: Linearization, name: str, site: Site) -> None:
    """Check that a site's density depends on the latents only through its parameters.

    :raises ValueError: if the latents enter the distribution in an unknown way.
    """
    leaves = [linearization.leaves[part] for part in linearization.subset.parts]
    if reaches(site.log_prob().sum(), leaves):
        kind = type(base_distribution(site.distribution)).__name__
        raise ValueError(
            f"the Fisher information of site '{name}' is not known: its {kind} is not made of "
            'tensors that can be read off it; use structure="full" with curvature="hessian", or '
            "observe a distribution with parameters"
        )


def _softmax_jacobian(
    linearization: Linearization, name: str, site: Site, config: CurvatureConfig
) -> Jacobian | None:
    """Return all columns at once if the subset is the last layer of a classifier; else None."""
    base = base_distribution(site.distribution)
    if (
        config.curvature != "ggn"
        or not config.kind.takes_softmax
        or type(base).__name__ not in ("Categorical", "OneHotCategorical")
        or tuple(site_parameters(site)) != ("logits",)
        or len(base.batch_shape) != 1
    ):
        return None
    return _pullback(linearization, name, ("logits",)).softmax(cell_weights(site).square())


def _pullback(linearization: Linearization, name: str, keys: tuple[str, ...]) -> Pullback:
    """Return a site's parameters in a form that can be differentiated datum by datum."""
    parameters = linearization.parameters(name)
    return linearization.pullback(
        [parameters[key] for key in keys], num_data(linearization.run.observed[name])
    )


def _columns_at_once(linearization: Linearization, count: int, config: CurvatureConfig) -> int:
    item = linearization.vector.element_size()
    uses = [] if linearization.rows is None else linearization.rows.uses
    per_column = item * count * sum(use.output_shape.numel() for use in uses)
    shared = [use.shape.numel() for use in uses if use.unfold is not None]
    subset, kind = linearization.subset, config.kind
    numbers = {"rows": subset.size, "entries": max(shared, default=0), "factors": 0}
    partial = any(entries is not None for entries in subset.chosen.values())
    per_column += item * count * numbers["rows" if partial else kind.per_column or kind.makes]
    return max(1, int(bytes_at_once(_COLUMNS_BUDGET) / max(1, per_column)))
