"""The expected log likelihood of a program whose last layer's outputs are Gaussian.

A layer's outputs z (..., K) are N(m, diag(v)) for each datum, and one run of the program evaluates
log p(y | z) at points z = m + sqrt(v) e. How many points are needed depends on the observations,
which ``read_head`` finds: two are exact for a Normal with a location affine in z.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_bdl.distributions.parameters import (
    SEVERAL_CLASSES,
    base_distribution,
    unconstrained_parameters,
)
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides.last_layer_features import LastLayerTracker, Term
from pyro_bdl.program.linear_ops.tracker import Tag
from pyro_bdl.program.trace import Run
from pyro_bdl.utils.autograd import reaches

POINTS = 20  # of Gauss and Hermite, where two are not exact


class LayerOutputs(LastLayerTracker):
    """Tracker that adds ``change(term)`` to the product with a layer's weights.

    :ivar output: the layer's output after its bias.
    """

    rows_only = False

    def __init__(self, latents: Mapping[str, Tensor], change: Callable[[Term], Tensor]) -> None:
        super().__init__(latents)
        self.change = change
        self.output: Tensor | None = None

    def operate(self, func: Any, args: tuple, kwargs: dict, tagged: list[Tag]) -> Tensor:
        count = len(self.terms)
        result = super().operate(func, args, kwargs, tagged)
        new = self.terms[count:]
        if not new:
            return result
        products = [term for term in new if term.inputs is not None]
        if products:
            result = result + self.change(products[0]).reshape(result.shape).to(result)
        elif not any(operand is self.output for operand in (*args, *kwargs.values())):
            raise UnsupportedProgramError(
                f"the bias '{new[0].site}' is not added to the product with the layer's weights"
            )
        self.output = result
        return result


@dataclass(frozen=True)
class Head:
    """How observed sites depend on a layer's outputs z.

    Every number that is observed depends on one output by its first unconstrained parameter, and
    perhaps on another by its second one; or it is a class, with z as logits.

    :param first: the outputs that first parameters depend on, (K,), as 0 or 1; ``second`` likewise.
    :param partner: of each first output the second one of the same observation, else itself, (K,).
    :param exact: whether two points suffice for the first parameters.
    :param linear: whether all unconstrained parameters are affine in z.
    :param classes: the sites that observe classes.
    """

    first: Tensor
    second: Tensor
    partner: Tensor
    exact: bool
    linear: bool
    classes: tuple[str, ...]

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


def read_head(run: Run, output: Tensor, noise: Tensor) -> Head:
    """How the observed sites of a run depend on a layer's outputs.

    :param output: z.
    :param noise: zeros (R, K) that were added to the outputs, with a gradient.
    :raises UnsupportedProgramError: if an observation depends on several outputs, and is no class
        with the outputs as logits; or if something else depends on them.
    """
    others = [site for site in (*run.priors.values(), *run.factors.values())]
    if run.discrete is not None or any(reaches(site.log_prob().sum(), [noise]) for site in others):
        raise UnsupportedProgramError("more than the observations depends on the layer's outputs")
    outputs = noise.shape[1]
    roles = torch.zeros(2, outputs, device="cpu")
    partner = torch.arange(outputs, device="cpu")
    exact = linear = True
    classes = []
    for name, site in run.observed.items():
        base = base_distribution(site.distribution)
        moving = {
            key: value
            for key, value in unconstrained_parameters(base, output).items()
            if reaches(value, [noise])
        }
        if type(base).__name__ in SEVERAL_CLASSES and moving.get("logits") is output:
            classes.append(name)
            continue
        cells = _cells(name, base, moving, noise)
        for place, (key, (_, columns, is_affine)) in enumerate(cells.items()):
            roles[place, columns] = 1.0
            linear = linear and is_affine
            if place == 0:
                normal = type(base).__name__ == "Normal" and key == "loc"
                exact = exact and normal and is_affine
        if len(cells) == 2:
            (rows, columns, _), (other_rows, other_columns, _) = cells.values()
            if rows != other_rows:
                raise UnsupportedProgramError(f"the site '{name}' takes outputs of several rows")
            partner[columns] = torch.tensor(other_columns, device="cpu")
    used = roles.sum(0)
    if bool((used > 1).any()) or (classes and bool(used.any())):
        raise UnsupportedProgramError("an output of the layer enters several parameters")
    if not classes and not bool(used.any()):
        raise UnsupportedProgramError("no observation depends on the layer")
    return Head(roles[0], roles[1], partner, exact, linear, tuple(classes))


def _cells(
    name: str, base: Any, moving: Mapping[str, Tensor], noise: Tensor
) -> dict[str, tuple[list[int], list[int], bool]]:
    """For each parameter the row and the column of the output that each of its numbers depends on,
    and whether it is affine in it."""
    alone = all(value.shape == base.batch_shape for value in moving.values())
    if len(moving) > 2 or base.event_shape or not alone:
        raise UnsupportedProgramError(
            f"each observation of the site '{name}' ({type(base).__name__}) depends on several "
            "outputs of the layer"
        )
    result = {}
    for key, value in moving.items():
        rows, columns, is_affine = [], [], True
        for number in value.reshape(-1):
            (slope,) = torch.autograd.grad(number, noise, create_graph=True)
            entries = slope.detach().nonzero()
            if len(entries) != 1:
                raise UnsupportedProgramError(
                    f"a number of the site '{name}' depends on {len(entries)} outputs of the layer"
                )
            row, column = entries[0].tolist()
            rows.append(row)
            columns.append(column)
            is_affine = is_affine and not reaches(slope, [noise])
        result[key] = rows, columns, is_affine
    return result
