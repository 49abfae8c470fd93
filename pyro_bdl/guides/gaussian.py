"""The Gaussian posterior of a Laplace approximation: N(u*, (curvature + prior precision)^-1)."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from pyro_bdl.curvature.at import ProgramAtPoint, check_priors
from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.curvature.fit import SCALED_UP, LikelihoodSums, check_factors, fit_curvature
from pyro_bdl.curvature.hyperparameters import (
    ParameterReading,
    followed,
    learned_noise,
    read,
)
from pyro_bdl.curvature.jacobian.linearization import Linearization
from pyro_bdl.curvature.prior import PriorPrecision, prior_precision, slope_of_prior
from pyro_bdl.curvature.structures.base import Curvature, Precision
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.held_out import HeldOutGain, is_worse_than_network, search
from pyro_bdl.guides.mode import check_maximum, find_mode
from pyro_bdl.guides.normal import NormalGuide
from pyro_bdl.guides.point import JointGuide, restored_source
from pyro_bdl.program.batches import Batch, Batches, leading_size
from pyro_bdl.program.check import on_whole_data
from pyro_bdl.program.gaussian_prior import replaced_priors
from pyro_bdl.program.saved import FEW, example_rows, first_rows
from pyro_bdl.program.subset import Subset, select
from pyro_bdl.program.trace import Run
from pyro_bdl.utils import bibliography
from pyro_bdl.utils.precision import double, keeping_double
from pyro_bdl.utils.random_state import own_randomness
from pyro_bdl.utils.trees import tree_map_only


class LaplaceGuide(JointGuide, NormalGuide):
    """A Gaussian N(loc, precision^-1) over a subset of the unconstrained latents; others are fixed
    at ``loc``.

    ``AutoLaplaceGGN.laplace_approximation`` makes it. The precision is the sum of ``curvature``,
    from the likelihood, and ``prior``. ``refresh()`` adapts it to changed hyperparameters of the
    program, ``update(data)`` adds data, and ``fit_width(held_out)`` multiplies the covariance by a
    factor. At first it has no curvature: ``approximate`` or ``restored`` gives it one.

    :param source: a guide whose center is u*.
    :param subset: the latents with a covariance.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.LAPLACE, bibliography.LINEARIZED)
    loc: Tensor  # u*, (P,)
    width: Tensor  # the factor of the covariance, 1 before ``fit_width``
    held_out: HeldOutGain | None = None  # what the rows of ``fit_width`` said
    # None where the training left it; "closed" or "steps" at the mode of the subset, which it
    # follows in closed form or by ``find_mode``, see ``AutoLastLayer``
    mode: str | None = None

    # Sums over the data at loc and the noise of the fit, tempered
    curvature: Curvature
    num_data: int = 0
    log_likelihood: Tensor  # under the noise of the fit
    squares: Tensor  # of residuals of Normal observations in units of their noise
    cells: Tensor  # the number of these
    score: Tensor  # the gradient of the log likelihood in the subset, (p,)

    # The program's hyperparameters
    prior_quadratic: bool = False
    prior_slope: Tensor  # the gradient of the log prior at loc, (p,)
    noise_factor: Tensor  # (noise of the fit / present noise)^2
    reference_noise: Tensor | None  # that of the fit, if it is a parameter
    _in_likelihood: Mapping[str, Tensor] = MappingProxyType({})  # other parameters at the fit

    _precision: Precision | None = None  # until it is asked for
    _passes: list[tuple[Batches, float]] | None = None  # None for a posterior from a file
    _priors: tuple[tuple[nn.Module, Any], ...] = ()  # of ``update_prior``, at the fit

    def __init__(self, source: Guide, subset: Subset, config: CurvatureConfig) -> None:
        super().__init__(source)
        self.subset, self.config = subset, config
        self.register_buffer("loc", source.location().detach().clone())
        self.register_buffer("width", self.loc.new_ones(()))
        self.register_buffer("reference_noise", None)

    @property
    def linearized(self) -> bool:
        return True

    def __repr__(self) -> str:
        chosen, size = self.config, self.subset.size
        of = "" if size == self.require_layout().size else f", {size} with a covariance"
        said = "" if self.held_out is None else f"; {self.held_out}"
        return f"{super().__repr__()[:-1]}{of}, structure={chosen.structure!r}{said})"

    # Data

    def fit(self, data: list[Batches], progress: bool | None) -> Linearization:
        """Compute the curvature and the prior at ``loc`` by passes over data.

        :returns: the first of their runs, which holds the prior.
        """
        self._passes, self.num_data, self._in_likelihood = [], 0, {}
        self._priors = replaced_priors(self.program_modules)
        fitted = self._add(data[0], None, progress)
        first, reading = fitted.first, fitted.first.reading
        reading.has_noise = fitted.noise is not None
        self.example_rows = self._examples(first, data[0].first())
        for batches in data[1:]:
            self._add(batches, self.curvature, progress)
        self._in_likelihood = _likelihood_parameters(reading)
        noise = learned_noise(reading)
        self.register_buffer("noise_factor", torch.ones_like(self.squares))
        self.register_buffer("reference_noise", None if noise is None else noise.detach().clone())
        self.refresh(reading)
        return first

    def _add(
        self, batches: Batches, before: Curvature | None, progress: bool | None
    ) -> LikelihoodSums:
        fitted = fit_curvature(
            self.at(), batches, self.config,
            before=before, has_noise=self.reference_noise is not None, progress=progress,
        )  # fmt: skip
        if before is not None:
            assert fitted.first is not None and fitted.first.reading is not None
            check_priors(self.read().run, fitted.first.reading.run)
        self.config, self.curvature = fitted.config, fitted.curvature
        self.num_data += fitted.num_data
        sums = {name: getattr(fitted, name) for name in ("log_likelihood", "squares", "cells")}
        for name, value in {**sums, "score": fitted.gradient}.items():
            self.register_buffer(name, value if before is None else value + getattr(self, name))
        if self._passes is not None:
            self._passes.append((batches, fitted.factor))
        return fitted

    def _examples(self, first: Linearization, batch: Batch) -> Batch:
        """A few rows of a fit's data, which need not be those of the guide's first run, with their
        priors; all rows where the program needs them.

        :param first: the fit's first run. Where it is one over single rows, their priors are known
            to be the same by the operators.
        """
        reading, few = first.reading, first_rows(batch)
        proved = first.rows is not None and reading.run is first.run
        if leading_size(self.example_rows) > FEW or not proved:
            whole = Run(reading.run.latents, prior_factors=reading.run.prior_factors)
            with own_randomness():
                few = example_rows(
                    self.program_model, self.require_layout(), self.loc, batch, whole
                )
        return tree_map_only(Tensor, torch.clone, few)

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

    def update(self, data: Any, *, progress: bool | None = None) -> Self:
        """Add the curvature of more data at the same point; return the guide, which moves if it
        is at the mode of a last layer, and else warns where the point is no maximum of all data.

        :param data: as in ``laplace_approximation``, without data that are in the posterior.
        :raises ValueError: if the noise of a Normal observation has changed since the fit, the
            program scales parts of the data up to a number that it states, or the same tensors are
            in the posterior already.
        :raises UnsupportedProgramError: if the program has other priors on these data.
        """
        batches = self.batches(data)
        _check_addable(self, batches)
        self._add(batches, self.curvature, progress)
        self.refresh()
        if self.mode == "steps":
            find_mode(self, progress=progress)
        elif self._passes is not None:
            check_maximum(self, self.read())
        return self

    def fit_width(self, held_out: Any) -> Self:
        """Multiply the covariance by the factor under which held-out rows are most probable;
        return the guide.

        The posterior is then N(u*, t precision^-1), the Laplace approximation of
        (likelihood x prior)^(1/t). At t = 0 it is the network itself, so that the linearized
        predictive is never worse on these rows. ``print(guide.held_out)`` says what was found, see
        ``HeldOutGain``. The evidence is defined at t = 1 only,
        and raises an error for this guide.

        :param held_out: ``(x, y)`` or an iterable of batches that the weights were not trained on.
        :raises ValueError: for fewer than two rows, rows without targets, that are not finite, or
            that are impossible under the network itself. The guide is then as before.
        """
        width, self._precision, self.width = self.width, None, torch.ones_like(self.width)
        program = on_whole_data(self.program_model)
        try:
            self.held_out = search(self.at(program), self.precision, self.batches(held_out))
            width = torch.full_like(width, self.held_out.factor)
        finally:
            self._precision, self.width = None, width
        return self

    def at(self, program: Callable | None = None) -> ProgramAtPoint:
        """The program at ``loc``, or the same program under a handler."""
        program = program or self.program_model
        return ProgramAtPoint(
            program, self.subset, self.loc, self.config.rows, self.program_modules
        )

    # Hyperparameters

    def read(self) -> ParameterReading:
        """A run of the program on a few of the data, at its present hyperparameters.

        :raises ValueError: where the prior was replaced, or a parameter of the likelihood has
            changed, since the fit.
        """
        self._check_prior()
        reading = read(self.program_model, self.subset, self.loc, *self.example_rows)
        reading.has_noise = self.reference_noise is not None
        _check_unchanged(reading, self._in_likelihood)
        return reading

    def _check_prior(self) -> None:
        now = replaced_priors(program for program, _ in self._priors)
        if any(one is not other for (_, one), (_, other) in zip(self._priors, now, strict=True)):
            raise ValueError(
                "update_prior has replaced the program's prior since this posterior was fitted: "
                "save it, and ask for its evidence, before update_prior, or leave the program as "
                "it is by nn.with_prior(program, posterior)"
            )

    def hyperparameters(self) -> dict[str, Tensor]:
        """The present values of the hyperparameters that the evidence can set, by name."""
        return {name: p.value.detach().clone() for name, p in followed(self.read()).items()}

    def effective_parameters(self) -> Tensor:
        """The effective number of parameters gamma = sum_i (1 - prior precision_i * posterior
        variance_i), a scalar from 0 to p: how many the data determine (MacKay 1992, equation
        3.2). The variances are those before ``fit_width``."""
        return self.subset.size - self.precision.weighted_trace(self.prior.diagonal) / self.width

    @torch.enable_grad()
    def refresh(self, reading: ParameterReading | None = None) -> None:
        """Adapt to the program's hyperparameters: the prior precision and a Normal noise.

        :param reading: a run of the program; by default one at the present hyperparameters.
        """
        reading = reading or self.read()
        run, leaves = reading.run, reading.leaves
        slope = slope_of_prior(run, leaves, self.subset)
        prior = prior_precision(run, leaves, self.subset)
        self.adapt(prior, slope, self.noise_factor_at(reading))

    def noise_factor_at(self, reading: ParameterReading) -> Tensor | None:
        """(noise of the fit / noise)^2, a scalar with the graph of the reading; None where the
        noise is not one parameter of a Normal observation."""
        noise, before = learned_noise(reading), self.reference_noise
        return (
            None if noise is None or before is None else (before / noise).square().to(self.squares)
        )

    @torch.no_grad()
    def adapt(self, prior: PriorPrecision, slope: Tensor, noise_factor: Tensor | None) -> None:
        """Adapt to another prior and noise of the program; move along with a mode in closed form.

        :param slope: the gradient of the log prior in the subset, (p,).
        :param noise_factor: of the curvature, where a Normal's noise is a parameter.
        """
        self.prior_quadratic = prior.quadratic
        for name in ("diagonal", "indices", "dense"):
            self.register_buffer(f"prior_{name}", getattr(prior, name))
        if noise_factor is not None:
            self.noise_factor = noise_factor.detach().to(self.squares)
        self.register_buffer("prior_slope", slope, persistent=False)
        self._precision = None
        if self.mode == "closed":
            _shift(self, self.newton_step(self.gradient()))

    @property
    def prior(self) -> PriorPrecision:
        """The prior precision in this posterior."""
        values = self.prior_diagonal, self.prior_indices, self.prior_dense
        return PriorPrecision(*values, quadratic=self.prior_quadratic)

    @property
    def precision(self) -> Precision:
        """The posterior precision in the subset: curvature plus prior, divided by ``width``."""
        if self._precision is None:
            with torch.no_grad():
                prior = self.prior.divided(self.width)
                self._precision = self.curvature.with_prior(prior, self.factor / self.width)
        return self._precision

    def gradient(self) -> Tensor:
        """The gradient of the log joint density in the subset at ``loc``, (p,)."""
        return self.noise_factor.to(self.score) * self.score + self.prior_slope

    def newton_step(self, gradient: Tensor) -> Tensor:
        """(curvature + prior)^-1 gradient, (p,)."""
        return (self.precision.solve(gradient.to(self.prior_diagonal)) / self.width).to(self.loc)

    @property
    def factor(self) -> Tensor:
        """The factor of the curvature at the present noise."""
        return self.config.noise_factor(self.noise_factor).to(self.prior_diagonal.dtype)

    def curvature_diagonals(self) -> dict[str, Tensor]:
        """The diagonal of the curvature sum_n J_n' F_n J_n, without the prior, by site.

        :returns: flat tensors of the entries in the subset. That of "kron" and "low_rank" is an
            approximation.
        """
        diagonal = self.factor * self.curvature.diagonal()
        return {name: diagonal[part] for name, part in self.subset.parts.items()}

    # Files and copies

    def saved(self) -> dict[str, Any]:
        self._check_prior()
        found = {"config": asdict(self.config), "subset": self.subset.indices}
        said = None if self.held_out is None else asdict(self.held_out)
        numbers = {"num_data": self.num_data, "held_out": said, "mode": self.mode}
        return {**super().saved(), **found, **numbers, "plan": self.curvature.plan()}

    @classmethod
    def restored(cls, model: Callable, saved: Mapping[str, Any], batch: Batch) -> "LaplaceGuide":
        source = restored_source(model, batch)
        subset = select(source.require_layout(), saved["subset"])
        guide = cls(source, subset, CurvatureConfig(**saved["config"]))
        _restore(guide, saved)
        return guide

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._precision = None
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, function: Callable, recurse: bool = True) -> Any:
        self._precision = None
        if self.loc.dtype != torch.float64:  # the sums over data are, where the device has it
            function = keeping_double(function)
        return super()._apply(function, recurse)

    def _shared_on_copy(self) -> tuple[str, ...]:
        return (*super()._shared_on_copy(), "_passes", "_priors", "prior_quadratic")

    def __getstate__(self) -> dict[str, Any]:
        """The state without the data, as in a file."""
        return super().__getstate__() | {"_passes": None, "_priors": ()}

    @property
    def has_density(self) -> bool:
        return self.subset.complete and not self.curvature.is_sampled

    def location(self) -> Tensor:
        return self.loc

    @property
    def independent_draws(self) -> bool:
        return not self.curvature.is_sampled

    def log_density(self, vector: Tensor, log_det: Tensor) -> Tensor:
        """log q(w) of the latents in the subset. Zero for samples without a matrix, whose density
        would take a pass over the data for every draw."""
        if self.curvature.is_sampled:
            return torch.zeros_like(log_det)
        return super().log_density(vector, log_det)

    def precision_diagonal(self) -> Tensor:
        return (self.curvature.diagonal() * self.factor + self.prior_diagonal) / self.width

    def stored_precision(self) -> "_StoredPosterior":
        """As for other guides.

        :raises ValueError: for structure="samples", whose density takes a pass over the data.
        """
        if self.curvature.is_sampled:
            raise ValueError(
                f'structure="{self.config.structure}" has samples and no matrix that could be a '
                'prior: call laplace_approximation(data, structure="kron") or "diag" for it'
            )
        return _StoredPosterior(self)


