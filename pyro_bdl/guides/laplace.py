"""The Laplace approximation: a Gaussian at the maximum a posteriori, from curvature."""

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.curvature.fit import check_factors, fit_curvature, warn_of_randomness
from pyro_bdl.curvature.hyperparameters import ParameterReading, few_rows, noise_site, read
from pyro_bdl.curvature.prior import PriorPrecision, prior_precision
from pyro_bdl.curvature.structures.base import Precision, log_prob
from pyro_bdl.distributions.take_apart import base_distribution
from pyro_bdl.errors import BdlWarning, UnsupportedProgramError
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.joint import JointGuide
from pyro_bdl.guides.point import UnconstrainedMAP
from pyro_bdl.init import init_to_network
from pyro_bdl.program.argument_errors import explained
from pyro_bdl.program.batch_norm import layers_called
from pyro_bdl.program.batches import Batches
from pyro_bdl.program.gaussian_prior import GaussianPrior, independent_prior, joint_prior
from pyro_bdl.program.hidden_sites import require_visible_latents
from pyro_bdl.program.subset import Subset, select
from pyro_bdl.program.validation import check_finite


class AutoLaplaceGGN(UnconstrainedMAP):
    """Trains as MAP; ``laplace_approximation(data)`` then returns a Gaussian guide around it.

    The MAP is that of the unconstrained vector u, whose density log p(T(u), y) + log |det dT/du|
    the Gaussian approximates: N(u*, (sum_n J_n' F_n J_n + prior precision)^-1), with J_n the
    Jacobian of the observation distribution's parameters and F_n their Fisher information
    (MacKay 1992; Martens & Grosse 2015; Immer et al. 2021, section 3).

    :param model: a Pyro program with continuous latents.
    :param structure: "kron" (KFAC), "ekfac", "full", "diag" or "low_rank".
    :param curvature: "ggn"; "ggn-mc", from ``num_draws`` drawn observations per datum;
        "empirical-fisher"; or "hessian" (for "full" only).
    :param subset: which latents get a covariance, the others staying at the MAP: names or
        patterns, modules of the network, a predicate ``(name, latent) -> bool``, positions in the
        flat vector, or "last-layer"; None for all.
    :param num_draws: observations drawn per datum: of "ggn-mc", 1 by default; of "ggn", 512 by
        default, where the observed distribution's Fisher information has no closed form and is
        estimated (``curvature.fisher.cell_roots`` lists those that have one). The estimate's
        error falls with the root of draws times data.
    :param rank: eigenpairs of "low_rank".
    :param reduce: how "kron" and "ekfac" treat weight sharing, see ``KroneckerCurvature``.
    :param init_loc_fn: where u starts; by default the network's own values.
    :param create_plates: as in Pyro's autoguides.
    :raises ValueError: for an unknown structure or curvature.
    """

    def __init__(
        self,
        model: Callable,
        *,
        structure: str = "kron",
        curvature: str = "ggn",
        subset: Any = None,
        num_draws: int | None = None,
        rank: int = 50,
        reduce: bool = False,
        init_loc_fn: Callable = init_to_network,
        create_plates: Callable | None = None,
    ) -> None:
        self.__dict__["config"] = CurvatureConfig(
            structure, curvature, num_draws, rank=rank, reduce=reduce
        )
        super().__init__(model, init_loc_fn=init_loc_fn, create_plates=create_plates)
        self.__dict__["subset"] = subset

    def _shared_on_copy(self) -> tuple[str, ...]:
        return (*super()._shared_on_copy(), "subset")  # modules in it are the program's own

    def laplace_approximation(
        self, data: Any, *, progress: bool = False, **changes: Any
    ) -> "LaplaceGuide":
        """The Gaussian posterior around the present value; nothing of the model is changed.

        The program runs in evaluation mode, whatever mode it is in, and is put back into its own:
        dropout layers drop nothing, and BatchNorm layers compute with their running statistics,
        since those of a batch would make its data depend on each other. A layer that has only
        these (``track_running_stats=False``) is refused.

        :param data: the program's arguments ``(x, y)``, or an iterable of batches of them; each
            datum counts once.
        :param progress: show a bar over batches.
        :param changes: ``structure``, ``curvature``, ``subset``, ``num_draws``, ``rank`` or
            ``reduce`` for this approximation alone.
        :raises MemoryError: where the structure cannot fit in memory.
        :raises UnsupportedProgramError: where latents stand in subsampled plates.
        :raises ValueError: for an empty iterable, a missing target, one outside of its support
            (rows are counted over all batches), a singular precision.
        :raises TypeError: for data that are no tensors, or of another dtype than the weights.
        """
        subset = changes.pop("subset", self.subset)
        config = replace(self.config, **changes)
        batches = Batches(data)
        batches.together(lambda: self._begin(*batches.first()))
        if self.subsampled:
            raise UnsupportedProgramError(
                f"the latent site '{min(self.subsampled)}' stands in a subsampled plate, so that "
                "no run of the program holds all latents: call the program with all of its data, "
                "or use AutoMeanField"
            )
        return LaplaceGuide(self, config, subset, batches, progress=progress)

    def _begin(self, args: tuple, kwargs: dict[str, Any]) -> None:
        check_finite(self.program_model, args, kwargs)
        require_visible_latents(self.program_model, args, kwargs)
        self.prototype(*args, **kwargs)


