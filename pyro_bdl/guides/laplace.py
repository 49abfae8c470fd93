"""The Laplace approximation: a Gaussian at the MAP estimate, with the curvature as precision."""

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn

from pyro_bdl.curvature.automatic_structure import with_chosen_structure
from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.curvature.factor_statements import check_factors
from pyro_bdl.curvature.fit import SCALED_UP, fit_curvature
from pyro_bdl.curvature.hyperparameters import (
    ParameterReading,
    few_rows,
    followed,
    learned_noise,
    read,
)
from pyro_bdl.curvature.known_information import with_known_information
from pyro_bdl.curvature.prior import PriorPrecision, prior_precision
from pyro_bdl.curvature.structures.base import Precision, log_prob
from pyro_bdl.errors import BdlWarning, UnsupportedProgramError
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.held_out import HeldOut, search
from pyro_bdl.guides.joint import JointGuide, restored_source
from pyro_bdl.guides.point import UnconstrainedMAP
from pyro_bdl.init import init_to_network
from pyro_bdl.program.batch_norm import layers_called
from pyro_bdl.program.batches import Batch, Batches
from pyro_bdl.program.check import check_finite
from pyro_bdl.program.gaussian_prior import GaussianPrior, independent_prior, joint_prior
from pyro_bdl.program.program import Program
from pyro_bdl.program.subset import Subset, select
from pyro_bdl.utils.random_state import own_randomness
from pyro_bdl.utils.trees import tree_map_only

_SMALLEST = 1e-30  # of squares that are divided by


