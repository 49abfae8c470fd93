"""Gaussian local latents, integrated out of a program in closed form."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions import Unit
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from pyro_bdl.distributions.take_apart import base_distribution
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.program.trace import is_deterministic, record

_INSTEAD = "use AutoMeanField, or AutoAmortized with an encoder, on the program itself"


@dataclass
class Gaussian:
    """Independent Gaussians of the rows of a plate: mean (rows, m) and covariance (rows, m, m)."""

    mean: Tensor
    covariance: Tensor

    def seen_through(self, matrix: Tensor, offset: Tensor, noise: Tensor) -> "Gaussian":
        """The distribution of matrix z + offset + e with e of the covariance ``noise``."""
        mean = (matrix @ self.mean[..., None])[..., 0] + offset
        return Gaussian(mean, matrix @ self.covariance @ matrix.mT + noise)

    def given(
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
        mean = self.mean + (gain @ (value - seen.mean)[..., None])[..., 0]
        return Gaussian(mean, self.covariance - gain @ cross)


@dataclass
class _LocalStatements:
    """The statements about the local plate of one run: local sites' priors, the distributions that
    may depend on them, and everything else's values."""

    priors: dict[str, Distribution] = field(default_factory=dict)
    outputs: dict[str, Distribution] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    plate: Any = None