def _restore(guide: LaplaceGuide, saved: Mapping[str, Any]) -> None:
    """Take the sums over the data from a file, and the hyperparameters of the program."""
    device = guide.loc.device
    like = guide.loc.new_empty(0, dtype=torch.promote_types(guide.loc.dtype, torch.float32))
    guide.curvature = guide.config.structure.empty(guide.subset, like, None)
    guide.curvature.build(saved["plan"])
    guide.curvature.connect(None)
    for name, value in saved["state"].items():
        if name != "_extra_state" and "." not in name:
            guide.register_buffer(name, value.to(device))
    guide.load_state_dict(saved["state"])
    guide.num_data, guide.mode = saved["num_data"], saved["mode"]
    guide.held_out = None if saved["held_out"] is None else HeldOutGain(**saved["held_out"])
    guide._priors = replaced_priors(guide.program_modules)
    reading = guide.read()
    guide._in_likelihood = _likelihood_parameters(reading)
    guide.refresh(reading)


def refuse_subsampled(source: Guide) -> None:
    """Check that a run of a guide's program holds all of its latents.

    :raises UnsupportedProgramError: if latents are in subsampled plates.
    """
    if source.subsampled:
        raise UnsupportedProgramError(
            f"the latent site '{min(source.subsampled)}' is in a subsampled plate, so that "
            "no run of the program holds all latents: integrate it out where it is Gaussian "
            "(handlers.integrate), call the program with all of its data, or use AutoMeanField "
            "or AutoAmortized"
        )


