"""Export to ArviZ: an ``InferenceData`` for ArviZ 0.23, an ``xarray.DataTree`` for ArviZ 1.x."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch
from pyro.infer.autoguide.initialization import InitMessenger, init_to_value
from torch import Tensor

from pyro_bdl.errors import UnsupportedProgramError, warn
from pyro_bdl.guides.draws import DRAWS_AT_ONCE, as_posterior, log_densities_of, to_samples
from pyro_bdl.predictive.predictor import predictor, unknown_kinds
from pyro_bdl.predictive.sampled import prior_draws
from pyro_bdl.program.batches import Batches
from pyro_bdl.program.check import check_finite, named_arguments
from pyro_bdl.program.observed_arguments import TargetArguments
from pyro_bdl.program.program import FirstRun, Program, trace_once
from pyro_bdl.program.samples import Samples
from pyro_bdl.program.vmap import map_draws
from pyro_bdl.utils.module_state import device_of, evaluation_mode
from pyro_bdl.utils.names import chooser
from pyro_bdl.utils.random_state import seeded
from pyro_bdl.utils.validation import whole_number
from pyro_bdl.version import __version__

if TYPE_CHECKING:
    import xarray

# ArviZ's names of the statistics that samplers report.
_STATISTICS = {
    "num_steps": "n_steps",
    "accept_prob": "acceptance_rate",
}
_OF_DATA = ("log_likelihood", "posterior_predictive", "observed_data")
_DENSITIES = ("log_likelihood", "log_prior")  # one number for the dimensions of an event
_INDEPENDENT = "independent draws of a guide, for which R-hat and ESS say nothing about the fit"


def to_arviz(
    model: Callable,
    posterior: Any,
    *args: Any,
    num_samples: int = 500,
    prior_samples: int = 100,
    sites: str | Sequence[str] = "*",
    dims: Mapping[str, Sequence[str]] | None = None,
    coords: Mapping[str, Sequence[Any]] | None = None,
    seed: int = 0,
    model_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Export a posterior, its predictions and the data to ArviZ.

    Groups: ``posterior`` (latents and deterministic sites), ``sample_stats``, ``log_prior`` (log
    p(w) in nats, site by site), ``log_likelihood`` (one number per datum, unscaled),
    ``posterior_predictive``, ``prior``, ``prior_predictive``, ``observed_data`` and
    ``constant_data`` (the other tensors among the arguments). A guide is exported as one chain of
    independent draws; the attribute ``draws`` of its posterior says so. In ``sample_stats``,
    ``lp`` is log p(w, y), and ``log_q`` is log q(w) for a guide with a density, both in nats and as
    densities over the unconstrained latents. All groups are about the same draws. Those of a
    Laplace approximation (or another posterior of the linearized program) predict by f_s(x) =
    f(x; w*) + J(x) (w_s - w*), with w_s the draw in ``posterior`` on the unconstrained scale, and
    not by the network at w_s; so do deterministic sites. If the likelihood is in ``pyro.factor``
    statements only, there is nothing to predict, and no group of the data's.

    Data that masks leave out of the likelihood were not seen. They are left out of
    ``log_likelihood``, ``observed_data`` and the draws of their site, whose first dimension is then
    ``site_seen``, with the labels of those that were; single numbers of a datum that were not seen
    are NaN in ``observed_data``. The attribute ``seen`` of these groups says how many were.

    Plates name the dimensions of the sites in them; other dimensions are named ``site_dim_0`` etc.,
    as in ArviZ. Half precision becomes single precision. Both result classes write NetCDF by
    ``to_netcdf`` (through ``h5netcdf``), and Zarr by ``to_zarr``, for an ``InferenceData`` after
    ``to_datatree``.

    Example::

        >>> x, y = torch.linspace(-1, 1, 20)[:, None], torch.linspace(-2, 2, 20)
        >>> model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=0.1)
        >>> guide = bdl.guides.AutoMeanField(model).prototype(x, y)
        >>> result = bdl.to_arviz(model, guide, x, y, num_samples=50)
        >>> result["posterior"]["weight"].shape  # chains, draws, ...
        (1, 50, 1, 1)

    :param model: a Pyro program.
    :param posterior: a guide, ``Samples``, an MCMC of Pyro or NumPyro, or a dict of draws; None for
        the prior, its predictions and the data alone.
    :param args: the program's arguments, including the targets; or a loader or a list of batches,
        which are held in memory together.
    :param model_kwargs: the program's keyword arguments.
    :param num_samples: draws of a guide, 500 by default; of ``Samples`` all draws are used.
    :param prior_samples: draws of the prior; 0 for none.
    :param sites: names or patterns with shell wildcards of the latents and deterministic sites to
        export.
    :param dims: site to the names of its dimensions, without chain and draw.
    :param coords: dimension to the labels along it.
    :param seed: seed of the draws.
    :returns: an ``arviz.InferenceData`` for ArviZ 0.23, else an ``xarray.DataTree``.
    :raises ValueError: for a posterior of another program, a program without data, ``sites`` that
        match none, or dims that do not fit.
    :raises UnsupportedProgramError: without a posterior, for a prior that cannot be sampled.
    """
    num_samples = whole_number(num_samples, "num_samples")
    least = 1 if posterior is None else 0
    prior_samples = whole_number(prior_samples, "prior_samples", least)
    args, kwargs = Batches.of(args, device_of(model)).joined()
    kwargs |= model_kwargs or {}
    check_finite(model, args, kwargs)
    with evaluation_mode(model, posterior), seeded(seed):
        if posterior is not None:
            posterior = as_posterior(posterior, model, args, kwargs)
        first = _first_run(model, posterior, args, kwargs)
        program = Program.from_run(model, first, args, kwargs)
        program.require_observed()
        targets = TargetArguments(program)
        is_chosen = chooser(sites, "sites")
        drawn: dict[str, dict[str, Tensor]] = {}
        if posterior is not None:
            predictive: Any = predictor(
                model, posterior, num_samples, args=args, kwargs=kwargs, seed=seed,
                unknown=unknown_kinds(targets.observed.values()), latents=program.latents,
            )  # fmt: skip
            samples = predictive.samples or Samples(
                {site: value[None] for site, value in predictive.latents().items()}
            )
            drawn |= _of_posterior(program, predictive, samples, targets)
            drawn["sample_stats"] = _statistics(program, posterior, samples)
        if prior_samples:
            try:
                drawn |= _prior(program, prior_samples, targets)
            except UnsupportedProgramError as error:
                if posterior is None:
                    raise
                warn(f"{error}; it is left out", "prior-draws")
    for name in {"posterior", "prior"} & drawn.keys():
        drawn[name] = _matching(drawn[name], is_chosen, sites)
    named = named_arguments(model, args, kwargs).items()
    masked = {name: site.seen() for name, site in targets.observed.items() if site.is_masked}
    seen = {name: cells for name, cells in masked.items() if not cells.all()}
    fixed = {
        "observed_data": {
            name: _nan_unless(seen[name], site.value) if name in seen else site.value
            for name, site in targets.observed.items()
        },
        "constant_data": {
            name: value
            for name, value in named
            if isinstance(value, Tensor) and targets.site_of(value) is None
        },
    }
    of_data = {
        name: cells.reshape(*targets.observed[name].distribution.batch_shape, -1).any(-1)
        for name, cells in seen.items()
    }
    labels = Labels(first.trace, dims or {}, coords or {})
    groups = {
        name: labels.dataset(
            values, leading, seen=of_data if name in _OF_DATA else {}, densities=name in _DENSITIES
        )
        for part, leading in ((drawn, ("chain", "draw")), (fixed, ()))
        for name, values in part.items()
        if values
    }
    if posterior is not None:
        groups["posterior"].attrs |= _about(posterior)
    for name in _OF_DATA:
        if seen and name in groups:
            counts = {site: [int(cells.sum()), cells.numel()] for site, cells in seen.items()}
            groups[name].attrs["seen"] = json.dumps(counts)
    for group in groups.values():
        group.attrs |= {
            "created_at": datetime.now(UTC).isoformat(),
            "inference_library": "pyro_bdl",
            "inference_library_version": __version__,
        }
    import arviz  # both are imported when needed, they take long
    import xarray

    tree = xarray.DataTree.from_dict(groups)
    return arviz.InferenceData.from_datatree(tree) if arviz.__version__ < "1" else tree


