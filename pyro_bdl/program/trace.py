"""One run of a Pyro program, statement by statement."""

import functools
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyro
import torch
from pyro.distributions import Unit
from pyro.distributions.util import scale_and_mask
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import Distribution

from pyro_bdl.distributions.copies import (
    expanded_to_targets,
    masks_of,
    on_device_of,
    placeholder,
    point_of,
    without_masks,
    without_validation,
)
from pyro_bdl.distributions.families import sample_of
from pyro_bdl.distributions.parameters import parameters_of
from pyro_bdl.errors import ArgumentError, UnsupportedProgramError
from pyro_bdl.program.check import explain
from pyro_bdl.program.discrete.enumeration import Enumeration, why_not_enumerable
from pyro_bdl.program.discrete.summed_out import SummedOut, sum_out
from pyro_bdl.program.layout import NEW_ROWS
from pyro_bdl.program.network_sites import OWNER_KEY
from pyro_bdl.utils.autograd import reaches
from pyro_bdl.utils.module_state import watching_calls
from pyro_bdl.utils.one_thread import OneThread, handlers
from pyro_bdl.utils.precision import to_full_precision

UNOBSERVED = "_unobserved"  # ends the names of Pyro's second statement of obs_mask
RENAME = (
    "give each its own name, plates too (two networks in one program: bayesianize(net, prior, "
    "name=...); one network at two inputs: call it once, on both of them stacked)"
)
NOTHING_OBSERVED = (
    "the program has no observed site: pass the targets to it, so that a sample statement gets "
    "obs=..."
)
_PRIOR = "prior"  # the key by which a factor is declared a part of the prior


class Site(NamedTuple):
    """One sample statement of one run: its distribution, value, scale and mask.

    ``mask`` includes the distribution's own masks; it is False if the statement does not change the
    density, as for flat priors. ``subsampling`` is the factor N/B of the scale that comes from
    plates; the rest of the scale is tempering. ``plates`` are the names of the plates that have a
    dimension of the distribution's batch, each with this dimension, counted from the right.
    """

    distribution: Distribution
    value: Any  # a tensor; None at an open site
    scale: float | Tensor
    mask: bool | Tensor | None
    subsampling: float = 1.0
    plates: tuple[tuple[str, int], ...] = ()

    @property
    def power(self) -> float | Tensor:
        """The power of p(value) in the density of the program, of each datum: its scale without
        N/B."""
        return self.scale / self.subsampling

    @property
    def is_scaled(self) -> bool:
        """True if the power of p(value) is not 1, up to the rounding of N/B, or is a tensor."""
        return isinstance(self.power, Tensor) or abs(self.power - 1) > 1e-12

    def log_prob(self) -> Tensor:
        """log p(value) in nats, scaled and masked, with the distribution's batch shape."""
        density = to_full_precision(self.distribution.log_prob(self.value))
        return scale_and_mask(density, self.scale, self.mask)

    def batch_log_prob(self) -> Tensor:
        """The sum of log p(value) over the batch's own data, each once: tempered and masked, not
        scaled up to N; a scalar."""
        return (self.log_prob() / self.subsampling).sum()

    def unscaled_log_prob(self) -> Tensor:
        """log p(value) in nats per datum: masked, not scaled."""
        density = to_full_precision(self.distribution.log_prob(self.value))
        return scale_and_mask(density, 1.0, self.mask)

    @property
    def is_masked(self) -> bool:
        """True if a mask tensor says of each number whether it counts."""
        return isinstance(self.mask, Tensor) or bool(masks_of(self.distribution))

    def seen(self) -> Tensor:
        """A mask of the numbers that count, bool ``(*batch, *event)``; those of the masks around
        the statement, of the distribution, and inside its ``to_event``."""
        distribution: Any = self.distribution
        masks, shape = masks_of(distribution), distribution.shape()
        if self.mask is not None:
            masks.append((torch.as_tensor(self.mask, device="cpu"), distribution.batch_shape))
        devices = [mask.device for mask, _ in masks if mask.dim()]
        seen = torch.ones(shape, dtype=torch.bool, device=devices[0] if devices else "cpu")
        for mask, batch in masks:
            cells = mask.to(seen.device).bool().expand(batch)
            seen = seen & cells.reshape((*batch, *(1,) * (len(shape) - len(batch))))
        return seen


