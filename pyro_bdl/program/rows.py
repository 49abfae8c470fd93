"""The rows of a batch of data: what statements say of them, and the contract of programs that run
on one row at a time.

Such a program has the same statements for a row alone as for the row beside all others of its
batch. ``AllRows`` is one run over a whole batch. ``AllRows.compare`` holds every tensor of every
statement about the rows alone against it, entry by entry, relative to the size of that entry over
the rows.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor

from pyro_bdl.distributions.parameters import has_masks, is_known, parameters_of
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.program.batches import NOT_ON_SOME, Batch, as_dicts, leading_size
from pyro_bdl.program.check import on_whole_data, without_handlers
from pyro_bdl.program.layout import Latent
from pyro_bdl.program.trace import Run, Site, record, sum_out_discrete
from pyro_bdl.program.vmap import RowMap, depends_on_row
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.precision import castings, double, rounds_to_tf32
from pyro_bdl.utils.random_state import own_randomness
from pyro_bdl.utils.trees import constants_of, tree_flatten

ROWS = ("alone", "together")
# of the largest entry over the rows
_SHARE = {torch.float64: 1e-6, torch.float32: 1e-3}
_TF32 = 0.01  # on a GPU that rounds float32 factors to it, through the layers of a deep network
_HALF = 0.05  # in half precision, and of what is made of it under autocast


def rows_of(model: Callable, posterior: Any = None) -> str:
    """Return "together" where rows need each other, as the nodes of a graph, so that whole batches
    run: as the program says by an attribute, ``model.rows = "together"``, or a posterior by the
    ``config`` of its curvature; else "alone".

    :raises ValueError: for another text.
    """
    owners = model, without_handlers(model), getattr(posterior, "config", None)
    said = [getattr(owner, "rows", None) for owner in owners]
    for value in said:
        if isinstance(value, str) and value not in ROWS:  # what is no text is another attribute
            raise ValueError(f"rows of the program is 'alone' or 'together', got {value!r}")
    return "together" if "together" in said else "alone"


def form_of(batch: Batch) -> Hashable:
    """All that a program may branch on besides values and the number of rows: whether there are
    several, the shapes and dtypes of one, and the arguments that are no tensors."""
    leaves, structure = tree_flatten((tuple(map(as_dicts, batch[0])), as_dicts(batch[1])))
    kinds = [(leaf.shape[1:], leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor)]
    return min(leading_size(leaves), 2), tuple(kinds), constants_of(leaves), str(structure)


def site_tensors(site: Site) -> dict[str, Tensor]:
    """The tensors of an observed site: parameters, value, mask, and the scale without plates."""
    tensors = parameters_of(site.distribution)
    if site.value is not None:
        tensors["site.value"] = site.value
    others = {"mask": site.mask, "scale": site.scale}
    for name, value in others.items():
        if isinstance(value, Tensor):
            value = value / site.subsampling if name == "scale" else value
            tensors[f"site.{name}"] = value.expand(site.distribution.batch_shape)
    return tensors


def template_of(site: Site) -> Any:
    """The distribution, where its parameters alone make it again; else None."""
    known = is_known(site.distribution) and not has_masks(site.distribution)
    return site.distribution if known else None


def plate_of_rows(site: Site, args: Any) -> tuple[str, int] | None:
    """The plate that holds the rows of the arguments at an observed site, with its dimension there,
    counted from the right; None where there is none.

    It has a cell for each row, and the value runs along it as along the rows of an argument that
    the value is a view of. A value with memory of its own must have it as its first dimension.
    """
    count, batch = leading_size(args), len(site.distribution.batch_shape)
    if site.value is None:
        return None
    for plate, dim in sorted(site.plates, key=lambda plate: plate[1]):
        axis = dim - (site.value.dim() - batch)
        if batch >= -dim and site.value.shape[axis] == count:
            along = along_rows(site.value, args, axis)
            if along or (along is None and dim == -batch):
                return plate, dim
    return None


def plates_of_rows(sites: Mapping[str, Site], args: Any) -> dict[str, tuple[str, int]]:
    """``plate_of_rows`` of each observed site that has one."""
    places = {name: plate_of_rows(site, args) for name, site in sites.items()}
    return {name: place for name, place in places.items() if place is not None}


def along_rows(value: Tensor, args: Any, axis: int = 0) -> bool | None:
    """Return whether an axis of a view of an argument is this argument's first one, by the places
    of its numbers in memory; None for a tensor with memory of its own."""

    def memory(tensor: Tensor) -> tuple:
        return tensor.dtype, tensor.untyped_storage().data_ptr()

    def width(tensor: Tensor) -> int:
        """How far the last number of a row is from its first one."""
        sizes = zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
        return sum((size - 1) * stride for size, stride in sizes)

    leaves = (leaf for leaf in tree_flatten(args)[0] if isinstance(leaf, Tensor) and leaf.dim())
    tensors = (leaf for leaf in leaves if leaf.layout is torch.strided)
    views = [x for x in tensors if memory(x) == memory(value)]
    rows = value.movedim(axis, 0) if value.dim() else value[None]
    for x in views:
        start = value.storage_offset() - x.storage_offset()
        same = len(x) == len(rows) and (len(x) == 1 or rows.stride(0) == x.stride(0))
        if same and start >= 0 and start + width(rows) <= width(x):
            return True
    return False if views else None


def refuse_local_latents(
    latents: Mapping[str, Latent], plates: Collection[str], why: str, advice: str
) -> None:
    """Refuse latents in the plates of the rows.

    :raises UnsupportedProgramError: naming the site.
    """
    for name, latent in latents.items():
        if set(plates) & set(latent.plates):
            raise UnsupportedProgramError(
                f"the latent site '{name}' has a value for every row, {why}: integrate it out "
                f"where it is Gaussian (handlers.integrate), or {advice}"
            )


class AllRows:
    """A run over all rows of a batch.

    :param count: the number of rows.
    :param again: runs the program once more in the same way, to tell random numbers from rows that
        depend on each other.
    :param subject: what takes rows alone, and
    :param advice: what to do instead, for the error about such rows.
    """

    def __init__(
        self, run: Run, count: int, again: Callable[[], Run], subject: str, advice: str
    ) -> None:
        self.run, self.count, self.again = run, count, again
        self.subject, self.advice = subject, advice

    @cached_property
    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Site -> name -> tensor of all rows, of the observed sites."""
        return {name: site_tensors(site) for name, site in self.run.observed.items()}

    @cached_property
    def plates(self) -> dict[str, Tensor]:
        """The indices (count,) of the data's plates, for the plates of a row alone.

        Where several plates of all data have as many cells as there are rows, they are left out:
        some of them may be about other things, so that all run as they are written.
        """
        leading = self._leading
        complete = {name for name, subsampled in leading.items() if not subsampled}
        left_out = complete if len(complete) > 1 else set()
        return {name: self.run.subsamples[name] for name in leading if name not in left_out}

    @cached_property
    def _leading(self) -> dict[str, bool]:
        """The plates that are the first dimension of an observed site or a factor, with as many
        cells as there are rows; whether they hold a part of their data."""
        return {
            name: site.subsampling != 1.0
            for site in (self.run.observed | self.run.factors).values()
            for name, dim in site.plates
            if dim == -len(site.distribution.batch_shape)
            and len(self.run.subsamples.get(name, ())) == self.count
        }

    @cached_property
    def _dtypes(self) -> set[torch.dtype]:
        """The latents' dtypes, in which the network rounds whatever its output is cast to."""
        values = (site.value for site in self.run.latents.values())
        return {value.dtype for value in values if value.is_floating_point()}

    @property
    def are_joint(self) -> bool:
        """True if the statements say that rows are no data of their own: an observed site has
        another first dimension than the rows or none, as one whose distribution is joint over all
        rows, a latent is in the data's plate, or discrete sites couple the data."""
        observed = (site.distribution.batch_shape for site in self.run.observed.values())
        return (
            any(tuple(shape[:1]) != (self.count,) for shape in observed)
            or any(
                plate in self._leading
                for latent in self.run.latents.values()
                for plate, _ in latent.plates
            )
            or self.run.coupled_data() is not None
        )

    @property
    def num_data(self) -> float:
        """N, the number of data that the program states; those of the batch if it states none."""
        sites = (self.run.observed | self.run.factors).values()
        return max((round(self.count * site.subsampling, 3) for site in sites), default=0.0)

    def refuse(self, reason: str, error: Exception | None = None) -> NoReturn:
        """Refuse the program for single rows.

        :raises UnsupportedProgramError: always.
        """
        raise UnsupportedProgramError(
            f"{self.subject} runs the program on one row of its arguments at a time, and {reason}: "
            f"{self.advice}"
        ) from error

    @contextmanager
    def running_alone(self) -> Iterator[None]:
        """Refuse, inside ``with``, programs that cannot run on one row."""
        try:
            yield
        except (UnsupportedProgramError, torch.OutOfMemoryError):
            raise
        except NOT_ON_SOME as error:
            self.again()  # which raises what is wrong with all rows too
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self.refuse(f"it cannot run on one ({reason})", error)

    def compare(
        self, alone: Mapping[str, Mapping[str, Tensor]], row: Run, start: int = 0
    ) -> dict[str, bool]:
        """Check tensors of rows alone, and find the sites that have a datum for each row.

        :param alone: site -> name -> (n, *shape in one row), of the rows from ``start`` on.
        :param row: a run over one of them.
        :returns: site -> True for a datum for each row; False for one that is the same for all of
            them, about latents.
        :raises UnsupportedProgramError: naming site, tensor and row, where they differ.
        """
        together = self.tensors
        if any("log_prob" in tensors for tensors in alone.values()):
            for name, site in (self.run.observed | self.run.factors).items():
                own = {"log_prob": site.log_prob() / site.subsampling}
                together = {**together, name: {**together.get(name, {}), **own}}
        absent = next(iter(alone.keys() ^ together.keys()), None)
        if absent is not None:
            self.refuse(f"the site '{absent}' is not there for every number of rows")
        places: dict[str, bool] = {}
        for name, tensors in alone.items():
            for key, value in tensors.items():
                other = together[name].get(key, value.new_empty(0, 0))
                aligned = self.aligned(value, other, start)
                if aligned is None:
                    self.refuse(f"'{_shown(key)}' of the site '{name}' has no row for each")
                places[name] = places.get(name, False) or aligned.in_front
                self._check_equal(name, key, aligned, row, start)
            alone_site = row.observed.get(name)
            shape = () if alone_site is None else alone_site.distribution.batch_shape
            cells = next(iter(shape), 1)
            if places.get(name) and cells != 1:  # in a plate with indices of its own
                self.refuse(f"the site '{name}' has {cells} cells for one row")
        return places

    def aligned(self, alone: Tensor, together: Tensor, start: int) -> "Aligned | None":
        """A tensor of rows alone beside the same entries of all rows; None where it has neither a
        value for each row nor one for all of them.

        :param alone: (n, *shape in one row), of the rows from ``start`` on.
        """
        if alone.shape[1:2] == (1,) and together.shape == (self.count, *alone.shape[2:]):
            some = together[start : start + len(alone)]
            return Aligned(alone[:, 0], some, _slack(together, self._dtypes), in_front=True)
        if together.shape == alone.shape[1:]:
            slack = _slack(together[None], self._dtypes)
            return Aligned(alone, together.expand_as(alone), slack, in_front=False)
        return None

    def _check_equal(
        self, site: str, key: str, tensors: "Aligned", one_row: Run, start: int
    ) -> None:
        wrong = ~tensors.agree.reshape(len(tensors.alone), -1)
        if self.count == 1 or not wrong.any():
            return
        check_repeated(self.run, self.again())
        values = [run.observed[site].value for run in (one_row, self.run) if site in run.observed]
        if len({value.shape for value in values if value is not None}) == 1 and values[0].dim():
            self.refuse(
                f"the site '{site}' observes values that the program holds itself (a closure, "
                "poutine.condition), all of them beside each row: pass them as an argument, or else"
            )
        row, entry = (int(i) for i in wrong.nonzero()[0])
        one, all_ = (
            value[row].reshape(-1)[entry].item() for value in (tensors.alone, tensors.together)
        )
        self.refuse(
            f"its rows depend on each other ('{_shown(key)}' of the site '{site}' is {one:.6g} in "
            f"row {start + row} alone, counted from 0, and {all_:.6g} beside the {self.count} rows "
            "of its batch)"
        )


