"""The observed sites of a program, as one target.

The numbers of several observed sites are scored as one target. If all sites stand in one plate
whose cells are the rows of the data, a datum is a row: its log density is the sum over the sites,
and its numbers follow each other, ``(N, D)``. Otherwise all numbers are in one vector ``(M,)``, and
all data are passed to the program at once. Sites in a common plate have one log density for each of
its cells, as for the sequences of a hidden Markov chain. Without a common plate each site has its
own terms; if discrete sites that are summed out tie the data to each other, there is one density.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pyro_bdl.distributions.moments import observation_kind, observation_mean
from pyro_bdl.distributions.parameters import is_known
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides.draws import to_samples
from pyro_bdl.program.batches import has_rows, leading_size, taken
from pyro_bdl.program.layout import Latent
from pyro_bdl.program.program import Program
from pyro_bdl.program.trace import Run, Site, leave_open, record
from pyro_bdl.utils.memory import bytes_at_once
from pyro_bdl.utils.module_state import evaluation_mode

_CLASSES = ("Categorical", "Bernoulli", "OneHotCategorical", "OrderedLogistic")
_BY_CLASS = ("Categorical", "OrderedLogistic")  # a probability for each class
# Bytes of the draws in memory at once while the test points are scored: scores hold about ten
# arrays of this size, and bars move on after each part.
_DRAWS_AT_ONCE = 2**23


class Seen(NamedTuple):
    """The numbers of some data that were seen; masks leave out the rest.

    :param numbers: bool, as the numbers of the target, or one for each class label.
    :param counts: how many numbers of each datum were seen, ``(K,)``, as its log density.
    :param rows: n, of the data.
    """

    numbers: Tensor
    counts: Tensor
    rows: int

    def of_rows(self) -> Tensor:
        """Mark the rows of which something was seen, bool ``(n,)``."""
        return self.numbers.reshape(self.rows, -1).any(1)

    def numbers_seen(self) -> tuple[int, int]:
        """How many numbers were seen, and how many there are."""
        return int(self.numbers.sum()), self.numbers.numel()

    def at(self, rows: slice) -> "Seen":
        """The same of some of the rows."""
        if rows == slice(None):
            return self
        counts = self.counts.reshape(self.rows, -1)[rows]
        numbers = self.numbers.reshape(self.rows, *self.numbers.shape[1:])[rows]
        return Seen(numbers, counts.flatten(), len(counts))


@dataclass(frozen=True)
class Kind:
    """The observed sites of a program, and how they are scored.

    :param sites: observed site to the name of its distribution.
    :param task: ``"regression"`` or ``"classification"``.
    :param latents: its latent sites; None if their shapes are unknown without a posterior.
    :param is_last: whether the last argument holds the numbers of a single site.
    :param by_rows: whether the first axis of the predictions is that of the data.
    :param plates: the plates that several sites stand in, each with its dimension at each site,
        counted from the right.
    :param mixed: whether some sites are of classes and others of numbers.
    :param no_single: why no datum has a density of its own, in words; empty if each one has.
    :param is_joint: whether one density covers all data.
    :param fixed_mean: whether the mean of a joint distribution does not depend on the latents, as
        for a Gaussian process whose function is integrated out.
    :param linear: whether the linearized model knows the distributions.
    :param needs_targets: whether the program observes its site with targets only.
    :param most_rows: the program's ``num_data``, beyond which it takes no targets; None for any.
    :param is_masked: whether a mask tensor leaves data out of the likelihood.
    :param factors: its factors, which belong to no datum and are not scored.
    """

    sites: Mapping[str, str]
    task: str
    latents: Mapping[str, Latent] | None
    is_last: bool
    by_rows: bool
    plates: Mapping[str, Mapping[str, int]]
    mixed: bool
    no_single: str
    is_joint: bool
    fixed_mean: bool
    linear: bool
    needs_targets: bool
    most_rows: int | None
    is_masked: bool = False
    factors: tuple[str, ...] = ()

    @property
    def is_normal(self) -> bool:
        return set(self.sites.values()) == {"Normal"}

    def numbers(self, values: Mapping[str, Tensor]) -> Tensor:
        """Numbers of each site and draw ``(S, ...)`` as ``(S, N, ...)`` or ``(S, M)``."""
        if self.is_last:
            return values[next(iter(self.sites))]
        shape = values[next(iter(self.sites))].shape
        return self._joined(values, *shape[: 2 if self.by_rows else 1])

    def probabilities(self, means: Mapping[str, Tensor]) -> Tensor:
        """Class probabilities ``(S, N, C)``; several labels of a row count as several points."""
        by_site = {n: class_probabilities(kind, means[n]) for n, kind in self.sites.items()}
        return self._of_classes(by_site, means)

    def log_probabilities(self, logs: Mapping[str, Tensor]) -> Tensor:
        """The same of log probabilities ``(S, ..., C)`` of each site."""
        return self._of_classes({name: logs[name].flatten(1, -2) for name in self.sites}, logs)

    def _of_classes(self, by_site: Mapping[str, Tensor], means: Mapping[str, Tensor]) -> Tensor:
        first = next(iter(by_site.values()))
        if self.is_last:
            return first
        rows = means[next(iter(self.sites))].shape[1:2] if self.by_rows else ()
        joined = self._joined(by_site, len(first), *rows)
        return joined.reshape(len(joined), -1, first.shape[-1])

    def densities(self, values: Mapping[str, Tensor]) -> Tensor:
        """Log densities of each site ``(S, *batch)`` as those of the data, ``(S, K)``."""
        if not self.plates:
            joined = self._joined(values, len(next(iter(values.values()))))
            return joined.sum(1, keepdim=True) if self.is_joint else joined
        terms = []
        for name in self.sites:
            dims = [at[name] for at in self.plates.values()]
            moved = values[name].movedim(dims, list(range(1, 1 + len(dims))))
            terms.append(moved.reshape(*moved.shape[: 1 + len(dims)], -1).sum(-1).flatten(1))
        return torch.stack(terms).sum(0)

    def _joined(self, values: Mapping[str, Tensor], *leading: int) -> Tensor:
        return torch.cat([values[name].reshape(*leading, -1) for name in self.sites], -1)

    def batches(self, args: tuple, draws: int, width: int = 1) -> list[tuple[tuple, slice]]:
        """Arguments and their rows in parts that limit memory, or whole where they belong together.

        :param draws: S.
        :param width: numbers in a row's target.
        """
        if self.is_joint or not self.by_rows:
            return [(args, slice(None))]
        size = max(1, bytes_at_once(_DRAWS_AT_ONCE) // (8 * draws * max(1, width)))
        size = min(size, self.most_rows or size)
        parts = [slice(start, start + size) for start in range(0, leading_size(args), size)]
        return [(taken(args, rows), rows) for rows in parts]

    def targets(self, model: Callable, args: tuple, posterior: Any) -> Tensor:
        """The numbers that the program observes."""
        if self.is_last:
            return args[-1]
        with torch.no_grad(), evaluation_mode(model, posterior):
            parts = (part for part, _ in self.batches(args, draws=1))
            return torch.cat([self._observed(model, part, posterior) for part in parts])

    def seen(self, model: Callable, args: tuple, posterior: Any) -> Seen | None:
        """The data that were seen; None where no mask leaves any out."""
        if not self.is_masked:
            return None
        with torch.no_grad(), evaluation_mode(model, posterior):
            parts = [self._seen(model, part, posterior) for part, _ in self.batches(args, draws=1)]
        numbers, counts, rows = zip(*parts, strict=True)
        seen = Seen(torch.cat(numbers), torch.cat(counts), sum(rows))
        return None if seen.numbers.all() else seen

    def _seen(self, model: Callable, args: tuple, posterior: Any) -> Seen:
        run = _first_run(model, args, posterior)[0]
        cells: dict[str, Tensor] = {}
        counts: dict[str, Tensor] = {}
        for name, kind in self.sites.items():
            site = run.observed[name]
            of_site = site.seen()
            if self.task == "classification" and kind == "OneHotCategorical":
                of_site = of_site[..., 0]
            if self.mixed and kind in _BY_CLASS:
                classes = observation_mean(site.distribution).shape[-1]
                of_site = of_site[..., None].expand(*of_site.shape, classes)
            cells[name] = of_site
            batch: Any = site.distribution.batch_shape
            counts[name] = of_site.reshape(*batch, -1).sum(-1, dtype=torch.float64)[None]
        if self.is_last:
            numbers = next(iter(cells.values()))
        else:
            numbers = self._joined(cells, *([leading_size(args)] if self.by_rows else []))
        rows = leading_size(args) if self.by_rows else len(numbers)
        return Seen(numbers, self.densities(counts)[0], rows)

    def _observed(self, model: Callable, args: tuple, posterior: Any) -> Tensor:
        run = _first_run(model, args, posterior)[0]
        values: dict[str, Any] = {name: run.observed[name].value for name in self.sites}
        for name, kind in self.sites.items():
            if self.task == "classification" and kind == "OneHotCategorical":
                values[name] = values[name].argmax(-1)
            if self.mixed and kind in _BY_CLASS:
                classes = observation_mean(run.observed[name].distribution).shape[-1]
                values[name] = one_hot(values[name].long(), classes)
        return self._joined(values, *([leading_size(args)] if self.by_rows else []))


def without_targets(args: tuple) -> tuple:
    """The program's arguments for predictions."""
    return (*args[:-1], None) if len(args) > 1 else args


