"""A Gaussian over a program's unconstrained latents that replaces the program's prior.

``guide.as_prior()`` makes it for the next task of continual learning: with the prior q_t(w) ~ p(w |
y_1..t) the posterior given y_t+1 is p(w | y_1..t+1). With variational guides this is variational
continual learning (Nguyen et al. 2018), with Laplace approximations online Laplace (Ritter, Botev &
Barber 2018). The prior of a constrained latent w = T(u) is the transformed Gaussian, such as a
log-normal prior for a noise scale.
"""

import copy
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn

from pyro_bdl.distributions.matrix_normal import MatrixNormal
from pyro_bdl.program.layout import Latent, Layout, marginal
from pyro_bdl.program.network_sites import INIT_KEY
from pyro_bdl.program.subset import Subset
from pyro_bdl.utils.autograd import is_transformed
from pyro_bdl.utils.one_thread import OneThread


class _SiteBlock(nn.Module):
    """A block of one site, with its tensors as buffers."""

    loc: Tensor

    def __init__(self, latent: Latent, **tensors: Tensor) -> None:
        super().__init__()
        self.latents = (latent,)
        for name, value in tensors.items():
            self.register_buffer(name, value.detach().clone())


class NormalBlock(_SiteBlock):
    """Independent Normals (``loc``, ``scale``) over one site's unconstrained numbers."""

    scale: Tensor

    def distribution(self, latent: Latent, run: "_PriorRun") -> Any:
        return marginal(latent, self.loc, self.scale)


class MatrixBlock(_SiteBlock):
    """A matrix normal (``loc``, ``row_factor``, ``column_factor``) over one site."""

    row_factor: Tensor
    column_factor: Tensor

    def distribution(self, latent: Latent, run: "_PriorRun") -> Any:
        return MatrixNormal(self.loc, self.row_factor, self.column_factor)


class FixedBlock(_SiteBlock):
    """One site fixed at ``loc``, for guides over a subset of the latents."""


class StoredPrecision(nn.Module):
    """A precision as a module: ``kind(*tensors)``, with the tensors as buffers."""

    def __init__(self, kind: Callable[..., Any], *tensors: Tensor) -> None:
        super().__init__()
        self.kind, self.names = kind, [f"tensor_{number}" for number in range(len(tensors))]
        for name, value in zip(self.names, tensors, strict=True):
            self.register_buffer(name, value.detach().clone())

    def forward(self) -> Any:
        return self.kind(*(getattr(self, name) for name in self.names))


