"""What a program computes for its data as a linear function of the latents."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian.jacobian import Jacobian
from pyro_bdl.curvature.jacobian.linearization import Linearization
from pyro_bdl.curvature.structures.draws import Offsets
from pyro_bdl.curvature.structures.precision import Precision
from pyro_bdl.distributions.take_apart import base_distribution
from pyro_bdl.program.trace import Run, Site
from pyro_bdl.program.unconstrained_parameters import known_kind, natural_parameters
from pyro_bdl.utils.autograd import reaches


class Outputs:
    """Tensors of one run, flattened to (n, K): those that the latents of the subset move.

    :param at: the run.
    :param label: names them, the same in every batch.
    :param read: the tensors by name in any run of the program.
    :param has_data: whether their leading axis numbers the data; else they are of one datum.
    """

    kind = ""  # of an observed site the name of its distribution

    def __init__(
        self,
        at: Linearization,
        label: Any,
        read: Callable[[Run], dict[str, Tensor]],
        *,
        has_data: bool,
    ) -> None:
        self.at, self.label, self.has_data = at, label, has_data
        with torch.enable_grad():
            found = read(at.run)
        leaves = [at.leaves[name] for name in at.subset.parts]
        self.values = {key: value.detach() for key, value in found.items()}
        self.moving = [key for key, value in found.items() if reaches(value, leaves)]
        self.num_data = len(next(iter(found.values()))) if has_data else 1
        self._read = read
        self._jacobian: Jacobian | None = None

    @classmethod
    def of_site(cls, at: Linearization, name: str, site: Site) -> "Outputs":
        """The unconstrained parameters of an observed site."""

        def read(run: Run) -> dict[str, Tensor]:
            return natural_parameters(run.observed[name].distribution, run)

        kind, base = known_kind(site), base_distribution(site.distribution)
        result = cls(at, ("observed", name), read, has_data=len(base.batch_shape) > 0)
        result.kind = kind
        return result

    @classmethod
    def of_deterministic(cls, at: Linearization, name: str) -> "Outputs":
        """A deterministic site, named "value"."""

        def read(run: Run) -> dict[str, Tensor]:
            return {"value": run.deterministic[name]}

        has_data = at.run.deterministic[name].dim() > 0
        return cls(at, ("deterministic", name), read, has_data=has_data)

    @property
    def mean(self) -> Tensor:
        """(n, K), K the numbers of a datum that move."""
        parts = [self.values[key].reshape(self.num_data, -1) for key in self.moving]
        like = next(iter(self.values.values()))
        return torch.cat(parts, -1) if parts else like.new_zeros(self.num_data, 0)

    @property
    def jacobian(self) -> Jacobian:
        """The K numbers as K columns."""
        if self._jacobian is None:
            with torch.enable_grad():
                pullback = self.at.pullback(self._outputs, self.num_data, label=self.label)
            self._jacobian = pullback.identity()
        return self._jacobian

    def _outputs(self, run: Run) -> list[Tensor]:
        found = self._read(run)
        return [found[key] for key in self.moving]

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """(..., n, K) by name, (..., *shape)."""
        shapes = [self.values[key].shape for key in self.moving]
        sizes = [shape.numel() // self.num_data for shape in shapes]
        return {
            key: part.reshape(part.shape[:-2] + shape)
            for key, shape, part in zip(self.moving, shapes, flat.split(sizes, -1), strict=True)
        }

    def draws(self, offsets: Offsets) -> dict[str, Tensor]:
        """All tensors, (S, *shape), at S offsets of the subset; some are expanded."""
        values = {
            key: value.expand(len(offsets), *value.shape) for key, value in self.values.items()
        }
        if self.moving:
            change = offsets.apply(self.jacobian).detach()
            values |= self.split(self.mean + change.to(self.mean))
        return values

    def gaussian(self, precision: Precision) -> "Gaussian":
        """Their distribution where the subset's offset is N(0, precision^-1)."""
        return Gaussian(self, self.mean, precision)


@dataclass
class Gaussian:
    """N(mean, covariance) for every datum, mean (n, K); of the covariance only what is asked for.

    :param precision: of the subset's offset.
    """

    outputs: Outputs
    mean: Tensor
    precision: Precision

    @cached_property
    def covariance(self) -> Tensor:
        """(n, K, K)."""
        if not self.outputs.moving:
            return self.mean.new_zeros(*self.mean.shape, self.mean.shape[-1])
        return self.precision.covariance(self.outputs.jacobian).detach().to(self.mean)

    @cached_property
    def diagonal(self) -> Tensor:
        """The covariance's diagonals, (n, K)."""
        if not self.outputs.moving:
            return torch.zeros_like(self.mean)
        if "covariance" in self.__dict__:
            return self.covariance.diagonal(dim1=-2, dim2=-1)
        return self.precision.output_variances(self.outputs.jacobian).detach().to(self.mean)

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
