"""The outputs of a program as linear functions of its latents: f(u) = f(u*) + J (u - u*).

The linearized predictive takes their moments and draws under a Gaussian over u, and the evidence of
the linearized model takes its likelihood at a point. ``LinearOutputs`` has the value f(u*), the
Jacobian J as factors, and the product of J with one vector.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian.block_position import BlockPosition
from pyro_bdl.curvature.jacobian.jacobian import Block, DenseBlock, Jacobian
from pyro_bdl.curvature.jacobian.linearization import Linearization
from pyro_bdl.curvature.jacobian.use_blocks import working_dtype
from pyro_bdl.curvature.structures.base import Precision
from pyro_bdl.curvature.structures.draws import LinearDraws
from pyro_bdl.distributions.take_apart import base_distribution
from pyro_bdl.program.trace import Run, Site
from pyro_bdl.program.unconstrained_parameters import (
    known_kind,
    unconstrained_parameters,
    with_unconstrained,
)
from pyro_bdl.utils.autograd import reaches


class LinearOutputs:
    """Tensors of one run of a program as linear functions of the latents of a subset.

    For each of n data the K numbers that these latents move are one row.

    :param at: the run.
    :param label: a name of the tensors, the same in every batch.
    :param read: the tensors by name in any run of the program.
    :param has_data: whether their leading axis numbers the data; else they are of one datum.
    :param differentiable: keep the graph back to the program's arguments and parameters; the
        Jacobian is then one dense matrix for each datum.
    """

    # where they are the parameters of an observed site: its name, its distribution's, and the site
    name = ""
    kind = ""
    site: Site | None = None

    def __init__(
        self,
        at: Linearization,
        label: Any,
        read: Callable[[Run], dict[str, Tensor]],
        *,
        has_data: bool,
        differentiable: bool = False,
    ) -> None:
        self.at, self.label, self.has_data = at, label, has_data
        self.differentiable = differentiable
        with torch.enable_grad():
            found = read(at.run)
        leaves = [at.leaves[name] for name in at.subset.parts]
        self.values = {key: self.kept(value) for key, value in found.items()}
        self.moving = [key for key, value in found.items() if reaches(value, leaves)]
        self.num_data = len(next(iter(found.values()))) if has_data else 1
        self._read = read
        self._jacobian: Jacobian | None = None

    def kept(self, value: Tensor) -> Tensor:
        """A result with its graph where it is to be differentiated, else without."""
        return value if self.differentiable else value.detach()

    @classmethod
    def of_site(
        cls, at: Linearization, name: str, site: Site, *, differentiable: bool = False
    ) -> "LinearOutputs":
        """The unconstrained parameters of an observed site."""

        def read(run: Run) -> dict[str, Tensor]:
            return unconstrained_parameters(run.observed[name].distribution, run)

        kind, base = known_kind(site), base_distribution(site.distribution)
        result = cls(
            at,
            ("observed", name),
            read,
            has_data=len(base.batch_shape) > 0,
            differentiable=differentiable,
        )
        result.name, result.kind, result.site = name, kind, site
        return result

    @classmethod
    def of_deterministic(
        cls, at: Linearization, name: str, *, differentiable: bool = False
    ) -> "LinearOutputs":
        """A deterministic site, named "value"."""

        def read(run: Run) -> dict[str, Tensor]:
            return {"value": run.deterministic[name]}

        has_data = at.run.deterministic[name].dim() > 0
        return cls(
            at, ("deterministic", name), read, has_data=has_data, differentiable=differentiable
        )

    @property
    def mean(self) -> Tensor:
        """(n, K), K the numbers of a datum that move."""
        parts = [self.values[key].reshape(self.num_data, -1) for key in self.moving]
        like = next(iter(self.values.values()))
        return torch.cat(parts, -1) if parts else like.new_zeros(self.num_data, 0)

    @property
    def jacobian(self) -> Jacobian:
        """The K numbers as K columns."""
        if self._jacobian is None and self.differentiable:
            self._jacobian = self._dense_jacobian()
        elif self._jacobian is None:
            with torch.enable_grad():
                pullback = self.at.pullback(self._outputs, self.num_data, label=self.label)
            self._jacobian = pullback.identity()
        return self._jacobian

    def _dense_jacobian(self) -> Jacobian:
        """Row by row, each with its graph."""
        at = self.at
        with torch.enable_grad():
            flat = self.mean
            rows = [at.gradient(output, create_graph=True) for output in flat.reshape(-1)]
            dtype = working_dtype(at.vector.dtype)
            values = torch.stack(rows).unflatten(0, flat.shape).transpose(0, 1).to(dtype)
        blocks: list[Block] = [
            DenseBlock(BlockPosition((name, -1), part), values[..., part])
            for name, part in at.subset.parts.items()
        ]
        like = at.vector.new_empty(0, dtype=dtype)
        return Jacobian(blocks, flat.shape[1], len(flat), at.subset.size, like)

    def _outputs(self, run: Run) -> list[Tensor]:
        found = self._read(run)
        return [found[key] for key in self.moving]

    def moved(self, offset: Tensor) -> dict[str, Tensor]:
        """All tensors, (*shape), at one offset (p,) of the subset, differentiable in it.

        J offset is the derivative of J' v in v times the offset, so that no Jacobian is formed.
        """
        values = dict(self.values)
        if not self.moving:
            return values
        subset = self.at.subset
        change = subset.put(torch.zeros_like(self.at.vector), offset.to(self.at.vector))
        change_by_site = subset.layout.unflatten(change)
        with torch.enable_grad():
            outputs = self._outputs(self.at.run)
            cotangents = [torch.zeros_like(output, requires_grad=True) for output in outputs]
            pulled = torch.autograd.grad(
                outputs,
                [self.at.leaves[name] for name in subset.parts],
                cotangents,
                create_graph=True,
                materialize_grads=True,
            )
            pairs = zip(pulled, subset.parts, strict=True)
            linear = {name: gradient for gradient, name in pairs if gradient.requires_grad}
            slopes = torch.autograd.grad(
                list(linear.values()),
                cotangents,
                [change_by_site[name] for name in linear],
                create_graph=True,
                materialize_grads=True,
            )
        for key, slope in zip(self.moving, slopes, strict=True):
            values[key] = values[key] + slope
        return values

    def observed(self, values: dict[str, Tensor]) -> Site:
        """The observed site where its parameters are ``values``, of ``moved`` or ``draws``."""
        assert self.site is not None
        return with_unconstrained(self.site, values)

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """(..., n, K) by name, (..., *shape)."""
        shapes = [self.values[key].shape for key in self.moving]
        sizes = [shape.numel() // self.num_data for shape in shapes]
        return {
            key: part.reshape(part.shape[:-2] + shape)
            for key, shape, part in zip(self.moving, shapes, flat.split(sizes, -1), strict=True)
        }

    def draws(self, offsets: LinearDraws) -> dict[str, Tensor]:
        """All tensors, (S, *shape), at S offsets of the subset; some are expanded."""
        values = {
            key: value.expand(len(offsets), *value.shape) for key, value in self.values.items()
        }
        if self.moving:
            change = self.kept(offsets.apply(self.jacobian))
            values |= self.split(self.mean + change.to(self.mean))
        return values

    def gaussian(self, precision: Precision) -> "GaussianOutputs":
        """Their distribution where the subset's offset is N(0, precision^-1)."""
        return GaussianOutputs(self, self.mean, precision)


