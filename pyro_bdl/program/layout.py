"""One flat vector of unconstrained numbers for a dict of constrained sites."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution, constraints
from torch import Tensor
from torch.distributions import (
    biject_to,
)
from torch.distributions.constraints import Constraint
from torch.distributions.transforms import ExpTransform, Transform

from pyro_bdl.errors import UnsupportedProgramError

_BOUNDED_BELOW = (type(constraints.greater_than(0)), type(constraints.greater_than_eq(0)))


def transform_of(support: Constraint) -> Transform | None:
    """The bijection from R^k onto ``support``, or None if it is the identity.

    A mixture has the support of its components.
    """
    base, event_dims = support, 0
    while hasattr(base, "base_constraint"):
        event_dims += getattr(base, "reinterpreted_batch_ndims", 0)
        base = base.base_constraint
    if base is constraints.real or base is constraints.real_vector:
        return None
    if isinstance(base, _BOUNDED_BELOW):
        bound = base.lower_bound
        if isinstance(bound, int | float) and bound == 0:
            return ExpTransform()
    return biject_to(constraints.independent(base, event_dims) if event_dims else base)


def transform_of_latent(name: str, distribution: Any) -> Transform | None:
    """The bijection onto the support of a latent site, see ``transform_of``.

    :raises UnsupportedProgramError: if there is none.
    """
    try:
        return transform_of(distribution.support)
    except NotImplementedError as error:
        raise UnsupportedProgramError(
            f"the support of the latent site '{name}' ({type(distribution).__name__}) is not the "
            "image of R^n under a bijection: sample it on another support and map it in the program"
        ) from error


def support_bounds(support: Any) -> list[Tensor]:
    """The tensors that bound a support."""
    bounds = []
    for value in vars(support).values():
        if isinstance(value, Tensor):
            bounds.append(value)
        elif isinstance(value, Constraint):
            bounds.extend(support_bounds(value))
    return bounds


@dataclass(frozen=True)
class Latent:
    """A latent site: its shape, its support and its position in the flat vector.

    ``shape`` is the shape of a constrained value, ``unconstrained_shape`` the shape of its preimage
    under ``transform`` (k - 1 numbers for a simplex of k entries), ``event_dim`` the number of
    event dimensions of the constrained value, and ``plates`` are the vectorized plates around it.
    """

    name: str
    shape: torch.Size
    unconstrained_shape: torch.Size
    event_dim: int
    support: Constraint
    transform: Transform | None
    plates: tuple[str, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def unconstrained_event_dim(self) -> int:
        return self.event_dim + len(self.unconstrained_shape) - len(self.shape)

    @property
    def size(self) -> int:
        return self.unconstrained_shape.numel()


def other_program(expected: Mapping[str, torch.Size], given: Mapping[str, torch.Size]) -> str:
    """Where sites that are not those of a program come from, with the differences in names and
    shapes: "another program (no value for: 'weight')".

    It is empty if there are none. Sites in a plate of the data have a row for each datum, so that
    the same program has other shapes for other data.

    :param expected: site -> shape in the program.
    :param given: site -> shape in the other program.
    """
    missing = [repr(name) for name in expected if name not in given]
    surplus = [repr(name) for name in given if name not in expected]
    differing = [
        f"{name!r} {tuple(given[name])} for {tuple(shape)}"
        for name, shape in expected.items()
        if name in given and given[name] != shape
    ]
    kinds = (
        ("no value for", missing),
        ("sites that the program does not have", surplus),
        ("other shapes", differing),
    )
    found = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds if names)
    same_axes = (
        not missing
        and not surplus
        and all(len(given[name]) == len(shape) for name, shape in expected.items())
    )
    source = f"another program{OTHER_ROWS if same_axes else ''}"
    return f"{source} ({found})" if found else ""


OTHER_ROWS = ", or of data with another number of rows"
NEW_ROWS = (
    "local latents belong to the rows that they were inferred from; those of new rows come from an "
    "encoder (guides.AutoAmortized) or from their prior, by Predictive(model, draws) with a "
    "dict of draws of the other sites alone"
)


class Layout:
    """The position of each latent in a vector of R^P, and conversions between both forms.

    :param latents: the sites in the vector's order.
    """

    def __init__(self, latents: list[Latent]) -> None:
        self.latents = {latent.name: latent for latent in latents}
        self._sizes = [latent.size for latent in latents]
        self.size = sum(self._sizes)
        ends = [0, *itertools.accumulate(self._sizes)]
        self.slices = {
            latent.name: slice(start, stop)
            for latent, start, stop in zip(latents, ends, ends[1:], strict=False)
        }

    def flatten(self, values: Mapping[str, Tensor]) -> Tensor:
        """Unconstrained values of shape (..., *unconstrained_shape) as a vector (..., P)."""
        parts = []
        for name, latent in self.latents.items():
            if name not in values:
                raise KeyError(f"no value for the latent site '{name}'")
            value = values[name]
            batch = value.shape[: value.dim() - len(latent.unconstrained_shape)]
            if value.shape != batch + latent.unconstrained_shape:
                raise ValueError(
                    f"the value of site '{name}' has shape {tuple(value.shape)}, which does not "
                    f"end in {tuple(latent.unconstrained_shape)}"
                )
            parts.append(value.reshape(*batch, -1))
        return torch.cat(parts, -1)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """A vector (..., P) as a dict of unconstrained values (..., *unconstrained_shape)."""
        if vector.shape[-1] != self.size:
            raise ValueError(
                f"expected a vector of {self.size} numbers in the last dimension, "
                f"got shape {tuple(vector.shape)}"
            )
        batch, values = vector.shape[:-1], {}
        parts = torch.split(vector, self._sizes, -1)
        for latent, part in zip(self.latents.values(), parts, strict=True):
            flat = len(latent.unconstrained_shape) == 1
            values[latent.name] = part if flat else part.reshape(batch + latent.unconstrained_shape)
        return values

    def to_supports(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Latents in their supports from unconstrained values; real latents are not copied."""
        return {
            name: values[name] if latent.transform is None else latent.transform(values[name])
            for name, latent in self.latents.items()
        }

    def split(self, vector: Tensor, names: Collection[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """The entries (..., p) of a vector (..., P) that belong to the named sites, in its order,
        and those of each other site; cut at once, so that gradients are joined and not added."""
        owners: list[str | None] = []  # of pieces: a site, or None for named ones in a row
        sizes: list[int] = []
        for name, size in zip(self.latents, self._sizes, strict=True):
            if name in names and owners and owners[-1] is None:
                sizes[-1] += size
            else:
                owners.append(None if name in names else name)
                sizes.append(size)
        if owners == [None]:
            return vector, {}
        pieces = list(zip(owners, torch.split(vector, sizes, -1), strict=True))
        taken = [piece for owner, piece in pieces if owner is None]
        others = {owner: piece for owner, piece in pieces if owner is not None}
        joined = taken[0] if len(taken) == 1 else torch.cat(taken or [vector[..., :0]], -1)
        return joined, others

    def take(self, vector: Tensor, names: Sequence[str]) -> Tensor:
        """The entries (..., p) of a vector (..., P) that belong to the named sites, in order."""
        runs: list[list[int]] = []  # of sites that follow each other
        for name in names:
            part = self.slices[name]
            if runs and runs[-1][1] == part.start:
                runs[-1][1] = part.stop
            else:
                runs.append([part.start, part.stop])
        taken = [vector[..., start:stop] for start, stop in runs]
        return taken[0] if len(taken) == 1 else torch.cat(taken, -1)

    def constrain(self, vector: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """A vector u (..., P) as constrained latents T(u), and log |det dT/du| of shape (...)."""
        values = self.unflatten(vector)
        log_det = vector.new_zeros(vector.shape[:-1])
        for name, latent in self.latents.items():
            if latent.transform is not None:
                unconstrained = values[name]
                values[name] = value = latent.transform(unconstrained)
                term = latent.transform.log_abs_det_jacobian(unconstrained, value)
                log_det = log_det + term.reshape(*vector.shape[:-1], -1).sum(-1)
        return values, log_det

    def unconstrain(self, latents: Mapping[str, Tensor]) -> Tensor:
        """Constrained latents of shape (..., *shape) as the vector (..., P) that maps to them."""
        values = dict(latents)
        for name, latent in self.latents.items():
            if name in values and latent.transform is not None:
                values[name] = latent.transform.inv(values[name])
        return self.flatten(values)


def marginal(latent: Latent, loc: Tensor, scale: Tensor) -> TorchDistribution:
    """The distribution of T(u) for u ~ Normal(loc, scale^2) and the latent's transform T."""
    if latent.transform is None:
        return dist.Normal(loc, scale)
    if isinstance(latent.transform, ExpTransform):
        return dist.LogNormal(loc, scale)
    return dist.TransformedDistribution(dist.Normal(loc, scale), [latent.transform])
