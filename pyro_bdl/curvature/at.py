"""A program at one point of its latents, run on the rows of data one at a time."""

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.curvature.hyperparameters import ParameterReading, ReadParameters
from pyro_bdl.curvature.jacobian.affine_uses import UnseenUseError, UseRecorder
from pyro_bdl.curvature.jacobian.linearization import Linearization, RecordedRows, unseen_uses
from pyro_bdl.curvature.structures import STRUCTURES
from pyro_bdl.distributions.copies import masks_of
from pyro_bdl.distributions.parameters import is_known, parameters_of, rebuilt
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.program.batches import Batch, as_dicts, has_rows, leading_size, select_rows
from pyro_bdl.program.linear_ops.last_layer import LastLayer, OutputTag, Path
from pyro_bdl.program.rows import (
    AllRows,
    FirstPass,
    check_repeated,
    differing_prior,
    form_of,
    site_tensors,
    template_of,
)
from pyro_bdl.program.subset import Subset
from pyro_bdl.program.trace import Run, Site, placeholder_for_observed, record
from pyro_bdl.program.vmap import RowMap, depends_on_row
from pyro_bdl.utils.dispatch import Origins
from pyro_bdl.utils.memory import bytes_at_once
from pyro_bdl.utils.module_state import Modules, evaluation_mode, uncompiled
from pyro_bdl.utils.trees import tensors_in, tree_flatten, tree_unflatten

_BUDGET = 24 * 2**20  # bytes for the activations and gradients of a piece, at least
_PER_WEIGHT = 8  # or this multiple of the weights' bytes, which every piece reads and adds to
_FEW, _FEW_BYTES = 8, 2**29  # or so many rows, if they fit: each piece runs all operators anew
_FIRST = 64  # rows of a form's first piece, which says how much memory a row takes
_SINGLE = [f'"{n}"' for n, kind in STRUCTURES.items() if kind.curvature.takes_single_rows]
_ADVICE = (
    'declare rows="together", with which whole batches run, as in AutoLaplaceGGN(model, '
    f'structure="full", rows="together"), for every structure but {" and ".join(_SINGLE)}'
)


@dataclass
class _Facts:
    """Facts about single rows from a run over all of them.

    :param plates: the names of the data's plates.
    :param numbers: how many numbers are observed for each row.
    :param scaled: the observed sites whose scale is N / (number of rows).
    :param tempering: the scales of observed sites without those of plates.
    :param deterministic: whether a deterministic site has the rows in front; one that depends on
        other rows is left out.
    """

    plates: tuple[str, ...]
    numbers: float
    scaled: frozenset[str] = frozenset()
    tempering: dict[str, Any] = field(default_factory=dict)
    deterministic: dict[str, bool] = field(default_factory=dict)

    def compare(self, mapped: "_Mapped", whole: AllRows, start: int) -> None:
        """Check rows alone against all rows of their batch."""
        for name, in_front in whole.compare(mapped.observed, mapped.run, start).items():
            if not in_front:
                whole.refuse(f"the site '{name}' is the same for every row")
        row, sites = mapped.run.observed, whole.run.observed
        self.scaled = frozenset(n for n in row if row[n].subsampling != sites[n].subsampling)
        self.tempering = {n: site.scale / site.subsampling for n, site in sites.items()}
        known = self.deterministic if start else _tensors_of(whole.run.deterministic)
        places = {}
        for name in known.keys() & mapped.deterministic.keys():
            together = whole.run.deterministic[name]
            found = whole.aligned(mapped.deterministic[name], together, start)
            if found is not None and found.agree.all():
                places[name] = found.in_front
            elif start:
                whole.refuse(f"the site '{name}' depends on the other rows")
        self.deterministic = places


@dataclass
class _Mapped:
    """A run over single rows: its statements, and its tensors with the rows in front.

    :param run: of one row.
    :param parameters: those that the program read, if ``run`` has the laws of its latents: they are
        known to be the same in every row.
    :param observed: tensors of the observed sites, (n, *shape in one row).
    :param deterministic: the deterministic sites, (n, *shape in one row).
    :param plates: the indices of the data's plates, (n,).
    """

    run: Run
    parameters: ReadParameters | None
    rows: RecordedRows
    observed: dict[str, dict[str, Tensor]]
    deterministic: dict[str, Tensor]
    plates: Mapping[str, Tensor]


