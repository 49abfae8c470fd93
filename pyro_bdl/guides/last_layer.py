"""Bayesian regression on the last hidden layer, around features trained as MAP."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.curvature.hyperparameters import ParameterReading
from pyro_bdl.curvature.jacobian.linearization import Linearization
from pyro_bdl.curvature.structures.full import FullCurvature
from pyro_bdl.distributions.take_apart import base_distribution, parameters_of
from pyro_bdl.errors import BdlWarning, UnsupportedProgramError
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.laplace import AutoLaplaceGGN, LaplaceGuide, last_layer
from pyro_bdl.init import init_to_network
from pyro_bdl.program.batches import Batches
from pyro_bdl.program.subset import Subset
from pyro_bdl.program.trace import leave_open, record
from pyro_bdl.utils.module_state import evaluation_mode, preserved_buffers
from pyro_bdl.utils.random_state import fixed_normal

_STEPS = 100
_HALVINGS = 30
_ROUNDS = 50


class AutoLastLayer(AutoLaplaceGGN):
    """Trains as MAP; the last layer then gets its posterior given the features.

    With phi(x) the input of the last layer, W its weights and biases, and everything before it
    fixed, a program with Normal observations and priors is Bayesian linear regression:

        p(W | y) = N(m, C),  C^-1 = sum_n phi_n phi_n' / noise^2 + prior precision,
        m = C (sum_n phi_n y_n / noise^2 + prior precision prior mean)

    and ``laplace_approximation(data)`` is this posterior: exact, with its evidence and its
    predictive, however far training has come. For other observations it is the Gaussian of the
    Gauss-Newton precision at the mode of p(W | y), which Newton steps find.

    The features are trained as MAP by SVI, or through the evidence, with W integrated out, by
    ``evidence.LastLayerEvidence`` (Ober & Rasmussen 2019, "neural linear"). Scales of priors and
    noise that are ``PyroParam``s are set by ``maximize_evidence(data)``. Other latents, such as a
    noise with a prior, stay where the training took them.

    :param model: a Pyro program with continuous latents.
    :param subset: what the last layer is: by default the weights and biases of the program's last
        matrix product; otherwise as for ``AutoLaplaceGGN``.
    :param init_loc_fn: as for ``AutoLaplaceGGN``, as is ``create_plates``.
    """

    def __init__(
        self,
        model: Callable,
        *,
        subset: Any = "last-layer",
        init_loc_fn: Callable = init_to_network,
        create_plates: Callable | None = None,
    ) -> None:
        super().__init__(
            model,
            structure="full",
            subset=subset,
            init_loc_fn=init_loc_fn,
            create_plates=create_plates,
        )

    def laplace_approximation(
        self, data: Any, *, progress: bool = False, **changes: Any
    ) -> "LastLayerGuide":
        """The posterior of the last layer given the features; this guide is not changed.

        :param data: the program's arguments ``(x, y)``, or an iterable of batches of them, each
            datum once. Memory does not grow with their number.
        :param progress: show a bar over batches, in every pass.
        :param changes: ``subset`` or ``curvature`` for this approximation alone.
        :raises MemoryError: where the matrix C^-1 cannot fit.
        :raises UnsupportedProgramError: where the program uses the last layer's weights more than
            once, as with tied weights.
        :raises ValueError: for an empty iterable, a missing target, another structure than "full".
        """
        subset = changes.pop("subset", self.subset)
        config = replace(self.config, **changes)
        if config.structure != "full":
            raise ValueError(
                'AutoLastLayer has structure="full" alone: use AutoLaplaceGGN with '
                f'subset="last-layer" for structure="{config.structure}"'
            )
        batches = Batches(data)
        args, kwargs = batches.first()
        self.prototype(*args, **kwargs)
        return LastLayerGuide(self, config, subset, batches, progress=progress)

    def maximize_evidence(
        self, data: Any, *, rounds: int = _ROUNDS, tolerance: float = 1e-4, progress: bool = False
    ) -> "LastLayerGuide":
        """Set the program's ``PyroParam``s to the maximum of the last layer's evidence.

        ``evidence.maximize_last_layer`` says how. A scale that other layers share is set by the
        last layer alone.

        :param data: as in ``laplace_approximation``.
        :param rounds: at most so many turns.
        :param tolerance: ends when no hyperparameter changes by more than this fraction.
        :returns: the posterior at the hyperparameters found.
        :raises ValueError: where the program has no such parameters.
        """
        from pyro_bdl import evidence

        guide = self.laplace_approximation(data, progress=progress)
        evidence.maximize_last_layer(guide, rounds=rounds, tolerance=tolerance)
        return guide

    def layer(self, *args: Any, **kwargs: Any) -> Any:
        """The selection of latents (``subset``) that is the last layer.

        The result is the sites' names where the program is searched for them.

        :param args: the program's arguments.
        """
        if not (isinstance(self.subset, str) and self.subset == "last-layer"):
            return self.subset
        model, layout = self.program_model, self.require_layout()
        return last_layer(model, layout, self.location().detach(), args, kwargs)

    @torch.no_grad()
    def solve(self, data: Any) -> "AutoLastLayer":
        """Put the guide's own last layer at the mode given the features; returns itself.

        :param data: as in ``laplace_approximation``.
        """
        self.loc.copy_(self.laplace_approximation(data).loc)
        return self


class LastLayerGuide(LaplaceGuide):
    """N(m, C) over the last layer, around the exact mode m given the features.

    ``AutoLastLayer.laplace_approximation`` makes it. Where the likelihood is quadratic in the last
    layer (Normal observations), ``refresh()``, and with it ``evidence.maximize``, moves m along
    with the hyperparameters, without another pass over the data; otherwise ``find_mode()`` does,
    with passes. ``update(data)`` moves it, too.
    """

    score: Tensor
    prior_gradient: Tensor
    quadratic: bool
    curvature: FullCurvature
    loc: Tensor
    log_likelihood: Tensor
    squares: Tensor

    def __init__(
        self,
        source: Guide,
        config: CurvatureConfig,
        selection: Any,
        batches: Batches,
        *,
        progress: bool = False,
    ) -> None:
        self.__dict__["quadratic"] = False
        super().__init__(source, config, selection, batches, check=False, progress=progress)
        model = self.program_model
        _check_used_once(model, self.subset, self.loc, *self.few)
        quadratic = config.curvature in ("ggn", "hessian")
        quadratic = quadratic and is_quadratic(model, self.subset, self.loc, *batches.first())
        self.find_mode(steps=1 if quadratic else _STEPS, progress=progress)
        self.__dict__["quadratic"] = quadratic
        if quadratic:
            self.refresh()  # what rounding has left

    def _fit(self, batches: Batches, before: Any, progress: bool) -> Tensor:
        earlier = None if before is None else self.score
        gradient = super()._fit(batches, before, progress)
        score = gradient - self.prior_gradient  # of the tempered log likelihood
        self.register_buffer("score", score if earlier is None else score + earlier)
        return self.score + self.prior_gradient

    def follow(self, reading: ParameterReading) -> Tensor:
        """Follow the program's present hyperparameters, with the mode where it is known how."""
        self.register_buffer("prior_gradient", super().follow(reading))
        if self.quadratic:
            with torch.no_grad():
                self._shift(self.precision.solve(self._gradient()).to(self.loc))
            self.register_buffer("prior_gradient", super().follow(self._read()))
        return self.prior_gradient

    def _gradient(self) -> Tensor:
        """The gradient of the log joint density at the present hyperparameters, (p,)."""
        return self.noise_factor.to(self.score) * self.score + self.prior_gradient

    def _shift(self, step: Tensor) -> None:
        """Move by ``step`` (p,), with what is known of a quadratic log likelihood."""
        bend = self.curvature.matrix @ step.to(self.curvature.matrix)
        gain = (step.double() * (self.score.double() - 0.5 * bend.double())).sum()
        self.log_likelihood = self.log_likelihood + gain
        self.squares = self.squares - 2.0 * gain
        self.score = self.score - bend.to(self.score)
        self.loc = self.subset.put(self.loc, self.subset.take(self.loc) + step)

    def update(self, data: Any, *, progress: bool = False) -> "LastLayerGuide":
        """Add more data, and move to the mode given all; returns itself.

        :param data: as in ``laplace_approximation``.
        :raises ValueError: where the noise of a Normal observation is not what it was in the fit.
        """
        quadratic = self.quadratic
        self.__dict__["quadratic"] = False
        try:
            super().update(data, progress=progress)
        finally:
            self.__dict__["quadratic"] = quadratic
        if quadratic:
            self.refresh()
        else:
            self.find_mode(progress=progress)
        return self

    @torch.no_grad()
    def find_mode(self, *, steps: int = _STEPS, progress: bool = False) -> None:
        """Newton steps with the guide's own precision to the maximum of log p(y, W), halved where
        they do not gain; a pass over the data for each.

        One is exact for a quadratic, a few are for classes and rates, whose Gauss-Newton matrix is
        the Hessian; others (StudentT, noise that depends on x) approach the mode more slowly.

        :param steps: at most so many; where several do not get there, a warning says so.
        :param progress: show a bar over batches, in every pass.
        """
        eps = torch.finfo(self.loc.dtype).eps
        before, value = float("inf"), self._log_joint(self.loc)
        for _ in range(steps):
            gradient = self._gradient()
            step = self.precision.solve(gradient.to(self.prior_diagonal)).to(self.loc)
            gain = 0.5 * float((step.double() * gradient.double()).sum())
            rounding = 1e3 * eps * max(1.0, abs(value))
            is_slow = gain > 0.1 * before  # not of second order
            if gain <= eps**1.25 or (gain < rounding and (is_slow)):
                return
            if gain > rounding:  # else values cannot tell
                step, value = self._halved(step, value)
            self.loc = self.subset.put(self.loc, self.subset.take(self.loc) + step)
            self._fit_again(progress)
            before = gain
        if steps > 1:
            warnings.warn(
                f"the mode of the last layer was not reached in {steps} steps: the last one gained "
                f"{gain:.3g} nats",
                BdlWarning,
                stacklevel=2,
            )

    def _halved(self, step: Tensor, value: float) -> tuple[Tensor, float]:
        """The longest of the step, its half, ... that gains, and the value there."""
        start = self.subset.take(self.loc)
        for _ in range(_HALVINGS):
            moved = self._log_joint(self.subset.put(self.loc, start + step))
            if moved > value:
                return step, moved
            step = 0.5 * step
        return step, value

    def _fit_again(self, progress: bool) -> None:
        passes, curvature = self.passes, None
        for batches, _ in passes:
            self._fit(batches, curvature, progress)
            curvature = self.curvature

    def _log_joint(self, vector: Tensor) -> float:
        """The tempered log p(y, w) + log |det dw/du| at a vector (P,)."""
        model = self.program_model
        latents, log_det = self.require_layout().constrain(vector)
        with evaluation_mode(model), preserved_buffers(model):
            run = record(model, latents, *self.few, draw=leave_open)
            total = torch.as_tensor(run.log_prior() + log_det, device=vector.device).double()
            for batches, factor in self.passes:
                part = torch.zeros_like(total)
                for args, kwargs in batches.part():
                    run = record(model, latents, args, kwargs)
                    for site in (*run.observed.values(), *run.factors.values()):
                        part = part + (site.log_prob() / site.subsampling).sum().double()
                batches.add_up(part)
                total = total + factor * part
        return float(total)

    def _shared_on_copy(self) -> tuple[str, ...]:
        return (*super()._shared_on_copy(), "quadratic")


