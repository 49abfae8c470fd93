"""The outputs of a program as linear functions of its latents: f(u) = f(u*) + J (u - u*).

The linearized predictive needs their moments and draws under a Gaussian over u; the evidence of the
linearized model needs its likelihood at a point. ``LinearOutputs`` provides the value f(u*), the
Jacobian J as factors, and products of J with a vector.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian.jacobian import Jacobian
from pyro_bdl.curvature.jacobian.linearization import VJP, Linearization
from pyro_bdl.curvature.structures.base import LinearDraws, Precision
from pyro_bdl.distributions.families import Cotangent, name_of
from pyro_bdl.distributions.parameters import (
    base_distribution,
    is_known,
    parameters_of,
    unconstrained_parameters,
    with_unconstrained,
)
from pyro_bdl.program.trace import Run, Site
from pyro_bdl.utils.autograd import has_own_functions, reaches

_Transposed = tuple[list[Tensor], dict[str, Tensor]]  # v, and J' v by site


class LinearOutputs:
    """Tensors of one run of a program as linear functions of the latents in a subset.

    Each of n data has a row of the K numbers that depend on these latents.

    :param at: the run.
    :param tensors: by name, with their graph.
    :param has_data: whether their leading axis is the data axis; else they belong to one datum.
    """

    # for the parameters of an observed site: the names of site and family, and the site
    name = ""
    kind = ""
    site: Site | None = None
    # the only tensor that depends on them, see ``VJP``; the network's output, a deterministic site,
    # in place of logits that were normalized from it
    of: tuple[str, str] = ("", "")

    def __init__(
        self,
        at: Linearization,
        tensors: dict[str, Tensor],
        *,
        has_data: bool,
    ) -> None:
        self.at, self.has_data = at, has_data
        leaves = [at.leaves[name] for name in at.subset.parts]
        self.values = {key: self.as_result(value) for key, value in tensors.items()}
        self.dependent = [key for key, value in tensors.items() if reaches(value, leaves)]
        self.num_data = len(next(iter(tensors.values()))) if has_data else 1
        self._outputs = [tensors[key] for key in self.dependent]
        self.rows: Tensor | None = None
        self._jacobian: Jacobian | None = None
        self._reused: _Transposed | None = None

    def as_result(self, value: Tensor) -> Tensor:
        """A result with its graph if it has to be differentiable, else without."""
        return value if self.at.differentiable else value.detach()

    @classmethod
    @torch.enable_grad()  # distributions keep what they compute here
    def of_site(cls, at: Linearization, name: str, site: Site) -> "LinearOutputs":
        """The unconstrained parameters of an observed site.

        :raises NotImplementedError: if they do not make the distribution.
        """
        base = base_distribution(site.distribution)
        if not is_known(base):
            kind = type(base).__name__
            raise NotImplementedError(
                f"the linearized model does not know {kind} observations: use Predictive"
            )
        output = recorded_output(at.run, name)
        tensors = unconstrained_parameters(base, output)
        has_data = len(base.batch_shape) > 0
        result = cls(at, tensors, has_data=has_data)
        result.name, result.kind, result.site = name, name_of(base), site
        if len(result.dependent) == 1:
            (key,) = result.dependent
            if tensors[key] is output:
                result.of = output_name(name), "value"
            elif tensors[key] is parameters_of(base).get(key):
                result.of = name, key
        return result

    @classmethod
    def of_deterministic(cls, at: Linearization, name: str) -> "LinearOutputs":
        """A deterministic site, named "value", whether or not it depends on the latents."""
        value = at.run.deterministic[name]
        result = cls(at, {"value": value}, has_data=value.dim() > 0)
        result.dependent, result._outputs, result.of = ["value"], [value], (name, "value")
        return result

    @property
    def mean(self) -> Tensor:
        """The K numbers of each datum that depend on the latents, (n, K)."""
        parts = [self.values[key].reshape(self.num_data, -1) for key in self.dependent]
        like = next(iter(self.values.values()))
        return torch.cat(parts, -1) if parts else like.new_zeros(self.num_data, 0)

    @property
    def columns(self) -> int:
        """K, the number of numbers of each datum that depend on the latents."""
        return sum(self.values[key].numel() for key in self.dependent) // self.num_data

    @property
    def jacobian(self) -> Jacobian:
        """The Jacobian of the K numbers, as K columns."""
        if self._jacobian is None:
            vjp = VJP(self.at, self._outputs, self.num_data, self.of)
            self._jacobian = vjp.identity()
        return self._jacobian

    def keep_rows(self) -> None:
        """Keep the Jacobian as rows (n K, p): products with it are then those of a matrix."""
        self.rows = self.jacobian.rows().transpose(0, 1).flatten(0, 1)

    def times(self, vectors: Tensor) -> dict[str, Tensor]:
        """J times vectors (p,) or (S, p) of the subset, by name, (*shape) or (S, *shape): those
        that move, without a graph.

        What it costs without rows is one pass backward; the graph that this takes is kept. Where
        an operator has no second derivative, or is a function of the user's own, the Jacobian is
        formed.
        """
        if not self.dependent:
            return {}
        many = vectors.dim() == 2
        if self.rows is not None:
            product = vectors.to(self.rows) @ self.rows.mT
            return self.split(product.unflatten(-1, (self.num_data, -1)))
        if self._jacobian is None:
            try:
                reused = self._reused = self._reused or self._transposed()
                found = self._each(lambda v, many: self._times(reused, v[0], many), [vectors], many)
                return dict(zip(self.dependent, found, strict=True))
            except NotImplementedError:  # as torch says of an operator
                self._reused = None
        change = self.jacobian.apply(torch.atleast_2d(vectors).to(self.jacobian.like)).detach()
        return self.split((change if many else change[0]).to(self.mean))

    def rmatvec(self, cotangents: dict[str, Tensor], *, many: bool = False) -> Tensor:
        """J' times tensors of the outputs' shapes, by name, (p,).

        :param many: the tensors have a leading axis; the result is (S, p).
        """
        at = self.at
        vectors = [cotangents[key] for key in self.dependent]
        batch = vectors[0].shape[:1] if many and vectors else ()
        if not self.dependent:
            return torch.zeros_like(at.subset.take(at.vector))
        if self.rows is not None:
            parts = [value.reshape(*batch, self.num_data, -1) for value in vectors]
            return torch.cat(parts, -1).flatten(-2).to(self.rows) @ self.rows
        leaves = [at.leaves[name] for name in at.subset.parts]

        def pulled(vectors: list[Tensor], many: bool) -> list[Tensor]:
            found = torch.autograd.grad(
                self._outputs, leaves, vectors,
                retain_graph=True, allow_unused=True, is_grads_batched=many,
            )  # fmt: skip
            return _filled(found, leaves, batch if many else ())

        return at.subset.of_sites(self._each(pulled, vectors, many), batch)

    def _each(
        self,
        function: Callable[[list[Tensor], bool], list[Tensor]],
        vectors: list[Tensor],
        many: bool,
    ) -> list[Tensor]:
        """A function of tensors with a leading axis: by ``vmap`` where the rows of the run were
        mapped, so that its operations have such a form; else one by one."""
        if not many or (self.at.rows is not None and self.at.rows.mapped):
            return function(vectors, many)
        results = [function(list(each), False) for each in zip(*vectors, strict=True)]
        return [torch.stack(parts) for parts in zip(*results, strict=True)]

    def _transposed(self) -> _Transposed:
        """J' v as a function of v, so that J is its derivative and no Jacobian is formed.

        :raises NotImplementedError: where it is not known that operators can be derived twice.
        """
        if has_own_functions(self._outputs):
            raise NotImplementedError
        with torch.enable_grad():
            cotangents = [torch.zeros_like(output, requires_grad=True) for output in self._outputs]
            pulled = torch.autograd.grad(
                self._outputs,
                [self.at.leaves[name] for name in self.at.subset.parts],
                cotangents,
                create_graph=True,
                materialize_grads=True,
            )
        pairs = zip(pulled, self.at.subset.parts, strict=True)
        linear = {name: gradient for gradient, name in pairs if gradient.requires_grad}
        return cotangents, linear

    def _times(self, transposed: _Transposed, vector: Tensor, many: bool) -> list[Tensor]:
        cotangents, linear = transposed
        subset = self.at.subset
        change = subset.put(torch.zeros_like(self.at.vector), vector.to(self.at.vector))
        by_site = subset.layout.unflatten(change)
        with torch.enable_grad():
            found = torch.autograd.grad(
                list(linear.values()),
                cotangents,
                [by_site[name] for name in linear],
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=many,
            )
        return _filled(found, cotangents, vector.shape[:-1])

    def unconstrained(
        self, values: dict[str, Tensor], columns: Callable[[Site], Iterator[Cotangent]]
    ) -> Iterator[dict[str, Tensor]]:
        """Yield columns about the observed distribution's own parameters at ``values`` as
        columns about the unconstrained parameters that move."""
        with torch.enable_grad():
            leaves = {key: values[key].detach().requires_grad_() for key in self.dependent}
            site = self.observed({**values, **leaves})
            parameters = parameters_of(base_distribution(site.distribution))
        for column in columns(site):
            found = torch.autograd.grad(
                [parameters[key] for key in column],
                list(leaves.values()),
                [value.to(parameters[key]) for key, value in column.items()],
                retain_graph=True,
                materialize_grads=True,
            )
            yield dict(zip(leaves, found, strict=True))

    def observed(self, values: dict[str, Tensor]) -> Site:
        """The observed site with the parameters ``values``."""
        assert self.site is not None
        distribution = with_unconstrained(self.site.distribution, values)
        return self.site._replace(distribution=distribution)

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Split (..., n, K) into tensors by name, (..., *shape)."""
        shapes = [self.values[key].shape for key in self.dependent]
        sizes = [shape.numel() // self.num_data for shape in shapes]
        return {
            key: part.reshape(part.shape[:-2] + shape)
            for key, shape, part in zip(self.dependent, shapes, flat.split(sizes, -1), strict=True)
        }

    def draws(self, offsets: LinearDraws) -> dict[str, Tensor]:
        """All tensors, (S, *shape), at S offsets of the subset; some are expanded."""
        values = {
            key: value.expand(len(offsets), *value.shape) for key, value in self.values.items()
        }
        moved = self._products(offsets) if self.dependent else {}
        return values | {key: self.values[key] + change for key, change in moved.items()}

    def _products(self, offsets: LinearDraws) -> dict[str, Tensor]:
        """J times S offsets, by name, (S, *shape): S products of J with a vector where these are
        fewer than its columns, and no gradient is taken of them; else the Jacobian's."""
        if self._jacobian is None and not self.at.differentiable and len(offsets) < self.columns:
            vectors = offsets.vectors()
            pushed = self._pushed(vectors)
            return self.times(vectors) if pushed is None else pushed
        change = self.as_result(offsets.apply(self.jacobian))
        return self.split(change.to(self.mean))

    @torch.no_grad()
    def _pushed(self, vectors: Tensor) -> dict[str, Tensor] | None:
        """J times vectors (S, p) in forward mode, by name, (S, *shape): two passes forward for each
        and one for all. None where an operator has no such form, or is a function of the user's
        own, or rows were not mapped."""
        at, site, run_at = self.at, self.site, self.at.run_at
        if run_at is None or site is None or has_own_functions(self._outputs):
            return None
        subset, leaves = at.subset, {n: leaf.detach() for n, leaf in at.leaves.items()}
        start = {name: leaves[name] for name in subset.parts}

        def parameters(moving: dict[str, Tensor]) -> dict[str, Tensor]:
            run = run_at({**leaves, **moving})
            base = base_distribution(run.observed[self.name].distribution)
            takes_output = self.of == (output_name(self.name), "value")
            output = recorded_output(run, self.name) if takes_output else None
            found = unconstrained_parameters(base, output)
            return {key: found[key] for key in self.dependent}

        def change(vector: Tensor) -> dict[str, Tensor]:
            moved = subset.put(torch.zeros_like(at.vector), vector.to(at.vector))
            by_site = subset.layout.unflatten(moved)
            tangents = {name: by_site[name] for name in start}
            return torch.func.jvp(parameters, (start,), (tangents,))[1]

        try:
            found = torch.func.vmap(change)(vectors)
        except NotImplementedError:  # as torch says of an operator
            return None
        same = all(found[key].shape[1:] == self.values[key].shape for key in self.dependent)
        return found if same else None

    def gaussian(self, precision: Precision) -> "GaussianOutputs":
        """The Gaussian distribution of the outputs if the subset's offset is N(0, precision^-1)."""
        return GaussianOutputs(self, self.mean, precision)


def _filled(
    found: Sequence[Tensor | None], likes: Sequence[Tensor], batch: Sequence[int]
) -> list[Tensor]:
    """Zeros (*batch, *shape) in place of gradients that are None."""
    return [
        like.new_zeros(*batch, *like.shape) if value is None else value
        for value, like in zip(found, likes, strict=True)
    ]


@dataclass
class GaussianOutputs:
    """N(mean, covariance) for every datum, with mean (n, K); covariances are computed on request.

    :param precision: the precision of the subset's offset.
    """

    outputs: LinearOutputs
    mean: Tensor
    precision: Precision

    @cached_property
    def covariance(self) -> Tensor:
        """The covariances, (n, K, K)."""
        if not self.outputs.dependent:
            return self.mean.new_zeros(*self.mean.shape, self.mean.shape[-1])
        covariance = self.precision.covariance(self.outputs.jacobian)
        return self.outputs.as_result(covariance).to(self.mean)

    @cached_property
    def diagonal(self) -> Tensor:
        """The covariance's diagonals, (n, K)."""
        if not self.outputs.dependent:
            return torch.zeros_like(self.mean)
        if "covariance" in self.__dict__:
            return self.covariance.diagonal(dim1=-2, dim2=-1)
        variances = self.precision.output_variances(self.outputs.jacobian)
        return self.outputs.as_result(variances).to(self.mean)

    def means(self) -> dict[str, Tensor]:
        """Means by name, of the tensors that depend on the latents."""
        return self.outputs.split(self.mean)

    def variances(self) -> dict[str, Tensor]:
        """Variances by name, of the tensors that depend on the latents."""
        return self.outputs.split(self.diagonal)

    def cells(self, key: str) -> tuple[Tensor, Tensor]:
        """Mean and variance of one tensor, (n, cells); the variance is zero if it is constant."""
        mean = self.outputs.values[key].reshape(len(self.mean), -1)
        variance = self.variances().get(key)
        return mean, torch.zeros_like(mean) if variance is None else variance.reshape(mean.shape)

    def columns(self, key: str) -> slice:
        """The place of a tensor that depends on the latents among the K numbers."""
        start = 0
        for other in self.outputs.dependent:
            size = self.outputs.values[other].numel() // len(self.mean)
            if other == key:
                break
            start += size
        return slice(start, start + size)

    def block(self, row: str, column: str) -> Tensor:
        """The covariances of the cells of two tensors, (n, cells, cells)."""
        values, moving = self.outputs.values, self.outputs.dependent
        if row not in moving or column not in moving:
            sizes = [values[key].numel() // len(self.mean) for key in (row, column)]
            return self.mean.new_zeros(len(self.mean), *sizes)
        return self.covariance[:, self.columns(row), self.columns(column)]


def recorded_output(run: Run, name: str) -> Any:
    """The network's output for an observed site, the deterministic site "f" beside it; or None."""
    return run.deterministic.get(output_name(name))


def output_name(name: str) -> str:
    """ "head.f" for an observed site "head.y", as the ready-made programs name them."""
    head, dot, _ = name.rpartition(".")
    return f"{head}{dot}f"


def observed_outputs(at: Linearization) -> dict[str, LinearOutputs]:
    """The unconstrained parameters of each observed site."""
    return {name: LinearOutputs.of_site(at, name, s) for name, s in at.run.observed.items()}