def approximate(
    source: Guide,
    config: CurvatureConfig,
    subset: Subset,
    batches: Batches,
    *,
    check: bool = True,
    progress: bool | None = None,
) -> LaplaceGuide:
    """The Gaussian around a guide's center, with the curvature over data.

    :param check: warn if the guide is not at a maximum.
    :raises UnsupportedProgramError: if latents are in subsampled plates.
    """
    refuse_subsampled(source)
    guide = LaplaceGuide(source, subset, config)
    first = guide.fit([batches], progress)
    check_factors(first.run, first.leaves, guide.config)
    if check and not is_worse_than_network(guide, first, batches):
        check_maximum(guide, first.reading)
    return guide


def _shift(guide: LaplaceGuide, step: Tensor) -> None:
    """Move by ``step`` (p,), where the log likelihood is quadratic with a matrix."""
    curvature: Any = guide.curvature
    bend = curvature.matrix @ step.to(curvature.matrix)
    gain = (double(step) * (double(guide.score) - 0.5 * double(bend))).sum()
    guide.log_likelihood = guide.log_likelihood + gain
    guide.squares = guide.squares - 2.0 * gain
    guide.score = guide.score - bend.to(guide.score)
    guide.prior_slope = guide.prior_slope - guide.prior.times(step)
    guide.loc = guide.subset.put(guide.loc, guide.subset.take(guide.loc) + step)