class AutoLaplaceGGN(UnconstrainedMAP):
    """A guide that trains the MAP; ``laplace_approximation(data)`` returns a Gaussian guide around
    it.

    The MAP u* maximizes the density of the unconstrained vector, log p(T(u), y) + log |det dT/du|.
    The Gaussian is N(u*, (sum_n J_n' F_n J_n + prior precision)^-1), with J_n the Jacobian of the
    observation distribution's parameters and F_n their Fisher information (MacKay 1992; Martens &
    Grosse 2015; Immer et al. 2021, section 3).

    :param model: a Pyro program with continuous latents.
    :param structure: "auto" (the default), "kron" (KFAC), "ekfac", "full", "diag", "low_rank",
        "kernel" or "samples".
        "kernel" is the posterior of "full", from the Jacobian's N K rows of p numbers for N data
        with K outputs instead of p x p numbers; it needs a prior of finite variance. "samples" is
        the posterior of "full" as ``num_samples`` samples, solved for with products J v and J' v
        alone, so that nothing grows with p^2, (N K)^2 or a layer's width squared; its sd's have a
        relative error of about 1/sqrt(2 num_samples); see ``SamplesCurvature``. "auto" is
        "full" for up to 2000 latents, "kernel" if N K is below p and at most 4096, if they fit in
        memory, and else "kron"; the printed approximation names it. "kron" loses the covariance
        between layers, and a layer's weights get the covariance of its inputs times that of its
        outputs' gradients, each averaged over the data; off the data its standard deviations are
        often too small.
    :param curvature: "ggn"; "ggn-mc", from ``num_draws`` drawn observations per datum;
        "empirical-fisher"; or "hessian" (for "full" only).
    :param subset: the latents with a covariance; the others stay at the MAP. Possible are names or
        patterns, modules of the network, a predicate ``(name, latent) -> bool``, positions in the
        flat vector, or "last-layer"; None for all.
    :param num_draws: observations drawn per datum, by default 1 for "ggn-mc". For "ggn", 512 by
        default, used only if the Fisher information has no closed form and is estimated
        (``curvature.fisher.cell_roots`` lists the closed forms). The relative error of the estimate
        falls with the square root of draws times data.
    :param rank: the number of eigenpairs of "low_rank".
    :param reduce: how "kron" and "ekfac" treat weight sharing, see ``KroneckerCurvature``.
    :param num_samples: the number of samples of "samples".
    :param tolerance: of the solves of "samples": their error, in posterior standard deviations.
    :param init_loc_fn: where u starts; by default the network's own values.
    :param create_plates: as in Pyro's autoguides.
    :raises ValueError: for an unknown structure or curvature.
    """

    def __init__(
        self,
        model: Callable,
        *,
        structure: str = "auto",
        curvature: str = "ggn",
        subset: Any = None,
        num_draws: int | None = None,
        rank: int = 50,
        reduce: bool = False,
        num_samples: int = 32,
        tolerance: float = 1e-3,
        init_loc_fn: Callable = init_to_network,
        create_plates: Callable | None = None,
    ) -> None:
        config = CurvatureConfig(
            structure, curvature, num_draws,
            rank=rank, reduce=reduce, num_samples=num_samples, tolerance=tolerance,
        )  # fmt: skip
        super().__init__(model, init_loc_fn=init_loc_fn, create_plates=create_plates)
        self.config = config
        self._selection = (subset,)  # in a tuple: a module in it is the program's own

    @property
    def subset(self) -> Any:
        """The latents that get a covariance, as the user named them."""
        return self._selection[0]

    def options(self) -> dict[str, Any]:
        return {**asdict(self.config), "subset": self.subset}

    def _shared_on_copy(self) -> tuple[str, ...]:
        return (*super()._shared_on_copy(), "_selection")

    def laplace_approximation(
        self, data: Any, *, held_out: Any = None, progress: bool | None = None, **changes: Any
    ) -> "LaplaceGuide":
        """The Gaussian posterior around the current MAP; nothing of the model is changed.

        A network that was trained elsewhere needs no training here: the guide starts at its
        weights. Pass ``held_out`` then, see ``LaplaceGuide.fit_width``.

        The program runs in evaluation mode, and its mode is restored afterwards. Dropout layers
        drop nothing. BatchNorm layers use their running statistics, because statistics of a batch
        would make its data depend on each other; a layer without running statistics
        (``track_running_stats=False``) is refused.

        :param data: the program's arguments ``(x, y)``, or an iterable of batches of them; each
            datum counts once.
        :param held_out: the same for rows that the weights were not trained on, some hundreds.
        :param progress: show a bar over batches; by default in terminals and notebooks.
        :param changes: ``structure``, ``curvature``, ``subset``, ``num_draws``, ``rank``,
            ``reduce``, ``num_samples`` or ``tolerance`` for this approximation alone.
        :raises MemoryError: if the structure does not fit in memory.
        :raises UnsupportedProgramError: if latents are in subsampled plates.
        :raises ValueError: for an empty iterable, a missing target, a target outside its support
            (the error counts rows over all batches), a singular precision.
        :raises TypeError: for data that are not tensors, or of another dtype than the weights.
        """
        subset = changes.pop("subset", self.subset)
        config = replace(self.config, **changes)
        batches = Batches(data)
        batches.together(lambda: self._begin(*batches.first()))
        check = held_out is None
        posterior = LaplaceGuide(self, config, subset, batches, check=check, progress=progress)
        return posterior if held_out is None else posterior.fit_width(held_out)

    def _begin(self, args: tuple, kwargs: dict[str, Any]) -> None:
        model = self.program_model
        for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise UnsupportedProgramError(
                    f"the embedding '{name}' has sparse gradients, which no curvature is made of: "
                    "set its attribute sparse to False"
                )
        check_finite(model, args, kwargs)
        self.prototype(*args, **kwargs)
        few = few_rows(model, self.require_layout(), self.location(), (args, kwargs))
        with own_randomness():
            Program(model, *few[0], **few[1]).check()


