"""Gaussian local latents, integrated out of a program in closed form."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions import Unit
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn

from pyro_bdl.distributions.families import name_of
from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.program.trace import is_deterministic, record
from pyro_bdl.utils.autograd import is_transformed
from pyro_bdl.utils.one_thread import OneThread

_INSTEAD = "use AutoMeanField, or AutoAmortized with an encoder, on the program itself"


@dataclass
class Gaussian:
    """Independent Gaussians of the rows of a plate: mean (rows, m) and covariance (rows, m, m)."""

    mean: Tensor
    covariance: Tensor

    def push_forward(self, matrix: Tensor, offset: Tensor, noise: Tensor) -> "Gaussian":
        """The distribution of matrix z + offset + e with e of the covariance ``noise``."""
        mean = _applied(matrix, self.mean) + offset
        return Gaussian(mean, matrix @ self.covariance @ matrix.mT + noise)

    def condition(
        self, matrix: Tensor, seen: "Gaussian", value: Tensor, mask: Tensor | None
    ) -> "Gaussian":
        """The distribution of z given the value of ``seen``; rows outside of the mask stay."""
        cross = matrix @ self.covariance
        if seen.mean.shape[-1] == 1:
            gain = (cross / seen.covariance).mT
        else:
            gain = torch.linalg.solve(seen.covariance, cross).mT
        if mask is not None:
            gain = gain * mask[:, None, None]
        mean = self.mean + _applied(gain, value - seen.mean)
        return Gaussian(mean, self.covariance - gain @ cross)


class _Reading(OneThread):
    """One run with the local sites at given values, by default their means, and no statement about
    the outputs outside.

    ``priors`` and ``outputs`` are the distributions of the local sites and of what may depend on
    them, ``values`` those of all other statements.

    :param sites: the local sites.
    :param known: values of all other statements, which then stay unseen outside; in the first run
        they are made as usual.
    """

    def __init__(
        self, sites: Sequence[str], local: Mapping[str, Tensor], known: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.sites, self.local, self.known = sites, local, known
        self.priors: dict[str, Any] = {}
        self.outputs: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self.plate = ""

    def _process_message(self, msg: Any) -> None:
        self.check_thread(msg)
        if msg["type"] != "sample":
            return
        name, fn = msg["name"], msg["fn"]
        if name in self.known:
            value = self.known[name]
        elif name in self.sites:
            self._check_local(msg)
            self.priors[name] = fn
            value = self.local.get(name, fn.mean)
        elif self._is_output(msg):
            self._check_output(msg)
            self.outputs[name] = fn
            value = msg["value"] if msg["is_observed"] else fn.mean
        else:
            return
        msg.update(value=value, stop=True, done=True)

    def _postprocess_message(self, msg: Any) -> None:
        name = msg["name"]
        if msg["type"] == "sample" and name not in self.priors and name not in self.outputs:
            self.values[name] = msg["value"]

    def _check_local(self, msg: Any) -> None:
        name, plates = msg["name"], [frame.name for frame in msg["cond_indep_stack"]]
        if msg["is_observed"]:
            raise UnsupportedProgramError(
                f"the site '{name}' is observed, so that there is nothing to integrate"
            )
        if len(plates) != 1 or self.plate not in ("", plates[0]):
            raise UnsupportedProgramError(
                f"the local latents to integrate stand in one plate, the same for all, and '{name}'"
                f" stands in {', '.join(map(repr, plates)) or 'none'}: {_INSTEAD}"
            )
        self.plate = plates[0]
        _check_power(msg)

    def _is_output(self, msg: Any) -> bool:
        is_inside = any(frame.name == self.plate for frame in msg["cond_indep_stack"])
        return is_inside and not site_is_subsample(msg) and not is_deterministic(msg)

    def _check_output(self, msg: Any) -> None:
        if isinstance(msg["fn"], Unit):
            raise UnsupportedProgramError(
                f"the factor '{msg['name']}' stands in the plate of local latents, which are "
                f"integrated out of Normal observations only: {_INSTEAD}"
            )
        if len(msg["cond_indep_stack"]) != 1:
            raise UnsupportedProgramError(
                f"the site '{msg['name']}' stands in several plates, whose data share a local "
                f"latent: declare all but the outermost by .to_event(...), or {_INSTEAD}"
            )
        _check_power(msg)


class _Marginals(OneThread):
    """The last run: the outputs' statements with the local latents integrated out, each given
    those before it."""

    def __init__(self, known: Mapping[str, Any], local: Gaussian, seen: Mapping[str, Any]) -> None:
        super().__init__()
        self.known, self.local, self.seen = known, local, seen
        self.present: dict[str, Gaussian] = {}

    def _process_message(self, msg: Any) -> None:
        self.check_thread(msg)
        if msg["type"] != "sample":
            return
        name = msg["name"]
        if name in self.known:
            msg.update(value=self.known[name], stop=True, done=True)
            return
        matrix, offset, noise = self.seen[name]
        self.present[name] = marginal = self.local.push_forward(matrix, offset, noise)
        msg["fn"] = _distribution(marginal, msg["fn"])

    def _postprocess_message(self, msg: Any) -> None:
        if msg["type"] == "sample" and msg["name"] in self.present:
            marginal, mask = self.present[msg["name"]], msg["mask"]
            if mask is not None:
                mask = torch.as_tensor(mask, device=marginal.mean.device)
                mask = mask.to(marginal.mean.dtype).expand(len(marginal.mean))
            value = msg["value"].reshape(marginal.mean.shape)
            matrix = self.seen[msg["name"]][0]
            self.local = self.local.condition(matrix, marginal, value, mask)


def integrate(model: Callable, *sites: str) -> "WithoutLocals":
    """The program without local latents z_n, integrated in closed form where all is Gaussian.

    For z_n ~ N(m_n, S_n) in a plate and observations y_n ~ N(A_n z_n + b_n, R_n) in it, where all
    but z may depend on the other latents w,

        p(y_n | w) = N(y_n; A_n m_n + b_n, A_n S_n A_n' + R_n),

    as in factor analysis or a linear regression on inputs with noise. Several observations of a row
    follow each other, each given those before. Guides of any kind, Laplace approximations, NUTS,
    SG-MCMC and predictions then treat the program as one without these latents, in minibatches
    too. ``posterior(w, *args)`` of the result gives p(z_n | y_n, w). Deterministic sites are those
    at z_n = m_n. The program runs k + 2 times, for k numbers of a row's latents; that it is linear
    in them is checked in the first run, at one point.

    :param model: a Pyro program; it is not changed.
    :param sites: its local latents to integrate, Normal or MultivariateNormal, all in one plate.
    :raises ValueError: for no sites; in a run, for one that is no latent site.
    :raises UnsupportedProgramError: in a run, where latents or observations are not Gaussian, not
        linear in the local latents, raised to a power by a handler inside, or in other plates.
    """
    if not sites:
        raise ValueError("integrate needs the names of the local latents, as in integrate(m, 'z')")
    return WithoutLocals(model, sites)


class WithoutLocals(nn.Module):
    """A program without some of its local latents, see ``handlers.integrate``."""

    def __init__(self, model: Callable, sites: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.sites = tuple(sites)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(args, kwargs)[0]

    @torch.no_grad()
    def posterior(
        self, latents: Mapping[str, Tensor], *args: Any, **kwargs: Any
    ) -> dict[str, dist.MultivariateNormal]:
        """p(z_n | y_n, w) of each local site, of the rows of the data.

        :param latents: w, site -> value, of one draw.
        :param args: the program's arguments, targets included.
        """
        _, local, sizes = record(lambda: self._run(args, kwargs), latents).result
        result, start = {}, 0
        for name, size in sizes.items():
            part = slice(start, start + size)
            start = part.stop
            result[name] = dist.MultivariateNormal(
                local.mean[:, part], local.covariance[:, part, part]
            )
        return result

    def _run(self, args: tuple, kwargs: dict) -> tuple[Any, Gaussian, dict[str, int]]:
        def read(local: Mapping[str, Tensor], known: Mapping[str, Any]) -> _Reading:
            with _Reading(self.sites, local, known) as reading:
                self.model(*args, **kwargs)
            return reading

        first = read({}, {})
        missing = [name for name in self.sites if name not in first.priors]
        if missing:
            raise ValueError(f"the program has no latent site '{missing[0]}' to integrate")
        priors, outputs = _read_all(first.priors), _read_all(first.outputs)
        sizes = {name: prior.mean.shape[-1] for name, prior in priors.items()}
        mean = torch.cat([prior.mean for prior in priors.values()], -1)
        eye = torch.eye(mean.shape[-1], device=mean.device, dtype=mean.dtype)
        places = eye.split(list(sizes.values()))
        blocks = zip(places, priors.values(), strict=True)
        parts = [place.mT @ prior.covariance @ place for place, prior in blocks]
        covariance = functools.reduce(torch.add, parts)
        local = Gaussian(mean, covariance)

        def values(point: Tensor) -> dict[str, Tensor]:
            parts = zip(sizes, point.split(list(sizes.values()), -1), strict=True)
            return {name: part.reshape(first.priors[name].shape()) for name, part in parts}

        def moments(point: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            """At values of the local latents, the means of the outputs, and all that must not
            depend on these values."""
            reading = read(values(point), first.values)
            own_outputs, own_priors = _read_all(reading.outputs), _read_all(reading.priors)
            constant = {name: output.covariance for name, output in own_outputs.items()}
            for name, prior in own_priors.items():
                constant[name] = torch.cat([prior.mean[..., None], prior.covariance], -1)
            return {name: output.mean for name, output in own_outputs.items()}, constant

        # slopes and second derivatives off the means, where those of odd functions vanish, and a
        # point on the other side, which tells kinks
        sd = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
        signs = torch.arange(sd.numel(), device=sd.device).reshape(sd.shape) % 2 * 2 - 1
        point, other = mean + 2.3 * signs * sd, mean - 1.7 * signs * sd
        points = torch.stack([*[point] * len(eye), other])

        def column(point: Tensor, unit: Tensor) -> Any:

            def along(here: Tensor) -> Any:
                return torch.func.jvp(moments, (here,), (unit.expand_as(here),))

            return torch.func.jvp(along, (point,), (torch.ones_like(point),))

        columns = torch.vmap(column)(points, torch.cat([eye, eye[:1]]))
        ((means, _), (slopes, changes)), (_, (bends, _)) = columns
        seen = {}
        linear = {name: (changes[name] == 0).all() for name in priors}
        for name, output in outputs.items():
            matrix = slopes[name][:-1].movedim(0, -1)
            seen[name] = matrix, output.mean - _applied(matrix, mean), output.covariance
            expected = output.mean + _applied(matrix, points - mean)
            straight = (changes[name] == 0).all() & (bends[name] == 0).all()
            linear[name] = straight & _same(means[name], expected)
        local.mean = self._checked(local.mean, linear, outputs)
        with _Marginals(first.values | values(mean), local, seen) as marginals:
            result = self.model(*args, **kwargs)
        return result, marginals.local, sizes

    def _checked(
        self, value: Tensor, linear: Mapping[str, Tensor], outputs: Mapping[str, Any]
    ) -> Tensor:
        """A tensor of this evaluation; NaN, inside ``torch.func`` and traces, where the program is
        not linear and Gaussian in the local latents.

        :param linear: whether it is, by site.
        :raises UnsupportedProgramError: elsewhere.
        """
        if is_transformed():
            return torch.where(torch.stack(list(linear.values())).all(), value, torch.nan)
        name = next((name for name, is_linear in linear.items() if not is_linear), None)
        if name is None:
            return value
        if name not in outputs:
            raise UnsupportedProgramError(
                f"the prior of '{name}' depends on another local latent: {_INSTEAD}"
            )
        raise UnsupportedProgramError(
            f"the observation '{name}' is not linear in the local latents "
            f"{', '.join(map(repr, self.sites))}, or its noise depends on them, so that "
            f"they have no integral in closed form: {_INSTEAD}"
        )


def _check_power(msg: Any) -> None:
    """Refuse a power of a density besides its plate's N / B, which has another integral."""
    frame = msg["cond_indep_stack"][0]
    power, of_plate = msg["scale"], frame.full_size / frame.size
    if isinstance(power, Tensor) or not math.isclose(power, of_plate):
        raise UnsupportedProgramError(
            f"the density of '{msg['name']}' is raised to a power (scale, temper), "
            "and the integral over the local latents is of the plain one: put the handler around "
            "the result, as in temper(integrate(model, 'z'), temperature)"
        )


def _applied(matrix: Tensor, vector: Tensor) -> Tensor:
    """A matrix (..., m, k) times a vector (..., k) of each row."""
    return (matrix @ vector[..., None])[..., 0]


def _same(some: Tensor, other: Tensor) -> Tensor:
    """True where means (points, rows, k) agree, relative to each entry's size over the rows."""
    slack = 1e-6 if other.dtype == torch.float64 else 1e-3
    return ((some - other).abs() <= slack * other.abs().amax(-2, keepdim=True)).all()


def _read_all(distributions: Mapping[str, Any]) -> dict[str, Gaussian]:
    return {name: _read(name, fn) for name, fn in distributions.items()}


def _read(name: str, fn: Any) -> Gaussian:
    """A site's distribution as Gaussians of the rows of its plate.

    :raises UnsupportedProgramError: for other distributions.
    """
    base = base_distribution(fn)
    rows, event = max(fn.batch_shape, default=1), fn.event_shape.numel()
    if name_of(base) == "Normal" and fn.batch_shape.numel() == rows:
        loc, scale = base.loc.reshape(rows, event), base.scale.reshape(rows, event)
        return Gaussian(loc, torch.diag_embed(scale.square()))
    if isinstance(base, dist.MultivariateNormal) and fn.event_dim == 1:
        return Gaussian(
            base.loc.reshape(rows, event), base.covariance_matrix.reshape(rows, event, event)
        )
    raise UnsupportedProgramError(
        f"the site '{name}' is {type(base).__name__}, and local latents are integrated in closed "
        f"form where they and their observations are Normal or MultivariateNormal: {_INSTEAD}"
    )


def _distribution(marginal: Gaussian, like: Any) -> Any:
    """A Gaussian of the batch and event shape of an output."""
    loc = marginal.mean.reshape(like.shape())
    if marginal.mean.shape[-1] == 1:
        scale = marginal.covariance.sqrt().reshape(like.shape())
        return dist.Normal(loc, scale).to_event(like.event_dim)
    if like.event_dim > 1:
        raise UnsupportedProgramError(
            "a matrix of observations of one local latent has no joint Normal in Pyro: flatten it"
        )
    covariance = marginal.covariance.reshape(*like.batch_shape, *marginal.covariance.shape[-2:])
    return dist.MultivariateNormal(loc, covariance)