class LaplaceGuide(JointGuide):
    """A Gaussian over the unconstrained latents: N(loc, precision^-1) on a subset of them, the
    others fixed at ``loc``.

    ``AutoLaplaceGGN.laplace_approximation`` makes it. ``curvature`` holds the likelihood's part of
    the precision, ``prior`` the prior's; ``refresh()`` follows changes of the program's
    hyperparameters and ``update(data)`` adds data.
    """

    def __init__(
        self,
        source: Guide,
        config: CurvatureConfig,
        selection: Any,
        batches: Batches,
        *,
        check: bool = True,
        progress: bool = False,
    ) -> None:
        super().__init__(source)
        model, layout = source.program_model, source.require_layout()
        self.config = config
        self.__dict__["few"] = batches.first()
        self.register_buffer("loc", source.location().detach().clone())
        if isinstance(selection, str) and selection == "last-layer":
            selection = last_layer(model, layout, self.loc, *self.few)
        self.__dict__["subset"] = select(layout, selection, model=model)
        with explained(model, *self.few):
            gradient = self._fit(batches, None, progress)
        if check:
            self._check_maximum(gradient)

    num_data: int
    passes: list[tuple[Batches, float]]  # the data, and by what the sums over them count

    def _fit(self, batches: Batches, before: Any, progress: bool) -> Tensor:
        """Take up data; returns the gradient of the log joint density in the subset (p,)."""
        model = self.program_model
        fitted = fit_curvature(
            model, self.subset, self.loc, batches, self.config,
            before=before, progress=progress,
        )  # fmt: skip
        self.curvature = fitted.curvature
        self.num_data = fitted.num_data + (self.num_data if before is not None else 0)
        for name in ("log_likelihood", "squares", "cells"):
            earlier = getattr(self, name) if before is not None else 0.0
            self.register_buffer(name, getattr(fitted, name).to(self.loc.device) + earlier)
        earlier = self.passes if before is not None else []
        self.__dict__["passes"] = [*earlier, (batches, fitted.factor)]
        if before is None:
            self.__dict__["few"] = few_rows(model, self.require_layout(), self.loc, self.few)
            warn_of_randomness(model, self.subset, self.loc, *self.few)
            self.register_buffer("noise_factor", torch.ones_like(self.squares))
            self.register_buffer("reference_noise", None)
            self.reference_noise = self._noise()
        return fitted.gradient + self.refresh()

    def update(self, data: Any, *, progress: bool = False) -> "LaplaceGuide":
        """Add the curvature of more data, at the same point; returns itself.

        :param data: as in ``laplace_approximation``.
        :raises ValueError: where the noise of a Normal observation is not what it was in the fit.
        """
        before, noise = self.reference_noise, self._noise()
        if before is not None and noise is not None and not torch.allclose(noise, before):
            raise ValueError(
                "the noise has changed since the curvature was computed, and that of more data "
                "would not fit to it: call laplace_approximation with all data"
            )
        self._fit(Batches(data), self.curvature, progress)
        return self

    def _read(self) -> ParameterReading:
        model = self.program_model
        return read(model, self.subset, self.loc, *self.few)

    def _noise(self) -> Tensor | None:
        """The noise of the program's only observed site, where it is a parameter."""
        site = noise_site(self._read())
        if site is None:
            return None
        scale: Any = base_distribution(site.distribution)
        return scale.scale.detach().clone() if scale.scale.requires_grad else None

    @torch.enable_grad()
    def refresh(self) -> Tensor:
        """Follow the program's present hyperparameters: the prior's precision, and the noise of a
        Normal observation; returns the gradient of the log prior in the subset (p,)."""
        reading = self._read()
        run, leaves = reading.run, reading.leaves
        check_factors(run, self.config)
        self._keep_prior(prior_precision(run, leaves, self.subset))
        if self.reference_noise is not None:
            noise = self._noise()
            assert noise is not None
            self.noise_factor = (self.reference_noise / noise).square().mean().to(self.squares)
        total = run.log_prior()
        found: list[Tensor | None] = [None] * len(leaves)
        flat = torch.cat([leaf.reshape(-1) for leaf in leaves.values()])
        total = total + self.require_layout().constrain(flat)[1]
        if total.requires_grad:
            found = list(torch.autograd.grad(total, list(leaves.values()), allow_unused=True))
        gradients = [
            (torch.zeros_like(leaf) if g is None else g).reshape(-1)
            for g, leaf in zip(found, leaves.values(), strict=True)
        ]
        return self.subset.take(torch.cat(gradients))

    def _keep_prior(self, prior: PriorPrecision) -> None:
        self.register_buffer("prior_diagonal", prior.diagonal.detach())
        for name, value in (("prior_indices", prior.indices), ("prior_dense", prior.dense)):
            self.register_buffer(name, None if value is None else value.detach())
        self._forget()

    @property
    def prior(self) -> PriorPrecision:
        """The prior's precision that the posterior holds."""
        return PriorPrecision(self.prior_diagonal, self.prior_indices, self.prior_dense)

    @property
    def precision(self) -> Precision:
        """The posterior precision in the subset: curvature plus prior."""
        if "_precision" not in self.__dict__:
            with torch.no_grad():
                factor = self.curvature_factor(self.noise_factor).to(self.prior_diagonal)
                self.__dict__["_precision"] = self.curvature.with_prior(self.prior, factor)
        return self.__dict__["_precision"]

    def curvature_factor(self, noise_factor: Tensor) -> Tensor:
        """The factor of the curvature after a change of the noise: scores are r / noise^2."""
        empirical = self.config.curvature == "empirical-fisher"
        return noise_factor.square() if empirical else noise_factor

    def _forget(self) -> None:
        self.__dict__.pop("_precision", None)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._forget()
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, function: Callable, recurse: bool = True) -> Any:
        self._forget()
        self.__dict__["few"] = tree_map_only(Tensor, function, self.few)
        return super()._apply(function, recurse)

    def _shared_on_copy(self) -> tuple[str, ...]:
        return (*super()._shared_on_copy(), "few", "passes")

    def _check_maximum(self, gradient: Tensor) -> None:
        """Warn where a Newton step would still gain a lot."""
        values = self.precision.variances()
        gain = 0.5 * float((gradient.square() * values.to(gradient)).sum())
        if gain > 1.0 + 0.1 * self.subset.size:
            with layers_called((self.program_model,)) as layers:
                self._read()
            ending = (
                ", the last steps after model.eval(): a BatchNorm layer is in training mode, and "
                "the approximation computes with its running statistics"
            )
            warnings.warn(
                "the guide is not at a maximum: the gradient's norm is "
                f"{float(gradient.norm()):.3g} and a step would gain about {gain:.3g} nats; train "
                "longer, with a learning rate that falls to zero, before the Laplace approximation"
                + (ending if any(layer.training for layer in layers) else ""),
                BdlWarning,
                stacklevel=4,
            )

    # The guide

    @property
    def has_density(self) -> bool:
        return self.subset.complete

    def location(self) -> Tensor:
        return self.loc

    def sample_vectors(self, num_samples: int) -> Tensor:
        draws = self.precision.sample(num_samples).to(self.loc)
        return self.subset.put(self.loc, self.subset.take(self.loc) + draws)

    def log_density(self, vector: Tensor, log_det: Tensor) -> Tensor:
        """log q(w) of the subset's latents, given the others."""
        offset = self.subset.take(vector - self.loc)
        return log_prob(self.precision, offset).to(vector) - log_det

    def entropy(self, vector: Tensor, log_det: Tensor) -> Tensor:
        constant = self.subset.size * (1.0 + math.log(2 * math.pi))
        return (0.5 * (constant - self.precision.logdet())).to(log_det) + log_det

    def as_prior(self) -> GaussianPrior:
        """One Gaussian over the subset, the other latents fixed; see ``Guide.as_prior``.

        :raises ValueError: where the subset holds a part of a site's entries.
        """
        precision = copy.deepcopy(self.precision)
        if precision.independent and self.subset.complete:
            scale = precision.variances().sqrt()
            return independent_prior(self.require_layout(), self.loc, scale)
        with torch.no_grad():
            factor = self.curvature_factor(self.noise_factor).to(self.prior_diagonal)
            diagonal = self.curvature.diagonal() * factor + self.prior_diagonal
        return joint_prior(self.subset, self.loc, precision, diagonal)

    def variances(self) -> Tensor:
        """The marginal variances of the unconstrained vector (P,), zero outside the subset."""
        variances = self.precision.variances().to(self.loc)
        return self.subset.put(torch.zeros_like(self.loc), variances)


