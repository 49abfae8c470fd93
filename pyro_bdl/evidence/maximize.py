"""Hyperparameters that maximize the evidence of a Laplace approximation."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.hyperparameters import (
    Hyperparameter,
    ParameterReading,
    followed,
    group_sum,
    noise_owner,
    owners,
    prior_locations,
    restored_on_error,
)
from pyro_bdl.curvature.prior import hyperpriors
from pyro_bdl.errors import BdlWarning
from pyro_bdl.evidence.formula import SMALLEST, EvidenceFormula
from pyro_bdl.evidence.linearized import LinearizedModel, LinearizedPoint
from pyro_bdl.evidence.marginal import effective_parameters, read_guide, terms
from pyro_bdl.evidence.shared_scales import warn_of_shared_scales
from pyro_bdl.guides.laplace import LaplaceGuide
from pyro_bdl.program.unconstrained_parameters import are_known
from pyro_bdl.utils.progress import shown

METHODS = ("mackay", "gradient")
CURVATURES_AT = ("weights", "optimum")

_ROUNDING = 1e-4  # of the log evidence
_NEWTON_STEPS = 5  # to the linearized model's optimum, after each change of hyperparameters


@dataclass
class EvaluatedEvidence:
    """The evidence at its maximum, evaluated at one point.

    :param log_evidence: log p(y), in nats.
    :param gamma: the effective number of parameters.
    :param hyperparameters: name -> value.
    """

    log_evidence: float
    gamma: float
    hyperparameters: dict[str, Tensor]


@dataclass
class Evidence(EvaluatedEvidence):
    """The result of a maximization; ``print`` shows both evaluations side by side.

    :param history: log p(y) after every step, or every tenth step.
    :param at_weights: the maximum where the evidence is evaluated at the trained weights.
    :param at_optimum: the maximum where it is evaluated at the optimum of the linearized model,
        which the program's hyperparameters were set to; None where it was not asked for, or where
        the observations cannot be linearized.
    :param gap: how far the log joint density of the linearized model is from its maximum, about,
        in nats.
    """

    history: list[float] = field(default_factory=list)
    at_weights: EvaluatedEvidence | None = None
    at_optimum: EvaluatedEvidence | None = None
    gap: float | None = None

    def __str__(self) -> str:
        columns = {"trained weights": self.at_weights, "linear optimum": self.at_optimum}
        known = {name: found for name, found in columns.items() if found is not None}
        known = known or {"": self}
        rows: dict[str, list[str]] = {
            "log evidence": [f"{found.log_evidence:.6g}" for found in known.values()],
            "gamma": [f"{found.gamma:.4g}" for found in known.values()],
        }
        for name in self.hyperparameters:
            rows[name] = [_shown(found.hyperparameters.get(name)) for found in known.values()]
        lines = [["", *known], *([name, *values] for name, values in rows.items())]
        widths = [max(len(line[i]) for line in lines) for i in range(len(known) + 1)]
        return "\n".join(
            "  ".join(
                text.ljust(width) if i == 0 else text.rjust(width)
                for i, (text, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )


def _shown(value: Tensor | None) -> str:
    if value is None:
        return ""
    if value.numel() == 1:
        return f"{float(value):.4g}"
    return f"{float(value.min()):.3g} to {float(value.max()):.3g}"


def maximize(
    guide: LaplaceGuide,
    *,
    method: str = "mackay",
    steps: int = 100,
    learning_rate: float = 0.1,
    tolerance: float = 1e-4,
    linearized: bool | None = None,
    curvature_at: str = "weights",
    progress: bool | None = None,
) -> Evidence:
    """Set the program's hyperparameters to the maximum of the evidence, with the MAP fixed.

    "mackay" iterates a fixed point for every positive ``PyroParam`` theta that scales Normal
    priors, s_i = c_i theta, and for one that scales the noise of a Normal observation:

        theta^2 = sum_i (w_i / c_i)^2 / gamma,  gamma = sum_i (1 - C_ii / s_i^2)
        noise^2 = sum of squared residuals / (N - gamma of all latents)

    (MacKay 1992, section 3; alpha = gamma / w'w, beta = (N - gamma) / residuals). "gradient"
    ascends the log evidence by Adam in all parameters of the priors and of a Normal's noise. The
    fixed point fails if gamma is not below N, which is possible if the curvature is not the full
    Gauss-Newton matrix of all latents (such as "kron"), or if the evidence falls below its initial
    value. Then a warning is given, and gradient ascent takes the remaining steps, or as many again.

    Where a hyperparameter has a prior of its own (``priors.Hyperprior``, or a ``pyro.factor`` that
    depends on parameters alone), its log density, in the hyperparameter itself, joins the evidence
    (type-II MAP), and the ascent is by gradients.

    w and the residuals are those of the linearized model at its optimum under the present
    hyperparameters, where its evidence is right, and not those of weights whose training may have
    stopped early (Antoran et al. 2022, recommendation 1). In linear regression its fixed point is
    the maximum of the exact evidence.

    The parameters change in place, and the guide follows. Retrain the MAP afterwards, or use
    ``MarginalLikelihoodTraining``, which alternates.

    A scale that the weights before normalization layers share with others is warned of, once for a
    program: see ``priors.PerNormalizedGroup``.

    :param guide: a guide of ``laplace_approximation``.
    :param method: "mackay" or "gradient".
    :param steps: the largest number of steps.
    :param learning_rate: learning rate of gradient ascent, in unconstrained units.
    :param tolerance: "mackay" stops when no parameter changes by more than this fraction.
    :param linearized: evaluate at the optimum of the linearized model, which is computed again at
        every step; False: at the trained weights. By default where the program's observations can
        be linearized; the result then holds both maxima.
    :param curvature_at: "optimum" computes the curvature anew, at every step, from the outputs at
        the optimum: the linearized model's own Hessian; for Normal observations nothing changes.
    :param progress: show a bar over the steps; by default in terminals and notebooks.
    :raises ValueError: for an unknown method, or a program without hyperparameters.
    :raises NotImplementedError: with ``linearized=True``, for observations that are not made of
        tensors.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r} (there are {', '.join(METHODS)})")
    if curvature_at not in CURVATURES_AT:
        raise ValueError(
            f"unknown curvature_at {curvature_at!r} (there are {', '.join(CURVATURES_AT)})"
        )
    reading = read_guide(guide)
    if not followed(reading):
        if reading.in_likelihood:
            raise ValueError(
                f"the evidence cannot tune '{reading.in_likelihood[0]}', which the likelihood "
                "depends on otherwise than by one number of noise: give all targets one noise "
                "parameter, or train it by SVI"
            )
        raise ValueError(
            "the priors and the noise have no PyroParam to tune: make a prior's scale one, as in "
            "priors.Normal(PyroParam(torch.tensor(1.0), constraint=constraints.positive)), or, "
            "with a prior of its own, priors.Normal(priors.Hyperprior(LogNormal(0.0, 1.0)))"
        )
    warn_of_shared_scales(guide, guide.subset, reading, guide.passes[0][0].first(), stacklevel=2)
    if linearized is None:
        linearized = are_known(reading.run.observed.values())
    if hyperpriors(reading.run, reading.leaves):
        method = "gradient"  # the fixed point knows no hyperpriors
    search = _Search(guide, method, steps, learning_rate, tolerance, progress)
    with restored_on_error(reading.parameters, guide.refresh):
        if not linearized:
            found = search.run(None, reading)
            found.at_weights = found
            return found
        start = hyperparameters(guide)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BdlWarning)  # these are not what is kept
            weights = search.run(None)
        _put(guide, start)
        optimum = _Optimum(guide, anew=curvature_at == "optimum")
        found = search.run(optimum)
    assert optimum.point is not None
    optimum.point.warn(stacklevel=2)
    found.at_weights, found.at_optimum, found.gap = weights, found, optimum.point.gap
    return found