@dataclass
class Run:
    """The statements of one run of a program, by kind and name.

    ``deterministic`` holds observed Deltas too, whose value the latents give; ``factors`` their
    densities, unless they are masked. ``prior_factors`` are those of ``prior_factor``, which count
    as prior and not as likelihood. ``observed`` also holds open sites, which the program would
    observe but was given no value for. ``open`` is true if there are such sites, ``followed`` if
    statements come after one of them and may use its value. ``subsamples`` are the indices of the
    plates. ``imputed`` are the sites of what ``obs_mask`` leaves unobserved and no statement uses:
    they are drawn where the program is to predict, and are integrated out of all densities.
    ``discrete`` are the discrete sites that were summed out of all of these, where a
    deterministic value may still have a dimension for each of them; None where there are none.
    """

    latents: dict[str, Site] = field(default_factory=dict)
    observed: dict[str, Site] = field(default_factory=dict)
    factors: dict[str, Site] = field(default_factory=dict)
    prior_factors: dict[str, Site] = field(default_factory=dict)
    deterministic: dict[str, Tensor] = field(default_factory=dict)
    subsamples: dict[str, Tensor] = field(default_factory=dict)
    imputed: list[str] = field(default_factory=list)
    open: bool = False
    followed: bool = False
    discrete: SummedOut | None = None
    result: Any = None

    def add(self, msg: Any) -> tuple[str, Site]:
        """Add a sample statement, a Pyro message or a node of a trace that is no plate's indices.

        :returns: its kind ("latents", "observed", "factors", "prior_factors", "discrete", or ""
            where it has no density) and its site.
        :raises UnsupportedProgramError: for a second statement of the same name.
        """
        name, infer = msg["name"], msg["infer"]
        latents, factors = self.latents, self.prior_factors
        if name in latents or name in factors or name in self.observed or name in self.factors:
            raise UnsupportedProgramError(f"two statements are named '{name}': {RENAME}")
        self.followed = self.followed or self.open
        if infer.get("_deterministic"):
            self.deterministic[name] = msg["value"]
            return "", Site(msg["fn"], msg["value"], 1.0, False)
        if infer.get("_imputed"):
            self.imputed.append(name)
            self.followed = self.followed or bool(infer.get("_placeholder"))
            return "", Site(msg["fn"], msg["value"], 1.0, False)
        value = None if infer.get("_placeholder") else msg["value"]
        subsampling, plates = 1.0, []
        for frame in msg["cond_indep_stack"]:
            if frame.full_size and frame.full_size != frame.size:
                subsampling *= frame.full_size / frame.size
            if frame.dim is not None:
                plates.append((frame.name, frame.dim))
        distribution = distribution_of_targets(msg) if msg["is_observed"] else msg["fn"]
        distribution, mask = without_masks(distribution, msg["mask"])
        twin = self._observed_twin(name)
        if twin is not None and isinstance(mask, Tensor) and isinstance(twin.mask, Tensor):
            mask = mask | twin.mask
        site = Site(distribution, value, msg["scale"], mask, subsampling, tuple(plates))
        kind = "latents"
        if msg["is_observed"] and point_of(msg["fn"]) is not None:
            self.deterministic[name] = msg["value"]
            kind = "" if mask is False else "factors"
        elif isinstance(msg["fn"], Unit):
            kind = "prior_factors" if is_prior_factor(msg) else "factors"
        elif msg["is_observed"] or infer.get("_open"):
            kind = "observed"
            self.open = self.open or not msg["is_observed"]
        elif infer.get("_enumerated"):
            kind = "discrete"
            if infer.get("_open_leaf"):
                self.observed[name] = site._replace(value=None)
        if kind in ("latents", "observed", "factors", "prior_factors"):
            getattr(self, kind)[name] = site
        return kind, site

    def _observed_twin(self, name: str) -> Site | None:
        """The statement of what ``obs_mask`` has seen, of the name of what it has not.

        A latent has values for both, and those for what was seen are used by nothing. With the
        density of the statement they integrate to one; without it they would have no law.
        """
        if not name.endswith(UNOBSERVED):
            return None
        twin = f"{name.removesuffix(UNOBSERVED)}_observed"
        return self.observed.get(twin) or self.latents.get(twin)

    def require_observed(self) -> None:
        """Check that there are data, in an observed site or a factor.

        :raises UnsupportedProgramError: if there are none.
        """
        if not self.observed and not self.factors:
            raise UnsupportedProgramError(NOTHING_OBSERVED)

    def refuse_improper(self, number: str) -> None:
        """Check that no mask tensor leaves single numbers of a latent without a density: they have
        no law that integrates to one, and the log evidence and its bounds could be anything.

        :param number: which of these is wanted, for the message.
        :raises UnsupportedProgramError: naming the site.
        """
        for name, site in self.latents.items():
            if site.is_masked and not (seen := site.seen()).all():
                raise UnsupportedProgramError(
                    f"a mask leaves {int((~seen).sum())} of the {seen.numel()} numbers of the "
                    f"latent site '{name}' without a density, so that there is no {number}: sample "
                    "only the numbers that have a prior, or give all of them one"
                )

    @property
    def observed_inputs(self) -> tuple[str, ...]:
        """The observed sites of inputs: numbers that ``obs_mask`` leaves out of them are latents,
        which later statements use."""
        latents = (name for name in self.latents if name.endswith(UNOBSERVED))
        twins = {f"{name.removesuffix(UNOBSERVED)}_observed" for name in latents}
        return tuple(name for name in self.observed if name in twins)

    @property
    def priors(self) -> dict[str, Site]:
        """The statements whose densities make the prior: of latents, and declared factors."""
        return self.latents | self.prior_factors

    def log_prior(self) -> Tensor | float:
        return _sum(self.prior_terms())

    def prior_terms(self) -> dict[str, Tensor]:
        """The scalars that ``log_prior`` adds up, by site."""
        return {name: site.log_prob().sum() for name, site in self.priors.items()}

    def log_likelihood(self) -> Tensor | float:
        """log p(y | w) of all N data: each observed site's terms, N / B times each."""
        return _sum(self.terms())

    def terms(self) -> dict[str, Tensor]:
        """The scalars that ``log_likelihood`` adds up, by site; sites that discrete sites are
        summed out of together have one, under the first of their names."""
        sites = self.observed | self.factors
        summed = None if self.discrete is None else self.discrete.log_likelihood()
        total, names = (None, frozenset()) if summed is None else summed
        terms = {
            name: site.log_prob().sum()
            for name, site in sites.items()
            if site.value is not None and name not in names
        }
        return terms if total is None else {next(n for n in sites if n in names): total, **terms}

    def one_step_ahead(self) -> str | None:
        """Return why the terms of the log likelihood are not log p(y_n | w) of each datum, as
        leave-one-out takes them; None where they are."""
        return None if self.discrete is None else self.discrete.one_step_ahead

    def bias_of_minibatches(self) -> str | None:
        """Return why a minibatch's estimate of the log likelihood is biased; None where it is
        not."""
        return None if self.discrete is None else self.discrete.bias_of_minibatches

    def coupled_data(self) -> str | None:
        """The first observed site that is not a product of mixtures, one for each datum, since
        discrete sites outside of its plates are summed out; None where there is none."""
        sites = self.observed.items()
        return next((n for n, s in sites if getattr(s.distribution, "couples_data", False)), None)


