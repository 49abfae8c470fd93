"""The expected log likelihood of a program whose last layer's outputs are Gaussian.

A layer's outputs z (..., K) are N(m, diag(v)) for each datum, and one run of the program evaluates
log p(y | z) at points z = m + sqrt(v) e. How many points are needed depends on the observations,
which ``read_head`` reads off the operations between z and their parameters: two are exact for a
Normal with a location affine in z.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import Categorical, ExpTransform, Normal, OneHotCategorical

from pyro_bdl.distributions.parameters import (
    base_distribution,
    bijections,
    is_known,
    parameters_of,
)
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.program.linear_ops.last_layer import LastLayer, OutputTag, Path
from pyro_bdl.program.trace import Run, Site

POINTS = 20  # of Gauss and Hermite, where two are not exact


@dataclass(frozen=True)
class Head:
    """How observed sites depend on a layer's outputs z.

    Every number that is observed depends on one output, or by two parameters on two outputs of the
    same row; or it is a class, with z as logits.

    :param second: the outputs that second parameters depend on, (K,), as 0 or 1; ``first`` those
        that get noise besides these.
    :param partner: of each first output the second one of the same observation, else itself, (K,).
    :param exact: whether two points suffice for the first parameters.
    :param linear: whether all unconstrained parameters are affine in z.
    :param classes: the sites that observe classes.
    :param ways: from z to the parameters, as ``ways_of`` returns them.
    """

    first: Tensor
    second: Tensor
    partner: Tensor
    exact: bool
    linear: bool
    classes: tuple[str, ...]
    ways: "Ways"

    @property
    def rule(self) -> str:
        """How expectations over z are taken: "exact", "points" or "bound"."""
        if self.classes:
            return "bound"
        return "exact" if self.exact and not bool(self.second.any()) else "points"

    def points(self) -> tuple[Tensor, Tensor]:
        """Points e (Q, 2) for the noise of first and second outputs, and their weights (Q,)."""
        first, second = (bool(used.any()) for used in (self.first, self.second))
        a, u = _gauss_hermite((2 if self.exact else POINTS) if first else 1)
        b, v = _gauss_hermite(POINTS if second else 1)
        return torch.cartesian_prod(a, b), torch.outer(u, v).reshape(-1)


def _gauss_hermite(count: int) -> tuple[Tensor, Tensor]:
    """Points and weights of expectations under a standard Normal."""
    points, weights = np.polynomial.hermite_e.hermegauss(count)
    made = torch.tensor(np.stack([points, weights / math.sqrt(2 * math.pi)]), device="cpu")
    return made[0], made[1]


def add_jensen(run: Run, classes: tuple[str, ...], output: Tensor, variance: Tensor) -> None:
    """Lower the log likelihood log p(y | z) of classes at z = m to a bound of its expectation.

    By Jensen's inequality E[log sum_k exp z_k] <= log sum_k exp(m_k + v_k / 2), so that

        E[log p(y | z)] >= m_y - log sum_k exp(m_k + v_k / 2)

    The difference from log p(y | m) is added to the run as a factor with the site's scale.

    :param output: m (..., K); ``variance``: v.
    """
    for name in classes:
        site = run.observed[name]
        change = output.logsumexp(-1) - (output + 0.5 * variance).logsumexp(-1)
        batch = site.distribution.batch_shape
        change = change.reshape(*batch, -1).sum(-1)
        nothing = change.new_empty(*batch, 0)
        run.factors[f"{name}.jensen"] = site._replace(distribution=dist.Unit(change), value=nothing)


Ways = tuple[tuple[str, str, Path, tuple[str, ...]], ...]


def ways_of(run: Run, seen: LastLayer) -> Ways:
    """The operations from a layer's output to the parameters of a run's observed sites.

    Two runs with the same ways have the same head. Factors that depend on the output count too,
    and numbers that left it.
    """
    left: Ways = () if seen.left is None else (("", seen.left, Path.MIXED, ()),)
    return left + tuple(
        (name, key, tag.path, tag.steps)
        for name, site in (run.observed | run.factors | run.prior_factors).items()
        for key, tag in tags_of(site, seen).items()
    )


def tags_of(site: Site, seen: LastLayer) -> dict[str, OutputTag]:
    """The parameters of an observed site that are computed from the layer's output."""
    base = base_distribution(site.distribution)
    with seen:
        one_hot = isinstance(base, OneHotCategorical)
        parameters = {"logits": base.logits} if one_hot else parameters_of(base)
    tags = {key: seen.output_tag(value) for key, value in parameters.items()}
    return {key: tag for key, tag in tags.items() if tag is not None}


