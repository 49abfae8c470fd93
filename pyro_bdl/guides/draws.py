"""Draws from a posterior (a guide or draws), their log densities, and checks of posteriors."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from pyro.infer.autoguide import AutoContinuous
from pyro.infer.mcmc.api import AbstractMCMC
from torch import Tensor
from torch.distributions import biject_to

from pyro_bdl.distributions.copies import point_of
from pyro_bdl.distributions.parameters import base_distribution, parameters_of
from pyro_bdl.errors import warn
from pyro_bdl.guides.base import Guide
from pyro_bdl.program.layout import NEW_ROWS, OTHER_ROWS, Latent, other_program
from pyro_bdl.program.program import Program, SiteShape, site_shapes
from pyro_bdl.program.samples import Samples, as_tensor, is_numpyro_mcmc
from pyro_bdl.program.saved import check_same, described_program
from pyro_bdl.program.trace import (
    UNOBSERVED,
    Run,
    Site,
    placeholder_for_observed,
    record,
    uses_of_placeholders,
)
from pyro_bdl.program.vmap import joined, map_draws, number_of_draws
from pyro_bdl.utils.autograd import reaches
from pyro_bdl.utils.module_state import preserved_buffers
from pyro_bdl.utils.trees import tree_map_only
from pyro_bdl.utils.validation import whole_number

DEFAULT_DRAWS = 100
DRAWS_AT_ONCE = 2**20  # numbers in draws of the latents that are made, or copied, at a time
_NUMBERS = "numbers"  # in ``Samples.info``: of each site that a guide of Pyro draws, no Delta


def as_posterior(
    posterior: Any,
    model: Callable | None = None,
    args: tuple = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """A guide or ``Samples``, from any object that users call a posterior.

    Guides are those of this package, Pyro's own and functions with sample statements. ``Samples``
    are made of a ``pyro.infer.MCMC`` or ``numpyro.infer.MCMC`` after its run, and of a dict from
    site to draws, as ``get_samples()`` of both gives it: (draws, ...), or (chains, draws, ...)
    where it is grouped by chain.

    :param model: the program, called with ``args`` and ``kwargs``, which tells the two shapes of a
        dict apart; sites of a dict that are observed or deterministic there are left out.
    :raises TypeError: for what is no posterior.
    :raises ValueError: for an MCMC before its run, a dict whose shapes do not fit the program.
    """
    posterior = samples_of_mcmc(posterior)
    if isinstance(posterior, Mapping) and model is not None:
        return _samples_of_dict(posterior, site_shapes(model, args, dict(kwargs or {})))
    if isinstance(posterior, Samples) and model is not None:
        return _without_imputed(posterior, model, args, dict(kwargs or {}))
    if not isinstance(posterior, Samples) and not callable(posterior):
        raise TypeError(
            f"a posterior is a guide or Samples, got {type(posterior).__name__}: give one of "
            "these, an MCMC of Pyro or NumPyro after its run, or, where the program is known, a "
            "dict of draws"
        )
    return posterior


def samples_of_mcmc(posterior: Any) -> Any:
    """The ``Samples`` of an MCMC of Pyro or NumPyro; any other object as it is."""
    if isinstance(posterior, AbstractMCMC):
        return Samples.from_pyro(posterior)
    return Samples.from_numpyro(posterior) if is_numpyro_mcmc(posterior) else posterior


def _without_imputed(samples: Samples, model: Callable, args: tuple, kwargs: dict) -> Samples:
    """The draws without those of what ``obs_mask`` left unobserved, which other samplers make."""
    if not any(name.endswith(UNOBSERVED) for name in samples.latents):
        return samples
    sites = site_shapes(model, args, kwargs)
    latents = {
        name: value
        for name, value in samples.latents.items()
        if not name.endswith(UNOBSERVED) or (name in sites and sites[name].is_latent)
    }
    return samples if len(latents) == len(samples.latents) else replace(samples, latents=latents)


def _samples_of_dict(draws: Mapping[str, Any], sites: Mapping[str, SiteShape]) -> Samples:
    unknown = [name for name in draws if name not in sites and not name.endswith(UNOBSERVED)]
    if unknown:
        raise ValueError(
            f"the dict holds draws of {unknown[0]!r}, which the program does not have: its sites "
            f"are {', '.join(sites)}"
        )
    values = {
        name: as_tensor(value)
        for name, value in draws.items()
        if name not in sites or sites[name].is_latent
    }
    if not values:
        raise ValueError("the dict has no draws of a latent site")
    shapes = {name: sites[name].shape for name in values if name in sites}
    leading = {_leading(name, values[name].shape, shape) for name, shape in shapes.items()} or {1}
    if len(leading) > 1:
        found = ", ".join(f"{name!r} {tuple(value.shape)}" for name, value in values.items())
        raise ValueError(
            f"the dict holds draws of some sites by chain and of others not, shapes {found}: give "
            "all of them as (draws, *shape), or all as (chains, draws, *shape)"
        )
    if leading == {1}:
        values = {
            name: value.reshape(1, len(value), *shapes.get(name, value.shape[1:]))
            for name, value in values.items()
        }
    return Samples(values)


def _leading(site: str, shape: torch.Size, own: torch.Size) -> int:
    """How many dimensions of draws come before a site's own: one, besides such of size one as
    ``pyro.infer.Predictive`` puts between, or two, of chains and draws."""
    extra = len(shape) - len(own)
    if extra >= 1 and shape[1:].numel() == own.numel() and not any(d > 1 for d in shape[1:extra]):
        return 1
    if extra in (1, 2):
        return extra
    raise ValueError(
        f"the draws of the site '{site}' have shape {tuple(shape)}, but its values have shape "
        f"{tuple(own)}: give them as (draws, *shape) or (chains, draws, *shape)"
    )


@torch.no_grad()
def latent_draws(
    posterior: Any, num_samples: int | None, *args: Any, **kwargs: Any
) -> dict[str, Tensor]:
    """Draws of the latents, site -> (num_samples, *shape).

    :param posterior: ``Samples``, a guide of this package, or any Pyro guide (``as_posterior``).
    :param num_samples: the number of draws; by default all draws of ``Samples``, or 100 of a guide.
    :param args: the program's arguments, which Pyro's own guides are run with.
    :warns BdlWarning: if ``Samples`` hold fewer draws, which are then all returned.
    """
    if num_samples is not None:
        num_samples = whole_number(num_samples, "num_samples")
    if isinstance(posterior, Samples):
        total = posterior.num_chains * posterior.num_draws
        if num_samples is not None and num_samples > total:
            words = f"the chains hold {total} draws, and all are taken in place of {num_samples}"
            warn(words, "fewer-draws")
            num_samples = None
        return posterior.flat(num_samples)
    count = evenly(posterior) if num_samples is None else num_samples
    return to_samples(posterior, count, *args, **kwargs).flat()


def evenly(posterior: Any, num_samples: int | None = None) -> int:
    """The number of draws for averages: ``num_samples``, 100 by default, or as many less that each
    member of an ensemble comes as often."""
    count = DEFAULT_DRAWS if num_samples is None else whole_number(num_samples, "num_samples")
    members = posterior.num_members if isinstance(posterior, Guide) else 1
    return count - count % members if count > members else count


@torch.no_grad()
def drawn_in_parts(guide: Guide, count: int) -> Iterator[dict[str, Tensor]]:
    """``count`` draws of the latents, site -> (n, *shape) at a time: all of them, or a part where
    the guide makes them one by one and all would take much memory."""
    most = count
    if guide.independent_draws:
        most = max(1, DRAWS_AT_ONCE // max(1, guide.numbers_drawn))
    for start in range(0, count, most):
        yield guide.sample_latents(min(most, count - start))


@torch.no_grad()
def to_samples(posterior: Any, num_samples: int, *args: Any, **kwargs: Any) -> Samples:
    """Draws of a posterior as ``Samples``; the draws of a guide form one chain.

    Of Pyro's own guides there are the auxiliary sites too, ``stats["log_q"]`` is the sum of the log
    densities of all statements, unscaled, and ``info`` has the sizes of the sites that the others
    do not determine: ``log_densities_of`` reads both.

    :param posterior: ``Samples``, which are returned as they are, or a guide.
    :param num_samples: draws of a guide.
    :param args: the program's arguments, which Pyro's own guides are run with.
    """
    if isinstance(posterior, Samples):
        return posterior
    count = whole_number(num_samples, "num_samples")
    if isinstance(posterior, Guide):
        parts = drawn_in_parts(posterior, count)
        latents = joined(((number_of_draws(part), part) for part in parts), count)
        return Samples({site: value[None] for site, value in latents.items()})
    if isinstance(posterior, AutoContinuous):
        latents, log_q, points = _runs_of_continuous(posterior, count, args, kwargs)
    else:
        latents, log_q, points = _runs_of(posterior, count, args, kwargs)
    numbers = {site: v[0].numel() for site, v in latents.items() if site not in points}
    chain = {site: value[None] for site, value in latents.items()}
    return Samples(chain, {"log_q": log_q[None]}, {_NUMBERS: numbers})


def _runs_of(
    guide: Callable, count: int, args: tuple, kwargs: Mapping[str, Any]
) -> tuple[dict[str, Tensor], Tensor, set[str]]:
    """The values (S, ...) of a guide's sites, the log densities (S,) of its runs, and the sites
    that the others determine."""
    draws: dict[str, list[Tensor]] = {}
    densities, points = [], set()
    for _ in range(count):
        sites = record(guide, {}, args, kwargs).latents
        terms = [site.unscaled_log_prob().sum() for site in sites.values()]
        densities.append(torch.stack(terms).sum())
        for name, site in sites.items():
            draws.setdefault(name, []).append(site.value)
            if point_of(site.distribution) is not None:
                points.add(name)
    latents = {name: torch.stack(values) for name, values in draws.items()}
    return latents, torch.stack(densities), points


def _runs_of_continuous(
    guide: AutoContinuous, count: int, args: tuple, kwargs: Mapping[str, Any]
) -> tuple[dict[str, Tensor], Tensor, set[str]]:
    """The same of one of Pyro's guides over a flat vector, from one draw of all vectors.

    A run draws the vector u from q and emits Deltas at the constrained sites, whose log densities
    are -log |det dT/du|.
    """
    if guide.prototype_trace is None:
        guide(*args, **kwargs)
    q = guide.get_posterior(*args, **kwargs)
    vectors = q.sample((count,))
    log_q, start = q.log_prob(vectors), 0
    latents: dict[str, Tensor] = {}
    trace: Any = guide.prototype_trace
    for name, site in trace.iter_stochastic_nodes():
        transform = biject_to(site["fn"].support)
        shape = transform.inverse_shape(site["value"].shape)
        part = vectors[:, start : start + shape.numel()].reshape(count, *shape)
        latents[name] = transform(part)
        slopes = transform.inv.log_abs_det_jacobian(latents[name], part)
        log_q = log_q + slopes.reshape(count, -1).sum(1)
        start += shape.numel()
    auxiliary = f"_{guide._pyro_name}_latent"
    points = set(latents) | ({auxiliary} if point_of(q) is not None else set())
    return {auxiliary: vectors, **latents}, log_q, points


def samples_of_program(latents: Mapping[str, Latent], posterior: Any, samples: Samples) -> Samples:
    """Keep only the program's latents among the draws; Pyro's own guides have auxiliary sites too.

    :param latents: the program's latent sites.
    :param posterior: the guide or ``Samples`` that made the draws.
    :raises ValueError: for a posterior of another program; the error names the sites that do not
        match.
    """
    draws = dict(samples.latents)
    if not isinstance(posterior, Guide | Samples):
        draws = {site: value for site, value in draws.items() if site in latents}
    check_sites(latents, draws)
    return Samples(draws, samples.stats, samples.info)


def log_densities_of(
    program: Program,
    posterior: Any,
    samples: Samples,
    target: Callable[[dict[str, Tensor]], Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``log_densities`` at the draws of any guide, ``(S,)`` each.

    log q of Pyro's own guides is that of their runs, with the log determinant of the change to
    unconstrained numbers.

    :param samples: the guide's draws, by ``to_samples``.
    :returns: log p(u) and log q(u); log q is None if the guide has no density over all latents, or
        random numbers besides that are integrated out.
    """
    draws, most = samples.flat(), max(1, DRAWS_AT_ONCE // max(1, program.size))
    total = number_of_draws(draws)
    of_runs = not isinstance(posterior, Guide) and "log_q" in samples.stats

    def parts() -> Iterator[tuple[int, dict[str, Tensor]]]:
        for start in range(0, total, most):
            part = {site: value[start : start + most] for site, value in draws.items()}
            vectors = program.unconstrain(part)  # a copy
            log_p, log_q = log_densities(program, posterior, vectors, target)
            log_q = program.constrain(vectors)[1] if of_runs else log_q
            yield len(vectors), {"p": log_p} if log_q is None else {"p": log_p, "q": log_q}

    # one tensor for the results: small ones between the freed blocks of each part would keep glibc
    # from using these again
    found = joined(parts(), total)
    if not of_runs:
        return found["p"], found.get("q")
    latents, drawn = program.latents, samples.info.get(_NUMBERS, {})
    numbers = sum(
        latents[site].unconstrained_shape.numel() if site in latents else number
        for site, number in drawn.items()
    )
    log_q = samples.stats["log_q"][0] + found["q"]
    return found["p"], log_q if numbers == program.size else None


def log_densities(
    program: Program,
    guide: Any,
    vectors: Tensor,
    target: Callable[[dict[str, Tensor]], Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log p(u) and log q(u) in nats, densities over the unconstrained latents, ``(S,)`` each.

    :param vectors: ``(S, P)``, the unconstrained draws.
    :param target: the log density of the latents; by default ``program.log_joint``.
    :returns: log p and log q; log q is None if the guide has no density over all latents, or is
        none of this package.
    """
    density = target or program.log_joint

    def both(draw: dict[str, Tensor]) -> dict[str, Tensor]:
        vector = draw["u"]
        latents, log_det = program.constrain(vector)
        found = {"p": density(latents) + log_det}
        if isinstance(guide, Guide) and guide.has_density:
            found["q"] = guide.log_density(vector, log_det) + log_det
        return found

    found = map_draws(both, {"u": vectors})
    return found["p"], found.get("q")


def check_sites(latents: Mapping[str, Latent], draws: Mapping[str, Tensor]) -> None:
    """Check that draws belong to a program's latents.

    :param latents: the program's latent sites.
    :param draws: site -> values ``(chains, draws, *shape)`` of the site's shape.
    :raises ValueError: if names or shapes do not match; the error lists all of them.
    """
    _refuse(_shapes(latents), {name: value.shape[2:] for name, value in draws.items()})


def _refuse(expected: Mapping[str, torch.Size], given: Mapping[str, torch.Size]) -> None:
    if source := other_program(expected, given):
        advice = f": {NEW_ROWS}" if OTHER_ROWS in source else ""
        raise ValueError(f"the posterior is of {source}{advice}")


def check_program(model: Callable, posterior: Any) -> None:
    """Check that a program says of a posterior's latents and data what the posterior's own one
    says: the same prior densities and distributions of the data, at its center or first draw and a
    few rows.

    A guide knows its program, and ``Samples`` of ``mcmc.sample`` what it was when they were drawn;
    others are not checked. Factors of the density, by ``num_data`` or tempering, may differ.

    :raises ValueError: if they differ, as with another noise or prior.
    """
    tree: Any = None
    if isinstance(posterior, Samples):
        tree, like = posterior.program, next(iter(posterior.latents.values()))
    elif isinstance(posterior, Guide) and not (posterior.is_of(model) or posterior.subsampled):
        like = posterior.location()
        center = posterior.require_layout().constrain(like)[0]
        tree = described_program(posterior.program_model, posterior.example_rows, center)
    if tree is None:
        return
    tree = tree_map_only(Tensor, lambda value: value.to(like.device), tree)
    advice = "score it under its own program, {name: (program, posterior)}"
    try:
        check_same(model, tree, tree["point"], factors=False, advice=advice)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def check_guide(latents: Mapping[str, Latent], guide: Guide) -> None:
    """Check that a guide's vector holds a program's latents, in their order.

    :param latents: the program's latent sites.
    :raises ValueError: if names, shapes or the order do not match.
    """
    theirs = guide.require_layout().latents
    _refuse(_shapes(latents), _shapes(theirs))
    if list(latents) != list(theirs):
        order = ", ".join(map(repr, theirs))
        raise ValueError(
            f"the posterior is of another program (its sites have another order: {order})"
        )


def _shapes(latents: Mapping[str, Latent]) -> dict[str, torch.Size]:
    return {name: latent.shape for name, latent in latents.items()}


def run_at_draw(
    program: Callable,
    values: Mapping[str, Tensor],
    args: tuple,
    kwargs: Mapping[str, Any],
    *,
    draw: Callable[[dict], Any] | None = None,
) -> Run:
    """Run a program at one draw of a posterior, as ``record`` does.

    :raises ValueError: if the shapes of the draw are not those of the program's latents, also if
        the program fails because of that.
    """
    try:
        run = record(program, values, args, kwargs, draw=draw)
    except (RuntimeError, ValueError, IndexError):
        prior = Run()
        with contextlib.suppress(RuntimeError, ValueError, IndexError, NotImplementedError):
            prior = record(program, {}, args, kwargs)
        _check_shapes(prior, values)
        raise
    _check_shapes(run, values)
    return run


def _check_shapes(run: Run, values: Mapping[str, Tensor]) -> None:
    expected = {name: shape for name, shape in _latent_shapes(run).items() if name in values}
    _refuse(expected, {name: values[name].shape for name in expected})


def _latent_shapes(run: Run) -> dict[str, torch.Size]:
    sites: Mapping[str, Any] = run.latents
    return {name: site.distribution.shape() for name, site in sites.items()}


def check_posterior(
    program: Callable,
    posterior: Any,
    draws: Mapping[str, Tensor],
    args: tuple,
    kwargs: Mapping[str, Any],
) -> None:
    """Check that a posterior belongs to a program, which is called without its targets.

    :param draws: draws of the posterior, site -> (S, *shape); the first one is used.
    :raises ValueError: if names or shapes of the latents do not match; the error lists all of them.
    """
    first = {name: value[0].detach() for name, value in draws.items()}
    run_of_posterior(program, posterior, first, args, kwargs)


def run_of_posterior(
    program: Callable,
    posterior: Any,
    values: Mapping[str, Tensor],
    args: tuple,
    kwargs: Mapping[str, Any],
) -> Run:
    """Run a program at a draw of a posterior, and check that the posterior belongs to it.

    Without targets, observed sites look like latents. A guide knows which are observed, and so do
    the draws of ``mcmc.sample``: another site whose value a statement depends on is a latent that
    they lack. Of draws from elsewhere it may be either. For any posterior a site without plates
    whose distribution does not depend on the latents is one. Where there may be one, a second run
    follows it in autograd's graph.

    :raises ValueError: if names or shapes of the latents do not match; the error lists all of them.
        For draws from elsewhere that lack a site whose value a statement depends on.
    """

    def run_at(values: Mapping[str, Tensor]) -> Run:
        with preserved_buffers(program, posterior):
            return run_at_draw(program, values, args, kwargs, draw=placeholder_for_observed)

    run = run_at(values)
    given = {name: value.shape for name, value in values.items()}
    expected = _latent_shapes(run)
    if any(map(_may_be_latent, run.observed.values())):
        leaves = {n: v.clone().requires_grad_(v.is_floating_point()) for n, v in values.items()}
        with torch.enable_grad():
            sites = run_at(leaves).observed
        for name, site in sites.items():
            if _may_be_latent(site) and not _depend(site, list(leaves.values())):
                distribution: Any = site.distribution
                expected[name] = distribution.shape()
    if isinstance(posterior, Guide | Samples) and not _is_of_sampler(posterior):
        theirs = _observed_by(posterior)
        used = uses_of_placeholders(
            run, program, values, args, kwargs, besides=theirs or (), latents=True
        )
        for user, name in used.items():
            if theirs is None and name not in expected:
                raise ValueError(
                    f"the draws have no value of '{name}', which the site '{user}' depends "
                    "on: if it is a latent, draw it too, or pass a dict of draws, of which those "
                    "that it lacks come from their prior; if it is observed, say so by "
                    "samples.of_program(bdl.Program(model, x, y))"
                )
            distribution = run.observed[name].distribution
            expected[name] = distribution.shape()
    if not isinstance(posterior, Guide | Samples):  # Pyro's own guides have auxiliary sites too
        given = {name: shape for name, shape in given.items() if name in expected}
    _refuse(expected, given)
    return run


def _is_of_sampler(posterior: Guide | Samples) -> bool:
    """Return whether Pyro or NumPyro drew them, and thus every latent of their program."""
    info = {} if isinstance(posterior, Guide) else posterior.info
    return info.get("backend") in ("pyro", "numpyro") and getattr(posterior, "program", 0) is None


def _observed_by(posterior: Guide | Samples) -> Collection[str] | None:
    """The sites that a posterior's own program observes; None where it is unknown."""
    if isinstance(posterior, Guide):
        return posterior.observed_sites
    tree = posterior.program
    return None if tree is None else tree["statements"].keys() - tree["point"].keys()


def _may_be_latent(site: Site) -> bool:
    return site.value is None and not site.distribution.batch_shape


@torch.enable_grad()
def _depend(site: Site, leaves: list[Tensor]) -> bool:
    """Return whether the parameters of a site depend on the leaves, or it has none."""
    parameters = parameters_of(base_distribution(site.distribution)).values()
    return not parameters or any(reaches(value, leaves) for value in parameters)