def _sum(terms: Mapping[str, Tensor]) -> Tensor | float:
    return functools.reduce(torch.add, terms.values()) if terms else 0.0


def prior_factor(name: str, log_density: Tensor) -> None:
    """Add a term to the log prior, in nats, where ``pyro.factor`` adds one to the log likelihood.

    Temperatures of the likelihood leave it as it is, and the curvature and the evidence take it for
    a part of the prior. In a plate of data it is scaled by N / B, as any statement.

    Example::

        >>> def model(x, y=None):
        ...     w = pyro.sample("w", dist.Normal(0.0, 1.0))
        ...     bdl.priors.factor("far from zero", -1.0 / w.square())
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("y", dist.Normal(w * x, 1.0), obs=y)

    :param name: of the statement.
    :param log_density: a term of log p, such as the weight decay of a parameter.
    """
    unit = Unit(log_density)
    infer: Any = {"is_auxiliary": True, _PRIOR: True}
    pyro.sample(name, unit, obs=unit.sample(), infer=infer)


def is_prior_factor(msg: Any) -> bool:
    """Return whether a statement is of ``prior_factor``."""
    return isinstance(msg["fn"], Unit) and bool(msg["infer"].get(_PRIOR))


def is_deterministic(msg: Any) -> bool:
    """Return whether the latents determine a sample statement's value.

    That is the case for ``pyro.deterministic`` and for an observed Delta, into which
    reparameterizations turn a latent.
    """
    return bool(msg["infer"].get("_deterministic")) or (
        msg["is_observed"] and point_of(msg["fn"]) is not None
    )