@torch.no_grad()
def read_kind(model: Callable, args: tuple, posterior: Any) -> Kind:
    """Read what a program observes from a run on the data.

    :param args: the test inputs and, last, the targets.
    :param posterior: a guide or ``Samples``, whose draws give values to latents with an improper
        prior.
    :raises ValueError: if the program has no observed site.
    :raises UnsupportedProgramError: if the program does not sample the site without targets, and
        its distribution with targets cannot be sampled either.
    """
    most_rows = _stated_num_data(model)
    rows = args if most_rows is None else taken(args, slice(0, most_rows))
    with evaluation_mode(model, posterior):
        run, program, at = _first_run(model, rows, posterior)
        sites = run.observed
        if not sites:
            raise ValueError(
                "compare needs a program with an observed site: pass the targets last, and write "
                "the likelihood as pyro.sample(..., obs=y)"
            )
        kinds = {name: observation_kind(site.distribution) for name, site in sites.items()}
        classes = {_number_of_classes(kinds[name], site) for name, site in sites.items()}
        is_class = len(classes) == 1 and None not in classes
        (name, site), *others = sites.items()
        is_last = not others and _are_targets(rows[-1], site)
        linear, plates = all(is_known(site.distribution) for site in sites.values()), {}
        without: Mapping[str, Site] = {}
        tied = run.one_step_ahead()
        if is_last:
            check_fit(rows[-1], cast(Any, site.distribution).shape())
            without = record(model, at, without_targets(rows), draw=leave_open).observed
            if name not in without and not linear:
                raise UnsupportedProgramError(
                    f"the program does not sample the site {name!r} where the targets are None: "
                    "write it with y=None as an argument and pyro.sample(..., obs=y)"
                )
            numbers = rows[-1].numel()
            is_joint = len(rows[-1]) > 1 and site.distribution.event_shape.numel() == numbers
            words = f"the site {name!r} is one joint observation of all rows"
        else:
            plates = _common_plates(sites)
            is_joint = not plates and (tied or run.coupled_data()) is not None
            words = "discrete sites that are summed out tie the data of all observed sites to "
            words, tied = words + "each other", None
        return Kind(
            sites=kinds,
            task="classification" if is_class else "regression",
            latents=None if program is None else program.latents,
            is_last=is_last,
            by_rows=is_last or _are_rows(model, rows, run, plates, posterior),
            plates=plates,
            mixed=len(classes) > 1,
            no_single=words if is_joint else tied or "",
            is_joint=is_joint,
            fixed_mean=is_joint and is_last and program is not None and _same_mean(program, name),
            linear=linear,
            needs_targets=name not in without,
            most_rows=most_rows,
            is_masked=any(site.is_masked for site in sites.values()),
            factors=() if program is None else program.factors,
        )


