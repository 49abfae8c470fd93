"""Bayesian regression on the last hidden layer, with features trained by MAP."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.curvature.jacobian.linearization import Linearization
from pyro_bdl.curvature.prior import PriorPrecision
from pyro_bdl.curvature.structures.full import FullCurvature
from pyro_bdl.distributions.take_apart import base_distribution, parameters_of
from pyro_bdl.errors import BdlWarning, UnsupportedProgramError
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.laplace import AutoLaplaceGGN, LaplaceGuide, last_layer
from pyro_bdl.init import init_to_network
from pyro_bdl.program.batches import Batch, Batches
from pyro_bdl.program.subset import Subset
from pyro_bdl.program.trace import leave_open, record, sum_out_discrete
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.random_state import fixed_normal

_STEPS = 100
_HALVINGS = 30


class AutoLastLayer(AutoLaplaceGGN):
    """A guide that trains the MAP, and then finds the last layer's posterior given the features.

    Let phi(x) be the input of the last layer and W its weights and biases. If everything before the
    last layer is fixed, a program with Normal observations and priors is Bayesian linear
    regression:

        p(W | y) = N(m, C),  C^-1 = sum_n phi_n phi_n' / noise^2 + prior precision,
        m = C (sum_n phi_n y_n / noise^2 + prior precision prior mean)

    ``laplace_approximation(data)`` returns this posterior. It is exact, with its evidence and its
    predictive, even if training has not converged. For other observations it is a Gaussian at the
    mode of p(W | y), found by Newton steps, with the Gauss-Newton precision.

    The features are trained by MAP with SVI, or by maximizing the evidence, with W integrated out,
    with ``evidence.LastLayerEvidence`` (Ober & Rasmussen 2019, "neural linear").
    ``evidence.maximize`` sets the scales of priors and noise that are ``PyroParam``s, by the
    evidence of the last layer alone. Other latents, such as a noise scale with a prior, keep their
    trained values.

    :param model: a Pyro program with continuous latents.
    :param subset: the last layer, by default the weights and biases of the program's last matrix
        product; for other values see ``AutoLaplaceGGN``.
    :param init_loc_fn: see ``AutoLaplaceGGN``, which also explains ``create_plates``.
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

    def options(self) -> dict[str, Any]:
        return {"subset": self.subset}

    def laplace_approximation(
        self, data: Any, *, held_out: Any = None, progress: bool | None = None, **changes: Any
    ) -> "LastLayerGuide":
        """The posterior of the last layer given the features; this guide is not changed.

        :param data: the program's arguments ``(x, y)``, or an iterable of batches of them, with
            each datum once. Memory does not grow with the number of data.
        :param held_out: as in ``AutoLaplaceGGN.laplace_approximation``.
        :param progress: show a bar over batches, in every pass; by default in terminals and
            notebooks.
        :param changes: ``subset`` or ``curvature`` for this approximation alone.
        :raises MemoryError: if the matrix C^-1 cannot fit.
        :raises UnsupportedProgramError: if the program uses the last layer's weights more than
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
        posterior = LastLayerGuide(self, config, subset, batches, progress=progress)
        return posterior if held_out is None else posterior.fit_width(held_out)

    def layer(self, *args: Any, **kwargs: Any) -> Any:
        """The selection of latents (``subset``) that forms the last layer.

        If the program has to be searched for it, the result is a list of site names.

        :param args: the program's arguments.
        """
        if not (isinstance(self.subset, str) and self.subset == "last-layer"):
            return self.subset
        model, layout = self.program_model, self.require_layout()
        return last_layer(model, layout, self.location().detach(), args, kwargs)

    @torch.no_grad()
    def solve(self, data: Any) -> "AutoLastLayer":
        """Move the guide's last layer to its mode given the features; return the guide.

        :param data: as in ``laplace_approximation``.
        """
        self.loc.copy_(self.laplace_approximation(data).loc)
        return self


class LastLayerGuide(LaplaceGuide):
    """N(m, C) over the last layer, around the exact mode m given the features.

    ``AutoLastLayer.laplace_approximation`` makes it. If the log likelihood is quadratic in the last
    layer (Normal observations), ``refresh()`` and ``evidence.maximize`` move m to the mode for the
    current hyperparameters without a pass over the data. Otherwise ``find_mode()`` does it, with
    passes over the data. ``update(data)`` moves m, too.
    """

    score: Tensor
    prior_gradient: Tensor
    quadratic = False  # until the mode is found
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
        check: bool = True,
        progress: bool | None = None,
    ) -> None:
        super().__init__(source, config, selection, batches, check=False, progress=progress)
        if not check:  # a posterior from a file is at its mode
            return
        model = self.program_model
        _check_used_once(model, self.subset, self.loc, *self.few)
        quadratic = config.curvature in ("ggn", "hessian")
        quadratic = quadratic and is_quadratic(model, self.subset, self.loc, *batches.first())
        self.find_mode(steps=1 if quadratic else _STEPS, progress=progress)
        self.quadratic = quadratic
        if quadratic:
            self.refresh()  # remove the remaining rounding error

    def saved(self) -> dict[str, Any]:
        return {**super().saved(), "quadratic": self.quadratic}

    @classmethod
    def restored(cls, model: Callable, saved: Mapping[str, Any], batch: Batch) -> "LastLayerGuide":
        guide: Any = super().restored(model, saved, batch)
        guide.quadratic = saved["quadratic"]
        return guide

    def _fit(self, batches: Batches, before: Any, progress: bool | None) -> Tensor:
        earlier = None if before is None else self.score
        gradient = super()._fit(batches, before, progress)
        score = gradient - self.prior_gradient  # gradient of the tempered log likelihood
        self.register_buffer("score", score if earlier is None else score + earlier)
        return self.score + self.prior_gradient

    def adapt(self, prior: PriorPrecision, slope: Tensor, noise_factor: Tensor | None) -> Tensor:
        """Adapt to another prior and noise; for a quadratic likelihood move to the mode."""
        self.register_buffer("prior_gradient", super().adapt(prior, slope, noise_factor))
        if self.quadratic:
            with torch.no_grad():
                self._shift(self.newton_step(self._gradient()))
            self.register_buffer("prior_gradient", super().adapt(*self._prior_of(self.read())))
        return self.prior_gradient

    def _gradient(self) -> Tensor:
        """The gradient of the log joint density at the current hyperparameters, (p,)."""
        return self.noise_factor.to(self.score) * self.score + self.prior_gradient

    def _shift(self, step: Tensor) -> None:
        """Move by ``step`` (p,) and update the stored quadratic log likelihood."""
        bend = self.curvature.matrix @ step.to(self.curvature.matrix)
        gain = (step.double() * (self.score.double() - 0.5 * bend.double())).sum()
        self.log_likelihood = self.log_likelihood + gain
        self.squares = self.squares - 2.0 * gain
        self.score = self.score - bend.to(self.score)
        self.loc = self.subset.put(self.loc, self.subset.take(self.loc) + step)

    def update(self, data: Any, *, progress: bool | None = None) -> "LastLayerGuide":
        """Add more data, and move to the mode given all data; return the guide.

        :param data: as in ``laplace_approximation``.
        :raises ValueError: if the noise of a Normal observation has changed since the fit.
        """
        quadratic = self.quadratic
        self.quadratic = False
        try:
            super().update(data, progress=progress)
        finally:
            self.quadratic = quadratic
        if quadratic:
            self.refresh()
        else:
            self.find_mode(progress=progress)
        return self

    @torch.no_grad()
    def find_mode(self, *, steps: int = _STEPS, progress: bool | None = None) -> None:
        """Move to the maximum of log p(y, W) by Newton steps with the guide's precision.

        Each step takes a pass over the data; a step that does not increase the density is halved.
        One step is enough for a quadratic log density. Classes and rates, whose Gauss-Newton matrix
        is the Hessian, need a few steps; others (StudentT, noise that depends on x) converge more
        slowly.

        :param steps: the largest number of steps; a warning says if they do not suffice.
        :param progress: show a bar over batches, in every pass; by default in terminals and
            notebooks.
        """
        eps = torch.finfo(self.loc.dtype).eps
        before, value = float("inf"), self._log_joint(self.loc)
        for _ in range(steps):
            gradient = self._gradient()
            step = self.newton_step(gradient)
            gain = 0.5 * float((step.double() * gradient.double()).sum())
            rounding = 1e3 * eps * max(1.0, abs(value))
            is_slow = gain > 0.1 * before  # slower than quadratic convergence
            if gain <= eps**1.25 or (gain < rounding and (is_slow)):
                return
            if gain > rounding:  # a smaller gain is lost in rounding
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
        """The longest of the step, its half, its quarter, ... that increases the density; its value
        there."""
        start = self.subset.take(self.loc)
        for _ in range(_HALVINGS):
            moved = self._log_joint(self.subset.put(self.loc, start + step))
            if moved > value:
                return step, moved
            step = 0.5 * step
        return step, value

    def _fit_again(self, progress: bool | None) -> None:
        passes, curvature = self.passes, None
        for batches, _ in passes:
            self._fit(batches, curvature, progress)
            curvature = self.curvature

    def _log_joint(self, vector: Tensor) -> float:
        """The tempered log p(y, w) + log |det dw/du| in nats at a vector (P,)."""
        model = self.program_model
        latents, log_det = self.require_layout().constrain(vector)
        with evaluation_mode(model):
            run = record(model, latents, *self.few, draw=leave_open)
            total = torch.as_tensor(run.log_prior() + log_det, device=vector.device).double()
            for batches, factor in self.passes:
                part = torch.zeros_like(total)
                for args, kwargs in batches.part():
                    run = record(model, latents, args, kwargs, draw=sum_out_discrete)
                    for site in (*run.observed.values(), *run.factors.values()):
                        part = part + site.batch_log_prob().double()
                batches.add_up(part)
                total = total + factor * part
        return float(total)


def _check_used_once(
    model: Callable, subset: Subset, vector: Tensor, args: tuple, kwargs: Any
) -> None:
    """Check that every weight of the layer enters one operation, each network of a plate its own.

    :raises UnsupportedProgramError: if weights enter several operations.
    """
    at = Linearization(model, subset, vector, args, kwargs)
    for name in subset.parts:
        size = subset.layout.latents[name].shape.numel()
        count = vector.new_full((size,), float(name in at.unmatched))
        for use in at.uses:
            if use.site == name:
                own = slice(None) if use.indices is None else use.indices[use.indices >= 0].unique()
                count[own] += 1
        if bool((count > 1).any()):
            raise UnsupportedProgramError(
                f"the last layer's weights '{name}' are used more than once in the program (tied "
                "weights?), so that it is no linear model of them: use "
                'AutoLaplaceGGN(model, subset="last-layer")'
            )


@torch.no_grad()
def is_quadratic(model: Callable, subset: Subset, vector: Tensor, args: tuple, kwargs: Any) -> bool:
    """Return whether log p(y, W) is a quadratic function of the subset W.

    It is quadratic if all observations are Normal with locations affine in W and constant scales,
    and the priors of W are Normal. Locations and scales are compared at three points on a line.
    """
    start, layout = subset.take(vector), subset.layout
    direction = fixed_normal(start) * (1.0 + start.abs().mean())
    likelihoods, prior_parameters = [], []
    for length in (-1.0, 0.0, 1.0):
        latents = layout.constrain(subset.put(vector, start + length * direction))[0]
        with evaluation_mode(model):
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