def is_imputed(msg: Any, names: Container[str]) -> bool:
    """Return whether a statement is of what ``pyro.sample(name, ..., obs=y, obs_mask=seen)`` leaves
    unobserved, numbers that are no finite classes.

    Pyro turns such a statement into ``name_observed``, under the mask, ``name_unobserved``, under
    its complement, and the deterministic site ``name`` of both. ``name_unobserved`` has no density
    where ``name_observed`` has one, and its values there are used by nothing.

    :param names: of the statements before it.
    """
    observed = f"{msg['name'].removesuffix(UNOBSERVED)}_observed"
    return (
        msg["name"].endswith(UNOBSERVED)
        and observed in names
        and isinstance(msg["mask"], Tensor)
        and why_not_summed_out(msg) is not None
    )


def is_marked_imputed(msg: Any) -> bool:
    """Return whether a message, or a node of the first run's trace, is of an imputed site."""
    return msg["type"] == "sample" and bool(msg["infer"].get("_imputed"))


def is_recording() -> bool:
    """Return whether a run of this package is going on, and not one of Pyro's own inference."""
    return any(isinstance(handler, _Recorder) for handler in handlers())


class _Recorder(OneThread):
    """Handler that runs a program at given values and records every sample statement.

    :param values: site -> value for latents and plates' indices; other sites are sampled.
    :param draw: called at a site that has neither an observation nor a value.
    """

    def __init__(
        self, values: Mapping[str, Any], draw: Callable[[dict], Any] | None = None
    ) -> None:
        super().__init__()
        self.values = values
        self.draw = draw
        self.run = Run()
        self.enumeration: Enumeration | None = None  # from the first discrete site on

    def _process_message(self, msg: Any) -> None:
        self.check_thread(msg)
        if msg["type"] != "sample":
            return
        msg["stop"] = True  # a pure function: outer handlers must not see or change its sites
        name = msg["name"]
        if site_is_subsample(msg):
            if msg["value"] is None and name in self.values:
                msg["value"] = self.values[name]
            return
        if not msg["infer"].get("_deterministic"):  # whose density nobody asks for
            msg["fn"] = without_validation(msg["fn"])
        if not msg["is_observed"]:
            imputed = name.endswith(UNOBSERVED) and is_imputed(msg, self._names())
            if name in self.values:
                msg["value"] = self.values[name]
                if msg["cond_indep_stack"]:
                    _check_rows(msg)
                msg["fn"] = on_device_of(msg["fn"], msg["value"])
                msg["done"] = True
            elif self.draw is not None:
                self.draw(msg)
                if self.enumeration is None and msg["infer"].get("_sum_out"):
                    self.enumeration = Enumeration()
            if imputed and name not in self.values:
                msg["infer"]["_imputed"] = True
                if self.draw is not None and msg["value"] is None:
                    placeholder_for_any(msg)
        if self.enumeration is not None:
            self.enumeration.before(msg)

    def _names(self) -> set[str]:
        return self.run.observed.keys() | self.run.latents.keys()

    def _postprocess_message(self, msg: Any) -> None:
        if msg["type"] != "sample":
            return
        if site_is_subsample(msg):
            self.run.subsamples[msg["name"]] = msg["value"]
            return
        kind, site = self.run.add(msg)
        if self.enumeration is not None:
            self.enumeration.after(msg, site, kind)