def hyperparameters(guide: LaplaceGuide) -> dict[str, Tensor]:
    """The current values of the hyperparameters that the evidence can set, by name."""
    found = followed(read_guide(guide))
    return {name: parameter.value.detach().clone() for name, parameter in found.items()}


def _put(guide: LaplaceGuide, values: dict[str, Tensor]) -> None:
    for name, parameter in followed(read_guide(guide)).items():
        parameter.set(values[name])
    guide.refresh()


class _Optimum:
    """The optimum of a guide's linearized model, which follows the hyperparameters.

    :param anew: compute the guide's curvature from the outputs there.
    """

    def __init__(self, guide: LaplaceGuide, *, anew: bool) -> None:
        self.guide, self.anew = guide, anew
        self.model = LinearizedModel(guide)
        self.point: LinearizedPoint | None = None

    def found(self, *, last: bool = False) -> LinearizedPoint:
        """The optimum at the present hyperparameters; the search starts at the previous one.

        :param last: go all the way; else a few steps, since the hyperparameters move on.
        """
        if self.model.stale:
            if self.guide.loc is not self.model.loc:
                self.point = None
            self.model = LinearizedModel(self.guide)
        start = None if self.point is None else self.point.offset
        steps = {} if last else {"steps": _NEWTON_STEPS}
        self.point = self.model.optimum(start, **steps)
        if self.anew:
            self.guide.move_curvature(self.point.offset)
        return self.point


