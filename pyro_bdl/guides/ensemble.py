"""Deep ensembles: several MAP estimates, trained at once."""

from collections.abc import Callable
from typing import Any, ClassVar

import pyro.distributions as dist
import torch
from torch import Tensor, nn

from pyro_bdl.errors import warn
from pyro_bdl.guides.base import Guide, at_full_size
from pyro_bdl.guides.family import empirical_quantiles
from pyro_bdl.guides.kl import normal_priors
from pyro_bdl.guides.laplace import AutoLaplaceGGN
from pyro_bdl.guides.mixture import MixtureGuide
from pyro_bdl.guides.statements import point, sample_sites, vectors_in_plates
from pyro_bdl.init import init_afresh, reset_of, start_at
from pyro_bdl.program.batch_norm import layers_called
from pyro_bdl.program.layout import Latent
from pyro_bdl.program.network_sites import OWNER_KEY
from pyro_bdl.program.program import Program, trace_once
from pyro_bdl.program.trace import record
from pyro_bdl.utils import bibliography
from pyro_bdl.utils.one_thread import Hidden
from pyro_bdl.utils.validation import whole_number

_SHOWN = 4  # names in a message


class AutoEnsemble(Guide):
    """K point masses with equal weights, each trained from its own initialization
    (Lakshminarayanan, Pritzel & Blundell 2017).

    Draws take the members in turn. An ELBO with ``num_particles=K`` therefore trains all members in
    every step, at once by ``vmap``; ``training.train`` does so by default. With fewer particles
    each step trains some members, chosen at random, so that K times as many steps are needed with
    one particle; the ELBOs of this package warn. The parameter is ``locs`` (K, P), in unconstrained
    units. The objective is the MAP of the unconstrained vector, as for ``AutoLaplaceGGN``.

    Example::

        >>> x, y = torch.linspace(-1, 1, 20)[:, None], torch.linspace(-2, 2, 20)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> model = bdl.models.Regression(bdl.bayesianize(net), noise=0.1)
        >>> guide = bdl.guides.AutoEnsemble(model, size=3)
        >>> training = bdl.training.train(model, guide, x, y, steps=50)
        >>> guide.locs.shape
        torch.Size([3, 25])

    :param model: a Pyro program with continuous latents.
    :param size: K, the number of members.
    :param anchored: whether member k has the prior Normal(a_k, t^2) in place of Normal(m, t^2),
        with an anchor a_k ~ Normal(m, t^2) of its own (Pearce et al. 2020), so that members differ
        where the data say little. In a linear model with posterior precision H and prior precision
        L, members at their optima have the posterior's mean and the covariance H^-1 L H^-1; it is
        H^-1 for anchors of covariance L^-1 H L^-1 (``guide.anchors``, (K, P)). Positive latents,
        such as a noise, keep their prior.
    :param init_loc_fn: where each member starts; by default each member's weights are drawn anew by
        the ``reset_parameters`` of the network's modules (``init_afresh``). Parameters of modules
        without it are the same in all members at first, with a warning.
    :param options: ``create_plates``, see ``Guide``.
    :raises ValueError: for a size below 1; at the first run, for anchors under another prior than
        Normals with fixed means and scales.
    """

    papers: ClassVar[tuple[str, ...]] = (
        bibliography.DEEP_ENSEMBLES,
        bibliography.ANCHORED_ENSEMBLES,
    )
    anchors: Tensor
    prior_loc: Tensor
    prior_precision: Tensor

    starts_at_a_vector = False

    def __init__(
        self,
        model: Callable,
        *,
        size: int = 5,
        anchored: bool = False,
        init_loc_fn: Callable = init_afresh,
        **options: Any,
    ) -> None:
        super().__init__(model, init_loc_fn=init_loc_fn, **options)
        self.size, self.anchored = whole_number(size, "size"), anchored
        self._init = init_loc_fn
        self._alike: list[str] = []  # sites that all members start at the same values of

    def options(self) -> dict[str, Any]:
        return {"size": self.size, "anchored": self.anchored}

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        is_new = self._loaded is None
        with layers_called(self.program_model) as layers:
            self._starts = [self._start(args, kwargs) for _ in range(1, self.size)]
        super()._setup_prototype(*args, **kwargs)
        del self._starts
        if self._alike and is_new:
            names = ", ".join(map(repr, self._alike[:_SHOWN])) + ", ..." * (
                len(self._alike) > _SHOWN
            )
            warn(
                f"all members start with the same values of {names}, since the modules that hold "
                "them have no method reset_parameters() to draw them anew: define it, or give an "
                "init_loc_fn",
                "members-alike",
            )
        if layers:
            warn(
                "the running statistics of the network's BatchNorm layers cannot be those of every "
                "member: predict by Predictive(model, guide, batch_norm_data=(x, y)), which "
                "computes each member's own from the training data",
                "batchnorm",
            )

    def _start(self, args: tuple, kwargs: dict) -> Tensor:
        started = start_at(self._init)(self.program_model)
        first = trace_once(started, args, kwargs, self._prototype_hide_fn)
        if init_afresh in (self._init, getattr(self._init, "func", None)):
            nodes = first.trace.iter_stochastic_nodes()
            owners = {n: node["infer"].get(OWNER_KEY) for n, node in nodes}
            self._alike = [n for n, owner in owners.items() if owner and reset_of(owner[0]) is None]
        return at_full_size(Program.from_run(started, first, args, kwargs), first.trace)[0]

    def create_parameters(self, start: Tensor) -> None:
        self.locs = nn.Parameter(torch.stack([start, *self._starts]))
        if self.anchored:
            loc, scale = self._normal_prior(start)
            self.register_buffer("prior_loc", loc)
            self.register_buffer("prior_precision", torch.where(scale > 0, scale**-2, 0.0))
            self.register_buffer("anchors", loc + scale * torch.randn_like(self.locs))

    def _normal_prior(self, start: Tensor) -> tuple[Tensor, Tensor]:
        """Means and scales (P,) of the Normal priors; scale 0 for positive latents."""
        layout = self.require_layout()
        with torch.enable_grad(), Hidden():
            latents, _ = layout.constrain(start.detach().requires_grad_())
            run = record(self.program_model, latents, *self.example_rows)
        loc, scale = torch.zeros_like(start), torch.zeros_like(start)
        normals = normal_priors(run.latents)
        for name, latent in layout.latents.items():
            if latent.transform is not None:
                continue
            normal, where = normals.get(name), layout.slices[name]
            if normal is None or normal.loc.requires_grad or normal.scale.requires_grad:
                raise ValueError(
                    f"anchored=True is for Normal priors with fixed means and scales, and that of "
                    f"'{name}' is another: take anchored=False"
                )
            loc[where], scale[where] = normal.loc.reshape(-1), normal.scale.reshape(-1)
        return loc, scale

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Emit a Delta at every site: a member chosen at random, or members in turn for the cells
        of the plates around the guide."""
        self.prototype(*args, **kwargs)
        if not self.anchored:
            return sample_sites(self, args, kwargs, vectors_in_plates(self))
        draws, anchors = vectors_in_plates(self, self._with_anchors).chunk(2, -1)
        prior = self.prior_loc, self.prior_precision
        return sample_sites(self, args, kwargs, draws, anchors, *prior)

    def site_distribution(self, latent: Latent, *parts: Tensor) -> Any:
        delta = point(latent, parts[0], change=True)
        if len(parts) == 1:
            return delta
        batch = delta.v.shape[: delta.v.dim() - latent.event_dim]
        density = delta.log_density + _offsets(*parts).reshape(*batch, -1).sum(-1)
        return dist.Delta(delta.v, log_density=density, event_dim=latent.event_dim)

    @property
    def num_members(self) -> int:  # type: ignore[override]
        """K: with as many draws a step trains every member."""
        return self.size

    @property
    def has_density(self) -> bool:
        return False

    @property
    def independent_draws(self) -> bool:
        return False

    def sample_vectors(self, num_samples: int) -> Tensor:
        """Draw members in turn; for fewer than K draws choose members at random."""
        return self.parameter("locs")[self._members(num_samples)]

    def _members(self, num_samples: int) -> Tensor:
        device = self.parameter("locs").device
        if num_samples < self.size:
            return torch.randperm(self.size, device=device)[:num_samples]
        return torch.arange(num_samples, device=device) % self.size

    def _with_anchors(self, num_samples: int) -> Tensor:
        """Draws and their members' anchors side by side, (num_samples, 2 P)."""
        members = self._members(num_samples)
        return torch.cat([self.parameter("locs")[members], self.anchors[members]], -1)

    def sample_with_offset(self, num_samples: int) -> tuple[Tensor, Tensor | float]:
        if not self.anchored:
            return super().sample_with_offset(num_samples)
        draws, anchors = self._with_anchors(num_samples).chunk(2, -1)
        return draws, _offsets(draws, anchors, self.prior_loc, self.prior_precision).sum(-1).mean()

    def log_density(self, vector: Tensor, log_det: Tensor) -> Tensor:
        """-log |det dT/du|: a point mass, as an objective."""
        return -log_det

    def location(self) -> Tensor:
        """The members' mean (P,)."""
        return self.parameter("locs").mean(0)

    def variances(self) -> Tensor:
        """The members' variances (P,)."""
        return self.parameter("locs").var(0, correction=0)

    def vector_quantiles(self, levels: Tensor) -> Tensor:
        return empirical_quantiles(self.parameter("locs"), levels)

    def member(self, number: int) -> dict[str, Tensor]:
        """The latents of one member, by site."""
        return self.require_layout().constrain(self.parameter("locs")[number])[0]

    def as_guides(self, kind: type[Guide] = AutoLaplaceGGN, **options: Any) -> list[Any]:
        """Each member as the starting point of a separate guide; ``MixtureGuide`` can combine
        these.

        :param kind: the class of these guides, which must start from a vector: ``AutoLaplaceGGN``,
            ``AutoSubnetwork``, ``AutoSWAG``, ``AutoMeanField``, ...
        :param options: arguments of the class.
        :raises TypeError: for a class that has several members itself, or fits itself in its
            first run.
        """
        if not kind.starts_at_a_vector:
            raise TypeError(
                f"{kind.__name__} starts from several vectors, or finds its own way with the data: "
                "give a kind that starts from one, such as AutoLaplaceGGN or AutoMeanField"
            )
        model = self.program_model
        self.require_layout()
        guides = []
        for vector in self.parameter("locs").detach():
            guide = kind(model, create_plates=self.create_plates, **options)
            guide._take_structure(self)
            guide.create_parameters(vector)
            guides.append(guide)
        return guides

    def laplace_approximation(
        self, data: Any = None, *, progress: bool | None = None, **options: Any
    ) -> MixtureGuide:
        """The mixture of the members' Laplace approximations (Eschenhagen et al. 2021).

        :param data: as in ``AutoLaplaceGGN.laplace_approximation``.
        :param progress: show a bar over batches; by default in terminals and notebooks.
        :param options: arguments of ``AutoLaplaceGGN``, such as ``structure``.
        """
        batches = self.batches(data)
        args, kwargs = batches.first()
        self.prototype(*args, **kwargs)
        guides = self.as_guides(AutoLaplaceGGN, **options)
        return MixtureGuide([g.laplace_approximation(batches, progress=progress) for g in guides])


def _offsets(vectors: Tensor, anchors: Tensor, loc: Tensor, precision: Tensor) -> Tensor:
    """log p(u) - log p(u + loc - anchor) of each number, for independent Normals p."""
    return 0.5 * precision * ((vectors - anchors).square() - (vectors - loc).square())