def _check_rows(msg: Any) -> None:
    """Check that a latent has as many values along each plate as the plate has cells."""
    event_dim = getattr(msg["fn"], "event_dim", 0)
    for frame in msg["cond_indep_stack"]:
        if frame.dim is None or not isinstance(msg["value"], Tensor):
            continue
        place = frame.dim - event_dim
        count = msg["value"].shape[place] if msg["value"].dim() >= -place else 1
        if count not in (1, frame.size):
            raise ValueError(
                f"the latent site '{msg['name']}' has values for {count} rows of the plate "
                f"'{frame.name}', which holds {frame.size} now (another number of rows): {NEW_ROWS}"
            )


def distribution_of_targets(msg: Any) -> Any:
    """The distribution of an observed statement, expanded to the shape of its targets.

    :raises ValueError: if the two broadcast against each other, or for boolean targets of a
        continuous distribution.
    :raises ArgumentError: for sparse targets, and for targets that are no tensor.
    """
    if isinstance(msg["fn"], Unit):
        return msg["fn"]
    if not isinstance(msg["value"], torch.Tensor):
        kind = type(msg["value"]).__name__
        raise ArgumentError(
            f"the targets of site '{msg['name']}' must be a tensor, got {kind}: pass the arguments "
            "as the program takes them, the targets of each site on their own"
        )
    if msg["value"].layout is not torch.strided:
        raise ArgumentError(
            f"the targets of site '{msg['name']}' are sparse: pass them dense, y.to_dense()"
        )
    if msg["value"].dtype == torch.bool and not msg["fn"].support.is_discrete:
        raise ValueError(
            f"the targets of site '{msg['name']}' are boolean, but its distribution is continuous: "
            "pass numbers, as by y.float(), or observe a Bernoulli (models.BinaryClassification)"
        )
    if msg["value"].shape == msg["fn"].shape():
        return msg["fn"]
    plate_dims = [frame.dim for frame in msg["cond_indep_stack"]]
    enumerated = msg["infer"].get("_symbols", ())
    return expanded_to_targets(msg["name"], msg["fn"], msg["value"], plate_dims, enumerated)


def record(
    function: Callable,
    values: Mapping[str, Any],
    args: tuple = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    draw: Callable[[dict], Any] | None = None,
) -> Run:
    """Run a Pyro program or guide with some of its sites fixed at given values.

    :param function: a program or a guide.
    :param values: site -> value; for a plate's name the indices of its subsample.
    :param draw: called with the message of a site that has no value; by default it is sampled.
        ``sum_out_discrete`` and ``placeholder_for_observed`` sum finite discrete sites out.
    :returns: the distribution, value, scale and mask of every sample statement.
    :raises ArgumentError: for arguments that it cannot use.
    :raises RuntimeError: if another thread runs a program at this time.
    """
    recorder = _Recorder(values, draw)
    with recorder, pyro.validation_enabled(False), watching_calls():
        try:
            recorder.run.result = function(*args, **(kwargs or {}))
        except (TypeError, AttributeError, RuntimeError) as error:
            explain(error, function, args, kwargs or {})
            raise
        if recorder.enumeration is not None:
            sum_out(recorder.run, recorder.enumeration)
    return recorder.run