def depends(site: Site, seen: LastLayer) -> bool:
    """Return whether the log density of a statement depends on the layer, or on its weights."""
    with seen:
        return seen.output_tag(site.log_prob()) is not None


def read_head(run: Run, seen: LastLayer) -> Head:
    """How the observed sites of a run depend on a layer's output z, by the operations between.

    :param seen: the tracker of the run, with gradients on, of the layer's latents alone.
    :raises UnsupportedProgramError: if an observed number depends on several outputs, or on one by
        functions that are not known, and is no class with the outputs as logits; or if something
        else depends on them.
    """
    _check_others(run, seen)
    outputs = seen.layers[-1].outputs
    partner = torch.arange(outputs, device="cpu")
    second = torch.zeros(outputs, device="cpu")
    paired = torch.zeros(outputs, device="cpu")  # outputs with a partner
    exact = linear = True
    classes, used = [], 0
    for name, site in run.observed.items():
        base, tags = base_distribution(site.distribution), tags_of(site, seen)
        used += len(tags)
        if _are_logits(base, tags, seen):
            classes.append(name)
            continue
        _check_alone(name, site, tags)
        places = [tag.index().reshape(-1).cpu() for tag in tags.values()]
        is_pair = len(places) == 2 and not torch.equal(*places)
        if is_pair:
            (rows, left), (other_rows, right) = ((p // outputs, p % outputs) for p in places)
            partner[left], second[right], paired[left] = right, 1.0, 1.0
            by_data = any(tag.by_data for tag in tags.values())
            if by_data or not (torch.equal(rows, other_rows) and torch.equal(partner[left], right)):
                raise UnsupportedProgramError(
                    f"the site '{name}' pairs its outputs in several ways"
                )
        maps = bijections(base)
        for place, (key, tag) in enumerate(tags.items()):
            is_affine = tag.path <= Path.AFFINE
            if place == 0:
                is_location = isinstance(base, Normal) and key == "loc" and is_affine
                exact = exact and is_location and (is_pair or len(tags) == 1)
            is_log = isinstance(maps.get(key), ExpTransform)
            linear = linear and (tag.path is Path.EXP if is_log else is_affine)
    if bool((paired * second).any()) or (classes and used > len(classes)):
        raise UnsupportedProgramError("an output of the layer enters several parameters")
    if not used:
        raise UnsupportedProgramError("no observation depends on the layer")
    first = torch.zeros_like(second) if classes else 1.0 - second
    return Head(first, second, partner, exact, linear, tuple(classes), ways_of(run, seen))


def _are_logits(base: Any, tags: Mapping[str, OutputTag], seen: LastLayer) -> bool:
    """Return whether a site's classes have all outputs of a row as logits, in order."""
    tag = tags.get("logits")
    if not isinstance(base, Categorical | OneHotCategorical) or tag is None or len(tags) > 1:
        return False
    return tag.path is Path.LOGITS and tag.root is seen.output and tag.is_complete


def _check_others(run: Run, seen: LastLayer) -> None:
    """Check that nothing but parameters of observed sites is computed from the outputs."""
    if seen.left is not None:
        raise UnsupportedProgramError(
            "the program changes the layer's outputs in place, or reads numbers off them: "
            f"'{seen.left}'"
        )
    own = {term.site for layer in seen.layers for term in layer.terms}
    other = run.discrete is not None
    for name, site in (run.priors | run.factors).items():
        other = other or (bool(tags_of(site, seen)) if name in own else depends(site, seen))
    for site in run.observed.values():
        parts = (site.value, site.scale, site.mask)
        other = other or any(seen.output_tag(part) is not None for part in parts)
    if other:
        raise UnsupportedProgramError("more than the observations depends on the layer's outputs")


def _check_alone(name: str, site: Site, tags: Mapping[str, OutputTag]) -> None:
    """Check that each number of a site depends on one or two outputs by known functions."""
    base = base_distribution(site.distribution)
    for key, tag in tags.items():
        if tag.path is Path.MIXED and tag.steps:
            raise UnsupportedProgramError(
                f"the parameter '{key}' of the site '{name}' is computed from the layer's outputs "
                f"by '{tag.steps[-1].partition('(')[0]}', of which it is not known that "
                "each number depends on one output (if it does, declare the function by link=)"
            )
        alone = tag.path.is_alone and tag.tensor.shape == base.batch_shape
        if not alone or base.event_shape or len(tags) > 2 or not is_known(site.distribution):
            raise UnsupportedProgramError(
                f"each observation of the site '{name}' ({type(base).__name__}) depends on several "
                "outputs of the layer"
            )