class Labels:
    """Conversion of sites' tensors to ``xarray`` datasets, with names and labels of dimensions.

    :param trace: a trace of the program, for the plates of its sites.
    :param dims: site to the names of its dimensions.
    :param coords: dimension to labels.
    """

    def __init__(
        self, trace: Any, dims: Mapping[str, Sequence[str]], coords: Mapping[str, Sequence[Any]]
    ) -> None:
        self.dims, self.coords = dims, coords
        self.lengths = {name: len(labels) for name, labels in coords.items()}
        self.plates = {
            name: _plates(node)
            for name, node in trace.nodes.items()
            if node["type"] == "sample" and hasattr(node["fn"], "event_dim")
        }

    def names(self, site: str, shape: torch.Size, *, density: bool = False) -> list[str]:
        """A name for each dimension of a site's value, or of its log density, which has one number
        for the last dimensions of an event.

        :raises ValueError: if the dims given for the site do not fit its shape.
        """
        names = [f"{site}_dim_{i}" for i in range(len(shape))]
        for axis, (plate, length) in self.plates.get(site, {}).items():
            if axis < len(shape) and shape[axis] == length:
                names[axis] = plate
        names = list(self.dims.get(site, names))
        names = names[: len(shape)] if density else names
        if len(names) != len(shape):
            raise ValueError(
                f"dims[{site!r}] has {len(names)} names, but the site's shape is {tuple(shape)}"
            )
        for name, length in zip(names, shape, strict=True):
            if self.lengths.setdefault(name, length) != length:
                raise ValueError(
                    f"the dimension {name!r} of site {site!r} has length {length}, but "
                    f"{self.lengths[name]} elsewhere: give the site other dims, or coords of "
                    "that length"
                )
        return names

    def dataset(
        self,
        values: Mapping[str, Tensor],
        leading: tuple[str, ...] = (),
        *,
        seen: Mapping[str, Tensor],
        densities: bool = False,
    ) -> "xarray.Dataset":
        """A dataset of values with ``leading`` dimensions in front of the site's dimensions.

        :param seen: site to a mask of its data that were seen, bool ``(*batch)``; the others are
            left out of its values.
        :param densities: the values are log densities of the sites.
        """
        import xarray  # imported when needed, it takes long

        variables: dict[str, Any] = {}
        coords: dict[str, Any] = {}
        for site, value in values.items():
            names = self.names(site, value.shape[len(leading) :], density=densities)
            if site in seen:
                value, names, labels = self._of_seen(value, names, seen[site], f"{site}_seen")
                coords[f"{site}_seen"] = labels
            variables[site] = ([*leading, *names], _as_numpy(value))
            for name, length in zip([*leading, *names], value.shape, strict=True):
                coords.setdefault(name, list(self.coords.get(name, range(length))))
        return xarray.Dataset(variables, coords=coords)

    def _of_seen(
        self, value: Tensor, names: list[str], seen: Tensor, new: str
    ) -> tuple[Tensor, list[str], list[Any]]:
        """Values ``(..., *batch, *event)`` at the data that were seen, the names of their
        dimensions, and the labels along the new one, of what was seen: that of a plate, or of all
        cells."""
        seen, start = seen.to(value.device), value.dim() - len(names)
        for axis, name in enumerate(names[: seen.dim()]):
            rows = seen.movedim(axis, 0).reshape(len(seen.movedim(axis, 0)), -1)
            if torch.equal(rows.any(1), rows.all(1)):  # of each row all cells or none
                kept = rows.any(1).nonzero().flatten()
                labels = list(self.coords.get(name, range(len(rows))))
                names = [*names[:axis], new, *names[axis + 1 :]]
                of_kept = [labels[place] for place in kept.tolist()]
                return value.index_select(start + axis, kept), names, of_kept
        kept = seen.flatten().nonzero().flatten()
        cells = value.flatten(start, start + seen.dim() - 1)
        return cells.index_select(start, kept), [new, *names[seen.dim() :]], kept.tolist()