@dataclass
class _Search:
    guide: LaplaceGuide
    method: str
    steps: int
    learning_rate: float
    tolerance: float
    progress: bool | None = None

    def run(self, optimum: _Optimum | None, reading: ParameterReading | None = None) -> Evidence:
        """Maximize, evaluating at the optimum of the linearized model, or at the weights.

        :param reading: of the guide's program, where one is at hand.
        """
        guide, reading = self.guide, reading or read_guide(self.guide)
        formula = EvidenceFormula.of(guide, reading)
        history: list[float] = []
        left = self.steps
        if self.method == "mackay" or optimum:
            guide.follow(reading)
        if self.method == "mackay":
            history, left = self._fixed_point(reading, optimum, formula)
        if left:
            history += self._ascend(reading, left, optimum, formula)
        self._follow(reading, formula)
        point = optimum.found(last=True) if optimum else None
        value = self._value(reading, point, formula)
        found = {name: p.now().detach() for name, p in followed(reading).items()}
        return Evidence(value, float(effective_parameters(guide)), found, history)

    def _counted(self, steps: int) -> Iterable[int]:
        return shown(range(steps), "evidence, at most", self.progress)

    def _follow(self, reading: ParameterReading, formula: EvidenceFormula | None) -> None:
        """Adapt the guide to the present values of the hyperparameters."""
        if formula is None:
            self.guide.refresh()
        else:
            formula.follow({name: p.now() for name, p in followed(reading).items()})

    @torch.enable_grad()
    def _value(
        self,
        reading: ParameterReading,
        point: LinearizedPoint | None,
        formula: EvidenceFormula | None,
    ) -> float:
        """The log evidence at the present values of the hyperparameters."""
        if formula is None:
            return terms(self.guide, read_guide(self.guide), point=point).total().item()
        now = {name: p.now() for name, p in followed(reading).items()}
        return formula.terms(now, point).total().item()

    def _fixed_point(
        self,
        reading: ParameterReading,
        optimum: _Optimum | None,
        formula: EvidenceFormula | None,
    ) -> tuple[list[float], int]:
        """The history, and how many steps are left to gradient ascent where it fails."""
        guide, start = self.guide, reading
        history: list[float] = []
        best: tuple[float, dict[str, Tensor]] | None = None
        for step in self._counted(self.steps):
            point = optimum.found() if optimum else None
            now = {name: p.now().detach() for name, p in followed(start).items()}
            if best is None:
                best = self._value(start, point, formula), now
            found = None if formula is None else formula.fixed_point(now, point)
            if found is not None:
                changes = [(p, found[name]) for name, p in followed(start).items()]
            else:
                reading = read_guide(guide) if step else start
                changes = mackay_update(guide, reading, point)
            if not changes:
                raise ValueError(
                    "no hyperparameter of the program is the scale of Normal priors or of a Normal "
                    'observation: use method="gradient"'
                )
            noise = None if found else noise_owner(reading, guide.subset)
            if noise is not None and not any(noise[0].name == p.name for p, _ in changes):
                return history, self.steps - step  # mackay_update has said so
            largest = 0.0
            for parameter, value in changes:
                largest = max(largest, float((value / now[parameter.name]).log().abs().max()))
                parameter.set(value)
            self._follow(start, formula)
            if point is not None or step % 10 == 0 or largest < self.tolerance:
                history.append(self._value(start, point, formula))
            if largest < self.tolerance:
                break
        reached = self._value(start, optimum.found() if optimum else None, formula)
        if best is None or reached >= best[0] - _ROUNDING * max(1.0, abs(best[0])):
            return history, 0
        warnings.warn(
            f"the fixed point has taken the log evidence from {best[0]:.6g} to {reached:.6g}: "
            "gradient ascent continues from where it started",
            BdlWarning,
            stacklevel=4,
        )
        _put(guide, best[1])
        return history, self.steps

    def _ascend(
        self,
        reading: ParameterReading,
        steps: int,
        optimum: _Optimum | None,
        formula: EvidenceFormula | None,
    ) -> list[float]:
        guide = self.guide
        tuned = followed(reading)
        leaves = [parameter.leaf for parameter in tuned.values()]
        gradients = [leaf.grad for leaf in leaves]
        optimizer = torch.optim.Adam(leaves, lr=self.learning_rate)
        history: list[float] = []
        best: tuple[float, list[Tensor]] | None = None
        try:
            for _ in self._counted(steps):
                point = optimum.found() if optimum else None
                with torch.enable_grad():
                    if formula is None:
                        value = terms(guide, read_guide(guide), point=point).total()
                    else:
                        now = {name: parameter.now() for name, parameter in tuned.items()}
                        value = formula.terms(now, point).total()
                found: Any = torch.autograd.grad(-value, leaves, allow_unused=True)
                history.append(value.item())
                if best is None or history[-1] > best[0]:
                    best = history[-1], [leaf.detach().clone() for leaf in leaves]
                for leaf, gradient in zip(leaves, found, strict=True):
                    leaf.grad = gradient
                optimizer.step()
                if optimum:
                    guide.refresh()
        finally:
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf.grad = gradient
        if best is not None:
            with torch.no_grad():
                for leaf, value in zip(leaves, best[1], strict=True):
                    leaf.copy_(value)
        return history