@dataclass
class Aligned:
    """Tensors of rows alone, and of the same rows beside all others.

    :param slack: by which they may differ.
    :param in_front: whether there is a value for each row.
    """

    alone: Tensor
    together: Tensor
    slack: Tensor
    in_front: bool

    @property
    def agree(self) -> Tensor:
        """Return whether entries agree."""
        return _agree(self.alone, self.together, self.slack)


def check_repeated(first: Run, second: Run) -> None:
    """Check that two runs of a program at the same latents and data are the same.

    :raises UnsupportedProgramError: naming the site that differs.
    """
    found = difference(first, second)
    if found is not None:
        site, key, *values = found
        one, two = (float(double(v.detach()).sum()) for v in values)
        raise UnsupportedProgramError(
            f"'{_shown(key)}' of the site '{site}' is {one:.6g} in one run and {two:.6g} in "
            "another at the same latents: the program uses random numbers or a counter besides "
            "the sample statements that are seen, such as a latent under poutine.block, or "
            "dropout that is always on: condition the latent, write F.dropout(x, p, "
            "self.training), or pass the number as an argument"
        )


def difference(first: Run, second: Run) -> tuple[str, str, Tensor, Tensor] | None:
    """The first tensor of a statement that two runs do not share, entry by entry: site, name, and
    its values in both; None if all are the same."""
    others = _all_tensors(second)
    for (site, key), value in _all_tensors(first).items():
        other = others.get((site, key), value.new_empty(0, 0))
        if not _same(value, other):
            return site, key, value, other
    return None


