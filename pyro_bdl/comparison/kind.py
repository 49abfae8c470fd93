"""The observed sites of a program, as one target, read from its statements.

The numbers of several observed sites are scored as one target. If the first plate of all sites
holds the rows of the data, a datum is a row: its log density is the sum over the sites, and its
numbers follow each other, ``(N, D)``. Otherwise all numbers are in one vector ``(M,)``, and all
data are passed to the program at once. Sites in common plates have one log density for each of
their cells, as for the sequences of a hidden Markov chain. Without a common plate each site has its
own terms; if discrete sites that are summed out tie the data to each other, there is one density.
Those that are scored can be named. By default all are but inputs of which some are missing: sites
whose ``obs_mask`` leaves numbers to be latents, which later statements use.

A plate holds the rows if it is the first dimension of the observed values, has a cell for each row
of the arguments, and no memory says otherwise: values that are a view of an argument show which of
its axes they run along. Without a plate the values must be such a view, along its rows.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.nn.functional import one_hot

from pyro_bdl.distributions.censored import Censored
from pyro_bdl.distributions.moments import observation_kind, observation_mean
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides.draws import as_posterior, to_samples
from pyro_bdl.predictive.predictor import unknown_kinds
from pyro_bdl.program.batches import has_rows, leading_size, select_rows
from pyro_bdl.program.layout import Latent
from pyro_bdl.program.network_sites import SampledNetwork
from pyro_bdl.program.program import Program
from pyro_bdl.program.rows import along_rows, plate_of_rows
from pyro_bdl.program.trace import Run, Site, placeholder_for_observed, record
from pyro_bdl.utils.autograd import reaches
from pyro_bdl.utils.memory import bytes_at_once
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.precision import double

_CLASSES = ("Categorical", "Bernoulli", "OneHotCategorical", "OrderedLogistic")
_BY_CLASS = ("Categorical", "OrderedLogistic")  # a probability for each class
# Bytes of the draws in memory at once while the test points are scored: scores hold about ten
# arrays of this size, and bars move on after each part.
_DRAWS_AT_ONCE = 2**23
_ROUNDING = 1e-12  # of sums of powers


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
        return Seen(self.numbers[rows], counts.flatten(), len(counts))


@dataclass(frozen=True)
class Kind:
    """The observed sites of a program, and how they are scored.

    :param sites: observed site to the name of its distribution.
    :param task: ``"regression"`` or ``"classification"``.
    :param program: it on the data; None if its latents are unknown without a posterior.
    :param by_rows: whether the first axis of the numbers is that of the rows of the arguments.
    :param plates: the plates that all sites stand in, each with its dimension at each site, counted
        from the right; the first dimension first.
    :param mixed: whether some sites are of classes and others of numbers.
    :param no_single: why no datum has a density of its own, in words; empty if each one has.
    :param is_joint: whether one density covers all data.
    :param fixed_mean: whether the mean of a joint distribution does not depend on the latents, as
        for a Gaussian process whose function is integrated out.
    :param unknown: names of the distributions, if the linearized program does not know some.
    :param together: whether rows need each other, so that all data are passed at once.
    :param most_rows: the program's ``num_data``, beyond which it takes no targets; None for any.
    :param is_masked: whether a mask tensor leaves data out of the likelihood.
    :param factors: its factors, which belong to no datum and are not scored.
    :param inputs: its observed sites of inputs, which are not scored.
    :param is_partial: whether other sites or factors are a part of its likelihood.
    :param is_log: whether the numbers are censored ones above 0, whose function is of their logs.
    :param is_scaled: whether the likelihood of some data is raised to a power, as by a temperature.
    :param named: its latent sites that are no weights of a network, nor scales of their priors.
    """

    sites: Mapping[str, str]
    task: str
    program: Program | None = None
    by_rows: bool = True
    plates: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    mixed: bool = False
    no_single: str = ""
    is_joint: bool = False
    fixed_mean: bool = False
    unknown: str = ""
    together: bool = False
    most_rows: int | None = None
    is_masked: bool = False
    factors: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    is_partial: bool = False
    named: tuple[str, ...] = ()
    is_log: bool = False
    is_scaled: bool = False

    @property
    def latents(self) -> Mapping[str, Latent] | None:
        """The program's latent sites; None if their shapes are unknown."""
        return None if self.program is None else self.program.latents

    @property
    def is_single(self) -> bool:
        """True of one observed site."""
        return len(self.sites) == 1

    @property
    def has_rows_of_one(self) -> bool:
        """True if the numbers are those of one site, row by row, in the shape of its targets."""
        return self.is_single and self.by_rows

    @property
    def is_normal(self) -> bool:
        return set(self.sites.values()) == {"Normal"}

    @property
    def may_be_censored(self) -> bool:
        """True if some targets may be limits, which most scores cannot take."""
        return "Censored" in self.sites.values()

    @property
    def has_ordered_classes(self) -> bool:
        return set(self.sites.values()) == {"OrderedLogistic"}

    def numbers(self, values: Mapping[str, Tensor]) -> Tensor:
        """Numbers of each site and draw ``(S, ...)`` as ``(S, N, ...)`` or ``(S, M)``."""
        if self.has_rows_of_one:
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
        if self.has_rows_of_one:
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
        if self.is_joint or self.together or not self.by_rows:
            return [(args, slice(None))]
        size = max(1, bytes_at_once(_DRAWS_AT_ONCE) // (8 * draws * max(1, width)))
        size = min(size, self.most_rows or size)
        parts = [slice(start, start + size) for start in range(0, leading_size(args), size)]
        return [(select_rows(args, rows), rows) for rows in parts]

    def marks(
        self, model: Callable, args: tuple, posterior: Any
    ) -> tuple[Seen | None, Tensor | None]:
        """The data that were seen, None where no mask leaves any out, and the powers ``(N,)`` of
        their likelihoods in the density of the program, None where all are 1."""
        if not (self.is_masked or self.is_scaled):
            return None, None
        found = observed(model, args, posterior, self)
        return found.seen, found.powers

    def powers_in(self, run: Run) -> Tensor:
        """The powers of a run's data; NaN where the numbers of a datum have different ones."""
        at: dict[str, Tensor] = {}
        for name in self.sites:
            site: Any = run.observed[name]
            power = torch.as_tensor(site.power, dtype=torch.float64, device="cpu")
            at[name] = power.expand(site.distribution.batch_shape)[None]
        count = self.densities({name: torch.ones_like(power) for name, power in at.items()})
        mean = self.densities(at) / count
        square = self.densities({name: power**2 for name, power in at.items()}) / count
        return mean.where(square - mean**2 <= _ROUNDING * square, torch.nan)[0]

    def targets(self, run: Run, args: tuple) -> Tensor:
        """The numbers that a run observes."""
        values: dict[str, Any] = {name: run.observed[name].value for name in self.sites}
        if self.has_rows_of_one:
            return next(iter(values.values()))
        for name, kind in self.sites.items():
            if self.task == "classification" and kind == "OneHotCategorical":
                values[name] = values[name].argmax(-1)
            if self.mixed and kind in _BY_CLASS:
                classes = observation_mean(run.observed[name].distribution).shape[-1]
                values[name] = one_hot(values[name].long(), classes)
        return self._joined(values, *([leading_size(args)] if self.by_rows else []))

    def seen_in(self, run: Run, args: tuple) -> Seen:
        """The numbers that a run's masks do not leave out."""
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
            counts[name] = double(of_site.reshape(*batch, -1)).sum(-1)[None]
        if self.has_rows_of_one:
            numbers = next(iter(cells.values()))
        else:
            numbers = self._joined(cells, *([leading_size(args)] if self.by_rows else []))
        return Seen(numbers, self.densities(counts)[0], len(numbers))


def without_targets(args: tuple) -> tuple:
    """The program's arguments for predictions."""
    return (*args[:-1], None) if len(args) > 1 else args


class Observed(NamedTuple):
    """The observed numbers of some data.

    :param y: the numbers, in its units.
    :param seen: which of them masks do not leave out; None where they leave out none.
    :param bounds: of a censored site, the two ends between which each number is known to lie,
        ``(2, *y.shape)``.
    :param powers: of the data's likelihoods, ``(N,)``; None where all are 1.
    """

    kind: Kind
    y: Tensor
    seen: Seen | None
    bounds: Tensor | None = None
    powers: Tensor | None = None


@torch.no_grad()
def observed(
    model: Callable,
    args: tuple,
    posterior: Any,
    kind: Kind | None = None,
    *,
    sites: str | Collection[str] | None = None,
    draws: int = 1000,
    rows: str = "alone",
) -> Observed:
    """Read what a program observes of data, by one run on each batch of them.

    :param args: the inputs and, last, the targets.
    :param posterior: a guide or ``Samples``, whose draws give values to latents with an improper
        prior.
    :param kind: where it is known from other data.
    :param sites: the names of the observed sites that are scored; all by default.
    :param draws: for which the batches are made.
    :param rows: "together" where rows need each other: then there is one batch.
    :raises ValueError: if the program has no observed site, or none of such a name.
    :raises UnsupportedProgramError: if the program's sites are others in another batch.
    """
    are_rows, together = has_rows((args, {}), leading_size(args)), rows == "together"
    most = _stated_num_data(model)
    known = kind or Kind({}, "", by_rows=are_rows, together=together, most_rows=most)
    batches = [part for part, _ in known.batches(args, draws)]
    names = (sites,) if isinstance(sites, str) else sites
    with evaluation_mode(model, posterior):
        found = _read(model, batches, posterior, kind, names)
        if found is None and kind is None:
            found = _read(model, [args], posterior, None, names)
    if found is None:
        raise UnsupportedProgramError(
            "the program has other observed sites, or plates without a cell for each row, in some "
            "of the data: write its observed sites in a plate over the rows, for any data"
        )
    if kind is None and together:
        found = found._replace(kind=replace(found.kind, together=True))
    return found


def _read(
    model: Callable,
    batches: list[tuple],
    posterior: Any,
    kind: Kind | None,
    names: Collection[str] | None,
) -> Observed | None:
    """The observed numbers of all batches; None if they are no rows of one kind."""
    targets, marks, ends, powers = [], [], [], []
    for args in batches:
        run, program, at = _first_run(model, args, posterior)
        every, inputs = run.observed, run.observed_inputs
        if kind is not None:
            names = kind.sites
        elif names is None and len(inputs) < len(every):
            names = [name for name in every if name not in inputs]
        if names is not None:
            if unknown := [name for name in names if name not in run.observed]:
                raise ValueError(
                    f"observed={unknown[0]!r} is no observed site of the program, which has "
                    f"{', '.join(map(repr, run.observed))}"
                )
            run = replace(run, observed={name: run.observed[name] for name in names})
        if kind is None:
            kind = _kind_of(model, args, run, program, at)
            kind = replace(
                kind,
                inputs=tuple(name for name in inputs if name not in run.observed),
                is_partial=len(run.observed) < len(every) or bool(run.factors),
            )
        by_rows = kind.by_rows and _are_rows(args, run.observed, _common_plates(run.observed))
        if run.observed.keys() != kind.sites.keys() or by_rows != kind.by_rows:
            return None
        if len(batches) > 1 and (kind.is_joint or not by_rows):
            return None
        targets.append(kind.targets(run, args))
        marks.append(kind.seen_in(run, args))
        if kind.is_scaled:
            powers.append(kind.powers_in(run))
        site = next(iter(run.observed.values()))
        if kind.is_single and isinstance(site.distribution, Censored):
            ends.append(torch.stack(site.distribution.bounds(site.value)))
    assert kind is not None
    cells, counts, rows = zip(*marks, strict=True)
    seen = Seen(torch.cat(cells), torch.cat(counts), sum(rows)) if kind.is_masked else None
    if seen is not None and seen.numbers.all():
        seen = None
    bounds = torch.cat(ends, 1) if ends else None
    y = targets[0] if len(targets) == 1 else torch.cat(targets)
    return Observed(kind, y, seen, bounds, torch.cat(powers) if powers else None)


def _kind_of(
    model: Callable, args: tuple, run: Run, program: Program | None, at: Mapping[str, Tensor]
) -> Kind:
    sites = run.observed
    if not sites:
        raise ValueError(
            "compare needs a program with an observed site: pass the targets last, and write "
            "the likelihood as pyro.sample(..., obs=y)"
        )
    for site in sites.values():
        check_fit(site.value, cast(Any, site.distribution).shape())
    kinds = {name: observation_kind(site.distribution) for name, site in sites.items()}
    classes = {_number_of_classes(kinds[name], site) for name, site in sites.items()}
    is_class = len(classes) == 1 and None not in classes
    plates, name = _common_plates(sites), next(iter(sites))
    is_single, tied = len(sites) == 1, run.one_step_ahead()
    if is_single:
        is_joint = not plates and sites[name].distribution.batch_shape.numel() == 1
        words = f"the site {name!r} is one joint observation of all rows"
    else:
        is_joint = not plates and (tied or run.coupled_data()) is not None
        words = "discrete sites that are summed out tie the data of all observed sites to "
        words, tied = words + "each other", None
    unknown = unknown_kinds(sites.values())
    if unknown and _needs_targets(model, args, at, name):
        raise UnsupportedProgramError(
            f"the program does not sample the site {name!r} where the targets are None: "
            "write it with y=None as an argument and pyro.sample(..., obs=y)"
        )
    kind = Kind(
        sites=kinds,
        task="classification" if is_class else "regression",
        program=program,
        by_rows=_are_rows(args, sites, plates),
        plates=plates,
        mixed=len(classes) > 1,
        no_single=words if is_joint else tied or "",
        is_joint=is_joint,
        fixed_mean=is_joint
        and is_single
        and program is not None
        and _has_fixed_mean(program, name),
        unknown=unknown,
        most_rows=_stated_num_data(model),
        is_masked=any(site.is_masked for site in sites.values()),
        named=() if program is None else named_latents(program),
        factors=() if program is None else program.factors,
        is_log=all(
            isinstance(s.distribution, Censored) and s.distribution.law != "normal"
            for s in sites.values()
        ),
        is_scaled=any(site.is_scaled for site in sites.values()),
    )
    if kind.is_scaled and not kind.no_single and kind.powers_in(run).isnan().any():
        words = "numbers of one datum have likelihoods that are raised to different powers"
        kind = replace(kind, no_single=f"{words} (poutine.scale)")
    return kind


def needs_targets(model: Callable, kind: Kind, args: tuple, posterior: Any) -> bool:
    """Return whether the program observes its first site with targets only, as at a row."""
    with torch.no_grad(), evaluation_mode(model, posterior):
        row = select_rows(args, slice(0, 1)) if kind.by_rows and not kind.is_joint else args
        at = _first_run(model, row, posterior)[2]
        return _needs_targets(model, row, at, next(iter(kind.sites)))


def _needs_targets(model: Callable, args: tuple, at: Mapping[str, Tensor], site: str) -> bool:
    return (
        site not in record(model, at, without_targets(args), draw=placeholder_for_observed).observed
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


def _first_run(
    model: Callable, args: tuple, posterior: Any
) -> tuple[Run, Program | None, Mapping[str, Tensor]]:
    """A run on the data with the observed sites that have values, the program, and the latents.

    The program is None if its prior is improper; a draw of the posterior then gives the latents.
    """
    program: Program | None = None
    try:
        program, run = Program.with_run(model, args, {})
        at: Mapping[str, Tensor] = program.initial
    except (NotImplementedError, UnsupportedProgramError):
        draws = to_samples(as_posterior(posterior), 1, *without_targets(args)).latents
        at = {site: value[0, 0] for site, value in draws.items()}
        run = record(model, at, args, draw=placeholder_for_observed)
    sites = {
        name: site
        for name, site in run.observed.items()
        if site.value is not None and site.mask is not False
    }
    return replace(run, observed=sites), program, at


def named_latents(program: Program) -> tuple[str, ...]:
    """The latent sites that are no weights of a network, nor below such a site's name.

    Weights are the sites of ``bayesianize``, and what a Pyro module that is a layer of ``torch.nn``
    samples. They are not identified, since hidden units can be permuted.
    """
    weights = []
    for module in program.modules:
        if isinstance(module, SampledNetwork):
            weights += [module.site_prefix + name for name in module.sites]
    if isinstance(program.model, nn.Module):
        layers = (n for n, m in program.model.named_modules() if n and _is_layer(m))
        weights += layers
    below = tuple(f"{name}." for name in weights)
    return tuple(n for n in program.latents if n not in weights and not n.startswith(below))


def _is_layer(module: nn.Module) -> bool:
    """Return whether a Pyro module is a layer of ``torch.nn``, as ``PyroModule[nn.Linear]``."""
    kinds = (kind for kind in type(module).__mro__ if kind is not nn.Module)
    return isinstance(module, PyroModule) and any(
        kind.__module__.startswith("torch.nn.modules") for kind in kinds
    )


@torch.enable_grad()
def _has_fixed_mean(program: Program | None, site: str) -> bool:
    """Return whether autograd reaches none of the latents from the observation's mean."""
    if program is None:
        return False
    vector = program.unconstrain(program.initial).detach().requires_grad_()
    run = program.run(program.constrain(vector)[0])
    return not reaches(observation_mean(run.observed[site].distribution), [vector])


def _common_plates(sites: Mapping[str, Site]) -> dict[str, dict[str, int]]:
    """The plates of all sites, each with its dimension at every site, from left to right."""
    shapes = {name: site.distribution.batch_shape for name, site in sites.items()}
    common: dict[str, dict[str, int]] = {}
    for plate, _ in sorted(next(iter(sites.values())).plates, key=lambda plate: plate[1]):
        dims = {n: dict(site.plates).get(plate, -1 - len(shapes[n])) for n, site in sites.items()}
        inside = all(-dim <= len(shapes[name]) for name, dim in dims.items())
        if inside and len({shapes[name][dim] for name, dim in dims.items()}) == 1:
            common[plate] = dims
    return common


def _are_rows(
    args: tuple, sites: Mapping[str, Site], plates: Mapping[str, Mapping[str, int]]
) -> bool:
    """Return whether the first axis of the observed values is that of the rows of the arguments."""
    if not has_rows((args, {}), leading_size(args)):
        return False
    found = [plate_of_rows(site, args) for site in sites.values()]
    if plates:
        first = next(iter(plates.values()))
        return all(
            plate is not None and plate[1] == first[name] == -len(site.distribution.batch_shape)
            for plate, (name, site) in zip(found, sites.items(), strict=True)
        )
    return len(sites) == 1 and all(along_rows(site.value, args) for site in sites.values())


def check_fit(y: Tensor, shape: torch.Size) -> None:
    """Check that targets have the shape of the predictions.

    :raises ValueError: if not.
    """
    if y.numel() != shape.numel() or y.shape[:1] != shape[:1]:
        raise ValueError(
            f"y_test has shape {tuple(y.shape)}, but the program predicts {tuple(shape)}"
        )
