"""A program at one point of its latents, run on the rows of data one at a time."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.curvature.jacobian.affine_uses import DependentDataError, UnseenUseError, UseRecorder
from pyro_bdl.curvature.jacobian.linearization import Linearization, unseen_uses
from pyro_bdl.curvature.jacobian.recorded_rows import RecordedRows
from pyro_bdl.curvature.mapped_rows import MappedRows, Plan, apart, tensors_of
from pyro_bdl.distributions.parameters import parameters_of
from pyro_bdl.program.batches import NOT_ON_SOME, Batch, as_dicts, has_rows, leading_size, taken
from pyro_bdl.program.subset import Subset
from pyro_bdl.program.trace import Run, leave_open, record
from pyro_bdl.program.vmap import RowMap, with_rows
from pyro_bdl.utils.memory import Allocations, bytes_at_once
from pyro_bdl.utils.module_state import Modules, evaluation_mode
from pyro_bdl.utils.trees import tree_leaves

_BUDGET = 24 * 2**20  # bytes for the activations and gradients of a piece, at least
_PER_WEIGHT = 8  # or this multiple of the weights' bytes, which every piece reads and adds to
_FEW = 16  # rows that run together, to be compared with the same rows alone


class At:
    """A program at one point of its latents.

    :param model: the program.
    :param subset: the latents of interest; the others count as constants.
    :param vector: the unconstrained vector (P,) of the latents. ``leaves`` are these by site; those
        of the subset take gradients.
    :param modules: the modules of the program that are known.
    """

    def __init__(
        self, model: Callable, subset: Subset, vector: Tensor, modules: Modules | None = None
    ) -> None:
        self.model, self.subset = model, subset
        self._modules = Modules(model, modules)
        self._map = RowMap()
        self._plans: dict[Any, Plan | None] = {}
        self._dense: set[str] = set()  # sites with uses that no recorder sees
        self._seen: set[Any] = set()  # forms of data for which all other uses are recorded
        self._move(vector.detach(), training=False, differentiable=False)

    def moved(
        self, vector: Tensor, *, training: bool = False, differentiable: bool = False
    ) -> "At":
        """The program at another point; what is known about its rows is shared.

        :param training: run as in a training step: modules run in their own modes and update their
            buffers, and the latents stay functions of ``vector``.
        :param differentiable: keep the graph of outputs and Jacobians back to the program's
            arguments and parameters.
        """
        other = copy.copy(self)
        other._move(vector if training else vector.detach(), training, differentiable)
        return other

    def _move(self, vector: Tensor, training: bool, differentiable: bool) -> None:
        self.vector, self.training = vector.detach(), training
        self.differentiable = differentiable
        self.leaves = self.subset.layout.unflatten(vector)
        for name in () if training else self.subset.parts:
            self.leaves[name] = self.leaves[name].clone().requires_grad_()

    # ------------------------------------------------------------------------------- runs

    def linearizations(
        self,
        batches: Iterable[Batch],
        config: CurvatureConfig | None = None,
        *,
        every_output: bool = False,
        as_rows: bool = False,
    ) -> Iterator[Linearization]:
        """Yield the linearization of each batch; a large batch is cut into pieces that fit in
        memory.

        In the first batch of a form, and at every power of two, a few rows alone are compared with
        the same rows together. If they differ, its rows depend on each other, and whole batches run
        at once.

        :param every_output: choose the pieces' size for Jacobians of all outputs at once.
        :param as_rows: as rows over all latents, in float64.
        """

        def size(plan: Plan) -> int:
            """The number of rows in a piece."""
            per_row, item = 2.0 * plan.memory, self.vector.element_size()
            if every_output:
                per_row *= 1.0 + 0.5 * plan.numbers
                per_row += 8 * plan.numbers * self.subset.size if as_rows else 0
            shared = [s.size for s in self.subset.layout.latents.values() if len(s.shape) > 2]
            kinds = {"rows": self.subset.size, "entries": max(shared, default=0), "factors": 0}
            per_row += item * kinds["entries" if config is None else config.kind.makes]
            budget = bytes_at_once(max(_BUDGET, _PER_WEIGHT * item * self.subset.layout.size))
            return max(1, int(budget / max(per_row, 1.0)))

        for args, kwargs in batches:
            yield from self._pieces((args, kwargs), size)

    def linearize(self, args: tuple, kwargs: Mapping[str, Any]) -> Linearization:
        """The linearization of one batch, in one piece."""
        (result,) = self._pieces((args, dict(kwargs)), lambda plan: leading_size((args, kwargs)))
        return result

    def whole(self, args: tuple, kwargs: Mapping[str, Any]) -> Linearization:
        """The linearization of one batch from a run over all of its rows at once."""
        batch = tuple(map(as_dicts, args)), as_dicts(kwargs)
        with torch.enable_grad(), self._mode():
            values = self.subset.layout.to_supports(self.leaves)
            run = record(self.model, values, *batch, draw=leave_open)
        return Linearization(self, batch, run, None)

    def _pieces(self, batch: Batch, size: Callable[[Plan], int]) -> Iterator[Linearization]:
        batch = tuple(map(as_dicts, batch[0])), as_dicts(batch[1])
        plan, few = self._plan(batch)
        if plan is None:
            yield self.whole(*batch)
            return
        count = leading_size(batch)
        at_once = min(count, size(plan))
        for start in range(0, count, at_once):
            part = taken(batch, slice(start, start + at_once)) if at_once < count else batch
            mapped = self._mapped(part, plan, catch=start == 0)
            first = few if start == 0 else None  # to be compared
            if mapped is None or (
                first is not None and not mapped.agree(first, plan, min(count, _FEW))
            ):
                self._plans[_form(batch)] = None
                yield self.whole(*batch)
                return
            yield self._of_rows(part, mapped, plan)

    def _mode(self) -> Any:
        return nullcontext() if self.training else evaluation_mode(self._modules)

    def _recorded(
        self, batch: Batch, lane: Tensor | None, plates: Mapping[str, Tensor]
    ) -> tuple[Run, UseRecorder]:
        """Run the program, and record the uses of the subset."""
        leaves, layout = self.leaves, self.subset.layout
        plain = {n for n in self.subset.parts if layout.latents[n].transform is None} - self._dense
        latents = {name: leaves[name] for name in plain}
        recorder = UseRecorder(latents, lane, differentiable=self.differentiable)
        others = {n: recorder.latent(n, leaves[n]) for n in self.subset.parts if n not in plain}
        values = layout.to_supports({**leaves, **others})
        with recorder:
            run = record(self.model, {**values, **plates}, *batch, draw=leave_open)
        return run, recorder

    # ------------------------------------------------------------------------------- single rows

    def _mapped(self, batch: Batch, plan: Plan, *, catch: bool) -> MappedRows | None:
        """Run the program on every row alone; None if it cannot run on one.

        It runs again while sites are used in ways that no recorder sees.

        :param catch: whether it may be so.
        """
        while True:
            try:
                with torch.enable_grad():
                    return self._map_rows(batch, plan)
            except UnseenUseError as error:
                self._dense |= error.sites
            except DependentDataError:
                raise
            except NOT_ON_SOME:
                if not catch:
                    raise
                return None

    def _map_rows(self, batch: Batch, plan: Plan) -> MappedRows:
        count, recorders = leading_size(batch), []
        inside: list[tuple[Run, dict[str, Any], bool]] = []

        def of_row(args: tuple, kwargs: dict[str, Any], lane: Tensor) -> Any:
            run, recorder = self._recorded((args, kwargs), lane, plan.plates)
            parts = {name: apart(site) for name, site in run.observed.items()}
            templates = {name: template for name, (template, _) in parts.items()}
            inside[:] = [(run, templates, with_rows(lane, lane).dim() > 0)]
            recorders.append(recorder)
            return {
                "observed": {name: tensors for name, (_, tensors) in parts.items()},
                "deterministic": tensors_of(run.deterministic),
            }

        with self._mode():
            tensors = self._map(of_row, *batch)
        ((run, templates, together),) = inside
        recorders = recorders[-1:] if together else recorders[-count:]
        if any(len(r.edges) != len(recorders[0].edges) for r in recorders):
            raise ValueError("the rows use the latents in different ways")
        rows = RecordedRows(self.subset, recorders, count, together)
        values = [value for of_site in tensors["observed"].values() for value in of_site.values()]
        if any(value.dim() < 2 or value.shape[1] != 1 for value in values):
            raise ValueError("an observed site has no axis of the data in front")
        observed = {
            name: {key: value.flatten(0, 1) for key, value in of_site.items()}
            for name, of_site in tensors["observed"].items()
        }
        deterministic = tensors["deterministic"]
        form = _form(batch)
        if form not in self._seen:
            outputs = [value for of_site in observed.values() for value in of_site.values()]
            leaves = {name: self.leaves[name] for name in self.subset.parts}
            wrong = unseen_uses(rows, [*outputs, *deterministic.values()], leaves)
            if wrong:
                raise UnseenUseError(wrong)
            self._seen.add(form)
        return MappedRows(run, rows, templates, observed, deterministic)

    def _first_rows(self, batch: Batch, plates: Iterable[str] = ()) -> Run:
        """Run the program on a few rows together."""
        count = leading_size(batch)
        few = min(count, _FEW)
        layout = self.subset.layout
        with torch.no_grad(), self._mode():
            values = layout.to_supports(layout.unflatten(self.vector))
            indices = {name: torch.arange(few, device=self.vector.device) for name in plates}
            part = taken(batch, slice(few))
            return record(self.model, {**values, **indices}, *part, draw=leave_open)

    def _plan(self, batch: Batch) -> tuple[Plan | None, Run | None]:
        """The plan of rows of this form, None where there are no rows; and a run over a few rows
        of this batch, where they are to be compared."""
        form, count = _form(batch), leading_size(batch)
        if not count or not has_rows(batch, count):
            return None, None
        if form in self._plans:
            plan = self._plans[form]
            if plan is None:
                return None, None
            plan.batches += 1
            compared = not self.training and not plan.batches & (plan.batches - 1)
            return plan, self._first_rows(batch, plan.plates) if compared else None
        self._plans[form] = None
        try:
            with Allocations() as allocations:
                few = self._first_rows(batch)
        except NOT_ON_SOME:
            try:
                with Allocations() as allocations:
                    few = self._first_rows(batch, self._fixed_plates(batch))
            except NOT_ON_SOME:
                return None, None
        plates = {}
        for site in few.observed.values():
            for name, dim in site.plates:
                if dim == -len(site.distribution.batch_shape) and name in few.subsamples:
                    plates[name] = torch.zeros_like(few.subsamples[name][:1])
        tensors = [
            v for site in few.observed.values() for v in parameters_of(site.distribution).values()
        ]
        numbers, some = sum(tensor.numel() for tensor in tensors), min(count, _FEW)
        self._plans[form] = plan = Plan(plates, allocations.bytes / some, numbers / some)
        return plan, few

    def _fixed_plates(self, batch: Batch) -> list[str]:
        """The plates whose size is the number of rows, whatever the program gets."""
        layout, count = self.subset.layout, leading_size(batch)
        with torch.no_grad(), self._mode():
            values = layout.to_supports(layout.unflatten(self.vector))
            run = record(self.model, values, *batch, draw=leave_open)
        return [name for name, indices in run.subsamples.items() if len(indices) == count]

    @torch.enable_grad()
    def _of_rows(self, batch: Batch, mapped: MappedRows, plan: Plan) -> Linearization:
        """The linearization of single rows; what their tensors do not make, as factors, is that of
        a run over all rows."""
        whole = self.whole(*batch).run if mapped.needs_whole else mapped.run
        run, parameters = mapped.joined(whole, plan)
        return Linearization(self, batch, run, mapped.rows, parameters)


def _form(batch: Batch) -> Any:
    """The shapes of a row, which programs may branch on."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    return tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves)