class ProgramAtPoint:
    """A program at one point of its latents.

    :param model: the program.
    :param subset: the latents of interest; the others count as constants.
    :param vector: the unconstrained vector (P,) of the latents. ``leaves`` are these by site; those
        of the subset take gradients.
    :param rows: "alone", one row at a time; "together" for a program whose rows depend on each
        other, which runs on whole batches.
    :param modules: the modules of the program that are known.
    """

    def __init__(
        self,
        model: Callable,
        subset: Subset,
        vector: Tensor,
        rows: str = "alone",
        modules: Modules | None = None,
    ) -> None:
        self.model, self.subset, self.rows = model, subset, rows
        self._modules = Modules(model, modules)
        self._map = RowMap()
        self._facts: dict[Hashable, _Facts | None] = {}  # by number and form of rows
        self._numbers: dict[Hashable, float] = {}  # that operations read and make, for one row
        self._dense: set[str] = set()  # sites with uses that no recorder sees
        self._seen: set[Hashable] = set()  # forms of data for which all other uses are recorded
        self._first_pass = FirstPass()
        self._move(vector.detach(), training=False, differentiable=False)

    def moved(
        self, vector: Tensor, *, training: bool = False, differentiable: bool = False
    ) -> "ProgramAtPoint":
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

    def is_due(self, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        """Return whether a batch has to run in evaluation mode, to be compared with its rows alone:
        in the first pass over the data, or of another number of rows."""
        batch = args, dict(kwargs)
        known = (leading_size(batch), form_of(batch)) in self._facts
        return not known or self._first_pass.is_due(batch)

    # ------------------------------------------------------------------------------- runs

    def linearizations(
        self,
        batches: Iterable[Batch],
        config: Callable[[], CurvatureConfig] | None = None,
        *,
        compared: bool = True,
        every_output: bool = False,
        as_rows: bool = False,
        read: bool = False,
    ) -> Iterator[Linearization]:
        """Yield the linearization of each batch; a large batch is cut into pieces that fit in
        memory.

        :param config: the curvature that is made of them, as it is known at the time.
        :param compared: whether each batch runs whole too, without gradients: every row alone must
            be what it is beside the others. If not, only those do that are the first of their form
            and number of rows.
        :param every_output: choose the pieces' size for Jacobians of all outputs at once.
        :param as_rows: as rows over all latents, in float64.
        :param read: the first one has a ``reading``, with the priors of its whole batch.
        :raises UnsupportedProgramError: for rows that depend on each other, and if ``read``, for
            priors that differ between batches.
        """
        priors: list[Run] = []  # of the first batch

        def size(batch: Batch, outputs: float) -> int:
            found = self._numbers.get(form_of(batch))
            per_output = (8 * self.subset.size if as_rows else 0) if every_output else None
            makes = "entries" if config is None else config().kind.makes
            return _rows_at_once(self.subset, self.vector, batch, found, makes, outputs, per_output)

        for batch in batches:
            yield from self._pieces(batch, size, compared=compared, priors=priors if read else None)

    def linearize(
        self, args: tuple, kwargs: Mapping[str, Any], *, compared: bool = True
    ) -> Linearization:
        """The linearization of one batch, in one piece.

        :param compared: as in ``linearizations``.
        """
        batch = args, dict(kwargs)
        (result,) = self._pieces(batch, lambda batch, _: leading_size(batch), compared=compared)
        return result

    def linearize_batch(
        self, args: tuple, kwargs: Mapping[str, Any], plates: Mapping[str, Tensor] | None = None
    ) -> Linearization:
        """The linearization of one batch from a run over all of its rows at once.

        :param plates: indices of the program's plates.
        """
        batch = tuple(map(as_dicts, args)), as_dicts(kwargs)
        with torch.enable_grad(), ReadParameters() as parameters:
            run = self._run(batch, plates or {}, self.leaves)
        reading = ParameterReading(run, self.leaves, parameters.learned())
        return Linearization(self, batch, run, None, reading=reading)

    def _pieces(
        self,
        batch: Batch,
        size: Callable[[Batch, float], int],
        *,
        compared: bool = True,
        priors: list[Run] | None = None,
    ) -> Iterator[Linearization]:
        batch = tuple(map(as_dicts, batch[0])), as_dicts(batch[1])
        count = leading_size(batch)
        key, whole, facts = (count, form_of(batch)), None, None
        if not compared and key in self._facts:
            facts = self._facts[key]
        else:
            whole = self._all_rows(batch, count)
            alone = self.rows == "alone" and count and has_rows(batch, count)
            tensors = [value for site in whole.tensors.values() for value in site.values()]
            numbers = sum(tensor.numel() for tensor in tensors) / max(1, count)
            if alone and not whole.are_joint:
                facts = _Facts(tuple(whole.plates), numbers)
        read = priors == []
        if priors is not None and whole is not None:
            whole.run.require_observed()
        if priors and whole is not None:
            check_priors(priors[0], whole.run)
        elif priors is not None and whole is not None:
            priors.append(Run(whole.run.latents, prior_factors=whole.run.prior_factors))
        if facts is None:
            linearization = self.linearize_batch(
                *batch, {} if whole is None else whole.run.subsamples
            )
            if whole is not None:
                with torch.enable_grad():  # distributions keep what they compute here
                    check_repeated(whole.run, linearization.run)
            linearization.reading = linearization.reading if read else None
            yield linearization
        start = 0
        while facts is not None and start < count:
            at_once = min(count - start, size(batch, facts.numbers))
            part = select_rows(batch, slice(start, start + at_once)) if at_once < count else batch
            mapped = self._mapped(part, facts, whole, start, read=read and start == 0)
            if whole is not None:
                facts.compare(mapped, whole, start)
            self._numbers[key[1]] = mapped.rows.numbers
            linearization = self._of_rows(part, mapped, facts, read=read and start == 0)
            if read and start == 0 and whole is not None:
                found = linearization.reading.run
                if differing_prior(whole.run, found, found.priors) is not None:
                    linearization.reading = self.linearize_batch(*batch).reading  # of all rows
            yield linearization
            start += at_once
        if whole is not None:
            self._facts[key] = facts  # where nothing was refused
            self._first_pass.note(batch, whole)

    def _run(self, batch: Batch, plates: Mapping[str, Tensor], leaves: Mapping[str, Tensor]) -> Run:
        """A run over all rows of a batch at the unconstrained latents ``leaves``."""
        with self._mode():
            values = self.subset.layout.to_supports(leaves)
            return record(self.model, {**values, **plates}, *batch, draw=placeholder_for_observed)

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
        in_one_operation = len(latents) <= 2  # a weight and a bias
        with recorder, LastLayer(latents, lane=lane) if in_one_operation else nullcontext() as seen:
            run = record(self.model, {**values, **plates}, *batch, draw=placeholder_for_observed)
        recorder.paths = {} if seen is None else _paths(run, seen)
        return run, recorder

    # ------------------------------------------------------------------------------- single rows

    def _all_rows(self, batch: Batch, count: int) -> AllRows:
        """A run over all rows of a batch in evaluation mode, without gradients."""
        layout = self.subset.layout

        def run() -> Run:
            with torch.no_grad(), self._mode():
                values = layout.to_supports(layout.unflatten(self.vector))
                return record(self.model, values, *batch, draw=placeholder_for_observed)

        return AllRows(run(), count, run, "the linearization", _ADVICE)

    def _mapped(
        self, batch: Batch, facts: _Facts, whole: AllRows | None, start: int, *, read: bool
    ) -> _Mapped:
        """Run the program on every row alone; again while sites are used in ways that no recorder
        sees.

        :param start: the number of the first row in ``whole``.
        :raises UnsupportedProgramError: if the program cannot run on one row.
        """
        count = leading_size(batch)
        index = torch.arange(start, start + count, device=self.vector.device)
        plates = dict.fromkeys(facts.plates, index)
        if whole is not None:
            plates |= {name: whole.plates[name][start : start + count] for name in plates}
        while True:
            alone = nullcontext() if whole is None else whole.running_alone()
            try:
                with torch.enable_grad(), alone:
                    return self._map_rows(batch, plates, read)
            except UnseenUseError as error:
                if error.sites <= self._dense:
                    raise UnsupportedProgramError(
                        f"the uses of the site '{min(error.sites)}' cannot be followed row by row: "
                        f"{_ADVICE}"
                    ) from error
                self._dense |= error.sites

    def _map_rows(self, batch: Batch, plates: Mapping[str, Tensor], read: bool) -> _Mapped:
        count, recorders = leading_size(batch), []
        inside: list[tuple[Run, ReadParameters | None]] = []
        shared: dict[str, dict[str, Tensor]] = {}  # what is the same in every row

        def of_row(both: tuple, kwargs: dict[str, Any], lane: Tensor) -> Any:
            args, own_plates = both
            with ReadParameters() as parameters:
                run, recorder = self._recorded((args, kwargs), lane, own_plates)
            recorders.append(recorder)
            laws = (
                read
                and recorder.mapped
                and all(_has_one_law(s, lane) for s in run.latents.values())
            )
            inside[:] = [(run, parameters if laws else None)]
            observed = {name: site_tensors(site) for name, site in run.observed.items()}
            shared.clear()  # of a map that failed, before the rows are taken in a loop
            for name, own in observed.items() if recorder.mapped else ():
                shared[name] = {k: v for k, v in own.items() if not depends_on_row(v, lane)}
                observed[name] = {k: v for k, v in own.items() if k not in shared[name]}
            return {
                "inputs": recorder.inputs(),
                "observed": observed,
                "deterministic": _tensors_of(run.deterministic),
            }

        with self._mode():
            tensors = self._map(of_row, (batch[0], plates), batch[1])
        for name, values in shared.items():
            tensors["observed"][name] |= {k: v.expand(count, *v.shape) for k, v in values.items()}
        ((run, parameters),) = inside
        recorders = recorders[-1:] if recorders[-1].mapped else recorders[-count:]
        if any(len(r.edges) != len(recorders[0].edges) for r in recorders):
            raise ValueError("the rows use the latents in different ways")
        rows = RecordedRows(self.subset, recorders, count, tensors.pop("inputs"))
        result = _Mapped(run, parameters, rows, **tensors, plates=plates)
        form = form_of(batch)
        if form not in self._seen:
            outputs = [v for site in result.observed.values() for v in site.values()]
            leaves = {name: self.leaves[name] for name in self.subset.parts}
            wrong = unseen_uses(rows, [*outputs, *result.deterministic.values()], leaves)
            if wrong:
                raise UnseenUseError(wrong)
            self._seen.add(form)
        return result

    @torch.enable_grad()
    def _of_rows(
        self, batch: Batch, mapped: _Mapped, facts: _Facts, *, read: bool = False
    ) -> Linearization:
        """The linearization of single rows; what their tensors do not make, as factors, is that of
        a run over all of them."""
        count, parameters = mapped.rows.num_data, {}
        templates = {name: template_of(site) for name, site in mapped.run.observed.items()}
        factors = mapped.run.factors or mapped.run.prior_factors
        unknown = factors or mapped.run.discrete or None in templates.values()
        whole = (
            self.linearize_batch(*batch)
            if unknown or (read and mapped.parameters is None)
            else None
        )
        run = copy.copy(mapped.run if whole is None else whole.run)
        run.observed = dict(run.observed)
        for name, site in mapped.run.observed.items():
            own = {key: value.flatten(0, 1) for key, value in mapped.observed[name].items()}
            value, mask = (own.pop(f"site.{key}", getattr(site, key)) for key in ("value", "mask"))
            tempering = own.pop("site.scale", facts.tempering[name])
            if templates[name] is None:
                parameters[name] = own
                continue
            share = site.subsampling / (count if name in facts.scaled else 1)
            run.observed[name] = site._replace(
                distribution=rebuilt(templates[name], own),
                value=value,
                mask=mask,
                scale=tempering * share,
                subsampling=share,
            )
        run.deterministic = {}
        for name, in_front in facts.deterministic.items():
            value = mapped.deterministic[name]
            run.deterministic[name] = value.flatten(0, 1) if in_front else value[0]
        reading = None if whole is None else whole.reading
        if whole is None:  # the values inside of the map are those of its rows
            values = self.subset.layout.to_supports(self.leaves)
            run.latents = {n: s._replace(value=values[n]) for n, s in run.latents.items()}
            if mapped.parameters is not None:
                reading = ParameterReading(run, self.leaves, mapped.parameters.learned())
        return Linearization(
            self,
            batch,
            run,
            mapped.rows,
            parameters,
            facts.deterministic,
            reading=reading if read else None,
            run_at=partial(self._run, batch, mapped.plates) if mapped.rows.mapped else None,
        )

    @torch.no_grad()
    def origins(self, batch: Batch) -> dict[str, list[Tensor]]:
        """For each factor the tensors of a batch that its density is computed from, for each
        observed site those that its value is, by their operators; its density where the value is
        computed from nothing, as zeros."""
        leaves, spec = tree_flatten(batch)
        copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        sources = [leaf for leaf in copies if isinstance(leaf, Tensor)]
        latents = {name: leaf.detach() for name, leaf in self.leaves.items()}
        found: dict[str, frozenset[int]] = {}
        with uncompiled(self._modules), Origins(sources) as origins:
            run = self._run(tree_unflatten(copies, spec), {}, latents)
            for name, site in (run.observed | run.factors).items():
                if name in run.observed and site.value is not None:
                    found[name] = origins.of(site.value)
                if not found.get(name) and site.value is not None:
                    found[name] = origins.of(site.log_prob())
        return {name: [sources[i] for i in own if i >= 0] for name, own in found.items()}


def _rows_at_once(
    subset: Subset,
    like: Tensor,
    batch: Batch,
    numbers: float | None,
    makes: str,
    outputs: float,
    per_output: int | None,
) -> int:
    """The number of rows in a piece.

    :param numbers: that operations read and make for one row; None if no row was run yet.
    :param makes: what a curvature makes of a row, see ``Curvature``.
    :param outputs: the numbers that are observed of a row.
    :param per_output: bytes for each of them, for Jacobians of all at once; else None.
    """
    item = like.element_size()
    leaves = tensors_in(batch)
    read = sum(leaf.numel() for leaf in leaves) / leading_size(batch)
    per_row = 2.0 * item * (numbers or read)
    if per_output is not None:
        per_row = per_row * (1.0 + 0.5 * outputs) + per_output * outputs
    shared = [s.size for s in subset.layout.latents.values() if len(s.shape) > 2]
    per_row += item * {"rows": subset.size, "entries": max(shared, default=0), "factors": 0}[makes]
    weights, few = _PER_WEIGHT * item * subset.layout.size, min(_FEW * per_row, _FEW_BYTES)
    budget = bytes_at_once(int(max(_BUDGET, weights, few)), like.device)
    rows = max(1, int(budget / max(per_row, 1.0)))
    return rows if numbers else min(rows, _FIRST)


def check_priors(first: Run, other: Run) -> None:
    """Check that the priors of a batch are those of the first one.

    :raises UnsupportedProgramError: naming the site whose prior differs.
    """
    name = differing_prior(first, other, first.priors)
    if name is not None:
        raise UnsupportedProgramError(
            f"the prior of site '{name}' depends on the data, and differs from batch to batch: "
            "pass all data as one batch"
        )


def _has_one_law(site: Site, lane: Tensor) -> bool:
    """Return whether a latent's law is known to be the same in every row of a map."""
    tensors = [*parameters_of(site.distribution).values(), site.scale, site.mask]
    found = [value for value in tensors if isinstance(value, Tensor)]
    found += [mask for mask, _ in masks_of(site.distribution)]
    return is_known(site.distribution) and not any(depends_on_row(v, lane) for v in found)


def _paths(run: Run, seen: LastLayer) -> dict[tuple[str, str], Path]:
    """``UseRecorder.paths`` of observed and deterministic sites."""
    if len(seen.layers) != 1 or seen.left is not None:
        return {}
    named = {(n, key): v for n, s in run.observed.items() for key, v in site_tensors(s).items()}
    named |= {(n, "value"): value for n, value in run.deterministic.items()}
    tags = {place: seen.tag(value) for place, value in named.items()}
    return {
        place: tag.path
        for place, tag in tags.items()
        if isinstance(tag, OutputTag) and tag.is_complete
    }


def _tensors_of(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}