def _stated_num_data(model: Any) -> int | None:
    """The N (``num_data``) of a program, also under handlers; None if it has none."""
    while not hasattr(model, "num_data") and hasattr(model, "model"):  # under a handler
        model = model.model
    return getattr(model, "num_data", None)


def class_probabilities(kind: str, mean: Tensor) -> Tensor:
    """Class probabilities ``(S, N, C)`` from the mean of an observation at each draw.

    :param kind: the name of its distribution.
    """
    if kind == "Bernoulli":
        ones = mean.flatten(1)
        return torch.stack([1 - ones, ones], -1)
    return mean.flatten(1, -2)


def _number_of_classes(kind: str, site: Site) -> int | None:
    """The number of classes of a site's targets; None for other numbers."""
    if kind not in _CLASSES:
        return None
    return class_probabilities(kind, observation_mean(site.distribution)[None]).shape[-1]


def _are_targets(y: Any, site: Site) -> bool:
    """Return whether the last argument holds the numbers that a site observes, in their order."""
    if not isinstance(y, Tensor) or y.numel() != site.value.numel():
        return False
    return torch.equal(y.reshape(-1).to(site.value), site.value.reshape(-1))


def _first_run(
    model: Callable, args: tuple, posterior: Any
) -> tuple[Run, Program | None, Mapping[str, Tensor]]:
    """A run on the data with the observed sites that have values, the program, and the latents.

    The program is None if its prior is improper; a draw of the posterior then gives the latents.
    """
    program: Program | None = None
    try:
        program = Program(model, *args)
        at: Mapping[str, Tensor] = program.initial
        run = program.run(at)
    except (NotImplementedError, UnsupportedProgramError):
        draws = to_samples(posterior, 1, *without_targets(args)).latents
        at = {site: value[0, 0] for site, value in draws.items()}
        run = record(model, at, args, draw=leave_open)
    observed = {
        name: site
        for name, site in run.observed.items()
        if site.value is not None and site.mask is not False
    }
    return replace(run, observed=observed), program, at