def _check_addable(guide: LaplaceGuide, data: Batches) -> None:
    """Check that sums over more data can be added to those of a guide."""
    before = guide._passes or ()
    if any(factor != 1.0 for _, factor in before):
        raise ValueError(SCALED_UP)
    if any(data.shares_with(batches) for batches, _ in before):
        raise ValueError(
            "these tensors are in the posterior already, and would count again: pass update what "
            "was observed since, or x.clone() where the same numbers were observed again"
        )
    if any(not leading_size(batches.first()) for batches, _ in before):
        raise ValueError(
            "the program held the data of the fit itself, so that it is not known whether these "
            "are others: fit it by laplace_approximation((x, y)), with the data as arguments"
        )
    factor = guide.noise_factor_at(guide.read())
    if factor is not None and not torch.isclose(factor, torch.ones_like(factor)):
        raise ValueError(
            "the noise has changed since the curvature was computed, so that the curvature of "
            "more data cannot be added: call laplace_approximation with all data"
        )


def _likelihood_parameters(reading: ParameterReading) -> dict[str, Tensor]:
    """The values of the parameters of the likelihood that no curvature follows."""
    return {name: reading.parameters[name].value.detach().clone() for name in reading.in_likelihood}


def _check_unchanged(reading: ParameterReading, before: Mapping[str, Tensor]) -> None:
    """Refuse other values of a likelihood's parameters than at the fit."""
    for name, value in before.items():
        if not torch.allclose(reading.parameters[name].value, value):
            raise ValueError(
                f"the parameter '{name}' of the likelihood has changed since the curvature was "
                "computed, and the curvature cannot follow it (it follows the priors' "
                "parameters, and one number that scales a Normal's noise): call "
                "laplace_approximation(data) again"
            )


class _StoredPosterior(nn.Module):
    """A copy of a guide's curvature and prior, whose call makes the posterior's precision."""

    factor: Tensor
    diagonal: Tensor
    indices: Tensor | None
    dense: Tensor | None

    def __init__(self, guide: LaplaceGuide) -> None:
        super().__init__()
        self.curvature, self.quadratic = copy.deepcopy(guide.curvature), guide.prior_quadratic
        prior = guide.prior.divided(guide.width)
        parts = {"diagonal": prior.diagonal, "indices": prior.indices, "dense": prior.dense}
        for name, value in (parts | {"factor": guide.factor / guide.width}).items():
            self.register_buffer(name, None if value is None else value.detach().clone())

    def forward(self) -> Precision:
        parts = self.diagonal, self.indices, self.dense
        return self.curvature.with_prior(
            PriorPrecision(*parts, quadratic=self.quadratic), self.factor
        )