@torch.enable_grad()
def mackay_update(
    guide: LaplaceGuide, reading: ParameterReading, point: LinearizedPoint | None = None
) -> list[tuple[Hyperparameter, Tensor]]:
    """One step of the fixed point: new values for the hyperparameters that it covers."""
    subset = guide.subset
    vector = subset.take(guide.loc)
    if point is not None:
        vector = vector + point.offset.to(vector)
    variances = guide.precision.variances().to(vector)
    changes: list[tuple[Hyperparameter, Tensor]] = []
    for name, sites in owners(reading, subset).items():
        parameter = reading.parameters[name]
        gamma, squares = torch.zeros_like(parameter.value), torch.zeros_like(parameter.value)
        for site, scale in sites:
            part = subset.parts[site]
            weights = vector[part] - prior_locations(reading, subset, site)
            precision = scale.detach().square().reciprocal()
            gamma += group_sum(scale, 1.0 - variances[part] * precision, parameter)
            squares += group_sum(scale, weights.square() * precision, parameter)
        ratio = squares.clamp(min=SMALLEST) / gamma.clamp(min=SMALLEST)
        changes.append((parameter, parameter.value.detach() * ratio.detach().sqrt()))
    noise = noise_owner(reading, subset)
    if noise is not None:
        parameter, _ = noise
        gamma = effective_parameters(guide)
        free = guide.cells - gamma
        if free <= 0:
            warnings.warn(
                f"the effective number of parameters ({float(gamma):.1f}) is not below the number "
                f"of observations ({float(guide.cells):.0f}): the noise has no fixed point there",
                BdlWarning,
                stacklevel=4,
            )
        else:
            squares = (guide if point is None else point).squares
            factor = guide.noise_factor
            ratio = (squares * factor / free).clamp(min=SMALLEST).sqrt()
            changes.append((parameter, (parameter.value * ratio.to(parameter.value)).detach()))
    return changes
