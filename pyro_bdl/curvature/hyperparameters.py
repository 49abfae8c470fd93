"""The hyperparameters of a program: positive ``PyroParam``s that scale its priors or its noise."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor
from torch.distributions import transform_to

from pyro_bdl.curvature.prior import hyperpriors, independent_normal, is_one_number, run_at
from pyro_bdl.distributions.families import name_of
from pyro_bdl.distributions.parameters import base_distribution, parameters_of
from pyro_bdl.program.batches import Batch
from pyro_bdl.program.subset import Subset
from pyro_bdl.program.trace import Run, Site, placeholder_for_observed, record
from pyro_bdl.utils.autograd import reaches
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.one_thread import OneThread

_ROUNDING = 32.0  # of a few operations, in units of the last place


@dataclass
class Hyperparameter:
    """A positive parameter of the program, from its last run.

    :param value: the constrained value, with the graph back to ``leaf``.
    :param leaf: the unconstrained tensor that optimizers change.
    """

    name: str
    value: Tensor
    leaf: Tensor
    constraint: Any

    def now(self) -> Tensor:
        """The value that the next run will read, with its graph."""
        value: Tensor = transform_to(self.constraint)(self.leaf)
        return value

    @torch.no_grad()
    def set(self, value: Tensor) -> None:
        """Set the value in place; a value outside the bounds is set to the bound."""
        inside = _inside(value.to(self.leaf), self.constraint)
        self.leaf.copy_(transform_to(self.constraint).inv(inside))


def _inside(value: Tensor, constraint: Any) -> Tensor:
    lower, upper = (getattr(constraint, f"{end}_bound", None) for end in ("lower", "upper"))
    limits = torch.finfo(value.dtype)
    if lower is not None:
        lower = float(lower)
        value = value.clamp(min=lower + (limits.eps * abs(lower) if lower else limits.tiny))
    if upper is not None:
        upper = float(upper)
        value = value.clamp(max=upper - (limits.eps * abs(upper) if upper else limits.tiny))
    return value


class ReadParameters(OneThread):
    """Notes the parameters that a program reads, or gives them other values. Each has one tensor in
    a run, however often it is read, so that what depends on it is seen in autograd's graph.

    :param values: parameter -> value.
    """

    def __init__(self, values: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self.values = values or {}
        self.seen: dict[str, Tensor] = {}

    def _pyro_param(self, msg: Any) -> None:
        value = self.values.get(msg["name"], self.seen.get(msg["name"]))
        if value is not None:
            msg["value"], msg["done"] = value, True

    def _pyro_post_param(self, msg: Any) -> None:
        if isinstance(msg["value"], Tensor):
            self.seen[msg["name"]] = msg["value"]

    def learned(self) -> dict[str, Hyperparameter]:
        """The parameters in Pyro's store that take a gradient, by name."""
        store, found = pyro.get_param_store(), {}
        for name, value in self.seen.items():
            leaf = value.unconstrained() if hasattr(value, "unconstrained") else value
            if leaf is not None and leaf.requires_grad and name in store:
                found[name] = Hyperparameter(name, value, leaf, store._constraints[name])
        return found


class Noise(NamedTuple):
    """The noise of a program's only observed site, a Normal.

    :param owner: the hyperparameter to which it is proportional.
    :param value: this hyperparameter's, or the noise itself, as one number with its graph; None if
        no parameter moves it.
    """

    site: Site
    owner: Hyperparameter | None
    value: Tensor | None