def last_layer(model: Callable, layout: Any, vector: Tensor, args: tuple, kwargs: Any) -> list[str]:
    """The sites of the last linear operation of a program, and of a bias added to its output.

    The operation is a product with a weight matrix or with a vector of weights.

    :raises ValueError: where no latent enters a linear operation.
    """
    from pyro_bdl.curvature.jacobian.linearization import Linearization

    at = Linearization(model, Subset(layout), vector, args, kwargs)
    uses, vectors = at.uses, at.vector_products
    numbers = [n for n, use in enumerate(uses) if use.kind == "product" and use.inputs is not None]
    if vectors and vectors[-1].position > (numbers[-1] if numbers else -1):
        site, start, shape = vectors[-1]
        added = [u for u in uses[start:] if u.inputs is None and u.output_shape == shape]
        return list(dict.fromkeys([site, *(use.site for use in added)]))
    if not numbers:
        raise ValueError(
            'subset="last-layer" needs a program in which a latent is a weight matrix, or a vector '
            "of weights in a product (inputs @ weights): name the sites of the last layer instead, "
            "as in subset=['weights']"
        )
    last = uses[numbers[-1]]

    def is_added(use: Any) -> bool:
        bias = use.kind == "product" and use.inputs is None
        return bias and use.output_shape == last.output_shape

    parts = [use for use in uses if use.edge == last.edge]
    parts += [use for use in uses[numbers[-1] + 1 :] if is_added(use)]
    return list(dict.fromkeys(use.site for use in parts))