def _same_mean(program: Program, site: str) -> bool:
    """Return whether the observation's mean does not depend on the latents."""
    elsewhere = program.constrain(program.unconstrain(program.initial) + 0.5)[0]
    runs = (program.run(latents) for latents in (program.initial, elsewhere))
    return torch.equal(*(observation_mean(run.observed[site].distribution) for run in runs))


def _common_plates(sites: Mapping[str, Site]) -> dict[str, dict[str, int]]:
    """The plates of all sites, each with its dimension at every site."""
    shapes = {name: site.distribution.batch_shape for name, site in sites.items()}
    common: dict[str, dict[str, int]] = {}
    for plate, _ in next(iter(sites.values())).plates:
        dims = {n: dict(site.plates).get(plate, -1 - len(shapes[n])) for n, site in sites.items()}
        inside = all(-dim <= len(shapes[name]) for name, dim in dims.items())
        if inside and len({shapes[name][dim] for name, dim in dims.items()}) == 1:
            common[plate] = dims
    return common


def _are_rows(
    model: Callable,
    args: tuple,
    run: Run,
    plates: Mapping[str, Mapping[str, int]],
    posterior: Any,
) -> bool:
    """Return whether the cells of the plates are the rows of the arguments, also with one less."""
    count = leading_size(args)
    if len(plates) != 1 or count < 2 or not has_rows((args, {}), count):
        return False
    (dims,) = plates.values()

    def fits(sites: Mapping[str, Site], rows: int) -> bool:
        return sites.keys() == dims.keys() and all(
            site.value.shape[:1] == (rows,) and site.distribution.batch_shape[dims[name]] == rows
            for name, site in sites.items()
        )

    if not fits(run.observed, count):
        return False
    try:
        fewer = _first_run(model, taken(args, slice(0, count - 1)), posterior)[0]
    except (ValueError, RuntimeError, IndexError):
        return False
    return fits(fewer.observed, count - 1)


def check_fit(y: Tensor, shape: torch.Size) -> None:
    """Check that targets have the shape of the predictions.

    :raises ValueError: if not.
    """
    if y.numel() != shape.numel() or y.shape[:1] != shape[:1]:
        raise ValueError(
            f"y_test has shape {tuple(y.shape)}, but the program predicts {tuple(shape)}"
        )