def _check_used_once(
    model: Callable, subset: Subset, vector: Tensor, args: tuple, kwargs: Any
) -> None:
    """Check that every weight of the layer enters one operation.

    :raises UnsupportedProgramError: where weights enter several operations.
    """
    at = Linearization(model, subset, vector, args, kwargs)
    for name in subset.parts:
        count = sum(use.site == name for use in at.uses) + (name in at.unmatched)
        if count > 1:
            raise UnsupportedProgramError(
                f"the last layer's weights '{name}' are used more than once in the program (tied "
                "weights?), so that it is no linear model of them: use AutoLaplaceGGN(model, "
                'subset="last-layer")'
            )


@torch.no_grad()
def is_quadratic(model: Callable, subset: Subset, vector: Tensor, args: tuple, kwargs: Any) -> bool:
    """Return whether log p(y, W) is a quadratic function of the subset W.

    It is where all observations are Normal, with locations affine in W and constant scales, and the
    priors of W are Normal. Three points in a line tell.
    """
    start, layout = subset.take(vector), subset.layout
    direction = fixed_normal(start) * (1.0 + start.abs().mean())
    likelihoods, prior_parameters = [], []
    for length in (-1.0, 0.0, 1.0):
        latents = layout.constrain(subset.put(vector, start + length * direction))[0]
        with evaluation_mode(model), preserved_buffers(model):
            run = record(model, latents, args, kwargs, draw=leave_open)
        observed, prior = (
            [base_distribution(site.distribution) for site in sites]
            for sites in (run.observed.values(), [run.latents[name] for name in subset.parts])
        )
        transformed = any(layout.latents[name].transform is not None for name in subset.parts)
        if run.factors or transformed or not all(map(_is_normal, observed + prior)):
            return False
        likelihoods.append([parameters_of(base) for base in observed])
        prior_parameters.append([value for base in prior for value in parameters_of(base).values()])
    if not all(map(torch.equal, prior_parameters[0], prior_parameters[2])):
        return False
    tolerance = 1e3 * torch.finfo(vector.dtype).eps
    for left, middle, right in zip(*likelihoods, strict=True):
        size = float(left["loc"].abs().max() + right["loc"].abs().max())
        second = left["loc"] + right["loc"] - 2.0 * middle["loc"]
        same = torch.equal(left["scale"], right["scale"])
        if not same or float(second.abs().max()) > tolerance * size:
            return False
    return True


def _is_normal(distribution: Any) -> bool:
    return type(distribution).__name__ == "Normal"