def why_not_summed_out(msg: Any) -> str | None:
    """Return why a site without a value cannot be summed out; None where it can be."""
    if not getattr(msg["fn"], "has_enumerate_support", False):
        return "its support cannot be enumerated"
    return why_not_enumerable(msg)


def sum_out_discrete(msg: Any) -> None:
    """Sum out a site without a value if it is discrete; else sample it."""
    if why_not_summed_out(msg) is None:
        msg["infer"]["_sum_out"] = True


def placeholder_for_observed(msg: Any) -> None:
    """Let the program go on from a site without a value, whose distribution alone is wanted.

    A discrete site that other statements depend on is summed out of them instead.
    """
    _refuse_weights(msg)
    if why_not_summed_out(msg) is None:
        msg["infer"].update(_sum_out=True, _open_leaf=True)
        return
    placeholder_for_any(msg)


def placeholder_for_any(msg: Any) -> None:
    """Let the program go on from any site without a value, weights and discrete sites too."""
    msg["infer"].update(_open=True, _placeholder=True)
    msg["value"] = placeholder(msg["fn"])
    msg["done"] = True


def draw_placeholder(msg: Any) -> None:
    """As ``placeholder_for_observed``, with a draw as the value, for the statements that use it."""
    placeholder_for_observed(msg)
    if msg["infer"].get("_placeholder"):
        msg["value"] = sample_of(msg["fn"])


def uses_of_placeholders(
    run: Run,
    function: Callable,
    values: Mapping[str, Tensor],
    args: tuple,
    kwargs: Mapping[str, Any],
    *,
    besides: Collection[str] = (),
    latents: bool = False,
) -> dict[str, str]:
    """The observed sites that depend on the value of an open one, each with the name of such a one.

    Where statements follow an open site, the program runs once more, and autograd's graph says.

    :param run: of the program, with sites left open.
    :param besides: the names of open sites that do not count.
    :param latents: whether latents count too, by their priors.
    """
    if not run.followed or (len(run.observed) < 2 and not latents):
        return {}
    placeholders: dict[str, Tensor] = {}

    def leave(msg: Any) -> None:
        placeholder_for_observed(msg)
        is_wanted = msg["infer"].get("_placeholder") and msg["name"] not in besides
        if is_wanted and msg["value"].is_floating_point():
            placeholders[msg["name"]] = msg["value"].requires_grad_()

    with torch.enable_grad():
        found = {}
        fixed = {name: value.detach() for name, value in values.items()}
        run = record(function, fixed, args, kwargs, draw=leave)
        for name, site in (run.observed | (run.latents if latents else {})).items():
            tensors = [*parameters_of(site.distribution).values(), site.scale, site.mask]
            for other, value in placeholders.items():
                if any(isinstance(t, Tensor) and reaches(t, [value]) for t in tensors):
                    found[name] = other
        return found


def sample_open(msg: Any) -> None:
    """Sample a site without a value, and count it as observed."""
    _refuse_weights(msg)
    sample_any_open(msg)


def sample_any_open(msg: Any) -> None:
    """As ``sample_open``, also at a network's weights."""
    msg["infer"]["_open"] = True
    try:
        msg["value"] = sample_of(msg["fn"])
    except RuntimeError as error:  # of vmap
        error.add_note(f"the draw of the site '{msg['name']}', {type(msg['fn']).__name__},")
        raise
    msg["done"] = True


def _refuse_weights(msg: Any) -> None:
    """Check that a site without a value is not a network's weight, which is never predicted."""
    if OWNER_KEY in msg["infer"]:
        raise ValueError(
            f"there is no value for the network's weights '{msg['name']}': the posterior belongs "
            "to another program"
        )