def differing_prior(first: Run, second: Run, names: Iterable[str]) -> str | None:
    """The first prior that two runs of a program at the same latents, on different data, do not
    share, entry by entry; None if they share all.

    :param names: the sites and prior factors to compare.
    """
    for name in names:
        own, other = first.priors[name], second.priors[name]
        one, two = ({**site_tensors(s), "log_prob": s.log_prob()} for s in (own, other))
        if one.keys() != two.keys() or not all(_same(one[key], two[key]) for key in one):
            return name
    return None


def _all_tensors(run: Run) -> dict[tuple[str, str], Tensor]:
    """The tensors of the observed sites, and the densities of latents and of all factors."""
    found = {(n, k): v for n, site in run.observed.items() for k, v in site_tensors(site).items()}
    others = (run.priors | run.factors).items()
    return found | {(n, "log_prob"): site.log_prob() for n, site in others}


def _shown(key: str) -> str:
    return key.removeprefix("site.")


def _slack(values: Tensor, dtypes: Set[torch.dtype] = frozenset()) -> Tensor:
    """By how much entries may differ, (*shape): a share of the largest absolute value of each
    over the rows, at least the rounding of the largest of all.

    :param dtypes: of what the values are computed from, which may be coarser than their own.
    """
    if not values.is_floating_point() or not values.numel():
        return values.new_zeros(values.shape[1:])
    size = values.detach().abs().nan_to_num(0.0, 0.0)
    dtypes = dtypes | {values.dtype}
    share = _HALF if castings() else max(_SHARE.get(dtype, _HALF) for dtype in dtypes)
    if rounds_to_tf32(values):
        share = max(share, _TF32)
    rounding = max(torch.finfo(dtype).eps for dtype in dtypes)
    return (share * size.amax(0)).clamp(min=rounding * size.max())