class JointBlock(nn.Module):
    """One Gaussian N(loc, precision^-1) over several sites.

    :param latents: the sites, in the order in which the vector holds them.
    :param loc: (p,).
    :param stored: a module of buffers whose call makes the precision, an object with ``dense``,
        ``logdet()``, ``quadratic(x)`` and ``sample(S)`` as ``curvature.structures.base.Precision``.
    :param diagonal: the diagonal of the precision (p,); by default computed from it.
    """

    loc: Tensor
    precision_diagonal: Tensor

    def __init__(
        self,
        latents: Iterable[Latent],
        loc: Tensor,
        stored: nn.Module,
        diagonal: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.layout = Layout(list(latents))
        self.latents = tuple(self.layout.latents.values())
        self.register_buffer("loc", loc.detach().clone())
        self.stored, self._precision = stored, None
        diagonal = self.precision_matrix().diagonal() if diagonal is None else diagonal
        self.register_buffer("precision_diagonal", diagonal.detach().clone())

    @property
    def precision(self) -> Any:
        """The precision, whose factors are computed once, where no transform of ``torch.func`` or
        trace would keep them as its own."""
        if self._precision is not None:
            return self._precision
        with torch.no_grad():
            precision = self.stored()
            if not is_transformed():
                precision.logdet(), precision.quadratic(torch.zeros_like(self.loc))
                self._precision = precision
        return precision

    def distribution(self, latent: Latent, run: "_PriorRun") -> Any:
        _ = self.precision  # in a first run, before any transform
        return JointSite(self, latent, run)

    def log_prob(self, values: dict[str, Tensor]) -> Tensor:
        """log p(w) in nats for values (*shape) of all sites, a scalar."""
        vector = self.layout.unconstrain(values)
        log_det = self.layout.constrain(vector)[1]
        precision = self.precision
        quadratic = precision.quadratic(vector - self.loc).to(vector)
        constant = self.layout.size * math.log(2 * math.pi)
        return 0.5 * (precision.logdet().to(vector) - quadratic - constant) - log_det

    def sample(self, num_samples: int) -> dict[str, Tensor]:
        """Draws of the sites, site -> (num_samples, *shape)."""
        draws = self.loc + self.precision.sample(num_samples).to(self.loc)
        return self.layout.constrain(draws)[0]

    @torch.enable_grad()
    def precision_matrix(self) -> Tensor:
        """The dense precision (p, p): half the gradient of x' P x, row by row."""
        rows = torch.eye(self.layout.size, dtype=self.loc.dtype, device=self.loc.device)
        rows.requires_grad_()
        (gradient,) = torch.autograd.grad(self.precision.quadratic(rows).sum(), rows)
        return 0.5 * gradient

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._precision = None
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._precision = None
        super()._load_from_state_dict(*args, **kwargs)


class JointSite(TorchDistribution):
    """One site of a ``JointBlock``.

    The block's last site in a run has the block's whole density, in equal parts for the cells of
    the plates that it is in. In each run the block is drawn once for all its sites.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, block: JointBlock, latent: Latent, run: "_PriorRun") -> None:
        self.block, self.latent, self.run = block, latent, run
        events = len(latent.shape) - latent.event_dim
        super().__init__(latent.shape[:events], latent.shape[events:], validate_args=False)

    @property
    def support(self) -> Any:
        return self.latent.support

    def log_prob(self, value: Tensor) -> Tensor:
        if self.latent.name != self.run.last[self.block]:
            return value.new_zeros(self.batch_shape)
        values = {latent.name: self.run.values[latent.name] for latent in self.block.latents}
        total = self.block.log_prob({**values, self.latent.name: value})
        return (total / self.batch_shape.numel()).expand(self.batch_shape)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        shape = torch.Size(sample_shape)
        if shape:
            draws = self.block.sample(shape.numel())[self.latent.name]
            return draws.reshape(shape + self.batch_shape + self.event_shape)
        if self.block not in self.run.draws:
            self.run.draws[self.block] = self.block.sample(1)
        return self.run.draws[self.block][self.latent.name][0]


class _PriorRun(OneThread):
    """One run of a program under a ``GaussianPrior``.

    ``values`` holds the values of the sites so far, ``draws`` the joint draws of the blocks, and
    ``last`` the latest site of each block.
    """

    def __init__(self, prior: "GaussianPrior") -> None:
        super().__init__()
        self.prior = prior
        self.values: dict[str, Tensor] = {}
        self.draws: dict[nn.Module, dict[str, Tensor]] = {}
        self.last: dict[nn.Module, str] = {}
        self._met: set[str] = set()

    def _process_message(self, msg: Any) -> None:
        self.check_thread(msg)
        if msg["type"] != "sample" or site_is_subsample(msg):
            return
        block = self.prior.blocks_by_site.get(msg["name"])
        if block is None:
            return
        self._met.add(msg["name"])
        if msg["is_observed"]:
            raise ValueError(
                f"the prior is about the latent site '{msg['name']}', which the program observes"
            )
        latent = next(v for v in block.latents if v.name == msg["name"])
        if msg["fn"].shape() != latent.shape:
            raise ValueError(
                f"the prior of site '{latent.name}' has shape {tuple(latent.shape)}, the program "
                f"samples one of shape {tuple(msg['fn'].shape())}: take the prior from a guide "
                "for the same program"
            )
        if isinstance(block, FixedBlock):
            value = _constrained(latent, block.loc)
            msg["fn"] = dist.Delta(value, event_dim=latent.event_dim).mask(False)
            msg["value"], msg["is_observed"] = value, True
            msg["infer"] = {**msg["infer"], "_deterministic": True}
            return
        self.last[block] = latent.name
        fn = block.distribution(latent, self)
        msg["fn"] = fn.to_event(latent.event_dim - fn.event_dim)
        msg["infer"] = {**msg["infer"], INIT_KEY: self.prior.center(latent.name)}

    def _postprocess_message(self, msg: Any) -> None:
        if msg["type"] == "sample" and msg["name"] in self.prior.blocks_by_site:
            self.values[msg["name"]] = msg["value"]

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        missing = [name for name in self.prior.blocks_by_site if name not in self._met]
        if kind is None and missing:
            raise ValueError(
                f"the prior is about the site '{missing[0]}', which the program does not sample: "
                "take the prior from a guide for the same program"
            )


class GaussianPrior(nn.Module):
    """Independent Gaussian blocks over a program's latents.

    It is a copy of the guide's distribution, which further training of the guide does not change.
    Use it by ``model.update_prior(prior)`` or ``nn.with_prior(program, prior)``. Latents
    without a block, such as the output layer of a new task, keep the program's prior.

    :param blocks: the blocks; each site is in at most one of them.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(blocks)

    @property
    def blocks_by_site(self) -> dict[str, Any]:
        return {latent.name: block for block in self.blocks for latent in block.latents}

    def center(self, site: str) -> Tensor:
        """T(mean of u) of one site, the starting point of guides."""
        block = self.blocks_by_site[site]
        if isinstance(block, JointBlock):
            return block.layout.constrain(block.loc)[0][site]
        return _constrained(block.latents[0], block.loc)

    def run(self) -> Messenger:
        """A handler for one run of the program."""
        return _PriorRun(self)


def _constrained(latent: Latent, value: Tensor) -> Tensor:
    return value if latent.transform is None else latent.transform(value)


def independent_prior(layout: Layout, loc: Tensor, scale: Tensor) -> GaussianPrior:
    """The prior u ~ Normal(loc, scale^2) with independent numbers; loc and scale are (P,)."""
    locs, scales = layout.unflatten(loc), layout.unflatten(scale)
    return GaussianPrior(
        NormalBlock(latent, loc=locs[name], scale=scales[name])
        for name, latent in layout.latents.items()
    )


def joint_prior(
    subset: Subset, loc: Tensor, stored: nn.Module, diagonal: Tensor | None = None
) -> GaussianPrior:
    """The prior u ~ N(loc, precision^-1) on a subset of whole sites; the others are fixed at
    ``loc``.

    :param loc: (P,).
    :param stored: makes the precision over the subset, as in ``JointBlock``.
    :raises ValueError: if the subset holds only some of a site's entries.
    """
    layout = subset.layout
    parts = [name for name, entries in subset.chosen.items() if entries is not None]
    if parts:
        raise ValueError(
            f"the posterior covers {len(subset.chosen[parts[0]])} of "  # type: ignore[arg-type]
            f"{layout.latents[parts[0]].size} entries of site '{parts[0]}' and fixes the others: "
            "as a prior it needs whole sites, such as subset=[names]"
        )
    blocks: list[nn.Module] = [
        JointBlock([layout.latents[n] for n in subset.parts], subset.take(loc), stored, diagonal)
    ]
    values = layout.unflatten(loc)
    for name, latent in layout.latents.items():
        if name not in subset.parts:
            blocks.append(FixedBlock(latent, loc=values[name]))
    return GaussianPrior(blocks)


class UnderPrior(nn.Module):
    """A program with a Gaussian as its prior."""

    def __init__(self, model: Callable, prior: GaussianPrior) -> None:
        super().__init__()
        self.model, self.prior = model, prior

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.prior.run():
            return self.model(*args, **kwargs)


class TaskPrior:
    """Mixin of programs whose prior can be replaced by a posterior: ``update_prior``."""

    _modules: dict[str, Any]

    def update_prior(self, posterior: Any) -> Self:
        """Replace the prior by a posterior for the next task, in place; return the program.

        The current density of ``posterior`` becomes the prior of the program's latents, for ELBOs,
        MCMC and Laplace approximations. Latents that it does not cover keep their prior; latents
        that it fixes stay fixed. New guides start at the posterior's mean. Hyperparameters of the
        networks' priors (``PyroParam``s) have no effect any more and become fixed numbers. Save a
        Laplace guide, and compute its evidence, before this call: they read the program's prior.
        ``nn.with_prior`` leaves the program unchanged.

        :param posterior: a Gaussian guide, or its ``as_prior()``.
        :raises TypeError: for a posterior that is not Gaussian.
        """
        prior = as_gaussian_prior(posterior)
        module: Any = self
        for part in module.modules():
            if hasattr(part, "freeze_hyperparameters"):
                part.freeze_hyperparameters()
        module._modules["task_prior"] = prior
        return self

    def _under_task_prior(self) -> AbstractContextManager[Any]:
        prior = self._modules.get("task_prior")
        return nullcontext() if prior is None else prior.run()


def replaced_priors(
    modules: Iterable[nn.Module],
) -> tuple[tuple[nn.Module, GaussianPrior | None], ...]:
    """The programs among modules, and what ``update_prior`` has made their prior; None for their
    own."""
    return tuple((m, getattr(m, "task_prior", None)) for m in modules if isinstance(m, TaskPrior))


def as_gaussian_prior(posterior: Any) -> GaussianPrior:
    """A guide's ``as_prior()``, or a copy of a prior, since a program may move it to another
    device.

    :raises TypeError: for other values.
    """
    if isinstance(posterior, GaussianPrior):
        return copy.deepcopy(posterior)
    if not hasattr(posterior, "as_prior"):
        raise TypeError(
            f"a prior is made of a Gaussian guide or its as_prior(), got {type(posterior).__name__}"
        )
    return posterior.as_prior()