class LaplaceGuide(JointGuide):
    """A Gaussian N(loc, precision^-1) over a subset of the unconstrained latents; others are fixed
    at ``loc``.

    ``AutoLaplaceGGN.laplace_approximation`` makes it. The precision is the sum of ``curvature``,
    from the likelihood, and ``prior``. ``refresh()`` adapts it to changed hyperparameters of the
    program, ``update(data)`` adds data, and ``fit_width(held_out)`` multiplies the covariance by a
    factor.
    """

    normal_marginals = True

    def __init__(
        self,
        source: Guide,
        config: CurvatureConfig,
        selection: Any,
        batches: Batches,
        *,
        check: bool = True,
        progress: bool | None = None,
    ) -> None:
        super().__init__(source)
        if source.subsampled:
            raise UnsupportedProgramError(
                f"the latent site '{min(source.subsampled)}' is in a subsampled plate, so that "
                "no run of the program holds all latents: integrate it out where it is Gaussian "
                "(handlers.integrate), call the program with all of its data, or use AutoMeanField "
                "or AutoAmortized"
            )
        model, layout = source.program_model, source.require_layout()
        self.config = config
        self.few = batches.first()
        self.register_buffer("loc", source.location().detach().clone())
        self.register_buffer("width", self.loc.new_ones(()))
        if isinstance(selection, str) and selection == "last-layer":
            selection = last_layer(model, layout, self.loc, *self.few)
        self.subset = select(layout, selection, model=model)
        gradient = self._fit(batches, None, progress)
        if check:
            self._check_maximum(gradient)

    def __repr__(self) -> str:
        chosen, size = self.config, self.subset.size
        of = "" if size == self.require_layout().size else f", {size} with a covariance"
        said = "" if self.held_out is None else f"; {self.held_out}"
        return f"{super().__repr__()[:-1]}{of}, structure={chosen.structure!r}{said})"

    num_data: int
    held_out: HeldOut | None = None  # what the rows of ``fit_width`` said
    width: Tensor  # the factor of the covariance, 1 before ``fit_width``
    _precision: Precision | None = None  # until it is asked for
    prior_quadratic: bool = False
    prior_slope: Tensor  # the gradient of the log prior at u*, (p,)
    _in_likelihood: Mapping[str, Tensor] = MappingProxyType({})  # parameters at the fit
    _passes: list[tuple[Batches, float]] | None = None  # None for a posterior from a file

    def saved(self) -> dict[str, Any]:
        found = {"config": asdict(self.config), "subset": self.subset.indices, "few": self.few}
        said = None if self.held_out is None else asdict(self.held_out)
        return {**super().saved(), **found, "num_data": self.num_data, "held_out": said}

    @classmethod
    def restored(cls, model: Callable, saved: Mapping[str, Any], batch: Batch) -> "LaplaceGuide":
        source, config = restored_source(model, batch), CurvatureConfig(**saved["config"])
        device = source.location().device
        args, kwargs = tree_map_only(Tensor, lambda value: value.to(device), saved["few"])
        few = Batches([args or kwargs])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BdlWarning)  # said in the fit
            guide = cls(source, config, saved["subset"], few, check=False)
        guide.load_state_dict(saved["state"])
        guide.num_data, guide._passes = saved["num_data"], None
        guide.held_out = None if saved["held_out"] is None else HeldOut(**saved["held_out"])
        guide.curvature.connect(None)
        guide.refresh()
        return guide

    @property
    def passes(self) -> list[tuple[Batches, float]]:
        """The data of each pass, and the factor of its sums.

        :raises RuntimeError: for a posterior from a file, which holds no data.
        """
        if self._passes is None:
            raise RuntimeError(
                "this posterior was loaded from a file without its data: call "
                "laplace_approximation(data) again, at the same point"
            )
        return self._passes

    def _fit(self, batches: Batches, before: Any, progress: bool | None) -> Tensor:
        """Add the curvature of data; return the gradient of the log joint density in the subset
        (p,)."""
        model, is_new = self.program_model, self._passes is None
        if before is None:
            self.few = few_rows(model, self.require_layout(), self.loc, self.few)
            self.config = with_known_information(
                model, self.subset, self.loc, self.few, self.config
            )
            self.config = with_chosen_structure(model, self.subset, self.loc, batches, self.config)
        fitted = fit_curvature(
            model, self.subset, self.loc, batches, self.config,
            before=before, progress=progress,
        )  # fmt: skip
        self.curvature = fitted.curvature
        self.num_data = fitted.num_data + (self.num_data if before is not None else 0)
        for name in ("log_likelihood", "squares", "cells"):
            earlier = getattr(self, name) if before is not None else 0.0
            self.register_buffer(name, getattr(fitted, name).to(self.loc.device) + earlier)
        earlier = [] if before is None else self._passes
        self._passes = None if earlier is None else [*earlier, (batches, fitted.factor)]
        if before is None:
            self._in_likelihood = {}
        reading = self.read()
        if before is None:
            self._in_likelihood = {
                name: reading.parameters[name].value.detach().clone()
                for name in reading.in_likelihood
            }
            if is_new:  # Newton steps fit again
                check_factors(reading.run, reading.leaves, self.config)
            self.register_buffer("noise_factor", torch.ones_like(self.squares))
            self.register_buffer("reference_noise", learned_noise(reading))
        return fitted.gradient + self.follow(reading)

    def update(self, data: Any, *, progress: bool | None = None) -> "LaplaceGuide":
        """Add the curvature of more data at the same point; return the guide.

        :param data: as in ``laplace_approximation``.
        :raises ValueError: if the noise of a Normal observation has changed since the fit, or the
            program scales parts of the data up to a number that it states.
        """
        if any(factor != 1.0 for _, factor in self._passes or ()):
            raise ValueError(SCALED_UP)
        before, noise = self.reference_noise, learned_noise(self.read())
        if before is not None and noise is not None and not torch.allclose(noise, before):
            raise ValueError(
                "the noise has changed since the curvature was computed, so that the curvature of "
                "more data cannot be added: call laplace_approximation with all data"
            )
        self._fit(Batches(data), self.curvature, progress)
        return self

    def fit_width(self, held_out: Any) -> Self:
        """Multiply the covariance by the factor under which held-out rows are most probable;
        return the guide.

        The posterior is then N(u*, t precision^-1), the Laplace approximation of
        (likelihood x prior)^(1/t). At t = 0 it is the network itself, so that the linearized
        predictive is never worse on these rows. ``print(guide.held_out)`` says what was found, see
        ``HeldOut``. The evidence is that of t = 1 and refuses the guide.

        :param held_out: ``(x, y)`` or an iterable of batches that the weights were not trained on.
        :raises ValueError: for fewer than two rows, or rows without targets.
        """
        self.width = torch.ones_like(self.width)
        self._forget()
        model, batches = self.program_model, Batches(held_out)
        self.held_out = search(model, self.subset, self.loc, self.precision, batches)
        self.width = torch.full_like(self.width, self.held_out.factor)
        self._forget()
        return self

    def read(self) -> ParameterReading:
        """A run of the program on a few of the data, at its present hyperparameters.

        :raises ValueError: where a parameter of the likelihood has changed since the fit.
        """
        reading = read(self.program_model, self.subset, self.loc, *self.few)
        for name, before in self._in_likelihood.items():
            if not torch.allclose(reading.parameters[name].value, before):
                raise ValueError(
                    f"the parameter '{name}' of the likelihood has changed since the curvature was "
                    "computed, and the curvature cannot follow it (it follows the priors' "
                    "parameters, and one number that scales a Normal's noise): call "
                    "laplace_approximation(data) again"
                )
        return reading

    def hyperparameters(self) -> dict[str, Tensor]:
        """The present values of the hyperparameters that the evidence can set, by name."""
        return {name: p.value.detach().clone() for name, p in followed(self.read()).items()}

    def effective_parameters(self) -> Tensor:
        """The effective number of parameters gamma = sum_i (1 - prior precision_i * posterior
        variance_i), a scalar from 0 to p: how many the data determine (MacKay 1992, equation
        3.2)."""
        return self.subset.size - (self.prior.diagonal * self.precision.variances()).sum()

    def refresh(self) -> Tensor:
        """Adapt to the program's current hyperparameters: the prior precision and a Normal noise.

        :returns: the gradient of the log prior in the subset, (p,).
        """
        return self.follow(self.read())

    def follow(self, reading: ParameterReading) -> Tensor:
        """Adapt to the hyperparameters of a run of the program, as ``refresh`` does."""
        return self.adapt(*self._prior_of(reading))

    def adapt(self, prior: PriorPrecision, slope: Tensor, noise_factor: Tensor | None) -> Tensor:
        """Adapt to another prior and noise of the program.

        :param slope: the gradient of the log prior in the subset, (p,).
        :param noise_factor: of the curvature, where a Normal's noise is a parameter.
        :returns: ``slope``.
        """
        self._keep_prior(prior)
        if noise_factor is not None:
            self.noise_factor = noise_factor.to(self.squares)
        self.register_buffer("prior_slope", slope, persistent=False)
        return slope

    @torch.enable_grad()
    def _prior_of(self, reading: ParameterReading) -> tuple[PriorPrecision, Tensor, Tensor | None]:
        """The arguments of ``adapt`` at the hyperparameters of a run."""
        run, leaves, factor = reading.run, reading.leaves, None
        if self.reference_noise is not None:
            noise = learned_noise(reading)
            assert noise is not None
            factor = (self.reference_noise / noise).square().mean()
        total = run.log_prior()
        found: list[Tensor | None] = [None] * len(leaves)
        flat = torch.cat([leaf.reshape(-1) for leaf in leaves.values()])
        total = total + self.require_layout().constrain(flat)[1]
        if total.requires_grad:
            inside = list(leaves.values())
            found = list(  # others may read the run too
                torch.autograd.grad(total, inside, allow_unused=True, retain_graph=True)
            )
        gradients = [
            (torch.zeros_like(leaf) if g is None else g).reshape(-1)
            for g, leaf in zip(found, leaves.values(), strict=True)
        ]
        prior = prior_precision(run, leaves, self.subset)
        return prior, self.subset.take(torch.cat(gradients)), factor

    def _keep_prior(self, prior: PriorPrecision) -> None:
        self.prior_quadratic = prior.quadratic
        self.register_buffer("prior_diagonal", prior.diagonal.detach())
        for name, value in (("prior_indices", prior.indices), ("prior_dense", prior.dense)):
            self.register_buffer(name, None if value is None else value.detach())
        self._forget()

    @property
    def prior(self) -> PriorPrecision:
        """The prior precision in this posterior."""
        return PriorPrecision(
            self.prior_diagonal,
            self.prior_indices,
            self.prior_dense,
            quadratic=self.prior_quadratic,
        )

    @property
    def precision(self) -> Precision:
        """The posterior precision in the subset: curvature plus prior, divided by ``width``."""
        if self._precision is None:
            with torch.no_grad():
                factor = self.curvature_factor(self.noise_factor).to(self.prior_diagonal)
                prior = self.prior.divided(self.width)
                self._precision = self.curvature.with_prior(prior, factor / self.width)
        return self._precision

    def newton_step(self, gradient: Tensor) -> Tensor:
        """(curvature + prior)^-1 gradient, (p,)."""
        return (self.precision.solve(gradient.to(self.prior_diagonal)) / self.width).to(self.loc)

    def curvature_factor(self, noise_factor: Tensor) -> Tensor:
        """The factor by which a change of the noise scales the curvature.

        :param noise_factor: (noise of the fit / current noise)^2.
        """
        empirical = self.config.curvature == "empirical-fisher"
        return noise_factor.square() if empirical else noise_factor

    def curvature_diagonals(self) -> dict[str, Tensor]:
        """The diagonal of the curvature sum_n J_n' F_n J_n, without the prior, by site.

        :returns: flat tensors of the entries in the subset. That of "kron" and "low_rank" is an
            approximation.
        """
        diagonal = self.curvature_factor(self.noise_factor) * self.curvature.diagonal()
        return {name: diagonal[part] for name, part in self.subset.parts.items()}

    def _forget(self) -> None:
        self._precision = None

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._forget()
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, function: Callable, recurse: bool = True) -> Any:
        self._forget()
        self.few = tree_map_only(Tensor, function, self.few)
        return super()._apply(function, recurse)

    def _shared_on_copy(self) -> tuple[str, ...]:
        return (*super()._shared_on_copy(), "few", "_passes", "prior_quadratic")

    def __getstate__(self) -> dict[str, Any]:
        """The state without the data, as in a file."""
        return super().__getstate__() | {"_passes": None}

    def _check_maximum(self, gradient: Tensor) -> None:
        """Warn, once for a program, if a Newton step would still gain a lot under this prior and
        under any other scale of it: weight decay is such a scale."""
        size, variances = self.subset.size, self.precision.variances().to(gradient)
        if size > 1:  # what another scale leaves, per degree of freedom
            slope = self.prior_slope.to(gradient)
            weighted, likelihood = variances * slope, gradient - slope
            scale = -(weighted @ likelihood) / (weighted @ slope).clamp(min=_SMALLEST)
            gradient = likelihood + scale.clamp(min=0.0) * slope
        gain = 0.5 * float(variances @ gradient.square()) * size / max(1, size - 1)
        if not gain > 1.0 + 0.1 * size or "not at a maximum" in self.told:
            return
        self.told.add("not at a maximum")
        with layers_called((self.program_model,)) as layers:
            self.read()
        ending = (
            "; a BatchNorm layer is in training mode, and the approximation computes with its "
            "running statistics: train the last steps after model.eval()"
        )
        warnings.warn(
            f"the guide is not at a maximum, a step would gain about {gain:.3g} nats: train "
            "longer, with a learning rate that falls to zero, or let rows that a trained network "
            "has not seen choose the width, laplace_approximation(data, held_out=(x, y))"
            + (ending if any(layer.training for layer in layers) else ""),
            BdlWarning,
            stacklevel=4,
        )

    # The guide

    @property
    def has_density(self) -> bool:
        return self.subset.complete and not self.curvature.is_sampled

    def location(self) -> Tensor:
        return self.loc

    @property
    def independent_draws(self) -> bool:
        return not self.curvature.is_sampled

    def sample_vectors(self, num_samples: int) -> Tensor:
        draws = self.precision.sample(num_samples).to(self.loc)
        return self.subset.put(self.loc, self.subset.take(self.loc) + draws)

    def log_density(self, vector: Tensor, log_det: Tensor) -> Tensor:
        """log q(w) of the latents in the subset; the others are fixed. Zero for samples without a
        matrix, whose density would take a pass over the data for every draw."""
        if self.curvature.is_sampled:
            return torch.zeros_like(log_det)
        offset = self.subset.take(vector - self.loc)
        return log_prob(self.precision, offset).to(vector) - log_det

    def entropy(self, vector: Tensor, log_det: Tensor) -> Tensor:
        constant = self.subset.size * (1.0 + math.log(2 * math.pi))
        return (0.5 * (constant - self.precision.logdet())).to(log_det) + log_det

    def as_prior(self) -> GaussianPrior:
        """A Gaussian prior over the subset, with the other latents fixed; see ``Guide.as_prior``.

        :raises ValueError: if the subset holds only some of a site's entries, or for
            structure="samples", whose density takes a pass over the data.
        """
        if self.curvature.is_sampled:
            raise ValueError(
                f'structure="{self.config.structure}" has samples and no matrix that could be a '
                'prior: call laplace_approximation(data, structure="kron") or "diag" for it'
            )
        precision = copy.deepcopy(self.precision)
        if precision.independent and self.subset.complete:
            scale = precision.variances().sqrt()
            return independent_prior(self.require_layout(), self.loc, scale)
        with torch.no_grad():
            factor = self.curvature_factor(self.noise_factor).to(self.prior_diagonal)
            diagonal = (self.curvature.diagonal() * factor + self.prior_diagonal) / self.width
        return joint_prior(self.subset, self.loc, precision, diagonal)

    def variances(self) -> Tensor:
        """The marginal variances of the unconstrained vector (P,), zero outside the subset."""
        variances = self.precision.variances().to(self.loc)
        return self.subset.put(torch.zeros_like(self.loc), variances)


def last_layer(model: Callable, layout: Any, vector: Tensor, args: tuple, kwargs: Any) -> list[str]:
    """The names of the weights and biases of a program's last linear operation.

    It is the last product with a weight matrix or a vector of weights, with a bias added to its
    output.

    :raises ValueError: if no latent enters a linear operation.
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
