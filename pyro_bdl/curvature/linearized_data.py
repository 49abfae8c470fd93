"""Batches of data whose outputs are linear in the latents, sums over all of them, and products of
their Gauss-Newton matrix with vectors."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.at import ProgramAtPoint
from pyro_bdl.curvature.fisher import cell_columns
from pyro_bdl.curvature.hyperparameters import learned_noise, read
from pyro_bdl.curvature.jacobian.linearization import Linearization
from pyro_bdl.curvature.linear_outputs import LinearOutputs, observed_outputs
from pyro_bdl.curvature.prior import FactorStatements, hyperpriors
from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.program.batches import Batches
from pyro_bdl.utils.memory import Allocations, available_memory, bytes_at_once
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.random_state import seeded

SHARE_OF_MEMORY = 0.125  # for the rows or the graphs of all data
_GRAPHS = 3  # that products keep: the run's, its transpose's and the values between


class LinearizedBatch:
    """Observations of one batch, linear in the subset, and its factors to first order."""

    def __init__(self, at: Linearization, statements: FactorStatements) -> None:
        self.outputs = list(observed_outputs(at).values())
        self.factors, self.slope = first_order_factors(at, statements)
        self._at: Tensor | None = None
        self._values: list[dict[str, Tensor]] = []
        self._columns: list[list[dict[str, Tensor]]] | None = None
        self.is_stored = False

    def values(self, offset: Tensor) -> list[dict[str, Tensor]]:
        """The outputs' values at an offset; those at the last one are kept."""
        if self._at is not offset:
            self._at, self._columns = offset, None
            still = not offset.any()
            self._values = [
                out.values
                if still
                else out.values | {k: out.values[k] + v for k, v in out.times(offset).items()}
                for out in self.outputs
            ]
        return self._values

    def log_likelihood(self, offset: Tensor) -> Tensor:
        total = self.factors + double(self.slope) @ double(offset)
        for outputs, values in zip(self.outputs, self.values(offset), strict=True):
            total = total + log_likelihood_of(outputs, values)
        return total

    def value_and_gradient(self, offset: Tensor) -> Tensor:
        """The log likelihood and, after it, its gradient, (1 + p,)."""
        value = self.factors + double(self.slope) @ double(offset)
        gradient = double(self.slope)
        for outputs, values in zip(self.outputs, self.values(offset), strict=True):
            leaves = {key: values[key].detach().requires_grad_() for key in outputs.dependent}
            with torch.enable_grad():
                total = log_likelihood_of(outputs, values | leaves)
            value = value + total.detach()
            if leaves:
                found = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
                cotangents = dict(zip(leaves, found, strict=True))
                gradient = gradient + double(outputs.rmatvec(cotangents))
        return torch.cat([value[None], gradient])

    def times(self, offset: Tensor, vectors: Tensor) -> Tensor:
        """J' F J vectors (p,) or (S, p), F the Fisher information of the outputs at the offset."""
        result = torch.zeros_like(vectors)
        values, many = self.values(offset), vectors.dim() == 2
        if self.is_stored and self._columns is None:
            self._columns = [
                list(outputs.unconstrained(at, cell_columns)) if outputs.dependent else []
                for outputs, at in zip(self.outputs, values, strict=True)
            ]
        for number, outputs in enumerate(self.outputs):
            if not outputs.dependent:
                continue
            change = outputs.times(vectors)
            columns = (
                outputs.unconstrained(values[number], cell_columns)
                if self._columns is None
                else self._columns[number]
            )
            weighed = {key: torch.zeros_like(value) for key, value in change.items()}
            for column in columns:
                share = _by_cell(outputs, column, change, vectors.shape[:-1])
                for key, value in column.items():
                    weighed[key] += value * share.reshape(
                        share.shape + (1,) * (value.dim() - len(_cells(outputs)))
                    )
            result = result + outputs.rmatvec(weighed, many=many).to(vectors)
        return result


def _by_cell(
    outputs: LinearOutputs,
    column: dict[str, Tensor],
    change: dict[str, Tensor],
    batch: Sequence[int],
) -> Tensor:
    """<column, change> in every cell of an observed site, (*batch, *its batch shape)."""
    shape = (*batch, *_cells(outputs))
    terms = [(value * change[key]).reshape(*shape, -1).sum(-1) for key, value in column.items()]
    return torch.stack(terms).sum(0)