@dataclass
class ParameterReading:
    """A run of a program at fixed latents, and the parameters that it read.

    :param has_noise: whether other rows of the data may have the noise of this run's, see
        ``noise``; False where they were seen not to.
    """

    run: Run
    leaves: dict[str, Tensor]
    parameters: dict[str, Hyperparameter]
    has_noise: bool = True
    owners: tuple[Subset, dict[str, str]] | None = None  # the last ``owners_of_priors``

    @property
    def noise(self) -> Noise | None:
        """``noise_of_run``, or None where a parameter moves it and other rows do not have it."""
        found = self.noise_of_run
        moves = found is not None and (found.owner is not None or found.value is not None)
        return None if moves and not self.has_noise else found

    @cached_property
    @torch.enable_grad()
    def noise_of_run(self) -> Noise | None:
        """The noise of a program whose only observed site is a Normal with its own noise scale.

        None if the scale depends on latents, or on parameters otherwise than as one number or a
        multiple of one parameter.
        """
        others = set(self.run.factors) - set(hyperpriors(self.run, self.leaves))
        if len(self.run.observed) != 1 or others:
            return None
        (site,) = self.run.observed.values()
        normal: Any = base_distribution(site.distribution)
        if name_of(normal) != "Normal" or reaches(normal.scale, self.leaves.values()):
            return None
        if not normal.scale.requires_grad:
            return Noise(site, None, None)
        moved = [p for p in self.parameters.values() if reaches(normal.scale, [p.value])]
        if len(moved) == 1 and moved[0].value.numel() == 1 and scales(normal.scale, *moved):
            return Noise(site, moved[0], moved[0].value.reshape(()))
        if is_one_number(normal.scale):
            return Noise(site, None, normal.scale.reshape(-1)[0])
        return None

    @cached_property
    @torch.enable_grad()
    def in_likelihood(self) -> list[str]:
        """The names of the parameters that the likelihood depends on.

        A noise that is one number, see ``noise``, does not count.
        """
        if self.noise is not None:
            normal: Any = base_distribution(self.noise.site.distribution)
            terms = [normal.loc]
        else:
            hyperprior_names = hyperpriors(self.run, self.leaves)
            factors = (
                site for name, site in self.run.factors.items() if name not in hyperprior_names
            )
            sites = (*self.run.observed.values(), *factors)
            terms = [site.log_prob() for site in sites if site.value is not None]
        found = self.parameters.items()
        return [name for name, p in found if any(reaches(term, [p.value]) for term in terms)]


def read_at_center(
    model: Callable, guide: Any, data: Iterable[Batch] | None = None
) -> ParameterReading:
    """Read the program's parameters at a guide's center, on a few of its data.

    :param data: all batches, whose rows must all have the noise of the few for ``noise``.
    """
    layout, vector = guide.require_layout(), guide.location().detach()
    reading = read(model, Subset(layout), vector, *guide.example_rows)
    noise = reading.noise
    if data is not None and noise is not None and noise.value is not None:
        values = layout.constrain(vector)[0]
        with torch.enable_grad(), evaluation_mode(guide.program_modules):
            runs = (record(model, values, *batch, draw=placeholder_for_observed) for batch in data)
            reading.has_noise = all(shares_noise(run, noise) for run in runs)
    return reading


def read(
    model: Callable, subset: Subset, vector: Tensor, args: tuple, kwargs: Mapping[str, Any]
) -> ParameterReading:
    """Run the program at an unconstrained vector (P,) and record the parameters that it reads."""
    with ReadParameters() as read:
        run, leaves = run_at(model, subset, vector.detach(), args, kwargs)
    return ParameterReading(run, leaves, read.learned())


@torch.enable_grad()
def scales(tensor: Tensor, parameter: Hyperparameter) -> bool:
    """Return whether a tensor is proportional to a positive parameter.

    It is, by its operators, where its derivative depends on nothing that is learned, and where the
    product of the derivative with the parameter is the tensor itself, entry by entry.
    """
    value = parameter.value
    if not (value > 0).all() or not reaches(tensor, [value]):
        return False
    probe = torch.ones_like(tensor, requires_grad=True)
    options: Any = {"retain_graph": True, "create_graph": True, "materialize_grads": True}
    (fixed,) = torch.autograd.grad(tensor, value, probe.detach(), **options)
    (pulled,) = torch.autograd.grad(tensor, value, probe, **options)
    if fixed.requires_grad:
        return False
    (linear,) = torch.autograd.grad(pulled, probe, value.detach())
    rounding = _ROUNDING * torch.finfo(tensor.dtype).eps
    return torch.allclose(linear, tensor.detach(), rtol=rounding, atol=0.0)  # else + a constant


