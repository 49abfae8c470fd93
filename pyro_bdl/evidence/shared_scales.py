"""Warning of a prior scale that normalized weights share with others."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from pyro_bdl.curvature.hyperparameters import ParameterReading, owners_of_priors
from pyro_bdl.distributions.parameters import base_distribution, parameters_of
from pyro_bdl.errors import warn
from pyro_bdl.guides.base import Guide
from pyro_bdl.program.batch_norm import without_running_statistics
from pyro_bdl.program.batches import Batch, leading_size
from pyro_bdl.program.network_sites import OWNER_KEY
from pyro_bdl.program.normalized import NORMALIZATIONS, normalized_groups
from pyro_bdl.program.saved import few_rows
from pyro_bdl.program.subset import Subset
from pyro_bdl.program.trace import leave_open, record
from pyro_bdl.utils.module_state import evaluation_mode

_BATCH_NORMS = nn.modules.batchnorm._NormBase
_ROWS = 32  # enough for a BatchNorm layer's statistics
_SHOWN = 6  # groups in the warning


def warn_of_shared_scales(
    guide: Guide, subset: Subset, reading: ParameterReading, batch: Batch, *, stacklevel: int
) -> None:
    """Warn, once for a program, if a hyperparameter that the evidence sets scales the prior of
    normalized weights together with that of others.

    The size k of normalized weights does not change the outputs, and their best precision is
    proportional to 1 / k^2: a shared one, and the predictive, depend on an arbitrary k (Antoran et
    al. 2022, proposition 3 and recommendation 2). Where no scale is learned there is nothing to
    separate, and a prior of ``PerNormalizedGroup`` is the same prior: no warning.

    :param guide: a guide of the program; its center is where weights are scaled.
    :param reading: of the program.
    :param batch: some data.
    """
    looked_at = f"shared scales of {', '.join(subset.parts)}"
    if "shared scales" in guide.told or looked_at in guide.told:
        return
    guide.told.add(looked_at)
    owners = owners_of_priors(reading, subset)
    sets = {name: {s for s, owner in owners.items() if owner == name} for name in owners.values()}
    shared = {name: sites for name, sites in sets.items() if len(sites) > 1}
    sites = [site for site in subset.parts if any(site in known for known in shared.values())]
    groups = _normalized(guide, sites, batch) if sites else {}
    found = {
        name: [group for group, own in groups.items() if known & set(own) and known - set(own)]
        for name, known in shared.items()
    }
    name = max(found, key=lambda name: len(found[name]), default="")
    if not found.get(name):
        return
    guide.told.add("shared scales")
    names = ", ".join(repr(group) for group in found[name][:_SHOWN])
    more = ", ..." if len(found[name]) > _SHOWN else ""
    warn(
        f"the weights of {names}{more} are normalized, so that their size has no effect on the "
        f"outputs, but the prior scale '{name}' is shared with other weights: the evidence and the "
        "predictive depend on an arbitrary size; give every normalized layer a scale of its own, "
        "as in bayesianize(net, priors.PerNormalizedGroup(prior, net, x))",
        "normalized-layers",
        stacklevel=stacklevel + 1,
    )


@torch.no_grad()
def _normalized(guide: Guide, sites: list[str], batch: Batch) -> dict[str, tuple[str, ...]]:
    """Normalized groups among the layers of some sites."""
    model, layout = guide.program_model, guide.require_layout()
    vector = guide.location().detach()
    modules = guide.program_modules
    statistics = any(isinstance(module, _BATCH_NORMS) for module in modules)
    args, kwargs = few_rows(model, layout, vector, batch, number=_ROWS if statistics else 2)
    layers: dict[str, list[str]] = {}
    trace: Any = guide.prototype_trace
    for site in sites:  # of ``bayesianize``, with the module that a weight is of
        known = {} if trace is None else trace.nodes[site]["infer"]
        if not isinstance(known.get(OWNER_KEY, (None,))[0], NORMALIZATIONS):
            layers.setdefault(site.rpartition(".")[0], []).append(site)
    values = layout.constrain(vector)[0]
    normalizing: Any = modules if leading_size((args, kwargs)) > 1 else []
    with evaluation_mode(modules), without_running_statistics(normalizing):
        subsamples = record(model, values, args, kwargs, draw=leave_open).subsamples

        def outputs(names: Collection[str], factor: float) -> list[Tensor]:
            scaled = {name: factor * values[name] for name in names}
            run = record(model, values | subsamples | scaled, args, kwargs, draw=leave_open)
            bases = [base_distribution(site.distribution) for site in run.observed.values()]
            return [value for base in bases for value in parameters_of(base).values()]

        joint = any(isinstance(module, NORMALIZATIONS) for module in modules)
        return normalized_groups(outputs, layers, joint=joint)