class LinearizedData:
    """All data of a program, as ``LinearizedBatch``es around a vector.

    Their graphs are kept where they fit in an eighth of the free memory; else every sum runs the
    program again.

    :param passes: the data, and the factor of the sums over them.
    :param rows: keep the rows of the Jacobian instead, if these fit; ``rows`` says whether they do.
    :raises NotImplementedError: for observations that are not made of tensors.
    """

    def __init__(
        self, at: ProgramAtPoint, passes: Sequence[tuple[Batches, float]], *, rows: bool = False
    ) -> None:
        self.at, self.passes, self.rows = at, passes, rows
        self._stored: dict[int, list[LinearizedBatch]] = {}

    @property
    def keeps_all(self) -> bool:
        """True if no sum runs the program again; False before the first sum."""
        return len(self._stored) == len(self.passes)

    def _parts(self, number: int, batches: Batches) -> Iterator[LinearizedBatch]:
        if number in self._stored:
            yield from self._stored[number]
            return
        statements = FactorStatements(batches.ranks, earlier=number > 0)
        found = self.at.linearizations(batches.part(), as_rows=self.rows)
        free = available_memory(self.at.vector.device) or 8 * 2**30
        left: float = bytes_at_once(int(free * SHARE_OF_MEMORY))
        stored: list[LinearizedBatch] | None = []
        per_part = 0.0
        while True:
            with Allocations() as allocations:
                at = next(found, None)
            if at is None:
                break
            part = LinearizedBatch(at, statements)
            if self.rows:
                numbers = sum(outputs.mean.numel() for outputs in part.outputs)
                left -= self.at.vector.element_size() * self.at.subset.size * numbers
                self.rows = left > 0
            else:
                per_part = max(per_part, _GRAPHS * allocations.bytes + _of_columns(part))
                left -= per_part
            if stored is not None and left > 0:
                for outputs in part.outputs if self.rows else ():
                    outputs.keep_rows()
                part.is_stored = True
                stored.append(part)
            else:
                stored = None
            yield part
        if stored is not None:
            self._stored[number] = stored

    def sum(self, of_part: Callable[[LinearizedBatch], Tensor]) -> Tensor:
        """Return a sum over all data, given the share of one batch."""
        results = []
        for number, (batches, count) in enumerate(self.passes):

            def one_pass(number: int = number, batches: Batches = batches) -> Tensor:
                total: Tensor | None = None
                for part in self._parts(number, batches):
                    found = of_part(part)
                    total = found if total is None else total + found
                assert total is not None
                return total

            total = batches.on_all_ranks(one_pass)
            batches.add_up(total)
            results.append(count * total)
        return torch.stack(results).sum(0)


class GaussNewtonProducts:
    """sum_n J_n' F_n J_n times vectors, from products with J and J' alone.

    F is at the noise that a Normal observation has when this is made, whatever it is later.

    :param passes: the data, and the factor of the sums over them.
    :param has_noise: as in ``ParameterReading``.
    """

    def __init__(
        self, at: ProgramAtPoint, passes: Sequence[tuple[Batches, float]], has_noise: bool
    ) -> None:
        self.at, self.passes, self.has_noise = at, passes, has_noise
        self.noise = self._noise()

    def __add__(self, other: "GaussNewtonProducts") -> "GaussNewtonProducts":
        """The products over the data of both."""
        both = self.has_noise and other.has_noise
        return GaussNewtonProducts(self.at, [*self.passes, *other.passes], both)

    def __deepcopy__(self, memo: Any) -> "GaussNewtonProducts":
        return self  # the program and the data are shared

    def _noise(self) -> Tensor | None:
        first = self.passes[0][0].first()
        reading = read(self.at.model, self.at.subset, self.at.vector, *first)
        reading.has_noise = self.has_noise
        noise = learned_noise(reading)
        return None if noise is None else noise.detach().clone()

    def prepared(self) -> Callable[[Tensor], Tensor]:
        """A function of vectors (S, p) that returns their products (S, p), and keeps the graphs of
        the data where they fit in memory."""
        data = LinearizedData(self.at, self.passes)
        here = torch.zeros_like(self.at.subset.take(self.at.vector))
        now = self._noise()
        factor: Tensor | float = 1.0
        if now is not None and self.noise is not None:
            factor = (now / self.noise).square()

        def times(vectors: Tensor) -> Tensor:
            rounded = vectors.to(self.at.vector)
            with seeded(0):  # where F is estimated, it is the same in all products
                found = data.sum(lambda batch: batch.times(here, rounded))
            return (factor * found).to(vectors)

        return times


@torch.enable_grad()
def first_order_factors(at: Linearization, statements: FactorStatements) -> tuple[Tensor, Tensor]:
    """The value of the factors that a batch brings, and their gradient at u* in the subset."""
    statements.read(at.run, hyperpriors(at.run, at.leaves))
    total = double(at.vector.new_zeros(()))
    slope = torch.zeros_like(at.subset.take(at.vector))
    for site in statements.new:
        total = total + double(site.batch_log_prob())
    return total.detach(), at.gradient(total) if total.requires_grad else slope


def log_likelihood_of(outputs: LinearOutputs, values: dict[str, Tensor]) -> Tensor:
    """The tempered log likelihood of an observed site, its parameters being ``values``."""
    return double(outputs.observed(values).batch_log_prob())


def _of_columns(part: LinearizedBatch) -> float:
    """Bytes of the columns of a part's Fisher information."""
    total = 0.0
    for outputs in part.outputs:
        numbers, cells = outputs.mean.numel(), max(1, _cells(outputs).numel())
        total += numbers * max(1.0, numbers / cells) * outputs.mean.element_size()
    return total


def _cells(outputs: LinearOutputs) -> torch.Size:
    """The batch shape of an observed site."""
    assert outputs.site is not None
    base: Any = base_distribution(outputs.site.distribution)
    return torch.Size(base.batch_shape)