@dataclass
class GaussianOutputs:
    """N(mean, covariance) for every datum, mean (n, K); of the covariance only what is asked for.

    :param precision: of the subset's offset.
    """

    outputs: LinearOutputs
    mean: Tensor
    precision: Precision

    @cached_property
    def covariance(self) -> Tensor:
        """(n, K, K)."""
        if not self.outputs.moving:
            return self.mean.new_zeros(*self.mean.shape, self.mean.shape[-1])
        covariance = self.precision.covariance(self.outputs.jacobian)
        return self.outputs.kept(covariance).to(self.mean)

    @cached_property
    def diagonal(self) -> Tensor:
        """The covariance's diagonals, (n, K)."""
        if not self.outputs.moving:
            return torch.zeros_like(self.mean)
        if "covariance" in self.__dict__:
            return self.covariance.diagonal(dim1=-2, dim2=-1)
        variances = self.precision.output_variances(self.outputs.jacobian)
        return self.outputs.kept(variances).to(self.mean)

    def means(self) -> dict[str, Tensor]:
        """By name, those that move."""
        return self.outputs.split(self.mean)

    def variances(self) -> dict[str, Tensor]:
        """By name, those that move."""
        return self.outputs.split(self.diagonal)

    def cells(self, key: str) -> tuple[Tensor, Tensor]:
        """Mean and variance of one tensor, moving or not, (n, cells)."""
        mean = self.outputs.values[key].reshape(len(self.mean), -1)
        variance = self.variances().get(key)
        return mean, torch.zeros_like(mean) if variance is None else variance.reshape(mean.shape)

    def block(self, row: str, column: str) -> Tensor:
        """The covariances of the cells of two tensors, (n, cells, cells)."""
        values, moving = self.outputs.values, self.outputs.moving
        sizes = [values[key].numel() // len(self.mean) for key in (row, column)]
        if row not in moving or column not in moving:
            return self.mean.new_zeros(len(self.mean), *sizes)
        starts, start = {}, 0
        for key in moving:
            starts[key] = start
            start += values[key].numel() // len(self.mean)
        i, j = starts[row], starts[column]
        return self.covariance[:, i : i + sizes[0], j : j + sizes[1]]


def observed_outputs(
    at: Linearization, *, differentiable: bool = False
) -> dict[str, LinearOutputs]:
    """The unconstrained parameters of each observed site."""
    return {
        name: LinearOutputs.of_site(at, name, site, differentiable=differentiable)
        for name, site in at.run.observed.items()
    }