def _plates(node: Any) -> dict[int, tuple[str, int]]:
    """Name and length of the plate of each batch dimension of a site, counted from the front."""
    shape = node["value"].shape
    # A deterministic value counts as one event, even inside plates.
    batch = len(shape) - (0 if node["infer"].get("_deterministic") else node["fn"].event_dim)
    names = {}
    for frame in node["cond_indep_stack"]:
        axis = batch + frame.dim if frame.vectorized else -1
        if axis >= 0 and shape[axis] == frame.size:
            names[axis] = frame.name, frame.size
    return names


def _nan_unless(seen: Tensor, value: Tensor) -> Tensor:
    """Observed numbers with NaN where they were not seen; others, such as classes, as they are."""
    if not value.is_floating_point():
        return value
    return value.masked_fill(~seen.to(value.device).reshape(value.shape), torch.nan)


def _as_numpy(value: Tensor) -> Any:
    value = value.detach()
    if value.dtype in (torch.float16, torch.bfloat16):
        value = value.float()
    return value.cpu().numpy()


# ------------------------------------------------------------------------------------- groups


def _first_run(model: Callable, posterior: Any, args: tuple, kwargs: dict) -> FirstRun:
    """A run of the program; at a draw of the posterior if its prior is improper."""
    try:
        return trace_once(model, args, kwargs)
    except NotImplementedError:
        draws = to_samples(posterior, 1, *args, **kwargs).latents
        values = {name: value[0, 0] for name, value in draws.items()}
        return trace_once(InitMessenger(init_to_value(values=values))(model), args, kwargs)