def prior_normals(reading: ParameterReading, subset: Subset) -> dict[str, tuple[Tensor, Tensor]]:
    """Return means and standard deviations of the sites with independent Normal priors, by site.

    :returns: flat tensors of the entries in the subset.
    """
    result = {}
    for name in subset.parts:
        site, latent = reading.run.latents[name], subset.layout.latents[name]
        normal = independent_normal(site, latent.transform, reading.leaves)
        if normal is None:
            continue
        loc, scale = (v.expand(site.value.shape).reshape(-1) for v in (normal.loc, normal.scale))
        chosen = subset.chosen[name]
        if chosen is not None:
            loc, scale = loc[chosen.to(loc.device)], scale[chosen.to(loc.device)]
        result[name] = loc, scale
    return result


@torch.enable_grad()
def owners_of_priors(reading: ParameterReading, subset: Subset) -> dict[str, str]:
    """The sites with independent Normal priors whose scales are proportional to a parameter of a
    reading, with its name."""
    if reading.owners is None or reading.owners[0] is not subset:
        found = {
            site: name
            for site, (_, scale) in prior_normals(reading, subset).items()
            for name, parameter in reading.parameters.items()
            if scales(scale, parameter)
        }
        reading.owners = subset, found
    return reading.owners[1]


@torch.enable_grad()
def shares_noise(run: Run, noise: Noise) -> bool:
    """Return whether a run on other rows has the noise of a reading, entry by entry: the same
    number, or multiples of the same parameter."""
    (site,) = run.observed.values()
    normal: Any = base_distribution(site.distribution)
    scale, owner = normal.scale, noise.owner
    if noise.value is None:
        return not scale.requires_grad
    if owner is None:
        assert noise.value is not None
        return is_one_number(scale) and bool(scale.reshape(-1)[0] == noise.value.detach())
    if not reaches(scale, [owner.leaf]):
        return False
    value, probe = owner.now(), torch.ones_like(scale, requires_grad=True)
    (slope,) = torch.autograd.grad(value.sum(), owner.leaf)
    (pulled,) = torch.autograd.grad(scale, owner.leaf, probe, create_graph=True, retain_graph=True)
    (slopes,) = torch.autograd.grad(pulled.sum(), probe)  # of each entry
    expected = scale.detach() * (slope.sum() / value.detach().sum())
    rounding = _ROUNDING * torch.finfo(scale.dtype).eps
    return bool(((slopes - expected).abs() <= rounding * expected).all())


def learned_noise(reading: ParameterReading) -> Tensor | None:
    """``Noise.value``, where there is one."""
    return None if reading.noise is None else reading.noise.value


def followed(reading: ParameterReading) -> dict[str, Hyperparameter]:
    """Return the hyperparameters whose changes the evidence can follow without another fit.

    They are the hyperparameters of the priors, and a Normal's noise.
    """
    others = reading.in_likelihood
    return {name: p for name, p in reading.parameters.items() if name not in others}


@torch.enable_grad()
def other_noise(reading: ParameterReading) -> list[str]:
    """Parameters of the likelihood that the evidence cannot follow, and that a parameter of an
    observed distribution depends on which no latent moves: noises, shapes, degrees of freedom."""
    bases = [base_distribution(site.distribution) for site in reading.run.observed.values()]
    values = [value for base in bases for value in parameters_of(base).values()]
    still = [value for value in values if not reaches(value, reading.leaves.values())]
    names = reading.in_likelihood
    return [n for n in names if any(reaches(v, [reading.parameters[n].value]) for v in still)]


@contextmanager
def restored_on_error(
    parameters: Mapping[str, Hyperparameter], refresh: Callable[[], Any]
) -> Iterator[None]:
    """Restore hyperparameters if the body raises an error.

    :param refresh: called after the values are restored.
    """
    before = {name: p.leaf.detach().clone() for name, p in parameters.items()}
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.leaf.copy_(before[name])
        refresh()
        raise