class _Reading(Messenger):
    """One run with the local sites at given values, by default their means, and no statement about
    the outputs.

    :param sites: the local sites.
    :param known: values of all other statements, which then stay unseen outside; in the first run
        they are made as usual.
    """

    def __init__(
        self,
        sites: Sequence[str],
        local: Mapping[str, Tensor] | None = None,
        known: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.sites, self.local, self.known = sites, local or {}, known
        self.found = _LocalStatements()

    def _process_message(self, msg: Any) -> None:
        if msg["type"] != "sample":
            return
        name = msg["name"]
        if self.known is not None and name in self.known:
            msg.update(value=self.known[name], stop=True, done=True)
        elif name in self.sites:
            self._take_local(msg)
        elif not isinstance(msg["fn"], _Subsample) and self._is_output(msg):
            self._take_output(msg)

    def _take_local(self, msg: Any) -> None:
        name, frames = msg["name"], msg["cond_indep_stack"]
        plate = self.found.plate
        if msg["is_observed"]:
            raise UnsupportedProgramError(
                f"the site '{name}' is observed, so that there is nothing to integrate"
            )
        if len(frames) != 1 or (plate is not None and plate.name != frames[0].name):
            raise UnsupportedProgramError(
                f"the local latents to integrate stand in one plate, the same for all, and '{name}'"
                f" stands in {', '.join(repr(f.name) for f in frames) or 'none'}: {_INSTEAD}"
            )
        self.found.plate = frames[0]
        self.found.priors[name] = msg["fn"]
        value = self.local.get(name)
        msg.update(value=msg["fn"].mean if value is None else value, stop=True, done=True)

    def _is_output(self, msg: Any) -> bool:
        plate = self.found.plate
        names = {frame.name for frame in msg["cond_indep_stack"]}
        return plate is not None and plate.name in names and not is_deterministic(msg)

    def _take_output(self, msg: Any) -> None:
        name = msg["name"]
        if isinstance(msg["fn"], Unit):
            raise UnsupportedProgramError(
                f"the factor '{name}' stands in the plate of local latents, which are integrated "
                f"out of Normal observations only: {_INSTEAD}"
            )
        if len(msg["cond_indep_stack"]) != 1:
            raise UnsupportedProgramError(
                f"the site '{name}' stands in several plates, whose data share a local latent: "
                f"declare all but the outermost by .to_event(...), or {_INSTEAD}"
            )
        self.found.outputs[name] = msg["fn"]
        value = msg["value"] if msg["is_observed"] else msg["fn"].mean
        msg.update(value=value, stop=True, done=True)

    def _postprocess_message(self, msg: Any) -> None:
        if self.known is None and msg["type"] == "sample":
            name = msg["name"]
            if name not in self.found.priors and name not in self.found.outputs:
                self.found.values[name] = msg["value"]


class _Marginals(Messenger):
    """The last run: the outputs' statements with the local latents integrated out, each given
    those before it."""

    def __init__(self, known: Mapping[str, Any], local: Gaussian, seen: Mapping[str, Any]) -> None:
        super().__init__()
        self.known, self.local, self.seen = known, local, seen
        self.present: dict[str, Gaussian] = {}

    def _process_message(self, msg: Any) -> None:
        if msg["type"] != "sample":
            return
        name = msg["name"]
        if name in self.known:
            msg.update(value=self.known[name], stop=True, done=True)
            return
        matrix, offset, noise = self.seen[name]
        self.present[name] = marginal = self.local.seen_through(matrix, offset, noise)
        msg["fn"] = _distribution(marginal, msg["fn"])

    def _postprocess_message(self, msg: Any) -> None:
        if msg["type"] == "sample" and msg["name"] in self.present:
            marginal, mask = self.present[msg["name"]], msg["mask"]
            if mask is not None:
                mask = torch.as_tensor(mask, device=marginal.mean.device)
                mask = mask.to(marginal.mean.dtype).expand(len(marginal.mean))
            value = msg["value"].reshape(marginal.mean.shape)
            matrix = self.seen[msg["name"]][0]
            self.local = self.local.given(matrix, marginal, value, mask)


class WithoutLocals(nn.Module):
    """A program without some of its local latents, see ``handlers.integrate``."""

    def __init__(self, model: Callable, sites: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.sites = tuple(sites)
        self._checked = False

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
        found: list[Any] = []
        record(lambda: found.append(self._run(args, kwargs)), latents)
        (_, local, sizes) = found[0]
        result, start = {}, 0
        for name, size in sizes.items():
            part = slice(start, start + size)
            covariance = local.covariance[:, part, part]
            result[name] = dist.MultivariateNormal(local.mean[:, part], covariance)
            start += size
        return result

    def _run(self, args: tuple, kwargs: dict) -> tuple[Any, Gaussian, dict[str, int]]:
        def read(local: Mapping[str, Tensor] | None, known: Any) -> _LocalStatements:
            with _Reading(self.sites, local, known) as reading:
                self.model(*args, **kwargs)
            return reading.found

        first = read(None, None)
        missing = [name for name in self.sites if name not in first.priors]
        if missing:
            raise ValueError(f"the program has no latent site '{missing[0]}' to integrate")
        priors = {name: _read(name, fn) for name, fn in first.priors.items()}
        sizes = {name: prior.mean.shape[-1] for name, prior in priors.items()}
        outputs = {name: _read(name, fn) for name, fn in first.outputs.items()}

        def at(point: Tensor) -> _LocalStatements:
            parts = point.split(list(sizes.values()), -1)
            local = {
                name: part.reshape(first.priors[name].shape())  # type: ignore[attr-defined]
                for name, part in zip(sizes, parts, strict=True)
            }
            return read(local, first.values)

        mean = torch.cat([prior.mean for prior in priors.values()], -1)
        local = Gaussian(mean, _block_diagonal([prior.covariance for prior in priors.values()]))
        columns: dict[str, list[Tensor]] = {name: [] for name in outputs}
        for number in range(mean.shape[-1]):
            moved = at(
                mean + torch.eye(mean.shape[-1], device=mean.device, dtype=mean.dtype)[number]
            )
            for name, fn in moved.outputs.items():
                columns[name].append(_read(name, fn).mean - outputs[name].mean)
        seen = {}
        for name, output in outputs.items():
            matrix = torch.stack(columns[name], -1)
            offset = output.mean - (matrix @ mean[..., None])[..., 0]
            seen[name] = matrix, offset, output.covariance
        if not self._checked and not _is_traced():
            self._check(at, local, priors, seen)
        fixed = first.values | {
            name: value.reshape(first.priors[name].shape())  # type: ignore[attr-defined]
            for name, value in zip(sizes, mean.split(list(sizes.values()), -1), strict=True)
        }
        with _Marginals(fixed, local, seen) as marginals:
            result = self.model(*args, **kwargs)
        return result, marginals.local, sizes

    @torch.no_grad()
    def _check(self, at: Any, local: Gaussian, priors: Any, seen: Any) -> None:
        """Check that the program is linear and Gaussian in the local latents, at another point.

        :raises UnsupportedProgramError: where it is not.
        """
        sd = local.covariance.diagonal(dim1=-2, dim2=-1).sqrt()
        signs = torch.arange(sd.numel(), device=sd.device).reshape(sd.shape) % 2 * 2 - 1
        point = local.mean + 2.3 * signs * sd
        elsewhere = at(point)
        for name, fn in elsewhere.priors.items():
            if not _close(_read(name, fn), priors[name]):
                raise UnsupportedProgramError(
                    f"the prior of '{name}' depends on another local latent: {_INSTEAD}"
                )
        for name, fn in elsewhere.outputs.items():
            matrix, offset, noise = seen[name]
            expected = Gaussian((matrix @ point[..., None])[..., 0] + offset, noise)
            if not _close(_read(name, fn), expected):
                raise UnsupportedProgramError(
                    f"the observation '{name}' is not linear in the local latents "
                    f"{', '.join(map(repr, self.sites))}, or its noise depends on them, so that "
                    f"they have no integral in closed form: {_INSTEAD}"
                )
        self._checked = True


def _is_traced() -> bool:
    return torch._C._are_functorch_transforms_active() or get_proxy_mode() is not None


def _close(a: Gaussian, b: Gaussian) -> bool:
    slack = 1e-6 if a.mean.dtype == torch.float64 else 1e-3
    pairs = ((a.mean, b.mean), (a.covariance, b.covariance))
    return all(torch.allclose(x, y, rtol=slack, atol=slack) for x, y in pairs)


def _block_diagonal(blocks: Sequence[Tensor]) -> Tensor:
    size, start = sum(block.shape[-1] for block in blocks), 0
    if len(blocks) == 1:
        return blocks[0]
    rows = []
    for block in blocks:
        width = block.shape[-1]
        rows.append(nn.functional.pad(block, (start, size - start - width)))
        start += width
    return torch.cat(rows, -2)


def _read(name: str, fn: Any) -> Gaussian:
    """A site's distribution as Gaussians of the rows of its plate.

    :raises UnsupportedProgramError: for other distributions.
    """
    base = base_distribution(fn)
    rows, event = max(fn.batch_shape, default=1), fn.event_shape.numel()
    if type(base).__name__ == "Normal" and fn.batch_shape.numel() == rows:
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