def _matching(
    values: Mapping[str, Tensor], is_chosen: Callable[[str], bool], sites: Any
) -> dict[str, Tensor]:
    chosen = {name: value for name, value in values.items() if is_chosen(name)}
    if not chosen:
        raise ValueError(
            f"sites={sites!r} matches no latent or deterministic site; there are: "
            f"{', '.join(values)}"
        )
    return chosen


def _about(posterior: Any) -> dict[str, Any]:
    if not isinstance(posterior, Samples):
        return {"guide": type(posterior).__name__, "draws": _INDEPENDENT}
    return {  # NetCDF has no bool
        key: value if type(value) in (str, int, float) else json.dumps(value)
        for key, value in posterior.info.items()
    }


@torch.no_grad()
def _statistics(program: Program, posterior: Any, samples: Samples) -> dict[str, Tensor]:
    stats = {}
    if isinstance(posterior, Samples):  # whose potential energy may be of a minibatch
        stats = {_STATISTICS.get(name, name): value for name, value in samples.stats.items()}
        stats.pop("potential_energy", None)
        if "n_steps" in stats:
            stats["tree_depth"] = stats["n_steps"].clamp(min=1).log2().floor().long() + 1
    log_p, log_q = log_densities_of(program, posterior, samples)
    leading = samples.num_chains, samples.num_draws
    stats["lp"] = log_p.reshape(leading)
    return stats if log_q is None else stats | {"log_q": log_q.reshape(leading)}


def _of_posterior(
    program: Program, predictive: Any, samples: Samples, targets: TargetArguments
) -> dict[str, dict[str, Tensor]]:
    """The groups posterior, log_prior, posterior_predictive and log_likelihood."""
    args, kwargs = targets.removed()
    leading = samples.num_chains, samples.num_draws
    groups = {
        "posterior": dict(samples.latents),
        "log_prior": _split(_log_prior(program, samples), leading),
    }
    if not program.observed:
        return groups
    drawn = _split(predictive(*args, **kwargs), leading)
    groups["posterior"] |= {n: drawn.pop(n) for n in program.deterministic if n in drawn}
    groups["posterior_predictive"] = drawn
    density = predictive.log_likelihood(*program.args, **program.kwargs)
    groups["log_likelihood"] = _split(density, leading)
    with torch.no_grad():
        run = program.run(program.initial)
    if (coupled := run.one_step_ahead()) is not None:
        message = f"{coupled}; arviz.loo on log_likelihood is no estimate for new data"
        warn(message, "data-depend")
    if scaled := [repr(name) for name, site in run.observed.items() if site.is_scaled]:
        warn(
            f"the likelihood of {', '.join(scaled)} is raised to a power in the posterior (a "
            "temperature, or poutine.scale), and log_likelihood has it to the power 1, as "
            "predictions do: arviz.loo and psense_summary would take it for the posterior's; use "
            "pyro_bdl.loo and diagnostics.prior_sensitivity",
            "powers-of-likelihoods",
        )
    return groups


@torch.no_grad()
def _log_prior(program: Program, samples: Samples) -> dict[str, Tensor]:
    """log p(w) of each site and declared factor at each draw, ``(S, *batch)``."""
    return map_draws(
        lambda draw: {name: site.log_prob() for name, site in program.run(draw).priors.items()},
        samples.flat(),
        chunk_size=max(1, DRAWS_AT_ONCE // max(1, program.size)),
    )


def _prior(program: Program, count: int, targets: TargetArguments) -> dict[str, dict[str, Tensor]]:
    """The groups prior and prior_predictive.

    :raises UnsupportedProgramError: if the prior cannot be sampled.
    """
    drawn = prior_draws(program.model, program.run(program.initial), count, *targets.removed())
    drawn = _split(drawn, (1, count))
    prior = {n: drawn.pop(n) for n in (*program.latents, *program.deterministic) if n in drawn}
    return {"prior": prior, "prior_predictive": drawn if program.observed else {}}


def _split(values: Mapping[str, Tensor], leading: tuple[int, int]) -> dict[str, Tensor]:
    return {name: value.reshape(*leading, *value.shape[1:]) for name, value in values.items()}
