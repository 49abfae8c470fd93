"""The tensors of a run over single rows of data: compared with rows together, joined to one run."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian.recorded_rows import RecordedRows
from pyro_bdl.distributions.parameters import has_masks, is_known, parameters_of, rebuilt
from pyro_bdl.program.trace import Run, Site

_SAME = {torch.float64: 1e-6, torch.float32: 1e-3}  # of the largest output


@dataclass
class Plan:
    """Facts about all rows of some shapes, from a few that ran together.

    :param plates: of the data, with the index that a row alone has in them.
    :param memory: bytes that the outputs of a row's operations take.
    :param numbers: the parameters of a row's observed distributions.
    :param batches: the number of batches so far.
    :param scaled: observed sites whose plate states a number of data.
    :param deterministic: whether a deterministic site has the rows in front; those that rows alone
        do not have are left out.
    """

    plates: dict[str, Tensor]
    memory: float
    numbers: float
    batches: int = 1
    scaled: set[str] = field(default_factory=set)
    deterministic: dict[str, bool] = field(default_factory=dict)


@dataclass
class MappedRows:
    """The tensors of a run over single rows, each with the rows in front, and its statements.

    :param run: of one row.
    :param templates: the observed distributions; None where one is not known.
    :param observed: tensors of the observed sites, (n, ...).
    :param deterministic: the deterministic sites, (n, *shape in one row).
    """

    run: Run
    rows: RecordedRows
    templates: dict[str, Any]
    observed: dict[str, dict[str, Tensor]]
    deterministic: dict[str, Tensor]

    @property
    def needs_whole(self) -> bool:
        """True if the tensors do not make the run of all rows."""
        run = self.run
        factors = run.factors or run.prior_factors
        return bool(factors or run.discrete) or None in self.templates.values()

    def agree(self, few: Run, plan: Plan, count: int) -> bool:
        """Compare single rows with ``count`` rows together, and complete the plan."""
        together = {name: apart(site)[1] for name, site in few.observed.items()}
        if self.observed.keys() != together.keys() or not all(
            own.keys() == together[name].keys()
            and all(_close(value, together[name][key]) for key, value in own.items())
            for name, own in self.observed.items()
        ):
            return False
        for name, site in few.observed.items():
            if site.subsampling != self.run.observed[name].subsampling:
                plan.scaled.add(name)
        for name, value in tensors_of(few.deterministic).items():
            row = self.deterministic.get(name)
            if row is None:
                continue
            in_front = row.dim() > 1 and row.shape[1] == 1 and value.dim() > 0
            if in_front and len(value) == count and _close(row.flatten(0, 1), value):
                plan.deterministic[name] = True
            elif _close(row, value.expand(len(row), *value.shape)):
                plan.deterministic[name] = False
        return True

    def joined(self, whole: Run, plan: Plan) -> tuple[Run, dict[str, dict[str, Tensor]]]:
        """The run of all rows, and the tensors of the observed distributions that are not known.

        :param whole: a run over all rows where one is needed, else the run of one row.
        """
        count, parameters = self.rows.num_data, {}
        run = copy.copy(whole)
        run.observed = dict(run.observed)
        for name, site in self.run.observed.items():
            own, template = dict(self.observed[name]), self.templates[name]
            more = {
                key: own.pop(f"site.{key}", getattr(site, key))
                for key in ("value", "mask", "scale")
            }
            if template is None:
                parameters[name] = own
                continue
            if name in plan.scaled:
                more["scale"] = more["scale"] / count
                more["subsampling"] = site.subsampling / count
            run.observed[name] = site._replace(distribution=rebuilt(template, own), **more)
        run.deterministic = {}
        for name, in_front in plan.deterministic.items():
            value = self.deterministic[name]
            run.deterministic[name] = value.flatten(0, 1) if in_front else value[0]
        return run, parameters


def apart(site: Site) -> tuple[Any, dict[str, Tensor]]:
    """An observed distribution, None if it is not known or has masks inside, and the tensors of the
    site."""
    known = is_known(site.distribution) and not has_masks(site.distribution)
    tensors = parameters_of(site.distribution)
    if site.value is not None:
        tensors["site.value"] = site.value
    for name in ("mask", "scale"):
        value = getattr(site, name)
        if isinstance(value, Tensor):
            tensors[f"site.{name}"] = value.expand(site.distribution.batch_shape)
    return site.distribution if known else None, tensors


def tensors_of(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _close(some: Tensor, other: Tensor) -> bool:
    """Return whether two tensors agree along their first axes, as far as both go."""
    count = min(len(some), len(other))
    if some.shape[1:] != other.shape[1:]:
        return False
    some, other = some[:count].detach(), other[:count].detach()
    if not other.is_floating_point():
        return torch.equal(some, other)
    slack = _SAME.get(other.dtype, 0.05) * float(other.abs().nan_to_num(0.0, 0.0).max())
    return torch.allclose(some, other, rtol=0.0, atol=slack, equal_nan=True)