def _same(value: Tensor, other: Tensor) -> bool:
    if value.shape != other.shape:
        return False
    return bool(_agree(value, other, _slack(torch.atleast_1d(other))).all())


def _agree(some: Tensor, other: Tensor, slack: Tensor) -> Tensor:
    some, other = some.detach(), other.detach()
    same = (some == other) | (some.isnan() & other.isnan())
    return same | ((some - other).abs() <= slack) if other.is_floating_point() else same


class FirstPass:
    """Counts rows of each form that were compared, until the first pass over the data is over."""

    def __init__(self) -> None:
        self._left: dict[Hashable, float] = {}

    def is_due(self, batch: Batch) -> bool:
        """Return whether fewer rows than the program states data were compared."""
        return self._left.get(form_of(batch), 1.0) > 0

    def note(self, batch: Batch, rows: AllRows) -> None:
        """Count the rows of a batch."""
        form = form_of(batch)
        self._left[form] = self._left.get(form, rows.num_data) - rows.count


@torch.no_grad()
def check_rows(
    model: Callable,
    values: Mapping[str, Tensor],
    batch: Batch,
    row_map: RowMap,
    *,
    subject: str,
    advice: str,
) -> tuple[AllRows, Run, dict[str, bool]]:
    """Check in evaluation mode that each row of a batch alone is what it is beside the others.

    :param values: latents by site.
    :param subject: what takes rows alone, and
    :param advice: what to do instead, for the error.
    :returns: the run over all rows, that over one, and of each site whether it has a datum for each
        row.
    :raises UnsupportedProgramError: for rows that depend on each other, a program that cannot run
        on one, and plates that pick rows at random.
    """
    args, kwargs = tuple(map(as_dicts, batch[0])), as_dicts(batch[1])
    whole_model = on_whole_data(model, advice=advice)
    row: list[Run] = []
    about_rows: set[str] = set()

    def run() -> Run:
        return record(whole_model, values, args, kwargs, draw=sum_out_discrete)

    def of_row(both: tuple, own_kwargs: dict[str, Any], lane: Tensor) -> Any:
        own_args, plates = both
        found = record(model, {**values, **plates}, own_args, own_kwargs, draw=sum_out_discrete)
        row[:] = [found]
        tensors = {name: site_tensors(site) for name, site in found.observed.items()}
        for name, site in (found.observed | found.factors).items():
            if name in found.factors or template_of(site) is None:
                own = {"log_prob": site.log_prob() / site.subsampling}
                tensors[name] = tensors.get(name, {}) | own
        about_rows.update(
            name
            for name, own in tensors.items()
            if any(depends_on_row(value, lane) for value in own.values())
        )
        return tensors

    with evaluation_mode(model), own_randomness():
        whole = AllRows(run(), leading_size(batch), run, subject, advice)
        name = whole.run.coupled_data()
        if name is not None:
            whole.refuse(f"discrete sites couple the data of the site '{name}'")
        with whole.running_alone():
            alone = row_map(of_row, (args, whole.plates), kwargs)
        places = whole.compare(alone, row[0])
    for name, has_rows in places.items():
        if name in about_rows and not has_rows:
            whole.refuse(f"the site '{name}' depends on the rows but stands in no plate of theirs")
    return whole, row[0], places
